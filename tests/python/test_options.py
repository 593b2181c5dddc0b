"""What Session and attend() say of a user's mistakes."""

import numpy as np
import pytest

import sqz
from conftest import queries


@pytest.mark.parametrize("options, error, sentence", [
    ({"bugdet": 1}, TypeError, "bugdet"),
    ({"budget": "much"}, TypeError, "budget: found 'much', expected a number"),
    ({"block": 0.5}, TypeError, "block: found 0.5, expected a number"),
    ({"levels": 1 << 32}, ValueError, "levels: found 4294967296, which is out of range"),
    ({"selector": "best"}, ValueError, "selector: found 'best', expected auto, squeezed, dense, quest"),
    ({"rule": "any"}, ValueError, "rule: found 'any', expected budget, threshold"),
    ({"thresholds": 0.5}, TypeError, "thresholds: found 0.5, expected a sequence of numbers"),
    ({"thresholds": [0.5] * 5}, ValueError, "thresholds: found 5, expected [12], one for each level in use"),
    ({"thresholds": []}, ValueError, "thresholds: found 0, expected"),
    ({"thresholds": [0.5], "rule": "budget"}, ValueError, "rule: found 'budget' with thresholds, expected"),
    ({"layer_scales": ["a"]}, TypeError, "layer_scales: found"),
    ({"device": "tpu"}, ValueError, "device: found 'tpu', expected"),
    ({"device": True}, ValueError, "device: found True, expected"),
    ({"kv_heads": 1}, TypeError, r"kv_heads: found 1, expected \(first, count\)"),
    ({"kv_heads": (0, 9)}, sqz.Error, "kv_heads"),
    ({"device": 0}, sqz.Error, "device|CUDA"),  # not uploaded, or no CUDA
    ({}, sqz.Error, "budget"),
    ({"budget": 0.5, "keep": 0.5}, sqz.Error, "budget"),
    ({"budget": 2}, sqz.Error, "budget"),
    ({"selector": "quest", "budget": 0.5}, sqz.Error, "pages"),
])
def test_options(index, options, error, sentence):
    with pytest.raises(error, match=sentence):
        sqz.Session(index, **options)


def test_what_is_no_index_or_session(index):
    with pytest.raises(TypeError, match="index: found str, expected an Index"):
        sqz.Session("manual.sqz", selector="dense")
    with pytest.raises(TypeError, match=r"sessions\[0\]: found Index, expected a Session or None"):
        sqz.attend([index], 0, queries(index.info, 1))


@pytest.mark.parametrize("change, error, sentence", [
    ({"layer": 1}, sqz.Error, "layer: found 1, expected 0 to 0"),
    ({"layer": 1 << 64}, ValueError, "layer: found 18446744073709551616, which is out of range"),
    ({"layer": "first"}, TypeError, "layer: found 'first', expected a number"),
    ({"q": [[0.0]]}, TypeError, "q: found list, expected a numpy array, a torch tensor"),
    ({"q": np.zeros((3, 1, 8))}, sqz.Error, "q.*dtype"),
    ({"q": np.zeros((3, 2, 8), np.float32)}, sqz.Error, "q.*shape"),
    ({"q": np.zeros((3, 8), np.float32), "out": np.zeros((3, 1, 8), np.float32)}, sqz.Error, "q.*ndim"),
    ({"q": np.zeros((3, 1, 16), np.float32)[..., ::2]}, sqz.Error, "q.*strides"),
    ({"q": np.full((3, 1, 8), np.nan, np.float32)}, sqz.Error, "token 0"),
    ({"out": np.zeros((3, 1, 8), np.float16)}, sqz.Error, "out.*dtype"),
    ({"lse": np.zeros((3, 1), np.float32)[::-1]}, sqz.Error, "lse.*strides"),
    ({"out": np.zeros((2, 1, 8), np.float32)}, sqz.Error, "out.*shape"),
    ({"lse": np.zeros((3, 1), np.float64)}, sqz.Error, "lse.*dtype"),
    ({"positions": [40]}, ValueError, "positions: found 1, expected 3, one for each token of q"),
    ({"positions": [40.0, 41.0, 42.0]}, TypeError, "positions: found float64.*expected a sequence of integers"),
    ({"indptr": 3}, TypeError, "indptr: found int64 of shape"),
    ({"indptr": [0, 2]}, sqz.Error, r"indptr\[1\]: found 2, expected 3"),
    ({"indptr": [0]}, sqz.Error, "requests: found 0"),
    ({"stream": 1}, sqz.Error, "stream"),
])
def test_arguments(index, change, error, sentence):
    session = sqz.Session(index, selector="dense")
    arguments = {"layer": 0, "q": queries(index.info, 3)} | change
    with pytest.raises(error, match=sentence):
        session.attend(**arguments)


def test_memory_that_must_not_be_written(index):
    session, q = sqz.Session(index, selector="dense"), queries(index.info, 1)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: "):
        session.attend(0, q, out)
    with pytest.raises(sqz.Error, match="same memory"):
        session.attend(0, q, q)
