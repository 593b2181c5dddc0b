"""The fixed context in one process of vLLM: index, session, and its part of each layer's attention."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import sqz

from . import registered, rope
from .options import Options, identity


class Context:
    """Index and session of this process. One tensor-parallel rank holds and serves its own KV heads."""

    def __init__(self, options: Options, config: Any) -> None:
        """config: vllm.config.VllmConfig of the model that is being made."""
        rank, ranks = config.parallel_config.rank, config.parallel_config.tensor_parallel_size
        self.index = options.opened
        found, expected = identity(self.index), getattr(config, "sqz_identity", None)
        if expected not in (None, found):
            raise ValueError(f"{options.index}: found {found}, expected {expected}: the index was replaced while vLLM "
                             "started. Start it again")
        heads = self.index.info.kv_heads // ranks
        where: dict[str, Any] = {"kv_heads": None if ranks == 1 else (rank % ranks * heads, heads)}
        if config.device_config.device_type == "cuda":
            where["device"] = torch.cuda.current_device()
            self.index.upload(**where)
        with all_cores():
            self.session = sqz.Session(self.index, max_tokens=config.scheduler_config.max_num_batched_tokens,
                                       **where, **options.session)

    def add(self, layer: str, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, indptr: list[int]) -> None:
        """Merges the attention over the context into (output, lse), the attention over what follows it.

        layer: its name in vLLM, "model.layers.3.self_attn.attn". query, output: [tokens, heads, head_dim], which may
        be more tokens than the requests have: those are left alone. lse: [tokens, heads] float32, natural logarithm,
        any strides. indptr: the requests' first tokens, and the end of the last.
        """
        tokens = indptr[-1]
        out, out_lse = self.session.attend(number_of(layer), query[:tokens].contiguous(), indptr=indptr)
        sqz.merge_states(output[:tokens], lse[:tokens], out, out_lse)


@functools.cache
def number_of(layer: str) -> int:
    """3 of "model.layers.3.self_attn.attn"."""
    numbers = [int(part) for part in layer.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"{layer}: an attention layer's name with {len(numbers)} numbers; expected one, the layer's")
    return numbers[0]


_context: Context | None = None


def context() -> Context:
    """The process's context, made by its first layer, before vLLM measures how much memory is left for its cache."""
    global _context
    if _context is None:
        from vllm.config import get_current_vllm_config

        _context = Context(registered(), get_current_vllm_config())
    return _context


def refuse_layer(num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
                 sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
                 attn_type: str = "decoder", kv_sharing_target_layer_name: str | None = None,
                 sinks: Any = None) -> None:
    """Takes what vLLM gives to an AttentionImpl. Raises ValueError for a layer whose attention over the context is not
    softmax(scale * q.k) over all keys."""
    for found, what in ((sliding_window, "a sliding window"), (alibi_slopes is not None, "ALiBi"),
                        (logits_soft_cap, "a soft cap on its logits"), (sinks is not None, "attention sinks"),
                        (kv_sharing_target_layer_name, "another layer's keys"),
                        (attn_type != "decoder", f"attention of type {attn_type}")):
        if found:
            raise ValueError(f"sqz cannot serve this with vLLM: a layer has {what}; expected full causal attention")


class Requests:
    """Of an AttentionMetadataBuilder: its metadata also have `indptr`, the requests' first tokens on the host."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if not rope.shifted:
            raise ValueError("sqz cannot serve this with vLLM: the model has no rotary embedding, so its positions "
                             "cannot begin after the context")
        metadata = super().build(0, common_attn_metadata, fast_build)  # type: ignore[misc]
        starts = common_attn_metadata.query_start_loc_cpu[:common_attn_metadata.num_reqs + 1].tolist()
        metadata.indptr = list(dict.fromkeys(starts))  # a padded request has no token
        return metadata

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        return False


@contextmanager
def all_cores() -> Iterator[None]:
    """Threads that are started within may run on all cores of this process's threads: on a CPU vLLM pins each of its
    threads to one core, and new threads would share the first one's."""
    torch.set_num_threads(torch.get_num_threads())  # which starts them
    before = os.sched_getaffinity(0)
    threads = (int(thread) for thread in os.listdir("/proc/self/task"))
    os.sched_setaffinity(0, set().union(*(os.sched_getaffinity(thread) for thread in threads)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
