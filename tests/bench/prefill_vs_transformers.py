#!/usr/bin/env python3
"""Times dense passes of sqz and of Hugging Face transformers (sdpa) over the same tokens, in turn,
and prints the best of each and their ratio.

    tests/bench/prefill_vs_transformers.py --model DIR --text FILE --runner build/cpu/tests/training/sqz_prefill_seconds

Several --runner may be given (builds against different LibTorch). transformers computes the logits
of the last token only, as sqz does. Needs torch, transformers, numpy. On a machine that others use,
compare the ratios, and raise --rounds.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

CHILD = """
import sys, time, torch, numpy as np
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
model, tokens, dtype, threads, repeats = sys.argv[1:]
torch.set_num_threads(int(threads))
dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
ids = torch.tensor(np.load(tokens).astype(np.int64))[None]
with torch.inference_mode():
    for _ in range(int(repeats)):
        start = time.perf_counter()
        net(ids, use_cache=False, logits_to_keep=1)
        print(f"{time.perf_counter() - start:.4f}", flush=True)
"""


def seconds(command):
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in out.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--runner", required=True, action="append")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="passes a process, a round")
    arguments = parser.parse_args()

    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(f"{arguments.model}/tokenizer.json")
    ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8")).ids
    with tempfile.TemporaryDirectory() as folder:
        for count in arguments.tokens:
            path = f"{folder}/{count}.npy"
            np.save(path, np.array(ids[:count], dtype=np.int32))
            tail = [arguments.model, path, arguments.dtype, str(arguments.threads),
                    str(arguments.repeats)]
            commands = {"transformers": [sys.executable, "-c", CHILD] + tail}
            commands.update({runner: [runner] + tail for runner in arguments.runner})
            best = dict.fromkeys(commands, float("inf"))
            for _ in range(arguments.rounds):
                for name, command in commands.items():
                    best[name] = min([best[name]] + seconds(command))
            for name, value in best.items():
                print(f"{count} tokens  {value:8.3f} s  {value / best['transformers']:.2f}x  {name}",
                      flush=True)


if __name__ == "__main__":
    main()
