"""Several contexts in one call, rows without a context, and merging states."""

import threading

import numpy as np
import pytest

import sqz
from conftest import SEEDS, Stored, attention, queries


def test_a_context_for_each_request(heads):
    session = sqz.Session(heads, selector="dense")
    with sqz.Index(SEEDS / "buckets.sqz") as again:
        session.put(3, again)
        q = queries(heads.info, 5)
        out, lse = np.full_like(q, 7), np.full(q.shape[:2], 7, np.float32)
        result = session.attend(1, q, out, lse, indptr=[0, 2, 3, 5], contexts=[0, None, 3])
        assert result[0] is out and result[1] is lse
        for slot, rows in ((0, slice(0, 2)), (3, slice(3, 5))):
            expected_out, expected_lse = session.attend(1, q[rows], contexts=[slot])
            np.testing.assert_array_equal(out[rows], expected_out)
            np.testing.assert_array_equal(lse[rows], expected_lse)
        assert np.isneginf(lse[2]).all() and not out[2].any()
    assert session.stats(slot=3).selections == 2
    session.put(3, None)
    with pytest.raises(sqz.Error, match=r"contexts\[0\]: found slot 3, expected one that has an index"):
        session.attend(1, q, contexts=[3])


def test_requests_of_a_context_are_made_neighbours(heads):
    torch = pytest.importorskip("torch")
    session, q = sqz.Session(heads, selector="dense"), queries(heads.info, 8)
    named, indptr = sqz.Contexts([3, None, 0, 3, 0]), [0, 2, 3, 4, 6, 8]
    tokens, starts, _ = named.grouped(indptr, torch.from_numpy(q))
    assert tokens.tolist() == [2, 3, 6, 7, 0, 1, 4, 5] and starts.tolist() == [0, 1, 2, 4, 6, 8]
    assert sqz.Contexts([0, 0, 3, 3]).grouped([0, 1, 2, 3, 4], torch.from_numpy(q[:4])) is None
    with sqz.Index(SEEDS / "buckets.sqz") as again:
        session.put(3, again)
        expected = session.attend(1, q, indptr=indptr, contexts=named)  # numpy's rows are taken as they come
        for found, right in zip(session.attend(1, torch.from_numpy(q), indptr=indptr, contexts=named), expected):
            np.testing.assert_array_equal(found, right)
    with pytest.raises(sqz.Error, match=r"contexts\[1\]: found slot 7, expected one that has an index"):
        session.attend(1, torch.from_numpy(q[:3]), indptr=[0, 1, 2, 3], contexts=[3, 7, 3])


def test_contexts_that_do_not_fit(heads, index):
    dense, q = sqz.Session(heads, selector="dense"), queries(heads.info, 2)
    with pytest.raises(ValueError, match="contexts: found those of 1 requests, expected 2"):
        dense.attend(0, q, indptr=[0, 1, 2], contexts=[0])
    with pytest.raises(sqz.Error, match="another model") as raised:
        dense.put(1, index)
    assert raised.value.status == 6
    with pytest.raises(TypeError, match="index: found str"):
        dense.put(1, "a.sqz")
    with sqz.Index(SEEDS / "buckets.sqz") as closed:
        pass
    with pytest.raises(sqz.Error, match="found a closed index"):
        dense.put(0, closed)
    with pytest.raises(sqz.Error, match=r"contexts_each: found 2, expected 0 to 1, the session's max_contexts"):
        dense.attend(0, q, contexts=[[sqz.Context(0), sqz.Context(0)]])
    dense.close()
    with pytest.raises(sqz.Error, match="found a closed session"):
        dense.put(1, heads)


def test_others_attend_and_close_while_an_index_is_put(heads, monkeypatch):
    session, q = sqz.Session(heads, selector="dense"), queries(heads.info, 1)

    def put(*arguments):
        for call in (lambda: session.attend(0, q), session.close):
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        return original(*arguments)

    original = sqz._library.lib.sqz_session_put
    monkeypatch.setattr(sqz._library.lib, "sqz_session_put", put)
    session.put(1, heads)


def turned(rows, positions):
    """Rows [..., dim] turned by RoPE, in pairs (i, i + dim / 2), theta 10,000."""
    half = rows.shape[-1] // 2
    angles = positions * 10000.0 ** (-np.arange(half) / half)
    a, b = rows[..., :half], rows[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def test_documents_one_behind_the_other(heads):
    """As one text whose second half are the same keys, turned, without its first tokens."""
    info = heads.info
    session, q = sqz.Session(heads, selector="dense", max_contexts=3), queries(info, 4)
    session.put(1, heads)
    both = [sqz.Context(0), sqz.Context(1, offset=info.tokens, skip=info.sink)]
    out, lse = session.attend(1, q, indptr=[0, 2, 3, 4], contexts=[both, None, [sqz.Context(0)]])
    keys, values = Stored(info.path).keys_and_values(1)
    assert info.sink > 0
    later = turned(keys[:, info.sink:], info.tokens)
    expected_out, expected_lse = attention(np.concatenate([keys, later], 1),
                                           np.concatenate([values, values[:, info.sink:]], 1), q, info.attention_scale)
    np.testing.assert_allclose(out[:2], expected_out[:2], atol=1e-4)
    np.testing.assert_allclose(lse[:2], expected_lse[:2], atol=1e-4)
    assert np.isneginf(lse[2]).all() and not out[2].any()
    np.testing.assert_allclose(lse[3:], session.attend(1, q[3:])[1], atol=1e-5)


def test_sinks_are_a_key_without_a_value():
    random = np.random.default_rng(2)
    q, sinks = random.standard_normal((3, 4, 8)), random.standard_normal(4).astype(np.float32)
    keys, values = random.standard_normal((2, 2, 10, 8))
    states = []
    for part in (slice(0, 3), slice(3, 10)):
        states += [state.astype(np.float32) for state in attention(keys[:, part], values[:, part], q, 0.3)]
    states[1] = np.asfortranarray(states[1])
    expected_out, expected_lse = attention(keys, values, q, 0.3)
    assert sqz.merge_states(*states, sinks=sinks) is None
    np.testing.assert_allclose(states[0], expected_out / (1 + np.exp(sinks - expected_lse))[..., None], atol=1e-5)
    np.testing.assert_allclose(states[1], np.logaddexp(expected_lse, sinks), atol=1e-5)


def test_merge_of_what_does_not_fit():
    out, lse = np.zeros((2, 1, 8), np.float32), np.zeros((2, 1), np.float32)
    with pytest.raises(sqz.Error, match="out_b.*shape"):
        sqz.merge_states(out, lse, np.zeros((3, 1, 8), np.float32), np.zeros((3, 1), np.float32))
    with pytest.raises(TypeError, match="lse_b: found float, expected a numpy array"):
        sqz.merge_states(out, lse, out.copy(), 1.0)
