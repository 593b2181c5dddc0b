"""Several sessions in one call, rows without a context, and merging states."""

import numpy as np
import pytest

import sqz
from conftest import SEEDS, attention, queries


def test_a_session_for_each_request(heads):
    dense = sqz.Session(heads, selector="dense")
    with sqz.Index(SEEDS / "buckets.sqz") as again:
        other = sqz.Session(again, selector="window", budget=0.9)
        q = queries(heads.info, 5)
        out, lse = np.full_like(q, 7), np.full(q.shape[:2], 7, np.float32)
        result = sqz.attend([dense, None, other], 1, q, out, lse, indptr=[0, 2, 3, 5])
        assert result[0] is out and result[1] is lse
        for session, rows in ((dense, slice(0, 2)), (other, slice(3, 5))):
            expected_out, expected_lse = session.attend(1, q[rows])
            np.testing.assert_array_equal(out[rows], expected_out)
            np.testing.assert_array_equal(lse[rows], expected_lse)
        assert np.isneginf(lse[2]).all() and not out[2].any()


def test_sessions_that_do_not_fit(heads, index):
    dense, q = sqz.Session(heads, selector="dense"), queries(heads.info, 2)
    with pytest.raises(ValueError, match="sessions: found 1, expected 2, one for each request"):
        sqz.attend([dense], 0, q, indptr=[0, 1, 2])
    with pytest.raises(sqz.Error, match="another model") as raised:
        sqz.attend([dense, sqz.Session(index, selector="dense")], 0, q, indptr=[0, 1, 2])
    assert raised.value.status == 6
    dense.close()
    with pytest.raises(sqz.Error, match="found a closed session"):
        sqz.attend([dense, None], 0, q, indptr=[0, 1, 2])


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 2e-3)])
def test_merge_is_attention_over_both(dtype, tolerance):
    random = np.random.default_rng(1)
    q = random.standard_normal((3, 4, 8))
    keys, values = random.standard_normal((2, 2, 10, 8))
    states = []
    for part in (slice(0, 3), slice(3, 10)):
        out, lse = attention(keys[:, part], values[:, part], q, 0.3)
        states += [out.astype(dtype), lse.astype(np.float32)]
    states[1] = np.asfortranarray(states[1])
    expected_out, expected_lse = attention(keys, values, q, 0.3)
    assert sqz.merge_states(*states) is None
    np.testing.assert_allclose(states[0], expected_out, atol=tolerance)
    np.testing.assert_allclose(states[1], expected_lse, atol=1e-5)


def test_merge_of_what_does_not_fit():
    out, lse = np.zeros((2, 1, 8), np.float32), np.zeros((2, 1), np.float32)
    with pytest.raises(sqz.Error, match="out_b.*shape"):
        sqz.merge_states(out, lse, np.zeros((3, 1, 8), np.float32), np.zeros((3, 1), np.float32))
    with pytest.raises(TypeError, match="lse_b: found float, expected a numpy array"):
        sqz.merge_states(out, lse, out.copy(), 1.0)
