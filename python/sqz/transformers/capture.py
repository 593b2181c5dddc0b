"""capture(): what `sqz-index build --capture` reads, written by a model of transformers."""

import io
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .fingerprint import describe, fingerprint_of, tokenizer_hash
from .layers import look
from .record import context_tokens, record


@dataclass(frozen=True)
class Captured:
    """What a capture holds. `sqz-index build --capture PATH` makes an index with the same model_fingerprint."""

    path: str
    tokens: int
    layers: int
    file_bytes: int
    model_fingerprint: str


def capture(model: PreTrainedModel, input_ids: Any, path: str | os.PathLike[str], *, tokenizer: Any = None,
            queries: int | None = None, overwrite: bool = False) -> Captured:
    """Runs the model once over a fixed context and writes what sqz-index builds an index of (docs/capture.md).

    On a terminal a bar shows how many layers are done.

    input_ids: [tokens] or [1, tokens], integers: the context with its special tokens, such as BOS, without padding; or
    what a tokenizer returns.
    path: the HDF5 file to write, in the model's dtype; it appears when it is whole.
    tokenizer: what made the ids; its hash goes into the file, and FixedContext compares it.
    queries: how many of the last tokens' queries are stored (100, or all of a shorter context); sqz-index build wants
    as many as its --tail.

    FileExistsError: the file is there, and `overwrite` is not set. OSError: it cannot be written. TypeError,
    ValueError: the model cannot be served from an index, or the ids are no context of it; the sentence says why. Then
    no file is written.
    """
    import h5py

    path = os.fsdecode(path)
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"{path} exists: pass overwrite=True to replace it")
    layers = look(model)
    description = describe(model, layers)
    tokens = context_tokens(getattr(input_ids, "input_ids", input_ids), description, model.config)
    count = len(tokens)
    queries = min(100, count) if queries is None else queries
    if not 1 <= queries <= count:
        raise ValueError(f"queries: found {queries}, expected 1 to {count}, the tokens of the context")

    def take(layer: int, keys: torch.Tensor, values: torch.Tensor, last: torch.Tensor | None) -> None:
        group = file.require_group(f"layers/{layer}")
        _write(group, "keys", keys).attrs["rope"] = "post"
        _write(group, "values", values)
        if last is not None:
            _write(group, "queries", last)
        bar.update()

    with (_published(path, overwrite) as output, h5py.File(output, "w") as file,
          tqdm(total=layers.calls, desc="capture", unit="layer", disable=None) as bar):
        file.attrs.update(format="sqz-capture", version="1", model=json.dumps(description),
                          tokenizer_hash="" if tokenizer is None else tokenizer_hash(tokenizer))
        file["tokens"] = tokens
        file["query_positions"] = np.arange(count - queries, count)
        for layer, state in enumerate(record(model, layers, tokens, queries, take)):
            for name, tensor in state.items():
                _write(file.require_group(f"layers/{layer}/state"), name, tensor)
    return Captured(path, count, description["layers"], os.path.getsize(path), fingerprint_of(description))


class _Output(io.FileIO):
    """Remembers its first error: HDF5 does not report each one of a file that it closes."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[super().write(rest):]
        except OSError as error:
            self.error = self.error or error
            raise
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            raise


@contextmanager
def _published(path: str, overwrite: bool) -> Iterator[_Output]:
    """A new file that gets the name `path`, synced, at the end of the block; without overwrite only if it is free."""
    for number in itertools.count():  # the names that sqz's tools give to their temporary files
        temporary = f"{path}.tmp.{os.getpid()}.{number}"
        try:
            output = _Output(temporary, "x+")
            break
        except FileExistsError:
            continue
    try:
        with output:
            try:
                yield output
            finally:
                if output.error is not None:
                    raise output.error
            os.fsync(output.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # which replaces nothing
            os.remove(temporary)
    except BaseException:
        os.remove(temporary)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(group: Any, name: str, tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        dataset = group.create_dataset(name, data=tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16))
        dataset.attrs["dtype"] = "bfloat16"
        return dataset
    return group.create_dataset(name, data=tensor.cpu().numpy())
