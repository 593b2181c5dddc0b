#!/usr/bin/env python3
"""Fills tests/golden/chat.json: what transformers' apply_chat_template writes for the templates and
the chats that stand there, and the ids of the ChatML ones.

Needs: pip install transformers jinja2

    scripts/make_chat_goldens.py
"""
import json
import pathlib

from transformers import PreTrainedTokenizerFast

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/chat.json"


def main():
    families = json.loads(GOLDEN.read_text())
    for family in families:
        name = family["family"]
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "tests/golden/tokenizer/qwen2.json"),
                                            **family["tokenizer_config"])
        for chat in family["chats"]:
            context, question = chat["context"], chat["question"]
            messages = [{"role": "system", "content": context}, {"role": "user", "content": question}]
            if name == "mistral-1-user":
                messages = [{"role": "user", "content": f"{context}\n\n{question}"}]
            chat["text"] = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if name.startswith("chatml"):
                chat["ids"] = tokenizer(chat["text"], add_special_tokens=False)["input_ids"]
    GOLDEN.write_text(json.dumps(families, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
