"""The Python examples run with the small model of the tree, and answer as they say."""

import json
import os
import subprocess
import sys

import pytest

import sqz
from transformers_support import ROOT

EXAMPLES = ROOT / "examples"


def run(*command):
    """Exit code 0, and the text that the program printed."""
    environment = {"PYTHONPATH": os.path.dirname(os.path.dirname(sqz.__file__)), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *map(str, command)], cwd=EXAMPLES, capture_output=True, text=True, timeout=600,
                         env=os.environ | environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_notebook():
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    facts = [line.split() for line in run("-c", program).splitlines() if " dense " in line]
    assert len(facts) == 10
    dense, sparse = (sum(fact[place].startswith(fact[1]) for fact in facts) for place in (3, 5))
    assert dense >= 6 and sparse >= dense - 2


def test_the_benchmark():
    rows = [json.loads(line) for line in run("benchmarks/shared_context.py", "--tokens", 5000, "--questions", 3,
                                             "--json").splitlines()]
    found = {(row["task"], row["row"]): row["found"][0] for row in rows}
    assert len(rows) == 12 and all(row["questions"] == 3 for row in rows)
    assert found["needle", "prompt"] == found["needle", "dense"] > 0
    assert all(row["read"] < 0.2 for row in rows if row["row"] == "0.125")


def test_lm_eval():
    pytest.importorskip("lm_eval")
    alone, dense, sparse = run("lm_eval/fixed_context.py", "--limit", 6).splitlines()[-3:]
    assert "6 of 6 answers" in dense and "acc 1.000" in alone, (alone, dense)
    assert float(sparse.split("acc ")[1].split()[0]) >= 0.8
