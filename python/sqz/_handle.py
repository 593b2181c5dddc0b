"""Handles of the library: used by one thread at a time, closed once."""

import ctypes as c
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from sqz._library import INVALID_ARGUMENT, Error, check

if TYPE_CHECKING:
    from typing_extensions import Self


class Pointer:
    """The address that the library gave out, and the lock of the threads that use it."""

    def __init__(self, destroy: Callable[[c.c_void_p], None]) -> None:
        self.at = c.c_void_p()
        self.lock = threading.RLock()
        self._destroy = destroy
        self._lease: Callable[[], Lease | None] = lambda: None
        _pointers.add(self)

    def lease(self) -> "Lease":
        """What the library gave out is destroyed when this is dropped, even if it is released before."""
        lease = self._lease() or Lease()
        self._lease = weakref.ref(lease)
        return lease

    def release(self) -> None:
        with self.lock:
            at, self.at.value = c.c_void_p(self.at.value), None
            if lease := self._lease():
                weakref.finalize(lease, self._destroy, at)
            else:
                self._destroy(at)


class Lease:
    """Held by memory that belongs to a handle."""


_pointers: "weakref.WeakSet[Pointer]" = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: the thread that held a lock may not be there."""
    for pointer in _pointers:
        pointer.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


class Handle:
    """Closed by close(), at the end of a `with`, with its last reference, or before the interpreter ends."""

    def __init__(self, destroy: Callable[[c.c_void_p], None]) -> None:
        self._pointer = Pointer(destroy)
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
