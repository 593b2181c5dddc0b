"""The module's annotations hold."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from conftest import ROOT


def test_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text("import numpy as np\nimport sqz\n"
                    "with sqz.Index('a.sqz') as index, sqz.Session(index, budget=0.125, device='cuda:1') as session:\n"
                    "    q = np.zeros((1, index.info.query_heads, index.info.head_dim), np.float32)\n"
                    "    out, lse = session.attend(0, q, indptr=[0, 1], positions=np.array([index.info.tokens]))\n"
                    "    share: float = session.stats().delivered_budget\n")
    # Before 1.11, errors have other names, and what torch would tell is not there.
    old = tuple(map(int, version("mypy").split(".")[:2])) < (1, 11)
    package = sorted(map(str, (ROOT / "python/sqz").glob("*.py"))) if old else ["--package", "sqz"]
    for what in (package, [str(user)]):
        checked = subprocess.run([sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}",
                                  f"--cache-dir={tmp_path}", *what], cwd=ROOT / "python", capture_output=True,
                                 text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
