#!/usr/bin/env python3
"""sqz at the size people run: a model of Llama-3.1-8B's shape, 128,000 tokens of context, one GPU. Not part of ctest.

  tests/gpu/real_size.py --work /dev/shm/sqz-real [--bin build/cuda/tools]
  tests/gpu/real_size.py --work /dev/shm/sqz-qwen --shape qwen3.6 --random --requests 1 16 64 --caches dynamic

Makes the model (random weights, bfloat16, 16 GB) and its index (17 GB) in --work, where they stay for the next run, and
prints a table. With --contexts N there are N indexes, in --work/contexts, and vLLM's requests take them in turn. --shape
qwen3.6 is Qwen3.6-35B-A3B with 32 of its 256 experts (12 GB). With --random the model is not saved and the index not
built: it has random keys in rows of 8 bits. The rows are:
  build         seconds and file size of sqz.build; with --bin those of sqz-index, and GPU memory, beside what --dry-run
                foretold
  transformers  first token, milliseconds a token and tokens a second of generate(): with FixedContext, --requests at a
                time, and, one at a time, with the context in transformers' own cache (it cannot repeat that of a model
                with a state); by a dynamic and by a static cache, which transformers compiles to CUDA graphs
  vllm          where vLLM is installed: one question, 64 requests and 1,000 questions (tests/bench/vllm_speed.py)
--steps chooses. Wants torch, transformers, the module sqz with its CUDA library, and for --bin an sqz-index with LibTorch.
"""
import argparse
import copy
import gc
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
import sqz
import sqz.transformers
import vllm_speed

SHAPES = {"8b": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
                 "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0, "bos_token_id": 1,
                 "pad_token_id": 0, "tie_word_embeddings": False},
          "qwen3.6": {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"],
                      "num_hidden_layers": 40, "num_experts": 32}}
rows = []


def row(name, value):
    rows.append((name, value))
    print(f"{name}: {value}", flush=True)


def make_model(config):
    torch.manual_seed(1)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def free_memory():
    gc.collect()
    torch.cuda.empty_cache()


def used_memory():
    """Bytes in use on the GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def build(args, folder, model, ids, index):
    if args.bin is None:
        begun = time.perf_counter()
        made = sqz.build(model, None, ids, index, rows=args.rows)
        row("sqz.build: s, GB of the file", f"{time.perf_counter() - begun:.1f}, {made.bytes / 1e9:.2f}")
        return
    numpy.savetxt(args.work / "ids.txt", ids.numpy()[0], "%d")
    command = [args.bin / "sqz-index", "build", "-o", index, "--rows", args.rows, "--device", "cuda", "--json",
               "--model", folder, "--tokens", args.work / "ids.txt"]
    plan = json.loads(subprocess.run([*command, "--dry-run"], check=True, capture_output=True, text=True).stdout
                      .splitlines()[-1])
    begun, before, most = time.perf_counter(), used_memory(), 0
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, stdout=out) as process:
        while process.poll() is None:
            most = max(most, used_memory() - before)
            time.sleep(0.2)
        wall = time.perf_counter() - begun
        out.seek(0)
        report = json.loads(out.read().splitlines()[-1])
    if process.returncode != 0:
        sys.exit(f"sqz-index build: {report}")
    row("build: s", f"{wall:.1f} {json.dumps(report['seconds'])}")
    row("build: GB of GPU memory, foretold", f"{most / 1e9:.1f}, {plan.get('gpu_memory', 0) / 1e9:.1f}")
    row("build: GB of the file, foretold", f"{index.stat().st_size / 1e9:.2f}, {plan['bytes'] / 1e9:.2f}")


def load(args, folder):
    if args.random:
        model = make_model(AutoConfig.from_pretrained(folder))
        vars(model)["state_dict"] = dict  # the index knows no weights
        return model
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()


class Clock(transformers.StoppingCriteria):
    """Stops nothing, and notes when each token was there."""

    def __init__(self):
        torch.cuda.synchronize()
        self.times = [time.perf_counter()]

    def __call__(self, input_ids, scores, **kwargs):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def answer(args, model, ids, cache=None, **options):
    """Milliseconds to the first token and of each other, in the second of two answers; compiling is in the first. cache:
    what stands in front, of which each answer has a copy."""
    for _ in range(2):
        given = {} if cache is None else {"past_key_values": copy.deepcopy(cache)}
        clock = Clock()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.answer, do_sample=False,
                       pad_token_id=0, stopping_criteria=[clock], **given, **options)
    steps = [1e3 * (b - a) for a, b in zip(clock.times, clock.times[1:])]
    return steps[0], statistics.median(steps[1 + len(steps) // 4:])


def with_own_cache(args, model, context, question, cache):
    name, begun = type(cache).__name__, time.perf_counter()
    with torch.inference_mode():
        model(context, past_key_values=cache, logits_to_keep=1)
    torch.cuda.synchronize()
    row(f"transformers, {name}: s of the context's prefill", f"{time.perf_counter() - begun:.1f}")
    first, token = answer(args, model, torch.cat([context, question], 1), cache)
    row(f"transformers, {name}: first token, ms a token, tokens/s", f"{first:.1f}, {token:.2f}, {1e3 / token:.0f}")


def with_transformers(args, folder, ids, index):
    model, context = load(args, folder), ids.cuda()
    questions = torch.randint(3, 128000, (max(args.requests), args.question), device="cuda")
    opened, begun = sqz.Index(index), time.perf_counter()
    with sqz.transformers.FixedContext(model, opened, selector="dense"):
        torch.cuda.synchronize()
        row("FixedContext: s of the upload", f"{time.perf_counter() - begun:.1f}")
    for kind in args.caches:
        options = {"cache_implementation": kind} if kind == "static" else {}
        for name, session in (("dense", {"selector": "dense"}), (f"budget {args.budget}", {"budget": args.budget})):
            for requests in args.requests:
                with sqz.transformers.FixedContext(model, opened, **session) as fixed:
                    first, token = answer(args, model, questions[:requests], **options)
                    row(f"FixedContext, {name}, {kind} cache, {requests} requests: first token, ms a token, tokens/s, "
                        "read", f"{first:.1f}, {token:.2f}, {1e3 * requests / token:.0f}, "
                        f"{fixed.stats().delivered_budget:.3f}")
    opened.close()
    for kind in [] if args.skip_own else args.caches:
        free_memory()
        with_own_cache(args, model, context, questions[:1], transformers.DynamicCache(config=model.config)
                       if kind == "dynamic" else transformers.StaticCache(
                           config=model.config, max_cache_len=args.tokens + args.question + args.answer))


def with_vllm(args, folder, index):
    if importlib.util.find_spec("vllm") is None:
        row("vLLM", "not installed")
        return
    engines = ["dense", "sparse"] + ([] if args.skip_own else ["prompt"])
    for requests, tokens in ((1, 1), (1, args.answer), (64, args.answer), (args.questions, 32)):
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as out:
            subprocess.run([sys.executable, vllm_speed.__file__, folder, index, "--requests", str(requests),
                            "--answer", str(tokens), "--question", str(args.question), "--budget", str(args.budget),
                            "--repeat", "1", "--memory", str(args.memory), "--engines", *engines, "-o", out.name,
                            "--load-format", "dummy" if args.random else "auto"], check=True)
            for line in out.read().splitlines():
                found = json.loads(line)
                speed = found["speeds"][str(requests)]
                row(f"vLLM, {found['engine']}, {requests} questions, {tokens} tokens each: tokens/s, s",
                    f"{speed:.0f}, {requests * tokens / speed:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, help="folder of the built tools: build with sqz-index")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="33 GB; a folder for each shape")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--random", action="store_true", help="random keys, a model that is not saved")
    parser.add_argument("--steps", default="transformers,vllm", help="and build, to build an index that is there again")
    parser.add_argument("--tokens", type=int, default=128000, help="of the context")
    parser.add_argument("--contexts", type=int, default=1, help="indexes, each of a text of its own")
    parser.add_argument("--layers", type=int, help="fewer for a trial")
    parser.add_argument("--rows", default="bf16", help="of the index: bf16 or q8")
    parser.add_argument("--budget", type=float, default=0.125)
    parser.add_argument("--question", type=int, default=32, help="tokens of a question")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--requests", type=int, nargs="+", default=[1], help="at a time, transformers")
    parser.add_argument("--caches", nargs="+", choices=["dynamic", "static"], default=["dynamic", "static"])
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--memory", type=float, default=0.72, help="part of the GPU's memory that vLLM takes")
    parser.add_argument("--skip-own", action="store_true", help="without transformers and vLLM over the whole context")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, sqz "
          f"{sqz.__version__}", flush=True)
    folder, index = args.work / "model", args.work / ("index.sqz" if args.contexts == 1 else "contexts")
    indexes = [index] if args.contexts == 1 else [index / f"{i}.sqz" for i in range(args.contexts)]
    if not (folder / "config.json").exists():
        shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
        config = AutoConfig.for_model(**shape, eos_token_id=None, dtype=torch.bfloat16,
                                      max_position_embeddings=args.tokens + 4096)
        if args.random:
            config.save_pretrained(folder)
        else:
            make_model(config).save_pretrained(folder, max_shard_size="4GB")
        free_memory()
    texts = torch.randint(3, 128000, (args.contexts, 1, args.tokens), generator=torch.Generator().manual_seed(1))
    if "build" in args.steps or not all(one.exists() for one in indexes):
        model = None if args.bin or args.random else load(args, folder)
        for number, (ids, one) in enumerate(zip(texts, indexes)):
            one.parent.mkdir(exist_ok=True)
            one.unlink(missing_ok=True)
            if args.random:
                vllm_speed.make_random(folder, one, args.tokens, seed=number)
            else:
                build(args, folder, model, ids, one)
        del model
        free_memory()
    if "transformers" in args.steps:
        with_transformers(args, folder, texts[0], indexes[0])
        free_memory()
    if "vllm" in args.steps:
        with_vllm(args, folder, index)
    print()
    for name, value in rows:
        print(f"| {name} | {value} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
