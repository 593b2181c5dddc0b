"""sqz.build and sqz.calibrate: the bytes of sqz-index, refusals, and nothing under the name of what failed."""

import json
import shutil
import signal
import subprocess

import pytest
from transformers_support import BOOK, NANO, answers, build, load, tool, torch, transformers, whole_answers

import sqz
import sqz.transformers
from sqz import __main__ as command_line
from sqz import _builder
from sqz.chat import chat_format

TOKENS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Llama with random weights, one of three layers with a sliding window."""
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, sliding_window=64,
        use_sliding_window=True, layer_types=["full_attention", "sliding_attention", "full_attention"])
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return load(folder)


@pytest.fixture
def ids():
    return torch.randint(3, 320, (1, TOKENS), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_has_the_bytes_of_sqz_index(model, ids, dtype, tmp_path):
    model = load(model.name_or_path).to(dtype)
    sqz.transformers.capture(model, ids, tmp_path / "a.h5")
    expected = build(tmp_path / "a.h5", tmp_path / "a.sqz", "--levels", "3", "--seed", "7", rows="q8")
    told = []
    built = sqz.build(model, None, ids, tmp_path / "b.sqz", rows="q8", levels=3, seed=7, threads=1,
                      progress=told.append)
    assert (tmp_path / "b.sqz").read_bytes() == expected.read_bytes()
    assert built.tokens == TOKENS and built.bytes == expected.stat().st_size and sqz.Index(built).info.levels == 3
    assert "b.sqz" in repr(built) and "tokens=400" in repr(built)
    assert told == sorted(told) and told[-1] == 1 and len(told) >= 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "a.sqz", "b.sqz"]


@pytest.fixture
def ctrl_c():
    """SIGINT raises, as on a terminal: what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_nothing(model, ids, ctrl_c, tmp_path):
    def stop(done):
        if done > 0.5:
            ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        sqz.build(model, None, ids, tmp_path / "a.sqz", progress=stop)
    assert not list(tmp_path.iterdir())
    sqz.build(model, None, ids, tmp_path / "a.sqz")  # the model is as before


def test_ctrl_c_while_libsqz_works_is_kept(ctrl_c):
    """Python sees it when a callback begins, where ctypes drops errors."""
    ended = []

    def work(_):
        ctrl_c()
        ended.append(True)
        return 0

    with pytest.raises(KeyboardInterrupt):
        _builder.Progress(None).run(work)
    assert ended and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_for_the_pass_is_said(model, ids, error, tmp_path, monkeypatch):
    plain = model.model.layers[1].mlp.forward

    def forward(hidden):
        if hidden.shape[1] > 2:
            raise error
        return plain(hidden)

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", forward)
    with pytest.raises(MemoryError, match="no memory for a pass over 400 tokens: give less text, or load the model"):
        sqz.build(model, None, ids, tmp_path / "a.sqz")
    assert not list(tmp_path.iterdir())


def test_texts_are_encoded_as_by_sqz_index(tmp_path):
    nano, tokenizer = load(NANO), transformers.AutoTokenizer.from_pretrained(NANO)
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    book = BOOK.read_text(encoding="utf-8")
    (folder / "b" / "1.md").write_text(book[3000:6000], encoding="utf-8")
    (folder / "b.txt").write_text(book[6000:9000], encoding="utf-8")
    (folder / "binary").write_bytes(b"\0\1")
    (folder / ".hidden").write_text("no")
    (tmp_path / "first.txt").write_text(book[:3000], encoding="utf-8")
    texts = [tmp_path / "first.txt", folder]
    built = sqz.build(nano, tokenizer, texts, tmp_path / "a.sqz", sink=4)
    command = ["build", *map(str, texts), "-m", str(NANO), "-o", str(tmp_path / "c.sqz"), "--sink", "4", "-q",
               "--device", "cpu"]
    assert command_line.main(command) == 0
    assert (tmp_path / "c.sqz").read_bytes() == (tmp_path / "a.sqz").read_bytes()
    subprocess.run([tool("sqz-index"), "build", "--model", NANO, *texts, "-o", tmp_path / "b.sqz", "--sink", "4"],
                   check=True, capture_output=True)
    one, other = sqz.Index(built).info, sqz.Index(tmp_path / "b.sqz").info
    assert (one.tokens_hash, one.tokenizer_hash, one.model_fingerprint) == (
        other.tokens_hash, other.tokenizer_hash, other.model_fingerprint)

    prompts = ["Who is the Count?", "Where is the castle?"]
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    result = sqz.calibrate(built, nano, tokenizer, prompts, answer_tokens=3)
    assert result["path"] == built.path and result["source"].startswith("prompts: 2 prompts, ")
    asked = sum(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts)
    assert result["queries"] == asked + 6
    assert (tmp_path / "c.sqz").read_bytes() != (tmp_path / "a.sqz").read_bytes()
    command = ["calibrate", str(tmp_path / "c.sqz"), "-m", str(NANO), "--prompts", str(tmp_path / "prompts.jsonl"),
               "--answer-tokens", "3", "--device", "cpu"]
    assert command_line.main(command) == 0
    assert (tmp_path / "c.sqz").read_bytes() == (tmp_path / "a.sqz").read_bytes()
    sqz.Index(built).verify()
    with pytest.raises(FileExistsError, match="b.sqz exists"):
        sqz.calibrate(built, nano, tokenizer, prompts, output=tmp_path / "b.sqz")
    with pytest.raises(ValueError, match="prompts: found"):
        sqz.calibrate(built, nano, tokenizer, [])


def test_texts_stand_in_a_chat_as_by_sqz_index(tmp_path):
    nano, tokenizer = load(NANO), transformers.AutoTokenizer.from_pretrained(NANO)
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    text = tmp_path / "a.txt"
    text.write_text("\n " + BOOK.read_text(encoding="utf-8")[5000:7000] + " \n", encoding="utf-8")
    built = sqz.build(nano, tokenizer, text, tmp_path / "a.sqz", chat=True)
    chat = chat_format(tokenizer)
    assert chat["trim"] and chat["before"] == "<system>"
    (tmp_path / "F.json").write_text(json.dumps(chat))
    subprocess.run([tool("sqz-index"), "build", "--model", NANO, text, "-o", tmp_path / "b.sqz", "--chat",
                    tmp_path / "F.json"], check=True, capture_output=True)
    assert sqz.Index(built).info.tokens_hash == sqz.Index(tmp_path / "b.sqz").info.tokens_hash
    assert command_line.main(["build", str(text), "-m", str(NANO), "-o", str(tmp_path / "c.sqz"), "--chat",
                              str(tmp_path / "F.json"), "--device", "cpu"]) == 0
    assert (tmp_path / "c.sqz").read_bytes() == (tmp_path / "a.sqz").read_bytes()

    result = sqz.calibrate(built, nano, tokenizer, [" Who? "], answer_tokens=1)
    turn = tokenizer(chat["between"] + "Who?" + chat["after"], add_special_tokens=False)["input_ids"]
    assert result["queries"] == len(turn) + 1
    with pytest.raises(ValueError, match="chat: found no between"):
        sqz.build(nano, tokenizer, text, tmp_path / "d.sqz", chat={"before": "", "after": ""})
    for wrong, sentence in (("auto", "chat: found 'auto'"), (chat | {"between": None}, "chat: between: found None"),
                            (chat | {"trim": "no"}, "chat: trim: found 'no'"),
                            (chat | {"end": [1]}, "chat: end: found ")):
        with pytest.raises((TypeError, ValueError), match=sentence):
            sqz.build(nano, tokenizer, text, tmp_path / "d.sqz", chat=wrong)
    with pytest.raises(ValueError, match="chat: found it beside token ids"):
        sqz.build(nano, tokenizer, [3] * 200, tmp_path / "d.sqz", chat=True)
    text.write_text(f"a {tokenizer.all_special_tokens[0]} b")
    with pytest.raises(ValueError, match="text: found the special token"):
        sqz.build(nano, tokenizer, text, tmp_path / "d.sqz", chat=True)


def test_mistakes(model, ids, tmp_path):
    def refused(error, sentence, texts, tokenizer=None, use=model, **options):
        with pytest.raises(error, match=sentence):
            sqz.build(use, tokenizer, texts, tmp_path / "a.sqz", **options)
        assert not (tmp_path / "a.sqz").exists()

    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    nano = transformers.AutoTokenizer.from_pretrained(NANO)
    refused(ValueError, "text: found nothing, expected some text", tmp_path / "empty.txt", nano)
    refused(ValueError, "texts: found none", [], nano)
    refused(ValueError, "found no text file", [tmp_path / "folder"], nano)
    refused(ValueError, "latin.txt: text: not valid UTF-8 at byte 3", [tmp_path / "latin.txt"], nano)
    refused(ValueError, "zero.txt: found a zero byte", [tmp_path / "zero.txt"], nano)
    refused(FileNotFoundError, "missing.txt", ["missing.txt"], nano)
    refused(TypeError, "tokenizer: found None", [tmp_path / "empty.txt"])
    refused(ValueError, "expected 0 to 319, the vocabulary of the model: use the tokenizer of its folder", [BOOK], nano)
    refused(ValueError, "input_ids: found 2000 tokens, expected at most 1024", ids.repeat(1, 5))
    refused(sqz.Error, 'options: found "colour", expected some of sink, ', ids, colour="red")
    refused(sqz.Error, "tokens", ids[:, :60])
    refused(TypeError, "expected a model of transformers", ids, use=torch.nn.Linear(2, 2))
    refused(ValueError, "in training mode", ids, use=load(model.name_or_path).train())
    nano_copy = tmp_path / "copy"
    nano.save_pretrained(nano_copy)
    (nano_copy / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes() + b"\n")
    other = transformers.AutoTokenizer.from_pretrained(nano_copy)
    refused(ValueError, "tokenizer: found that of .*copy, expected that of .*nano", [BOOK], other, use=load(NANO))
    sqz.build(model, None, ids, tmp_path / "b.sqz")
    with pytest.raises(FileExistsError, match="b.sqz exists: pass overwrite=True"):
        sqz.build(model, None, ids, tmp_path / "b.sqz")
    sqz.build(model, None, ids, tmp_path / "b.sqz", overwrite=True, max_tokens=300)
    assert sqz.Index(tmp_path / "b.sqz").info.tokens == 300


def test_an_output_replaces_no_input(tmp_path, capsys):
    """--force put an index in the place of the model's config.json, and of the text."""
    folder, text = tmp_path / "model", tmp_path / "text.md"
    shutil.copytree(NANO, folder)
    text.write_text(BOOK.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    for output in (folder / "config.json", folder / "tokenizer.json", text):
        before = output.read_bytes()
        assert command_line.main(["build", str(text), "--model", str(folder), "-o", str(output), "--force", "-q"]) == 3
        assert "which is an input, too" in capsys.readouterr().err
        assert output.read_bytes() == before


def test_a_context_grows(tmp_path):
    """Built after others, without computing these again: read densely, all are one text, and refused in other places."""
    nano, tokenizer = load(NANO), transformers.AutoTokenizer.from_pretrained(NANO)
    ids = tokenizer(BOOK.read_text(encoding="utf-8")[:9000], return_tensors="pt").input_ids[:, :1500]
    parts, indexes = [ids[:, :700], ids[:, 700:1100], ids[:, 1100:]], []
    for number, part in enumerate(parts):
        sqz.build(nano, None, part, tmp_path / f"{number}.sqz", rows="f16", after=indexes)
        indexes.append(tmp_path / f"{number}.sqz")
    assert sqz.Index(indexes[2]).info.after == tuple(sqz.Index(path).info.context_id for path in indexes[:2])
    with pytest.raises(ValueError, match="output: found .*0.sqz, which is an input, too"):
        sqz.build(nano, None, parts[2], indexes[0], after=indexes[0], overwrite=True)
    with pytest.raises(sqz.Error, match="after: found an array of 8, expected an array of 1 to 7"):
        sqz.build(nano, None, parts[2], tmp_path / "x.sqz", after=indexes[:1] * 8)
    with pytest.raises(ValueError, match="700 tokens of context and 32100 that follow are 32800, but the model has 32768"):
        sqz.build(nano, None, [5] * 32100, tmp_path / "x.sqz", after=indexes[:1])
    assert not (tmp_path / "x.sqz").exists()
    questions = [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
                 for text in ("\nJonathan went to", "\nThe Count said that he", "\nThe driver")]
    with sqz.transformers.FixedContext(nano, indexes, selector="dense") as fixed:
        grown = [answers(nano, question)[0] for question in questions]
        for wrong in ([0, 2], [1, 0, 2], [2], [0, 2, 1]):
            fixed.contexts = [wrong]
            with pytest.raises(sqz.Error, match="without the . contexts that stood in front when it was made"):
                answers(nano, questions[0])
    assert grown == [whole_answers(nano, ids, question)[0] for question in questions]


@pytest.mark.parametrize("scaling", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128}], ids=lambda scaling: scaling["rope_type"])
def test_contexts_turn_as_the_model_does(scaling, tmp_path):
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.2,
        rope_parameters={"rope_theta": 10000.0, **scaling})).eval()
    ids, question = torch.randint(3, 320, (1, 600)), torch.randint(3, 320, (1, 12))
    first = sqz.build(model, None, ids[:, :350], tmp_path / "a.sqz", rows="f16")
    second = sqz.build(model, None, ids[:, 350:], tmp_path / "b.sqz", rows="f16", after=first)
    with torch.no_grad():
        whole = model(torch.cat([ids, question], 1)).logits[:, 600:]
        with sqz.transformers.FixedContext(model, [first, second], selector="dense"):
            assert (model(question).logits - whole).abs().max() < 5e-3 * whole.abs().max()
    q, angle = torch.randn(3, 4, 16), 350 * model.model.rotary_emb.inv_freq.double()
    a, b = q.double().chunk(2, -1)
    back = torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], -1).float()
    with sqz.Index(first) as index, sqz.Session(index, selector="dense", max_contexts=2) as session:
        for found, expected in zip(session.attend(1, q, contexts=[[sqz.Context(0, 350)]]), session.attend(1, back),
                                   strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
