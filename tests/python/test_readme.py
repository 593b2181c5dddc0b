"""The Python of README.md and docs/python.md runs."""

import re
import subprocess

import pytest

from conftest import ROOT, SEEDS, python


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_readme(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    (block,) = blocks("README.md")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "book.txt").write_bytes(subprocess.check_output([ROOT / "examples/texts/plant", "30000"]))
    ran = python(f"import os; os.chdir({str(tmp_path)!r})\n" + block, OMP_NUM_THREADS="1")
    answer, read = ran.stdout.split()[0], float(ran.stdout.split()[-1])
    assert ran.returncode == 0 and answer.startswith("9350264"), ran.stdout + ran.stderr
    assert read < 0.2


@pytest.mark.parametrize("block", [block for block in blocks("docs/python.md") if "import sqz\n" in block])
def test_python_md(block):
    program, paths = re.subn(r'"[\w/]+\.sqz"', repr(str(SEEDS / "two_levels.sqz")), block)
    ran = python(program)
    assert (paths, ran.returncode, ran.stderr) == (1, 0, "")
