"""The tests of sqz.vllm share these: skips, an index, and the part of a VllmConfig that it reads."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import SEEDS

torch = pytest.importorskip("torch", reason="sqz.vllm is for PyTorch")
transformers = pytest.importorskip("transformers", reason="sqz.vllm needs transformers, as vLLM does")

NANO = Path(__file__).parents[2] / "examples/models/nano"
HEADS = SEEDS / "buckets.sqz"  # 132 tokens, 2 layers, 4 query heads, 2 KV heads, head_dim 4


def engine(rank=0, ranks=1, max_model_len=64, **changes):
    """The part of a VllmConfig that sqz.vllm reads."""
    text = transformers.AutoConfig.from_pretrained(NANO)
    model = SimpleNamespace(hf_text_config=text, hf_config=text, model=str(NANO), max_model_len=max_model_len,
                            use_mla=False, is_hybrid=False, runner_type="generate", get_total_num_kv_heads=lambda: 2,
                            get_head_size=lambda: 64)
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=ranks, world_size=ranks)
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        device_config=SimpleNamespace(device_type="cpu"), cache_config=SimpleNamespace(cache_dtype="auto",
                                                                                               mamba_cache_mode="none"),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="CUSTOM")), speculative_config=None,
        lora_config=None, kv_transfer_config=None, load_config=SimpleNamespace(load_format="auto"))
    for path, value in changes.items():
        *where, name = path.split("__")
        setattr(functools.reduce(getattr, where, config), name, value)
    return config
