#!/usr/bin/env python3
"""Asks vLLM ten questions about a book: with the book's index in front of them, and with the book in the prompts.

Run it with the Python of the environment that examples/vllm/install made, after examples/vllm/prepare:

    ENVIRONMENT/bin/python examples/vllm/compare.py build/vllm

It starts both OpenAI servers in turn, sends the questions over HTTP, 16 at a time, twice (the second time vLLM's prefix
cache has them), and compares the answers' tokens. An index holds keys and values rounded to 16 bits. So if tokens
differ, transformers answers over rounded keys and values, and its answer must be the one with the index. Exit code 1 if
it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import sqz

MODEL = Path(__file__).parents[1] / "models" / "nano"
ANSWER = 24  # tokens
AT_A_TIME = 16


@contextmanager
def server(port: int, log: Path, environment: dict[str, str], *options: str) -> Iterator[str]:
    """A vLLM server, and its address. It and its processes are gone afterwards."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name",
               "nano", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "1G", "--max-num-seqs",
               str(AT_A_TIME), "--host", "127.0.0.1", "--port", str(port), *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SQZ_") or
                 name == "SQZ_LIBRARY"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=inherited | environment, stdout=output, stderr=output,
                                   start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(address, process, log)
            yield address
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers, at most five minutes."""
    for _ in range(300):
        if process.poll() is not None:
            raise SystemExit(f"compare.py: vLLM ended with code {process.returncode}: see {log}")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise SystemExit(f"compare.py: vLLM does not answer after 300 s: see {log}")


def ask(address: str, tokens: list[int]) -> list[int]:
    """The tokens that follow the prompt `tokens`, greedily."""
    body = {"model": "nano", "prompt": tokens, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


def ask_all(address: str, prompts: list[list[int]], name: str) -> list[list[int]]:
    """Each prompt's answer, asked twice, 16 requests at a time."""
    start = time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = list(pool.map(lambda prompt: ask(address, prompt), prompts * 2))
    print(f"{name}: {len(answers)} answers of {ANSWER} tokens in {time.monotonic() - start:.2f} s")
    first, second = answers[:len(prompts)], answers[len(prompts):]
    if first != second:
        print(f"{name}: {sum(a != b for a, b in zip(first, second))} answers differ when they are asked again")
    return first


class RoundedModel:
    """transformers over the context's keys and values as the index stores them."""

    def __init__(self, context: list[int], dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.length = len(context)
        self.layers = []  # (keys, values)
        with torch.no_grad():
            cache = self.model(torch.tensor([context]), use_cache=True, logits_to_keep=1).past_key_values
        for layer in cache.layers:
            self.layers.append(tuple(tensor.to(dtype).float() for tensor in (layer.keys, layer.values)))

    @torch.no_grad()
    def answer(self, question: list[int]) -> list[int]:
        cache, tokens, out = DynamicCache(), question, []
        for layer, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, layer)
        while len(out) < ANSWER:
            logits = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
            tokens = [int(logits[0, -1].argmax())]
            out += tokens
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what examples/vllm/prepare wrote: book.txt and book.sqz")
    parser.add_argument("--port", type=int, default=8765)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = (folder / "book.txt").read_text()
    context = tokenizer.encode(text)
    words = re.findall(r"magic numbers for (\w+) is", text)
    questions = [tokenizer.encode(f"\nWhat is the special magic number for {word} mentioned in the provided text? The "
                                  f"special magic number for {word} mentioned in the provided text is",
                                  add_special_tokens=False) for word in words]
    with sqz.Index(str(folder / "book.sqz")) as index:
        info = index.info
    if info.tokens != len(context):
        raise SystemExit(f"compare.py: book.sqz has {info.tokens} tokens, book.txt {len(context)}; expected the same")

    environment = {"SQZ_INDEX": str(folder / "book.sqz"), "SQZ_SELECTOR": "dense"}
    with server(arguments.port, folder / "index.log", environment, "--attention-backend", "CUSTOM",
                "--max-model-len", "4096") as address:
        with_index = ask_all(address, questions, "book in the index")
    with server(arguments.port, folder / "prompt.log", {}, "--max-model-len", str(len(context) + 4096)) as address:
        in_prompt = ask_all(address, [context + question for question in questions], "book in the prompt")
    return report(words, with_index, in_prompt, questions, context, getattr(torch, info.dtype), tokenizer)


def report(words: list[str], with_index: list[list[int]], in_prompt: list[list[int]], questions: list[list[int]],
           context: list[int], dtype: torch.dtype, tokenizer: Any) -> int:
    """Prints a line a question. Returns the exit code."""
    rounded, unexplained = None, 0
    for word, ours, theirs, question in zip(words, with_index, in_prompt, questions):
        same = "the same tokens"
        if ours != theirs:
            rounded = rounded or RoundedModel(context, dtype)
            explained = rounded.answer(question) == ours
            unexplained += not explained
            first = next(i for i in range(ANSWER) if ours[i] != theirs[i])
            same = (f"differ from token {first + 1} on; over keys rounded to {str(dtype).removeprefix('torch.')} "
                    f"transformers gives {'the same as' if explained else 'other tokens than'} the index")
        print(f"{word:10} {tokenizer.decode(ours[:8]).split('.')[0]:10} {same}")
    equal = sum(a == b for a, b in zip(with_index, in_prompt))
    print(f"{equal} of {len(words)} answers are equal, {len(words) - equal - unexplained} differ by the rounding of "
          f"the index's keys and values, {unexplained} for other reasons")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
