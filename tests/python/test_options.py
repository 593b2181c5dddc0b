"""What Session and attend() say of a user's mistakes."""

import numpy as np
import pytest

import sqz
from conftest import queries


@pytest.mark.parametrize("options, error, sentence", [
    ({"bugdet": 1}, TypeError, "bugdet"),
    ({"budget": "much"}, TypeError, "budget: found 'much', expected a number"),
    ({"budget": 0}, ValueError, "budget: found 0, expected above 0 and at most 1"),
    ({"selector": "best"}, ValueError, "selector: found 'best', expected auto, squeezed, dense, quest"),
    ({"thresholds": []}, ValueError, "thresholds: found 0, expected [12], one for each level in use"),
    ({"thresholds": [0.5], "rule": "budget"}, ValueError, "rule: found 'budget' with thresholds, expected"),
    ({"device": "tpu"}, ValueError, "device: found 'tpu', expected"),
    ({"kv_heads": 1}, TypeError, r"kv_heads: found 1, expected \(first, count\)"),
    ({"kv_heads": (0, 9)}, sqz.Error, "kv_heads"),
    ({"device": 0}, sqz.Error, "device|CUDA"),  # not uploaded, or no CUDA
    ({}, sqz.Error, "found 0 of budget, keep and thresholds"),
    ({"selector": "quest", "budget": 0.5}, sqz.Error, "pages"),
])
def test_options(index, options, error, sentence):
    with pytest.raises(error, match=sentence):
        sqz.Session(index, **options)


def test_what_is_no_index_or_context(index):
    with pytest.raises(TypeError, match="index: found str, expected an Index"):
        sqz.Session("manual.sqz", selector="dense")
    with pytest.raises(TypeError):
        sqz.Session(index, selector="dense").attend(0, queries(index.info, 1), contexts=[index])


Q = np.zeros((3, 1, 8), np.float32)


@pytest.mark.parametrize("change, error, sentence", [
    ({"layer": 1}, sqz.Error, "layer: found 1, expected 0 to 0"),
    ({"layer": 1 << 64}, ValueError, "layer: found 18446744073709551616, which is out of range"),
    ({"q": [[0.0]]}, TypeError, "q: found list, expected a numpy array, a torch tensor"),
    ({"q": Q.astype(np.int8)}, sqz.Error, "q: dtype: found int8 with 1 lane, expected f32"),
    ({"q": np.zeros((3, 2, 8), np.float32)}, sqz.Error, "q.*shape"),
    ({"out": Q.astype(np.float16)}, sqz.Error, "out.*dtype"),
    ({"lse": np.zeros((3, 1), np.float32)[::-1]}, sqz.Error, "lse.*strides"),
    ({"positions": [40]}, ValueError, "positions: found 1, expected 3, one for each token of q"),
    ({"positions": [40.0, 41.0, 42.0]}, TypeError, "positions: found float64.*expected a sequence of integers"),
    ({"indptr": 3}, TypeError, "indptr: found int64 of shape"),
    ({"stream": 1}, sqz.Error, "stream"),
])
def test_arguments(index, change, error, sentence):
    session = sqz.Session(index, selector="dense")
    with pytest.raises(error, match=sentence):
        session.attend(**{"layer": 0, "q": queries(index.info, 3)} | change)


def test_memory_that_must_not_be_written(index):
    session, q = sqz.Session(index, selector="dense"), queries(index.info, 1)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: "):
        session.attend(0, q, out)
    with pytest.raises(sqz.Error, match="same memory"):
        session.attend(0, q, q)
    inside = q[0, 0, :1].reshape(1, 1)
    for states in (q, inside, q.copy(), inside.copy()), (q, inside.copy(), q.copy(), inside):
        with pytest.raises(sqz.Error, match="out_a and lse_[ab]: found in the same memory"):
            sqz.merge_states(*states)
