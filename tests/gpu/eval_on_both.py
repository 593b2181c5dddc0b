#!/usr/bin/env python3
"""sqz-eval on a GPU against sqz-eval on the CPU. Not part of ctest: it wants a GPU and a trained model.

  tests/gpu/eval_on_both.py --bin build/cuda/tools --model DIR --text BOOK

Runs needles, loss, output error and recall of several selectors with --device cuda and with --device cpu. Each run builds
its own indexes, so clusters differ a little. Fails if a row's value differs by more than --tolerance of its size, an
accuracy by more than two trials, or a delivered budget by more than .005. Standard library only.
"""
import argparse
import json
import pathlib
import subprocess
import sys


def evaluate(args, device):
    command = [args.bin / "sqz-eval", "--json", "--no-progress", "--device", device, "--model", args.model, "--text", args.text,
               "--tokens", args.tokens, "--trials", args.trials, "--task", "needle1,loss,error,recall", "--continuation", 384,
               "--selector", args.selector, "--levels", "1,2", "--rule", "threshold,budget",
               "--budget", args.budget, "--block", 64, "--seed", args.seed]
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if found.returncode != 0:
        sys.exit(f"--device {device}: exit code {found.returncode}: {found.stderr.strip()}")
    rows = json.loads(found.stdout.splitlines()[-1])["rows"]
    names = ("task", "on", "selector", "levels", "rule")
    return {tuple(str(row.get(name, "")) for name in names): row for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--selector", default="dense,squeezed,quest,stream,h2o,window")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--device", default="cuda", help="what stands beside the CPU")
    args = parser.parse_args()
    gpu = evaluate(args, args.device)
    cpu = evaluate(args, "cpu")
    failures = [] if gpu.keys() == cpu.keys() else ["the two have different rows"]
    largest = 0.0
    for name in sorted(gpu.keys() & cpu.keys()):
        a, b = gpu[name]["value"], cpu[name]["value"]
        delivered = [row["budget"]["delivered"] for row in (gpu[name], cpu[name])]
        print(f"{' '.join(part for part in name if part):50} {args.device} {a:.5f} cpu {b:.5f} delivered {delivered[0]:.4f} "
              f"{delivered[1]:.4f}")
        most = 2.001 / args.trials if name[0] == "needle1" else args.tolerance * abs(b)
        if name[0] != "needle1" and b != 0:
            largest = max(largest, abs(a - b) / abs(b))
        if abs(a - b) > most or abs(delivered[0] - delivered[1]) > 0.005:
            failures.append(" ".join(name))
    print(f"{len(gpu)} rows; largest difference of a loss, error or recall: {100 * largest:.2f} %")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
