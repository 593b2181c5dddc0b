"""Which rows of a forward pass ask the index: padding is left out, and long prompts are cut."""

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows [first, last) of one call to sqz, and where its requests begin, counted from `first`."""

    first: int
    last: int
    indptr: list[int]


@dataclasses.dataclass(frozen=True)
class Rows:
    index: torch.Tensor | None  # of the rows that are tokens; None: all
    pieces: list[Piece]
    positions: list[int] | None  # of those rows, if they are needed


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
    first, indptr = 0, [0]
    for length in lengths:
        while length > 0:
            taken = min(length, most_of_request)
            if indptr[-1] + taken > most:
                pieces.append(Piece(first, first + indptr[-1], indptr))
                first, indptr = first + indptr[-1], [0]
            indptr.append(indptr[-1] + taken)
            length -= taken
    return pieces + [Piece(first, first + indptr[-1], indptr)] if len(indptr) > 1 else pieces
