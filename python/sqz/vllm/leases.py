"""Which indexes are in memory. Requests hold leases of them; what nobody holds goes when there is no room, the longest
unused first.

Whoever runs the engine drives `Leases.acquire()`, a generator: it yields what it needs done, Call or Work, and is sent
the result, or yields a Wait and is resumed a little later. So the same steps serve asyncio and plain code.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqz
from sqz._arguments import one_behind_the_other

from .library import File, Library, identity

MOST_RESIDENT = 256  # indexes
SLOTS = 65536


class Wait(enum.Enum):
    """What is waited for."""

    ROOM = "other requests to end"
    LOADING = "an index to be loaded"


@dataclass(frozen=True)
class Call:
    """A method of all workers."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Work:
    """A function that takes long, and may run in another thread."""

    function: Callable[[], Any]


@dataclass
class Resident:
    """An index that is in a slot, or on its way there."""

    slot: int
    bytes: int
    users: int = 0
    used: int = 0  # when last, counted in leases
    info: sqz.IndexInfo | None = None  # None: it is being loaded
    error: Exception | None = None


@dataclass
class Counters:
    requests: int = 0  # contexts that requests named
    fetches: int = 0  # those that were not in memory
    fetched_bytes: int = 0
    fetch_seconds: float = 0
    evictions: int = 0


@dataclass(frozen=True)
class Lease:
    files: tuple[File, ...]
    contexts: tuple[sqz.Context, ...]
    tokens: int  # of all of them: the position of the request's first token
    salt: str


@dataclass
class Leases:
    """memory: bytes of the indexes that are held at once; 0 = no limit. model: the fingerprint that all must have."""

    library: Library
    memory: int
    model: str
    resident: dict[File, Resident] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    _clock: int = 0
    _leaving: set[int] = field(default_factory=set)  # slots that somebody is about to empty
    _verified: set[File] = field(default_factory=set)

    def acquire(self, names: list[str] | None, counted: bool = True) -> Generator[Call | Work | Wait, Any, Lease]:
        """A lease of the contexts of a request, once all are in memory. Errors say what is wrong with the request."""
        alone = not self.library.folder and not names  # workers have this index, whatever has its name by now
        files = list(self.resident) if alone else self.library.files(names)
        wanted = dict.fromkeys(files)
        always = sum(one.bytes for file, one in self.resident.items()  # SQZ_INDEX, which never goes
                     if self.library.default and one.slot == 0 and file not in wanted)
        needed = sum(file.bytes for file in wanted) + always
        if self.memory and needed > self.memory:
            beside = ", with that of SQZ_INDEX" if always else ""
            raise ValueError(f"sqz_context: found indexes of {needed:,} bytes{beside}, expected at most the server's "
                             f"{self.memory:,} (SQZ_MEMORY)")
        while (drops := self._make_room(wanted)) is None:
            yield Wait.ROOM
        missing = []
        self.counters.requests += counted * len(wanted)
        for file in wanted:
            if file not in self.resident:
                taken = {one.slot for one in self.resident.values()} | self._leaving.difference(drops)
                slot = next(slot for slot in range(SLOTS) if slot not in taken)
                self.resident[file] = Resident(slot, file.bytes)
                missing.append(file)
            self.resident[file].users += 1
        try:
            for slot in drops:
                yield Call("sqz_drop", (slot,))
                self._leaving.discard(slot)
            for file in missing:
                yield from self._load(file)
            for file in wanted:
                while self.resident[file].info is None and self.resident[file].error is None:
                    yield Wait.LOADING
                if (error := self.resident[file].error) is not None:
                    raise error
            return self._lease(files)
        except BaseException:
            self._leaving.difference_update(drops)
            for one in (self.resident[file] for file in missing):
                if one.info is None and one.error is None:  # whoever drives gives up
                    one.error = RuntimeError("sqz_context: loading was given up; ask again")
            self._leave(wanted)
            raise

    def release(self, lease: Lease) -> None:
        self._leave(dict.fromkeys(lease.files))

    def _leave(self, files: dict[File, None]) -> None:
        self._clock += 1
        for file in files:
            one = self.resident[file]
            one.users -= 1
            one.used = self._clock
            if one.error is not None and one.users == 0:
                del self.resident[file]

    def _make_room(self, wanted: dict[File, None]) -> list[int] | None:
        """The slots that go, which are forgotten; None if there is no room until other requests end."""
        missing = [file for file in wanted if file not in self.resident]
        free = sorted((file for file, one in self.resident.items() if one.users == 0 and file not in wanted),
                      key=lambda file: self.resident[file].used)
        held = sum(one.bytes for one in self.resident.values()) + sum(file.bytes for file in missing)
        count, go = len(self.resident) + len(missing), []
        while (self.memory and held > self.memory) or count > MOST_RESIDENT:
            if not free:
                return None
            go.append(free.pop(0))
            held, count = held - go[-1].bytes, count - 1
        self.counters.evictions += len(go)
        slots = [self.resident.pop(file).slot for file in go]
        self._leaving.update(slots)
        return slots

    def _load(self, file: File) -> Generator[Call | Work | Wait, Any, None]:
        """Opens and verifies a file, and has all workers put it into its slot. Its error is that of all who wait."""
        one, begun = self.resident[file], time.monotonic()
        try:
            info, what = yield Work(lambda: self._open(file))
            yield Call("sqz_put", (one.slot, file.path, what))
            while not all((yield Call("sqz_ready", (one.slot,)))):
                yield Wait.LOADING
            one.info = info
            self.counters.fetches += 1
            self.counters.fetched_bytes += file.bytes
            self.counters.fetch_seconds += time.monotonic() - begun
        except Exception as error:
            one.error = ValueError(f"sqz_context: {error}")
            yield Call("sqz_drop", (one.slot,))

    def _open(self, file: File) -> tuple[sqz.IndexInfo, str]:
        with sqz.Index(file.path) as index:
            if index.info.model_fingerprint != self.model:
                raise ValueError(f"{os.path.basename(file.path)}: found an index of another model, expected one of the "
                                 "model that is served")
            if file not in self._verified:
                index.verify()
                self._verified.add(file)
            return index.info, identity(index)

    def _lease(self, files: Sequence[File]) -> Lease:
        documents: list[tuple[int, sqz.IndexInfo]] = []
        for file in files:
            slot, info = self.resident[file].slot, self.resident[file].info
            assert info is not None
            front = [before.context_id for _, before in documents]
            if front and not info.composes:
                raise ValueError(f"sqz_context: {os.path.basename(file.path)}: found it behind another context, expected "
                                 "it alone: the model has windows or states, or its rotary embedding is not described")
            if info.after and tuple(front[-len(info.after):]) != info.after:
                raise ValueError(f"sqz_context: {os.path.basename(file.path)}: found it without the {len(info.after)} "
                                 "contexts that stood in front when it was made, expected them there, one behind the "
                                 "other")
            documents.append((slot, info))
        contexts, tokens = one_behind_the_other(documents)
        salt = (f"{info.context_id}@{one.offset}" for (_, info), one in zip(documents, contexts, strict=True))
        return Lease(tuple(files), contexts, tokens, "sqz:" + "+".join(salt))
