"""Prepared calls: the same answers as attend(), for as long as the session is open."""

import gc
import weakref

import numpy as np
import pytest

import sqz
from conftest import python, queries


@pytest.mark.parametrize("indptr", [None, [0, 1, 3]])
def test_runs_any_layer_with_what_the_tensors_hold(heads, indptr):
    session = sqz.Session(heads, selector="dense")
    q = queries(heads.info, 3)
    out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    call = session.prepare(q, out, lse, indptr=indptr)
    for layer, seed in ((0, 1), (1, 2), (np.int64(0), 3)):
        q[:] = queries(heads.info, 3, seed)
        assert call(layer) is None
        expected_out, expected_lse = session.attend(layer, q, indptr=indptr)
        np.testing.assert_array_equal(out, expected_out)
        np.testing.assert_array_equal(lse, expected_lse)
    with pytest.raises(sqz.Error, match="layer: found 2, expected 0 to 1"):
        call(2)
    with pytest.raises(TypeError, match="layer: found 'first', expected a number"):
        call("first")


def test_keeps_its_tensors_in_memory(heads):
    session = sqz.Session(heads, selector="dense")

    def prepared():
        q = queries(heads.info, 1)
        lse = np.empty(q.shape[:2], np.float32)
        return session.prepare(q, np.empty_like(q), lse, positions=np.array([132])), weakref.ref(q)

    call, q = prepared()
    gc.collect()
    assert q() is not None
    call(0)
    del call
    gc.collect()
    assert q() is None


@pytest.mark.parametrize("which", ["session", "call"])
def test_closed(heads, which):
    session, q = sqz.Session(heads, selector="dense"), queries(heads.info, 1)
    call = session.prepare(q, np.empty_like(q), np.empty(q.shape[:2], np.float32))
    {"session": session, "call": call}[which].close()
    with pytest.raises(sqz.Error, match="call: found a closed call, expected an open one") as raised:
        call(0)
    assert raised.value.status == 1
    call.close()
    session.close()
    with pytest.raises(sqz.Error, match="session: found a closed session"):
        session.attend(0, q)
    with pytest.raises(sqz.Error, match="session: found a closed session"):
        session.stats()


def test_calls_and_sessions_in_cycles_go_together():
    """The collector may drop them in any order; the library wants calls to go first."""
    end = python("""
import gc, numpy as np, sqz
from conftest import SEEDS, queries
for _ in range(200):
    index = sqz.Index(SEEDS / "buckets.sqz")
    session = sqz.Session(index, selector="dense", threads=1)
    q = queries(index.info, 1)
    call = session.prepare(q, np.empty_like(q), np.empty(q.shape[:2], np.float32))
    call(0)
    session.mine, call.mine, index.mine = call, index, session
    del index, session, call
gc.collect()
""")
    assert (end.returncode, end.stderr) == (0, "")
