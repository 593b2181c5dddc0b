"""vLLM's FlashAttention backend with a fixed context in front of every request."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (FlashAttentionBackend, FlashAttentionImpl,
                                                   FlashAttentionMetadataBuilder, flash_attn_varlen_func)

from . import context, registered, runner

logger = init_logger("vllm.sqz")


class Builder(runner.Requests, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    # sqz takes the requests' first tokens from the host, so a graph fixes them: 0, 1, 2, ... for one token each.
    # Contexts of a library are read on the GPU, where its kernels can: else its steps run in piecewise graphs.
    _piecewise = registered().contexts and context.why_piecewise(registered())
    _cudagraph_support = AttentionCGSupport.NEVER if _piecewise else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if _piecewise:
        logger.info("sqz decodes in piecewise CUDA graphs, because %s", _piecewise)


class Impl(context.ContextLayer, FlashAttentionImpl):  # type: ignore[misc]
    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Any, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output: [tokens, heads, head_dim]. Without attn_metadata vLLM only measures its memory."""
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        keys, values = _keys_and_values(kv_cache)
        _, lse = flash_attn_varlen_func(  # lse: [heads, tokens]
            q=query[:tokens], k=keys, v=values, out=output[:tokens], cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len, seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len, softmax_scale=self.scale, causal=True,
            window_size=list(self.sliding_window),
            block_table=attn_metadata.block_table, scheduler_metadata=attn_metadata.scheduler_metadata,
            num_splits=attn_metadata.max_num_splits, fa_version=self.vllm_flash_attn_version, return_softmax_lse=True)
        self.table.add(layer.layer_name, query, output, lse.T, attn_metadata.indptr, attn_metadata.contexts,
                       attn_metadata.positions, self.float_sinks)
        return output


def _keys_and_values(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [blocks, block, KV heads, head_dim]. Up to vLLM 0.25 kv_cache is [blocks, 2, block, KV heads, head_dim],
    from 0.32 on [blocks, KV heads, block, 2 * head_dim]."""
    keys, values = kv_cache.unbind(1) if kv_cache.ndim == 5 else kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)


class Backend(FlashAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
