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
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .adapter import attention_function, check_call, decoder_of
from .fingerprint import describe, fingerprint_of, tokenizer_hash


@dataclass(frozen=True)
class Captured:
    """What a capture holds. `sqz-index build --capture PATH` makes an index with the same model_fingerprint."""

    path: str
    tokens: int
    layers: int
    file_bytes: int
    model_fingerprint: str


def capture(model: PreTrainedModel, input_ids: Any, path: str | os.PathLike[str], *, tokenizer: Any = None,
            queries: int = 100, overwrite: bool = False) -> Captured:
    """Runs the model once over a fixed context and writes what sqz-index builds an index of (docs/capture.md).

    On a terminal a bar shows how many layers are done.

    input_ids: [tokens] or [1, tokens], integers: the context with its special tokens, such as BOS, without padding; or
    what a tokenizer returns.
    path: the HDF5 file to write, in the model's dtype; it appears when it is whole.
    tokenizer: what made the ids; its hash goes into the file, and FixedContext compares it.
    queries: how many of the last tokens' queries are stored; sqz-index build wants as many as its --tail.

    FileExistsError: the file is there, and `overwrite` is not set. OSError: it cannot be written. TypeError,
    ValueError: the model cannot be served from an index, or the ids are no context of it; the sentence says why. Then
    no file is written.
    """
    import h5py

    path = os.fsdecode(path)
    if not overwrite and os.path.exists(path):
        raise FileExistsError(f"{path} exists: pass overwrite=True to replace it")
    decoder = decoder_of(model)
    description = describe(model)
    tokens = _tokens(getattr(input_ids, "input_ids", input_ids), description)
    count, layers = len(tokens), description["layers"]
    if not 1 <= queries <= count:
        raise ValueError(f"queries: found {queries}, expected 1 to {count}, the tokens of the context")
    seen: set[int] = set()

    def keep(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             attention_mask: torch.Tensor | None, scaling: float | None = None, **options: Any) -> Any:
        layer = check_call(module, query, key, value, scaling, options, description)
        seen.add(layer)
        group = file.create_group(f"layers/{layer}")
        _write(group, "keys", key[0]).attrs["rope"] = "post"
        _write(group, "values", value[0])
        _write(group, "queries", query[0, :, count - queries:])
        bar.update()
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)

    with _published(path, overwrite) as output:
        with (h5py.File(output, "w") as file, torch.inference_mode(), attention_function(decoder, keep),
              tqdm(total=layers, desc="capture", unit="layer", disable=None) as bar):
            file.attrs.update(format="sqz-capture", version="1", model=json.dumps(description),
                              tokenizer_hash="" if tokenizer is None else tokenizer_hash(tokenizer))
            file["tokens"] = tokens
            file["query_positions"] = np.arange(count - queries, count)
            decoder(input_ids=torch.from_numpy(tokens)[None].long().to(model.device), use_cache=False)
        if len(seen) != layers:
            raise ValueError(f"{type(model).__name__}: {len(seen)} of {layers} layers called the attention function: "
                             "the others compute something that an index does not hold")
    return Captured(path, count, layers, os.path.getsize(path), fingerprint_of(description))


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


def _tokens(input_ids: Any, model: dict[str, Any]) -> np.ndarray:
    """[tokens] int32 of a tensor, an array or a list; ValueError if they are no context of the model."""
    ids = input_ids.cpu().numpy() if isinstance(input_ids, torch.Tensor) else np.asarray(input_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids: found shape {list(ids.shape)} of {ids.dtype}, expected [tokens] or [1, tokens] "
                         "of integers")
    if ids.min() < 0 or ids.max() >= model["vocab_size"]:
        raise ValueError(f"input_ids: found {ids.min()} to {ids.max()}, expected 0 to {model['vocab_size'] - 1}")
    if 0 < model["max_positions"] < ids.size:
        raise ValueError(f"input_ids: found {ids.size} tokens, expected at most {model['max_positions']}, the model's "
                         "positions")
    return ids.astype(np.int32)


def _write(group: Any, name: str, tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        dataset = group.create_dataset(name, data=tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16))
        dataset.attrs["dtype"] = "bfloat16"
        return dataset
    if tensor.dtype not in (torch.float32, torch.float16):
        raise ValueError(f"{name}: found {tensor.dtype}, expected float32, float16 or bfloat16")
    return group.create_dataset(name, data=tensor.cpu().numpy())
