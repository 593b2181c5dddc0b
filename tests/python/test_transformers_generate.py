"""The ways to generate over a fixed context, with the small trained model and 4,300 tokens of a book."""

import json
import subprocess
import threading

import pytest
from transformers_support import ANSWER, BOOK, NANO, answers, build, load, tool, torch, transformers, whole_answers

import sqz
import sqz.transformers

TOKENS = 4300  # below 4,096 sessions read everything
QUESTIONS = ["\nWhat did the Count say? He said", "\nJonathan went to the castle in", "\nThe name of the horse was",
             "\nThe driver spoke to", "\nIn the morning I", "\nMina wrote that", "\nWe left in pretty good time, and",
             "\nThe women looked", "\nOne of the wolves", "\nThe old man said that the window"]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(NANO)


@pytest.fixture(scope="module")
def model():
    return load(NANO)


@pytest.fixture(scope="module")
def context(tokenizer):
    return tokenizer(BOOK.read_text(encoding="utf-8")[:40000], return_tensors="pt").input_ids[:, :TOKENS]


@pytest.fixture(scope="module")
def index(model, tokenizer, context, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    sqz.transformers.capture(model, context, folder / "book.h5", tokenizer=tokenizer)
    return build(folder / "book.h5", folder / "book.sqz")


@pytest.fixture
def ask(model, index, tokenizer):
    """Answers to texts, left-padded to one batch, by a FixedContext with these session options."""
    def ask(texts, session, **options):
        batch = padded(tokenizer, texts)
        with sqz.transformers.FixedContext(model, index, tokenizer=tokenizer, threads=1, **session):
            return answers(model, **{"questions": batch.input_ids, "attention_mask": batch.attention_mask, **options})
    return ask


def padded(tokenizer, texts):
    tokenizer.pad_token_id = 0
    return tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def log(model, tokenizer, tmp_path_factory):
    """Another document: its tokens [1, 500] and its index."""
    folder = tmp_path_factory.mktemp("log")
    tokens = tokenizer(BOOK.read_text(encoding="utf-8")[90000:96000], return_tensors="pt").input_ids[:, :500]
    sqz.transformers.capture(model, tokens, folder / "log.h5", tokenizer=tokenizer)
    return tokens, build(folder / "log.h5", folder / "log.sqz")


def greedy(model, cache, first, question):
    """The answer to a question whose first position is `first`."""
    found, tokens = [], question
    with torch.inference_mode():
        while len(found) < ANSWER:
            positions = first + torch.arange(tokens.shape[1])[None]
            logits = model(tokens, past_key_values=cache, position_ids=positions, use_cache=True).logits
            first += tokens.shape[1]
            tokens = logits[:, -1:].argmax(-1)
            found.append(int(tokens))
    return found


def test_each_row_has_its_own_documents(model, tokenizer, index, context, log):
    """Alone, and one behind the other: as over keys that the model made there, without the sinks of the second."""
    questions = [tokens_of(tokenizer, text) for text in QUESTIONS[:2]]
    expected = [[whole_answers(model, tokens, question)[0] for tokens in (context, log[0])] for question in questions]
    for place, question in enumerate(questions):
        cache, behind = (transformers.DynamicCache(config=model.config) for _ in range(2))
        with torch.inference_mode():
            model(context, past_key_values=cache, logits_to_keep=1)
            model(log[0], past_key_values=behind, position_ids=TOKENS + torch.arange(500)[None], logits_to_keep=1)
        for layer, second in zip(cache.layers, behind.layers, strict=True):
            for name in ("keys", "values"):
                both = torch.cat([getattr(layer, name), getattr(second, name)[:, :, 4:]], 2)
                setattr(layer, name, both.half().float())
        expected[place].append(greedy(model, cache, TOKENS + 500, question))
    documents = [[0], [1], [0, 1]]
    with sqz.transformers.FixedContext(model, [index, log[1]], contexts=documents, selector="dense") as fixed:
        for question, wanted in zip(questions, expected, strict=True):
            assert answers(model, question.expand(3, -1)) == wanted
        assert fixed.stats(document=1).selections > 0
        fixed.contexts = [[2]]
        with pytest.raises(ValueError, match="found document 2, expected 0 to 1"):
            answers(model, questions[0])
        fixed.contexts = [[0], [1]]
        with pytest.raises(ValueError, match="contexts: found those of 2 rows, expected 3, the rows of the batch"):
            answers(model, questions[0].expand(3, -1))
        fixed.contexts = None
        assert answers(model, questions[0])[0] == expected[0][2]


@pytest.mark.parametrize("session", [
    {"budget": 0.25}, {"budget": 0.25, "rule": "threshold"}, {"budget": 0.2, "levels": 1},
    {"budget": 0.3, "block": 4}])
def test_sparse_is_sqz_generate(session, index, ask, tokenizer, model):
    options = [part for name, value in session.items() for part in (f"--{name}", str(value))]
    run = subprocess.run([tool("sqz-generate"), "--model", NANO, "--index", index, "--json", "--escapes",
                          "--max-tokens", "24", "--threads", "1", *options], capture_output=True, text=True, check=True,
                         input="\n".join(text.replace("\n", "\\n") for text in QUESTIONS[:4]))
    expected = json.loads(run.stdout.splitlines()[-1])["answers"]
    for text, found in zip(QUESTIONS, expected):
        assert ask([text], session)[0][:len(found["tokens"])] == found["tokens"], text
    with sqz.transformers.FixedContext(model, index, threads=1, **session) as fixed:
        answers(model, tokens_of(tokenizer, QUESTIONS[3]))
        assert fixed.stats().delivered_keep == pytest.approx(expected[3]["keep"]["delivered"], abs=1e-3)
        assert fixed.stats().delivered_keep < 0.6


def with_nan(own_state):
    """A kernel that leaves NaN in rows whose keys are all masked."""
    def attend(query, key, value, bias, scale):
        own, own_lse = own_state(query, key, value, bias, scale)
        if bias is not None and query.shape[2] > 1:
            own[(bias == float("-inf")).all(-1).transpose(1, 2).flatten(0, 1)] = float("nan")
        return own, own_lse
    return attend


@pytest.mark.parametrize("session", [{"selector": "dense"}, {"budget": 0.25}])
def test_a_batch_with_padding_is_each_request_alone(session, model, tokenizer, index, monkeypatch):
    monkeypatch.setattr("sqz.transformers.context.own_state", with_nan(sqz.transformers.context.own_state))
    texts = [QUESTIONS[0], QUESTIONS[0] * 4, QUESTIONS[2]]
    batch = padded(tokenizer, texts)
    with sqz.transformers.FixedContext(model, index, threads=1, **session) as fixed:
        alone = [answers(model, tokens_of(tokenizer, text))[0] for text in texts]
        keys = fixed.stats().keys_read
        fixed.reset_stats()
        assert answers(model, batch.input_ids, attention_mask=batch.attention_mask) == alone
        assert fixed.stats().keys_read == pytest.approx(keys, rel=1e-3)


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 3}, {"prefill_chunk_size": 5},
                                     {"do_sample": True, "temperature": 0.7}])
def test_other_ways_to_generate(options, model, tokenizer, context, ask):
    question = tokens_of(tokenizer, QUESTIONS[0])
    whole = torch.cat([context, question], 1)
    if "prefill_chunk_size" in options or "cache_implementation" in options:
        expected = ask([QUESTIONS[0]], {"selector": "dense"})
    else:
        torch.manual_seed(5)
        expected = answers(model, whole, **options)
    torch.manual_seed(5)
    assert ask([QUESTIONS[0]], {"selector": "dense"}, **options) == expected


def test_prompts_longer_than_a_call(model, tokenizer, context, ask):
    long, short = QUESTIONS[0] * 4, QUESTIONS[1]
    assert ask([long, short], {"selector": "dense", "max_tokens": 16}) == ask([long, short], {"selector": "dense"})
    assert ask([long], {"selector": "dense"}) == whole_answers(model, context, tokens_of(tokenizer, long))


def test_streaming_pipeline_and_conversation(model, tokenizer, index, ask):
    expected = ask(QUESTIONS[:1], {"budget": 0.25})[0]
    question = tokens_of(tokenizer, QUESTIONS[0])
    with sqz.transformers.FixedContext(model, index, budget=0.25, threads=1):
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        thread = threading.Thread(target=lambda: answers(model, question, streamer=streamer))
        thread.start()
        assert "".join(streamer) == tokenizer.decode(expected)
        thread.join()
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        found = pipe(QUESTIONS[0], add_special_tokens=False, max_new_tokens=24, do_sample=False,
                     return_full_text=False)
        assert found[0]["generated_text"] == tokenizer.decode(expected)
        # Half of the answer, then the rest of it from the same cache.
        half = model.generate(question, attention_mask=torch.ones_like(question), max_new_tokens=12, do_sample=False,
                              return_dict_in_generate=True)
        rest = model.generate(half.sequences, attention_mask=torch.ones_like(half.sequences), max_new_tokens=12,
                              do_sample=False, past_key_values=half.past_key_values)
        assert rest[0, question.shape[1]:].tolist() == expected


def test_padding_on_the_left_does_not_come_between(model, tokenizer, index):
    """Without position_ids, as the model may be called by itself."""
    question = tokens_of(tokenizer, QUESTIONS[0])
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(question)], 1)
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1), torch.no_grad():
        expected = model(question).logits
        found = model(torch.cat([question[:, :3], question], 1), attention_mask=mask).logits
        cache = transformers.DynamicCache(config=model.config)
        model(torch.cat([question[:, :3], question[:, :5]], 1), attention_mask=mask[:, :8], past_key_values=cache)
        rest = model(question[:, 5:], attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(found[:, 3:], expected, atol=1e-3) and torch.allclose(rest, expected[:, 5:], atol=1e-3)
