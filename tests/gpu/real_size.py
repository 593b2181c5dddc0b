#!/usr/bin/env python3
"""What sqz is for, at the size people run: Llama-3.1-8B's shape (or --shape), 128,000 tokens, one GPU. Not part of ctest.

  tests/gpu/real_size.py --bin build/cuda/tools --work /dev/shm/sqz-real

Makes the model (random weights, bfloat16, 16 GB) and its index (17 GB) in --work, asks with sqz-generate, and prints a table: the
start, milliseconds a token, many questions at once, drafts that are checked, and transformers one question after the other.
Before that it asks a trained model of the tree on the CPU and on the GPU, alone and together, and fails if a token differs where the
sums are the same up to float32 rounding. --steps chooses. Wants torch, safetensors and, for its row, transformers.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
         "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192},
         "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"}
PLAIN = {name: value for name, value in LLAMA.items() if name not in ("rope_scaling", "attention_bias", "mlp_bias")}
SHAPES = {"llama-3.1-8b": LLAMA,
          "mistral-7b": {**PLAIN, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768,
                         "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None},
          "qwen2.5-7b": {**PLAIN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
                         "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                         "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                         "use_sliding_window": False}}
NANO = ROOT / "examples" / "models" / "nano"
rows = []


def row(name, value):
    rows.append((name, value))
    print(f"{name}: {value}", flush=True)


def make_model(folder, config, loop):
    """Four shards of random weights, and a tokenizer that has a word for every id."""
    import torch
    from safetensors.torch import save_file
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    hidden, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    biases = {}
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm": (hidden,), at + "post_attention_layernorm": (hidden,),
                   at + "self_attn.q_proj": (q, hidden), at + "self_attn.k_proj": (kv, hidden), at + "self_attn.v_proj": (kv, hidden),
                   at + "self_attn.o_proj": (hidden, q), at + "mlp.gate_proj": (width, hidden), at + "mlp.up_proj": (width, hidden),
                   at + "mlp.down_proj": (hidden, width)}
        if config["model_type"] == "qwen2":
            biases |= {at + "self_attn.q_proj": (q,), at + "self_attn.k_proj": (kv,), at + "self_attn.v_proj": (kv,)}
    names, shards, places = list(shapes), 4, {}
    for shard in range(shards):
        file, tensors = f"model-{shard + 1:05}-of-{shards:05}.safetensors", {}
        for name in names[shard::shards]:
            shape = shapes[name]
            tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
            if loop and name == "model.embed_tokens":
                tensor *= 200  # outweighs what the layers add: the token in front decides
                follows = tensor
            elif loop and name == "lm_head":
                ids = torch.arange(shape[0], device="cuda")
                before = torch.where(ids % loop > 0, ids - 1, torch.minimum(ids + loop - 1, ids.max()))
                tensor = follows[before]
            tensors[name + ".weight"] = tensor.to(torch.bfloat16).cpu()
            places[name + ".weight"] = file
            if name in biases:
                tensors[name + ".bias"] = (torch.randn(biases[name]) * 0.02).to(torch.bfloat16)
                places[name + ".bias"] = file
        save_file(tensors, folder / file)
    torch.cuda.empty_cache()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for i in range(len(vocab), config["vocab_size"]):
        vocab[f"\u0120w{i}"] = i
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def run(command, **options):
    begun = time.perf_counter()
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if found.returncode != 0:
        print(f"FAILED ({found.returncode}): {' '.join(str(part) for part in command)}: {found.stderr.strip()[-600:]}", flush=True)
        return None, 0.0
    return json.loads(found.stdout.splitlines()[-1]), time.perf_counter() - begun


def ask(args, model, index, prompts, *options, device="cuda"):
    command = [args.bin / "sqz-generate", "--model", model, "--index", index, "--device", device, "--json", *options]
    return run(command, input="".join(prompt + "\n" for prompt in prompts))


def differing(a, b):
    """Answers that differ, and tokens before the first difference of all answers."""
    pairs = list(zip(a["answers"], b["answers"]))
    return sum(x["tokens"] != y["tokens"] for x, y in pairs), len(pairs)


def trained(args, budget):
    """CPU and GPU, alone and together, with a model of the tree."""
    index = args.work / "nano.sqz"
    run([args.bin / "sqz-index", "build", "--model", NANO, ROOT / "docs", "--max-tokens", "12000", "-o", index, "--json", "--force",
         "--device", "cuda", "--run-dtype", "f32"])
    prompts = [f"The {word} of the index is" for word in
               "size name header key value budget layer file error reader cluster page query time token test".split()]
    failures = 0
    for name, options in (("dense", ["--dense"]), ("selected", budget)):
        options = [*options, "--max-tokens", "24", "--run-dtype", "f32"]
        cpu, _ = ask(args, NANO, index, prompts, *options, device="cpu")
        gpu, _ = ask(args, NANO, index, prompts, *options)
        together, _ = ask(args, NANO, index, prompts, *options, "--batch", "5")
        half, _ = ask(args, NANO, index, prompts, *options[:-1], "bf16")
        if not (cpu and gpu and together):
            failures += 1
            continue
        apart = differing(cpu, gpu)
        row(f"nano, {name}: answers that differ, CPU / GPU", "%d of %d" % apart)
        row(f"nano, {name}: GPU alone / five together", "%d of %d" % differing(gpu, together))
        if half:
            row(f"nano, {name}: f32 / bf16", "%d of %d" % differing(gpu, half))
        failures += apart[0] > 1
    checked, _ = ask(args, NANO, index, prompts, *budget, "--lossless", "--max-tokens", "24", "--run-dtype", "f32")
    whole, _ = ask(args, NANO, index, prompts, "--dense", "--max-tokens", "24", "--run-dtype", "f32")
    if not (checked and whole):
        return failures + 1
    apart = differing(whole, checked)
    row("nano: --dense / --lossless", "%d of %d" % apart)
    return failures + (apart[0] > 1)


def one_by_one(args, model, index, question, budget):
    for name, options in (("selected", budget), ("dense", ["--dense"]), ("lossless", [*budget, "--lossless"])):
        found, wall = ask(args, model, index, [question] * 3, *options, "--run-dtype", "bf16", "--max-tokens", args.answer)
        if not found:
            continue
        answers = found["answers"]
        seconds = [answer["seconds"] for answer in answers]
        row(f"{name}: ms a token, answers 1 to 3",
            ", ".join(f"{1e3 * s['decode'] / (args.answer - 1):.2f}" for s in seconds))
        rest = sum(s["prefill"] + s["decode"] for s in seconds) - seconds[0]["prefill"]
        row(f"{name}: s from start to the first token", f"{wall - rest:.2f} (loading {seconds[0]['load']:.2f})")
        row(f"{name}: prompt, ms", ", ".join(f"{1e3 * s['prefill']:.0f}" for s in seconds))
        row(f"{name}: read", f"{answers[0]['budget']['delivered']:.3f}")
        if "drafts" in answers[-1]:
            row(f"{name}: drafts of the last answer", json.dumps(answers[-1]["drafts"]))


def together(args, model, index, questions, budget):
    for width in args.widths:
        for name, options in (("selected", budget), ("dense", ["--dense"])):
            found, wall = ask(args, model, index, questions, *options, "--run-dtype", "bf16", "--max-tokens", "32", "--batch", width)
            if found:
                row(f"{len(questions)} questions, {width} at a time, {name}: s",
                    f"{found['seconds']['answers']:.2f} ({found['tokens_per_second']:.0f} tokens/s, read "
                    f"{found['budget']['delivered']:.3f}, {wall:.1f} s with loading)")


def gpu_memory():
    """Bytes in use, of all processes."""
    return int(subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"], capture_output=True,
                              text=True).stdout.split()[0]) << 20


def build(args, model, index):
    """What --dry-run foretells of a build, and what it took."""
    command = [args.bin / "sqz-index", "build", "--model", model, "--tokens", args.work / "ids.npy", "-o", index, "--rows", args.rows,
               "--device", "cuda", "--json"]
    plan, _ = run([*command, "--dry-run"])
    begun, before, most = time.perf_counter(), gpu_memory(), 0
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        most = max(most, gpu_memory() - before)
        time.sleep(0.2)
    wall = time.perf_counter() - begun
    if process.returncode != 0 or plan is None:
        print(f"FAILED: {process.stderr.read()[-600:]}", flush=True)
        return
    found = json.loads(process.stdout.read().splitlines()[-1])
    row(f"build, {args.tokens} tokens, rows {args.rows}: s, foretold", f"{wall:.1f}, {plan['seconds_estimate']:.1f} {json.dumps(found['seconds'])}")
    row("its GPU memory: GB, foretold", f"{most / 1e9:.1f}, {plan['gpu_memory'] / 1e9:.1f} (least {plan['gpu_memory_least'] / 1e9:.1f})")
    row("its file: GB, foretold", f"{index.stat().st_size / 1e9:.2f}, {plan['bytes'] / 1e9:.2f}")


def memory_on_cpu(args, model, question):
    """Weights stay bfloat16, mapped from their files: what the process needs beside them."""
    index = args.work / "short.sqz"
    run([args.bin / "sqz-index", "build", "--model", model, "--tokens", args.work / "ids.npy", "--max-tokens", "2000", "-o", index,
         "--device", "cuda", "--json", "--force"])
    begun = time.perf_counter()
    process = subprocess.Popen([args.bin / "sqz-generate", "--model", model, "--index", index, "--device", "cpu", "--run-dtype", "bf16",
                                "--max-tokens", "8", "--prompt", question, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    most = {"RssAnon": 0, "RssFile": 0}
    while process.poll() is None:
        for line in pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines():
            name = line.split(":")[0]
            if name in most:
                most[name] = max(most[name], int(line.split()[1]) / 1e6)
        time.sleep(0.05)
    row("on the CPU in bfloat16, most GB: its own / mapped files", f"{most['RssAnon']:.1f} / {most['RssFile']:.1f}")
    row("on the CPU in bfloat16, 8 tokens, s", f"{time.perf_counter() - begun:.1f}" if process.returncode == 0 else process.stderr.read())


def with_transformers(args, model, ids):
    import torch
    import transformers
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map="cuda", attn_implementation="sdpa")
    context = torch.tensor(ids, device="cuda").reshape(1, -1)
    with torch.no_grad():
        torch.cuda.synchronize()
        begun = time.perf_counter()
        cache = loaded(context, use_cache=True, logits_to_keep=1).past_key_values
        torch.cuda.synchronize()
        row("transformers: s of prefill", f"{time.perf_counter() - begun:.1f}")
        token = context[:, -1:]
        for i in range(12):
            if i == 4:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            token = loaded(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        row("transformers: ms a token", f"{1e3 * (time.perf_counter() - begun) / 8:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="33 GB")
    parser.add_argument("--steps", default="trained,single,batch,transformers")
    parser.add_argument("--tokens", type=int, default=128000)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer for a trial")
    parser.add_argument("--loop", type=int, default=0,
                        help="the model says the N tokens of a loop, whatever it reads: times --lossless where all drafts are kept")
    parser.add_argument("--rows", default="bf16", help="of the index that the step `build` makes")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--budget", default="0.125")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    budget, steps = ["--budget", args.budget], args.steps.split(",")
    failures = trained(args, budget) if "trained" in steps else 0
    if set(steps) - {"trained"}:
        import numpy
        model, index, begun = args.work / "model", args.work / "index.sqz", time.perf_counter()
        rng = random.Random(1)
        ids = numpy.array([rng.randrange(8000) for _ in range(args.tokens)], dtype=numpy.int32)
        if not (model / "tokenizer.json").exists():
            config = SHAPES[args.shape]
            make_model(model, {**config, "num_hidden_layers": args.layers or config["num_hidden_layers"],
                               "max_position_embeddings": max(args.tokens + 4096, config["max_position_embeddings"])},
                       args.loop)
            numpy.save(args.work / "ids.npy", ids)
            row("model made: s", f"{time.perf_counter() - begun:.1f}")
        if "build" in steps:
            build(args, model, index)
        elif not index.exists():
            report, wall = run([args.bin / "sqz-index", "build", "--model", model, "--tokens", args.work / "ids.npy", "-o", index,
                                "--device", "cuda", "--json"])
            if report is None:
                return 1
            row("build: s from start to file", f"{wall:.1f} {json.dumps(report['seconds'])}")
        words = (ROOT / "docs" / "runtime.md").read_text().replace("\n", " ").split()
        questions = [" ".join(words[i % 1000:i % 1000 + 17]) for i in range(args.questions)]
        if "memory" in steps:
            memory_on_cpu(args, model, questions[0])
        if "single" in steps:
            one_by_one(args, model, index, questions[0], budget)
        if "batch" in steps:
            together(args, model, index, questions, budget)
        if "transformers" in steps:
            with_transformers(args, model, ids)
    print()
    for name, value in rows:
        print(f"| {name} | {value} |")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
