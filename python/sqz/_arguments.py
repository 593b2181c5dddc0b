"""Python arguments as sqz_attend_args, with all that must live as long as they are used."""

import ctypes as c
from collections.abc import Sequence
from typing import Any

from sqz import _library
from sqz._tensors import Borrowed, DLPackTensor, Integers, integers, stream_of


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


class Arguments:
    """Of one call: `struct` is what the library reads."""

    def __init__(self, layer: int, q: DLPackTensor, out: DLPackTensor | None, lse: DLPackTensor | None,
                 positions: Integers | None, indptr: Integers | None, stream: int | None,
                 q_before_rope: DLPackTensor | None = None,
                 sessions: Sequence[c.c_void_p | None] | None = None) -> None:
        tensors = {"q": q, "out": out, "lse": lse, "q_before_rope": q_before_rope}
        self._borrowed = {name: Borrowed(name, tensor) for name, tensor in tensors.items() if tensor is not None}
        numbers = {"positions": positions, "indptr": indptr}
        self._numbers = {name: integers(name, values) for name, values in numbers.items() if values is not None}
        shape = self._borrowed["q"].shape
        if positions is not None and shape and len(self._numbers["positions"]) != shape[0]:
            raise ValueError(f"positions: found {len(self._numbers['positions'])}, expected {shape[0]}, one for each "
                             "token of q")
        requests = max(0, len(self._numbers["indptr"]) - 1) if indptr is not None else 0
        self._sessions = None
        if sessions is not None:
            if len(sessions) != (requests if indptr is not None else 1):
                raise ValueError(f"sessions: found {len(sessions)}, expected {requests if indptr is not None else 1}, "
                                 "one for each request")
            self._sessions = (c.c_void_p * len(sessions))(*(None if one is None else one.value for one in sessions))
        self.struct = _library.AttendArgs(
            layer=layer, requests=requests, stream=stream_of(q) if stream is None else stream,
            sessions=None if self._sessions is None else c.addressof(self._sessions),
            **{name: one.at for name, one in self._borrowed.items()},
            **{name: one.ctypes.data for name, one in self._numbers.items()})
