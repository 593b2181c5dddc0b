"""sqz.chat: the texts around the turns of templates, as transformers renders them."""

import json
import pathlib

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from sqz.chat import chat_format  # noqa: E402

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
FAMILIES = {family["family"]: family for family in json.loads((GOLDEN / "chat.json").read_text())}
# No system turn, and white space is taken away at the ends of a turn.
ONE_TURN = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
            "{{ '<' + m.role + '>' + m.content | trim + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
HALF_TRIMMED = ("{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content | trim if loop.first else m.content }}"
                "{% endfor %}")
LAST_ONLY = "{{ messages[-1].content if messages[-1].role == 'system' else 'nothing' }}"


def tokenizer_of(template, bos=None, eos="<|endoftext|>"):
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(GOLDEN / "tokenizer/qwen2.json"), bos_token=bos,
                                                eos_token=eos, chat_template=template)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_chat_of_the_parts_is_the_chat_of_the_template(family):
    config = family["tokenizer_config"]
    chat = chat_format(tokenizer_of(config["chat_template"], config["bos_token"], config["eos_token"]))
    for golden in family["chats"]:
        context, question = golden["context"], golden["question"]
        if chat["trim"]:
            context, question = context.strip(), question.strip()
        assert chat["before"] + context + chat["between"] + question + chat["after"] == golden["text"]
    assert chat["end"][-1] == config["eos_token"]


def test_the_context_begins_the_users_turn_where_there_is_no_other():
    assert chat_format(tokenizer_of(ONE_TURN)) == {
        "before": "<user>", "between": "\n\n", "after": "<|im_end|><assistant>", "end": ["<|im_end|>", "<|endoftext|>"],
        "trim": True}


@pytest.mark.parametrize("template, says", [(HALF_TRIMMED, "white space"), (LAST_ONLY, "once each")])
def test_refuses_what_is_no_fixed_text(template, says):
    with pytest.raises(ValueError, match=says):
        chat_format(tokenizer_of(template))
