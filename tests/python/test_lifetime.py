"""The end of the interpreter, fork(), threads, and libraries that are not there."""

import pickle
import threading

import numpy as np
import pytest

import sqz
from conftest import SEEDS, python, queries

OPEN = f"""
import numpy as np, sqz
index = sqz.Index({str(SEEDS / "two_levels.sqz")!r})
session = sqz.Session(index, selector="dense", threads=2)
q = np.ones((1, 1, 8), np.float32)
session.attend(0, q)
"""


@pytest.mark.parametrize("rest", [
    "import sys; assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)",
    "import builtins; builtins.kept = index, session; sqz._library.lib = sqz.session.lib = None",  # outlives the module
    "session.me = session",  # only the collector finds it
])
def test_handles_that_are_open_at_the_end(rest):
    end = python(OPEN + rest)
    assert (end.returncode, end.stderr) == (0, "")


def test_errors_of_other_processes():
    with pytest.raises(sqz.Error) as raised:
        sqz.Index(b"/nowhere/\xff.sqz")
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.status) == (str(raised.value), raised.value.status)
    assert "nowhere" in str(again)


def test_a_thread_that_attends_at_the_end():
    """It holds its session; closing waits for the call that runs, and the next is refused in that thread."""
    end = python(OPEN + """
import threading, time
def serve():
    try:
        while True:
            session.attend(0, q)
    except sqz.Error:
        pass
threading.Thread(target=serve, daemon=True).start()
time.sleep(0.05)
""")
    assert (end.returncode, end.stderr) == (0, "")


def test_a_forked_child_opens_its_own_session():
    """With a thread of the parent inside the session when it forks, which Python 3.12 warns of."""
    end = python(OPEN + """
import os, threading, warnings
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
threading.Thread(target=lambda: [session.attend(0, q) for _ in range(10000)]).start()
child = os.fork()
if child == 0:
    try:
        session.attend(0, q)
    except sqz.Error as error:
        assert error.status == 5 and "fork" in str(error), error
    else:
        raise AssertionError("a parent's session served its child")
    index.verify()
    out, lse = sqz.Session(index, selector="dense").attend(0, q)
    assert np.isfinite(lse).all()
    session.close()
    raise SystemExit
_, status = os.waitpid(child, 0)
assert status == 0, status
session.attend(0, q)
""")
    assert (end.returncode, end.stderr) == (0, "")


def test_threads_take_turns(heads):
    """What one session answers to several threads, and closing it meanwhile."""
    session, failures, served = sqz.Session(heads, selector="dense", threads=1), [], []
    expected = {seed: session.attend(0, queries(heads.info, 2, seed))[0] for seed in range(4)}

    def serve(seed):
        q = queries(heads.info, 2, seed)
        try:
            while True:
                if not np.array_equal(session.attend(0, q)[0], expected[seed]):
                    failures.append(seed)
                served.append(seed)
        except sqz.Error as error:
            assert "closed" in str(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    while set(served) != set(expected):
        pass
    session.close()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("path, sentence", [
    ("/nowhere/libsqz.so.0.2", "ImportError: libsqz cannot be loaded: /nowhere/libsqz.so.0.2"),
    ("libc.so.6", "ImportError: libsqz is too old for this module")])
def test_a_library_that_is_not_there(path, sentence):
    assert sentence in python("import sqz", SQZ_LIBRARY=path).stderr
