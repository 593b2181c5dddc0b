"""An open index: what it holds, checking it, and bringing it to a GPU."""

import ctypes as c
import os
from dataclasses import dataclass, fields
from typing import Any

from sqz import _library
from sqz._arguments import head_range
from sqz._handle import Handle
from sqz._library import check, lib
from sqz._tensors import CUDA, Device, borrowed_view, device_of

_PARTITIONS = ("kmeans", "pages", "pruned", "buckets")


@dataclass(frozen=True)
class IndexInfo:
    """What an index says of itself."""

    path: str
    format_version: int
    tokens: int  # N, length of the fixed context: the next token's position is N
    sink: int  # first and
    tail: int  # last tokens, always attended exactly
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    levels: int  # of the centroid tree; 0 = pages, or every layer is dense
    attention_scale: float  # logits are scale * q.k
    file_bytes: int
    partition: str  # "kmeans", "pages", "pruned" or "buckets"
    page_size: int  # tokens of a page; 0 = no pages
    dtype: str  # of keys, values and centroids: "bfloat16" or "float16"
    producer: str  # "sqz 0.2.0"
    architecture: str  # "LlamaForCausalLM"
    model_fingerprint: str  # hexadecimal; equal for equal models
    tokenizer_hash: str  # "" if the index was built from token ids
    tokens_hash: str  # XXH3-64 of the token ids as little-endian int32, hexadecimal
    composes: bool  # it can stand behind another context
    context_id: str  # hexadecimal; equal for equal keys: of tokens, and `after`
    after: tuple[str, ...]  # context_id of each context that stood in front when the keys were made: it serves behind these


_KINDS = ("full", "recent", "state", "shared", "none")


@dataclass(frozen=True)
class Layer:
    """A layer of the model as the index has it. The numbers are 0 for layers of state and for none."""

    kind: str  # "full", "recent" (sliding or chunked), "state" (see Index.state()), "shared" or "none"
    query_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values and outputs
    window: int  # a query sees so many tokens, its own included; 0 = no limit
    chunk: int  # a query sees the tokens of its chunk of so many positions; 0 = no chunks
    scale: float  # logits are scale * q.k
    of: int | None  # shared: the layer as which it is served


class Index(Handle):
    """An index file. Any number of threads may use it; sessions keep what they need of it when it is closed.

    path: the .sqz file. read: read it all into memory; else it is mapped, opening costs nothing that grows with it,
    and a file that is cut while it is open, or a disk that fails, ends the process (SIGBUS). verify: read it, and
    refuse it unless every checksum is right.
    """

    def __init__(self, path: str | os.PathLike[str], read: bool = False, verify: bool = False) -> None:
        super().__init__(lib.sqz_index_close)
        mode, name = 2 if verify else int(read), os.fsencode(path)  # sqz_open_mode
        if b"\0" in name:
            raise ValueError(f"path: found a zero byte in {path!r}, expected none")
        check(lib.sqz_index_open(name, mode, c.byref(self._pointer.at)))
        raw = _library.IndexInfo()
        check(lib.sqz_index_describe(self._pointer.at, c.byref(raw)))
        values: dict[str, Any] = {field.name: getattr(raw, field.name, None) for field in fields(IndexInfo)}
        values = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
        values |= {"path": os.fsdecode(path), "partition": _PARTITIONS[raw.partition],
                   "dtype": "bfloat16" if raw.dtype_code == 4 else "float16", "composes": bool(raw.composes),
                   "after": tuple(filter(None, raw.after.decode().split(",")))}
        self.info = IndexInfo(**values)
        raw_layers = [self._layer(number) for number in range(self.info.layers)]
        self._states = [raw.states for raw in raw_layers]
        self.layers = [Layer(_KINDS[raw.kind], raw.query_heads, raw.kv_heads, raw.head_dim, raw.value_dim, raw.window,
                             raw.chunk, raw.attention_scale, None if raw.of < 0 else raw.of) for raw in raw_layers]
        self._file = os.path.abspath(self.info.path)  # wherever the process goes
        self._uploaded: dict[int, int] = {}  # KV heads by GPU

    def __repr__(self) -> str:
        closed = "" if self._pointer.at else ", closed"
        return (f"<sqz.Index {self.info.path}: {self.info.tokens:,} tokens, {self.info.layers} layers, "
                f"{self.info.partition}{closed}>")

    def _layer(self, number: int) -> _library.LayerInfo:
        raw = _library.LayerInfo()
        check(lib.sqz_index_describe_layer(self._pointer.at, number, c.byref(raw)))
        return raw

    def state(self, layer: int) -> dict[str, Any]:
        """State tensors of a layer as the engine's own cache has them behind the context, by name: the file's bytes,
        not copied, and not to be written; they outlive the index. Tensors of torch if that is imported, else arrays
        of numpy (bfloat16 as uint16)."""
        name, view, out = c.c_char_p(), _library.Tensor(), dict[str, Any]()
        for number in range(self._states[layer]):
            with self._pointer.lock:
                self._check(lib.sqz_index_state(self._pointer.at, layer, number, c.byref(name), c.byref(view)))
            out[(name.value or b"").decode()] = borrowed_view(view, self._pointer.lease())
        return out

    def verify(self) -> None:
        """Checks every checksum and invariant; reads the whole file, on all cores. Error names the first problem."""
        with self._pointer.lock:
            self._check(lib.sqz_index_verify(self._pointer.at))

    def upload(self, device: Device = 0, kv_heads: tuple[int, int] | None = None,
               background: bool = False, threads: int = 0) -> None:
        """Puts the index in the memory of a GPU, where sessions on that device find it.

        kv_heads: (first, count), a rank's own; None = all. background: return as soon as the memory is there. threads
        that copy: 0 = 12, or as many as the machine has.
        """
        kind, number = device_of(device)
        if kind != CUDA:
            raise ValueError(f"device: found {device!r}, expected a GPU")
        first, count = head_range(kv_heads)
        options = _library.UploadOptions(device_id=number, background=background, threads=threads, first_kv_head=first, kv_heads=count)
        with self._pointer.lock:
            self._check(lib.sqz_index_upload(self._pointer.at, c.byref(options)))
        self._uploaded[number] = count or self.info.kv_heads

    def unload(self, device: Device = 0) -> None:
        """Frees the GPU's memory once the sessions that use it are closed."""
        with self._pointer.lock:
            self._check(lib.sqz_index_unload(self._pointer.at, device_of(device)[1]))
