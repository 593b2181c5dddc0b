#!/usr/bin/env python3
"""Calls from Python whose requests name their contexts on the GPU, in a CUDA graph of torch. Not part of ctest: it
wants torch and a GPU with 24 GB.

  TMPDIR=/dev/shm SQZ_LIBRARY=build/cuda/libruntime/libsqz.so.0.2 PYTHONPATH=python tests/gpu/contexts.py

Captures the calls of a batch once and replays them with other contexts, also after slots were emptied and filled again:
every answer must be that of the same contexts named on the host. Then 1,000 replays while another thread fills slots.
At last it times 128,000 tokens of an 8B model's shape with rows of 8 bits, from the file in the page cache to the first
answer: with verification, as the first time, and without it; beside that a copy of as many bytes from pinned memory.
And it says how much slower others are served meanwhile: a small graph, and a token of an engine.
"""
import json
import pathlib
import random
import tempfile
import threading
import time

import numpy as np
import torch

import sqz
from sqz._builder import Build, info

REQUESTS, HEADS, DIM = 16, 8, 128
SEED = pathlib.Path(__file__).parents[1] / "fuzz/seeds/sqz_file_fuzz/two_levels.sqz"  # its model has every field


def make(path, tokens, layers=1, heads=HEADS, kv_heads=2, rows="bf16"):
    """An index of random keys and values on the GPU."""
    model = json.loads(info(sqz.Index(SEED))["metadata"]["model"]) | {
        "layers": layers, "query_heads": heads, "kv_heads": kv_heads, "head_dim": DIM, "sliding_window": [0] * layers,
        "attention_scale": DIM ** -0.5, "vocab_size": 0}
    with Build(path, model, np.arange(tokens), rows=rows) as build:
        for _ in range(layers):
            keys, values = (torch.randn(kv_heads, tokens, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            torch.cuda.synchronize()
            build.add_layer(keys, values, torch.randn(heads, build.plan["tail"], DIM, dtype=torch.bfloat16))
        build.finish()
    index = sqz.Index(path)
    index.upload(0)
    return index


def capture(call):
    """A CUDA graph of a call whose kernels are loaded."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def token_of_an_engine():
    """A function that takes about 5 ms: small copies to the GPU, a graph that reads 15 GB, and an answer back."""
    inputs = [(torch.zeros(64).pin_memory(), torch.zeros(64, device="cuda")) for _ in range(6)]
    rows, weights = (torch.randn(n, 8192, device="cuda", dtype=torch.bfloat16) for n in (REQUESTS, 8192))
    torch.mm(rows, weights)
    graph = capture(lambda: [torch.mm(rows, weights) for _ in range(110)])

    def token():
        for there, here in inputs:
            here.copy_(there, non_blocking=True)
        graph.replay()
        inputs[0][1].cpu()
    return token


def time_loading(first, graph):
    session = sqz.Session(first, keep=0.2, device=0, max_tokens=1)
    q, size = torch.randn(1, 32, DIM, device="cuda", dtype=torch.bfloat16), first.info.file_bytes

    def load(verify):
        begun = time.perf_counter()
        with sqz.Index(first.info.path) as index:
            if verify:
                index.verify()
            index.upload(0)
            session.put(1, index)
            session.attend(0, q, contexts=[1])[0].cpu()
            seconds = time.perf_counter() - begun
            session.put(1, None)
            index.unload(0)
        return seconds

    def replay():
        graph.replay()
        torch.cuda.current_stream().synchronize()

    def rate(call, until):
        calls, begun = 0, time.perf_counter()
        while not until():
            call()
            calls += 1
        return calls / (time.perf_counter() - begun)

    load(True)  # the page cache has the file
    times = {"with verification": load(True), "without": min(load(False) for _ in range(3))}
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    begun = time.perf_counter()
    there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    times["a copy from pinned memory"] = (time.perf_counter() - begun) * size / (1 << 30)
    for name, seconds in times.items():
        print(f"{name}: {seconds:.3f} s for {size / 1e9:.2f} GB")
    for name, call in (("a small graph", replay), ("a token of an engine", token_of_an_engine())):
        alone = rate(call, iter([False] * 200 + [True]).__next__)
        for verify in (False, True):
            thread = threading.Thread(target=lambda verify=verify: [load(verify) for _ in range(5)])
            thread.start()
            beside = rate(call, lambda thread=thread: not thread.is_alive())
            print(f"{name} takes {1e3 / alone:.2f} ms; {beside / alone:.2f} of its rate while contexts are loaded"
                  f"{' and verified' if verify else ''}")


def worst(found, expected):
    """The largest difference of finite numbers; infinities must be equal and nothing NaN."""
    assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
    return torch.where(torch.isfinite(found), (found - expected).abs(), 0).max().item()


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        check_and_time([make(folder / f"{i}.sqz", 20000 + 1500 * i) for i in range(5)],
                       make(folder / "large.sqz", 128_000, 32, 32, 8, "q8"))


def check_and_time(indexes, large):
    rng = random.Random(5)
    session = sqz.Session(indexes[0], keep=0.2, device=0, dense_layers=-1, max_tokens=REQUESTS, max_request_tokens=1,
                          device_requests=REQUESTS, device_tokens=40000)
    for slot in (1, 2):
        session.put(slot, indexes[slot])
    q = torch.randn(REQUESTS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(REQUESTS, HEADS, device="cuda")
    named = sqz.DeviceContexts(REQUESTS)
    session.attend(0, q, out, lse, contexts=named)  # kernels are loaded before the capture
    graph = capture(lambda: session.attend(0, q, out, lse, contexts=named))

    def difference(contexts):
        named.set(contexts)
        q.normal_()
        graph.replay()
        expected = session.attend(0, q, indptr=list(range(REQUESTS + 1)),
                                  contexts=contexts + [None] * (REQUESTS - len(contexts)))
        return max(worst(out.float(), expected[0].float()), worst(lse, expected[1]))

    differences = [difference([rng.choice([0, 1, 2, None]) for _ in range(count)]) for count in (0, 1, 5, 16, 16, 16)]
    session.put(1, None)
    named.set([1, 0])
    graph.replay()
    assert torch.isnan(lse[0]).all() and torch.isfinite(lse[1]).all() and (lse[2:] == -torch.inf).all()
    session.put(1, indexes[3])
    differences += [difference([rng.choice([0, 1, 2, None]) for _ in range(16)]) for _ in range(10)]
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
    time_loading(large, graph)


if __name__ == "__main__":
    main()
