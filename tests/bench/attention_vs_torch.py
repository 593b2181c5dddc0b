"""Attention from an index on the GPU beside PyTorch's and FlashInfer's, in one run.

  sqz-bench attend --save-index 128k.sqz --benchmark_filter=dense
  SQZ_LIBRARY=build/cuda/libruntime/libsqz.so.0.2 attention_vs_torch.py 128k.sqz --prefill 4096 1024 --requests 16

An INDEX has one layer (32 query heads, 8 KV heads, d 128, bf16). Keys and values are those of the index, for everybody: dense
attention does not depend on their order. Queries are mixtures of coarse centroids. Ours is libsqz through
python/sqz, selection included, rule `threshold` at the asked sparsity; PyTorch is scaled_dot_product_attention
by its flash and cuDNN backends; FlashInfer (0.2.5, where it is installed) decodes from pages, all of them, and those that
we selected: selection and its plan(), on the host, not included (plan is timed by itself).

Everything is replayed as CUDA graphs, over copies of the layer in turn, so that the L2 holds nothing of what is read
next; a time is the median of the replays divided by the calls. Outputs of dense attention are compared.
"""
import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import sqz  # noqa: E402
from gpu_clock import GpuClock  # noqa: E402
from safetensors import safe_open  # noqa: E402

try:
    import flashinfer
except ImportError:
    flashinfer = None

COPIES, SETS = 4, 8


class Layer:
    """The index, uploaded COPIES times, and its keys and values as tensors [copies][1, Hkv, N, d]."""

    def __init__(self, path, copies=COPIES):
        with safe_open(path, "pt", device="cuda") as file:
            def joined(what):
                return torch.cat([file.get_tensor(f"layers.0.{what}"), file.get_tensor(f"layers.0.exact.{what}")], dim=1)[None]
            self.keys, self.values = [joined("keys")], [joined("values")]
            self.slots = file.get_tensor("layers.0.keys").shape[1]
            self.centroids = file.get_tensor("layers.0.level.1.centroids")
        for _ in range(copies - 1):
            self.keys.append(self.keys[0].clone())
            self.values.append(self.values[0].clone())
        self.indexes = [sqz.Index(path) for _ in range(copies)]
        for index in self.indexes:
            index.upload(0)
        self.heads, self.tokens, self.dim = self.keys[0].shape[1:]
        self.group = self.indexes[0].info.query_heads // self.heads

    def queries(self, count):
        """[count, Hq, d]: each KV head's group wants a mixture of 4 coarse clusters."""
        chosen = torch.randint(self.centroids.shape[1], (count, self.heads, 4), device="cuda")
        centres = self.centroids.float()[torch.arange(self.heads, device="cuda")[None, :, None], chosen]  # [n, Hkv, 4, d]
        weights = 0.4 + 0.1 * torch.randn(count, self.heads, self.group, 4, device="cuda")
        q = weights @ centres + 0.3 * torch.randn(count, self.heads, self.group, self.dim, device="cuda")
        return q.reshape(count, self.heads * self.group, self.dim).to(torch.bfloat16)

    def sessions(self, **options):
        return [sqz.Session(index, device=0, **options) for index in self.indexes]


def replayed(calls, enqueue, seconds=0.25):
    """Median microseconds of one of `calls` calls; enqueue(i) puts call i on the current stream."""
    for i in range(min(calls, COPIES)):
        enqueue(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls):
            enqueue(i)
    times, begun = [], time.perf_counter()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while len(times) < 8 or (time.perf_counter() - begun < seconds and len(times) < 200):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


class Table:
    def __init__(self, title):
        self.title, self.rows = title, []

    def add(self, name, work, dense=None, note=""):
        """Runs work() -> microseconds. `dense`: "peer" = somebody else's dense attention, "ours", or None."""
        with GpuClock() as clock:
            try:
                self.rows.append((name, work(), dense, note, clock))
            except (RuntimeError, OSError) as error:
                print(f"{self.title}: {name}: {str(error).splitlines()[0]}", flush=True)

    def print(self):
        peers = [us for _, us, dense, _, _ in self.rows if dense == "peer"]
        ours = [us for _, us, dense, _, _ in self.rows if dense == "ours"]
        print(f"\n{self.title}\n  {'':44} {'us':>10} {'x best peer':>12} {'x our dense':>12}")
        for name, us, _, note, clock in self.rows:
            ratios = [f"{min(of) / us:12.2f}" if of else " " * 12 for of in (peers, ours)]
            print(f"  {name:44} {us:10.1f} {' '.join(ratios)}  {note() if callable(note) else note}  [{clock.text()}]")
        sys.stdout.flush()


def served(layer, sessions, sets, calls, indptr=None):
    """How ours is called, and what it delivered."""
    outs = [torch.empty_like(sets[0]) for _ in sessions]
    lses = [torch.empty(sets[0].shape[:2], device="cuda", dtype=torch.float32) for _ in sessions]

    def enqueue(i):
        c = i % len(sessions)
        sessions[c].attend(0, sets[i % len(sets)], outs[c], lses[c], indptr=indptr,
                           stream=torch.cuda.current_stream().cuda_stream)

    def note():
        stats = sessions[0].stats()
        return f"keys {stats.delivered_keep:.3f}, bytes {stats.delivered_budget:.3f}"

    return (lambda: replayed(calls, enqueue)), note, outs


def settings(sparsity, **more):
    yield "sqz dense", dict(selector="dense", **more)
    for levels in (1, 2):
        yield f"sqz, {levels} level{'s'[:levels - 1]}", dict(selector="squeezed", rule="threshold", levels=levels,
                                                             keep=1 - sparsity, **more)


def torch_rows(table, layer, sets, calls, tokens):
    shaped = [q.transpose(0, 1)[None].contiguous() for q in sets]  # [1, Hq, T, d]
    results = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        def enqueue(i, backend=backend, name=name):
            with sdpa_kernel(backend):
                results[name] = F.scaled_dot_product_attention(shaped[i % len(shaped)], layer.keys[i % len(layer.keys)],
                                                               layer.values[i % len(layer.keys)], enable_gqa=True)
        table.add(f"torch {name}" + (", one request" if tokens > 1 and calls > 2 else ""), lambda: replayed(calls, enqueue), "peer")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(shaped[0], layer.keys[0], layer.values[0], enable_gqa=True)[0].transpose(0, 1)


def slots_of(runs):
    return torch.cat([torch.arange(first, first + length) for first, length in runs]) if runs else torch.empty(0, dtype=torch.long)


class Paged:
    """FlashInfer over pages of one layer: a request for each KV head, whose pages are its own."""

    def __init__(self, layer, page, selections, tensor_cores):
        self.page, self.plans, self.wrappers = page, [], []
        self.heads = heads = layer.heads
        tokens = layer.tokens
        self.caches = [tuple(x[0].reshape(heads * tokens // page, page, 1, layer.dim) for x in pair)
                       for pair in zip(layer.keys, layer.values)]
        for selected in selections:
            pages = []
            for head in range(heads):
                slots = torch.cat([slots_of(selected[head]), torch.arange(layer.slots, tokens)])
                pages.append(torch.unique(slots // page) + head * (tokens // page))
            sizes = torch.tensor([0] + [len(p) for p in pages])
            self.pages = sum(len(p) for p in pages)
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=tensor_cores,
                backend="fa2")
            arguments = (sizes.cumsum(0).int().cuda(), torch.cat(pages).int().cuda(),
                         torch.full((heads,), page, dtype=torch.int32, device="cuda"), layer.group, 1, layer.dim, page)
            for _ in range(3):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                wrapper.plan(*arguments, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
                torch.cuda.synchronize()
                self.plans.append(1e6 * (time.perf_counter() - begun))
            self.wrappers.append(wrapper)

    def work(self, sets):
        queries = [q.reshape(self.heads, -1, q.shape[2]) for q in sets]

        def enqueue(i):
            c = i % len(self.wrappers)
            self.wrappers[c].run(queries[c], self.caches[c])

        return replayed(32, enqueue)

    def note(self):
        return f"{self.pages * self.page} keys read, plan {statistics.median(self.plans):.0f} us"


def decode(layer, sparsity):
    sets = [layer.queries(1) for _ in range(SETS)]
    table = Table(f"1 token, {layer.tokens} tokens, {100 * sparsity:g} % sparse")
    expected = torch_rows(table, layer, sets, 32, 1)
    chosen = None
    for name, options in settings(sparsity, max_tokens=1):
        sessions = layer.sessions(**options)
        work, note, outs = served(layer, sessions, sets, 32)
        table.add(name, work, "ours" if "dense" in name else None, note)
        if "dense" in name:
            sessions[0].attend(0, sets[0], outs[0], torch.empty(1, layer.heads * layer.group, device="cuda"),
                               stream=torch.cuda.current_stream().cuda_stream)
            error = ((outs[0].float() - expected.float()).norm() / expected.float().norm()).item()
            print(f"dense, ours beside torch flash: relative difference {error:.2e}", flush=True)
            assert error < 1e-2, error
        elif chosen is None:
            chosen = [session.select(0, sets[i], stream=torch.cuda.current_stream().cuda_stream)
                      for i, session in enumerate(sessions)]
    if flashinfer is not None:
        whole = [[[(0, layer.slots)]] * layer.heads] * len(layer.keys)
        for tensor_cores in (False, True):
            suffix = ", tensor cores" if tensor_cores else ""
            for page, selections, name in ((16, whole, "dense"), (16, chosen, "selected"), (1, chosen, "selected")):
                def work(page=page, selections=selections, name=name, tensor_cores=tensor_cores):
                    paged = Paged(layer, page, selections, tensor_cores)
                    notes.append(paged.note())
                    return paged.work(sets)
                notes = []
                table.add(f"FlashInfer {name}, page {page}{suffix}", work, "peer" if name == "dense" else None,
                          lambda notes=notes: notes[0])
    table.print()


def many(layer, sparsity, requests):
    sets = [layer.queries(requests) for _ in range(SETS)]
    table = Table(f"{requests} requests of 1 token, {layer.tokens} tokens, {100 * sparsity:g} % sparse")
    torch_rows(table, layer, sets, 32, requests)
    each = [q[:, :, None].contiguous() for q in sets]  # [requests, Hq, 1, d]
    keys, values = ([x.expand(requests, -1, -1, -1) for x in pair] for pair in (layer.keys, layer.values))

    def apart(i):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(each[i % SETS], keys[i % COPIES], values[i % COPIES], enable_gqa=True)
    table.add("torch flash", lambda: replayed(32, apart))
    indptr = list(range(requests + 1))
    for name, options in settings(sparsity, max_tokens=requests):
        sessions = layer.sessions(**options)
        work, note, _ = served(layer, sessions, sets, 32, indptr)
        table.add(name, work, "ours" if "dense" in name else None, note)
    table.print()


def prefill(layer, sparsity, tokens, block):
    sets = [layer.queries(tokens)]
    table = Table(f"{tokens} tokens, {layer.tokens} tokens, {100 * sparsity:g} % sparse, one selection per {block}")
    torch_rows(table, layer, sets, 2, tokens)
    for name, options in settings(sparsity, max_tokens=tokens, block=block):
        sessions = [sqz.Session(layer.indexes[0], device=0, **options)]
        work, note, _ = served(layer, sessions, sets, 2)
        table.add(name, work, "ours" if "dense" in name else None, note)
    table.print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("index", nargs="+", help="made by sqz-bench --save-index; the length must be a multiple of 16")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=0, help="of one token each, too, of the first index")
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompts of as many tokens, too")
    parser.add_argument("--block", type=int, default=128, help="prompt tokens that share a selection")
    args = parser.parse_args()
    torch.manual_seed(1)
    names = [f"{torch.cuda.get_device_name()}", f"torch {torch.__version__}", f"cuDNN {torch.backends.cudnn.version()}",
             f"FlashInfer {flashinfer.__version__}" if flashinfer else "no FlashInfer"]
    print(", ".join(names), flush=True)
    for i, path in enumerate(args.index):
        layer = Layer(path)
        decode(layer, args.sparsity)
        if args.requests > 0 and i == 0:
            many(layer, args.sparsity, args.requests)
        for tokens in args.prefill:
            prefill(layer, args.sparsity, tokens, args.block)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
