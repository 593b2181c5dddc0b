"""Attention and selection against a reference, and what sessions count."""

from itertools import pairwise

import numpy as np
import pytest

import sqz
from conftest import SEEDS, Stored, attention, queries


@pytest.mark.parametrize("name", ["two_levels", "buckets", "pages"])
@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-4), (np.float16, 2e-2)])
def test_dense_is_attention(name, dtype, tolerance):
    stored, index = Stored(SEEDS / f"{name}.sqz"), sqz.Index(SEEDS / f"{name}.sqz")
    session = sqz.Session(index, selector="dense")
    q = queries(index.info, 3, dtype=dtype)
    for layer in range(index.info.layers):
        out, lse = session.attend(layer, q, indptr=[0, 1, 3])
        expected_out, expected_lse = attention(*stored.keys_and_values(layer), q, index.info.attention_scale)
        assert out.dtype == dtype and lse.dtype == np.float32
        np.testing.assert_allclose(out, expected_out, atol=tolerance)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-4)
        turned = np.full(lse.T.shape, np.nan, np.float32)
        session.attend(layer, q, lse=turned.T, indptr=[0, 1, 3])
        np.testing.assert_array_equal(turned, lse.T)


def test_a_request_that_is_not_finite_is_nan_alone(index):
    """As an engine sees it: attention and the merge with its own."""
    session, q = sqz.Session(index, selector="dense"), queries(index.info, 3)
    expected = session.attend(0, q, indptr=[0, 1, 3])
    q[0, 0, 0] = np.nan
    found, own = session.attend(0, q, indptr=[0, 1, 3]), session.attend(0, q, indptr=[0, 1, 3])
    sqz.merge_states(*own, *found)
    for part, whole in zip((*found, own[0]), (*expected, expected[0]), strict=True):
        assert np.isnan(part[0]).all()
        np.testing.assert_allclose(part[1:], whole[1:], rtol=1e-5)


def test_stats_count_and_reset(heads):
    session = sqz.Session(heads, selector="dense")
    for layer in (0, 1, 1):
        session.attend(layer, queries(heads.info, 1))
    stats = session.stats()
    assert (stats.selections, session.stats(1).selections, stats.delivered_budget) == (3, 2, 1)
    assert stats.dense_fallback is False and stats.bytes_read == stats.bytes_dense > 0
    session.reset_stats()
    assert session.stats().selections == 0
    with pytest.raises(sqz.Error, match="layer"):
        session.stats(2)


def test_thresholds_choose_ascending_runs(index):
    slots = Stored(SEEDS / "two_levels.sqz").header["layers.0.keys"]["shape"][1]
    q = queries(index.info, 2)
    assert sqz.Session(index, selector="dense").select(0, q[:1]) == [[(0, slots)]]
    session = sqz.Session(index, thresholds=[0.05], levels=1)
    (runs,) = session.select(0, q[:1])
    assert 0 < sum(length for _, length in runs) < slots
    assert all(a[0] + a[1] < b[0] for a, b in pairwise(runs))
    together, _ = session.attend(0, q, indptr=np.array([0, 1, 2]))  # each request chooses for itself
    for token in range(2):
        np.testing.assert_array_equal(together[token], session.attend(0, q[token:token + 1])[0][0])


def test_select_is_what_is_read(made):
    """Two KV heads that want different keys, beside what attend() counts."""
    index = sqz.Index(made)
    session, q = sqz.Session(index, keep=0.2, levels=1), queries(index.info, 1, seed=2)
    runs = session.select(0, q)
    session.attend(0, q)
    assert len(runs) == 2 and runs[0] != runs[1] and len(runs[0]) > 1
    assert sum(length for head in runs for _, length in head) == session.stats().keys_read


def test_sliding_windows_need_positions():
    index = sqz.Index(SEEDS / "nothing_clustered.sqz")
    session = sqz.Session(index, selector="dense")
    q = queries(index.info, 2)
    with pytest.raises(sqz.Error, match="positions: found null.*layer 0 has a sliding window"):
        session.attend(0, q)
    near, _ = session.attend(0, q, positions=[32, 33])
    far, lse = session.attend(0, q, positions=np.array([32, 1000]))
    np.testing.assert_array_equal(near[0], far[0])
    assert np.isneginf(lse[1]).all() and not far[1].any()  # its window begins after the context


def test_a_call_without_queries_and_other_wrong_types(index):
    session, out, lse = sqz.Session(index, "dense"), np.empty((1, 1, 8), np.float32), np.empty((1, 1), np.float32)
    for call in (lambda: session.attend(0, None, out, lse, positions=[32]),
                 lambda: session.select(0, None, positions=[32])):
        with pytest.raises(sqz.Error, match="q: tensor: found null"):
            call()
    for contexts in ([[0]], ["a"]):
        with pytest.raises(TypeError, match="contexts: found"):
            session.attend(0, out, contexts=contexts)
    with pytest.raises(TypeError, match="budget: found True, expected a number"):
        sqz.Session(index, budget=True)
    with pytest.raises(TypeError, match="selector: found .'a'., expected a text"):
        sqz.Session(index, ["a"])


def test_rows_backwards_are_not_contiguous(index):
    """Their first row is the last in memory: what is behind it is another's."""
    session, q = sqz.Session(index, "dense"), queries(index.info, 3)
    for arguments in ((q[::-1],), (q, np.empty_like(q)[::-1])):
        with pytest.raises(sqz.Error, match=r"strides\[0\]: found -8, expected 8"):
            session.attend(0, *arguments)
