"""Opening, describing and checking an index."""

import json

import numpy as np
import pytest

import sqz
from conftest import SEEDS, Stored, attention, queries


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


def test_layers_of_every_kind():
    with sqz.Index(SEEDS / "layers.sqz") as index:
        assert [layer.kind for layer in index.layers] == ["full", "recent", "state", "shared", "recent", "none"]
        assert index.layers[4] == sqz.Layer("recent", 8, 4, 4, 5, 0, 10, 0.75, None)
        assert index.layers[1].window == 9 and index.layers[3].of == 0 and index.layers[2].query_heads == 0
        assert not index.info.composes
        state = index.state(2)
        assert state["steps"].tolist() == [47, -1] and tuple(state["conv"].shape) == (2, 3)
        assert tuple(index.state(0)["ssm"].shape) == (1, 3) and index.state(1) == {}
        session, q = sqz.Session(index, selector="dense"), queries(index.info, 2)
        keys, values = Stored(index.info.path).keys_and_values(1)
        out, lse = session.attend(1, q, positions=[47, 60])  # 60 is behind the window
        expected_out, expected_lse = attention(keys, values, q, index.info.attention_scale)
        np.testing.assert_allclose(out[0], expected_out[0], atol=1e-4)
        np.testing.assert_allclose(lse[0], expected_lse[0], atol=1e-4)
        assert np.isneginf(lse[1]).all() and not out[1].any()
        np.testing.assert_array_equal(session.attend(3, q)[0], session.attend(0, q)[0])
        assert session.attend(0, q)[0].shape == (2, 4, 6)
        with pytest.raises(sqz.Error, match="layer: found 2, expected one that has keys"):
            session.attend(2, q)
        with pytest.raises(sqz.Error, match="contexts.*a layer is not full"):
            sqz.Session(index, selector="dense", max_contexts=2).attend(0, q, contexts=[[sqz.Context(0, offset=9)]])
    assert state["steps"].tolist() == [47, -1]  # of a closed index


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
