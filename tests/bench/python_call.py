"""Microseconds of Python in a call: prepared, and Session.attend() with its arguments checked each time.

  SQZ_LIBRARY=build/cpu/libruntime/libsqz.so.0 tests/bench/python_call.py INDEX

INDEX should be small, such as tests/fuzz/seeds/sqz_file_fuzz/two_levels.sqz. Python's part of a call is what it takes
longer than sqz_call_run() called through ctypes, and what ctypes takes to call it with a null handle.
"""
import argparse
import pathlib
import platform
import statistics
import sys
import timeit

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import sqz
from sqz._library import lib


def median(work, calls=20000, rounds=15):
    return statistics.median(timeit.repeat(work, number=calls, repeat=rounds)) / calls * 1e6


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("index")
    index = sqz.Index(parser.parse_args().index)
    print(f"{processor()}, Python {platform.python_version()}, numpy {np.__version__}, libsqz {sqz.__version__}")
    session = sqz.Session(index, selector="dense", threads=1)
    q = np.random.default_rng(1).standard_normal((1, index.info.query_heads, index.info.head_dim)).astype(np.float32)
    out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    call = session.prepare(q, out, lse)
    pointer, run = call._pointer.at, lib.sqz_call_run
    # An error of the library costs next to nothing: what ctypes needs, at most.
    through_ctypes, library = median(lambda: run(None, 0)), median(lambda: run(pointer, 0))
    print(f"sqz_call_run() through ctypes, prepared: {library:.2f} us; with a null handle: {through_ctypes:.2f} us")
    rows = {"prepared": lambda: call(0), "Session.attend()": lambda: session.attend(0, q, out, lse),
            "Session.attend(), out and lse made": lambda: session.attend(0, q)}
    print(f"{'':36} {'whole call':>12} {'Python of it':>14}")
    for name, work in rows.items():
        took = median(work)
        print(f"{name:36} {took:9.2f} us {took - library + through_ctypes:11.2f} us")


if __name__ == "__main__":
    main()
