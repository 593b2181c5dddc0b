"""vLLM's CPU backend with a fixed context in front of every request."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (CPUAttentionBackend, CPUAttentionBackendImpl,
                                                 CPUAttentionMetadataBuilder)

from . import context, plain_cache, runner


class Builder(runner.Requests, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    pass


class Impl(context.ContextLayer, CPUAttentionBackendImpl):  # type: ignore[misc]
    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        plain_cache.store(kv_cache, slot_mapping, key, value)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Any, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output: [tokens, heads, head_dim]. Without attn_metadata vLLM only warms up."""
        if attn_metadata is None:
            return output
        indptr, lengths = attn_metadata.indptr, attn_metadata.seq_lens.tolist()
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        for request, (first, last) in enumerate(pairwise(indptr)):
            output[first:last], lse[first:last] = plain_cache.attend(
                query[first:last], kv_cache, attn_metadata.block_table[request], lengths[request], self.scale,
                max(0, self.sliding_window))
        self.table.add(layer.layer_name, query, output, lse, indptr, attn_metadata.contexts, attn_metadata.positions,
                       self.float_sinks)
        return output


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
