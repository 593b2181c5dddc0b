#!/usr/bin/env python3
"""Many questions about one context, densely and with sqz: tasks as in RULER and SCBench, made at any length.

    examples/benchmarks/shared_context.py                             the small model of this tree, 8,000 tokens
    examples/benchmarks/shared_context.py --model MODEL --tokens 128000 --budget 0.125 0.0625 --json >results.jsonl

    needle         facts in a text: the number of a name
    multi_hop      chains of variables in a text: the number that the last one got from the first
    key_value      a dictionary: the value of a key
    prefix_suffix  a list of words without meaning: the word with this beginning and end

A row is one way to answer the same questions: `prompt` is transformers alone, its cache filled once and copied for each
question; `dense` reads all of the index; numbers are budgets. "found" counts answers that are right, "beside dense" is
the mean difference to dense, question by question; ± is a standard error. Seconds are those of a whole answer.
The small model was trained on needles alone. Needs: pip install '.[transformers]'
"""

import argparse
import copy
import json
import math
import pathlib
import random
import re
import statistics
import string
import tempfile
import time
import uuid

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import sqz
import sqz.transformers

EXAMPLES = pathlib.Path(__file__).resolve().parents[1]


# A task makes one question: (lines of the context in their order, question, answer).
def needle(rng, names):
    name, number = names.pop(), rng.randint(1000000, 9999999)
    return [f"\nOne of the special magic numbers for {name} is: {number}.\n"], (
        f"\nWhat is the special magic number for {name} mentioned in the provided text? The special magic number for "
        f"{name} mentioned in the provided text is"), f" {number}"


def multi_hop(rng, names):
    chain, number = [names.pop() for _ in range(4)], rng.randint(10000, 99999)
    lines = [f"\nVAR {chain[0]} = {number}\n"] + [f"\nVAR {b} = VAR {a}\n" for a, b in zip(chain, chain[1:])]
    return lines, f"\nThe number that VAR {chain[-1]} has is", f" {number}"


def key_value(rng, names):
    key, value = (str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(2))
    return [f'"{key}": "{value}",\n'], f'\nThe value of the key "{key}" above is "', value


def prefix_suffix(rng, names):
    word = "".join(rng.choices(string.ascii_lowercase, k=24))
    return [word + "\n"], f"\nThe word above that begins with {word[:8]} and ends with {word[-8:]} is ", word


TASKS = {"needle": needle, "multi_hop": multi_hop, "key_value": key_value, "prefix_suffix": prefix_suffix}


def make(task, text, tokenizer, tokens, questions, rng):
    """A context of about so many tokens, and its questions with their answers."""
    names = sorted(set(re.findall(r"\b[a-z]{5,9}\b", text)))
    rng.shuffle(names)
    if task in (needle, multi_hop):
        made = [task(rng, names) for _ in range(questions)]
        size = len(text) * (tokens - len(tokenizer("".join(line for lines, *_ in made for line in lines)).input_ids))
        size //= len(tokenizer(text, verbose=False).input_ids)
        pieces = re.split(r"(?<=\n)", (text * (size // len(text) + 1))[:max(size, 0)])
        for lines, *_ in made:
            for place, line in zip(sorted(rng.choices(range(len(pieces)), k=len(lines)), reverse=True), lines[::-1]):
                pieces.insert(place, line)
        return "".join(pieces), [(question, answer) for _, question, answer in made]
    one = len(tokenizer("".join(task(rng, names)[0][0] for _ in range(100))).input_ids) / 100
    made = [task(rng, names) for _ in range(round(tokens / one))]
    return "".join(lines[0] for lines, *_ in made), [made[i][1:] for i in sorted(rng.sample(range(len(made)), questions))]


class Answers:
    """Answers of a model, one question after the other."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def __call__(self, questions, context=None, cache=None):
        """Whether each was right, and seconds for each. `cache` has the context's keys and values, if it is given."""
        right, seconds = [], []
        for question, answer in questions:
            ids = self.encode(question)
            given = {} if cache is None else {"past_key_values": copy.deepcopy(cache)}
            ids = ids if cache is None else torch.cat([context, ids], 1)
            start = time.perf_counter()
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                                      max_new_tokens=len(self.tokenizer(answer).input_ids) + 2, **given)
            seconds.append(time.perf_counter() - start)
            right.append(self.tokenizer.decode(out[0, ids.shape[1]:]).strip().startswith(answer.strip()))
        return right, statistics.mean(seconds)

    def encode(self, text, special=False):
        return self.tokenizer(text, add_special_tokens=special, return_tensors="pt", verbose=False).input_ids.to(
            self.model.device)

    def rows(self, context, questions, budgets, prompt):
        """name, right, share read and seconds of each way to answer."""
        ids = self.encode(context, special=True)
        if prompt:
            cache = DynamicCache(config=self.model.config)
            with torch.inference_mode():
                self.model(ids, past_key_values=cache, logits_to_keep=1)
            right, seconds = self(questions, ids, cache)
            yield "prompt", right, 1.0, seconds
        with tempfile.TemporaryDirectory() as folder:
            index = sqz.build(self.model, None, ids, f"{folder}/context.sqz", progress=False)
            for budget in (None, *budgets):
                session = {"selector": "dense"} if budget is None else {"budget": budget}
                with sqz.transformers.FixedContext(self.model, index, **session) as served:
                    right, seconds = self(questions)
                yield str(budget or "dense"), right, served.stats().delivered_budget, seconds


def mean(values):
    """With its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EXAMPLES / "models/nano", help="a checkpoint folder or a name")
    parser.add_argument("--text", type=pathlib.Path, default=EXAMPLES / "texts/dracula.txt", help="around the facts")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tokens", type=int, default=8000, help="of a context")
    parser.add_argument("--questions", type=int, default=20, help="about each context")
    parser.add_argument("--contexts", type=int, default=1, help="of each task")
    parser.add_argument("--budget", type=float, nargs="+", default=[0.125], help="shares of the bytes to read")
    parser.add_argument("--no-prompt", dest="prompt", action="store_false", help="leave out transformers alone")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="a line of JSON a row")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    answers, text = Answers(model, tokenizer), args.text.read_text()
    if not args.json:
        print(f"{'task':14} {'answered by':>11} {'found':>13} {'beside dense':>15} {'read':>6} {'s an answer':>11}")
    for name in args.tasks:
        found = {}
        for number in range(args.contexts):
            rng = random.Random(f"{args.seed} {name} {number}")
            made = make(TASKS[name], text, tokenizer, args.tokens, args.questions, rng)
            for row, right, read, seconds in answers.rows(*made, args.budget, args.prompt):
                rights, reads, times = found.setdefault(row, ([], [], []))
                rights += right
                reads.append(read)
                times.append(seconds)
        for row, (right, reads, times) in found.items():
            share, lost = mean(right), mean([a - b for a, b in zip(right, found["dense"][0])])
            read, seconds = statistics.mean(reads), statistics.mean(times)
            if args.json:
                print(json.dumps({"task": name, "row": row, "tokens": args.tokens, "questions": len(right),
                                  "found": share, "beside_dense": lost, "read": read, "seconds": seconds}))
            else:
                print(f"{name:14} {row:>11} {share[0]:6.3f} ± {share[1]:.3f} {lost[0]:+8.3f} ± {lost[1]:.3f} "
                      f"{read:6.3f} {seconds:11.3f}", flush=True)


if __name__ == "__main__":
    main()
