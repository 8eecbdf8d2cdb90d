"""The plots of a comparison, as PNG: curves over steps and seconds, and time to the target."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from boostax.compare.statistics import median
from boostax.compare.storage import MARK
from boostax.errors import require

__all__ = ["plot_all"]

# Okabe and Ito's colours, which people with colour blindness can tell apart.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_all(
    results: Mapping[str, Any], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, bytes]:
    """Draw all plots.

    Args:
      results: the contents of results.json.
      runs: by arm, the records.

    Returns:
      File name -> PNG: ``curves.png`` and ``time_to_target.png``.
    """
    require("matplotlib", "demo")
    return {"curves.png": _curves(results, runs), "time_to_target.png": _bars(results)}


def _figure(width: float, height: float) -> Any:
    # Without pyplot: no display, no global state, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": MARK})
    return buffer.getvalue()


def _curves(results: Mapping[str, Any], runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    target = results["target"]
    figure = _figure(11, 7.5)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for number, (name, records) in enumerate(runs.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        style = {
            "color": colour,
            "label": name,
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.5,
            "linewidth": 1.6,
            "alpha": 0.9,
            "markevery": max(1, len(records[0]["evaluations"]) // 12),
        }
        points = [run["evaluations"] for run in records]
        steps = np.array([p["step"] for p in points[0]], float)
        seconds = np.median([[p["seconds"] for p in run] for run in points], axis=0)
        losses = np.array([_mean_losses(run) for run in records])
        metric = np.array(
            [[_number(p["metrics"].get(target["metric"])) for p in run] for run in points]
        )
        # The mean loss of an interval belongs to the interval's end; there is none at the start.
        for column, x in enumerate((steps, seconds)):
            _band(axes[0, column], x[1:], losses, style)
            _band(axes[1, column], x, metric, style)
    for column in (0, 1):
        axes[1, column].axhline(
            target["value"],
            color="0.35",
            linestyle="--",
            linewidth=1,
            label=f"target: {target['text']}",
        )
    axes[0, 0].set_ylabel("training loss (log scale)")
    with np.errstate(all="ignore"):
        if all(np.nanmin(line.get_ydata(), initial=np.inf) > 0 for line in axes[0, 0].lines):
            axes[0, 0].set_yscale("log")
        else:
            axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel(f"{target['metric']} (held-out)")
    _cut(axes[1, 0], target)
    axes[1, 0].set_xlabel("steps (batches)")
    axes[1, 1].set_xlabel("seconds in steps (without compiling and evaluating)")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=min(len(labels), 5), frameon=False
    )
    seeds = results["seeds"]
    figure.supxlabel(
        f"Lines: median of {seeds} seed{'s' * (seeds != 1)}. Bands: smallest to largest.",
        fontsize=9,
        color="0.3",
    )
    return _png(figure)


def _cut(axis: Any, target: Mapping[str, Any]) -> None:
    """Cut the first few evaluations off, where they would squeeze what happens at the target."""
    lines = [np.asarray(line.get_ydata(), float) for line in axis.lines]
    values = np.concatenate(lines)
    values = values[np.isfinite(values)]
    low, most, high = (float(v) for v in np.quantile(values, (0, 0.1, 1)))
    if target["lower_is_better"]:
        if low > 0:
            axis.set_yscale("log")
    elif target["value"] > most and high - low > 3 * (high - most):
        margin = 0.06 * (high - most)
        axis.set_ylim(most - margin, high + margin)
        axis.set_ylabel(f"{axis.get_ylabel()}, from {most - margin:.3g} up")


def _band(axis: Any, x: Any, values: np.ndarray, style: Mapping[str, Any]) -> None:
    if not np.isfinite(values).any():
        return
    with np.errstate(all="ignore"):
        finite = np.where(np.isfinite(values), values, np.nan)
        keep = ~np.isnan(finite).all(axis=0)
        x, finite = np.asarray(x)[keep], finite[:, keep]
        axis.plot(x, np.nanmedian(finite, axis=0), **style)
        axis.fill_between(
            x,
            np.nanmin(finite, axis=0),
            np.nanmax(finite, axis=0),
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )


def _mean_losses(run: Mapping[str, Any]) -> list[float]:
    """Return the mean training loss between one evaluation and the next."""
    ends = [point["step"] for point in run["evaluations"]]
    losses = [_number(v) for v in run["loss"]]
    return [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]


def _bars(results: Mapping[str, Any]) -> bytes:
    arms = results["arms"]
    figure = _figure(11, 1.5 + 0.62 * len(arms))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for run in results["runs"]:
        by_arm.setdefault(run["arm"], []).append(run)
    reach = max([run["seconds"] for run in results["runs"]], default=1.0)
    for row, arm in enumerate(arms):
        colour = _COLOURS[row % len(_COLOURS)]
        runs = by_arm[arm["name"]]
        found = [_number(run["seconds_to_target"]) for run in runs]
        times = [math.inf if math.isnan(v) else v for v in found]
        middle = median(times)
        dots = [v for v in times if math.isfinite(v)]
        if math.isfinite(middle):
            left.barh(row, middle, color=colour, alpha=0.55, height=0.6)
            left.annotate(
                f"{middle:.2f} s",
                (max([middle, *dots]), row),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        else:
            budget = median([run["seconds"] for run in runs])
            left.barh(
                row, budget, color="none", edgecolor=colour, hatch="//", alpha=0.5, height=0.6
            )
            left.annotate(
                f"not reached by {len(runs) - len(dots)} of {len(runs)} runs in {budget:.2f} s",
                (budget, row),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        left.plot(dots, [row] * len(dots), "o", color=colour, markersize=4, markerfacecolor="white")
        right.barh(row, arm["compile_seconds"], color=colour, alpha=0.55, height=0.6)
        right.annotate(
            f"{arm['compile_seconds']:.1f} s",
            (arm["compile_seconds"], row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    shown = [_number(r["seconds_to_target"]) for r in results["runs"]]
    missed = any(math.isnan(v) for v in shown)
    longest = reach if missed else max([v for v in shown if not math.isnan(v)], default=reach)
    left.set_xlim(0, longest * (1.45 if missed else 1.18) or 1)
    right.set_xlim(0, max([a["compile_seconds"] for a in arms], default=1) * 1.35 or 1)
    left.set_yticks(range(len(arms)), [arm["name"] for arm in arms])
    left.invert_yaxis()
    left.set_xlabel(
        f"seconds in steps until {results['target']['text']} (bar: median; dots: single runs)"
    )
    right.set_xlabel("seconds of compiling, once")
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
