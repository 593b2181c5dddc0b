"""What vLLM's model runner (V1) and its workers do for contexts: requests begin behind theirs, and tools of the front
end load indexes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

import sqz

from . import context, registered

CONTEXTS = "sqz_slots"  # of a request's extra_args: [slot, offset, skip] of each of its contexts
TOKENS = "sqz_tokens"  # of all its contexts

_step: list[list[tuple[int, int, int]]] | None = None  # (slot, offset, skip) of each request that the step serves


def contexts_of(requests: int) -> sqz.Contexts | None:
    """The contexts of the step's requests; none, if vLLM only warms up. None: all have the first index."""
    if not registered().contexts:
        return None
    if _step is None or len(_step) != requests:
        return sqz.Contexts([None] * requests)
    return sqz.Contexts([[sqz.Context(*one) for one in each] or None for each in _step])


class Requests:
    """Of an AttentionMetadataBuilder: its metadata also have `indptr`, the requests' first tokens on the host, and
    `contexts`, theirs."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(0, common_attn_metadata, fast_build)  # type: ignore[misc]
        starts = common_attn_metadata.query_start_loc_cpu[:common_attn_metadata.num_reqs + 1].tolist()
        metadata.indptr = list(dict.fromkeys(starts))  # a padded request has no token
        metadata.contexts = contexts_of(len(metadata.indptr) - 1)
        return metadata

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        return False


def install() -> None:
    """Positions of requests begin where their contexts end, and workers have the methods sqz_put, sqz_ready, sqz_drop,
    and sqz_delivered."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    prepare = GPUModelRunner._prepare_inputs

    @functools.wraps(prepare)
    def prepare_behind(self: Any, scheduler_output: Any, num_scheduled_tokens: Any, *rest: Any) -> Any:
        global _step
        requests = [self.requests[name].sampling_params.extra_args or {}
                    for name in self.input_batch.req_ids[:self.input_batch.num_reqs]]
        _step = [one.get(CONTEXTS, []) for one in requests]
        prepared = prepare(self, scheduler_output, num_scheduled_tokens, *rest)
        move(self, [one.get(TOKENS, 0) for one in requests], num_scheduled_tokens)
        return prepared

    GPUModelRunner._prepare_inputs = prepare_behind
    for name in ("put", "ready", "drop"):
        setattr(WorkerBase, f"sqz_{name}", lambda self, *arguments, name=name: getattr(context.table(), name)(*arguments))
    WorkerBase.sqz_delivered = lambda self, slot: context.table().session.stats(slot=slot).delivered_budget


def move(runner: Any, offsets: list[int], tokens: Any) -> None:
    """Adds each request's offset to the positions of its tokens, which the model reads. Slots in vLLM's cache and the
    lengths of requests are vLLM's own."""
    total = int(tokens.sum())
    added: Any = offsets[0]
    if any(offset != added for offset in offsets):
        added = torch.from_numpy(np.repeat(np.asarray(offsets, np.int64), tokens)).to(runner.device, non_blocking=True)
    runner.positions[:total] += added
    if getattr(runner, "uses_mrope", False):
        runner.mrope_positions.gpu[:, :total] += added
