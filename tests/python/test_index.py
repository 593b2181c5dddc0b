"""Opening, describing and checking an index."""

import json

import pytest

import sqz
from conftest import SEEDS


def test_info_is_what_the_file_says(index):
    info = index.info
    assert (info.tokens, info.sink, info.tail, info.layers, info.levels) == (32, 2, 6, 1, 2)
    assert (info.query_heads, info.kv_heads, info.head_dim) == (1, 1, 8)
    assert info.file_bytes == (SEEDS / "two_levels.sqz").stat().st_size
    assert (info.producer, info.architecture, info.dtype) == ("sqz 0.2.0", "LlamaForCausalLM", "bfloat16")
    assert info.attention_scale == pytest.approx(8 ** -0.5)
    assert len(info.model_fingerprint) == 16 and int(info.tokenizer_hash, 16) == 0xaa
    assert repr(index) == f"<sqz.Index {SEEDS / 'two_levels.sqz'}: 32 tokens, 1 layers, kmeans>"
    for name, partition, page_size in ("pages", "pages", 8), ("buckets", "buckets", 0), ("one_level", "kmeans", 0):
        info = sqz.Index(SEEDS / f"{name}.sqz").info
        assert (info.partition, info.page_size) == (partition, page_size)


def test_read_into_memory(index, tmp_path):
    copy = tmp_path / "copy.sqz"
    copy.write_bytes((SEEDS / "two_levels.sqz").read_bytes())
    with sqz.Index(copy, read=True) as other:
        copy.unlink()
        other.verify()
        assert other.info.tokens_hash == index.info.tokens_hash


def test_verify_names_what_is_broken(index, tmp_path):
    index.verify()
    assert sqz.Index(SEEDS / "two_levels.sqz", verify=True).info == index.info
    data = bytearray((SEEDS / "two_levels.sqz").read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + json.loads(data[8:8 + size])["layers.0.values"]["data_offsets"][0]] ^= 1
    broken = tmp_path / "broken.sqz"
    broken.write_bytes(data)
    sentence = 'broken.sqz.*"layers.0.values": XXH3-64: found'
    with sqz.Index(broken) as other, pytest.raises(sqz.Error, match=sentence) as raised:
        other.verify()
    assert raised.value.status == 4
    with pytest.raises(sqz.Error, match=sentence):
        sqz.Index(broken, verify=True)


def test_files_that_are_no_index(tmp_path):
    with pytest.raises(sqz.Error, match="nowhere.sqz") as raised:
        sqz.Index(tmp_path / "nowhere.sqz")
    assert raised.value.status == 2
    (tmp_path / "text.sqz").write_text("not an index, but a text that is long enough to have a header")
    with pytest.raises(sqz.Error, match="text.sqz"):
        sqz.Index(tmp_path / "text.sqz")
    with pytest.raises(TypeError):
        sqz.Index(None)
    with pytest.raises(ValueError, match="path: found a zero byte"):
        sqz.Index(f"{SEEDS / 'two_levels.sqz'}\0.sqz")


def test_a_closed_index_says_so(index):
    session = sqz.Session(index, selector="dense")
    index.close()
    index.close()
    for use in index.verify, lambda: sqz.Session(index, selector="dense"):
        with pytest.raises(sqz.Error, match="found a closed index"):
            use()
    assert index.info.tokens == 32 and repr(index).endswith("closed>")
    assert session.stats().selections == 0  # sessions keep what they need


def test_no_gpu_is_said(index):
    """A GPU that no machine has, so that it holds with and without one."""
    with pytest.raises(sqz.Error) as raised:
        index.upload("cuda:99")
    assert raised.value.status in (1, 5)
    with pytest.raises(ValueError, match="device: found 'cpu', expected a GPU"):
        index.upload("cpu")
    with pytest.raises(ValueError, match="kv_heads: found"):
        index.upload(0, kv_heads=(0, 0))
