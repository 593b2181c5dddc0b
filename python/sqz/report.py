"""Draws results of sqz's tools as one HTML page, or as an SVG figure. Needs: pip install '.[report]' in the checkout.

    sqz-index info manual.sqz --json > index.json
    sqz-eval --model MODEL --text manual/ --tokens 16000 --budget 0.0625,0.125,0.25 --json > eval.jsonl
    python -m sqz.report index.json eval.jsonl layers.json -o report.html
    python -m sqz.report eval.jsonl -o figure.svg

A FILE is a layer profile of sqz-profile-layers, or the output of sqz-eval or sqz-index info with --json. The page loads
nothing else. Results of sqz-eval are drawn together, whichever files they come from. A figure has these drawings alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import io
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Event = dict[str, Any]  # a line of an input; "place" is its file and line
TASKS = {"needle1": ("One needle", "share of the needles found"), "loss": ("Loss", "loss in nats a token"),
         "error": ("Error of the attention output", "error relative to dense attention"),
         "recall": ("Recalled attention mass", "recalled share of the attention")}
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#b5679a", "#a67c00", "#2f8fc4", "#8a8a00", "#555555"]
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }"""


class InputError(Exception):
    def __init__(self, place: str, field: str, found: object, expected: str) -> None:
        super().__init__(f"{place}: {field}: found {json.dumps(found)[:60]}, expected {expected}")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (
        abs(value) <= sys.float_info.max)


def member(event: Event, path: str, expected: str = "", right: Callable[[Any], bool] = lambda value: True) -> Any:
    """The member at `path`, e.g. "budget.asked"; None if there is none."""
    value: Any = event
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not right(value):
        raise InputError(event["place"], path, value, expected)
    return value


def number(event: Event, path: str) -> float:
    return float(member(event, path, "a number", is_number))


def numbers(event: Event, path: str, count: int | None = None) -> list[float]:
    values: list[float] = member(event, path, f"{count or 'an array of'} numbers", lambda values: isinstance(
        values, list) and count in (None, len(values)) and all(map(is_number, values)))
    return values


def objects(event: Event, path: str) -> list[Event]:
    values: list[Event] = member(event, path, "an array of objects", lambda values: isinstance(
        values, list) and all(isinstance(value, dict) for value in values))
    return values


def text(event: Event, path: str) -> str:
    return str(member(event, path, "a text", lambda value: isinstance(value, str)))


@dataclasses.dataclass
class Plot:
    """Points of one subject, a series by name."""

    title: str
    x: str
    y: str
    line: str = "-"
    series: dict[str, list[tuple[float, float, float]]] = dataclasses.field(default_factory=dict)
    dense: float | None = None

    def add(self, name: str, x: float, y: float, error: float = 0) -> None:
        self.series.setdefault(name, []).append((x, y, error))

    def draw(self, axes: Any) -> None:
        for i, (name, points) in enumerate(self.series.items()):
            x, y, error = zip(*sorted(points))
            # The marks of a series are its own: lines may lie on each other.
            axes.errorbar(x, y, error if any(error) else None, fmt="os^Dv*Px"[i % 8] + self.line,
                          color=COLOURS[i % 8], capsize=3, markersize=5, alpha=.85, label=name)
        if self.dense is not None:
            axes.axhline(self.dense, linestyle="--", color="gray", label=f"dense: {self.dense:.4g}")
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -.16), ncols=2, frameon=False, fontsize="small")


def svg_of(plots: Sequence[Plot]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sqz"}):
        figure = Figure(figsize=(7.5, 4.2 * len(plots)), layout="constrained")
        for plot, axes in zip(plots, figure.subplots(len(plots), 1, squeeze=False)[:, 0]):
            plot.draw(axes)
        figure.savefig(out := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def setting_of(row: Event) -> str:
    """The line of a plot that a row belongs to: "squeezed, 2 levels, rule budget"."""
    texts = {"rows": "rows {}", "levels": "{} levels", "rule": "rule {}",
             "dense_layers": "dense layers {}", "layers": "layers {}"}
    usual = {"levels": 0, "layers": "uniform"}
    return ", ".join([text(row, "selector"), *(form.format(row[name]) for name, form in texts.items()
                                               if row.get(name, usual.get(name)) != usual.get(name))])


class Eval:
    """The rows of sqz-eval about one task at one length."""

    def __init__(self, task: str, on: str, tokens: float) -> None:
        title, self.value = TASKS.get(task, (task, "value"))
        self.task, self.tokens, self.title = task, tokens, f"{title}{on and ' on '}{on}, {tokens:,.0f} tokens"
        self.rows: list[Event] = []
        self.dense: float | None = None

    def plot(self) -> Plot:
        above = self.task == "loss" and all("difference" in row for row in self.rows)
        of, what = ("keep", "clustered keys") if self.task == "recall" else ("budget", "bytes of the context")
        plot = Plot(self.title, f"share of the {what} that was read",
                    "loss above dense attention in nats a token" if above else self.value)
        at = "difference." if above else ""
        for row in self.rows:
            plot.add(setting_of(row), number(row, of + ".delivered"), number(row, at + "value"),
                     number(row, at + "stderr"))
        if self.dense is not None:
            plot.dense = 0 if above else self.dense
        return plot

    def lead(self, token_bytes: float) -> str:
        """Says how much the first selector reads, saves and loses at the budget that is nearest to an eighth."""
        first = [row for row in self.rows if row["selector"] == self.rows[0]["selector"]]
        row = min(first, key=lambda row: abs(number(row, "budget.asked") - .125))
        read = number(row, "budget.delivered")
        saved = f"{(1 - read) * self.tokens * token_bytes / 1e6:,.0f} MB" if token_bytes else f"{1 - read:.1%}"
        beside = f"; with dense attention it is {self.dense:.3g}" if self.dense is not None else ""
        if "difference" in row:
            beside += f", {number(row, 'difference.value'):+.2g} ± {number(row, 'difference.stderr'):.2g} beside it"
        return (f"{self.title}: at budget {number(row, 'budget.asked'):.3g} {row['selector']} reads {read:.1%} of the "
                f"context's bytes and saves {saved}. Its {self.value} is {number(row, 'value'):.3g} ± "
                f"{number(row, 'stderr'):.2g}{beside}.")

    def table(self) -> Iterable[Sequence[object]]:
        names = ["budget.asked", "budget.delivered", "keep.delivered", "value", "stderr"]
        for row in self.rows:
            more = ["difference.value", "difference.stderr"] if "difference" in row else []
            yield [setting_of(row), *(number(row, name) for name in names + more)]


class Report:
    def __init__(self) -> None:
        self.body = ""
        self.evals: dict[tuple[str, str, float], Eval] = {}
        self.token_bytes = 0.0

    def add(self, tag: str, content: str) -> None:
        self.body += f"<{tag}>{html.escape(content)}</{tag.split()[0]}>\n"

    def figure(self, plot: Plot, caption: str) -> None:
        svg = svg_of([plot])
        self.body += f"<figure>{svg[svg.index('<svg'):]}<figcaption>{html.escape(caption)}</figcaption></figure>\n"

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.body += "<table>"
        for tag, row in [("th", head), *(("td", row) for row in rows)]:
            cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row)
            self.body += f"<tr>{''.join(f'<{tag}>{html.escape(x)}</{tag}>' for x in cells)}</tr>\n"
        self.body += "</table>\n"

    def read(self, path: str) -> None:
        known = False
        for line_number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), 1):
            try:
                event: Event = dict(json.loads(line or "{}"), place=f"{path}: line {line_number}")
            except (RecursionError, TypeError, ValueError):
                raise InputError(f"{path}: line {line_number}", "JSON", line, "one object a line") from None
            if "cosine" in event:
                self.add_profile(event, path)
            elif "fingerprint" in event and "clusters" in event:
                self.add_index(event)
            elif event.get("event") == "result" and "rows" in event:
                self.add_rows(event)
            else:
                continue
            known = True
        if not known:
            raise InputError(path, "lines", "no result",
                             "a layer profile, or the output of sqz-eval or sqz-index info with --json")

    def add_rows(self, event: Event) -> None:
        for i, row in enumerate(objects(event, "rows")):
            row["place"] = f"{event['place']}: rows[{i}]"
            key = text(row, "task"), text(row, "on") if "on" in row else "", number(row, "tokens")
            group = self.evals.setdefault(key, Eval(*key))
            if text(row, "selector") == "dense":
                group.dense = number(row, "value")
            elif "skipped" not in row:
                group.rows.append(row)

    def add_index(self, index: Event) -> None:
        shape = (number(index, "model." + name) for name in ("layers", "kv_heads", "head_dim"))
        self.token_bytes = 4 * math.prod(shape)
        self.add("h2", f"Index {text(index, 'path')}")
        known = [(name, value) for name, value in index.items() if isinstance(value, (int, float, str))]
        self.table(["", ""], [*known, ("clusters a KV head", numbers(index, "clusters"))])

    def add_profile(self, profile: Event, path: str) -> None:
        cosine = numbers(profile, "cosine")
        error, group, budget = (numbers(profile, name, len(cosine)) for name in ("cosine_error", "group", "budget"))
        plot = Plot("Cosine by layer", "layer", "cosine", line="")
        for layer, x in enumerate(cosine):
            plot.add(f"group {group[layer]:.0f}", layer, x, error[layer])
        self.add("h2", f"Layer profile {path}")
        self.figure(plot, "Cosine of the hidden state before and after attention: near 1, attention changed little.")
        self.table(["layer", "cosine", "±", "group", "budget"], zip(range(len(cosine)), cosine, error, group, budget))
        if "measured" in profile:  # by sqz-profile-layers --allocate measured
            columns = ("name", "loss", "gain", "gain_stderr", "delivered")
            rows = objects(profile, "measured.allocations")
            self.table(columns, [[row.get(name) for name in columns] for row in rows])

    def page(self) -> str:
        files, self.body = self.body, ""
        for group in [group for group in self.evals.values() if group.rows]:
            self.add("h2", group.title)
            self.add("p class=lead", group.lead(self.token_bytes))
            self.figure(group.plot(), "With standard errors; a line a setting, a mark a budget. Layers that a selector "
                                      "reads whole (quest: two) come on top of the asked budget.")
            self.table(["setting", "asked", "delivered", "keys", group.value, "±", "to dense", "±"], group.table())
        return (f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>sqz report</title>\n'
                f"<style>{STYLE}</style>\n<h1>sqz report</h1>\n{self.body}{files}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m sqz.report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", default="report.html", help="page (.html) or figure (.svg) to write")
    options = parser.parse_args(arguments)
    output, report = pathlib.Path(options.output), Report()
    try:
        for file in options.files:
            if output.exists() and output.samefile(file):
                raise InputError("options", "--output", options.output, "another file than the inputs")
            report.read(file)
        figures = [group.plot() for group in report.evals.values() if group.rows]
        if output.suffix == ".svg" and not figures:
            raise InputError("options", "FILE", options.files, "results of sqz-eval, which a figure draws")
        drawn = svg_of(figures) if output.suffix == ".svg" else report.page()
        partial = output.with_name(f"{output.name}.{os.getpid()}.tmp")
        partial.write_bytes(drawn.encode())
        partial.replace(output)
    except ImportError:
        print("sqz.report: matplotlib is missing: pip install '.[report]' in the checkout", file=sys.stderr)
    except (InputError, OSError, UnicodeError) as error:
        print(f"sqz.report: {error}", file=sys.stderr)
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
