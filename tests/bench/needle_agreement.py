#!/usr/bin/env python3
"""Do sparse answers agree with dense ones? Needles in real text, one index a context.

Plants needles ("One of the special magic numbers for WORD is: NUMBER.") in a text, builds an index
with sqz-index, asks for each needle with and without selection, and counts: how many dense attention
finds, on how many of those the sparse answer is the same, and what was read. Standard library only.

  tests/bench/needle_agreement.py --bin build/cpu/tools --model DIR --text BOOK --tokens 8000 \\
      --needles 4 --want 48 --work build/needles --sparse="--budget 0.125" --sparse="--budget 0.1"

Contexts are made, from each --text in turn, with needles and places drawn from --seed, until dense
has found --want needles. A number has one of --digits digits, drawn like the rest. Each --sparse is
one setting: options of sqz-generate, asked of the same indexes.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shlex
import subprocess
import sys

WORDS = ("harbour lantern orchard violin compass meadow saddle kettle glacier ribbon thunder anchor "
         "walnut mirror canyon feather pepper copper marble tunnel garden falcon candle bridge").split()
QUESTION = ("\nWhat is the special magic number for {0} mentioned in the provided text? The special "
            "magic number for {0} mentioned in the provided text is")


def run(command, prompts=None):
    """Runs a tool with --json; returns its JSON objects."""
    done = subprocess.run(command, input=prompts, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def make_context(book, chars, needles, rng):
    """A slice of the book with the needles at even distances, moved by up to a third of one."""
    start = rng.randrange(0, max(1, len(book) - chars))
    start = book.find("\n", start) + 1
    text = book[start:start + chars]
    pieces, last = [], 0
    for i, (word, number) in enumerate(needles):
        at = int(len(text) * (i + 0.5 + rng.uniform(-1 / 3, 1 / 3)) / len(needles))
        at = text.find("\n", at) if text.find("\n", at) >= 0 else at
        pieces += [text[last:at], f"\nOne of the special magic numbers for {word} is: {number}.\n"]
        last = at
    return "".join(pieces + [text[last:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True, action="append")
    parser.add_argument("--tokens", type=int, required=True, help="length of a context")
    parser.add_argument("--needles", type=int, default=4, help="needles a context")
    parser.add_argument("--digits", type=int, nargs="+", default=[7], help="of a number")
    parser.add_argument("--want", type=int, default=48, help="needles that dense must find in all")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2, help="of a build")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2),
                        help="questions asked at a time, two threads each")
    parser.add_argument("--sparse", action="append", help="one sparse setting (default --budget 0.125)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    books = [text.read_text(encoding="utf-8") for text in args.text]
    rng = random.Random(args.seed)
    settings = args.sparse or ["--budget 0.125"]
    tally = {setting: {"found": 0, "agreed": 0, "budgets": []} for setting in settings}
    asked = found = contexts = 0
    seconds, chars = {}, [args.tokens * 3] * len(books)
    source, index = args.work / "context.txt", args.work / "context.sqz"
    build = [args.bin / "sqz-index", "build", "--json", "--force", "--threads", str(args.threads),
             "--model", args.model, source, "-o", index]

    def ask(question):
        word, options = question
        result = run([args.bin / "sqz-generate", "--json", "--model", args.model, "--index", index,
                      "--threads", "2", "--prompt", QUESTION.format(word), "--max-tokens", "12",
                      *shlex.split(options)])[-1]
        return result["text"].strip().split(".")[0].split("\n")[0], result["budget"]["delivered"]

    while found < args.want:
        book = contexts % len(books)
        needles = [(word, str(rng.randrange(10 ** (digits - 1), 10 ** digits)))
                   for word in rng.sample(WORDS, args.needles)
                   for digits in [rng.choice(args.digits)]]
        state = rng.getstate()
        for _ in range(4):  # fit the slice to the asked number of tokens
            rng.setstate(state)
            source.write_text(make_context(books[book], chars[book], needles, rng),
                              encoding="utf-8")
            plan = run(build + ["--dry-run"])[-1]
            if 0.98 * args.tokens <= plan["tokens"] <= args.tokens:
                break
            chars[book] = int(chars[book] * 0.99 * args.tokens / plan["tokens"])
        for part, value in run(build)[-1]["seconds"].items():
            seconds.setdefault(part, []).append(value)
        contexts += 1
        questions = [(word, options) for word, _ in needles for options in ["--dense", *settings]]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            answers = dict(zip(questions, pool.map(ask, questions)))
        for word, number in needles:
            dense = answers[word, "--dense"][0]
            asked += 1
            found += dense == number
            sparse = []
            for options in settings:
                answer, budget = answers[word, options]
                tally[options]["found"] += answer == number
                tally[options]["agreed"] += dense == number == answer
                tally[options]["budgets"].append(budget)
                sparse.append(f"{answer!r} ({budget:.3f})")
            print(f"{contexts:3} {args.text[book].stem} {plan['tokens']} tokens  {word:8} {number}  "
                  f"dense {dense!r}  sparse {'  '.join(sparse)}", flush=True)
    for options, counts in tally.items():
        budgets = counts["budgets"]
        print(json.dumps({
            "sparse": options, "model": str(args.model), "text": [text.name for text in args.text],
            "tokens": args.tokens, "needles": args.needles, "digits": args.digits,
            "contexts": contexts, "asked": asked, "dense_found": found, "sparse_found": counts["found"], "agreed": counts["agreed"],
            "delivered_budget_mean": round(sum(budgets) / len(budgets), 4),
            "delivered_budget_max": round(max(budgets), 4),
            "build_seconds_mean": {k: round(sum(v) / len(v), 2) for k, v in seconds.items()}}))


if __name__ == "__main__":
    main()
