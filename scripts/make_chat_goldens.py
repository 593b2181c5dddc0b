#!/usr/bin/env python3
"""Makes tests/golden/chat.json: what transformers' apply_chat_template writes for the families of
formats/chat_format.cc, by a small template of each, and the ids of the ChatML ones.

Needs: pip install transformers jinja2

    scripts/make_chat_goldens.py
"""
import json
import pathlib

from transformers import PreTrainedTokenizerFast

ROOT = pathlib.Path(__file__).resolve().parent.parent

CHATML = ("{%% for m in messages %%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%% endfor %%}"
          "{%% if add_generation_prompt %%}{{ '%s' }}{%% endif %%}")
MISTRAL = ("{{ bos_token }}{%% if messages[0].role == 'system' %%}{%% set system_message = messages[0].content %%}"
           "{%% set messages = messages[1:] %%}{%% endif %%}{%% for m in messages %%}{%% if m.role == 'user' %%}"
           "{%% if loop.last and system_message is defined %%}"
           "{{ '%(open)s' + system_message + '\\n\\n' + m.content + '%(close)s' }}"
           "{%% else %%}{{ '%(open)s' + m.content + '%(close)s' }}{%% endif %%}"
           "{%% else %%}{{ m.content + eos_token }}{%% endif %%}{%% endfor %%}")
MISTRAL_7 = ("{{ bos_token }}{%% for m in messages %%}"
             "{%% if m.role == 'system' %%}{{ '[SYSTEM_PROMPT]%(space)s' + m.content + '[/SYSTEM_PROMPT]' }}"
             "{%% elif m.role == 'user' %%}{{ '[INST]%(space)s' + m.content + '[/INST]' }}"
             "{%% else %%}{{ m.content + eos_token }}{%% endif %%}{%% endfor %%}")

# Name: template, BOS, EOS.
FAMILIES = {
    "llama-3": ("{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m.role + "
                "'<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
                "<|begin_of_text|>", "<|eot_id|>"),
    "llama-3.1": ('{{ bos_token }}{% set date_string = "26 Jul 2024" %}'
                  '{{ "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n" }}'
                  '{{ "Today Date: " + date_string + "\\n\\n" }}'
                  '{% if messages[0].role == "system" %}{{ messages[0].content | trim }}'
                  '{% set messages = messages[1:] %}{% endif %}{{ "<|eot_id|>" }}'
                  '{% for m in messages %}{{ "<|start_header_id|>" + m.role + "<|end_header_id|>\\n\\n" + '
                  'm.content | trim + "<|eot_id|>" }}{% endfor %}'
                  '{% if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}',
                  "<|begin_of_text|>", "<|end_of_text|>"),
    "chatml": (CHATML % "<|im_start|>assistant\\n", None, "<|im_end|>"),
    "chatml-thinking": (CHATML % "<|im_start|>assistant\\n<think>\\n", None, "<|endoftext|>"),
    "mistral-1": (MISTRAL % {"open": " [INST] ", "close": " [/INST]"}, "<s>", "</s>"),
    "mistral-1-user": ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
                       "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
                       "{{ message['content'] + eos_token }}{% else %}{{ raise_exception('no such role') }}"
                       "{% endif %}{% endfor %}", "<s>", "</s>"),
    "mistral-3": (MISTRAL % {"open": "[INST] ", "close": "[/INST]"}, "<s>", "</s>"),
    "mistral-3-tekken": (MISTRAL % {"open": "[INST]", "close": "[/INST]"}, "<s>", "</s>"),
    "mistral-7": (MISTRAL_7 % {"space": " "}, "<s>", "</s>"),
    "mistral-7-tekken": (MISTRAL_7 % {"space": ""}, "<s>", "</s>"),
}
CHATS = [("The sea is wide.", "How wide is the sea?"),
         ("\n\u00a0 A road,\n\n long and\twinding. \u2003\r\n", " \n\u3000Where\n to? \x1c\n"),
         ("caf\u00e9 {{ messages }} [x]", "1234567?!\n\n")]


def main():
    out = []
    for name, (template, bos, eos) in FAMILIES.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "tests/golden/tokenizer/qwen2.json"),
                                            bos_token=bos, eos_token=eos, chat_template=template)
        chats = []
        for context, question in CHATS:
            messages = [{"role": "system", "content": context}, {"role": "user", "content": question}]
            if name == "mistral-1-user":
                messages = [{"role": "user", "content": f"{context}\n\n{question}"}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            chat = {"context": context, "question": question, "text": text}
            if name.startswith("chatml"):
                chat["ids"] = tokenizer(text, add_special_tokens=False)["input_ids"]
            chats.append(chat)
        out.append({"family": name, "chats": chats, "tokenizer_config": {
            "bos_token": bos, "eos_token": eos, "chat_template": template}})
    (ROOT / "tests/golden/chat.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
