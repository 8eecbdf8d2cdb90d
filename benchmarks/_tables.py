"""Markdown tables of the benchmarks, and paired differences with their intervals."""

from __future__ import annotations

import math

import numpy as np

from boostax.errors import require


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t."""
    stats = require("scipy.stats", "demo")
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def points(values: np.ndarray) -> str:
    """Return a mean difference in points with its interval."""
    mean, low, high = (100 * v for v in interval(values))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    """Return a share in percent, without the sign."""
    return f"{100 * share:.1f}"
