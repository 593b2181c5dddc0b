"""sqz.ray with a Ray that runs tasks at once, and a tool that prints events."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

import sqz.ray

TOOL = r"""#!/usr/bin/env python3
import os, sys
shard = sys.argv[sys.argv.index("--shard") + 1]
if shard == "1/4":
    sys.exit(b"no model \xff".decode(errors="surrogateescape"))
if shard == "2/4":
    os.kill(os.getpid(), 9)
if shard == "3/4":
    print("no JSON")
    sys.exit()
for line in ('{"event": "document", "key": "a\u2028\u0085", "state": "built"}',
             '{"event": "document", "key": "b\udcff", "state": "failed", "message": "gone"}', '{"event": "result"}'):
    sys.stdout.buffer.write(line.encode(errors="surrogateescape") + b"\n")
"""


@pytest.fixture
def fake(monkeypatch):
    def remote(**_):
        return lambda function: SimpleNamespace(remote=lambda *arguments: lambda: function(*arguments))

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        remote=remote, get=lambda task: task(), wait=lambda tasks, num_returns: (tasks[:1], tasks[1:]),
        is_initialized=lambda: True))


def test_what_fails_does_not_end_the_run(fake, tmp_path, monkeypatch):
    tool, manifest = tmp_path / "tool", tmp_path / "corpus.jsonl"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    manifest.write_bytes(json.dumps({"key": "a"}).encode() + b"\n{\xff}\n")
    options = ["build", "--manifest", str(manifest), "-o", str(tmp_path / "out"), "--shards", "4", "--tool", str(tool)]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert sqz.ray.main(options) == 1
    said = sys.stderr.getvalue()
    for text in "no model", "killed by signal 9", "Expecting value", "b\udcff: gone":
        assert text in said
    assert "4 of 4 shards, 1 documents built, 0 there before, 4 failed" in said


@pytest.mark.parametrize(("options", "message"), [
    (["--shards", "-3"], "--shards: found -3, expected 1 or more"), (["--manifest", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--cpus", "0"], "--cpus 0 --gpus 0: expected one of them above 0")])
def test_mistakes(fake, tmp_path, capsys, options, message):
    sys.modules["ray"].nodes = list
    (tmp_path / "corpus.jsonl").write_text("{}")
    assert sqz.ray.main(["build", "--manifest", str(tmp_path / "corpus.jsonl"), "-o", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
