#!/usr/bin/env python3
"""Questions about a text, answered by a model of transformers over an index of sqz.

  examples/transformers/ask.py                                      the small model and the book of this tree
  examples/transformers/ask.py --model MODEL --text manual.txt --index manual.sqz --budget 0.125

If the index is missing, the model runs over the text once. Then each line of input is a prompt, which the model
continues; the small model knows nothing but how to continue a text. Needs: pip install '.[transformers]' in the
checkout.
"""

import argparse
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import sqz
import sqz.transformers

EXAMPLES = pathlib.Path(__file__).resolve().parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EXAMPLES / "models/nano", help="a checkpoint folder or a name")
    parser.add_argument("--text", type=pathlib.Path, default=EXAMPLES / "texts/dracula.txt", help="UTF-8")
    parser.add_argument("--tokens", type=int, default=8000, help="of the text, from its beginning")
    parser.add_argument("--index", type=pathlib.Path, default="book.sqz", help="made if it is missing")
    parser.add_argument("--budget", type=float, default=0.25, help="share of the context's bytes to read")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device).eval()
    if not args.index.exists():
        print(sqz.build(model, tokenizer, args.text, args.index, max_tokens=args.tokens), file=sys.stderr)
    with sqz.transformers.FixedContext(model, args.index, tokenizer=tokenizer, budget=args.budget) as context:
        for line in sys.stdin:
            question = tokenizer("\n" + line.strip(), add_special_tokens=False, return_token_type_ids=False,
                                 return_tensors="pt").to(args.device)
            context.reset_stats()
            model.generate(**question, max_new_tokens=48, do_sample=False, pad_token_id=0,
                           streamer=TextStreamer(tokenizer, skip_prompt=True))
            print(f"[{context.stats().delivered_budget:.1%} of the context's bytes were read]")


if __name__ == "__main__":
    main()
