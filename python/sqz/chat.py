"""The texts around the turns of a model's chat template, which `sqz-index build --chat` takes.

    python -m sqz.chat MODEL > F.json

MODEL is a folder with a tokenizer of transformers. Its template is rendered by transformers itself, so any template
will do that writes context and question once each: as a system turn and a user's turn or, where it has no system
turn, as one turn of the user.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

CONTEXT, QUESTION, ANSWER = "sqzCONTEXTsqz", "sqzQUESTIONsqz", "sqzANSWERsqz"


def chat_format(tokenizer: Any) -> dict[str, Any]:
    """{"before", "between", "after", "end", "trim"} of a tokenizer of transformers that has a chat template.

    ValueError for a template that writes anything else than fixed texts around context and question, or that takes
    the white space away at one end of them alone.
    """
    from jinja2 import TemplateError

    def render(context: str, question: str, answer: str | None = None) -> str:
        turns = [("system", context), ("user", question)] if system else [("user", f"{context}\n\n{question}")]
        messages = [{"role": role, "content": content} for role, content in turns]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None))

    for system in (True, False):
        try:
            text = render(CONTEXT, QUESTION)
        except TemplateError:  # "System role not supported"
            continue
        if text.count(CONTEXT) == 1 and text.count(QUESTION) == 1 and text.find(CONTEXT) < text.find(QUESTION):
            break
    else:
        raise ValueError("the chat template does not write a context and, behind it, a question once each")
    before, rest = text.split(CONTEXT)
    between, after = rest.split(QUESTION)
    spaced = render(f" \n{CONTEXT}\n ", f"\n {QUESTION} \n")
    kept = f"{before} \n{CONTEXT}\n {between}\n {QUESTION} \n{after}"
    in_one = f"{before}{CONTEXT}\n {between}\n {QUESTION}{after}"  # the ends of a turn of both
    if spaced not in (text, kept, in_one):
        raise ValueError("the chat template changes the white space around context or question: write its texts by "
                         "hand")
    ending = render(CONTEXT, QUESTION, ANSWER).partition(ANSWER)[2]
    special = set(tokenizer.all_special_tokens) | {str(token) for token in tokenizer.get_added_vocab()}
    end = [token for token in tokenizer.tokenize(ending) if token in special][:1]
    if tokenizer.eos_token and tokenizer.eos_token not in end:
        end.append(tokenizer.eos_token)
    return {"before": before, "between": between, "after": after, "end": end, "trim": spaced != kept}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sqz.chat", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model with a chat template")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(parser.parse_args().model)
        json.dump(chat_format(tokenizer), sys.stdout, indent=1, ensure_ascii=False)
    except (OSError, ValueError) as error:
        raise SystemExit(f"python -m sqz.chat: {error}") from None
    print()


if __name__ == "__main__":
    main()
