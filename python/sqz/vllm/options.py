"""What the environment says about the indexes and how to read them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqz
from sqz._arguments import MOST_CONTEXTS

from .library import File, Library

# Arguments of sqz.Session that SQZ_<NAME> sets. The device, its share of the heads, and the most tokens are vLLM's.
SESSION_ARGUMENTS = ("selector", "budget", "keep", "thresholds", "rule", "levels", "block",
                     "dense_layers", "layer_scales", "uniform_layers", "threads")


@dataclass(frozen=True)
class Options:
    """Paths of the indexes and the arguments of their session."""

    index: str = ""  # of requests that name no context; "" = none
    contexts: str = ""  # the library's folder; "" = none
    memory: int = 0  # bytes of indexes that are held at once; 0 = what there is
    write: bool = False  # clients may add and drop files of the folder
    graph_contexts: int = 1  # most contexts of a request in full CUDA graphs; 0 = none are captured
    graph_tokens: int = 131072  # most of a context then
    session: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def library(self) -> Library:
        return Library(self.index, self.contexts)

    @functools.cached_property
    def first(self) -> tuple[File, sqz.Index]:
        """The index that the session begins with. It stays open, so that a file that takes its name meanwhile is not
        served."""
        file = self.library.first()
        return file, sqz.Index(file.path)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Options | None:
        """SQZ_INDEX, SQZ_CONTEXTS, SQZ_CONTEXTS_WRITE, SQZ_MEMORY ("40e9"), SQZ_GRAPH_CONTEXTS, SQZ_GRAPH_TOKENS, and the
        session's arguments: numbers, true, false and arrays as in JSON, else a word. None without an index and a folder."""
        index, contexts = environment.get("SQZ_INDEX", ""), environment.get("SQZ_CONTEXTS", "")
        if not index and not contexts:
            return None
        held = _number(environment, "SQZ_MEMORY", "0", "a number of bytes, such as 40e9")
        count = _number(environment, "SQZ_GRAPH_CONTEXTS", "1", "0 to 8")
        tokens = _number(environment, "SQZ_GRAPH_TOKENS", "131072", "a number of tokens")
        if not 0 <= count <= MOST_CONTEXTS:
            raise ValueError(f"SQZ_GRAPH_CONTEXTS: found {count}, expected 0 to {MOST_CONTEXTS}")
        for name, number in (("SQZ_MEMORY", held), ("SQZ_GRAPH_TOKENS", tokens)):
            if number < 0:
                raise ValueError(f"{name}: found {number}, expected at least 0")
        write = environment.get("SQZ_CONTEXTS_WRITE", "")
        if write not in ("", "0", "1"):
            raise ValueError(f"SQZ_CONTEXTS_WRITE: found {write!r}, expected 0 or 1")
        return cls(index, contexts, held, write == "1", count, tokens,
                   {name: _value(environment[variable]) for name in SESSION_ARGUMENTS
                    if (variable := f"SQZ_{name.upper()}") in environment})


def _number(environment: Mapping[str, str], name: str, default: str, expected: str) -> int:
    found = environment.get(name, default)
    try:
        return int(float(found))
    except (ValueError, OverflowError):
        raise ValueError(f"{name}: found {found!r}, expected {expected}") from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
