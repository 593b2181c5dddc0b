"""Asking the index: which rows of a forward pass do, in which calls, and merging its answers. Padding does not ask."""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import sqz


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a forward pass that ask the index, and in which calls."""

    index: torch.Tensor | None  # of the rows that are tokens; None: all
    calls: list[tuple[slice | None, dict[str, Any]]]  # rows of those, None: all; the other arguments of attend()
    results: dict[Any, Any] = dataclasses.field(default_factory=dict)  # of layers, which the next ones overwrite


def real_tokens(mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """[batch, tokens] bool, or None if all are. mask: [batch, seen] (0 = padding) or [batch, 1, tokens, keys]."""
    if mask is None or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 2:
        real = mask[:, -tokens:].bool()
    else:  # padding on the left attends to nothing
        real = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(-1)
    return None if bool(real.all()) else real


def cut(lengths: Sequence[int], most: int, block: int) -> list[tuple[slice, list[int], tuple[int, ...]]]:
    """Calls of at most `most` rows for requests of these lengths, which are cut where blocks end, if there are any: their
    rows, where the requests begin, counted from the first row, and whose they are: places in the batch."""
    most_of_request = most // block * block if 0 < block <= most else most
    calls = []
    first, indptr, owners = 0, [0], list[int]()
    for owner, length in enumerate(lengths):
        while length > 0:
            taken = min(length, most_of_request)
            if indptr[-1] + taken > most:
                calls.append((slice(first, first + indptr[-1]), indptr, tuple(owners)))
                first, indptr, owners = first + indptr[-1], [0], []
            indptr.append(indptr[-1] + taken)
            owners.append(owner)
            length -= taken
    return calls + [(slice(first, first + indptr[-1]), indptr, tuple(owners))] if owners else calls


_servings: "weakref.WeakValueDictionary[int, Serving]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Serving:
    """A session, and what a forward pass asks of it.

    options: those of the session. needs_positions: layers with a sliding window, or buckets. `contexts`: of each row of
    the batch; None: all have the first index.
    """

    def __init__(self, session: sqz.Session, options: dict[str, Any], needs_positions: bool) -> None:
        self._session, self._needs_positions = session, needs_positions
        self._block = options.get("block") or 0
        self._most = options.get("max_tokens") or 4096  # rows of a call, as the session's default
        self._most_of_request = min(self._most, options.get("max_request_tokens") or self._most)
        self.rows = Rows(None, [])
        self.contexts: list[tuple[sqz.Context, ...]] | None = None
        self._made: dict[tuple[int, ...], sqz.Contexts] = {}
        self.number = next(_numbers)
        _servings[self.number] = self

    def begin(self, batch: int, tokens: int, mask: torch.Tensor | None, positions: torch.Tensor,
              contexts: list[tuple[sqz.Context, ...]] | None) -> None:
        """Before the layers of a forward pass. mask: as real_tokens() takes it; positions: [batch or 1, tokens]."""
        if contexts != self.contexts:
            self.contexts, self._made = contexts, {}
        if tokens > 1 or not torch.compiler.is_compiling():
            self.rows = self.find_rows(batch, tokens, mask, positions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def find_rows(self, batch: int, tokens: int, mask: torch.Tensor | None, positions: torch.Tensor) -> Rows:
        real = real_tokens(mask, tokens) if tokens > 1 else None
        index = None if real is None else real.flatten().nonzero().flatten()
        calls = cut([tokens] * batch if real is None else real.sum(1).tolist(),
                    self._most_of_request if tokens > 1 else self._most, self._block)
        needed: Any = None
        if self._needs_positions:
            needed = positions.expand(batch, tokens).flatten()
            needed = needed if index is None else needed[index]
            if not needed.is_cuda or self._session.index.info.partition == "buckets":
                needed = needed.cpu().numpy()
        return Rows(index, [(rows if len(calls) > 1 else None, {
            "indptr": np.array(indptr) if len(owners) > 1 else None, "contexts": self._contexts_of(owners),
            "positions": None if needed is None else needed[rows]}) for rows, indptr, owners in calls])

    def _contexts_of(self, owners: tuple[int, ...]) -> sqz.Contexts | None:
        """Made once for the same rows."""
        if self.contexts is None:
            return None
        if owners not in self._made:
            self._made[owners] = sqz.Contexts([self.contexts[owner] for owner in owners])
        return self._made[owners]

    def add(self, rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, plan: Rows) -> None:
        """Merges the state over the context into own and own_lse.

        rows: [batch * tokens, query heads, head_dim]; own: [batch * tokens, query heads, value_dim]; own_lse: [batch *
        tokens, query heads].
        """
        state = (rows.contiguous(), own, own_lse) if plan.index is None else (
            rows[plan.index], own[plan.index], own_lse[plan.index])
        for some, others in plan.calls:
            q, part, part_lse = state if some is None else (tensor[some] for tensor in state)
            kind = part.shape, part.dtype
            plan.results[kind] = result = self._session.attend(layer, q, *plan.results.get(kind, ()), **others)
            sqz.merge_states(part, part_lse, *result)
        if plan.index is not None:  # padding attends to nothing: no NaN of it may go on
            own.zero_().index_copy_(0, plan.index, state[1])
            own_lse.index_copy_(0, plan.index, state[2])


@torch.library.custom_op("sqz::add_context", mutates_args=("own", "own_lse"))  # type: ignore[untyped-decorator]
def add_context(rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, tokens: int,
                positions: torch.Tensor, serving: int) -> None:
    """Serving.add() for torch.compile. Nothing that a graph allocates is kept."""
    one = _servings[serving]
    plan = one.find_rows(len(rows), 1, None, positions) if tokens == 1 else dataclasses.replace(one.rows, results={})
    one.add(rows, own, own_lse, layer, plan)
