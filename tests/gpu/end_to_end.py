#!/usr/bin/env python3
"""From text to answers on a GPU, from end to end. Not part of ctest: it wants a GPU and a trained model.

  tests/gpu/end_to_end.py --bin build/cuda/tools --model DIR --text BOOK --work /tmp/e2e
  tests/gpu/end_to_end.py --bin build/cuda/tools --model DIR --text BOOK --work /tmp/e2e --selector quest,saap --qmodel Q.sqz

Plants needles in the text and asks for every one of them with sqz-generate, on the CPU and on the GPU. Fails unless the GPU gives
the CPU's answer wherever the CPU finds the needle, and from pruned indexes in any case.

squeezed: builds the index of the text with --device cuda several times, timed from the start of the process to the published file,
and checks that all files are the same bytes and whole (sqz-index verify). Asks densely from that index, with selection
from one of a shorter context, which the CPU answers in minutes, and from what sqz-index prune leaves of
that one.
quest, saap: asks with selection from an index of pages, and from one of the buckets of a query classifier (--qmodel), of the
shorter context: in blocks of a few tokens of the question, too. Standard library only.
"""
import argparse
import filecmp
import json
import pathlib
import random
import subprocess
import sys
import time

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


def write_context(args, tool, source, needles, wanted):
    """A context of nearly `wanted` tokens; returns how many it has."""
    book, chars = args.text.read_text(encoding="utf-8"), wanted * 3
    for _ in range(5):
        source.write_text(make_context(book, chars, needles, random.Random(args.seed)), encoding="utf-8")
        tokens = run([tool, "build", "--model", args.model, source, "-o", args.work / "none.sqz", "--dry-run",
                      "--json"])[-1]["tokens"]
        if 0.98 * wanted <= tokens <= wanted:
            return tokens
        chars = int(chars * 0.99 * wanted / tokens)
    sys.exit(f"{args.text}: no slice of {wanted} tokens was found")


def ask(args, index, device, options):
    """The number that each question is answered with, the tokens and the delivered budget."""
    prompts = "".join(QUESTION.format(word).replace("\n", "\\n") + "\n" for word in WORDS[:args.needles])
    begun = time.perf_counter()
    result = run([args.bin / "sqz-generate", "--model", args.model, "--index", index, "--device", device, "--json",
                  "--escapes", "--max-tokens", "12", *options], prompts)[-1]
    seconds, answers = time.perf_counter() - begun, result["answers"]
    budgets = [answer["budget"] for answer in answers if "budget" in answer] or [result["budget"]]
    budget = sum(one["delivered"] for one in budgets) / len(budgets)
    numbers = [answer["text"].strip().split(".")[0].split("\n")[0] for answer in answers]
    return numbers, [answer["tokens"] for answer in answers], budget, seconds


def build_often(args, source, tokens):
    """Indexes of the same text, timed; the first of them, and what is wrong with them."""
    tool = args.bin / "sqz-index"
    indexes = [args.work / f"{i}.sqz" for i in range(args.builds)]
    for index in indexes:
        begun = time.perf_counter()
        report = run([tool, "build", "--model", args.model, source, "-o", index, "--device", args.device, "--json",
                      "--force"])[-1]
        print(f"build of {tokens} tokens: {time.perf_counter() - begun:.2f} s from process start, engine {report['engine']}, "
              f"{json.dumps(report['seconds'])}", flush=True)
    failures = [f"{index} differs from {indexes[0]}" for index in indexes[1:]
                if not filecmp.cmp(indexes[0], index, shallow=False)]
    print(f"{args.builds} builds: {'the same bytes' if not failures else 'NOT the same bytes'}")
    run([tool, "verify", indexes[0], "--json"])  # ends this program if a tensor is not as it was written
    return indexes[0], failures


def squeezed_cases(args, needles, short_source, short_tokens):
    """(name, index, options, is pruned) of each case, and what is wrong with the indexes."""
    tool, source = args.bin / "sqz-index", args.work / "context.txt"
    tokens = write_context(args, tool, source, needles, args.tokens)
    index, failures = build_often(args, source, tokens)
    short = build_short(args, short_source, "short.sqz", ["--heavy-hitters"])
    budget, name = ["--budget", args.budget], f"{short_tokens} tokens, budget {args.budget}"
    cases = [
        (f"{tokens} tokens, dense", index, ["--dense"], False),
        (name, short, budget, False),
        (f"{name}, rule threshold", short, [*budget, "--rule", "threshold"], False),
        (f"{name}, together", short, [*budget, "--batch", str(args.needles)], False),
    ]
    for selector in ("window", "h2o"):
        pruned = args.work / f"{selector}.sqz"
        run([tool, "prune", short, "--selector", selector, *budget, "-o", pruned, "--json", "--force"])
        cases.append((f"{short_tokens} tokens, pruned for {selector}", pruned, ["--selector", selector, *budget], True))
    return cases, failures


def build_short(args, source, name, options):
    run([args.bin / "sqz-index", "build", "--model", args.model, source, "-o", args.work / name, "--device", args.device,
         "--json", "--force", *options])
    return args.work / name


def selector_cases(args, selector, source, tokens):
    """The cases of quest and saap: a selection for the whole question, and one for every 8 of its tokens."""
    partition = ["--partition", "pages"] if selector == "quest" else ["--qmodel", args.qmodel]
    index = build_short(args, source, f"{selector}.sqz", partition)
    # saap reads more than a quarter of a short context in any case.
    share = ["--budget", "0.5"] if selector == "saap" else ["--budget", args.budget]
    asked = ["--selector", selector, *share]
    name = f"{tokens} tokens, {selector}, {' '.join(share).lstrip('-')}"
    return [(name, index, asked, False), (f"{name}, blocks of 8", index, [*asked, "--block", "8"], False)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=31000, help="length of the context")
    parser.add_argument("--short-tokens", type=int, default=8000, help="length of the one that is asked with selection")
    parser.add_argument("--needles", type=int, default=4)
    parser.add_argument("--builds", type=int, default=3)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--selector", default="squeezed", help="what is asked: of squeezed, quest and saap, with commas")
    parser.add_argument("--qmodel", help="query classifier of the model (sqz-train-qmodel), for saap")
    parser.add_argument("--budget", default="0.25", help="of all questions with selection but saap's")
    parser.add_argument("--device", default="cuda", help="what stands beside the CPU")
    args = parser.parse_args()
    selectors = args.selector.split(",")
    for selector in selectors:
        if selector not in ("squeezed", "quest", "saap"):
            parser.error(f"--selector: found {selector}, expected squeezed, quest or saap")
    if "saap" in selectors and args.qmodel is None:
        parser.error("--qmodel: found none, expected a query classifier for saap")
    args.work.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    needles = [(word, str(rng.randrange(10 ** 6, 10 ** 7))) for word in WORDS[:args.needles]]
    source = args.work / "short.txt"
    tokens = write_context(args, args.bin / "sqz-index", source, needles, args.short_tokens)
    cases, failures = [], []
    for selector in selectors:
        if selector == "squeezed":
            found, failures = squeezed_cases(args, needles, source, tokens)
            cases += found
        else:
            cases += selector_cases(args, selector, source, tokens)

    for name, index, options, pruned in cases:
        cpu, cpu_tokens, cpu_budget, cpu_seconds = ask(args, index, "cpu", options)
        gpu, gpu_tokens, gpu_budget, gpu_seconds = ask(args, index, args.device, options)
        found = sum(answer == number for answer, (_, number) in zip(cpu, needles))
        found_gpu = sum(answer == number for answer, (_, number) in zip(gpu, needles))
        same = sum(a == b for a, b in zip(cpu, gpu))
        same_tokens = sum(a == b for a, b in zip(cpu_tokens, gpu_tokens))
        print(f"{name}: of {len(needles)} needles the CPU finds {found}, the GPU {found_gpu}; the same answer to {same}, "
              f"token by token {same_tokens}; delivered {cpu_budget:.3f} / {gpu_budget:.3f}; "
              f"{cpu_seconds:.1f} / {gpu_seconds:.1f} s", flush=True)
        if "--dense" not in options and not pruned and max(cpu_budget, gpu_budget) >= 1:
            failures.append(f"{name}: everything was read")
        for (word, number), a, b in zip(needles, cpu, gpu):
            if a != b:
                print(f"  {word} ({number}): CPU {a!r}, GPU {b!r}")
            if (a == number or pruned) and b != a:
                failures.append(f"{name}: {word}: the CPU finds {number}, the GPU says {b!r}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
