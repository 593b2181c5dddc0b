"""Indexes, queries and attention in float64 to compare with."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sqz

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "tests/fuzz/seeds/sqz_file_fuzz"


@pytest.fixture
def index():
    """32 tokens, 1 layer, 1 head, head_dim 8, a tree of two levels."""
    with sqz.Index(SEEDS / "two_levels.sqz") as opened:
        yield opened


@pytest.fixture
def heads():
    """132 tokens, 2 layers, 4 query heads, 2 KV heads, head_dim 4, buckets."""
    with sqz.Index(SEEDS / "buckets.sqz") as opened:
        yield opened


@pytest.fixture
def folder(tmp_path):
    """A library of a.sqz, b.sqz and sub/c.sqz, with a link and a file of another model."""
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", "sub/c"):
        shutil.copy(SEEDS / "buckets.sqz", tmp_path / f"{name}.sqz")
    shutil.copy(SEEDS / "two_levels.sqz", tmp_path / "other.sqz")
    (tmp_path / "link.sqz").symlink_to(tmp_path / "a.sqz")
    return tmp_path


@pytest.fixture
def made(tmp_path):
    """6,000 tokens, 1 layer, 4 query heads, 2 KV heads, head_dim 64, by the sqz-bench of SQZ_BENCH."""
    bench = os.environ.get("SQZ_BENCH")
    if not bench:
        pytest.skip("SQZ_BENCH names no sqz-bench, which makes the index")
    path = tmp_path / "made.sqz"
    subprocess.run([bench, "attend", "--tokens=6000", "--heads=4", "--kv-heads=2", "--head-dim=64",
                    "--benchmark_filter=dense", "--save-index", path], check=True, capture_output=True)
    return path


def queries(info, tokens, seed=1, dtype=np.float32):
    shape = tokens, info.query_heads, info.head_dim
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def attention(keys, values, q, scale):
    """(out, lse) of q [tokens, query heads, dim] over keys and values [KV heads, keys, dim], in float64."""
    group = q.shape[1] // len(keys)
    out, lse = np.empty(q.shape), np.empty(q.shape[:2])
    for token, head in np.ndindex(*q.shape[:2]):
        logits = scale * keys[head // group] @ q[token, head].astype(np.float64)
        lse[token, head] = np.log(np.sum(np.exp(logits)))
        out[token, head] = np.exp(logits - lse[token, head]) @ values[head // group]
    return out, lse


class Stored:
    """A safetensors file read without the library."""

    def __init__(self, path):
        data = Path(path).read_bytes()
        size = int.from_bytes(data[:8], "little")
        self.header, self.data = json.loads(data[8:8 + size]), data[8 + size:]

    def tensor(self, name):
        """A BF16 or F16 tensor as float64."""
        begin, end = self.header[name]["data_offsets"]
        raw = np.frombuffer(self.data[begin:end], dtype=np.uint16)
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if self.header[name]["dtype"] == "BF16" else \
            raw.view(np.float16)
        return wide.astype(np.float64).reshape(self.header[name]["shape"])

    def keys_and_values(self, layer=0):
        """All of them, in any order: [KV heads, keys, dim] each."""
        return [np.concatenate([self.tensor(name) for name in (f"layers.{layer}.exact.{what}", f"layers.{layer}.{what}")
                                if name in self.header], axis=1) for what in ("keys", "values")]


def python(program, *arguments, **environment):
    """Runs a program in another interpreter that finds the same module and library."""
    folders = os.pathsep.join([str(Path(sqz.__file__).parents[1]), str(Path(__file__).parent)])
    return subprocess.run([sys.executable, "-c", program, *arguments], env=os.environ | {"PYTHONPATH": folders} | environment,
                          capture_output=True, text=True, timeout=120, check=False)
