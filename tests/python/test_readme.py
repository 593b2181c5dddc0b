"""The Python of README.md and docs/python.md runs."""

import re

import pytest

from conftest import ROOT, SEEDS, python


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_readme():
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    if not (ROOT / "build/demo/book.sqz").exists():
        pytest.skip("scripts/demo has not made build/demo/book.sqz")
    (block,) = (block for block in blocks("README.md") if "import sqz" in block)
    assert len(block.splitlines()) <= 10
    ran = python(f"import os; os.chdir({str(ROOT)!r})\n" + block)
    answer, read = ran.stdout.split()[0], float(ran.stdout.split()[-1])
    assert ran.returncode == 0 and answer.startswith("4821307"), ran.stdout + ran.stderr
    assert read < 0.2


@pytest.mark.parametrize("block", [block for block in blocks("docs/python.md") if "import sqz\n" in block])
def test_python_md(block):
    program, paths = re.subn(r'"[\w/]+\.sqz"', repr(str(SEEDS / "two_levels.sqz")), block)
    ran = python(program)
    assert (paths, ran.returncode, ran.stderr) == (1, 0, "")
