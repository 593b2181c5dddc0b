#!/usr/bin/env python3
"""Asks vLLM ten questions about a book: with the book's index in front of them, and with the book in the prompts.

Run it with the Python of the environment that examples/vllm/install made, after examples/vllm/prepare:

    ENVIRONMENT/bin/python examples/vllm/compare.py build/vllm --dtype float32 --enforce-eager

Options go to both servers. It starts the two OpenAI servers in turn, sends the questions over HTTP, all at once, twice
(the second time vLLM's prefix cache has them), and compares the answers' tokens. An index holds keys and values rounded
to 16 bits, so a few answers differ where two tokens are nearly as probable.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer

MODEL = Path(__file__).parents[1] / "models" / "nano"
ADDRESS = "http://127.0.0.1:8765"
ANSWER = 24  # tokens


@contextmanager
def server(log, environment, *options):
    """A vLLM server that answers, which is gone afterwards."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name",
               "nano", "--kv-cache-memory-bytes", "1G", "--host", "127.0.0.1", "--port", "8765", *options]
    inherited = {name: value for name, value in os.environ.items() if name in ("SQZ_LIBRARY",) or
                 not name.startswith("SQZ_")}
    with log.open("w") as output, subprocess.Popen(command, env=inherited | environment, stdout=output,
                                                   stderr=output) as process:
        try:
            for _ in range(300):
                if process.poll() is not None:
                    sys.exit(f"compare.py: vLLM ended with code {process.returncode}: see {log}")
                try:
                    urllib.request.urlopen(f"{ADDRESS}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(1)
            yield
        finally:
            process.terminate()


def ask(tokens):
    """The tokens that follow a prompt, greedily."""
    body = {"model": "nano", "prompt": tokens, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True,
            "ignore_eos": True}
    request = urllib.request.Request(f"{ADDRESS}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["token_ids"]


def ask_all(prompts, name):
    start = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        first, second = list(pool.map(ask, prompts)), list(pool.map(ask, prompts))
    changed = sum(a != b for a, b in zip(first, second))
    print(f"{name}: {2 * len(prompts)} answers of {ANSWER} tokens in {time.monotonic() - start:.2f} s; {changed} differ "
          "when they are asked again")
    return first


def main():
    folder, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = (folder / "book.txt").read_text()
    context, words = tokenizer.encode(text), re.findall(r"magic numbers for (\w+) is", text)
    questions = [tokenizer.encode(f"\nWhat is the special magic number for {word} mentioned in the provided text? The "
                                  f"special magic number for {word} mentioned in the provided text is",
                                  add_special_tokens=False) for word in words]
    environment = {"SQZ_INDEX": str(folder / "book.sqz"), "SQZ_SELECTOR": "dense"}
    with server(folder / "index.log", environment, "--attention-backend", "CUSTOM", "--max-model-len", "4096",
                *options):
        ours = ask_all(questions, "book in the index")
    with server(folder / "prompt.log", {}, "--max-model-len", str(len(context) + 4096), *options):
        theirs = ask_all([context + question for question in questions], "book in the prompt")
    for word, a, b in zip(words, ours, theirs):
        print(f"{word:10} {tokenizer.decode(a)!r}" + ("" if a == b else f" / {tokenizer.decode(b)!r}"))
    print(f"{sum(a == b for a, b in zip(ours, theirs))} of {len(words)} answers are equal")


if __name__ == "__main__":
    main()
