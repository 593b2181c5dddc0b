"""Attention over a model's own keys, with the log-sum-exp that merging needs: torch's own function keeps it back."""

import torch
from torch.nn.functional import pad

from sqz.index import Layer

_aten = torch.ops.aten


def own_state(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
              scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of each query over the keys that follow the fixed context.

    query: [batch, query heads, tokens, head_dim]; key: [batch, KV heads, keys, head_dim]; value: [batch, KV heads,
    keys, value_dim], float32, float16 or bfloat16 on the CPU or on CUDA. bias: of additive_bias(), or None: causal, the
    first query at the first key, or everything if there is one token a request.
    Returns out [batch * tokens, query heads, value_dim] in the query's dtype and lse [batch * tokens, query heads]
    float32, natural logarithm. Rows whose keys are all masked hold anything.
    """
    batch, heads, tokens, _ = query.shape
    group, value_dim = heads // key.shape[1], value.shape[3]
    dim = max(query.shape[3], value_dim)
    if query.shape[3] != value_dim:  # torch's kernels have one for both
        query, key, value = (pad(part, (0, dim - part.shape[3])) if part.shape[3] < dim else part
                             for part in (query, key, value))
    if tokens == 1:  # the heads of a group as the queries of one head: nothing is copied
        query = query.reshape(batch, key.shape[1], group, dim)
    elif group > 1:
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    causal = bias is None and tokens > 1
    if causal:  # a static cache has room for more
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    if query.is_cpu:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias,
                                                                     scale=scale)
    elif bias is None and query.dtype != torch.float32 and dim <= 256:
        out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]
    else:
        out, lse = _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal,
                                                                 scale=scale)[:2]
        lse = lse[..., :query.shape[2]]  # of a multiple of 32
    if tokens > 1:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    out, lse = out.reshape(batch * tokens, heads, dim), lse.reshape(batch * tokens, heads)
    return (out if dim == value_dim else out[..., :value_dim]).contiguous(), lse.contiguous()


def over_a_context(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer,
                   sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of all tokens of one request, as own_state() takes them, to those that they see in the layer.

    Returns [1, tokens, query heads, value_dim]. Needs no memory for a mask of all tokens.
    """
    tokens = query.shape[2]
    most = layer.window or layer.chunk or tokens
    if most >= tokens:
        return with_sinks(*own_state(query, key, value, None, layer.scale), sinks)[None]
    parts = []
    for first in range(0, tokens, 1024):
        rows, keys = slice(first, first + 1024), slice(max(0, first - most + 1), first + 1024)
        q, k, v = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        places = torch.arange(tokens, device=query.device)
        bias = additive_bias(seen(places[rows], places[keys], layer.window, layer.chunk)[None, None], q, k)
        parts.append(with_sinks(*own_state(q, k, v, bias, layer.scale), sinks))
    return torch.cat(parts)[None]


def seen(queries: torch.Tensor, keys: torch.Tensor, window: int, chunk: int = 0) -> torch.Tensor:
    """Whether a query at a position sees a key: bool [..., queries, keys]. window, chunk: of a Layer."""
    at, key = queries[..., :, None], keys[..., None, :]
    mask = key <= at
    if window:
        mask &= key > at - window
    if chunk:
        mask &= key >= at - at % chunk
    return mask


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """out [tokens, query heads, value_dim], in place, as if the softmax had one more logit a head, without a value."""
    return out if sinks is None else out.mul_(torch.sigmoid(lse - sinks.float())[..., None])


def rows_of(heads: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] as [batch * tokens, heads, head_dim]."""
    return heads.transpose(1, 2).reshape(-1, heads.shape[1], heads.shape[3])


def additive_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask [batch, 1, tokens, keys or more], bool or additive, as own_state() takes it.

    The rows are aligned to 16 numbers, which CUDA's kernel needs.
    """
    keys = key.shape[2]
    mask = mask[..., :keys]
    bias = query.new_zeros(*mask.shape[:-1], keys + -keys % 16)[..., :keys]
    if mask.dtype == torch.bool:
        bias.masked_fill_(~mask, float("-inf"))
    else:
        bias.copy_(mask)
    batch, heads, tokens, _ = query.shape
    if tokens == 1:
        return bias.expand(batch, key.shape[1], heads // key.shape[1], keys)
    return bias.expand(batch, heads, tokens, keys)
