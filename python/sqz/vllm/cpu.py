"""vLLM's CPU backend with a fixed context in front of every request.

vLLM's own kernel for CPUs gives no log-sum-exp and keeps keys in an order of its instruction set. So keys and values
lie in vLLM's blocks as plain rows here, and PyTorch's kernel attends to them. Blocks stay vLLM's: its prefix cache,
chunked prefill and reuse of blocks work as ever.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (CPUAttentionBackend, CPUAttentionBackendImpl,
                                                 CPUAttentionMetadataBuilder)

from . import context


class Builder(context.Requests, CPUAttentionMetadataBuilder):
    pass


class Impl(CPUAttentionBackendImpl):
    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
                 sliding_window: Any, kv_cache_dtype: str, logits_soft_cap: Any = None, attn_type: str = "decoder",
                 kv_sharing_target_layer_name: Any = None, sinks: Any = None) -> None:
        context.refuse_layer(sliding_window, alibi_slopes, logits_soft_cap, sinks, kv_sharing_target_layer_name,
                             attn_type)
        super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype)
        self.context = context.context()

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        """key, value: [tokens, KV heads, head_dim]. kv_cache: [blocks, KV heads, block, 2 * head_dim]."""
        block, slot = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[block, :, slot] = torch.cat((key, value), dim=-1)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Any, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output: [tokens, heads, head_dim]. Without attn_metadata vLLM only warms up."""
        if attn_metadata is None:
            return output
        indptr, lengths = attn_metadata.indptr, attn_metadata.seq_lens.tolist()
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        for request, (first, last) in enumerate(zip(indptr, indptr[1:])):
            length = lengths[request]
            blocks = attn_metadata.block_table[request, :-(-length // kv_cache.shape[2])]
            rows = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]  # [KV heads, length, 2 * head_dim]
            output[first:last], lse[first:last] = attend(query[first:last], rows, self.scale)
        self.context.add(layer.layer_name, query, output, lse, indptr)
        return output


def attend(query: torch.Tensor, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of a request over all of its tokens.

    query: [tokens, heads, head_dim]. rows: [KV heads, length, 2 * head_dim], each token's key and value. Returns
    (out [tokens, heads, head_dim], lse [tokens, heads] float32).
    """
    tokens, heads, dim = query.shape
    kv_heads, length, _ = rows.shape
    groups = heads // kv_heads
    grouped = query.view(tokens, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * tokens, dim)
    mask = None
    if tokens > 1:
        later = torch.arange(length) > torch.arange(length - tokens, length)[:, None]
        mask = torch.zeros(tokens, length).masked_fill(later, -math.inf).repeat(groups, 1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, rows[None, :, :, :dim], rows[None, :, :, dim:], 0.0, False, attn_mask=mask, scale=scale)
    out = out[0].unflatten(1, (groups, tokens)).permute(2, 0, 1, 3).reshape(tokens, heads, dim)
    return out, lse.reshape(heads, tokens).T


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
