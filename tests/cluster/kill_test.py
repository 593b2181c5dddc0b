#!/usr/bin/env python3
"""Workers that build a corpus of 50 documents are killed 100 times, every other one with --resume.

  tests/cluster/kill_test.py build/cpu/tools [KILLS]

Two workers at a time, a shard each, until they are killed at a random moment; the last run ends by itself. Not part of
ctest.
"""
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from corpus import Corpus

DOCUMENTS = 50


def main() -> int:
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    chance = random.Random(1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus(pathlib.Path(name), sys.argv[1], DOCUMENTS, 1500)

        def start(*options: str) -> subprocess.Popen:
            return subprocess.Popen(corpus.build("-q", "--no-progress", *options), stdout=subprocess.DEVNULL)

        def left() -> int:
            return DOCUMENTS - sum(1 for _ in corpus.out.rglob("*.sqz")) if corpus.out.exists() else DOCUMENTS

        seconds, early, done = 0.5, 0, 0
        while done < kills:
            workers = [start("--shard", f"{shard}/2", *(["--resume"] if done % 4 < 2 else [])) for shard in range(2)]
            before = left()
            time.sleep(seconds * chance.random())
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                early += worker.wait() == -signal.SIGKILL and left() > 0
            done += 2
            # So long that the documents last until the last kill.
            seconds *= 0.8 if left() * kills < DOCUMENTS * (kills - done) else 1.25 if left() == before else 1
        print(f"{done} kills, {early} of them of a worker in a corpus that was not whole; {left()} documents left",
              flush=True)
        assert early > kills * 0.8
        assert start().wait() == 0
        corpus.check()
    print(f"passed after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
