#!/usr/bin/env python3
"""Questions about a text, answered by a model of transformers over an index of sqz.

  examples/transformers/ask.py                                      the small model and the book of this tree
  examples/transformers/ask.py --model MODEL --text manual.txt --index manual.sqz --budget 0.125

Where the index is missing, the model runs over the text once and sqz-index clusters the keys. Then each line of input
is a prompt, which the model continues; the small model knows nothing but how to continue a text. Needs the packages
sqz, torch, transformers and h5py, and, to build, the tool sqz-index.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    import sqz
    import sqz.transformers
except ImportError as error:
    sys.exit(f"{error}\nInstall what is missing in a virtual environment: pip install {ROOT} torch transformers h5py")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ROOT / "examples/models/nano", help="a checkpoint folder or a name")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "examples/texts/dracula.txt", help="UTF-8")
    parser.add_argument("--tokens", type=int, default=8000, help="of the text, from its beginning")
    parser.add_argument("--index", type=pathlib.Path, help="default: the text's name with .sqz, here")
    parser.add_argument("--budget", type=float, default=0.25, help="share of the context's bytes to read; 1 = all")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sqz-index", default=None, help="the tool; without it, that of PATH or of a build folder")
    args = parser.parse_args()
    args.index = args.index or pathlib.Path(args.text.stem + ".sqz")
    return args


def build(args, model, tokenizer):
    """Text -> token ids -> keys and values -> index."""
    tools = [args.sqz_index, shutil.which("sqz-index"), *ROOT.glob("build/*/tools/sqz-index")]
    tool = next((tool for tool in tools if tool), None)
    if tool is None:
        sys.exit("sqz-index was not found: build it with `cmake --preset cpu && cmake --build build/cpu --target sqz-index`")
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :args.tokens]
    print(f"No {args.index}: running the model over {ids.shape[1]} tokens of {args.text}", file=sys.stderr)
    captured = args.index.with_suffix(".h5")
    sqz.transformers.capture(model, ids, captured, tokenizer=tokenizer, overwrite=True)
    try:
        subprocess.run([tool, "build", "--capture", captured, "-o", args.index], check=True, stdout=sys.stderr)
    finally:
        captured.unlink()


def ask(args, model, tokenizer, context):
    question = "Prompt (an empty line ends): " if sys.stdin.isatty() else ""
    print(question, end="", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        inputs = tokenizer("\n" + line.strip(), add_special_tokens=False, return_token_type_ids=False, return_tensors="pt")
        context.reset_stats()
        model.generate(**inputs.to(args.device), max_new_tokens=args.max_tokens, do_sample=False, pad_token_id=0,
                       streamer=TextStreamer(tokenizer, skip_prompt=True))
        print(f"[{context.stats().delivered_budget:.1%} of the context's bytes were read]")
        print(question, end="", flush=True)


def main():
    args = parse()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device).eval()
        if not args.index.exists():
            build(args, model, tokenizer)
        read = {"selector": "dense"} if args.budget == 1 else {"budget": args.budget}
        with sqz.transformers.FixedContext(model, args.index, tokenizer=tokenizer, **read) as context:
            ask(args, model, tokenizer, context)
    except subprocess.CalledProcessError as error:
        sys.exit(f"sqz-index build ended with {error.returncode}")
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
