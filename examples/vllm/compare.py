#!/usr/bin/env python3
"""Asks vLLM ten questions about a book: with the book's index in front of them, and with the book in the prompts.

Run it with the Python of the environment that examples/vllm/install made, after examples/vllm/prepare:

    ENVIRONMENT/bin/python examples/vllm/compare.py build/vllm --enforce-eager

Options that it does not know go to both servers. It starts the two OpenAI servers in turn, sends the questions over
HTTP, 16 at a time, twice (the second time vLLM's prefix cache has them), and compares the answers' tokens. An index
holds keys and values rounded to 16 bits. So if tokens differ, transformers answers over rounded keys and values, and
its answer must be the one with the index. That needs --dtype float32, the default, in which vLLM computes on CPUs only.
With 16 bits everything is rounded everywhere: then the first token that differs must have been nearly as probable over
the prompt, by NEARLY in the logarithm. Exit code 1 if a difference is not explained so.
"""

from __future__ import annotations

import argparse
import json
import math
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
NEARLY = 0.25
Answer = tuple[list[int], list[dict[str, float]]]  # tokens; for each, logarithms of the most probable ones' probability


@contextmanager
def server(arguments: argparse.Namespace, log: Path, environment: dict[str, str], *options: str) -> Iterator[str]:
    """A vLLM server, and its address. It and its processes are gone afterwards."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name",
               "nano", "--dtype", arguments.dtype, "--kv-cache-memory-bytes", "1G", "--max-num-seqs", str(AT_A_TIME),
               "--host", "127.0.0.1", "--port", str(arguments.port), *arguments.options, *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SQZ_") or
                 name == "SQZ_LIBRARY"}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=inherited | environment, stdout=output, stderr=output,
                                   start_new_session=True)
        try:
            address = f"http://127.0.0.1:{arguments.port}"
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


def ask(address: str, tokens: list[int]) -> Answer:
    """What follows the prompt `tokens`, greedily."""
    body = {"model": "nano", "prompt": tokens, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True,
            "logprobs": 5, "return_tokens_as_token_ids": True, "ignore_eos": True}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        choice = json.load(response)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["top_logprobs"]


def ask_all(address: str, prompts: list[list[int]], name: str) -> list[Answer]:
    """Each prompt's answer, asked twice, 16 requests at a time."""
    start = time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = list(pool.map(lambda prompt: ask(address, prompt), prompts * 2))
    print(f"{name}: {len(answers)} answers of {ANSWER} tokens in {time.monotonic() - start:.2f} s")
    first, second = answers[:len(prompts)], answers[len(prompts):]
    changed = sum(a[0] != b[0] for a, b in zip(first, second))
    if changed:
        print(f"{name}: {changed} answers differ when they are asked again")
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
    parser.add_argument("--dtype", default="float32", help="what vLLM computes in")
    arguments, arguments.options = parser.parse_known_args()  # vLLM's own
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
    with server(arguments, folder / "index.log", environment, "--attention-backend", "CUSTOM",
                "--max-model-len", "4096") as address:
        with_index = ask_all(address, questions, "book in the index")
    with server(arguments, folder / "prompt.log", {}, "--max-model-len", str(len(context) + 4096)) as address:
        in_prompt = ask_all(address, [context + question for question in questions], "book in the prompt")
    rounded = RoundedModel(context, getattr(torch, info.dtype)) if arguments.dtype == "float32" else None
    return report(words, with_index, in_prompt, questions, rounded, tokenizer)


def report(words: list[str], with_index: list[Answer], in_prompt: list[Answer], questions: list[list[int]],
           rounded: RoundedModel | None, tokenizer: Any) -> int:
    """Prints a line a question. Returns the exit code."""
    equal = unexplained = 0
    for word, (ours, _), (theirs, probable), question in zip(words, with_index, in_prompt, questions):
        verdict = "the same tokens"
        if ours == theirs:
            equal += 1
        else:
            first = next(i for i in range(ANSWER) if ours[i] != theirs[i])
            if rounded:
                explained = rounded.answer(question) == ours
                why = f"transformers over rounded keys {'agrees' if explained else 'disagrees'}"
            else:
                less = max(probable[first].values()) - probable[first].get(f"token_id:{ours[first]}", -math.inf)
                explained = less < NEARLY
                why = f"which was less probable over the prompt by {less:.3f}"
            unexplained += not explained
            verdict = f"differ from token {first + 1} on; {why}"
        print(f"{word:10} {tokenizer.decode(ours[:8]).split('.')[0]:10} {verdict}")
    print(f"{equal} of {len(words)} answers are equal, {len(words) - equal - unexplained} differ by rounding, "
          f"{unexplained} for other reasons")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
