#!/usr/bin/env python3
"""The ways to generate over a FixedContext on a GPU. Not part of ctest: it wants a GPU and transformers.

  tests/gpu/transformers_context.py [MODEL TYPE of tests/python/architectures.py]

In float32 all tokens must be those of the whole context, for each question alone, with padding on the left, and from a
static cache that is compiled to CUDA graphs, over two contexts in turn. A sparse session must read what the CPU's does.
"""
import pathlib
import sys
import tempfile

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
import architectures as a
import sqz
import sqz.transformers

DEVICE = "cuda"


def main():
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, sqz {sqz.__version__}, "
          f"{torch.cuda.get_device_name()}")
    model = a.make(sys.argv[1] if len(sys.argv) > 1 else "llama", 0, width=256).to(DEVICE)
    torch.manual_seed(2)
    contexts = [torch.randint(3, 320, (1, tokens)).to(DEVICE) for tokens in (900, 600)]
    questions = torch.randint(3, 320, (a.QUESTIONS, a.TOKENS)).to(DEVICE)
    expected = [a.whole_answers(model, context, questions) for context in contexts]
    padded = torch.nn.functional.pad(questions, (5, 0))
    mask = (torch.arange(padded.shape[1], device=DEVICE) >= 5).long().expand_as(padded)
    right = True
    with tempfile.TemporaryDirectory() as folder:
        indexes = [sqz.build(model, None, context, f"{folder}/{place}.sqz", rows="f16", sink=4, tail=30)
                   for place, context in enumerate(contexts)]
        for place in (0, 1, 0):
            with sqz.transformers.FixedContext(model, indexes[place], selector="dense"):
                found = {"alone": [a.ask(model, question[None])[0] for question in questions],
                         "padded": a.ask(model, padded, attention_mask=mask),
                         "static cache": a.ask(model, questions, cache_implementation="static")}
            same = {way: a.count_equal(answers, *expected[place]) for way, answers in found.items()}
            right = right and set(same.values()) == {a.QUESTIONS}
            print(f"context {place}: of {a.QUESTIONS} answers equal {same}", flush=True)
        answers, kept = [], []
        for device in (DEVICE, "cpu"):
            with sqz.transformers.FixedContext(model.to(device), indexes[0], budget=0.5) as fixed:
                answers.append(a.ask(model, questions.to(device)))
                kept.append(fixed.stats().delivered_keep)
    same = sum(ours == theirs for ours, theirs in zip(*answers, strict=True))
    print(f"sparsely {same} of {a.QUESTIONS} answers as on the CPU, keys read {kept[0]:.3f}, {kept[1]:.3f}")
    right = right and same >= 0.8 * a.QUESTIONS and kept[0] < 0.6 and abs(kept[0] - kept[1]) < 0.02
    print("all passed" if right else "FAILED")
    return not right


if __name__ == "__main__":
    sys.exit(main())
