"""Keys and values of the fixed context in an engine's own memory."""

from sqz import _library
from sqz._tensors import Borrowed, DLPackTensor
from sqz.index import IndexInfo

_CODES = {"float16": 2, "bfloat16": 4}


class KVCache:
    """The engine's keys and values, on the session's device, of the index's dtype, in token order.

    keys, values: views [KV heads, tokens, head_dim], or with block_table [pages, KV heads, tokens of a page, head_dim],
    laid out alike. Any strides will do if the elements of a row are side by side and rows are 16-byte aligned: permute
    the view. block_table: int32 [ceil(N / tokens of a page)], the page of each, on the same device; tokens of a page
    are a power of two. The memory is read at each call.
    """

    def __init__(self, keys: DLPackTensor, values: DLPackTensor, block_table: DLPackTensor | None = None) -> None:
        self._keys, self._values = Borrowed("cache.keys", keys), Borrowed("cache.values", values)
        self._table = None if block_table is None else Borrowed("cache.block_table", block_table)

    def describe(self, info: IndexInfo, kv_heads: int, device: tuple[int, int]) -> _library.KVCache:
        """The library's struct, which holds this; checked against the index, and a session's KV heads and device."""
        keys, values, table = self._keys, self._values, self._table
        for name, one in (("cache.keys", keys), ("cache.values", values)):
            if one.device != device:
                raise ValueError(f"{name}: found on device {one.device[1]} of type {one.device[0]}, "
                                 f"expected {device[1]} of {device[0]} (DLPack's numbers), the session's")
            if (one.view.dtype_code, one.view.dtype_bits) != (_CODES[info.dtype], 16):
                raise ValueError(f"{name}: found another dtype, expected {info.dtype}, as in the index")
            if len(one.shape) != (3 if table is None else 4) or one.strides[-1] != 1:
                raise ValueError(f"{name}: found shape {list(one.shape)} and strides {list(one.strides)}, expected "
                                 f"{'3 dimensions' if table is None else '4 dimensions with a block table'}, the last "
                                 "one contiguous")
            if one.shape[-1] != info.head_dim or one.shape[-3] != kv_heads:
                raise ValueError(f"{name}: found {one.shape[-3]} heads of dimension {one.shape[-1]}, expected "
                                 f"{kv_heads} of {info.head_dim}")
        if values.shape != keys.shape or values.strides != keys.strides:
            raise ValueError(f"cache.values: found shape {list(values.shape)} and strides {list(values.strides)}, "
                             f"expected those of keys, {list(keys.shape)} and {list(keys.strides)}")
        found = _library.KVCache(keys=_first(keys), values=_first(values), token_stride=keys.strides[-2],
                                 head_stride=keys.strides[-3])
        found.owner = self  # the addresses in it own nothing
        if table is None:
            if keys.shape[1] < info.tokens:
                raise ValueError(f"cache.keys: found {keys.shape[1]} tokens, expected the index's {info.tokens}")
            return found
        found.page_size, found.page_stride, found.pages = keys.shape[2], keys.strides[0], keys.shape[0]
        wanted = -(-info.tokens // max(1, keys.shape[2]))
        if (table.view.dtype_code, table.view.dtype_bits, table.strides) != (0, 32, (1,)) or table.shape[0] < wanted:
            raise ValueError(f"cache.block_table: found shape {list(table.shape)} of {table.view.dtype_bits} bits, "
                             f"expected at least {wanted} contiguous int32")
        if table.device != device:
            raise ValueError("cache.block_table: found on another device, expected on that of keys and values")
        found.block_table = _first(table)
        return found


def _first(tensor: Borrowed) -> int:
    """Address of the first element."""
    return (tensor.view.data or 0) + int(tensor.view.byte_offset)
