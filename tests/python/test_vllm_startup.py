"""sqz.vllm refuses wrong configurations and indexes before vLLM loads anything."""

from types import SimpleNamespace

import pytest
from vllm_support import HEADS, engine, torch

import sqz
from conftest import SEEDS
from sqz.transformers.fingerprint import describe, fingerprint_of
from sqz.vllm import startup
from sqz.vllm.options import Options

INFO = SimpleNamespace(path="a.sqz", tokens=8000, layers=6, query_heads=4, kv_heads=2, head_dim=64,
                       partition="kmeans")


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"max_model_len": 30000}, "8000 tokens and --max-model-len is 30000.*at most 24768"),
    ({"attention_config__backend": None}, "attention backend is not given; set --attention-backend CUSTOM"),
    ({"cache_config__cache_dtype": "fp8"}, "--kv-cache-dtype is fp8"),
    ({"speculative_config": object()}, "speculative"),
    ({"lora_config": object()}, "LoRA"),
    ({"kv_transfer_config": object()}, "right only after this context"),
    ({"use_v2_model_runner": True}, "Model Runner V2 is on; leave VLLM_USE_V2_MODEL_RUNNER out"),
    ({"ranks": 4}, "4 ranks of tensor parallelism cannot share 2 KV heads"),
    ({"parallel_config__world_size": 2}, "pipeline"),
    ({"model_config__use_mla": True}, "MLA"),
    ({"model_config__runner_type": "pooling"}, "name no context; expected --runner generate"),
    ({"model_config__hf_text_config__layer_types": ["chunked_attention"]}, "layers that attend to chunks"),
    ({"model_config__is_hybrid": True, "ranks": 2}, "share the state of recurrent layers; leave --tensor-parallel-size"),
    ({"model_config__is_hybrid": True, "cache_config__mamba_cache_mode": "all"}, "set --mamba-cache-mode align"),
    ({"model_config__hf_text_config__attn_logit_softcapping": 30.0}, "soft cap"),
])
def test_what_an_engine_cannot_do_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        startup.refuse(engine(**changes), INFO, False, Options("a.sqz"))


def test_a_usual_engine_is_not_refused():
    startup.refuse(engine(), INFO, False, Options("a.sqz"))
    startup.refuse(engine(max_model_len=24768, ranks=2, attention_config__backend=None), INFO, True, Options("a.sqz"))
    startup.refuse(engine(model_config__hf_text_config__layer_types=["sliding_attention"]), INFO, False,
                   Options("a.sqz"))
    startup.refuse(engine(model_config__is_hybrid=True, cache_config__mamba_cache_mode="align"), INFO, False,
                   Options("a.sqz"))


def test_an_index_of_another_model_is_refused():
    options = Options(str(SEEDS / "two_levels.sqz"), session={"selector": "dense"})
    with pytest.raises(ValueError, match="two_levels.sqz: not an index of .*: the index was built for .*, this model"):
        startup.check(engine(), options, on_cpu=True)
    with pytest.raises(ValueError, match=r"built for \(1, 1, 1, 8\).*has \(6, 4, 2, 64\)"):
        startup.check(engine(load_config__load_format="dummy"), options, on_cpu=True)


def test_options_that_a_session_refuses_are_refused_at_once():
    with pytest.raises(sqz.Error, match="budget"):
        startup.check(engine(), Options(str(HEADS), session={"selector": "saap"}), on_cpu=True)
    with pytest.raises(ValueError, match="selector"):
        startup.check(engine(), Options(str(HEADS), session={"selector": "squeeze"}), on_cpu=True)


def test_the_index_of_the_same_model_is_taken(monkeypatch):
    """The fingerprint of the configuration and the checkpoint's files, as sqz-index writes it for the nano model. CUDA is
    not asked whether a stream is captured, which transformers 5.17 does: vllm.LLM could fork no engine behind that."""
    found, asked = [], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(True))
    monkeypatch.setattr(startup, "describe", lambda model: torch.cuda.is_current_stream_capturing() or describe(model))
    monkeypatch.setattr(startup, "check_match", lambda index, here, name: found.append(here))
    startup.check_same_model(engine(), SimpleNamespace(info=None))
    assert fingerprint_of(found[0]) == "4947eddb54de902a" and not asked
