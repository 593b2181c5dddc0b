"""python -m sqz: the commands that need no model."""

import json

import pytest

import sqz
from conftest import SEEDS, Stored, python
from sqz import __main__ as command_line


def run(capsys, *arguments):
    code = command_line.main([str(one) for one in arguments])
    return code, *capsys.readouterr()


def test_info_and_verify(capsys):
    index = SEEDS / "two_levels.sqz"
    code, out, _ = run(capsys, "info", index, "--json")
    fields = json.loads(out)
    assert code == 0 and fields["tokens"] == sqz.Index(index).info.tokens == int(fields["metadata"]["tokens"])
    code, out, _ = run(capsys, "info", index)
    assert code == 0 and "fingerprint" in out and "metadata" not in out
    code, out, _ = run(capsys, "verify", index, "--json")
    assert code == 0 and json.loads(out) == {"path": str(index), "ok": True}


def test_damage_is_found(tmp_path, capsys):
    index = SEEDS / "two_levels.sqz"
    data, stored = bytearray(index.read_bytes()), Stored(index)
    data[len(data) - len(stored.data) + stored.header["layers.0.keys"]["data_offsets"][0]] ^= 1
    (tmp_path / "a.sqz").write_bytes(data)
    code, out, error = run(capsys, "verify", tmp_path / "a.sqz", "--json")
    assert code == 3 and not out and "layers.0.keys" in error


def test_compress(made, tmp_path, capsys):
    code, out, _ = run(capsys, "compress", made, "-o", tmp_path / "b.sqz", "--rows", "q8", "--json")
    assert code == 0 and json.loads(out)["bytes"] == (tmp_path / "b.sqz").stat().st_size
    sqz.Index(tmp_path / "b.sqz").verify()
    code, _, error = run(capsys, "compress", made, "-o", tmp_path / "b.sqz")
    assert code == 1 and "python -m sqz compress: " in error and "b.sqz" in error


def test_mistakes(tmp_path, capsys):
    code, _, error = run(capsys, "info", tmp_path / "none.sqz")
    assert (code, error) == (3, f"python -m sqz info: {tmp_path}/none.sqz: open: No such file or directory\n")
    code, _, error = run(capsys, "build", tmp_path / "none.md", "--model", tmp_path, "-o", tmp_path / "c.sqz")
    assert code == 3 and "none.md" in error  # without the model
    with pytest.raises(SystemExit):
        run(capsys, "explain")
    assert "invalid choice: 'explain'" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "found"), [
    (b'{"prompt": "a"}\n{"text": "b"}\n', "line 2: prompt: found None, expected a text"),
    (b"a\n", "line 1: found no JSON: "), (b'["a"]', "line 1: found '[\"a\"]', expected a JSON object"),
    (b"\n", "prompts: found none"), (b"a\xff", "text: not valid UTF-8 at byte 1")])
def test_files_that_are_wrong_are_named(content, found, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_bytes(content)
    code, _, error = run(capsys, "calibrate", "a.sqz", "--model", tmp_path, "--prompts", tmp_path / "p.jsonl")
    assert code == 3 and f"{tmp_path}/p.jsonl: {found}" in error
    (tmp_path / "chat.json").write_text("[1]", encoding="utf-8")
    chat = tmp_path / "chat.json"
    code, _, error = run(capsys, "build", tmp_path, "--model", tmp_path, "-o", "a.sqz", "--chat", chat)
    assert code == 3 and f"{chat}: found '[1]', expected a JSON object" in error


def test_models_and_devices_that_are_not_there(tmp_path, capsys):
    pytest.importorskip("transformers")
    build = "build", SEEDS, "-o", tmp_path / "a.sqz", "--model"
    code, _, error = run(capsys, *build, tmp_path / "none")
    assert code == 3 and f"No such file or directory: '{tmp_path}/none'" in error
    code, _, error = run(capsys, *build, tmp_path, "--device", "cpus")
    assert code == 3 and "--device cpus: " in error


def test_as_a_module():
    ran = python(f"import runpy, sys; sys.argv[1:] = ['verify', {str(SEEDS / 'two_levels.sqz')!r}]; "
                 "runpy.run_module('sqz', run_name='__main__')")
    assert ran.returncode == 0, ran.stderr
    assert "ok" in ran.stdout
