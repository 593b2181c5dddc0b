"""Python arguments as sqz_attend_args, with all that must live as long as they are used."""

import ctypes as c
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sqz import _library
from sqz._tensors import DLPackTensor, Integers, borrow, capturing, integers, on_gpu, shape_at, stream_of

if TYPE_CHECKING:
    from sqz.index import IndexInfo


def head_range(kv_heads: tuple[int, int] | None) -> tuple[int, int]:
    """(first, count); count 0 = all."""
    if kv_heads is None:
        return 0, 0
    try:
        first, count = kv_heads
    except (TypeError, ValueError):
        raise TypeError(f"kv_heads: found {kv_heads!r}, expected (first, count)") from None
    if count < 1:
        raise ValueError(f"kv_heads: found {kv_heads!r}, expected a count of at least 1")
    return first, count


def doubles(name: str, values: Sequence[float] | None) -> Any:
    """A C array, or None."""
    try:
        return None if values is None else (c.c_double * len(values))(*values)
    except TypeError:
        raise TypeError(f"{name}: found {values!r}, expected a sequence of numbers") from None


MOST_CONTEXTS = 8  # of a request
_SINKS = 4  # tokens that all documents but the first leave out: their attention sinks


class Context(NamedTuple):
    """An index as a request sees it."""

    slot: int  # of the session
    offset: int = 0  # position of its first token
    skip: int = 0  # first tokens that are left out: 4 for all but the first of several


def one_behind_the_other(documents: Sequence[tuple[int, "IndexInfo"]]) -> tuple[tuple[Context, ...], int]:
    """The contexts of a request with these slots and indexes, in their order, and the position of its first token."""
    row: tuple[Context, ...] = ()
    tokens = 0
    for slot, info in documents:
        row += (Context(slot, tokens, min(_SINKS, info.sink) if row and not info.after else 0),)
        tokens += info.tokens
    return row, tokens


class Contexts:
    """The contexts of each request of a call, which several calls may share.

    requests: for each of them None, a slot, a Context, or a sequence of Contexts, one behind the other.
    """

    def __init__(self, requests: Sequence[int | Context | Sequence[Context] | None]) -> None:
        self._rows = rows = [tuple(_contexts_of(request)) for request in requests]
        self.each = max((len(row) for row in rows), default=0) or 1
        self.requests = len(rows)
        self.array = (_library.Context * (self.each * len(rows)))()
        for number, row in enumerate(rows):
            for place in range(self.each):
                one = row[place] if place < len(row) else Context(-1)
                self.array[number * self.each + place] = _library.Context(**one._asdict())
        changes = sum(a != b for a, b in zip(rows, rows[1:]))
        self._mixed = bool(rows) and changes >= len(set(rows))  # requests with the same contexts are not all neighbours
        self._grouped: tuple[Any, ...] = ()

    def grouped(self, indptr: Integers, q: Any) -> "tuple[Any, np.ndarray[Any, Any], Contexts] | None":
        """The tokens of q in an order in which requests with the same contexts are neighbours, for which the library reads a
        context once: (a tensor of torch with the tokens in that order, their indptr, their contexts). None: they are
        neighbours already, indptr does not fit, or a graph is captured, into which no memory of the host can come."""
        if not self._mixed or capturing(q):
            return None
        starts = integers("indptr", indptr)
        if len(starts) != len(self._rows) + 1:
            return None
        if not self._grouped or self._grouped[0] != q.device or not np.array_equal(self._grouped[1], starts):
            import torch

            order = sorted(range(len(self._rows)), key=self._rows.__getitem__)
            tokens = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in order])
            self._grouped = (q.device, starts.copy(), (
                torch.from_numpy(tokens).to(q.device), np.cumsum([0, *(starts[one + 1] - starts[one] for one in order)]),
                Contexts([self._rows[one] for one in order])))
        found: tuple[Any, np.ndarray[Any, Any], Contexts] = self._grouped[2]
        return found if len(found[0]) == len(q) == starts[-1] else None


class DeviceContexts:
    """Contexts in the memory of a GPU, which kernels read: a captured graph serves what set() put there last.

    requests: the most of a call, one token each. each: the most contexts of a request. Needs torch.
    """

    def __init__(self, requests: int, each: int = 1, device: Any = "cuda") -> None:
        import torch

        self.each, self.requests = each, requests
        self._last: list[Any] = []
        self.words = torch.from_numpy(self._words([])).to(device)  # [requests, each, 2], sqz_context in words of 8 bytes

    def _words(self, requests: Sequence[int | Context | Sequence[Context] | None]) -> Any:
        rows = [[*_contexts_of(request)] for request in requests]
        if len(rows) > self.requests or any(len(row) > self.each for row in rows):
            raise ValueError(f"contexts: found those of {len(rows)} requests, expected at most {self.requests} with "
                             f"{self.each} each")
        padded = rows + [[]] * (self.requests - len(rows))
        array = Contexts([row + [Context(-1)] * (self.each - len(row)) for row in padded]).array
        return np.frombuffer(memoryview(array), np.int64).reshape(self.requests, self.each, 2).copy()

    def set(self, requests: Sequence[int | Context | Sequence[Context] | None]) -> None:
        """The contexts of the first requests of a call, on torch's current stream; the others have none."""
        import torch

        if self._last == [*requests]:
            return
        self._last = []
        words = torch.from_numpy(self._words(requests))
        self.words.copy_(words.pin_memory() if self.words.is_cuda else words, non_blocking=True)
        self._last = [*requests]


def _contexts_of(request: int | Context | Sequence[Context] | None) -> Sequence[Context]:
    if request is None:
        return ()
    if isinstance(request, int):
        return (Context(request),)
    row = (request,) if isinstance(request, Context) else tuple(request)
    if not all(isinstance(one, Context) for one in row):
        raise TypeError(f"contexts: found {request!r}, expected None, a slot, or one or several Contexts")
    return row


_SIZE = c.sizeof(_library.AttendArgs)
_FIELDS: Any = _library.AttendArgs._fields_
_PACK = struct.Struct("".join(kind._type_.replace("P", "Q") for _, kind in _FIELDS)).pack


def arguments(layer: int, q: DLPackTensor, out: DLPackTensor | None, lse: DLPackTensor | None,
              positions: Integers | None, indptr: Integers | None, stream: int | None,
              q_before_rope: DLPackTensor | None = None,
              contexts: Contexts | DeviceContexts | None = None) -> tuple[bytes, Any]:
    """A sqz_attend_args, and what it points to besides the arguments' own memory."""
    (at_q, at_out, at_lse, at_before), kept = borrow(q=q, out=out, lse=lse, q_before_rope=q_before_rope)
    requests = host_positions = at_indptr = device_positions = host_contexts = each = device_contexts = 0
    if positions is not None:
        given = on_gpu("positions", positions)
        if given is None:
            given = integers("positions", positions)
            host_positions = given.ctypes.data
        else:
            device_positions = given.data_ptr()
        if (shape := shape_at(at_q)) and len(given) != shape[0]:
            raise ValueError(f"positions: found {len(given)}, expected {shape[0]}, one for each token of q")
        kept.append(given)
    if indptr is not None:
        starts = integers("indptr", indptr)
        at_indptr, requests = starts.ctypes.data, max(0, len(starts) - 1)
        kept.append(starts)
    if isinstance(contexts, DeviceContexts):
        if (shape := shape_at(at_q)) and shape[0] > contexts.requests:
            raise ValueError(f"contexts: found those of {contexts.requests} requests, expected {shape[0]}")
        device_contexts, each = contexts.words.data_ptr(), contexts.each
    elif contexts is not None:
        if contexts.requests != (expected := 1 if indptr is None else requests):
            raise ValueError(f"contexts: found those of {contexts.requests} requests, expected {expected}")
        host_contexts, each = c.addressof(contexts.array), contexts.each
    stream = stream_of(q) or 0 if stream is None else stream
    try:
        return _PACK(_SIZE, layer, at_q, at_out, at_lse, host_positions, at_indptr, requests, stream, at_before,
                     host_contexts, each, device_positions, device_contexts), kept
    except struct.error:
        _library.AttendArgs(layer=layer, stream=stream)  # raises with the name
        raise
