"""These parts of sqz.vllm need no vLLM: options, and attention over vLLM's blocks and the contexts of a step's requests."""

import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm_support import HEADS, engine, torch

import sqz
from conftest import SEEDS, python
from sqz.vllm import context, frontend, plain_cache, runner, server, startup, states
from sqz.vllm.library import identity
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
