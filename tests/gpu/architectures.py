#!/usr/bin/env python3
"""The models of tests/python/architectures.py on a GPU. Not part of ctest: it wants a GPU and transformers.

  tests/gpu/architectures.py             all of them; or those that are named

In float32 all 24 tokens of ten answers must be those of the whole context, whose keys and values were rounded to
float16. In bfloat16 the equal ones are counted, and the logits of the prompt must be as near to float32's as those of
transformers are, times 1.5. Heads have 64 dimensions where the table has 16.
"""
import copy
import pathlib
import sys
import tempfile

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
import architectures as a
import sqz
import sqz.transformers


def logits_of(model, ids, context=None):
    """Of a prompt, in float32; behind a context if there is one."""
    whole = ids if context is None else torch.cat([context.expand(len(ids), -1), ids], 1)
    with torch.inference_mode():
        places = torch.arange(whole.shape[1], device=ids.device)[None]
        return model(whole, position_ids=places).logits[:, -ids.shape[1]:].float()


def run(name, tokens, dtype, folder):
    """A line of what was found, and whether it is right."""
    exact = a.make(name, a.CONTEXTS[tokens], width=256).to("cuda")
    model = copy.deepcopy(exact).to(dtype)
    torch.manual_seed(2)
    context, questions = (torch.randint(3, 320, shape).to("cuda") for shape in ((1, tokens), (a.QUESTIONS, a.TOKENS)))
    rows, stored = ("bf16", torch.bfloat16) if dtype == torch.bfloat16 else ("f16", torch.float16)
    index = sqz.build(model, None, context, f"{folder}/a.sqz", rows=rows, sink=4, tail=30, overwrite=True)
    expected, chosen = a.whole_answers(model, context, questions, stored)
    with a.plain_attention(exact, tokens, torch.float32):
        reference = logits_of(exact, questions, context)
    with a.plain_attention(model, tokens, stored):
        theirs = logits_of(model, questions, context)
    with sqz.transformers.FixedContext(model, index, selector="dense"):
        same = a.count_equal(a.ask(model, questions), expected, chosen)
        ours = logits_of(model, questions)
    # The median of the tokens: in bfloat16 a router that is near a tie gives a few of them to other experts.
    error, allowed = (((one - reference).norm(dim=-1) / reference.norm(dim=-1)).median() for one in (ours, theirs))
    right = same == a.QUESTIONS if dtype == torch.float32 else bool(error <= 1.5 * allowed)
    return right, f"{same} of {a.QUESTIONS} answers, logits off by {error:.1e}, transformers' by {allowed:.1e}"


def main():
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, sqz {sqz.__version__}, "
          f"{torch.cuda.get_device_name()}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or a.MODELS:
            for tokens in list(a.CONTEXTS)[:2 if a.windowed(name) else 1]:
                for dtype in (torch.float32, torch.bfloat16):
                    try:
                        right, note = run(name, tokens, dtype, folder)
                    except Exception as error:  # noqa: BLE001 - the others are run all the same
                        right, note = False, f"{type(error).__name__}: {error}"
                    print(f"{'ok    ' if right else 'FAILED'} {name}, {tokens} tokens, {dtype}: {note}", flush=True)
                    failed += [] if right else [f"{name} {tokens} {dtype}"]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
