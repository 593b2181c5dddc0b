#!/usr/bin/env python3
"""Checks a .sqz index independently of the C++ code: python3 scripts/check_index.py FILE...

Needs numpy only. Reads the file as docs/format.md describes it and checks the header, alignments,
paddings, offsets, cluster sizes, slot order, that stored centroids and value means are the means of
the keys and values below them, that pages are in token order with the range of their keys, and the
calibration. With the package `xxhash` hashes are compared, too.

Prints one line a problem; exit code 0 if there is none, 1 otherwise, 2 if a file cannot be read.
"""

import argparse
import json
import struct
import sys

import numpy as np

WIDTH = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
         "U64": 8, "I64": 8, "F64": 8}
LETTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
problems = []


def check(condition, message):
    if not condition:
        problems.append(message)
    return bool(condition)


def no_duplicates(pairs):
    keys = [k for k, _ in pairs]
    check(len(keys) == len(set(keys)), f"duplicate keys in the header: {keys}")
    return dict(pairs)


class Index:
    """The container: header, metadata, tensors as numpy arrays."""

    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        (length,) = struct.unpack("<Q", self.data[:8].tobytes())
        self.start = 8 + length
        header = json.loads(self.data[8:self.start].tobytes(), object_pairs_hook=no_duplicates)
        self.metadata = header.pop("__metadata__")
        self.tensors = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))

    def check_container(self):
        check(self.start % 4096 == 0, f"data starts at byte {self.start}, not on a page")
        end, layer = 0, None
        for name, tensor in self.tensors.items():
            begin, stop = tensor["data_offsets"]
            check(begin == end, f"{name}: begins at {begin}, the tensor before ends at {end}")
            count = int(np.prod(tensor["shape"], dtype=object)) * WIDTH[tensor["dtype"]]
            check(stop - begin == count, f"{name}: {stop - begin} bytes for {count}")
            end = stop
            if name.startswith("padding."):
                check(not self.data[self.start + begin:self.start + stop].any(), f"{name}: not zero")
                continue
            check((self.start + begin) % 64 == 0, f"{name}: not on a 64-byte boundary")
            if name.startswith("layers.") and name.split(".")[1] != layer:
                layer = name.split(".")[1]
                check((self.start + begin) % 4096 == 0, f"{name}: layer does not begin on a page")
        check(self.start + end == len(self.data), f"tensors end at {end}, the file does not")
        check(list(self.tensors)[-1] == "header.xxh3_128", "last tensor is not header.xxh3_128")
        hashed = {n for n in self.tensors if not n.startswith(("padding.", "header."))}
        check(set(json.loads(self.metadata["checksums"])) == hashed, "checksums: other names than tensors")

    def raw(self, name):
        tensor = self.tensors[name]
        begin, stop = (self.start + x for x in tensor["data_offsets"])
        kind = {"U32": "<u4", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1", "I8": "i1"}[tensor["dtype"]]
        return self.data[begin:stop].view(kind).reshape(tensor["shape"])

    def floats(self, name, head):
        """One KV head of a BF16, F16 tensor as float32."""
        raw = np.asarray(self.raw(name)[head])
        if self.tensors[name]["dtype"] == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)


def decoded(index, layer, head, what, means):
    """Rows of one KV head as float32, and the scale of each (0: no codes)."""
    name = f"layers.{layer}.{what}"
    if name + ".scales" not in index.tensors:
        return index.floats(name, head), np.zeros(index.tensors[name]["shape"][1])
    raw = np.asarray(index.raw(name)[head])
    check((raw > -128).all(), f"{name}: head {head}: -128")
    scales = index.floats(name + ".scales", head)
    offsets = np.asarray(index.raw(means.rsplit(".", 1)[0] + ".offsets")[head]).astype(np.int64)
    base = np.repeat(index.floats(means, head), np.diff(offsets), axis=0)
    return base + scales[:, None] * raw.astype(np.float32), scales


def check_hashes(index):
    try:
        import xxhash
    except ImportError:
        return
    stored = index.raw("header.xxh3_128").tobytes()
    check(xxhash.xxh3_128_digest(index.data[:index.start].tobytes()) == stored, "hash of the header differs")
    for name, digest in json.loads(index.metadata["checksums"]).items():
        begin, stop = (index.start + x for x in index.tensors[name]["data_offsets"])
        check(xxhash.xxh3_64_hexdigest(index.data[begin:stop]) == digest, f"{name}: checksum differs")


def check_means(index, name, head, vectors, first, scales):
    """Stored means against the means of vectors[first[i]:first[i + 1]], with room for rounding."""
    stored = index.floats(name, head).astype(np.float64)
    sizes = np.diff(first)[:, None].astype(np.float64)
    wide = vectors.astype(np.float64)
    mean = np.add.reduceat(wide, first[:-1], axis=0) / sizes
    scale = np.add.reduceat(np.abs(wide), first[:-1], axis=0) / sizes + np.abs(mean)
    unit = 2.0**-8 if index.tensors[name]["dtype"] == "BF16" else 2.0**-10
    slack = np.add.reduceat(0.5 * scales.astype(np.float64), first[:-1])[:, None] / sizes
    off = np.abs(stored - mean) - (unit + sizes * 2.0**-24) * scale - 2.0**-23 - slack
    worst = np.unravel_index(np.argmax(off), off.shape)
    check(off[worst] <= 0, f"{name}: head {head}, cluster {worst[0]}, dimension {worst[1]}: "
                           f"found {stored[worst]}, mean {mean[worst]}")


def check_pages(index, layer, head, size):
    prefix, sink = f"layers.{layer}.", int(index.metadata["sink"])
    positions = np.asarray(index.raw(prefix + "positions")[head])
    check(np.array_equal(positions, np.arange(sink, sink + len(positions))),
          f"{prefix}positions: head {head}: not in token order from {sink} on")
    least, most = (index.floats(f"{prefix}pages.{bound}", head) for bound in ("min", "max"))
    check((least <= most).all(), f"{prefix}pages: head {head}: a minimum above its maximum")
    if prefix + "keys" in index.tensors:
        keys, first = index.floats(prefix + "keys", head), np.arange(0, len(positions), size)
        check(np.array_equal(np.minimum.reduceat(keys, first), least)
              and np.array_equal(np.maximum.reduceat(keys, first), most),
              f"{prefix}pages: head {head}: not the range of the keys")


def check_head(index, layer, head, clusters):
    meta = index.metadata
    n, sink, tail = (int(meta[k]) for k in ("tokens", "sink", "tail"))
    prefix = f"layers.{layer}."
    positions = np.asarray(index.raw(prefix + "positions")[head])
    check(np.array_equal(np.sort(positions), np.arange(sink, n - tail)),
          f"{prefix}positions: head {head}: not each of the tokens {sink} to {n - tail - 1} once")
    first = np.arange(len(positions) + 1)  # first slot of each child, from the finest level up
    for level in range(len(clusters), 0, -1):
        name = f"{prefix}level.{level}.offsets"
        offsets = np.asarray(index.raw(name)[head]).astype(np.int64)
        end = len(first) - 1
        good = offsets[0] == 0 and offsets[-1] == end and (np.diff(offsets) > 0).all()
        if not check(good, f"{name}: head {head}: does not rise from 0 to {end}, each cluster with something"):
            return
        first = first[offsets]
        for what, means in (("keys", "centroids"), ("values", "value_means")):
            mean_name = f"{prefix}level.{level}.{means}"
            if prefix + what not in index.tensors:
                continue
            if mean_name in index.tensors:
                rows, scales = decoded(index, layer, head, what, f"{prefix}level.{len(clusters)}.{means}")
                check_means(index, mean_name, head, rows, first, scales)
    for what, means in (("keys", "centroids"), ("values", "value_means")):
        if f"{prefix}{what}.scales" in index.tensors:
            rows, scales = decoded(index, layer, head, what, f"{prefix}level.{len(clusters)}.{means}")
            check(np.isfinite(rows).all() and (scales >= 0).all(), f"{prefix}{what}: head {head}: a bad scale")


def check_buckets(index, layer, head, slots):
    name = f"layers.{layer}.buckets.offsets"
    offsets = np.asarray(index.raw(name)[head]).astype(np.int64)
    if not check(offsets[0] == 0 and offsets[-1] == slots and (np.diff(offsets) >= 0).all(),
                 f"{name}: head {head}: does not go from 0 to {slots} without falling"):
        return
    positions = np.asarray(index.raw(f"layers.{layer}.positions")[head]).astype(np.int64)
    starts = np.isin(np.arange(1, slots), offsets)  # slots whose neighbour before is another bucket's
    check(((np.diff(positions) > 0) | starts).all(),
          f"layers.{layer}.positions: head {head}: a bucket that is not in token order")


def last_tokens(own, window, n, version):
    """Tokens at the end of the context that a layer without clusters stores."""
    if own.get("kind") in ("state", "shared", "none"):
        return 0
    if own.get("chunk"):
        return n % own["chunk"]
    return min(n, window - (version > 3)) if window else n


def check_layer(index, layer, policy):
    meta, prefix = index.metadata, f"layers.{layer}."
    model = json.loads(meta["model"])
    own = (model.get("geometry") or [None] * model["layers"])[layer] or {}
    heads, dim = (own.get(k, model[k]) for k in ("kv_heads", "head_dim"))
    value_dim = own.get("value_dim", dim)
    n, sink, tail, levels = (int(meta[k]) for k in ("tokens", "sink", "tail", "levels"))
    slots = 0 if policy["dense"] else policy.get("kept", n - sink - tail)
    exact = sink + tail if slots else last_tokens(own, policy["window"], n, int(meta["format_version"]))
    clusters = [index.tensors[f"{prefix}level.{k}.centroids"]["shape"][1]
                for k in range(1, levels + 1)] if slots else []
    size = int(meta["page_size"]) if meta["partition"] == "pages" else 0
    want = {}
    if slots and size:
        want["pages.min"] = want["pages.max"] = [heads, -(-slots // size), dim]
    if slots and meta["partition"] == "buckets":
        buckets, hidden = int(meta["buckets"]), int(meta["hidden"])
        want |= {"buckets.offsets": [heads, buckets + 1], "buckets.centroids": [heads, buckets, dim],
                 "buckets.hidden.weight": [heads, hidden, dim], "buckets.hidden.bias": [heads, hidden],
                 "buckets.output.weight": [heads, buckets, hidden], "buckets.output.bias": [heads, buckets]}
    for k, count in enumerate(clusters, 1):
        want[f"level.{k}.centroids"] = [heads, count, dim]
        want[f"level.{k}.offsets"] = [heads, count + 1]
        if meta["value_means"] == "true":
            want[f"level.{k}.value_means"] = [heads, count, value_dim]
    if slots:
        want["positions"] = [heads, slots]
        if meta.get("heavy_hitters") == "true":
            want["heavy"] = [heads, slots]
        rows = "16" if policy.get("rows") else meta.get("rows", "16")
        want["keys"], want["values"] = [heads, slots, dim], [heads, slots, value_dim]
        if rows != "16":
            want["keys.scales"] = want["values.scales"] = [heads, slots]
    if exact:
        want["exact.keys"], want["exact.values"] = [heads, exact, dim], [heads, exact, value_dim]
    found = {name[len(prefix):]: t["shape"] for name, t in index.tensors.items()
             if name.startswith(prefix) and ".key_codes" not in name}  # of older files
    state = {name for name in found if name.startswith("state.")}
    check(not state or own.get("kind") not in ("shared", "none"), f"{prefix[:-1]}: state in a layer without any")
    check(all(set(name[6:]) <= LETTERS and name[6:] for name in state), f"{prefix[:-1]}: a bad name in {state}")
    found = {name: shape for name, shape in found.items() if name not in state}
    if not check(found == want, f"{prefix[:-1]}: tensors {found}, expected {want}"):
        return
    for name in want:
        if index.tensors[prefix + name]["dtype"] not in ("U32", "U8", "I8"):
            for head in range(heads):
                check(np.isfinite(index.floats(prefix + name, head)).all(), f"{prefix}{name}: NaN or infinity")
    for head in range(heads if "heavy" in want else 0):
        order = np.asarray(index.raw(prefix + "heavy")[head])
        check(np.array_equal(np.sort(order), np.arange(slots)),
              f"{prefix}heavy: head {head}: not each of the slots below {slots} once")
    for head in range(heads if slots else 0):
        if meta["partition"] == "pruned":
            positions = np.asarray(index.raw(prefix + "positions")[head])
            check(len(np.unique(positions)) == slots and positions.min() >= sink and positions.max() < n - tail,
                  f"{prefix}positions: head {head}: not each of some tokens from {sink} to {n - tail - 1} once")
        elif size:
            check_pages(index, layer, head, size)
        else:
            check_head(index, layer, head, clusters)
            if meta["partition"] == "buckets":
                check_buckets(index, layer, head, slots)


def check_calibration(index):
    if int(index.metadata["levels"]) == 0:
        return
    thresholds = index.raw("calibration.thresholds").astype(np.float64)
    check(not np.isnan(thresholds).any() and (thresholds < np.inf).all(), "calibration.thresholds: NaN or infinity")
    check((thresholds[..., 1:] <= thresholds[..., :-1]).all(), "calibration.thresholds: they rise")
    check((index.raw("calibration.coarse") < np.inf).all(), "calibration.coarse: NaN or infinity")
    shares = index.raw("calibration.shares")
    check(((shares >= 0) & (shares <= 1)).all(), "calibration.shares: outside [0, 1]")


def check_file(path):
    """Fills `problems`; returns the number of tensors."""
    index = Index(path)
    index.check_container()
    if problems:  # the names and shapes below cannot be relied on
        return len(index.tensors)
    for layer, policy in enumerate(json.loads(index.metadata["layers"])):
        check_layer(index, layer, policy)
    check_calibration(index)
    check_hashes(index)
    return len(index.tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="+")
    arguments = parser.parse_args()
    code = 0
    for path in arguments.file:
        problems.clear()
        try:
            with np.errstate(invalid="ignore"):
                count = check_file(path)
        except (OSError, KeyError, IndexError, TypeError, ValueError, struct.error) as error:
            print(f"{path}: cannot be read: {type(error).__name__}: {error}")
            code = 2
            continue
        for problem in problems:
            print(f"{path}: {problem}")
        if problems:
            code = max(code, 1)
        else:
            print(f"{path}: {count} tensors, no problem found")
    return code


if __name__ == "__main__":
    sys.exit(main())
