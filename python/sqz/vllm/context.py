"""The fixed contexts in one process of vLLM: session, slots, and their part of each layer's attention."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import sqz
from sqz._arguments import MOST_CONTEXTS

from . import registered, states
from .library import identity
from .options import Options

class Table:
    """Session and indexes of this process. One tensor-parallel rank holds and serves its own KV heads."""

    def __init__(self, options: Options, config: Any) -> None:
        """config: vllm.config.VllmConfig of the model that is being made."""
        rank, ranks = config.parallel_config.rank, config.parallel_config.tensor_parallel_size
        _, first = options.first
        self._check(first, getattr(config, "sqz_identity", None))
        heads = first.info.kv_heads // ranks
        self._where: dict[str, Any] = {"kv_heads": None if ranks == 1 else (rank % ranks * heads, heads)}
        self._on_gpu = config.device_config.device_type == "cuda"
        if self._on_gpu:
            self._where["device"] = torch.cuda.current_device()
            first.upload(**self._where)
        with all_cores():
            self.session = sqz.Session(first, max_tokens=config.scheduler_config.max_num_batched_tokens,
                                       max_contexts=MOST_CONTEXTS if options.contexts else 1, **self._where,
                                       **options.session, **self._graphs(options, config))
        self.windows = any(one.window for one in first.layers)
        self.recurrent: dict[str, Any] = {}  # the model's recurrent layers by name, once vLLM has made their memory
        self.states: dict[int, dict[str, list[torch.Tensor]]] = {}  # by slot, what its context leaves to each of them
        self._indexes: dict[int, sqz.Index] = {0: first}
        self._loading: dict[int, threading.Thread] = {}
        self._failed: dict[int, str] = {}

    def _graphs(self, options: Options, config: Any) -> dict[str, Any]:
        """Arguments of the session whose calls read contexts on the GPU, and `named`, what they read; else None."""
        self.named: sqz.DeviceContexts | None = None
        self.shares = False  # whether they read a context once for all of its requests, if there are many (runner.SHARED)
        if not (self._on_gpu and options.contexts and in_graphs(options)):
            return {}
        hopper = torch.cuda.get_device_capability(self._where["device"]) == (9, 0)
        self.shares = hopper and options.first[1].layers[0].head_dim <= 128
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        requests = max(config.scheduler_config.max_num_seqs, captured)
        self.named = sqz.DeviceContexts(requests, options.graph_contexts, f"cuda:{self._where['device']}")
        return {"device_requests": requests, "device_tokens": options.graph_tokens}

    def _check(self, index: sqz.Index, expected: str | None) -> None:
        found = identity(index)
        if expected not in (None, found):
            raise ValueError(f"{index.info.path}: found {found}, expected {expected}: the index was replaced while vLLM "
                             "opened it. Ask again, or start it again")

    def put(self, slot: int, path: str, expected: str) -> None:
        """Begins to load an index; ready() says when it is in its slot."""
        before = self._loading.get(slot)  # of a request that was given up

        def load() -> None:
            if before is not None:
                before.join()
            self._failed.pop(slot, None)
            try:
                index = sqz.Index(path)
                self._check(index, expected)
                if self._on_gpu:
                    index.upload(**self._where)
                self.session.put(slot, index)
                self._indexes[slot] = index
                self.keep_states(slot)
            except Exception as error:  # it belongs to the request that waits
                self._failed[slot] = str(error)

        self._loading[slot] = threading.Thread(target=load, name=f"sqz slot {slot}")
        self._loading[slot].start()

    def ready(self, slot: int) -> bool:
        """Whether the index is in its slot. ValueError if it cannot be loaded."""
        thread = self._loading[slot]
        if thread.is_alive():
            return False
        if slot in self._failed:
            raise ValueError(self._failed[slot])
        return True

    def drop(self, slot: int) -> None:
        """Empties a slot, once it is loaded."""
        if thread := self._loading.pop(slot, None):
            thread.join()
        self.session.put(slot, None)
        self.states.pop(slot, None)
        index = self._indexes.pop(slot, None)  # which may be that of the options, open for who asks next
        if index is not None and self._on_gpu:
            index.unload(self._where["device"])

    def keep_states(self, slot: int) -> None:
        """Reads what the context in a slot leaves to recurrent layers. ValueError if these are of another shape."""
        index = self._indexes[slot]  # Falcon-H1 counts its recurrent layers behind those with attention
        self.states[slot] = {name: states.fit(name, layer, index.state(number_of(name) % index.info.layers))
                             for name, layer in self.recurrent.items()}

    def add(self, layer: str, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, indptr: list[int],
            contexts: sqz.Contexts | sqz.DeviceContexts | None, positions: list[int] | torch.Tensor | None = None,
            sinks: torch.Tensor | None = None) -> None:
        """Merges the attention over the contexts into (output, lse), the attention over what follows them.

        layer: its name in vLLM, "model.layers.3.self_attn.attn". query, output: [tokens, heads, head_dim], which may
        be more tokens than the requests have: those are left alone. lse: [tokens, heads] float32, natural logarithm,
        any strides. indptr: the requests' first tokens, and the end of the last. contexts: of the requests; None: the
        first index. DeviceContexts: each request has one token. positions: of the tokens, where layers have windows;
        on a GPU they are there.
        sinks: [heads] float32, of this layer, if (output, lse) are without them.
        """
        tokens = indptr[-1]
        out, out_lse = self.session.attend(number_of(layer), query[:tokens].contiguous(), contexts=contexts,
                                           indptr=None if isinstance(contexts, sqz.DeviceContexts) else indptr,
                                           positions=positions)
        sqz.merge_states(output[:tokens], lse[:tokens], out, out_lse, sinks)


def in_graphs(options: Options) -> bool:
    """Whether this GPU's kernels read the contexts of a captured call on the GPU."""
    return not why_piecewise(options)


def why_piecewise(options: Options) -> str:
    """Why they do not; empty if they do."""
    from vllm.platforms import current_platform

    first, selector = options.first[1].layers[0], options.session.get("selector", "auto")
    old = not current_platform.has_device_capability(90)
    mixed = any(one != first or one.kind != "full" for one in options.first[1].layers)
    return next((why for why, found in (
        ("SQZ_GRAPH_CONTEXTS is 0", options.graph_contexts == 0),
        (f"the selector is {selector}", selector not in ("auto", "squeezed", "dense")),
        ("this GPU is older than compute capability 9.0", old),
        ("the model's layers are not all full attention of one shape", mixed),
    ) if found), "")


@functools.cache
def number_of(layer: str) -> int:
    """3 of "model.layers.3.self_attn.attn"."""
    numbers = [int(part) for part in layer.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"{layer}: an attention layer's name with {len(numbers)} numbers; expected one, the layer's")
    return numbers[0]


_table: Table | None = None


def table() -> Table:
    """The process's table, made by its first layer, before vLLM measures how much memory is left for its cache."""
    global _table
    if _table is None:
        from vllm.config import get_current_vllm_config

        _table = Table(registered(), get_current_vllm_config())
    return _table


def refuse_layer(num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
                 sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
                 attn_type: str = "decoder", kv_sharing_target_layer_name: str | None = None,
                 sinks: Any = None) -> None:
    """Takes what vLLM gives to an AttentionImpl. Raises ValueError for a layer whose attention over the context is not
    softmax(scale * q.k) over all keys, or those of a window and a sink."""
    for found, what in ((alibi_slopes is not None, "ALiBi"), (logits_soft_cap, "a soft cap on its logits"),
                        (kv_sharing_target_layer_name, "another layer's keys"),
                        (attn_type != "decoder", f"attention of type {attn_type}")):
        if found:
            raise ValueError(f"sqz cannot serve this with vLLM: a layer has {what}; expected causal attention to keys of "
                             "its own")


class ContextLayer:
    """Of an AttentionImpl: it refuses what cannot be served, and has the table and its sinks in float32."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        refuse_layer(*arguments, **named)
        self.table = table()
        self.float_sinks: torch.Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        sinks = self.sinks  # type: ignore[attr-defined]
        self.float_sinks = None if sinks is None else sinks.detach().float()


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
