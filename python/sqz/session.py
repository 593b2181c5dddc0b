"""Serving attention over an index: sessions, and joining their states with others."""

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import index as integer
from typing import Any

from sqz import _library
from sqz._arguments import Context, Contexts, DeviceContexts, arguments, doubles, head_range
from sqz._handle import Handle
from sqz._library import INVALID_ARGUMENT, choice, lib
from sqz._tensors import (CUDA, Device, DLPackTensor, Integers, borrow, device_of, empty, integers, require, stream_of,
                          torch_of)
from sqz.index import Index


def _selectors() -> dict[str, int]:
    names: dict[str, int] = {}
    while name := lib.sqz_selector_name(len(names)):
        names[name.decode()] = len(names)
    return names


_SELECTORS = _selectors()
_RULES = {"budget": 0, "threshold": 1}


@dataclass(frozen=True)
class Stats:
    """What was asked and read since the session was made or reset."""

    dense_fallback: bool  # selection was asked for, but everything is read: that costs no more
    asked_budget: float  # fraction of the bytes, as given or resolved from keep; 1 if dense; 0 with thresholds
    delivered_budget: float  # bytes_read / bytes_dense
    asked_keep: float  # fraction of the clustered keys; 1 if dense; 0 with thresholds
    delivered_keep: float  # keys_read / keys_possible
    selections: int  # (layer, block of query tokens) pairs served
    keys_read: int  # clustered keys, summed over KV heads and selections
    keys_possible: int
    bytes_read: int  # keys, values, centroids, value means, first and last tokens
    bytes_dense: int  # what dense attention would have read
    least_budget: float  # a lower budget cannot be delivered
    route: str  # what served the last call: "cpu", or which kernels of a GPU; "" before it


class Session(Handle):
    """Attends to indexes. It serves one call at a time: other threads wait, so give each thread its own.

    index: an open Index; for a GPU one that was uploaded there. It may be closed before its sessions. It is in slot 0;
        put() adds others of the same model.
    selector: "auto" (what the index was built for), "squeezed", "dense", "quest", "stream", "window", "h2o",
        or "saap". Unless it is dense, give one of the next three.
    budget: fraction of the context's bytes, in (0, 1]. keep: fraction of the clustered keys. thresholds: one for each
        level in use, coarse to fine.
    rule: "budget" (the default) or "threshold", which thresholds imply.
    levels: of the tree, 0 = all. block: query tokens that share a selection, 0 = all of a call's.
    dense_layers: the model's first layers, which are read whole; 0 = what the selector wants, -1 = none.
    layer_scales: each layer's keep as a multiple of the average; not with the rule "threshold". uniform_layers: all
        alike, whatever the index says.
    max_tokens: most query tokens of a call, 0 = 4096. max_request_tokens: of one request, 0 = max_tokens.
    threads: of the CPU, 0 = all cores. device: None or "cpu", a number, "cuda", "cuda:1" or a torch.device.
    kv_heads: (first, count), those of one rank of tensor parallelism; None = all.
    max_contexts: most contexts of one request, up to 8; 0 = 1. Above 1 takes memory for a second copy of queries and
        outputs.
    device_requests: on a GPU the most requests of a call with DeviceContexts; 0 = no such calls. device_tokens: the most
        tokens of a context of theirs, 0 = those of the first index.
    """

    def __init__(self, index: Index, selector: str = "auto", budget: float | None = None, keep: float | None = None,
                 thresholds: Sequence[float] | None = None, rule: str | None = None, levels: int = 0, block: int = 0,
                 dense_layers: int = 0, layer_scales: Sequence[float] | None = None, uniform_layers: bool = False,
                 max_tokens: int = 0, max_request_tokens: int = 0, threads: int = 0, device: Device | None = None,
                 kv_heads: tuple[int, int] | None = None, max_contexts: int = 0,
                 device_requests: int = 0, device_tokens: int = 0) -> None:
        if not isinstance(index, Index):
            raise TypeError(f"index: found {type(index).__name__}, expected an Index")
        for name, amount in (("budget", budget), ("keep", keep)):
            if isinstance(amount, bool):
                raise TypeError(f"{name}: found {amount}, expected a number")
            if amount == 0:  # which the library takes for none
                raise ValueError(f"{name}: found 0, expected above 0 and at most 1")
        device_type, device_id = device_of(device)
        first, count = head_range(kv_heads)
        scales, limits = doubles("layer_scales", layer_scales), doubles("thresholds", thresholds)
        if limits is not None and rule == "budget":
            raise ValueError("rule: found 'budget' with thresholds, expected 'threshold' or none")
        used = min(levels or index.info.levels, index.info.levels) or 1
        if limits is not None and len(limits) != used:
            raise ValueError(f"thresholds: found {len(limits)}, expected {used}, one for each level in use")
        options = _library.SessionOptions(
            device_type=device_type, device_id=device_id, selector=choice("selector", selector, _SELECTORS),
            rule=choice("rule", rule or "budget", _RULES), levels=levels, budget=budget or 0, keep=keep or 0,
            thresholds=limits, block=block, max_tokens=max_tokens, threads=threads, dense_layers=dense_layers,
            max_request_tokens=max_request_tokens, layer_scales=scales, layer_scale_count=len(scales or ()),
            uniform_layers=uniform_layers, first_kv_head=first, kv_heads=count, max_contexts=max_contexts,
            device_requests=device_requests, device_tokens=device_tokens)
        self.index = index
        self._value_dims = {number: layer.value_dim for number, layer in enumerate(index.layers)}
        on_gpu = index._uploaded.get(device_id) if device_type == CUDA else None
        self.kv_heads = count or on_gpu or index.info.kv_heads
        super().__init__(lib.sqz_session_destroy)
        with index._pointer.lock:
            index._check(lib.sqz_session_create(index._pointer.at, c.byref(options), c.byref(self._pointer.at)))

    def put(self, slot: int, index: Index | None) -> None:
        """Puts another index of the same model into a slot, 0 to 65535; None empties the slot.

        The session's options hold for it, with thresholds and stats of its own. For a GPU it was uploaded there.
        """
        if not isinstance(index, Index | None):
            raise TypeError(f"index: found {type(index).__name__}, expected an Index or None")
        with self._pointer.lock:
            session, _lease = c.c_void_p(self._pointer.at.value), self._pointer.lease()
        if index is None:  # without the lock: others attend meanwhile
            self._check(lib.sqz_session_put(session, integer(slot), None))
            return
        with index._pointer.lock:
            there = index._pointer.at  # null would empty the slot
            (index if session else self)._check(
                lib.sqz_session_put(session, integer(slot), there) if there else INVALID_ARGUMENT)

    def attend(self, layer: int, q: DLPackTensor, out: Any = None, lse: Any = None, positions: Integers | None = None,
               indptr: Integers | None = None, stream: int | None = None, q_before_rope: DLPackTensor | None = None,
               contexts: Contexts | DeviceContexts | Sequence[int | Context | Sequence[Context] | None] | None = None,
               ) -> tuple[Any, Any]:
        """Attention of queries over the fixed context: (out, lse), which merge_states() joins with your own.

        layer: 0 to info.layers - 1, one that has keys. q: [tokens, query heads, head_dim] float32, float16 or bfloat16,
        after RoPE at positions from info.tokens on, not scaled. out: [tokens, query heads, value_dim], as q. lse: [tokens,
        query heads] float32, natural logarithm, positive strides; what is None is made. positions: one for each token,
        which recent layers need; on a GPU they may be there, int64, and a captured call then serves later ones.
        indptr: [requests + 1] first tokens of the requests in q; None = one request. stream: a cudaStream_t as a
        number; None = torch's current one for tensors of torch, else the default stream. On a GPU the call returns
        before its work is done. q_before_rope: for selector saap. contexts: for each request None (its lse is
        -infinity and its out 0), a slot, or one or several Contexts; without it all attend to slot 0. A context is read
        once for all requests of torch's tensors, and for neighbours of others. With DeviceContexts each token of q is a
        request.
        Rows of a request with a query that is NaN or infinite become NaN. Error with status 8 names token and head of
        finite queries with a logit or an output beyond float32; on a GPU those rows become NaN.
        """
        if out is None or lse is None:
            out, lse = _results(q, self._value_dims.get(layer, 0), out, lse)
        if contexts is not None and not isinstance(contexts, Contexts | DeviceContexts):
            contexts = Contexts(contexts)
        if (isinstance(contexts, Contexts) and indptr is not None and stream is None and torch_of(q) and
                self._attend_grouped(layer, q, out, lse, positions, indptr, q_before_rope, contexts)):
            return out, lse
        args, _kept = arguments(layer, q, out, lse, positions, indptr, stream, q_before_rope, contexts)
        with self._pointer.lock:
            status = lib.sqz_attend(self._pointer.at, args)
        if status:
            self._check(status)
        return out, lse

    def _attend_grouped(self, layer: int, q: Any, out: Any, lse: Any, positions: Any, indptr: Integers, q_before_rope: Any,
                        contexts: Contexts) -> bool:
        """attend() with the requests of a context side by side. False, and out and lse are as before, if they are so already,
        or for an error: that of the call as it was given names requests and tokens as the caller counts them."""
        if (grouped := contexts.grouped(indptr, q)) is None or positions is not None and len(positions) != len(q):
            return False
        tokens, starts, others = grouped
        if positions is not None:
            positions = positions[tokens] if torch_of(positions) else integers("positions", positions)[tokens.cpu().numpy()]
        before = None if q_before_rope is None else q_before_rope[tokens]
        try:
            found = self.attend(layer, q[tokens], None, None, positions, starts, None, before, others)
        except _library.Error:
            return False
        for to, one in zip((out, lse), found, strict=True):
            to.index_copy_(0, tokens, one)
        return True

    def select(self, layer: int, q: DLPackTensor, positions: Integers | None = None, indptr: Integers | None = None,
               stream: int | None = None, q_before_rope: DLPackTensor | None = None) -> list[list[tuple[int, int]]]:
        """What attend() would read for the first block of q: for each KV head the (first slot, slots) of runs."""
        args, _kept = arguments(layer, q, None, None, positions, indptr, stream, q_before_rope)
        starts, count = (c.c_int64 * (self.kv_heads + 1))(), c.c_int64()
        runs = (_library.Run * 1)()
        with self._pointer.lock:
            for _ in range(2):  # the first call may only say how many there are
                status = lib.sqz_select(self._pointer.at, args, runs, len(runs), starts, c.byref(count))
                if status != INVALID_ARGUMENT or count.value <= len(runs):
                    break
                runs = (_library.Run * count.value)()
        self._check(status)
        return [[(run.first, run.length) for run in runs[starts[h]:starts[h + 1]]] for h in range(self.kv_heads)]

    def stats(self, layer: int = -1, slot: int = 0) -> Stats:
        """Totals of a slot's index since it was put there or the last reset_stats(), of one layer or, with -1, of all;
        on a GPU of calls whose work has ended."""
        raw = _library.Stats()
        with self._pointer.lock:
            self._check(lib.sqz_session_stats(self._pointer.at, integer(slot), integer(layer), c.byref(raw)))
        values = {field.name: getattr(raw, field.name) for field in fields(Stats)}
        return Stats(**values | {"dense_fallback": bool(raw.dense_fallback), "route": raw.route.decode()})

    def reset_stats(self) -> None:
        """Counts from 0 again."""
        with self._pointer.lock:
            self._check(lib.sqz_session_reset_stats(self._pointer.at))


def merge_states(out_a: DLPackTensor, lse_a: DLPackTensor, out_b: DLPackTensor, lse_b: DLPackTensor,
                 sinks: DLPackTensor | None = None, stream: int | None = None) -> None:
    """Merges two states of the same queries over disjoint keys, exactly and in place into a.

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), and lse is the logarithm of the denominator.
    out: [tokens, heads, head_dim] float32, float16 or bfloat16, both the same. lse: [tokens, heads] float32, natural
    logarithm, any positive strides. sinks: [heads] float32, the model's attention sinks, logits that each head attends to
    as well and that have no value: once a layer, with its last merge. On a GPU it is done on `stream`, as Session.attend() says.
    """
    places, _kept = borrow(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks)
    _library.check(lib.sqz_merge_states_with(*places, stream_of(out_a) if stream is None else stream))


def _results(q: Any, value_dim: int, out: Any, lse: Any) -> tuple[Any, Any]:
    """out and lse; what is None is made as q is."""
    require("q", q)
    rows = tuple(q.shape[:2])
    return (empty("out", q, (*rows, value_dim)) if out is None else out,
            empty("lse", q, rows, float32=True) if lse is None else lse)
