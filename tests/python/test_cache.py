"""Keys and values in the engine's memory: a dense session attends to exactly these."""

import ctypes
import gc
import weakref

import numpy as np
import pytest

import sqz
from conftest import attention, queries
from sqz._library import Tensor


class Bfloat16:
    """numpy has no bfloat16: uint16 that says over DLPack that it is."""

    def __init__(self, numbers):
        self.raw = np.ascontiguousarray((numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))

    def turned(self, *axes):
        other = object.__new__(Bfloat16)
        other.raw = self.raw.transpose(axes)
        return other

    @property
    def numbers(self):
        return (self.raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def __dlpack__(self, stream=None):
        capsule = self.raw.__dlpack__()
        Tensor.from_address(ctypes.pythonapi.PyCapsule_GetPointer(capsule, b"dltensor")).dtype_code = 4
        return capsule

    def __dlpack_device__(self):
        return self.raw.__dlpack_device__()


def test_contiguous_and_turned(index):
    info = index.info
    session, q = sqz.Session(index, selector="dense"), queries(index.info, 2)
    keys, values = (Bfloat16(np.random.default_rng(seed).standard_normal((1, info.tokens, 8))) for seed in (1, 2))
    expected_out, expected_lse = attention(keys.numbers, values.numbers, q, info.attention_scale)
    by_token = [Bfloat16(one.numbers.transpose(1, 0, 2)).turned(1, 0, 2) for one in (keys, values)]
    for cache in (sqz.KVCache(keys, values), sqz.KVCache(*by_token)):
        out, lse = session.attend(0, q, cache=cache)
        np.testing.assert_allclose(out, expected_out, atol=1e-4)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


def test_pages(index):
    info = index.info
    session, q = sqz.Session(index, selector="dense"), queries(index.info, 2)
    keys, values = (Bfloat16(np.random.default_rng(seed).standard_normal((6, 1, 8, 8))) for seed in (1, 2))
    table = np.array([5, 0, 3, 1], np.int32)
    expected = attention(*(one.numbers[table].reshape(1, info.tokens, 8) for one in (keys, values)), q,
                         info.attention_scale)
    out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    session.prepare(q, out, lse, cache=sqz.KVCache(keys, values, table))(0)
    np.testing.assert_allclose(out, expected[0], atol=1e-4)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4)


def test_a_prepared_call_keeps_them(index):
    session, q = sqz.Session(index, selector="dense"), queries(index.info, 1)
    cache = sqz.KVCache(Bfloat16(np.zeros((1, 32, 8))), Bfloat16(np.zeros((1, 32, 8))))
    call = session.prepare(q, np.empty_like(q), np.empty(q.shape[:2], np.float32), cache=cache)
    kept = weakref.ref(cache)
    del cache
    gc.collect()
    assert kept() is not None
    del call
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("keys, values, table, sentence", [
    (np.zeros((1, 32, 8), np.float16), None, None, "cache.keys: found another dtype, expected bfloat16"),
    ((1, 31, 8), None, None, "cache.keys: found 31 tokens, expected the index's 32"),
    ((2, 32, 8), None, None, "cache.keys: found 2 heads of dimension 8, expected 1 of 8"),
    ((1, 32, 16), None, None, "cache.keys: found 1 heads of dimension 16, expected 1 of 8"),
    ((32, 8), None, None, "cache.keys: found shape .* expected 3 dimensions"),
    ((1, 32, 8), (1, 40, 8), None, "cache.values: found shape .* expected those of keys"),
    ((4, 1, 8, 8), None, np.zeros(3, np.int32), "cache.block_table: found shape .* at least 4 contiguous int32"),
    ((4, 1, 8, 8), None, np.zeros(4, np.int64), "cache.block_table: found shape .* of 64 bits"),
    ((4, 1, 8, 8), None, np.zeros(8, np.int32)[::2], "cache.block_table: found shape .* contiguous int32"),
])
def test_what_is_no_cache_of_this_index(index, keys, values, table, sentence):
    keys = Bfloat16(np.zeros(keys)) if isinstance(keys, tuple) else keys
    values = keys if values is None else Bfloat16(np.zeros(values))
    session = sqz.Session(index, selector="dense")
    with pytest.raises(ValueError, match=sentence):
        session.attend(0, queries(index.info, 1), cache=sqz.KVCache(keys, values, table))
