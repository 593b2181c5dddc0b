"""Handles of the library: used by one thread at a time, closed once."""

import ctypes as c
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Optional

from sqz._library import INVALID_ARGUMENT, Error, check

if TYPE_CHECKING:
    from typing_extensions import Self


class Pointer:
    """What the library gave out, and the lock of the threads that use it: its own, or that of what it works on."""

    def __init__(self, destroy: Callable[[c.c_void_p], None], owner: Optional["Pointer"] = None) -> None:
        self.at = c.c_void_p()
        self._destroy = destroy
        self._owner = owner
        self._lock = threading.RLock()
        _pointers.add(self)

    @property
    def lock(self) -> threading.RLock:
        return self._owner.lock if self._owner else self._lock

    def renew_lock(self) -> None:
        self._lock = threading.RLock()

    def release(self) -> None:
        with self.lock:
            at, self.at.value = c.c_void_p(self.at.value), None
            self._destroy(at)


_pointers: "weakref.WeakSet[Pointer]" = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: the thread that held a lock may not be there."""
    for pointer in _pointers:
        pointer.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


class Handle:
    """Closed by close(), at the end of a `with`, with its last reference, or before the interpreter ends."""

    def __init__(self, destroy: Callable[[c.c_void_p], None], owner: Pointer | None = None) -> None:
        self._pointer = Pointer(destroy, owner)
        self._release = weakref.finalize(self, self._pointer.release)

    def close(self) -> None:
        """Frees it; what is called later raises Error. Waits for a call in another thread. Twice does nothing."""
        self._release()

    def _check(self, status: int) -> None:
        """Raises Error unless the status is SQZ_OK."""
        if status != 0 and not self._pointer.at:
            name = type(self).__name__.lower()
            raise Error(INVALID_ARGUMENT, f"{name}: found a closed {name}, expected an open one")
        check(status)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
