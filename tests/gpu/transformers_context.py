#!/usr/bin/env python3
"""FixedContext on a GPU beside transformers over the whole context. Not part of ctest: it wants a GPU and transformers.

  tests/gpu/transformers_context.py --bin build/cuda/tools
  tests/gpu/transformers_context.py --bin build/cuda/tools --model DIR --text BOOK       a trained model, too

Small random models of several architectures in float32, float16 and bfloat16: capture on the GPU, index, dense sessions
in a batch, alone, with padding on the left, from a static cache compiled to CUDA graphs, two contexts in turn, sparse
sessions beside the CPU's, and what is refused. In float32 all tokens must be equal; in 16 bits the logits of the prompt
must be as near to the float32 model's as those of transformers are, times 1.5, and the equal tokens are counted.
"""
import argparse
import copy
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import sqz
import sqz.transformers

SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 16384,
         "initializer_range": 0.07, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
KINDS = ["llama", "qwen3", "gemma", "glm", "granite", "cohere", "olmo2", "phi3", "smollm3", "stablelm"]
failures = []


def report(name, passed, note=""):
    print(f"{'ok    ' if passed else 'FAILED'} {name}{': ' if note else ''}{note}", flush=True)
    if not passed:
        failures.append(name)


def answers(model, questions, **options):
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(questions),
               "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(questions, **options)[:, questions.shape[1]:].tolist()


def whole(model, context, questions, stored):
    """Tokens, and the prompt's logits, by transformers over the whole context, stored as in the index."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(context, past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            layer.keys, layer.values = (part.to(stored).to(part.dtype) for part in (layer.keys, layer.values))
        cache.batch_repeat_interleave(len(questions))
        logits = model(questions, past_key_values=copy.deepcopy(cache)).logits.float()
    return answers(model, torch.cat([context.expand(len(questions), -1), questions], 1), past_key_values=cache), logits


def build(args, model, context, name, stored):
    capture, index = args.work / f"{name}.h5", args.work / f"{name}.sqz"
    sqz.transformers.capture(model, context, capture, overwrite=True)
    subprocess.run([args.bin / "sqz-index", "build", "--capture", capture, "-o", index, "--force", "--rows",
                    "bf16" if stored == torch.bfloat16 else "f16"], check=True, stdout=subprocess.DEVNULL)
    return index


def case(args, name, model, context, questions, dtype):
    """Dense answers of one model in one type, and everything else for it."""
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    model = model.to("cuda", dtype)
    exact = copy.deepcopy(model).float()
    index = build(args, model, context, "one", stored)
    expected, logits = whole(model, context, questions, stored)
    _, reference = whole(exact, context, questions, stored)
    with sqz.transformers.FixedContext(model, index, selector="dense") as fixed, torch.inference_mode():
        found, ours = answers(model, questions), model(questions).logits.float()
        alone = [answers(model, question[None])[0] for question in questions]
        static = [answers(model, questions, cache_implementation="static") for _ in range(2)]
        padded = torch.cat([torch.zeros_like(questions[:, :5]), questions], 1)
        mask = (torch.arange(padded.shape[1], device="cuda") >= 5).long().expand_as(padded)
        left = answers(model, padded, attention_mask=mask)
        read = fixed.stats().delivered_budget
    error, allowed = (ours - reference).norm() / reference.norm(), 1.5 * (logits - reference).norm() / reference.norm()
    same = {what: sum(a == b for a, b in zip(tokens, expected)) for what, tokens in (
        ("batch", found), ("alone", alone), ("static cache", static[0]), ("again", static[1]), ("padded", left))}
    passed = read == 1 and (all(count == len(questions) for count in same.values()) if dtype == torch.float32 else
                            bool(error <= allowed))
    report(f"{name} {dtype}", passed, f"of {len(questions)} answers equal {same}; logits differ from float32 by "
           f"{error:.1e}, transformers' by {allowed / 1.5:.1e}")
    return model, index, expected


def sparse(args, model, index, questions):
    """The GPU's selection beside the CPU's, in float32."""
    cpu = copy.deepcopy(model).to("cpu")
    for options in ({"budget": 0.25}, {"budget": 0.25, "rule": "budget"}):
        tokens, kept = [], []
        for each in (model, cpu):
            with sqz.transformers.FixedContext(each, index, **options) as fixed:
                tokens.append([answers(each, question[None].to(each.device))[0] for question in questions])
                kept.append(fixed.stats().delivered_keep)
        same = sum(a == b for a, b in zip(*tokens))
        report(f"sparse, {options}", same >= 0.8 * len(questions) and kept[0] < 0.6 and abs(kept[0] - kept[1]) < 0.02,
               f"{same} of {len(questions)} answers as on the CPU, keys read {kept[0]:.3f}, {kept[1]:.3f}")


def in_turn(args, model, context, index, questions, expected):
    """Two contexts in turn, compiled: code of the one is never run for the other."""
    short = context[:, :4500]
    other = build(args, model, short, "two", torch.float16)
    wanted, _ = whole(model, short, questions, torch.float16)
    passed = wanted != expected
    for path, tokens in ((index, expected), (other, wanted), (index, expected)):
        with sqz.transformers.FixedContext(model, path, selector="dense"):
            passed = passed and answers(model, questions, cache_implementation="static") == tokens
    report("two contexts in turn, compiled", passed)


def refusals(args, model, index):
    def refused(name, sentence, model, path, **options):
        try:
            with sqz.transformers.FixedContext(model, path, **{"selector": "dense", **options}):
                report(name, False, "was not refused")
        except (ValueError, RuntimeError) as error:
            report(name, sentence in str(error), str(error))

    refused("wrong device", "expected cuda:0, the model's", model, index, device="cpu")
    config = AutoConfig.for_model("mistral", **{**SMALL, "sliding_window": None, "head_dim": 32})
    narrow = AutoModelForCausalLM.from_config(config).to("cuda").eval()
    refused("head_dim 32", "32", narrow,
            build(args, narrow, torch.arange(600, device="cuda")[None] % 500, "narrow", torch.float16))


def trained(args):
    """Ten questions to a trained model: all 24 tokens of each answer equal those over the whole context."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :args.tokens + 480]
    ids = ids.to(args.device)
    context, later = ids[:, :args.tokens], ids[0, args.tokens:]
    index = build(args, model, context, "trained", torch.float16)
    same = 0
    for question in later.view(10, 1, 48)[:, :, :12]:
        expected, _ = whole(model, context, question, torch.float16)
        with sqz.transformers.FixedContext(model, index, selector="dense"):
            same += answers(model, question) == expected
    report(f"{args.model} on {args.device}, {args.tokens} tokens", same == 10, f"{same} of 10 answers equal")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--model", help="a trained model's checkpoint")
    parser.add_argument("--text", type=pathlib.Path, help="its context")
    parser.add_argument("--tokens", type=int, default=8000, help="of that context")
    parser.add_argument("--device", default="cuda", help="of the trained model; without a GPU only that is run")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="model types of transformers")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, sqz {sqz.__version__}, "
          f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}")
    with tempfile.TemporaryDirectory() as folder:
        args.work = pathlib.Path(folder)
        if args.model:
            trained(args)
        for kind in args.kinds if torch.cuda.is_available() else ():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL)).eval()
            context, questions = torch.randint(3, 512, (1, 5000)).to("cuda"), torch.randint(3, 512, (10, 12)).to("cuda")
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                torch.compiler.reset()
                served, index, expected = case(args, kind, copy.deepcopy(model), context, questions, dtype)
            if kind == args.kinds[0]:
                sparse(args, served, index, questions)
                in_turn(args, served, context, index, questions, expected)
                refusals(args, served, index)
    print(f"{len(failures)} failed" if failures else "all passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
