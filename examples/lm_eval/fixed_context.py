#!/usr/bin/env python3
"""lm_eval with the few-shot examples of a task as the fixed context: densely, and reading an eighth of it.

    examples/lm_eval/fixed_context.py                                 the small model and the task facts of this folder
    examples/lm_eval/fixed_context.py --model MODEL --tasks mmlu --num_fewshot 64 --budget 0.125

For multiple choice and other tasks scored by log-likelihood whose sampler is `first_n`, so that all questions of a task
begin with the same examples. Each token selects keys for itself, as a token that is generated does (`block`).
Needs: pip install '.[transformers]' 'lm_eval[hf]'
"""

import argparse
import os
import pathlib
import tempfile

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import sqz
import sqz.transformers

FOLDER = pathlib.Path(__file__).resolve().parent


class FixedContextLM(HFLM):
    """HFLM whose prompts leave out the tokens with which all of them begin: an index has these."""

    def __init__(self, pretrained, session, **options):
        super().__init__(pretrained, **options)
        self.session, self.read = session, None

    def _loglikelihood_tokens(self, requests, **options):
        shared = len(os.path.commonprefix([context[:-1] for _, context, _ in requests]))
        with tempfile.TemporaryDirectory() as folder:
            index = sqz.build(self.model, None, requests[0][1][:shared], f"{folder}/shared.sqz")
            with sqz.transformers.FixedContext(self.model, index, **self.session) as context:
                own = [(texts, before[shared:], after) for texts, before, after in requests]
                answers = super()._loglikelihood_tokens(own, **options)
            self.read = f"{context.stats().delivered_budget:.1%} of {shared} tokens"
        return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(FOLDER.parent / "models/nano"), help="what HFLM takes as pretrained")
    parser.add_argument("--tasks", nargs="+", default=["facts"])
    parser.add_argument("--num_fewshot", type=int, default=130)
    parser.add_argument("--limit", type=int, default=20, help="questions of a task")
    parser.add_argument("--budget", type=float, default=0.125, help="share of the context's bytes to read")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for task in args.tasks:
        plain = None
        for name, session in (("lm_eval alone", None), ("index, dense", {"selector": "dense"}),
                              (f"index, budget {args.budget}", {"budget": args.budget, "block": 1})):
            options = {"device": device, "dtype": "float32" if device == "cpu" else "bfloat16", "batch_size": 1}
            lm = HFLM(args.model, **options) if session is None else FixedContextLM(args.model, session, **options)
            found = simple_evaluate(lm, tasks=[task], num_fewshot=args.num_fewshot, limit=args.limit,
                                    task_manager=TaskManager(include_path=str(FOLDER)))
            samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
            chosen = [max(range(len(s["filtered_resps"])), key=lambda i: s["filtered_resps"][i][0]) for s in samples]
            plain = plain or chosen
            scores = found["results"][task]
            print(f"{task:12} {name:22} acc {scores['acc,none']:.3f} ± {scores['acc_stderr,none']:.3f}, "
                  f"{sum(map(int.__eq__, chosen, plain))} of {len(plain)} answers as lm_eval's; read "
                  f"{getattr(lm, 'read', 'everything')}", flush=True)


if __name__ == "__main__":
    main()
