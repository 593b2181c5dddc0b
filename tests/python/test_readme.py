"""The Python of README.md and docs/python.md runs."""

import re

import pytest

from conftest import ROOT, SEEDS, python

TEXTS = [(name, number, block) for name in ("README.md", "docs/python.md")
         for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL))
         if "import sqz\n" in block]


def test_there_are_some():
    assert {name for name, _, _ in TEXTS} == {"README.md", "docs/python.md"}


@pytest.mark.parametrize("name, number, block", TEXTS, ids=[f"{name}-{number}" for name, number, _ in TEXTS])
def test_it_runs(name, number, block):
    program, paths = re.subn(r'"[\w/]+\.sqz"', repr(str(SEEDS / "two_levels.sqz")), block)
    ran = python(program)
    assert (paths, ran.returncode, ran.stderr) == (1, 0, "")
    if name == "README.md":
        assert len(block.splitlines()) <= 10
        assert ran.stdout == "32 tokens of context, 100.0% of their bytes read\n"
