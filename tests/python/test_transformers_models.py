"""Dense sessions give the greedy tokens of the whole context for each architecture, and README.md says so."""

import pytest
from transformers_support import BOOK, NANO, ROOT, build, load, torch, transformers

import architectures as a
import sqz
import sqz.transformers
from sqz.transformers.layers import look


@pytest.mark.parametrize("name,tokens", [(name, tokens) for name in a.MODELS
                                         for tokens in list(a.CONTEXTS)[:2 if a.windowed(name) else 1]])
def test_dense_is_the_whole_context(name, tokens, tmp_path):
    if name.partition("/")[0] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = a.make(name, a.CONTEXTS[tokens])
    torch.manual_seed(2)
    context, questions = torch.randint(3, 320, (1, tokens)), torch.randint(3, 320, (a.QUESTIONS, a.TOKENS))
    index = sqz.build(model, None, context, tmp_path / "context.sqz", rows="f16", sink=4, tail=30, threads=1)
    expected, logits = a.whole_answers(model, context, questions)
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as fixed:
        assert a.count_equal(a.ask(model, questions), expected, logits) == a.QUESTIONS
        assert a.with_state(index) or a.count_equal(a.ask_padded(model, questions[:2]), expected[:2], logits) == 2
        assert fixed.stats().delivered_budget == 1
    assert a.ask(model, questions[:2]) != expected[:2]  # the context matters


def test_readme_has_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(["", *a.table(), ""]) in text


@pytest.mark.parametrize("name", ["falcon_h1", "gemma4_text/E", "llama4_text"])
def test_a_capture_gives_the_same_index(name, tmp_path):
    model, context = a.make(name, 24), torch.arange(3, 203)[None]
    sqz.build(model, None, context, tmp_path / "a.sqz", threads=1)
    sqz.transformers.capture(model, context, tmp_path / "b.h5")
    build(tmp_path / "b.h5", tmp_path / "b.sqz", rows="bf16")
    assert (tmp_path / "a.sqz").read_bytes() == (tmp_path / "b.sqz").read_bytes()
    layers = sqz.Index(tmp_path / "a.sqz").layers
    assert layers == look(model).all
    assert [layer.of for layer in layers][4:] == ([2, 3] if name == "gemma4_text/E" else [])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model with recurrent layers, and its index."""
    model = a.make("qwen3_5_text", 0)
    return model, sqz.build(model, None, torch.arange(3, 203), tmp_path_factory.mktemp("hybrid") / "a.sqz", rows="f16")


def test_a_state_goes_on_in_every_cache(hybrid):
    """Without a cache, with one's own, in parts, and for beams."""
    model, index = hybrid
    question = torch.arange(10, 22)[None]
    with torch.no_grad(), sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        expected = model(question).logits
        for given in ({"use_cache": False}, {"past_key_values": transformers.DynamicCache(config=model.config)}):
            torch.testing.assert_close(model(question, **given).logits, expected)
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in question.split(5, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-3, rtol=1e-3)
        beams = a.ask(model, question, num_beams=2)
        assert a.ask(model, question, prefill_chunk_size=5) == a.ask(model, question)
    assert beams == a.ask(model, torch.cat([torch.arange(3, 203)[None], question], 1), num_beams=2)


def test_a_budget_of_full_layers(tmp_path, monkeypatch):
    """Behind layers with a state, which neither calibrate nor are counted."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(NANO)
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": 8192}
    monkeypatch.setitem(a.MODELS, "qwen3_5_text", {**a.MODELS["qwen3_5_text"], **more})
    model = a.make("qwen3_5_text", 0)
    index = sqz.build(model, tokenizer, BOOK, tmp_path / "a.sqz", max_tokens=5000)
    prompt = "Who is the Count?"
    result = sqz.calibrate(index, model, tokenizer, [prompt], answer_tokens=3)
    assert result["queries"] == 3 + len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    with sqz.transformers.FixedContext(model, index, tokenizer=tokenizer, budget=0.25, threads=1) as fixed:
        a.ask(model, torch.arange(10, 22)[None])
        assert fixed.stats().delivered_budget == pytest.approx(0.25, abs=0.02)
        assert fixed.stats(0).selections == 0 < fixed.stats(3).selections


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_compiled_pass_continues_the_state(hybrid, tokens):
    model, index = hybrid
    ids = torch.arange(10, 10 + tokens)[None]
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1), torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model.forward, backend="eager")(ids).logits
    torch.compiler.reset()
    assert torch.allclose(found, expected, atol=1e-3)


def test_what_a_state_refuses(hybrid, tmp_path):
    model, index = hybrid
    ids = torch.arange(10, 22).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as fixed:
        with pytest.raises(ValueError, match="found padding, expected requests of one length"):
            a.ask(model, ids, attention_mask=mask)
        fixed.contexts = [[0], []]
        with pytest.raises(ValueError, match="layer 0 of Qwen3_5ForCausalLM keeps a state: such a model follows one"):
            a.ask(model, ids)
    with pytest.raises(ValueError, match="layer 0 of Qwen3_5ForCausalLM keeps a state"):
        sqz.transformers.FixedContext(model, [index, index])
    with pytest.raises(ValueError, match="layer 0 of Qwen3_5ForCausalLM keeps a state"):
        sqz.build(model, None, [3] * 200, tmp_path / "b.sqz", after=[index])


def test_a_state_of_another_type(hybrid, tmp_path):
    hybrid[0].save_pretrained(tmp_path / "model")
    index = sqz.build(load(tmp_path / "model"), None, [3] * 200, tmp_path / "a.sqz")
    with pytest.raises(ValueError, match="state of layer 0: the index has .*torch.float32.*, this model .*bfloat16"):
        sqz.transformers.FixedContext(load(tmp_path / "model").bfloat16(), index)


@pytest.mark.parametrize("name,change,sentence", [
    ("gemma3_text", {"sliding_window": 32}, r"sliding_window\[0\]: the index was built for 24, this model has 32"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 4}, r"sliding_window\[0\]: .* for 24, this model has 0"),
    ("gemma4_text", {"num_global_key_value_heads": 2}, "kv_heads: the index was built for 1, this model has 2"),
    ("gemma4_text", {"num_key_value_heads": 4}, r"geometry\[0\].kv_heads: the index was built for 2, this model has 4"),
    ("llama4_text", {"attention_chunk_size": 32}, r"geometry\[0\].chunk: .* built for 24, this model has 32"),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, r"geometry\[1\].*: the index was built for"),
])
def test_layers_that_differ_are_named(name, change, sentence, tmp_path, monkeypatch):
    index = sqz.build(a.make(name, 24), None, torch.arange(3, 203), tmp_path / "a.sqz")
    monkeypatch.setitem(a.MODELS, name, {**a.MODELS[name], **change})
    with pytest.raises(ValueError, match="not an index of this model: " + sentence):
        sqz.transformers.FixedContext(a.make(name, 24), index)


def test_an_image_in_the_context(tmp_path):
    model = a.make("qwen3_5", 0)
    model.config.image_token_id = 300
    with pytest.raises(ValueError, match="input_ids: found 300, the model's image token, expected a context of text"):
        sqz.build(model, None, torch.arange(200, 320), tmp_path / "a.sqz")
