"""These parts of sqz.vllm need no vLLM: options, leases, requests, and attention over vLLM's blocks and the context."""

import asyncio
import dataclasses
import math
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm_support import HEADS, NANO, engine, torch, transformers

import sqz
from conftest import SEEDS, python
from sqz.vllm import context, frontend, plain_cache, runner, server, startup, states
from sqz.vllm.leases import Call, Leases, Resident
from sqz.vllm.library import Library, identity
from sqz.vllm.options import Options


def test_without_an_index_nothing_is_loaded():
    program = "import sys, sqz.vllm; sqz.vllm.register(); assert not {'vllm', 'torch'} & set(sys.modules)"
    assert python(program, SQZ_INDEX="").returncode == 0


def test_an_index_that_is_not_there_stops_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("SQZ_INDEX", str(tmp_path / "no.sqz"))
    with pytest.raises(FileNotFoundError, match="SQZ_INDEX: .*no.sqz"):
        sqz.vllm.register()


@pytest.fixture
def plugged(monkeypatch, tmp_path):
    """The plug-in in a vLLM that consists of what it changes, with a copy of an index of 132 tokens."""
    platform = type("Platform", (), {"is_cpu": lambda _: True, "check_and_update_config": classmethod(lambda *_: None)})
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform()))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", SimpleNamespace(
        AttentionBackendEnum=SimpleNamespace(CPU_ATTN=0), register_backend=lambda *_: None))
    installed = []
    for part in (runner, states, frontend, server):
        monkeypatch.setattr(part, "install", lambda part=part: installed.append(part))
    monkeypatch.setattr(sqz.vllm, "_registered", None)
    monkeypatch.setenv("SQZ_INDEX", str(shutil.copy(HEADS, tmp_path)))
    monkeypatch.setenv("SQZ_SELECTOR", "dense")
    sqz.vllm.register()
    return Path(tmp_path / HEADS.name), installed


def test_registered_twice_is_registered_once(plugged, monkeypatch):
    sqz.vllm.register()
    assert plugged[1] == [runner, states, frontend, server]
    monkeypatch.setenv("SQZ_INDEX", str(SEEDS / "two_levels.sqz"))
    with pytest.raises(ValueError, match="two_levels.*but this process serves with .*buckets"):
        sqz.vllm.register()


def test_a_file_that_is_replaced_is_not_served(plugged, monkeypatch, tmp_path):
    """This process goes on with the file that it opened. Another, which finds the new file, refuses it."""
    config = engine()
    monkeypatch.setattr(startup, "check_same_model", lambda *_: None)
    monkeypatch.setattr(startup, "refuse", lambda *_: None)
    startup.check(config, sqz.vllm.registered(), True)
    shutil.copy(SEEDS / "two_levels.sqz", tmp_path / "new.sqz")
    (tmp_path / "new.sqz").replace(plugged[0])
    assert context.Table(sqz.vllm.registered(), config).session.index.info.tokens == 132
    with pytest.raises(ValueError, match="found 32 tokens .*, expected 132 tokens .*: the index was replaced while"):
        context.Table(Options(str(plugged[0]), session={"selector": "dense"}), config)


def test_options_are_read_as_json_or_words():
    environment = {"SQZ_INDEX": "a.sqz", "SQZ_BUDGET": "0.125", "SQZ_SELECTOR": "quest", "SQZ_UNIFORM_LAYERS": "true",
                   "SQZ_LAYER_SCALES": "[1, 2]", "SQZ_LIBRARY": "/lib/libsqz.so.0", "SQZ_DEVICE": "cuda"}
    assert Options.from_environment(environment) == Options("a.sqz", session={
        "budget": 0.125, "selector": "quest", "uniform_layers": True, "layer_scales": [1, 2]})
    assert Options.from_environment({"SQZ_BUDGET": "0.125"}) is None
    assert Options.from_environment({"SQZ_CONTEXTS": "b", "SQZ_MEMORY": "4e9", "SQZ_CONTEXTS_WRITE": "1"}) == Options(
        "", "b", 4_000_000_000, True)
    with pytest.raises(ValueError, match="SQZ_MEMORY: found 'much', expected a number of bytes"):
        Options.from_environment({"SQZ_INDEX": "a.sqz", "SQZ_MEMORY": "much"})
    for name, found in (("SQZ_MEMORY", "-5"), ("SQZ_GRAPH_TOKENS", "-1"), ("SQZ_CONTEXTS_WRITE", "false")):
        with pytest.raises(ValueError, match=f"{name}: found '?{found}'?, expected"):
            Options.from_environment({"SQZ_CONTEXTS": "b", name: found})


@pytest.fixture
def folder(tmp_path):
    """A library of a.sqz, b.sqz and sub/c.sqz, with a link and a file of another model."""
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        shutil.copy(HEADS, tmp_path / f"{name}.sqz")
    shutil.copy(SEEDS / "two_levels.sqz", tmp_path / "other.sqz")
    (tmp_path / "link.sqz").symlink_to(tmp_path / "a.sqz")
    return tmp_path


@pytest.mark.parametrize(("name", "error"), [
    ("nope", LookupError), ("../" + HEADS.stem, ValueError), (str(HEADS.with_suffix("")), ValueError), ("", ValueError),
    ("link", ValueError), ("a\0", ValueError), ("a\ud800", ValueError), ("sub", LookupError)])
def test_names_stay_in_the_folder(folder, name, error):
    library = Library("", str(folder))
    assert library.file("sub/c").bytes == HEADS.stat().st_size
    with pytest.raises(error, match="sqz_context: found"):
        library.file(name)


def test_a_library_lists_its_names(folder):
    shutil.copy(HEADS, os.fsencode(folder) + b"/\xff.sqz")
    assert Library("", str(folder)).names() == ["a", "b", "other", "sub/c"]
    with pytest.raises(ValueError, match="found .*nowhere.*, expected a folder"):
        Library("", str(folder / "nowhere"))
    with pytest.raises(ValueError, match="the server has one index"):
        Library(str(HEADS), "").file("a")
    with pytest.raises(ValueError, match="found 9 names, expected at most 8"):
        Library("", str(folder)).files(["a"] * 9)


class Engine:
    """Drives leases, and has the tables of the workers."""

    def __init__(self, folder, contexts=3):
        self.leases = Leases(Library("", str(folder)), contexts * HEADS.stat().st_size,
                             sqz.Index(HEADS).info.model_fingerprint)
        self.calls = []

    def collective_rpc(self, method, args):
        self.calls.append((method, args[0]))
        return [True]

    def acquire(self, *names):
        return frontend.drive_now(self.leases.acquire(list(names)), self)


class PlainEngine(Engine):
    """An LLMEngine of what frontend.py changes: requests have other names inside, and end by step() or when aborted."""

    def __init__(self, folder):
        super().__init__(folder)
        self.sqz_leases, self.sqz_held, self.model_config = self.leases, {}, None
        self.output_processor = SimpleNamespace(request_states={}, parent_requests={})

    def add_request(self, request_id, prompt, params):
        inside = f"{request_id}-{len(self.output_processor.request_states)}"
        self.output_processor.request_states[inside] = request_id
        return inside

    def abort_request(self, request_ids, internal=False):
        states = self.output_processor.request_states
        for inside in [one for one, name in states.items() if (one if internal else name) in request_ids]:
            del states[inside]

    def step(self):
        self.output_processor.request_states.popitem()
        return []


def test_requests_that_end_in_any_way_give_their_leases_back(folder, monkeypatch):
    engines = SimpleNamespace(AsyncLLM=SimpleNamespace(generate=None), LLMEngine=PlainEngine,
                              InputProcessor=SimpleNamespace(process_inputs=None))
    for name in ("async_llm", "input_processor", "llm_engine"):
        monkeypatch.setitem(sys.modules, f"vllm.v1.engine.{name}", engines)
    monkeypatch.setattr(frontend, "behind", lambda _lease, _prompt, params, _model: params)
    for name in ("add_request", "abort_request", "step"):
        monkeypatch.setattr(PlainEngine, name, getattr(PlainEngine, name))  # as it was, when the test ends
    frontend.install()
    engine = PlainEngine(folder)
    params = SimpleNamespace(extra_args={frontend.NAME: "a"})
    inside = [engine.add_request(name, "", params) for name in ("same", "same", "other", "last")]

    def users():
        return sum(one.users for one in engine.leases.resident.values())

    assert users() == 4
    engine.abort_request(["same"])
    assert users() == 2
    engine.abort_request([inside[2]], internal=True)
    assert users() == 1
    engine.step()
    assert (users(), engine.sqz_held) == (0, {})


def test_leases_load_once_and_drop_the_longest_unused(folder):
    engine = Engine(folder, contexts=2)
    first = engine.acquire("a")
    assert first.contexts == ((0, 0, 0),) and first.tokens == 132
    again = engine.acquire("a")
    assert [method for method, _ in engine.calls] == ["sqz_put", "sqz_ready"]
    engine.leases.release(first)
    engine.leases.release(engine.acquire("b"))
    with pytest.raises(ValueError, match="more contexts at once than SQZ_MEMORY holds"):
        held = engine.acquire("b")
        engine.acquire("sub/c")
    engine.leases.release(held)
    third = engine.acquire("sub/c")  # b goes: a is held
    assert engine.calls[-3:] == [("sqz_drop", 1), ("sqz_put", 1), ("sqz_ready", 1)]
    for lease in (third, again):
        engine.leases.release(lease)
    assert vars(engine.leases.counters) | {"fetch_seconds": 0} == {
        "requests": 5, "fetches": 3, "fetched_bytes": 3 * HEADS.stat().st_size, "evictions": 1, "fetch_seconds": 0}
    with pytest.raises(ValueError, match="found indexes of .* bytes, expected at most"):
        engine.acquire("a", "b", "sub/c")


def test_a_slot_is_taken_once_it_is_empty(folder):
    """Somebody else is about to empty slot 1."""
    shutil.copy(HEADS, folder / "d.sqz")
    leases = Engine(folder, contexts=2).leases
    for slot, name in enumerate(("a", "b"), 1):
        leases.resident[leases.library.file(name)] = Resident(slot, HEADS.stat().st_size, used=slot)
    first, second = leases.acquire(["sub/c"]), leases.acquire(["d"])
    assert [next(first), next(second)] == [Call("sqz_drop", (1,)), Call("sqz_drop", (2,))]
    assert [one.slot for one in leases.resident.values()] == [0, 2]


def test_documents_of_a_request_follow_each_other(folder):
    engine = Engine(folder)
    both, turned = engine.acquire("a", "sub/c"), engine.acquire("sub/c", "a")
    assert both.contexts == ((0, 0, 0), (1, 132, 1)) and both.tokens == 264
    assert turned.contexts == ((1, 0, 0), (0, 132, 1))
    assert len({both.salt, engine.acquire("a").salt}) == 2


def test_what_was_made_after_others_follows_them(folder):
    engine = Engine(folder)
    engine.leases.release(engine.acquire("a", "b", "sub/c"))
    first, second, third = engine.leases.resident.values()
    second.info = dataclasses.replace(second.info, after=(first.info.context_id,))
    third.info = dataclasses.replace(third.info, context_id="another")
    assert engine.acquire("a", "b").contexts == ((0, 0, 0), (1, 132, 0))
    assert engine.acquire("sub/c", "a", "b").contexts == ((2, 0, 0), (0, 132, 1), (1, 264, 0))
    for names in (["b"], ["sub/c", "b"], ["a", "sub/c", "b"]):
        with pytest.raises(ValueError, match="b.sqz: found it without the 1 contexts that stood in front"):
            engine.acquire(*names)


def test_what_cannot_be_leased_leaves_nothing(folder):
    engine = Engine(folder, contexts=9)
    with pytest.raises(ValueError, match="other.sqz: found an index of another model"):
        engine.acquire("other")
    data = bytearray((folder / "b.sqz").read_bytes())
    data[-1] ^= 1
    (folder / "b.sqz").write_bytes(data)
    with pytest.raises(ValueError, match="sqz_context: .*b.sqz"):
        engine.acquire("a", "b")
    assert [one.users for one in engine.leases.resident.values()] == [0]  # a
    os.utime(folder / "a.sqz", ns=(1, 1))  # another file under its name is another context
    held = engine.acquire("a")
    assert held.contexts == ((1, 0, 0),)
    (folder / "a.sqz").unlink()  # whoever has it ends with it
    with pytest.raises(LookupError, match="found 'a', which is not in the server's library"):
        engine.acquire("a")
    engine.leases.release(held)


def test_a_file_is_verified_once(folder, monkeypatch):
    engine, verified, verify = Engine(folder, contexts=1), [], sqz.Index.verify
    monkeypatch.setattr(sqz.Index, "verify", lambda self: verified.append(self) or verify(self))
    for name in ("a", "b", "a", "b"):
        engine.leases.release(engine.acquire(name))
    assert (len(verified), engine.leases.counters.fetches) == (2, 4)


def test_loading_that_is_given_up_holds_up_nobody(folder):
    """Its indexes can be asked for again, whichever of them was on its way."""
    leases = Engine(folder).leases
    first = leases.acquire(["a", "b"])
    next(first)
    waiting = leases.acquire(["b"])
    next(waiting)
    first.close()
    with pytest.raises(RuntimeError, match="loading was given up; ask again"):
        next(waiting)
    assert not leases.resident
    lease = frontend.drive_now(leases.acquire(["b"]), Engine(folder))
    leases.release(lease)


def test_a_slot_has_what_was_put_there_last(folder, monkeypatch):
    """The index of a request that was given up is still being loaded when the slot is another's."""
    monkeypatch.setattr(sqz.vllm, "_registered", Options(contexts=str(folder), session={"selector": "dense"}))
    table, go, real, expected = context.Table(sqz.vllm.registered(), engine()), threading.Event(), sqz.Index, \
        identity(sqz.Index(HEADS))
    monkeypatch.setattr(sqz, "Index", lambda path: (go.wait() if path.endswith("a.sqz") else 0, real(path))[1])
    table.put(1, str(folder / "a.sqz"), expected)
    threads = [table._loading[1]]
    table.put(1, str(folder / "b.sqz"), expected)
    threads.append(table._loading[1])
    threads[1].join(0.2)  # it would end before the other
    go.set()
    for thread in threads:
        thread.join()
    assert table.ready(1) and table._indexes[1].info.path.endswith("b.sqz")


def test_a_request_that_is_cancelled_leaves_its_index_to_others(folder):
    engine = Engine(folder)

    async def collective_rpc(method, args):
        await asyncio.sleep(0.01)
        return [True]

    async def ask():
        server = SimpleNamespace(sqz_leases=engine.leases, collective_rpc=collective_rpc)
        first, second = (asyncio.ensure_future(frontend.drive(engine.leases.acquire(names), server))
                         for names in (["a", "b"], ["b"]))
        await asyncio.sleep(0.005)
        first.cancel()
        engine.leases.release(await asyncio.wait_for(second, 10))
        while any(one.users for one in engine.leases.resident.values()):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ask(), 20))
    assert len(engine.leases.resident) == 2


def test_a_stream_that_is_left_ends_before_its_lease(folder, monkeypatch):
    class Async:
        async def generate(self, *_):
            try:
                yield 1
            finally:
                await asyncio.sleep(0)
                ended.append(leases.resident[file].users)

    for name in ("async_llm", "input_processor", "llm_engine"):
        monkeypatch.setitem(sys.modules, f"vllm.v1.engine.{name}", SimpleNamespace(
            AsyncLLM=Async, LLMEngine=SimpleNamespace(add_request=None, step=None, abort_request=None),
            InputProcessor=SimpleNamespace(process_inputs=None)))
    monkeypatch.setattr(frontend, "behind", lambda _lease, _prompt, params, _model: params)
    frontend.install()
    leases, ended = Engine(folder).leases, []
    file = leases.library.file("a")
    leases.resident[file] = Resident(0, file.bytes, info=sqz.Index(HEADS).info)

    async def leave():
        asked = Async()
        asked.sqz_leases, asked.model_config = leases, None
        stream = asked.generate("", SimpleNamespace(extra_args={frontend.NAME: "a"}))
        await anext(stream)
        await stream.aclose()
        return [*ended, leases.resident[file].users]

    assert asyncio.run(leave()) == [1, 0]


def test_the_index_without_a_name_is_always_in_memory(folder):
    """What does not fit beside it is refused. Alone, it is served as workers opened it."""
    size = HEADS.stat().st_size

    def leases(contexts):
        found = Leases(Library(str(folder / "a.sqz"), contexts), size * 3 // 2, sqz.Index(HEADS).info.model_fingerprint)
        found.resident[found.library.first()] = Resident(0, size, users=1, info=sqz.Index(HEADS).info)
        return found

    library, alone = leases(str(folder)), leases("")
    with pytest.raises(ValueError, match="bytes, with that of SQZ_INDEX, expected at most"):
        next(library.acquire(["b"]))
    os.utime(folder / "a.sqz", ns=(1, 1))  # another file
    for names in (None, []):
        assert frontend.drive_now(alone.acquire(names), None).contexts == ((0, 0, 0),)
    (folder / "a.sqz").unlink()
    assert frontend.drive_now(alone.acquire(None), None).contexts == ((0, 0, 0),)
    with pytest.raises(LookupError, match="a.sqz, is not there any more"):
        next(library.acquire(None))


def test_what_goes_beyond_the_models_positions_is_refused(folder):
    model = SimpleNamespace(hf_text_config=transformers.AutoConfig.from_pretrained(NANO), max_model_len=32700)
    lease, params = Engine(folder).acquire("a"), SimpleNamespace(max_tokens=8, extra_args={}, clone=lambda: params)
    with pytest.raises(ValueError, match="contexts of 132 tokens and a request of up to 32700, expected at most 32768"):
        frontend.behind(lease, "text", params, model)
    assert frontend.behind(lease, {"prompt_token_ids": [5]}, params, model).extra_args[runner.TOKENS] == 132


class Serving:
    """The part of vLLM's server that is changed."""

    def __init__(self, engine):
        async def collective_rpc(method, args):
            return engine.collective_rpc(method, args)

        self.models = SimpleNamespace(is_base_model=lambda name: name == "served", engine_client=SimpleNamespace(
            sqz_leases=engine.leases, collective_rpc=collective_rpc))

    async def _check_model(self, _request):
        return None

    def create_error_response(self, sentence, *kind):
        return sentence, *kind


def test_a_client_gets_404_or_400_with_the_sentence(folder, monkeypatch):
    for name, module in {"openai.models": SimpleNamespace(api_router=SimpleNamespace(attach_router=lambda _app: None)),
                         "openai.models.serving": SimpleNamespace(
                             OpenAIServingModels=SimpleNamespace(show_available_models=lambda _: None)),
                         "serve.engine.serving": SimpleNamespace(BaseServing=Serving)}.items():
        monkeypatch.setitem(sys.modules, f"vllm.entrypoints.{name}", module)
    monkeypatch.setattr(Serving, "_check_model", Serving._check_model)  # as it was, when the test ends
    server.install()
    serving = Serving(Engine(folder, contexts=9))

    def ask(names, model="served"):
        request = SimpleNamespace(model=model, vllm_xargs={} if names is None else {frontend.NAME: names},
                                  to_sampling_params=None)
        return asyncio.run(serving._check_model(request)), request

    for names, model, found, kind in ((["nope"], "served", "found 'nope'", ("NotFoundError", 404)),
                                      (None, "served@nope", "found 'nope'", ("NotFoundError", 404)),
                                      (["a", "../a"], "served", "without ..", ()), ("link", "served", "links", ()),
                                      ("other", "served", "another model", ()), (["a"] * 9, "served", "found 9", ()),
                                      (3, "served", "found 3, expected a name", ())):
        (sentence, *rest), _ = ask(names, model)
        assert found in sentence and tuple(rest) == kind
    answer, request = ask(None, "served@sub/c")
    assert (answer, request.model, request.vllm_xargs) == (None, "served", {frontend.NAME: "sub/c"})


def test_a_context_goes_to_every_kind_of_request(folder, monkeypatch):
    """Those of batches do not declare vllm_xargs, and scale-out's have sampling_params. Tokenizers need none. Beam
    search and scores would lose it."""
    for name, module in {"openai.models": SimpleNamespace(api_router=SimpleNamespace(attach_router=lambda _app: None)),
                         "openai.models.serving": SimpleNamespace(
                             OpenAIServingModels=SimpleNamespace(show_available_models=lambda _: None)),
                         "serve.engine.serving": SimpleNamespace(BaseServing=Serving)}.items():
        monkeypatch.setitem(sys.modules, f"vllm.entrypoints.{name}", module)
    monkeypatch.setattr(Serving, "_check_model", Serving._check_model)  # as it was, when the test ends
    server.install()
    (folder / "a.sqz").rename(folder / "a@1.sqz")
    serving, asked = Serving(Engine(folder, contexts=9)), {frontend.NAME: "a@1"}
    request = SimpleNamespace(model="served@a@1")
    assert asyncio.run(serving._check_model(request)) is None and vars(request) == {"model": "served"}
    request = SimpleNamespace(model="served@a@1", to_sampling_params=None)
    assert asyncio.run(serving._check_model(request)) is None
    assert (request.model, request.vllm_xargs) == ("served", asked)
    request = SimpleNamespace(model="served@a@1", sampling_params=SimpleNamespace(extra_args=None))
    assert asyncio.run(serving._check_model(request)) is None and request.sampling_params.extra_args == asked
    for losing in ({"use_beam_search": True}, {"label_token_ids": [1]}, {"questions": ["a"]}):
        for one in ({"model": "served@a@1"}, {"model": "served", "vllm_xargs": asked}):
            sentence, *_ = asyncio.run(serving._check_model(SimpleNamespace(**one, **losing)))
            assert f"with {next(iter(losing))}" in sentence


def test_contexts_are_listed_while_they_go(folder, monkeypatch):
    """A file goes behind the list of names, and another request wants the memory of the one that is asked about."""
    engine, routes = Engine(folder, contexts=1), {}
    monkeypatch.setattr(sqz.vllm, "_registered", SimpleNamespace(library=engine.leases.library))
    monkeypatch.setattr(engine.leases.library, "names", lambda: ["a", "gone"])
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=Exception, Request=object))
    engine.leases.release(engine.acquire("a"))
    server.add_routes(SimpleNamespace(add_api_route=lambda _, function, methods: routes.update({methods[0]: function})))

    async def collective_rpc(method, args):
        with pytest.raises(ValueError, match="more contexts at once"):
            engine.acquire("b")
        return [0.5]

    client = SimpleNamespace(sqz_leases=engine.leases, collective_rpc=collective_rpc)
    request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(engine_client=client)))
    listed = asyncio.run(routes["GET"](request))["contexts"]
    assert [(one["name"], one["requests"], one["delivered_budget"]) for one in listed] == [("a", 0, 0.5)]


def reference(query, keys, values, scale):
    """(out, lse) of the last tokens, query [tokens, heads, dim], over keys and values [length, KV heads, dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    logits = torch.einsum("thd,shd->ths", query.double(), keys) * scale
    tokens, _, length = logits.shape
    later = torch.ones(tokens, length, dtype=torch.bool).triu(length - tokens + 1)
    logits = logits.masked_fill(later[:, None], -math.inf)
    return torch.einsum("ths,shd->thd", logits.softmax(-1), values), logits.logsumexp(-1)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 3, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_blocks_in_any_order(chunks, dtype):
    """A request of 9 tokens that comes in chunks, in blocks of 4 that another request used before."""
    torch.manual_seed(0)
    cache = torch.full((5, 2, 4, 32), math.nan, dtype=dtype)
    blocks = torch.tensor([4, 0, 3], dtype=torch.int32)
    slots = (blocks[:, None] * 4 + torch.arange(4)).flatten()
    plain_cache.store(cache, slots, *torch.randn(2, 12, 2, 16, dtype=dtype))

    query, key, value = torch.randn(9, 6, 16, dtype=dtype), *torch.randn(2, 9, 2, 16, dtype=dtype)
    first = 0
    for tokens in chunks:
        last = first + tokens
        new = [torch.cat((part[first:last], part[:1])) for part in (key, value)]  # and a token of padding
        plain_cache.store(cache, torch.cat((slots[first:last], torch.tensor([-1]))), *new)
        out, lse = plain_cache.attend(query[first:last], cache, blocks, last, 0.25)
        expected, expected_lse = reference(query[first:last], key[:last], value[:last], 0.25)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert (out - expected).abs().max() < tolerance
        assert (lse - expected_lse).abs().max() < 1e-3
        first = last


def serve(options, queries, own, indptr, **where):
    """Attention over the context and `own` (out, lse), whose lse is laid out [heads, tokens] as FlashAttention's."""
    out, lse = own[0].clone(), own[1].T.contiguous()
    context.Table(options, engine(**where)).add("model.layers.1.self_attn.attn", queries, out, lse.T, indptr, None)
    return out


def test_the_context_is_merged_for_each_request_and_not_into_padding():
    torch.manual_seed(0)
    indptr, dense = [0, 3, 4, 6], Options(str(HEADS), session={"selector": "dense"})
    queries, own = torch.randn(8, 4, 4), (torch.randn(8, 4, 4), torch.randn(8, 4))
    out = serve(dense, queries, own, indptr)
    with sqz.Index(HEADS) as index, sqz.Session(index, selector="dense") as session:
        theirs, lse = session.attend(1, queries[:6], indptr=indptr)
    weight = torch.sigmoid(lse - own[1][:6])[..., None]
    assert torch.allclose(out[:6], weight * theirs + (1 - weight) * own[0][:6], atol=1e-6)
    assert torch.equal(out[6:], own[0][6:])


def test_two_ranks_serve_their_own_heads():
    torch.manual_seed(0)
    dense = Options(str(HEADS), session={"selector": "dense"})
    queries, own = torch.randn(3, 4, 4), (torch.randn(3, 4, 4), torch.randn(3, 4))
    whole = serve(dense, queries, own, [0, 3])
    halves = [serve(dense, queries[:, part].contiguous(), (own[0][:, part].contiguous(), own[1][:, part]), [0, 3],
                    rank=rank, ranks=2) for rank, part in enumerate((slice(0, 2), slice(2, 4)))]
    assert torch.allclose(torch.cat(halves, 1), whole, atol=1e-6)


class Runner:
    """The part of vLLM's model runner that is moved."""

    def __init__(self):
        self.positions, self.device = torch.arange(8), "cpu"


@pytest.mark.parametrize(("offsets", "expected"), [([100, 100], [100, 101, 102, 103, 104, 5, 6, 7]),
                                                   ([100, 0], [100, 101, 102, 3, 4, 5, 6, 7])])
def test_requests_begin_behind_their_contexts(offsets, expected):
    moved = Runner()
    runner.move(moved, offsets, np.array([3, 2]))
    assert moved.positions.tolist() == expected


def test_requests_of_a_step_have_their_contexts(monkeypatch, folder):
    monkeypatch.setattr(sqz.vllm, "_registered", Options(contexts=str(folder), graph_contexts=2,
                                                                session={"selector": "dense"}))
    monkeypatch.setattr(runner, "_step", [[(2, 0, 0), (0, 132, 1)], []])
    torch.manual_seed(0)
    table, queries = context.Table(sqz.vllm.registered(), engine()), torch.randn(3, 4, 4)
    monkeypatch.setattr(context, "_table", table)
    found = runner.contexts_of([0, 2, 3])
    assert [(one.slot, one.offset, one.skip) for one in found.array] == [(2, 0, 0), (0, 132, 1), (-1, 0, 0), (-1, 0, 0)]
    assert {one.slot for one in runner.contexts_of([0, 1, 2, 3]).array} == {-1}  # vLLM warms up
    # On a GPU a step of one token each names them there, unless a request has more than fit.
    table.named = sqz.DeviceContexts(3, 2, "cpu")
    assert isinstance(runner.contexts_of([0, 2, 3]), sqz.Contexts)
    assert runner.contexts_of([0, 1, 2]) is table.named
    assert table.named.words.tolist() == [[[2, 0], [1 << 32, 132]], [[0xFFFFFFFF, 0]] * 2, [[0xFFFFFFFF, 0]] * 2]
    for rows in ([[(2, 0, 0), (0, 132, 1), (3, 264, 1)], []], [[(2, 0, 0)], [(2, 0, 0)]]):  # too many, and one is shared
        monkeypatch.setattr(runner, "_step", rows)
        assert isinstance(runner.contexts_of([0, 1, 2]), sqz.Contexts)
    monkeypatch.setattr(sqz.vllm, "_registered", Options(contexts=str(folder)))
    assert [runner.fits_graph([[(2, 0, 0)]] * count) for count in (8, 9)] == [True, False]
    table.shares = True
    assert runner.fits_graph([[(2, 0, 0)]] * 9) and not runner.fits_graph([[(2, 0, 0), (3, 132, 1)]] * 9)
    monkeypatch.setitem(sqz.vllm.registered().session, "selector", "dense")
    assert runner.fits_graph([[(2, 0, 0)]] * 2)
    table.shares = False
    assert not runner.fits_graph([[(2, 0, 0)]] * 2)
    table.put(2, str(folder / "b.sqz"), identity(sqz.Index(HEADS)))
    while not table.ready(2):
        pass
    own = torch.zeros(3, 4, 4), torch.full((3, 4), -math.inf)
    table.add("layers.0", queries, *own, [0, 2, 3], found)
    expected, _ = table.session.attend(0, queries[:2], contexts=[[sqz.Context(2), sqz.Context(0, 132, 1)]])
    assert torch.equal(own[0][:2], expected) and not own[0][2].any()
    table.drop(2)
    with pytest.raises(sqz.Error, match="found slot 2"):
        table.session.attend(0, queries, contexts=[2])
    table.put(2, str(folder / "b.sqz"), "1 token")
    with pytest.raises(ValueError, match="expected 1 token: the index was replaced"):
        while not table.ready(2):
            pass


@pytest.mark.parametrize("fits", [True, False])
def test_a_step_that_no_graph_fits_is_not_taken_for_a_uniform_one(fits, monkeypatch):
    class Model:
        def _prepare_inputs(self, *_):
            pass

        def _determine_batch_execution_and_padding(self, **named):
            return named

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=Model))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", SimpleNamespace(WorkerBase=type("Worker", (), {})))
    monkeypatch.setattr(sqz.vllm, "_registered", Options(contexts="books"))
    monkeypatch.setattr(context, "_table", SimpleNamespace(shares=False))
    monkeypatch.setattr(runner, "_step", [[(2, 0, 0)]] * (8 if fits else 9))
    runner.install()
    assert Model()._determine_batch_execution_and_padding(num_reqs=9) == {"num_reqs": 9} | (
        {} if fits else {"force_uniform_decode": False})


@pytest.mark.parametrize(("capability", "changed", "found"), [
    (90, {}, ""), (80, {}, "older than compute capability 9.0"), (90, {"graph_contexts": 0}, "SQZ_GRAPH_CONTEXTS is 0"),
    (90, {"session": {"selector": "quest"}}, "the selector is quest"),
    (90, {"index": str(SEEDS / "layers.sqz")}, "not all full")])
def test_graphs_hold_contexts_where_the_gpu_reads_them(capability, changed, found, folder, monkeypatch):
    platform = SimpleNamespace(has_device_capability=lambda asked: capability >= asked)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    options = Options(**{"contexts": str(folder), "session": {"budget": 0.125}, **changed})
    assert found in context.why_piecewise(options) and context.in_graphs(options) is not bool(found)


class Recurrent:
    """A gated delta net of vLLM with 3 blocks for 2 heads of 3 x 4, whose convolution sees 2 inputs of 5 channels."""

    mamba_type = "GDN"

    def __init__(self):
        self.kv_cache = torch.zeros(3, 2, 5), torch.zeros(3, 2, 3, 4, dtype=torch.bfloat16)


@pytest.fixture
def recurrent(monkeypatch):
    """states with what it asks vLLM."""
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.mamba.mamba_utils",
                        SimpleNamespace(is_conv_state_dim_first=lambda: False))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry",
                        SimpleNamespace(MambaAttentionBackendEnum=SimpleNamespace(GDN_ATTN="GDN")))
    torch.manual_seed(0)
    return Recurrent(), {"conv_states_0": torch.randn(3, 4), "conv_states_1": torch.randn(2, 4),
                         "recurrent_states_0": torch.randn(2, 3, 4)}


def test_states_are_brought_into_vllms_layout(recurrent):
    layer, stored = recurrent
    inputs, state = states.fit("layers.0.gdn", layer, stored)
    assert torch.equal(inputs, torch.cat([stored["conv_states_0"], stored["conv_states_1"]]).T[-2:])
    assert torch.equal(state, stored["recurrent_states_0"].bfloat16())
    with pytest.raises(ValueError, match=r"layers.0.gdn: found states of shape \[\(2, 5\)\] in the index, expected"):
        states.fit("layers.0.gdn", layer, {name: one for name, one in stored.items() if name != "recurrent_states_0"})


def test_requests_that_begin_have_the_state_of_their_context(recurrent, monkeypatch):
    layer, stored = recurrent
    kept = {"layers.0.gdn": states.fit("layers.0.gdn", layer, stored)}
    monkeypatch.setattr(context, "_table", SimpleNamespace(recurrent={"layers.0.gdn": layer}, states={7: kept}))
    monkeypatch.setattr(states, "_begun", None)
    monkeypatch.setattr(states, "groups", lambda _: [(["layers.0.gdn"], np.array([[0, 9], [9, 2], [1, 9]]), 16)])
    moved = SimpleNamespace(device="cpu", input_batch=SimpleNamespace(num_computed_tokens_cpu=np.array([8, 0, 0])))
    states.begin(moved, [7, 7, None], np.array([1, 20, 1]))  # one goes on, one begins in its second block, one has none
    for own, state in zip(layer.kv_cache, kept["layers.0.gdn"], strict=True):
        assert torch.equal(own[2], state) and not own[:2].any()

    given = SimpleNamespace(num_reqs=4, seq_lens_cpu_upper_bound=torch.tensor([9, 20, 1, 0]),
                            compute_num_computed_tokens=lambda: torch.tensor([8, 0, 0, 0]))
    seen = states.build_behind(lambda _, metadata: metadata, 0, given)
    assert seen._num_computed_tokens_cache.tolist() == [8, 1, 0, 0]
    assert seen.seq_lens_cpu_upper_bound.tolist() == [9, 21, 1, 0]
    states.begin(moved, [None] * 3, np.array([1, 1, 1]))
    assert states.build_behind(lambda _, metadata: metadata, 0, given) is given


@pytest.mark.parametrize(("extra", "names"), [(None, None), ({}, None), ({"sqz_context": "a"}, ["a"]),
                                              ({"sqz_context": ["a", "b"]}, ["a", "b"]),
                                              ({"sqz_context": '["a", "b"]'}, ["a", "b"])])
def test_requests_name_contexts(extra, names):
    assert frontend.names_of(SimpleNamespace(extra_args=extra)) == names
    with pytest.raises(ValueError, match="found 3, expected a name or a list of names"):
        frontend.names_of(SimpleNamespace(extra_args={"sqz_context": 3}))


@pytest.mark.parametrize("name", [runner.CONTEXTS, runner.TOKENS, frontend.SALT])
def test_what_the_server_tells_its_workers_is_not_taken_from_clients(name):
    with pytest.raises(ValueError, match=f"found {name}, which is the server's own"):
        frontend.names_of(SimpleNamespace(extra_args={name: [7]}))


@pytest.mark.parametrize("name", ["[draft]", '["a"', "[" * 100_000])
def test_what_is_no_list_is_a_name(name):
    assert frontend.names_of(SimpleNamespace(extra_args={frontend.NAME: name})) == [name]


def test_salts_of_clients_are_not_those_of_contexts(monkeypatch):
    class Inputs:
        def process_inputs(self, salt, extra):
            return SimpleNamespace(cache_salt=salt, sampling_params=SimpleNamespace(extra_args=extra))

    for name in ("async_llm", "input_processor", "llm_engine"):
        monkeypatch.setitem(sys.modules, f"vllm.v1.engine.{name}", SimpleNamespace(
            AsyncLLM=SimpleNamespace(generate=None), InputProcessor=Inputs,
            LLMEngine=SimpleNamespace(add_request=None, step=None, abort_request=None)))
    frontend.install()
    ours = {frontend.SALT: "sqz:a@0"}
    asked = [(None, None), ("sqz:a@0", None), (None, ours), ("+b@9", ours), (None, {frontend.SALT: "sqz:a@0+b@9"})]
    salts = [Inputs().process_inputs(*one).cache_salt for one in asked]
    assert salts[0] is None and len(set(salts)) == len(asked)


def test_a_layers_number():
    assert context.number_of("model.layers.31.self_attn.attn") == 31
    with pytest.raises(ValueError, match="2 numbers"):
        context.number_of("h.0.attn.5")


def test_a_layer_of_another_kind_is_refused():
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    context.refuse_layer(4, 64, 0.125, 2, **usual)
    context.refuse_layer(4, 64, 0.125, 2, **usual | {"sliding_window": 64}, sinks=torch.zeros(4))
    for more in ({"alibi_slopes": [1.0]}, {"logits_soft_cap": 30.0}, {"attn_type": "encoder"},
                 {"kv_sharing_target_layer_name": "a"}):
        with pytest.raises(ValueError, match="a layer has"):
            context.refuse_layer(4, 64, 0.125, 2, **usual | more)
