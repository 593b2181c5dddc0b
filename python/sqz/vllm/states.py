"""Recurrent layers in vLLM: the block of a request that begins gets the states that its context left, of convolution and
recurrence, and the layer takes them for those of tokens computed before."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from . import context

_begun: np.ndarray[Any, Any] | None = None  # of each request of the step 1 if it begins behind a context, else 0


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    initialize = GPUModelRunner.initialize_kv_cache

    @functools.wraps(initialize)
    def initialize_and_keep(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        table = context.table()
        table.recurrent = recurrent_layers(self.vllm_config)
        table.keep_states(0)
        for builder in recurrent_builders(self):
            builder.build = functools.partial(build_behind, builder.build)

    GPUModelRunner.initialize_kv_cache = initialize_and_keep


def begin(runner: Any, slots: list[int | None], tokens: Any) -> None:
    """Puts states into the blocks of requests that begin in this step.

    slots: of the requests' contexts; None: it has none. tokens: of the requests in this step.
    """
    global _begun
    _begun, table, new = None, context.table(), defaultdict[int, list[int]](list)
    for request, slot in enumerate(slots if table.recurrent else ()):
        if slot is not None and runner.input_batch.num_computed_tokens_cpu[request] == 0:
            new[slot].append(request)
    if not new:
        return
    _begun = np.zeros(len(slots), np.int32)
    for slot, requests in new.items():
        _begun[requests] = 1
        for layers, rows, size in groups(runner):
            last = (tokens[requests] - 1) // size if size else 0  # the block that has the state behind this step
            blocks = torch.from_numpy(rows[requests, last].astype(np.int64)).to(runner.device, non_blocking=True)
            for name in layers:
                for own, state in zip(table.recurrent[name].kv_cache, table.states[slot][name], strict=True):
                    own[blocks] = state


def build_behind(build: Any, common_prefix_len: int, common_attn_metadata: Any, *rest: Any, **named: Any) -> Any:
    """Of a recurrent layer's metadata builder: a request that begins behind a context has a token computed before."""
    if _begun is not None:
        metadata = common_attn_metadata = copy.copy(common_attn_metadata)
        more = torch.zeros(metadata.num_reqs, dtype=torch.int32)  # beside the requests of the step, padding
        more[:len(_begun)] = torch.from_numpy(_begun)
        computed = metadata.compute_num_computed_tokens()
        metadata._num_computed_tokens_cache = computed + more.to(computed.device, non_blocking=True)
        metadata.seq_lens_cpu_upper_bound = metadata.seq_lens_cpu_upper_bound + more
    return build(common_prefix_len, common_attn_metadata, *rest, **named)


def groups(runner: Any) -> list[tuple[list[str], Any, int]]:
    """Of the groups of recurrent layers: the layers, block numbers [requests, blocks], and tokens of a block; 0 if a
    request has one block."""
    from vllm.v1.kv_cache_interface import MambaSpec

    aligned = runner.cache_config.mamba_cache_mode == "align"
    return [(group.layer_names, runner.input_batch.block_table[number].get_numpy_array(),
             group.kv_cache_spec.block_size if aligned else 0)
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, MambaSpec)]


def recurrent_builders(runner: Any) -> list[Any]:
    from vllm.v1.kv_cache_interface import MambaSpec

    return [builder for groups in runner.attn_groups for group in groups if isinstance(group.kv_cache_spec, MambaSpec)
            for builder in group.metadata_builders]


def fit(name: str, layer: Any, stored: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A layer's state in an index as vLLM keeps it. ValueError if the shapes are others.

    layer: a MambaBase, whose kv_cache are a convolution's last inputs [blocks, inputs, channels], a recurrent state
    [blocks, ...], or both. stored: conv_states_* [channels, at least as many inputs], recurrent_states_*.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    convolutions = [stored[one] for one in sorted(stored) if one.startswith("conv")]
    found = [stored[one] for one in sorted(stored) if not one.startswith("conv")]
    if layer.mamba_type == MambaAttentionBackendEnum.GDN_ATTN and layer.kv_cache[0].is_cuda:
        found = [one.mT for one in found]  # there each head's rows are those of the values
    if convolutions:
        channels = torch.cat(convolutions)
        inputs = layer.kv_cache[0].shape[2 if is_conv_state_dim_first() else 1]
        found.insert(0, channels[:, -inputs:] if is_conv_state_dim_first() else channels[:, -inputs:].T)
    shapes, expected = [tuple(one.shape) for one in found], [tuple(own.shape[1:]) for own in layer.kv_cache]
    if shapes != expected:
        raise ValueError(f"{name}: found states of shape {shapes} in the index, expected {expected}, vLLM's")
    return [one.to(own.dtype).contiguous().to(own.device) for one, own in zip(found, layer.kv_cache)]


def recurrent_layers(config: Any) -> dict[str, Any]:
    """By their names. config: a vllm.config.VllmConfig whose model is made."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    layers = config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}
