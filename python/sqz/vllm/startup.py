"""What is checked before vLLM loads anything: a configuration that sqz cannot serve is refused with a sentence."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

import sqz
from sqz.transformers.fingerprint import check_match, describe, max_positions

from .library import identity
from .options import Options

KV_TYPES = ("auto", "float32", "float16", "bfloat16")


def check_configurations(options: Options) -> None:
    """From now on every configuration of a model that vLLM makes is checked against the index."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    complete = platform.check_and_update_config.__func__  # a class method of vLLM's platform, called by VllmConfig

    @classmethod  # type: ignore[misc]
    @functools.wraps(complete)
    def complete_and_check(cls: Any, config: Any) -> None:
        complete(cls, config)
        if config.model_config is not None:
            check(config, options, current_platform.is_cpu())

    platform.check_and_update_config = complete_and_check


def check(config: Any, options: Options, on_cpu: bool) -> None:
    """config: a vllm.config.VllmConfig, which then tells the engine's other processes which index they must find.

    Raises ValueError, or sqz.Error for an index that cannot be used.
    """
    first, index = options.first
    sqz.Session(index, max_tokens=1, **options.session).close()  # unknown arguments, a budget that cannot be met
    check_same_model(config, index)
    refuse(config, index.info, on_cpu, options)
    config.sqz_identity, config.sqz_first = identity(index), (first, index.info)


def refuse(config: Any, info: sqz.IndexInfo, on_cpu: bool, options: Options) -> None:
    """Raises ValueError for what sqz cannot do in vLLM, whatever the index."""
    model, text = config.model_config, config.model_config.hf_text_config
    parallel, backend = config.parallel_config, config.attention_config.backend
    ranks, cache = parallel.tensor_parallel_size, config.cache_config
    tokens = info.tokens if options.index else 0
    positions, longest = max_positions(text), tokens + model.max_model_len
    name = "not given" if backend is None else backend.name
    for found, what, instead in (
        (info.partition == "buckets", "attention layers of vLLM do not see queries before RoPE, as buckets need",
         "build the index with clusters or pages"),
        (model.runner_type == "pooling", "it pools what a model reads, and such requests name no context",
         "expected --runner generate"),
        (model.use_mla, "the model has latent attention (MLA)", "expected keys and values of each KV head"),
        ("chunked_attention" in (getattr(text, "layer_types", None) or ()), "the model has layers that attend to chunks",
         "expected full attention or windows"),
        (model.is_hybrid and ranks > 1, "ranks of tensor parallelism would share the state of recurrent layers",
         "leave --tensor-parallel-size out"),
        (model.is_hybrid and cache.mamba_cache_mode == "all", "recurrent layers would keep a state for each block",
         "set --mamba-cache-mode align"),
        (getattr(text, "attn_logit_softcapping", None) is not None, "the model has a soft cap on its logits",
         "expected none"),
        (0 < positions < longest, f"the context has {tokens} tokens and --max-model-len is {model.max_model_len}, "
         f"together {longest}, and the model has {positions} positions",
         f"set --max-model-len to at most {positions - tokens}"),
        (not on_cpu and name != "CUSTOM", f"the attention backend is {name}", "set --attention-backend CUSTOM"),
        (cache.cache_dtype not in KV_TYPES, f"--kv-cache-dtype is {cache.cache_dtype}",
         f"expected one of {', '.join(KV_TYPES)}"),
        (config.speculative_config is not None, "speculative decoding is on, and a draft does not see the context",
         "leave --speculative-config out"),
        (config.lora_config is not None, "LoRA is on, and an adapter changes the context's keys and values",
         "build an index of the merged model, and leave --enable-lora out"),
        (config.kv_transfer_config is not None, "other engines would get keys that are right only after this context",
         "leave --kv-transfer-config out"),
        (info.kv_heads % ranks != 0, f"{ranks} ranks of tensor parallelism cannot share {info.kv_heads} KV heads",
         f"set --tensor-parallel-size to a divisor of {info.kv_heads}"),
        (bool(options.contexts) and (getattr(parallel, "data_parallel_size", 1) != 1
                                     or getattr(parallel, "_api_process_count", 1) != 1),
         "a library has one front end, and there are several", "leave out --data-parallel-size and --api-server-count"),
        (bool(getattr(config, "use_v2_model_runner", False)), "vLLM's Model Runner V2 is on",
         "leave VLLM_USE_V2_MODEL_RUNNER out or set it to 0"),
        (parallel.world_size != ranks or getattr(parallel, "decode_context_parallel_size", 1) != 1,
         "pipeline or context parallelism is on", "expected tensor parallelism only"),
    ):
        if found:
            raise ValueError(f"{info.path}: sqz cannot serve this with vLLM: {what}; {instead}")


def check_same_model(config: Any, index: sqz.Index) -> None:
    """Raises ValueError, naming the first difference, if the index was built for another model."""
    model, info = config.model_config, index.info
    if config.load_config.load_format == "dummy":  # random weights: of the right shapes, at least
        shape = (model.hf_text_config.num_hidden_layers, model.hf_text_config.num_attention_heads,
                 model.get_total_num_kv_heads(), model.get_head_size())
        expected = (info.layers, info.query_heads, info.kv_heads, info.head_dim)
        if shape != expected:
            raise ValueError(f"{info.path}: not an index of this model: layers, query heads, KV heads, head_dim: the "
                             f"index was built for {expected}, {model.model} has {shape}")
        return
    # To ask whether a stream is being captured, as transformers does, makes a CUDA context in this process. Then vllm.LLM
    # can fork no engine.
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        with torch.device("meta"):  # the configuration as a model, without memory
            network = AutoModelForCausalLM.from_config(model.hf_text_config).eval()
        check_match(index, describe(network), model.model)
