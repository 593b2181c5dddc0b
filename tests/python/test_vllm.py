"""What of sqz.vllm needs no vLLM: its options, what it refuses, and attention over vLLM's blocks and the context."""

import functools
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sqz
from conftest import SEEDS, python
from sqz.vllm.options import Options

torch = pytest.importorskip("torch", reason="sqz.vllm is for PyTorch")
transformers = pytest.importorskip("transformers", reason="sqz.vllm needs transformers, as vLLM does")

from sqz.transformers.fingerprint import fingerprint_of  # noqa: E402
from sqz.vllm import context, plain_cache, startup  # noqa: E402

NANO = Path(__file__).parents[2] / "examples/models/nano"
HEADS = SEEDS / "buckets.sqz"  # 132 tokens, 2 layers, 4 query heads, 2 KV heads, head_dim 4


def test_without_an_index_nothing_is_loaded():
    program = "import sys, sqz.vllm; sqz.vllm.register(); assert not {'vllm', 'torch'} & set(sys.modules)"
    assert python(program, SQZ_INDEX="").returncode == 0


def test_an_index_that_is_not_there_stops_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("SQZ_INDEX", str(tmp_path / "no.sqz"))
    with pytest.raises(sqz.Error, match="no.sqz"):
        sqz.vllm.register()


class Rotary:
    """As vLLM's RotaryEmbeddingBase."""

    def __init__(self):
        self.cos_sin_cache = torch.arange(200.0)[:, None].repeat(1, 2)


@pytest.fixture
def plugged(monkeypatch, tmp_path):
    """The plug-in in a vLLM that consists of what it changes, with a copy of an index of 132 tokens."""
    platform = type("Platform", (), {"is_cpu": lambda _: True, "check_and_update_config": classmethod(lambda *_: None)})
    rotary = type("RotaryEmbeddingBase", (Rotary,), {"__init__": Rotary.__init__})
    vllm = {"platforms": {"current_platform": platform()}, "v1.attention.backends.registry": {
        "AttentionBackendEnum": SimpleNamespace(CPU_ATTN=0), "register_backend": lambda *_: None},
        "model_executor.layers.rotary_embedding.base": {"RotaryEmbeddingBase": rotary}}
    for name, members in vllm.items():
        monkeypatch.setitem(sys.modules, "vllm." + name, SimpleNamespace(**members))
    monkeypatch.setattr(sqz.vllm, "_registered", None)
    monkeypatch.setenv("SQZ_INDEX", str(shutil.copy(HEADS, tmp_path)))
    monkeypatch.setenv("SQZ_SELECTOR", "dense")
    sqz.vllm.register()
    return Path(tmp_path / HEADS.name), rotary


def test_registered_twice_is_registered_once(plugged, monkeypatch):
    sqz.vllm.register()
    assert plugged[1]().cos_sin_cache[0, 0] == 132
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
    assert context.Context(sqz.vllm.registered(), config).index.info.tokens == 132
    with pytest.raises(ValueError, match="found 32 tokens .*, expected 132 tokens .*: the index was replaced while"):
        context.Context(Options(str(plugged[0]), {"selector": "dense"}), config)


def test_options_are_read_as_json_or_words():
    environment = {"SQZ_INDEX": "a.sqz", "SQZ_BUDGET": "0.125", "SQZ_SELECTOR": "quest", "SQZ_UNIFORM_LAYERS": "true",
                   "SQZ_LAYER_SCALES": "[1, 2]", "SQZ_LIBRARY": "/lib/libsqz.so.0", "SQZ_DEVICE": "cuda"}
    assert Options.from_environment(environment) == Options("a.sqz", {
        "budget": 0.125, "selector": "quest", "uniform_layers": True, "layer_scales": [1, 2]})
    assert Options.from_environment({"SQZ_BUDGET": "0.125"}) is None


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


def engine(rank=0, ranks=1, max_model_len=64, **changes):
    """The part of a VllmConfig that sqz.vllm reads."""
    text = transformers.AutoConfig.from_pretrained(NANO)
    model = SimpleNamespace(hf_text_config=text, hf_config=text, model=str(NANO), max_model_len=max_model_len,
                            use_mla=False, get_sliding_window=lambda: None, get_total_num_kv_heads=lambda: 2,
                            get_head_size=lambda: 64)
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=ranks, world_size=ranks)
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        device_config=SimpleNamespace(device_type="cpu"), cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="CUSTOM")), speculative_config=None,
        lora_config=None, kv_transfer_config=None, load_config=SimpleNamespace(load_format="auto"))
    for path, value in changes.items():
        *where, name = path.split("__")
        setattr(functools.reduce(getattr, where, config), name, value)
    return config


def serve(options, queries, own, indptr, **where):
    """Attention over the context and `own` (out, lse), whose lse is laid out [heads, tokens] as FlashAttention's."""
    out, lse = own[0].clone(), own[1].T.contiguous()
    context.Context(options, engine(**where)).add("model.layers.1.self_attn.attn", queries, out, lse.T, indptr)
    return out


def test_the_context_is_merged_for_each_request_and_not_into_padding():
    torch.manual_seed(0)
    indptr, dense = [0, 3, 4, 6], Options(str(HEADS), {"selector": "dense"})
    queries, own = torch.randn(8, 4, 4), (torch.randn(8, 4, 4), torch.randn(8, 4))
    out = serve(dense, queries, own, indptr)
    with sqz.Index(HEADS) as index, sqz.Session(index, selector="dense") as session:
        theirs, lse = session.attend(1, queries[:6], indptr=indptr)
    weight = torch.sigmoid(lse - own[1][:6])[..., None]
    assert torch.allclose(out[:6], weight * theirs + (1 - weight) * own[0][:6], atol=1e-6)
    assert torch.equal(out[6:], own[0][6:])


def test_two_ranks_serve_their_own_heads():
    torch.manual_seed(0)
    dense = Options(str(HEADS), {"selector": "dense"})
    queries, own = torch.randn(3, 4, 4), (torch.randn(3, 4, 4), torch.randn(3, 4))
    whole = serve(dense, queries, own, [0, 3])
    halves = [serve(dense, queries[:, part].contiguous(), (own[0][:, part].contiguous(), own[1][:, part]), [0, 3],
                    rank=rank, ranks=2) for rank, part in enumerate((slice(0, 2), slice(2, 4)))]
    assert torch.allclose(torch.cat(halves, 1), whole, atol=1e-6)


def test_a_layers_number():
    assert context.number_of("model.layers.31.self_attn.attn") == 31
    with pytest.raises(ValueError, match="2 numbers"):
        context.number_of("h.0.attn.5")


INFO = SimpleNamespace(path="a.sqz", tokens=8000, layers=6, query_heads=4, kv_heads=2, head_dim=64,
                       partition="kmeans")


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"max_model_len": 30000}, "8000 tokens and --max-model-len is 30000.*at most 24768"),
    ({"attention_config__backend": None}, "attention backend is not given; set --attention-backend CUSTOM"),
    ({"cache_config__cache_dtype": "fp8"}, "--kv-cache-dtype is fp8"),
    ({"speculative_config": object()}, "speculative"),
    ({"lora_config": object()}, "LoRA"),
    ({"kv_transfer_config": object()}, "right only after this context"),
    ({"ranks": 4}, "4 ranks of tensor parallelism cannot share 2 KV heads"),
    ({"parallel_config__world_size": 2}, "pipeline"),
    ({"model_config__use_mla": True}, "MLA"),
    ({"model_config__get_sliding_window": lambda: 4096}, "a sliding window of 4096 tokens"),
    ({"model_config__hf_text_config__layer_types": ["sliding_attention"]}, "layers of sliding_attention"),
    ({"model_config__hf_text_config__attn_logit_softcapping": 30.0}, "soft cap"),
])
def test_what_an_engine_cannot_do_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        startup.refuse(engine(**changes), INFO, on_cpu=False)


def test_a_usual_engine_is_not_refused():
    startup.refuse(engine(), INFO, on_cpu=False)
    startup.refuse(engine(max_model_len=24768, ranks=2, attention_config__backend=None), INFO, on_cpu=True)


def test_a_layer_of_another_kind_is_refused():
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    context.refuse_layer(4, 64, 0.125, 2, **usual)
    for more in ({"sliding_window": 64}, {"alibi_slopes": [1.0]}, {"logits_soft_cap": 30.0}, {"sinks": torch.zeros(4)},
                 {"attn_type": "encoder"}, {"kv_sharing_target_layer_name": "a"}):
        with pytest.raises(ValueError, match="a layer has"):
            context.refuse_layer(4, 64, 0.125, 2, **usual | more)


def test_an_index_of_another_model_is_refused():
    options = Options(str(SEEDS / "two_levels.sqz"), {"selector": "dense"})
    with pytest.raises(ValueError, match="two_levels.sqz: not an index of .*: the index was built for .*, this model"):
        startup.check(engine(), options, on_cpu=True)
    with pytest.raises(ValueError, match=r"built for \(1, 1, 1, 8\).*has \(6, 4, 2, 64\)"):
        startup.check(engine(load_config__load_format="dummy"), options, on_cpu=True)


def test_options_that_a_session_refuses_are_refused_at_once():
    with pytest.raises(sqz.Error, match="budget"):
        startup.check(engine(), Options(str(HEADS), {"selector": "saap"}), on_cpu=True)
    with pytest.raises(ValueError, match="selector"):
        startup.check(engine(), Options(str(HEADS), {"selector": "squeeze"}), on_cpu=True)


def test_the_index_of_the_same_model_is_taken(monkeypatch):
    """The fingerprint of the configuration and the checkpoint's files, as sqz-index writes it for the nano model."""
    found = []
    monkeypatch.setattr(startup, "check_match", lambda index, here, name: found.append(here))
    startup.check_same_model(engine(), SimpleNamespace(info=None))
    assert fingerprint_of(found[0]) == "4947eddb54de902a"
