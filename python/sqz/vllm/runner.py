"""What vLLM's model runner (V1) and its workers do for contexts: requests begin behind theirs, and tools of the front
end load indexes."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import torch

import sqz

from . import context, registered, states

CONTEXTS = "sqz_slots"  # of a request's extra_args: [slot, offset, skip] of each of its contexts
TOKENS = "sqz_tokens"  # of all its contexts
SHARED = 8  # requests: more are served sooner by one reading of their context; read whole, more than one are

_step: list[list[tuple[int, int, int]]] | None = None  # (slot, offset, skip) of each request that the step serves


def contexts_of(indptr: list[int]) -> sqz.Contexts | sqz.DeviceContexts | None:
    """The contexts of the step's requests, whose first tokens these are; none, if vLLM only warms up. None: all have the
    first index. Of requests of one token on the GPU, where a captured graph reads them."""
    if not registered().contexts:
        return None
    requests = len(indptr) - 1
    rows = [[]] * requests if _step is None or len(_step) != requests else _step
    named = context.table().named
    if named is None or indptr[-1] != requests or requests > named.requests or not fits_graph(rows):
        return sqz.Contexts([[sqz.Context(*one) for one in each] or None for each in rows])
    named.set([[sqz.Context(*one) for one in each] for each in rows])
    return named


def fits_graph(rows: list[Any]) -> bool:
    """Whether a full graph may serve requests with these contexts: they have few each, and it reads once what many of them
    share, or few share any. Calls that name contexts on the host always read them once."""
    options = registered()
    if max(map(len, rows), default=0) > options.graph_contexts:
        return False
    most = 1 if options.session.get("selector") == "dense" else SHARED
    if len(rows) > most and context.table().shares:
        return True
    shared = Counter(one[0] for each in rows for one in each)
    return max(shared.values(), default=0) <= most


class Requests:
    """Of an AttentionMetadataBuilder: its metadata also have `indptr`, the requests' first tokens on the host, `contexts`,
    theirs, and of a model with windows `positions` of all tokens."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(0, common_attn_metadata, fast_build)  # type: ignore[misc]
        starts = common_attn_metadata.query_start_loc_cpu[:common_attn_metadata.num_reqs + 1].tolist()
        metadata.indptr = list(dict.fromkeys(starts))  # a padded request has no token
        metadata.contexts = contexts_of(metadata.indptr)
        metadata.positions = None
        if context.table().windows:  # vLLM's own, as move() left them; on a GPU a graph reads them there
            positions = common_attn_metadata.positions[:metadata.indptr[-1]]
            metadata.positions = positions if positions.is_cuda else positions.tolist()
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
        states.begin(self, [one[0][0] if one else None for one in _step], num_scheduled_tokens)
        return prepared

    determine = GPUModelRunner._determine_batch_execution_and_padding

    @functools.wraps(determine)
    def determine_without_full(self: Any, *arguments: Any, **named: Any) -> Any:
        if registered().contexts and _step is not None and not fits_graph(_step):
            named["force_uniform_decode"] = False  # then no full graph is replayed
        return determine(self, *arguments, **named)

    GPUModelRunner._prepare_inputs = prepare_behind
    GPUModelRunner._determine_batch_execution_and_padding = determine_without_full
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
