"""python/sqz on the CPU, against attention in float64. Arguments: the library, the module's folder,
an index, and sqz-bench, which makes one with several heads, where it was built."""

import ctypes
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    sys.exit(77)  # skipped
if not hasattr(np.ndarray, "__dlpack__"):
    sys.exit(77)

os.environ["SQZ_LIBRARY"], folder, path = sys.argv[1:4]
sys.path.insert(0, folder)
import sqz  # noqa: E402


def stored(name, header, data):
    """A BF16 or F16 tensor of the safetensors file as float64."""
    begin, end = header[name]["data_offsets"]
    raw = np.frombuffer(data[begin:end], dtype=np.uint16)
    if header[name]["dtype"] == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view(np.float16)
    return values.astype(np.float64).reshape(header[name]["shape"])


def select_is_what_is_read(program):
    """select() on an index with two KV heads that want different keys, beside what attend() counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "made.sqz")
        subprocess.run([program, "attend", "--tokens", "6000", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                        "--repeat", "1", "--no-torch", "-q", "--save-index", path], check=True, stdout=subprocess.DEVNULL)
        index = sqz.Index(path)
        session = sqz.Session(index, keep=0.2, levels=1)
        q = np.random.default_rng(2).standard_normal((1, 4, 16)).astype(np.float32)
        heads = session.select(0, q)
        lengths = [sum(length for _, length in runs) for runs in heads]
        session.attend(0, q, np.empty_like(q), np.empty(q.shape[:2], np.float32))
        assert len(heads) == 2 and heads[0] != heads[1], heads
        assert len(heads[0]) > 1, heads
        assert sum(lengths) == session.stats().keys_read, (lengths, session.stats().keys_read)


def main():
    import json
    index = sqz.Index(path)
    info = index.describe()
    with open(path, "rb") as file:
        data = file.read()
    size = int.from_bytes(data[:8], "little")
    header, data = json.loads(data[8:8 + size]), data[8 + size:]
    keys, values = (np.concatenate([stored(f"layers.0.exact.{what}", header, data)] +
                                   ([stored(f"layers.0.{what}", header, data)]
                                    if f"layers.0.{what}" in header else []), axis=1) for what in ("keys", "values"))
    session = sqz.Session(index, selector=1)  # dense
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, info.query_heads, info.head_dim)).astype(np.float32)
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)
    session.attend(0, q, out, lse, indptr=[0, 1, 3])
    group = info.query_heads // info.kv_heads
    for token in range(q.shape[0]):
        for head in range(info.query_heads):
            logits = info.attention_scale * keys[head // group] @ q[token, head].astype(np.float64)
            expected = np.log(np.sum(np.exp(logits)))
            assert abs(lse[token, head] - expected) < 1e-4, (token, head, lse[token, head], expected)
            mean = np.exp(logits - expected) @ values[head // group]
            assert np.allclose(out[token, head], mean, atol=1e-4), (token, head)
    assert session.stats().delivered_budget == 1
    session.reset_stats()
    assert session.stats().selections == 0
    # Everything is one run a KV head; part of it is fewer keys, in ascending runs.
    slots = header["layers.0.keys"]["shape"][1] if "layers.0.keys" in header else 0
    assert session.select(0, q[:1]) == [[(0, slots)]] * info.kv_heads
    sparse = sqz.Session(index, thresholds=(ctypes.c_double * 1)(0.05), levels=1)
    for runs in sparse.select(0, q[:1]):
        assert 0 < sum(length for _, length in runs) < slots, runs
        assert all(a[0] + a[1] < b[0] for a, b in zip(runs, runs[1:])), runs
    try:
        session.attend(info.layers, q, out, lse)
        raise AssertionError("a layer that is not there was served")
    except sqz.Error as error:
        assert error.status == 1 and "layer" in str(error), error
    if len(sys.argv) > 4:
        select_is_what_is_read(sys.argv[4])


main()
