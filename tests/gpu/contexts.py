#!/usr/bin/env python3
"""Calls from Python whose requests name their contexts on the GPU, in a CUDA graph of torch. Not part of ctest: it wants
a GPU and torch.

  tests/gpu/contexts.py --bin build/cuda/tools

Captures the calls of a batch once and replays them with other contexts, also after slots were emptied and filled again:
every answer must be that of the same contexts named on the host. Then 1,000 replays while another thread fills slots.
At last it times a context of 1 GB from its file (in the page cache) to its first answer: the first time, with its
verification, and after it was evicted; beside that the copy alone from pinned memory, and how much slower others are served.
"""
import argparse
import pathlib
import random
import subprocess
import tempfile
import threading
import time

import torch

import sqz

REQUESTS, HEADS, DIM = 16, 8, 128


def save(bin_folder, path, seed, tokens):
    subprocess.run([bin_folder / "sqz-bench", "attend", "--save-index", path, "--tokens", str(tokens), "--seed", str(seed),
                    "--heads", str(HEADS), "--kv-heads", "2", "--head-dim", str(DIM), "--benchmark_filter=none"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def make(bin_folder, path, seed, tokens):
    index = sqz.Index(save(bin_folder, path, seed, tokens))
    index.upload(0)
    return index


def time_loading(path, graph):
    """Prints seconds, and what they are for 9.6 GB: 128K tokens of an 8B model as q8."""
    first = sqz.Index(path)
    first.upload(0)
    session = sqz.Session(first, keep=0.2, device=0, max_tokens=1)
    q, gigabytes = torch.randn(1, HEADS, DIM, device="cuda", dtype=torch.bfloat16), path.stat().st_size / 1e9

    def load(verify):
        begun = time.perf_counter()
        with sqz.Index(path) as index:
            if verify:
                index.verify()
            index.upload(0)
            session.put(1, index)
            session.attend(0, q, contexts=[1])[0].cpu()
            seconds = time.perf_counter() - begun
            session.put(1, None)
            index.unload(0)
        return seconds

    def rate(until):
        replays, begun = 0, time.perf_counter()
        while not until():
            graph.replay()
            torch.cuda.current_stream().synchronize()
            replays += 1
        return replays / (time.perf_counter() - begun)

    load(True)  # the page cache has the file
    times = {"first": load(True), "again": min(load(False) for _ in range(3))}
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    begun = time.perf_counter()
    there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    times["pinned copy alone"] = (time.perf_counter() - begun) * gigabytes * 1e9 / (1 << 30)
    for name, seconds in times.items():
        print(f"{name}: {seconds:.3f} s for {gigabytes:.1f} GB, {seconds / gigabytes * 9.6:.2f} s for 9.6 GB")
    alone = rate(iter([False] * 2000 + [True]).__next__)
    thread = threading.Thread(target=lambda: [load(False) for _ in range(5)])
    thread.start()
    print(f"others: {rate(lambda: not thread.is_alive()) / alone:.2f} of their rate while contexts are loaded")


def worst(found, expected):
    """The largest difference of finite numbers; infinities must be equal and nothing NaN."""
    assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
    return torch.where(torch.isfinite(found), (found - expected).abs(), 0).max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        indexes = [make(arguments.bin, pathlib.Path(folder) / f"{i}.sqz", i, 20000 + 1500 * i) for i in range(5)]
        check_and_time(indexes, arguments.bin, pathlib.Path(folder))


def check_and_time(indexes, bin_folder, folder):
    rng = random.Random(5)
    session = sqz.Session(indexes[0], keep=0.2, device=0, dense_layers=-1, max_tokens=REQUESTS, max_request_tokens=1,
                          device_requests=REQUESTS, device_tokens=40000)
    for slot in (1, 2):
        session.put(slot, indexes[slot])
    q = torch.randn(REQUESTS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(REQUESTS, HEADS, device="cuda")
    named = sqz.DeviceContexts(REQUESTS)
    session.attend(0, q, out, lse, contexts=named)  # kernels are loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        session.attend(0, q, out, lse, contexts=named)

    def check(contexts):
        named.set(contexts)
        q.normal_()
        graph.replay()
        expected = session.attend(0, q, indptr=list(range(REQUESTS + 1)),
                                  contexts=contexts + [None] * (REQUESTS - len(contexts)))
        return max(worst(out.float(), expected[0].float()), worst(lse, expected[1]))

    differences = [check([rng.choice([0, 1, 2, None]) for _ in range(count)]) for count in (0, 1, 5, 16, 16, 16)]
    session.put(1, None)
    named.set([1, 0])
    graph.replay()
    assert torch.isnan(lse[0]).all() and torch.isfinite(lse[1]).all() and (lse[2:] == -torch.inf).all()
    session.put(1, indexes[3])
    differences += [check([rng.choice([0, 1, 2, None]) for _ in range(16)]) for _ in range(10)]
    stop = threading.Event()

    def refill():
        while not stop.is_set():
            session.put(7, indexes[rng.choice([3, 4])])
            session.put(7, None)

    thread = threading.Thread(target=refill)
    thread.start()
    named.set([0, 1, 2] * 5)
    graph.replay()
    torch.cuda.synchronize()
    expected, equal = (out.clone(), lse.clone()), True
    for _ in range(1000):
        out.zero_()
        graph.replay()
        equal = equal and torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    stop.set()
    thread.join()
    print(f"{len(differences)} replays, largest difference {max(differences):.4f}; beside refilled slots "
          f"{'equal' if equal else 'DIFFERENT'}")
    assert equal and max(differences) < 0.02
    time_loading(save(bin_folder, folder / "large.sqz", 9, 1_000_000), graph)


if __name__ == "__main__":
    main()
