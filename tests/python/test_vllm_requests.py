"""These parts of sqz.vllm need no vLLM: contexts that requests name, their leases, and the server's answers."""

import asyncio
import dataclasses
import os
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
from vllm_support import HEADS, NANO, engine, transformers

import sqz
from sqz.vllm import context, frontend, runner, server
from sqz.vllm.leases import Call, Leases, Resident
from sqz.vllm.library import Library, identity
from sqz.vllm.options import Options


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


def install(monkeypatch, **classes):
    """Patches these classes of vLLM's engine as its front end does; requests keep their parameters."""
    engines = SimpleNamespace(**({
        "AsyncLLM": SimpleNamespace(generate=None), "InputProcessor": SimpleNamespace(process_inputs=None),
        "LLMEngine": SimpleNamespace(add_request=None, step=None, abort_request=None)} | classes))
    for name in ("async_llm", "input_processor", "llm_engine"):
        monkeypatch.setitem(sys.modules, f"vllm.v1.engine.{name}", engines)
    monkeypatch.setattr(frontend, "behind", lambda _lease, _prompt, params, _model: params)
    frontend.install()


def test_requests_that_end_in_any_way_give_their_leases_back(folder, monkeypatch):
    for name in ("add_request", "abort_request", "step"):
        monkeypatch.setattr(PlainEngine, name, getattr(PlainEngine, name))  # as it was, when the test ends
    install(monkeypatch, LLMEngine=PlainEngine)
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

    install(monkeypatch, AsyncLLM=Async)
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


@pytest.fixture
def serving(folder, monkeypatch):
    """The part of vLLM's server that sqz.vllm patches."""
    for name, module in {"openai.models": SimpleNamespace(api_router=SimpleNamespace(attach_router=lambda _app: None)),
                         "openai.models.serving": SimpleNamespace(
                             OpenAIServingModels=SimpleNamespace(show_available_models=lambda _: None)),
                         "serve.engine.serving": SimpleNamespace(BaseServing=Serving)}.items():
        monkeypatch.setitem(sys.modules, f"vllm.entrypoints.{name}", module)
    monkeypatch.setattr(Serving, "_check_model", Serving._check_model)  # as it was, when the test ends
    server.install()
    return Serving(Engine(folder, contexts=9))


def test_a_client_gets_404_or_400_with_the_sentence(serving):

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


def test_a_context_goes_to_every_kind_of_request(serving, folder):
    """Those of batches do not declare vllm_xargs, and scale-out's have sampling_params. Tokenizers need none. Beam
    search and scores would lose it."""
    (folder / "a.sqz").rename(folder / "a@1.sqz")
    asked = {frontend.NAME: "a@1"}
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

    install(monkeypatch, InputProcessor=Inputs)
    ours = {frontend.SALT: "sqz:a@0"}
    asked = [(None, None), ("sqz:a@0", None), (None, ours), ("+b@9", ours), (None, {frontend.SALT: "sqz:a@0+b@9"})]
    salts = [Inputs().process_inputs(*one).cache_salt for one in asked]
    assert salts[0] is None and len(set(salts)) == len(asked)
