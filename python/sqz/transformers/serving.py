"""Asking the index: which rows of a forward pass do, in which calls, and merging its answers. Padding does not ask."""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

import sqz


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows [first, last) of one call to sqz, where its requests begin, counted from `first`, and whose they are: places
    in the batch."""

    first: int
    last: int
    indptr: list[int]
    owners: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    index: torch.Tensor | None  # of the rows that are tokens; None: all
    pieces: list[Piece]
    positions: list[int] | torch.Tensor | None  # of those rows, if they are needed


def real_tokens(mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """[batch, tokens] bool, or None if all are. mask: [batch, seen] (0 = padding) or [batch, 1, tokens, keys]."""
    if mask is None or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 2:
        real = mask[:, -tokens:].bool()
    else:  # padding on the left attends to nothing
        real = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(-1)
    return None if bool(real.all()) else real


def cut(lengths: Sequence[int], most: int, block: int) -> list[Piece]:
    """Calls of at most `most` rows for requests of these lengths, which are cut where blocks end, if there are any."""
    most_of_request = most // block * block if 0 < block <= most else most
    pieces: list[Piece] = []
    first, indptr, owners = 0, [0], list[int]()
    for owner, length in enumerate(lengths):
        while length > 0:
            taken = min(length, most_of_request)
            if indptr[-1] + taken > most:
                pieces.append(Piece(first, first + indptr[-1], indptr, tuple(owners)))
                first, indptr, owners = first + indptr[-1], [0], []
            indptr.append(indptr[-1] + taken)
            owners.append(owner)
            length -= taken
    return pieces + [Piece(first, first + indptr[-1], indptr, tuple(owners))] if owners else pieces


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
        self._rows = Rows(None, [], None)
        self.contexts: list[tuple[sqz.Context, ...]] | None = None
        self._made: dict[tuple[int, ...], sqz.Contexts] = {}
        self.number = next(_numbers)
        _servings[self.number] = self

    def begin(self, batch: int, tokens: int, mask: torch.Tensor | None, positions: torch.Tensor,
              contexts: list[tuple[sqz.Context, ...]] | None) -> None:
        """Before the layers of a forward pass. mask: as real_tokens() takes it; positions: [batch or 1, tokens]."""
        if contexts != self.contexts:
            self.contexts, self._made = contexts, {}
        if tokens > 1:
            self._find_rows(batch, tokens, mask, positions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _find_rows(self, batch: int, tokens: int, mask: torch.Tensor | None, positions: torch.Tensor) -> None:
        real = real_tokens(mask, tokens)
        index = None if real is None else real.flatten().nonzero().flatten()
        lengths = [tokens] * batch if real is None else real.sum(1).tolist()
        flat = positions.expand(batch, tokens).flatten()
        self._rows = Rows(index, cut(lengths, self._most_of_request, self._block),
                          self._needed(flat if index is None else flat[index]))

    def _needed(self, positions: torch.Tensor) -> list[int] | torch.Tensor | None:
        if not self._needs_positions:
            return None
        stays = positions.is_cuda and self._session.index.info.partition != "buckets"
        return positions.contiguous() if stays else positions.tolist()

    def _contexts_of(self, owners: tuple[int, ...]) -> sqz.Contexts | None:
        """Made once for the layers of a pass."""
        if self.contexts is None:
            return None
        if owners not in self._made:
            self._made[owners] = sqz.Contexts([self.contexts[owner] for owner in owners])
        return self._made[owners]

    def add(self, rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, tokens: int,
            positions: torch.Tensor) -> None:
        """Merges the state over the context into own and own_lse.

        rows: [batch * tokens, query heads, head_dim]; own: [batch * tokens, query heads, value_dim]; own_lse: [batch *
        tokens, query heads]; positions: [batch or 1, tokens].
        """
        plan = self._rows
        if tokens == 1:
            plan = Rows(None, cut([1] * len(rows), self._most, 0), self._needed(positions.expand(len(rows), 1)[:, 0]))
        if plan.index is None:
            self._add_pieces(plan, rows.contiguous(), own, own_lse, layer)
            return
        part, part_lse = own[plan.index], own_lse[plan.index]
        self._add_pieces(plan, rows[plan.index], part, part_lse, layer)
        own.zero_().index_copy_(0, plan.index, part)  # padding attends to nothing: no NaN of it may go on
        own_lse.index_copy_(0, plan.index, part_lse)

    def _add_pieces(self, plan: Rows, rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int) -> None:
        for piece in plan.pieces:
            some = slice(piece.first, piece.last)
            positions = None if plan.positions is None else plan.positions[some]
            out, lse = self._session.attend(layer, rows[some], torch.empty_like(own[some]), indptr=piece.indptr,
                                            positions=positions, contexts=self._contexts_of(piece.owners))
            sqz.merge_states(own[some], own_lse[some], out, lse)


@torch.library.custom_op("sqz::add_context", mutates_args=("own", "own_lse"))  # type: ignore[untyped-decorator]
def add_context(rows: torch.Tensor, own: torch.Tensor, own_lse: torch.Tensor, layer: int, tokens: int,
                positions: torch.Tensor, serving: int) -> None:
    """Serving.add() for torch.compile."""
    _servings[serving].add(rows, own, own_lse, layer, tokens, positions)
