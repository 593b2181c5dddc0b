"""What the environment says about the index and how to read it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqz

# Arguments of sqz.Session that SQZ_<NAME> sets. The device, its share of the heads, and the most tokens are vLLM's.
SESSION_ARGUMENTS = ("selector", "budget", "keep", "thresholds", "rule", "levels", "block",
                     "dense_layers", "layer_scales", "uniform_layers", "threads")


@dataclass(frozen=True)
class Options:
    """The index's path and the arguments of its sessions."""

    index: str
    session: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Options | None:
        """SQZ_INDEX and the session's arguments: numbers, true, false and arrays as in JSON, else a word. None without
        SQZ_INDEX."""
        index = environment.get("SQZ_INDEX", "")
        if not index:
            return None
        return cls(index, {name: _value(environment[variable]) for name in SESSION_ARGUMENTS
                           if (variable := f"SQZ_{name.upper()}") in environment})

    @functools.cached_property
    def opened(self) -> sqz.Index:
        """The index. It stays open, so that a file that takes its name meanwhile is not served."""
        return sqz.Index(self.index)


def identity(index: sqz.Index) -> str:
    """What must be equal in all processes of an engine."""
    return f"{index.info.tokens} tokens with the hash {index.info.tokens_hash}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
