#!/usr/bin/env python3
"""Milliseconds a token of generate() over a long fixed context: transformers' own cache beside FixedContext, on a GPU.

  tests/bench/transformers_speed.py --bin build/cuda/tools --work /dev/shm/sqz-speed

The model has Llama-3.1-8B's shape, random weights, bfloat16. Its context of 128,000 random tokens is captured on the
GPU (17 GB), and sqz-index makes the index (17 GB more), which stays in --work for the next run. A time is the median
over the last three quarters of the tokens of the second answer, each token with a synchronisation, which generate()
has anyway. "static" is generate(cache_implementation="static"), which transformers compiles to CUDA graphs.
"""
import argparse
import gc
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import sqz
import sqz.transformers

SHAPE = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
         "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


class Clock(transformers.StoppingCriteria):
    """Stops nothing; notes when each token was there."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def milliseconds(model, ids, tokens, answers=2, **options):
    """Of a token, in the last of some answers."""
    for _ in range(answers):
        clock = Clock()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
                       stopping_criteria=[clock], **options)
    steps = [b - a for a, b in zip(clock.times, clock.times[1:])]
    return 1e3 * statistics.median(steps[len(steps) // 4:])


def index_of(args, model, context):
    index, capture = args.work / f"{args.tokens}.sqz", args.work / f"{args.tokens}.h5"
    if index.exists():
        return index
    begun = time.perf_counter()
    if not capture.exists():
        sqz.transformers.capture(model, context, capture)
        print(f"capture: {time.perf_counter() - begun:.1f} s, {capture.stat().st_size / 1e9:.1f} GB", flush=True)
    begun = time.perf_counter()
    subprocess.run([args.bin / "sqz-index", "build", "--capture", capture, "-o", index, "--device", "cuda"], check=True)
    print(f"sqz-index build: {time.perf_counter() - begun:.1f} s, {index.stat().st_size / 1e9:.1f} GB", flush=True)
    if not args.keep_capture:
        capture.unlink()
    return index


def with_sqz(args, model, index, question):
    """Rows (name, milliseconds, share of the bytes) of FixedContext."""
    opened = sqz.Index(index)
    for name, session in (("dense", {"selector": "dense"}), (f"budget {args.budget}", {"budget": args.budget,
                                                                                       "rule": "budget"})):
        for cache, options in (("", {}), (", static", {"cache_implementation": "static"})):
            try:
                with sqz.transformers.FixedContext(model, opened, **session) as fixed:
                    found = milliseconds(model, question, args.answer, **options)
                    yield f"FixedContext, {name}{cache}", found, fixed.stats().delivered_budget
            except RuntimeError as error:
                print(f"FixedContext, {name}{cache}: {str(error).splitlines()[0]}", flush=True)
    opened.close()


def own_cache(args, model, context, question):
    """Rows of transformers with the context in its own cache, grown in place of a prefill for each answer."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(context, past_key_values=cache, logits_to_keep=1)
    if args.requests > 1:
        cache.batch_repeat_interleave(args.requests)
    whole = torch.cat([context.expand(args.requests, -1), question], 1)
    found = milliseconds(model, whole, args.answer, answers=1, past_key_values=cache)
    yield "transformers, its own cache", found, 1.0
    del cache
    gc.collect()
    torch.cuda.empty_cache()
    if not args.static_own:
        return
    room = whole.shape[1] + args.answer
    cache = transformers.StaticCache(config=model.config, max_cache_len=room)
    with torch.no_grad():
        model(context.expand(args.requests, -1), past_key_values=cache, logits_to_keep=1)
    found = milliseconds(model, whole, args.answer, answers=1, past_key_values=cache)
    yield "transformers, static", found, 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--work", type=pathlib.Path, default="/dev/shm/sqz-speed", help="35 GB")
    parser.add_argument("--tokens", type=int, default=128000, help="of the context")
    parser.add_argument("--question", type=int, default=32, help="tokens")
    parser.add_argument("--answer", type=int, default=48, help="tokens")
    parser.add_argument("--requests", type=int, default=1, help="in a batch")
    parser.add_argument("--budget", type=float, default=0.125)
    parser.add_argument("--layers", type=int, default=32, help="fewer for a trial")
    parser.add_argument("--keep-capture", action="store_true")
    parser.add_argument("--static-own", action="store_true", help="transformers' own static cache, too")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, sqz "
          f"{sqz.__version__}; {args.layers} layers, context {args.tokens}, question {args.question}, answer "
          f"{args.answer} tokens, {args.requests} requests", flush=True)
    torch.manual_seed(1)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": args.layers}, dtype=torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        context = torch.randint(3, 128000, (1, args.tokens))
        question = torch.randint(3, 128000, (args.requests, args.question))
    index = index_of(args, model, context)
    gc.collect()
    torch.cuda.empty_cache()
    rows = list(own_cache(args, model, context, question))
    rows += with_sqz(args, model, index, question)
    print(f"\n{'':44} {'ms a token':>10} {'x transformers':>15} {'bytes read':>11}")
    for name, found, read in rows:
        print(f"{name:44} {found:10.2f} {rows[0][1] / found:15.2f} {read:11.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
