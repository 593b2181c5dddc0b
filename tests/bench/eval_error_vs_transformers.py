#!/usr/bin/env python3
"""Is sqz-eval's error of the attention output what it says it is? Asked of transformers alone.

Runs sqz-eval for one question with the selector stream (sink and most recent keys: nothing that
depends on clusters), reads the tokens of the trial back from the index that it keeps, and works out
both errors in float64 from the queries, keys and values of a float32 pass of transformers. Exits
with 1 if one differs from sqz-eval's by more than 1 %.

  tests/bench/eval_error_vs_transformers.py --bin build/cpu/tools --model DIR --text BOOK --tokens 8000

Needs torch, transformers, safetensors.
"""
import argparse
import pathlib
import re
import sys
import tempfile

import torch
from needle_agreement import QUESTION, run
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama


def token_ids(index, model):
    """Ids [N] of an index's tokens, by the values of layer 0, which depend on the token alone."""
    positions = index.get_tensor("layers.0.positions").long()
    values = index.get_tensor("layers.0.values").float()
    exact = index.get_tensor("layers.0.exact.values").float()
    heads, slots, size = values.shape
    tokens, sink = slots + exact.shape[1], int(index.metadata()["sink"])
    in_order = torch.empty(heads, tokens, size)
    for head in range(heads):
        in_order[head, positions[head]] = values[head]
    in_order[:, :sink] = exact[:, :sink]
    in_order[:, sink + slots:] = exact[:, sink:]
    rows = in_order.permute(1, 0, 2).reshape(tokens, heads * size)
    first = model.model.layers[0]
    known = first.self_attn.v_proj(first.input_layernorm(model.model.embed_tokens.weight))
    return torch.cat([torch.cdist(part, known).argmin(1) for part in rows.split(1024)])


class Errors:
    """Called in the place of transformers' attention; adds up what leaving keys out costs."""

    def __init__(self, context, kept, queries, attend):
        self.context, self.kept, self.queries, self.attend = context, kept, queries, attend
        self.layers, self.merged, self.alone = 0, 0.0, 0.0

    def __call__(self, module, query, key, value, mask, **more):
        group = query.shape[1] // key.shape[1]
        keys, values = (t[0].repeat_interleave(group, 0).double() for t in (key, value))
        logits = query[0, :, -self.queries:].double() @ keys.transpose(1, 2) * module.scaling
        length = keys.shape[1]
        seen = torch.arange(length) <= torch.arange(length - self.queries, length)[:, None]
        own = torch.arange(length) >= self.context
        kept = torch.cat([self.kept, torch.ones(length - self.context, dtype=torch.bool)])

        def output(allowed):
            return logits.masked_fill(~(seen & allowed), float("-inf")).softmax(-1) @ values

        def relative(sparse, dense):
            return ((sparse - dense).norm(dim=-1) / dense.norm(dim=-1)).mean().item()

        self.merged += relative(output(kept), output(kept | True))
        self.alone += relative(output(kept & ~own), output(~own))
        self.layers += 1
        return self.attend(module, query, key, value, mask, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of the built tools")
    parser.add_argument("--model", required=True, help="a Llama checkpoint")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--budget", type=float, default=0.125)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    attention = modeling_llama.ALL_ATTENTION_FUNCTIONS
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        result = run([arguments.bin / "sqz-eval", "--json", "--model", arguments.model, "--text",
                      arguments.text, "--tokens", str(arguments.tokens), "--task", "error", "--trials", "1",
                      "--selector", "dense,stream", "--budget", str(arguments.budget), "--seed",
                      str(arguments.seed), "--save", folder])[-1]
        row, = (r for r in result["rows"] if r["selector"] == "stream" and r["on"] == "questions")
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32,
                                                     attn_implementation="sdpa").eval()
        path, = pathlib.Path(folder).glob("*.sqz")
        with safe_open(path, "pt") as index:
            context = token_ids(index, model)
            sink, tail = (int(index.metadata()[key]) for key in ("sink", "tail"))
        word, = re.findall(r"One of the special magic numbers for (\w+) is: \d+\.",
                           tokenizer.decode(context))
        question = torch.tensor(tokenizer.encode(QUESTION.format(word), add_special_tokens=False))

        # The budget pays for sink and tail first, then for the keys before the tail.
        kept = torch.zeros(len(context), dtype=torch.bool)
        kept[:sink] = True
        kept[len(context) - round(arguments.budget * len(context)) + sink:] = True
        errors = Errors(len(context), kept, len(question), attention["sdpa"])
        attention["sdpa"] = errors
        model(torch.cat([context, question])[None], logits_to_keep=1)

    print(f"{len(context)} tokens, {len(question)} of the question about '{word}'; "
          f"stream reads {kept.float().mean():.4f} of the keys (sink {sink}, tail {tail})")
    wrong = False
    for name, ours, theirs in (("error", row["value"], errors.merged / errors.layers),
                               ("context error", row["context_error"]["value"],
                                errors.alone / errors.layers)):
        wrong |= abs(ours - theirs) > 0.01 * theirs
        print(f"{name}: sqz-eval {ours:.5f}, transformers {theirs:.5f}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
