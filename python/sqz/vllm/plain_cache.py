"""vLLM's blocks of keys and values as plain rows, and PyTorch's attention over them, for CPUs.

vLLM's own kernel for CPUs gives no log-sum-exp and keeps keys in an order of its instruction set. The blocks stay
vLLM's, so that its prefix cache, chunked prefill and reuse of blocks work as ever.
"""

from __future__ import annotations

import torch

from sqz.transformers.attention import additive_bias, own_state, seen


def store(kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes tokens into their slots.

    kv_cache: [blocks, KV heads, block, 2 * head_dim]. slots: [tokens] integers, block number * block + place in it;
    -1 for a token that is padding. key, value: [tokens, KV heads, head_dim].
    """
    real = slots >= 0
    if not real.all():
        slots, key, value = slots[real], key[real], value[real]
    size = kv_cache.shape[2]
    kv_cache[slots // size, :, slots % size] = torch.cat((key, value), dim=-1)


def attend(query: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int,
           scale: float, window: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a request's last tokens over all of its tokens, or over the `window` that end with each.

    query: [tokens, heads, head_dim]. kv_cache: as in store(). blocks: the request's block numbers, in order, at least
    as many as its `length` tokens fill. Returns (out as query, lse [tokens, heads] float32, natural logarithm).
    """
    tokens, queries = len(query), query[None].transpose(1, 2)
    first = max(0, length - tokens + 1 - window) if window else 0  # blocks of tokens before may be another request's
    size = kv_cache.shape[2]
    rows = kv_cache[blocks[first // size:-(-length // size)]].transpose(0, 1).flatten(1, 2)
    rows = rows[:, first % size:length - first // size * size]  # [KV heads, tokens from `first` on, 2 * head_dim]
    keys, values = rows[None].chunk(2, dim=-1)
    bias = None
    if tokens > 1 and (tokens < length or 0 < window < length):
        places = torch.arange(first, length)
        bias = additive_bias(seen(places[-tokens:], places, window)[None, None], queries, keys)
    return own_state(queries, keys, values, bias, scale)
