"""Positions: what vLLM counts as position 0 is position N of the model, since N tokens stand in front."""

from __future__ import annotations

import functools
from typing import Any

import torch

shifted: list[int] = []  # the rotary embeddings that begin at N: one entry each, its number of positions


def begin_at(tokens: int) -> None:
    """From now on the table of each rotary embedding that vLLM makes begins with the row of position `tokens`.

    The first rows move to the end, so that the table keeps its shape: what torch.compile made for it stays right. No
    request gets there, as tokens + max_model_len is within the model's positions.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    make = RotaryEmbeddingBase.__init__

    @functools.wraps(make)
    def make_shifted(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        table = getattr(self, "cos_sin_cache", None)  # [positions, rotated dimensions]
        if table is None or table.shape[0] <= tokens:
            raise ValueError(f"{type(self).__name__}: sqz can only shift a rotary embedding with one table of more "
                             f"than {tokens} positions, which is the length of the index's context")
        self.cos_sin_cache = torch.roll(table, -tokens, 0)
        shifted.append(table.shape[0])

    RotaryEmbeddingBase.__init__ = make_shifted
