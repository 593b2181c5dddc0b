"""Draws results of sqz's tools as one HTML page, or as an SVG figure. Needs matplotlib: pip install 'sqz[report]'.

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
from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]  # a line of an input; "place" is its file and line
TASKS = {"needle1": ("One needle", "share of the needles found"), "loss": ("Loss", "loss in nats a token"),
         "error": ("Error of the attention output", "error relative to dense attention"),
         "recall": ("Recalled attention mass", "recalled share of the attention")}
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#b5679a", "#a67c00", "#2f8fc4", "#8a8a00", "#555555"]
STYLE = """:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 3rem; overflow-wrap: break-word; }
.lead { font-size: 1.1rem; } table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid #8884; white-space: nowrap; }
.rows td { text-align: left; white-space: normal; } .rows td:first-child { white-space: nowrap; color: #777; }
th:first-child, td:first-child { text-align: left; } figcaption { color: #777; font-size: .85rem; }
figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }"""


class InputError(Exception):
    def __init__(self, place: str, field: str, found: object, expected: str) -> None:
        super().__init__(f"{place}: {field}: found {json.dumps(found)[:60]}, expected {expected}")


def member(event: Event, path: str) -> Any:
    """The member at `path`, e.g. "budget.asked"; None if there is none."""
    value: Any = event
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def numbers(event: Event, path: str, count: int | None = None) -> list[float]:
    values = member(event, path)
    if not isinstance(values, list) or count not in (None, len(values)):
        raise InputError(event["place"], path, values, f"{count or 'an array of'} numbers")
    return [checked_number(event, path, value) for value in values]


def checked_number(event: Event, path: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(event["place"], path, value, "a number")
    return float(value)


def number(event: Event, path: str) -> float:
    return checked_number(event, path, member(event, path))


def text(event: Event, path: str) -> str:
    value = member(event, path)
    if not isinstance(value, str):
        raise InputError(event["place"], path, value, "a text")
    return value


@dataclasses.dataclass
class Plot:
    """Points of one subject, a series by name. `mark` is matplotlib's, or "bars"."""

    title: str
    x: str
    y: str
    mark: str = "o-"
    from_zero: bool = True
    series: dict[str, list[tuple[float, float, float]]] = dataclasses.field(default_factory=dict)
    levels: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, name: str, x: float, y: float, error: float = 0) -> None:
        self.series.setdefault(name, []).append((x, y, error))

    def draw(self, axes: Any) -> None:
        for i, (name, points) in enumerate(self.series.items()):
            x, y, error = zip(*sorted(points))
            if self.mark == "bars":
                axes.bar(x, y, color=COLOURS[i % 8], label=name)
            else:  # the marks of a series are its own: lines may lie on each other
                axes.errorbar(x, y, error if any(error) else None, fmt=self.mark.replace("o", "os^Dv*Px"[i % 8]),
                              color=COLOURS[i % 8], capsize=3, markersize=5, alpha=.85, label=name)
        for name, level in self.levels.items():
            axes.axhline(level, linestyle="--", color="gray", label=f"{name}: {level:.4g}")
        axes.set_ylim(bottom=0 if self.from_zero else None)
        axes.set_xlim(left=None if self.x == "layer" else 0)
        axes.xaxis.get_major_locator().set_params(integer=self.x == "layer")
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        axes.grid(color="#0002")
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -.16), ncols=2, frameon=False, fontsize="small")


def svg_of(plots: Sequence[Plot]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "sqz", "axes.titlelocation": "left",
                  "axes.titlesize": "medium", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.5, 4.2 * len(plots)), layout="constrained")
        for plot, axes in zip(plots, figure.subplots(len(plots), 1, squeeze=False)[:, 0]):
            plot.draw(axes)
        figure.savefig(out := io.StringIO(), format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def setting_of(row: Event) -> str:
    """The line of a plot that a row belongs to: "squeezed, 2 levels, rule budget"."""
    texts = {"rows": "rows {}", "key_codes": "key codes {}", "levels": "{} levels", "rule": "rule {}",
             "dense_layers": "dense layers {}"}
    known = [form.format(row[name]) for name, form in texts.items()
             if name in row and (name, row[name]) != ("levels", 0)]  # 0 levels are all
    layers = pathlib.Path(row.get("layers", "uniform")).name
    return ", ".join([text(row, "selector"), *known, *(["layers " + layers] if layers != "uniform" else [])])


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
        plot = Plot(self.title, f"share of the {what} that was read", from_zero=self.task != "loss",
                    y="loss above dense attention in nats a token" if above else self.value)
        for row in self.rows:
            at = "difference." if above else ""
            plot.add(setting_of(row), number(row, of + ".delivered"),
                     number(row, at + "value"), number(row, at + "stderr"))
        if self.dense is not None:
            plot.levels["dense"] = 0 if above else self.dense
        return plot

    def lead(self, token_bytes: float) -> str:
        """Says how much the first selector reads, saves and loses at the budget that is nearest to an eighth."""
        first = [row for row in self.rows if row["selector"] == self.rows[0]["selector"]]
        row = min(first, key=lambda row: abs(number(row, "budget.asked") - .125))
        read = number(row, "budget.delivered")
        saved = f"{(1 - read) * self.tokens * token_bytes / 1e6:,.0f} MB" if token_bytes else f"{1 - read:.1%}"
        out = (f"{self.title}: at budget {number(row, 'budget.asked'):.3g} {row['selector']} reads {read:.1%} of the "
               f"context's bytes and saves {saved}. Its {self.value} is {number(row, 'value'):.3g} ± "
               f"{number(row, 'stderr'):.2g}")
        if self.dense is None:
            return out + "."
        if "difference" not in row:
            return f"{out}; with dense attention it is {self.dense:.3g}."
        lost = f"{number(row, 'difference.value'):+.2g} ± {number(row, 'difference.stderr'):.2g}"
        return f"{out}, {lost} beside the {self.dense:.3g} of dense attention."

    def table(self) -> Iterable[Sequence[object]]:
        for row in self.rows:
            names = ["budget.asked", "budget.delivered", "keep.delivered", "value", "stderr"]
            names += ["difference.value", "difference.stderr"] if "difference" in row else []
            yield [setting_of(row), *(number(row, name) for name in names)]


class Report:
    def __init__(self) -> None:
        self.body = ""
        self.evals: dict[tuple[str, str, float], Eval] = {}
        self.skipped: list[Sequence[object]] = []
        self.token_bytes = 0.0

    def add(self, tag: str, content: str) -> None:
        self.body += f"<{tag}>{html.escape(content)}</{tag.split()[0]}>\n"

    def figure(self, plot: Plot, caption: str) -> None:
        svg = svg_of([plot])
        self.body += f"<figure>{svg[svg.index('<svg'):]}<figcaption>{html.escape(caption)}</figcaption></figure>\n"

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.body += "<table>" if head else "<table class=rows>"
        for tag, row in [("th", head), *(("td", row) for row in rows)]:
            cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row)
            self.body += f"<tr>{''.join(f'<{tag}>{html.escape(x)}</{tag}>' for x in cells)}</tr>\n"
        self.body += "</table>\n"

    def read(self, path: str) -> None:
        known, unfinished = False, dict[Any, Event]()
        for line_number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), 1):
            place = f"{path}: line {line_number}"
            try:
                event = json.loads(line or "{}")
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise InputError(place, "JSON", line, "one object a line")
            event["place"] = place
            if "cosine" in event:
                self.add_profile(event, path)
            elif "fingerprint" in event and "clusters" in event:
                self.add_index(event)
            elif event.get("event") == "pass":
                unfinished[event.get("tokens")] = event  # its rows are of all passes so far
            elif event.get("event") == "result" and "rows" in event:
                unfinished.clear()
                self.add_rows(event)
            else:
                continue
            known = True
        for event in unfinished.values():  # of a run that was stopped
            self.add_rows(event)
        if not known:
            raise InputError(path, "lines", "no result",
                             "a layer profile, or the output of sqz-eval or sqz-index info with --json")

    def add_rows(self, event: Event) -> None:
        rows = member(event, "rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(event["place"], "rows", rows, "an array of objects")
        for i, row in enumerate(rows):
            self.add_row(row | {"place": f"{event['place']}: rows[{i}]"})

    def add_row(self, row: Event) -> None:
        key = text(row, "task"), row.get("on", ""), number(row, "tokens")
        group = self.evals.setdefault(key, Eval(*key))
        if "skipped" in row:
            self.skipped.append([group.title, setting_of(row), number(row, "budget.asked"), text(row, "skipped")])
        elif text(row, "selector") == "dense":
            group.dense = number(row, "value")
        else:
            group.rows.append(row)

    def add_index(self, index: Event) -> None:
        names = ("layers", "query_heads", "kv_heads", "head_dim")
        shape = {name: round(number(index, "model." + name)) for name in names}
        shape_text = ", ".join(f"{name} {x}" for name, x in shape.items())
        self.token_bytes = 4 * shape["layers"] * shape["kv_heads"] * shape["head_dim"]
        self.add("h2", f"Index {text(index, 'path')}")
        texts = ("producer", "fingerprint", "partition", "dtype", "calibration.source")
        counts = ("tokens", "sink", "tail", "clustered", "calibration.queries")
        self.table([], [("size", f"{number(index, 'bytes') / 1e6:,.1f} MB"),
                        ("model", f"{text(index, 'model.architecture')}, {shape_text}"),
                        *((name, text(index, name)) for name in texts),
                        *((name, f"{number(index, name):,.0f}") for name in counts),
                        ("clusters", ", ".join(f"{x:,.0f}" for x in numbers(index, "clusters")) + " a KV head"),
                        *(("build: " + name, value) for name, value in dict(index.get("build", {})).items())])
        if index.get("layer_budgets"):
            self.add_budgets(index, "layer_budgets.")

    def add_budgets(self, event: Event, prefix: str) -> None:
        plot = Plot("Budgets by layer", "layer", "keys", "bars")
        for layer, budget in enumerate(numbers(event, prefix + "budget")):
            plot.add("budget", layer, budget)
        plot.levels["every layer alike"] = number(event, prefix + "uniform_budget")
        self.figure(plot, "Keys of each layer, at the same total.")

    def add_profile(self, profile: Event, path: str) -> None:
        cosine = numbers(profile, "cosine")
        error, group, budget = (numbers(profile, name, len(cosine)) for name in ("cosine_error", "group", "budget"))
        plot = Plot("Cosine by layer", "layer", "cosine", "o", from_zero=False)
        for layer, x in enumerate(cosine):
            plot.add(f"group {group[layer]:.0f}", layer, x, error[layer])
        self.add("h2", f"Layer profile {path}")
        self.figure(plot, "Cosine of the hidden state before and after attention: near 1, attention changed little.")
        self.add_budgets(profile, "")
        self.table(["layer", "cosine", "±", "group", "budget"], zip(range(len(cosine)), cosine, error, group, budget))

    def plots(self) -> list[Plot]:
        return [group.plot() for group in self.evals.values() if group.rows]

    def page(self) -> str:
        files, self.body = self.body, ""
        groups = [group for group in self.evals.values() if group.rows]
        for group in groups:
            self.body += f"<p class=lead>{html.escape(group.lead(self.token_bytes))}</p>\n"
        for group in groups:
            self.add("h2", group.title)
            self.figure(group.plot(), "With standard errors; a line a setting, a mark a budget. Layers that a selector "
                                      "reads whole (quest: two) come on top of the asked budget.")
            self.table(["setting", "asked", "delivered", "keys", group.value, "±", "to dense", "±"], group.table())
        if self.skipped:
            self.add("h2", "Skipped by sqz-eval")
            self.table(["task", "setting", "asked", "why"], self.skipped)
        return (f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width='
                f'device-width">\n<title>sqz report</title>\n<style>{STYLE}</style>\n<h1>sqz report</h1>\n'
                f"{self.body}{files}")


def main(arguments: Sequence[str] | None = None) -> int:
    description, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser("python -m sqz.report", description=description, epilog=more,
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
        if output.suffix == ".svg" and not report.plots():
            raise InputError("options", "FILE", options.files, "results of sqz-eval, which a figure draws")
        drawn = svg_of(report.plots()) if output.suffix == ".svg" else report.page()
        partial = output.with_name(f"{output.name}.{os.getpid()}.tmp")
        partial.write_text(drawn, encoding="utf-8")
        partial.replace(output)
    except ImportError:
        print("sqz.report: matplotlib is missing: pip install 'sqz[report]'", file=sys.stderr)
    except (InputError, OSError, UnicodeDecodeError) as error:
        print(f"sqz.report: {error}", file=sys.stderr)
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
