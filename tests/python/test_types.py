"""The module's annotations hold."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from conftest import ROOT


def test_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    # Before 1.19, mypy knows less of decorators and nested functions: of the subpackages it is not asked.
    old = tuple(map(int, version("mypy").split(".")[:2])) < (1, 19)
    files = sorted(map(str, (ROOT / "python/sqz").glob("*.py")))
    package = ["--follow-imports=silent", *files] if old else ["--package", "sqz"]
    checked = subprocess.run([sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}",
                              f"--cache-dir={tmp_path}", *package], cwd=ROOT / "python", capture_output=True, text=True,
                             check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
