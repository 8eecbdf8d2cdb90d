"""The report: rows of the table, the table on the terminal, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from boostax.compare.plots import plot_all
from boostax.compare.storage import MARK, write_bytes, write_json
from boostax.errors import require

__all__ = ["COLUMNS", "rows", "terminal_table", "write_report"]

COLUMNS = (
    "arm",
    "reached",
    "steps to target",
    "seconds to target",
    "time ratio",
    "CPU ratio",
    "ms/step",
    "compile s",
    "FLOPs/step",
    "final",
    "verdict",
)


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Return the table as text, a row an arm, in the order of :data:`COLUMNS`."""
    metric, plain = results["target"]["metric"], results["plain"]
    table = []
    for arm in results["arms"]:
        is_plain = arm["name"] == plain
        flops = arm["flops_per_step"]
        flops_text = "unknown" if flops is None else f"{_si(flops)}"
        if arm["flops_ratio"] is not None and not is_plain:
            flops_text += f" ({arm['flops_ratio']:.2f}x)"
        table.append(
            [
                arm["name"],
                f"{arm['reached']}/{arm['runs']}",
                _interval(arm["steps_to_target"], "{:.0f}"),
                _interval(arm["seconds_to_target"], "{:.2f}"),
                "1" if is_plain else _ratio(arm, "seconds_ratio"),
                "1" if is_plain else _ratio(arm, "cpu_seconds_ratio"),
                _interval({k: v and v * 1e3 for k, v in arm["step_seconds"].items()}, "{:.2f}"),
                f"{arm['compile_seconds']:.1f}",
                flops_text,
                _final(arm["final"].get(metric)),
                arm["verdict"],
            ]
        )
    return table


def terminal_table(results: Mapping[str, Any]) -> Any:
    """Return the table for a rich console, narrow enough for 80 columns, and the verdicts."""
    text = require("rich.text", "demo").Text
    table = require("rich.table", "demo").Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm", overflow="fold")
    headers = ("reached", "steps", "seconds", "time", "CPU", "ms/step", "compile s", "FLOPs")
    for header in (*headers, results["target"]["metric"]):
        table.add_column(header, justify="right", no_wrap=len(header) < 8)
    for arm in results["arms"]:
        is_plain, final = arm["name"] == results["plain"], arm["final"]
        final = final.get(results["target"]["metric"])
        flops = arm["flops_ratio"]
        cells = (
            arm["name"],
            f"{arm['reached']}/{arm['runs']}",
            _plain(arm["steps_to_target"]["median"], "{:.0f}"),
            _plain(arm["seconds_to_target"]["median"], "{:.2f}"),
            "1" if is_plain else _ratio(arm, "seconds_ratio", whole=False),
            "1" if is_plain else _ratio(arm, "cpu_seconds_ratio", whole=False),
            _plain(arm["step_seconds"]["median"] * 1e3, "{:.2f}"),
            f"{arm['compile_seconds']:.1f}",
            "?" if flops is None else f"{flops:.2f}",
            _final(final, whole=False),
        )
        table.add_row(*(text(cell) for cell in cells))
    told = [
        text(f"Time to {results['target']['text']}, {_seeds(results)}:"),
        text(""),
        table,
        text(""),
    ]
    for arm in results["arms"][1:]:
        ratio = "" if arm["reached"] == 0 else f"; time ratio {_ratio(arm, 'seconds_ratio')}"
        told.append(text(f"{arm['name']}: {arm['verdict']}{ratio}"))
    told.append(
        text(
            f"Medians [95 % interval]. time, CPU and FLOPs are ratios to {results['plain']!r}; below 1 "
            "is better. Seconds are those in steps; compiling is apart.",
            style="dim",
        )
    )
    return require("rich.console", "demo").Group(*told)


def write_report(
    folder: pathlib.Path,
    results: Mapping[str, Any],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[pathlib.Path]:
    """Write ``results.json``, the PNGs and ``report.html`` into a folder; return the paths."""
    images = plot_all(results, runs)
    written = []
    for name, content in images.items():
        write_bytes(folder / name, content)
        written.append(folder / name)
    write_json(folder / "results.json", results)
    write_bytes(folder / "report.html", page(results, images).encode())
    return [folder / "report.html", *written, folder / "results.json"]


def page(results: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    """Return the HTML page; everything is in it, nothing is loaded from elsewhere."""
    escape = html.escape
    body = [f"<h1>{escape(results['task'])}</h1>"]
    body.append(
        f"<p>How long until <b>{escape(results['target']['text'])}</b>, a target that was fixed "
        f"before the first run; {_seeds(results)}, {results['steps']} steps each.</p>"
    )
    body.append("<ul class=verdicts>")
    for arm in results["arms"][1:]:
        body.append(f"<li><b>{escape(arm['name'])}</b>: {escape(arm['verdict'])}</li>")
    body.append("</ul>")
    body.append(_html_table(COLUMNS, rows(results)))
    body.append(
        "<p class=small>Median [95 % bootstrap interval over the seeds]. Ratios are of pairs with "
        f"the same seed, against the arm <b>{escape(results['plain'])}</b>; below 1 is better. "
        "A run that missed the target counts as longer than any other (shown as &infin;).</p>"
    )
    for name, title in (("curves.png", "Curves"), ("time_to_target.png", "Time to target")):
        data = base64.b64encode(images[name]).decode()
        body.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    body.append("<h2>Compiling and memory</h2>")
    body.append(_compile_section(results))
    body.append("<h2>The arms</h2>")
    for arm in results["arms"]:
        body.append(_arm_section(arm))
    body.append("<h2>How it was measured</h2>" + _method(results))
    body.append("<h2>Every run</h2>" + _runs_section(results))
    head = _PAGE.replace("{mark}", MARK).replace("{title}", escape(results["task"]))
    return head.replace("{body}", "\n".join(body))


def _compile_section(results: Mapping[str, Any]) -> str:
    table = [
        [
            arm["name"],
            f"{arm['compile_seconds']:.1f}",
            "1" if arm["name"] == results["plain"] else _ratio(arm, "seconds_ratio_with_compile"),
            "unknown" if arm["temp_bytes"] is None else f"{_si(arm['temp_bytes'])}B",
        ]
        for arm in results["arms"]
    ]
    header = (
        "arm",
        "compile seconds",
        "time ratio, one compilation included",
        "temporary memory of the step",
    )
    return _html_table(header, table) + (
        "<p class=small>On a short run compiling may cost more than it saves; on a long one it "
        "does not count. The verdict is about the steps alone.</p>"
    )


def _arm_section(arm: Mapping[str, Any]) -> str:
    escape = html.escape
    config = json.dumps(arm["config"], indent=2)
    on = ", ".join(arm["enabled"]) or "nothing"
    notes = "".join(f"<p class=small>Note: {escape(note)}.</p>" for note in arm["notes"])
    return (
        f"<h3>{escape(arm['name'])}</h3><p>Level {escape(arm['level'])}, learning rate "
        f"{_rate(arm['learning_rate'])}, {arm['updates']} updates; switched on: {escape(on)}.</p>"
        f"<pre>{escape(config)}</pre>{notes}"
    )


def _method(results: Mapping[str, Any]) -> str:
    escape = html.escape
    machine = results["machine"]
    items = [
        "All arms get the same start and the same batches at the same seed. They take turns: every "
        "arm with one seed, then every arm with the next, beginning with another arm each time.",
        "Each arm's schedules end at its own budget. Seed and learning rate are inputs of the "
        "compiled step, so an arm compiles once for all seeds.",
        "A step is timed from its call until its results are there. Compiling, drawing the batch "
        "and evaluating are apart from that. CPU seconds are those of the whole process.",
        "FLOPs are the compiler's count for the compiled step, averaged over the variants that "
        "the run used; where the step holds a branch (an accumulation window), the compiler "
        "counts both sides.",
        f"The metric is evaluated every {results['eval_every']} steps; the target counts as "
        "reached at the first evaluation that meets it.",
        "With fewer than 5 pairs of seeds there is no verdict. An arm counts as faster or slower only "
        "where the whole intervals of the time ratio and of the CPU ratio lie on that side of 1.",
    ]
    facts = {**{k: str(v) for k, v in machine.items()}, **results["versions"]}
    facts["command"], facts["made"] = results["command"], results["created"]
    return (
        "<ul>"
        + "".join(f"<li>{escape(item)}</li>" for item in items)
        + "</ul>"
        + _html_table(("what", "value"), [[k, v] for k, v in facts.items()])
    )


def _runs_section(results: Mapping[str, Any]) -> str:
    header = (
        "arm",
        "seed",
        "steps to target",
        "seconds to target",
        "CPU seconds to target",
        "seconds of all steps",
        "compile seconds",
        "compiled programs",
    )
    table = [
        [
            run["arm"],
            str(run["seed"]),
            _plain(run["steps_to_target"], "{:.0f}"),
            _plain(run["seconds_to_target"], "{:.3f}"),
            _plain(run["cpu_seconds_to_target"], "{:.3f}"),
            f"{run['seconds']:.3f}",
            f"{run['compile_seconds']:.2f}",
            str(run["compilations"]),
        ]
        for run in results["runs"]
    ]
    return f"<details><summary>{len(table)} runs</summary>{_html_table(header, table)}</details>"


def _html_table(header: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table
    )
    return f"<div class=scroll><table><tr>{head}</tr>{lines}</table></div>"


def _seeds(results: Mapping[str, Any]) -> str:
    count = results["seeds"]
    return f"{count} paired seed{'s' * (count != 1)}"


def _plain(value: float | None, form: str) -> str:
    return "∞" if value is None else form.format(value)


def _interval(value: Mapping[str, Any] | None, form: str) -> str:
    if value is None:
        return ""
    middle, low, high = (_plain(value[k], form) for k in ("median", "low", "high"))
    return middle if low == high == middle else f"{middle} [{low}, {high}]"


def _final(value: Mapping[str, Any] | None, *, whole: bool = True) -> str:
    if value is None:
        return ""
    missing = value["not_finite"]
    if value["median"] is None:
        return "not finite"
    text = _interval(value, "{:.4g}") if whole else f"{value['median']:.4f}"
    return f"{text} ({missing} not finite)" if missing else text


def _ratio(arm: Mapping[str, Any], key: str, *, whole: bool = True) -> str:
    if arm["reached"] == 0:
        return "-"
    values = [arm[key][k] for k in (("median", "low", "high") if whole else ("median",))]
    # More digits where 1.00 would hide on which side of 1 an end lies.
    digits = next(d for d in (2, 3, 4, 5, 6) if d == 6 or all(_tells(value, d) for value in values))
    form = f"{{:.{digits}f}}"
    return _interval(arm[key], form) if whole else _plain(arm[key]["median"], form)


def _tells(value: float | None, digits: int) -> bool:
    return value is None or value == 1 or round(value, digits) != 1


def _rate(value: float | str) -> str:
    return html.escape(value) if isinstance(value, str) else f"{value:g}"


def _si(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{mark}">
<title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; } h3 { margin-bottom: .2em; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
th, td { text-align: left; padding: .35em .7em; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; }
pre { background: #f5f5f5; padding: .8em; overflow-x: auto; font-size: .88em; }
.small { color: #555; font-size: .9em; } .scroll { overflow-x: auto; } .verdicts { font-size: 1.1em; }
</style></head><body>
{body}
</body></html>
"""
