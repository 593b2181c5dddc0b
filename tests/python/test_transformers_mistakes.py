"""What sqz.transformers refuses, with which sentence; the model is then as it was before."""

import copy
import shutil
import subprocess
import sys
import threading

import pytest
from transformers_support import NANO, answers, build, load, tool, torch, transformers

import sqz
import sqz.transformers
from conftest import python

CONTEXT = 300
TINY = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 360, "initializer_range": 0.3, "pad_token_id": 0}
QUESTION = torch.arange(10, 20)[None]


def tiny(kind="llama", **more):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its index."""
    folder = tmp_path_factory.mktemp("mistakes")
    tiny().save_pretrained(folder / "model")
    sqz.transformers.capture(load(folder / "model"), torch.arange(3, 3 + CONTEXT)[None], folder / "context.h5")
    build(folder / "context.h5", folder / "context.sqz")
    return folder


@pytest.fixture
def index(folder):
    return folder / "context.sqz"


@pytest.fixture
def model(folder):
    """Checked to be as before after the test."""
    model = load(folder / "model")
    before, expected = state_of(model), answers(model, QUESTION)
    yield model
    assert state_of(model) == before
    assert answers(model, QUESTION) == expected


def state_of(model):
    hooks = [(name, len(module._forward_hooks), len(module._forward_pre_hooks))
             for name, module in model.named_modules()]
    return (sorted(model.__dict__), sorted(model.model.__dict__), hooks, model.config._attn_implementation,
            sorted(transformers.AttentionInterface._global_mapping),
            sorted(transformers.AttentionMaskInterface._global_mapping))


def refused(kind, sentence, model, index, **options):
    with pytest.raises(kind, match=sentence), sqz.transformers.FixedContext(
            model, index, **{"selector": "dense", "threads": 1, **options}):
        pytest.fail("the block was entered")


def test_an_index_of_another_model(index, model):
    other = tiny(num_hidden_layers=3)
    refused(ValueError, "not an index of this model: layers: the index was built for 2, this model has 3", other, index)
    same_shape = tiny()  # its weights came from no file
    refused(ValueError, "not an index of this model: weights_hash", same_shape, index)
    assert sqz.transformers.fingerprint(model) == sqz.Index(index).info.model_fingerprint


def test_another_tokenizer(model, folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sqz.transformers.capture(model, torch.arange(3, 3 + CONTEXT), tmp_path / "c.h5", tokenizer=tokenizer)
    index = build(tmp_path / "c.h5", tmp_path / "c.sqz")
    with sqz.transformers.FixedContext(model, index, tokenizer=tokenizer, selector="dense"):
        pass
    with open(tmp_path / "tokenizer.json", "a", encoding="utf-8") as file:
        file.write("\n")
    refused(ValueError, "tokenizer_hash: the index was built with [0-9a-f]{16}, this tokenizer has", model, index,
            tokenizer=tokenizer)
    (tmp_path / "tokenizer.json").unlink()
    refused(FileNotFoundError, "no tokenizer.json", model, index, tokenizer=tokenizer)


def test_broken_indexes(model, index, folder, tmp_path):
    refused(sqz.Error, "No such file", model, tmp_path / "none.sqz")
    (tmp_path / "cut.sqz").write_bytes(index.read_bytes()[:-4096])
    refused(sqz.Error, "cut.sqz", model, tmp_path / "cut.sqz")
    refused(sqz.Error, "budget", model, index, selector="auto", budget=2.0)
    refused(TypeError, "bugdet", model, index, bugdet=0.5)


def test_devices_and_types(model, index):
    refused(ValueError, "device: found cuda:0, expected cpu, the model's", model, index, device="cuda:0")
    refused(ValueError, "found torch.float64, expected float32, float16 or bfloat16", model.double(), index)
    model.float()
    refused(TypeError, "model: found str, expected a model of transformers", "model", index)
    refused(ValueError, "is in training mode: call model.eval", model.train(), index)
    model.eval()


def test_two_contexts_on_one_model(model, index):
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as first:
        expected = answers(model, QUESTION)
        refused(RuntimeError, "another FixedContext open", model, index)
        with pytest.raises(RuntimeError, match="open already"):
            first.__enter__()
        with pytest.raises(TypeError, match="cannot be copied or pickled while a FixedContext is open"):
            copy.deepcopy(model)
        assert answers(model, QUESTION) == expected
    with pytest.raises(KeyError), first:  # a second time, with an exception in the block
        assert answers(model, QUESTION) == expected
        raise KeyError


def test_without_a_block(model, index):
    """It serves from its making on, and says what was read before, within and after."""
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        expected = answers(model, QUESTION)
    context = sqz.transformers.FixedContext(model, index, selector="dense", threads=1)
    assert context.stats().selections == 0
    assert answers(model, QUESTION) == expected
    before = context.stats(), context.stats(1)
    context.close()
    assert (context.stats(), context.stats(1)) == before and before[0].selections == 2 * before[1].selections > 0


def test_a_hook_that_raises(model, index):
    """Before the context's own hook, which then has nothing to undo."""
    def fail(*_):
        raise KeyError("mine")

    hook = model.model.register_forward_pre_hook(fail)
    with torch.no_grad(), sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        with pytest.raises(KeyError, match="mine"):
            answers(model, QUESTION)
        hook.remove()
        answers(model, QUESTION)


def test_weights_that_were_changed_after_loading(model, index, tmp_path):
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        weight += 0.01
        refused(ValueError, "layers.1.self_attn.k_proj.weight is not as in .*model.safetensors: the model was changed",
                model, index)
        with pytest.raises(ValueError, match="Save it and load it again"):
            sqz.transformers.capture(model, torch.arange(3, 203), tmp_path / "c.h5")
        model.load_state_dict(load(model.name_or_path).state_dict())


def test_closed_while_generating(model, index):
    begun, errors = threading.Event(), []

    class Slow(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            begun.set()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run():
        try:
            answers(model, QUESTION.repeat(1, 1), max_new_tokens=45, stopping_criteria=[Slow()])
        except RuntimeError as error:
            errors.append(str(error))

    context = sqz.transformers.FixedContext(model, index, selector="dense", threads=1)
    with context:
        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
    assert state_of(model)[3] == "sdpa"
    thread.join()
    assert errors == ["the FixedContext was closed while the model was generating"]


def test_closed_by_its_own_generate(model, index):
    class Close(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            context.close()

    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as context:
        with pytest.raises(RuntimeError, match="cannot be closed by the generate"):
            answers(model, QUESTION, stopping_criteria=[Close()])
        answers(model, QUESTION)


def test_more_tokens_than_positions(model, index):
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as context:
        assert len(answers(model, QUESTION, max_new_tokens=51)[0]) == 51  # the last token is not attended to
        context.reset_stats()
        sentence = "300 tokens of context and 61 that follow are 361, but the model has 360"
        with pytest.raises(ValueError, match=sentence):
            answers(model, QUESTION, max_new_tokens=52)
        with pytest.raises(ValueError, match=sentence):
            model.generate(QUESTION, max_length=QUESTION.shape[1] + 52)
        assert context.stats().selections == 0  # at once
        with torch.no_grad(), pytest.raises(ValueError, match=sentence):
            model(torch.arange(61)[None])


def test_gradients(model, index):
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1), pytest.raises(
            RuntimeError, match="computes no gradients"):
        model(QUESTION)


@pytest.mark.parametrize("kind,more,sentence", [
    ("gemma2", {"head_dim": 16}, "soft-capped logits cannot be served"),
    ("inkling_text", {"head_dim": 16, "d_rel": 8, "swa_num_attention_heads": 4}, "position_bias is given"),
    ("hy_v4", {"num_experts": 4}, "layer 0 of HYV4ForCausalLM .indexed_attention.: its cache is a DynamicIndexedLayer"),
    ("recurrent_gemma", {"num_hidden_layers": 3}, "layer 0 of RecurrentGemmaForCausalLM .* neither calls"),
    ("diffllama", {}, "DiffLlamaAttention of layer 0 attends twice in a pass"),
    ("bloom", {"n_layer": 2, "n_head": 4}, "takes no position_ids|no layer called the attention function"),
])
def test_models_that_no_index_can_serve(kind, more, sentence, index, tmp_path):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = tiny(kind, **more)
    with pytest.raises(ValueError, match=sentence):
        sqz.transformers.capture(model, torch.arange(3, 203), tmp_path / "c.h5")
    assert not list(tmp_path.iterdir())
    refused(ValueError, ".", model, index)


def test_a_cache_that_is_not_continued(tmp_path):
    model = tiny("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, num_experts=2)
    context = sqz.build(model, None, torch.arange(3, 203), tmp_path / "a.sqz", threads=1).path  # for other engines
    for _ in range(2):
        with pytest.raises(ValueError, match="layer 0 of JambaForCausalLM: a prompt .* without the recurrent_states_0"):
            sqz.transformers.FixedContext(model, context)


def test_longrope_on_both_sides_of_its_change(tmp_path):
    factors = {"type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
    model = tiny("phi3", rope_scaling=factors, original_max_position_embeddings=256, rope_theta=10000.0)
    indexes = []
    for tokens in (CONTEXT, 250):
        sqz.transformers.capture(model, torch.arange(3, 3 + tokens), tmp_path / f"{tokens}.h5")
        indexes.append(build(tmp_path / f"{tokens}.h5", tmp_path / f"{tokens}.sqz"))
    with sqz.transformers.FixedContext(model, indexes[0], selector="dense", threads=1):
        found = answers(model, QUESTION)
    whole = torch.cat([torch.arange(3, 3 + CONTEXT)[None], QUESTION], 1)
    assert found == answers(model, whole)
    with sqz.transformers.FixedContext(model, indexes[1], selector="dense", threads=1), pytest.raises(
            ValueError, match="longrope changes its frequencies after 256 tokens"):
        answers(model, QUESTION)


def test_captures(model, folder, tmp_path):
    def refuse(kind, sentence, ids, path=tmp_path / "c.h5", **options):
        with pytest.raises(kind, match=sentence):
            sqz.transformers.capture(model, ids, path, **options)
        assert not list(tmp_path.iterdir())

    refuse(FileExistsError, "pass overwrite=True", [3] * 200, folder / "context.h5")
    refuse(ValueError, "found 3 to 320, expected 0 to 319", [3, 320])
    refuse(ValueError, r"found shape \[2, 5\] of int64", torch.ones(2, 5, dtype=torch.long))
    refuse(ValueError, "found 361 tokens, expected at most 360", [3] * 361)
    refuse(ValueError, "queries: found 51, expected 1 to 50", [3] * 50, queries=51)
    refuse(ValueError, "found text, expected token ids", "some words")
    refuse(OSError, "nowhere", [3] * 200, tmp_path / "nowhere/c.h5")
    captured = sqz.transformers.capture(model, transformers.BatchEncoding({"input_ids": [3] * 200}), tmp_path / "c.h5")
    assert captured == sqz.transformers.Captured(
        str(tmp_path / "c.h5"), 200, 2, (tmp_path / "c.h5").stat().st_size, sqz.transformers.fingerprint(model))
    sqz.transformers.capture(model, [3] * 200, tmp_path / "c.h5", overwrite=True, queries=20)
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]
    run = subprocess.run([tool("sqz-index"), "build", "--capture", tmp_path / "c.h5", "-o", tmp_path / "c.sqz"],
                         capture_output=True, text=True, check=False)
    assert "do not end with the last 100 tokens" in run.stderr


def test_a_capture_that_appears_meanwhile_is_kept(model, tmp_path):
    path = tmp_path / "c.h5"
    hook = model.model.register_forward_hook(lambda *_: path.write_text("another's"))
    with pytest.raises(FileExistsError):
        sqz.transformers.capture(model, [3] * 200, path)
    hook.remove()
    assert path.read_text() == "another's" and list(tmp_path.iterdir()) == [path]


# Fails the n-th of the calls that write to a file of this name, once, with ENOSPC.
FAULT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int sqz_fail_at, sqz_calls;
static int fails(int fd) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, path, sizeof path - 1) < 0 || strstr(path, "fault.h5") == NULL) return 0;
  errno = ENOSPC;
  return ++sqz_calls == sqz_fail_at;
}
#define FAULTY(type, name, parameters, ...) \
  type name parameters { return fails(fd) ? -1 : ((type(*) parameters)dlsym(RTLD_NEXT, #name))(__VA_ARGS__); }
FAULTY(ssize_t, write, (int fd, const void* data, size_t size), fd, data, size)
FAULTY(ssize_t, pwrite64, (int fd, const void* data, size_t size, off64_t at), fd, data, size, at)
FAULTY(int, ftruncate64, (int fd, off64_t size), fd, size)
FAULTY(int, fsync, (int fd), fd)
"""
CAPTURES = """
import ctypes, os, sys
from transformers_support import load, torch
import sqz.transformers

fault, path = ctypes.CDLL(None), sys.argv[2]
model, fail_at, good = load(sys.argv[1]), 0, None
while True:
    ctypes.c_int.in_dll(fault, "sqz_fail_at").value = fail_at
    ctypes.c_int.in_dll(fault, "sqz_calls").value = 0
    try:
        sqz.transformers.capture(model, torch.arange(3, 203), path, overwrite=True)
    except OSError:
        pass
    else:
        found = open(path, "rb").read()
        good = good or found
        assert found == good, fail_at
        os.remove(path)
        if ctypes.c_int.in_dll(fault, "sqz_calls").value < fail_at:
            break
    assert os.listdir(os.path.dirname(path)) == [], fail_at
    fail_at += 1
assert fail_at > 10
"""


def test_a_write_that_fails_once(folder, tmp_path):
    (tmp_path / "fault.c").write_text(FAULT)
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    subprocess.run(["cc", "-shared", "-fPIC", "fault.c", "-o", "fault.so", "-ldl"], cwd=tmp_path, check=True)
    (tmp_path / "out").mkdir()
    ran = python(CAPTURES, folder / "model", tmp_path / "out/fault.h5", LD_PRELOAD=str(tmp_path / "fault.so"))
    assert ran.returncode == 0, ran.stderr


def test_another_model_with_the_same_configuration(model, index):
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = other(QUESTION).logits
        with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as context:
            model(QUESTION)
            asked = context.stats().selections
            torch.testing.assert_close(other(QUESTION).logits, expected)
            assert context.stats().selections == asked


def test_a_question_in_two_parts_and_under_autocast(model, index):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        expected = model(QUESTION).logits[0, -1]
        torch.testing.assert_close(model(QUESTION, use_cache=False).logits[0, -1], expected)
        model(QUESTION[:, :4], past_key_values=cache)
        torch.testing.assert_close(model(QUESTION[:, 4:], past_key_values=cache).logits[0, -1], expected, atol=1e-3,
                                   rtol=1e-3)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(QUESTION).logits[0, -1].float()
    assert torch.nn.functional.cosine_similarity(rounded, expected, 0) > 0.99


def test_threads_that_call_the_model(model, index):
    interval = sys.getswitchinterval()
    questions = [torch.arange(10, 10 + tokens)[None] for tokens in (7, 19, 33)]
    wrong, done = [], []
    with torch.no_grad(), sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        expected = [model(question).logits for question in questions]

        def ask(number):
            with torch.no_grad():
                for _ in range(20):
                    if not torch.allclose(model(questions[number]).logits, expected[number], atol=1e-4):
                        wrong.append(number)
            done.append(number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(questions))]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    assert (wrong, sorted(done)) == ([], [0, 1, 2])


def test_ctrl_c_leaves_the_model_to_other_threads(model, index):
    """torch calls no hook after what is no Exception."""
    def interrupt(*_):
        raise KeyboardInterrupt

    done = []
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        handle = model.model.layers[0].register_forward_pre_hook(interrupt)
        for call in (model.generate, model):
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                call(QUESTION)
        handle.remove()
        model.generate(QUESTION, max_new_tokens=1)
        thread = threading.Thread(target=lambda: done.append(model.generate(QUESTION, max_new_tokens=1)), daemon=True)
        thread.start()
        thread.join(60)
        assert done


def test_a_generate_of_its_own_stays(index, model):
    model.generate = own = type(model).generate.__get__(model)
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1) as context:
        assert model.generate == context._generate_alone
    assert vars(model).pop("generate") is own


def test_a_model_with_a_context_is_not_recorded(index, model, tmp_path):
    with sqz.transformers.FixedContext(model, index, selector="dense", threads=1):
        with pytest.raises(RuntimeError, match="has a FixedContext open: close it first"):
            sqz.transformers.capture(model, QUESTION, tmp_path / "a.h5")
