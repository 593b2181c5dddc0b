"""python -m sqz.report. matplotlib draws if it is installed."""

import json
import re

import pytest

from sqz import report

PROFILE = {"cosine": [.5, .9, .8], "cosine_error": [.01, 0, 0], "group": [0, 2, 2], "budget": [60, 20, 10],
           "uniform_budget": 30}
INDEX = {"event": "result", "path": "a.sqz", "bytes": 2e6, "fingerprint": "f", "clusters": [80, 400],
         "model": {"architecture": "Llama", "layers": 4, "query_heads": 4, "kv_heads": 2, "head_dim": 32}}


def row(selector="squeezed", value=.75, asked=.125, task="needle1", **more):
    return {"task": task, "tokens": 8000, "selector": selector, "value": value, "stderr": .1,
            "budget": {"asked": asked, "delivered": asked + .005}, "keep": {"asked": .1, "delivered": .1}} | more


def rows(*rows):
    return {"event": "result", "rows": rows}


def write(path, *events):
    path.write_text("\n".join(json.dumps(event) for event in events) + "\n")
    return str(path)


def test_leads_with_what_is_read_saved_and_lost(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "svg_of", lambda plots: drawn.extend(plots) or "<?xml?><svg></svg>")
    lost = {"difference": {"value": -.125, "stderr": .05}}
    measured = {"measured": {"allocations": [{"name": "<all alike>", "loss": 3.1}]}}
    files = [write(tmp_path / "i.json", INDEX), write(tmp_path / "l.json", PROFILE | measured), write(
        tmp_path / "e.jsonl", {"event": "pass", "rows": []}, rows(
            row("dense", .875), row(asked=.25, value=.8), row(levels=2, rule="budget", **lost), row("quest", value=.5),
            {"task": "needle1", "tokens": 8000, "selector": "h2o", "budget": {"asked": .1}, "skipped": "no order"}))]
    assert report.main([*files, "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    lead = re.search("<p class=lead>(.*)</p>", page)[1]
    for text in ("at budget 0.125 squeezed reads 13.0%", "saves 7 MB", "0.75 ± 0.1", "-0.12 ± 0.05", "it is 0.875"):
        assert text in lead
    for text in ("Index a.sqz", "[80, 400]", "Layer profile", "&lt;all alike&gt;"):
        assert text in page
    assert not re.search(r"(src|href)=", page)
    series = {plot.title: plot.series for plot in drawn}
    assert series["One needle, 8,000 tokens"]["squeezed, 2 levels, rule budget"] == [(.13, .75, .1)]
    assert series["Cosine by layer"] == {"group 0": [(0, .5, .01)], "group 2": [(1, .9, 0), (2, .8, 0)]}


@pytest.mark.parametrize("event, message", [
    (rows(row(value="much")), "line 1: rows[0]: value: found \"much\", expected a number"),
    (rows(row(), row(budget={"asked": .1})), "line 1: rows[1]: budget.delivered: found null, expected a number"),
    (PROFILE | {"group": [0]}, "line 1: group: found [0], expected 3 numbers"),
    ([1], "line 1: JSON: found \"[1]\", expected one object a line"),
    (rows(row(value=10**400)), "line 1: rows[0]: value: found 1000"),
    (rows(row(on=["a"])), "line 1: rows[0]: on: found [\"a\"], expected a text"),
    ({"event": "log"}, "lines: found \"no result\", expected a layer profile")])
def test_bad_input_is_named(tmp_path, capsys, monkeypatch, event, message):
    monkeypatch.setattr(report, "svg_of", lambda plots: "<svg></svg>")
    file = write(tmp_path / "bad.json", event)
    assert report.main([file, "-o", str(tmp_path / "r.html")]) == 2
    assert f"{file}: {message}" in capsys.readouterr().err
    assert report.main([file, "-o", file]) == 2  # not over its input
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "e.jsonl", rows(row(), row(asked=.5)))
    assert report.main([file, "-o", str(tmp_path / "f.svg")]) == 0
    assert "share of the needles found" in (tmp_path / "f.svg").read_text()
