"""The builder inside libsqz over ctypes: sqz_build.h is the contract."""

import ctypes as c
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sqz._handle import Handle
from sqz._library import _TYPES, check, lib
from sqz._tensors import DLPackTensor, borrow, dtype_name
from sqz.index import Index

# As in _library.FUNCTIONS.
FUNCTIONS = {
    "sqz_build_create": "ppplpp", "sqz_build_add_layer": "ppppp", "sqz_build_add_state": "plpp", "sqz_build_finish": "p", "sqz_index_info_json": "p",
    "sqz_index_calibrate": "pplpppp", "sqz_index_compress": "pppp",
}
try:
    for _name, _arguments in FUNCTIONS.items():
        getattr(lib, _name).argtypes = [_TYPES[kind] for kind in _arguments]
    lib.sqz_build_destroy.argtypes, lib.sqz_build_destroy.restype = [c.c_void_p], None
    lib.sqz_last_result.restype = c.c_char_p
except AttributeError as error:
    raise ImportError(f"this libsqz builds no index ({error}): unset SQZ_LIBRARY, or name a library with "
                      "sqz_build.h") from None

Tell = Callable[[float], object]  # how far a call is, from 0 to 1
_UPDATE = c.CFUNCTYPE(None, c.c_void_p, c.c_double)


class Progress(c.Structure):
    """A sqz_progress of sqz_build.h."""

    _fields_ = [("update", _UPDATE), ("user", c.c_void_p)]

    def __init__(self, tell: Tell | None) -> None:
        self._error: BaseException | None = None
        super().__init__(update=_UPDATE(lambda _, done: self._keep(tell, done) if tell is not None else None))

    def run(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls function(*arguments, self). An error of `tell` or a signal's handler, Ctrl-C among them, is raised when
        the function has ended: ctypes would print and drop it."""
        handler = signal.getsignal(signal.SIGINT)
        guarded = callable(handler) and threading.current_thread() is threading.main_thread()
        if guarded:
            signal.signal(signal.SIGINT, lambda *what: self._keep(handler, *what))
        try:
            status = function(*arguments, c.byref(self))
        finally:
            if guarded:
                signal.signal(signal.SIGINT, handler)
        if self._error is not None:
            raise self._error
        check(status)

    def _keep(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            self._error = error


def _json(options: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in options.items() if value is not None}).encode()


def _result() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(lib.sqz_last_result())
    return result


class Build(Handle):
    """An index that is made layer by layer. `plan`: the result of sqz_build_create().

    model: its description; tokens: [tokens] int32; options: those of sqz_build_create(), None = the default.
    state: for each layer None or {name: tensor}, of the types and shapes of those that add_state() will bring.
    """

    def __init__(self, path: str, model: dict[str, Any], tokens: np.ndarray[Any, Any],
                 state: Sequence[dict[str, Any] | None] | None = None, **options: Any) -> None:
        super().__init__(lib.sqz_build_destroy)
        if state is not None:
            options["state"] = [layer and {name: [dtype_name(one), list(one.shape)] for name, one in layer.items()}
                                for layer in state]
        ids = np.ascontiguousarray(tokens, np.int32)
        check(lib.sqz_build_create(os.fsencode(path), json.dumps(model).encode(), ids.ctypes.data, len(ids),
                                   _json(options), c.byref(self._pointer.at)))
        self.plan = _result()

    def add_layer(self, keys: DLPackTensor, values: DLPackTensor, queries: DLPackTensor | None,
                  tell: Tell | None = None) -> None:
        """The next layer that has keys; shapes in sqz_build.h."""
        places, _kept = borrow(keys=keys, values=values, queries=queries)
        with self._pointer.lock:
            Progress(tell).run(lib.sqz_build_add_layer, self._pointer.at, *places)

    def add_state(self, layer: int, tensors: dict[str, DLPackTensor]) -> None:
        """State of a layer as Build(state=...) declared it, at any time before finish()."""
        for name, tensor in tensors.items():
            places, _kept = borrow(**{name: tensor})
            with self._pointer.lock:
                self._check(lib.sqz_build_add_state(self._pointer.at, layer, name.encode(), *places))

    def finish(self) -> dict[str, Any]:
        """Publishes the index; the result of sqz_build_finish()."""
        with self._pointer.lock:
            self._check(lib.sqz_build_finish(self._pointer.at))
        return _result()


def info(index: Index) -> dict[str, Any]:
    """What `sqz-index info --json` prints."""
    with index._pointer.lock:
        index._check(lib.sqz_index_info_json(index._pointer.at))
    return _result()


def compress(index: Index, output: str, tell: Tell | None = None, **options: Any) -> dict[str, Any]:
    """{"path", "bytes", "bytes_before", "rows"}."""
    with index._pointer.lock:
        Progress(tell).run(lib.sqz_index_compress, index._pointer.at, os.fsencode(output), _json(options))
    return _result()


def recalibrate(index: Index, calls: Sequence[int], queries: Sequence[DLPackTensor | None], output: str,
                tell: Tell | None = None, **options: Any) -> dict[str, Any]:
    """{"path", "bytes", "queries", "source"}. queries: a tensor [sum of calls, query heads, head_dim] a layer."""
    places, _kept = borrow(**{f"queries[{layer}]": one for layer, one in enumerate(queries)})
    pointers = (c.c_void_p * len(places))(*places)
    counts = np.ascontiguousarray(calls, np.int64)
    with index._pointer.lock:
        Progress(tell).run(lib.sqz_index_calibrate, index._pointer.at, counts.ctypes.data, len(counts),
                           c.addressof(pointers), os.fsencode(output), _json(options))
    return _result()
