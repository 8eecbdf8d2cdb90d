"""Time to target, paired ratios, bootstrap intervals and the verdict in words.

A run that misses the target is censored: its time is longer than its budget by an unknown
amount. It enters as infinity, and every summary here is a median or another order statistic, so
that one missed run neither disappears nor spoils the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from boostax.compare.task import Target

__all__ = [
    "MIN_PAIRS",
    "Interval",
    "Outcome",
    "bootstrap_median",
    "median",
    "paired_ratios",
    "time_to_target",
    "verdict",
]

MIN_PAIRS = 5  # fewer pairs never give a verdict, however clear they look
_RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """When one run first met the target; infinite where it never did.

    Attributes:
      reached: whether any evaluation met the target.
      steps: the step count of the first evaluation that did.
      seconds: wall seconds spent in steps up to there; no compilation, data or evaluation.
      cpu_seconds: CPU seconds of the process over the same steps.
    """

    reached: bool
    steps: float
    seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval; ``low`` and ``high`` may be infinite, or NaN if empty."""

    median: float
    low: float
    high: float


def time_to_target(run: Mapping[str, Any], target: Target) -> Outcome:
    """Return when a run first met the target, over its evaluations in order.

    Example:
      >>> from boostax.compare.task import Target
      >>> points = [(0, 0.0, 0.0, 0.1), (10, 1.5, 2.0, 0.96)]
      >>> run = {"evaluations": [
      ...     {"step": s, "seconds": t, "cpu_seconds": c, "metrics": {"accuracy": a}}
      ...     for s, t, c, a in points]}
      >>> time_to_target(run, Target("accuracy", 0.95))
      Outcome(reached=True, steps=10, seconds=1.5, cpu_seconds=2.0)
    """
    for point in run["evaluations"]:
        value = point["metrics"].get(target.metric)
        if value is not None and target.met(value):
            return Outcome(True, point["step"], point["seconds"], point["cpu_seconds"])
    return Outcome(False, math.inf, math.inf, math.inf)


def median(values: Sequence[float]) -> float:
    """Return the median; infinities are allowed, no values give NaN.

    Example:
      >>> median([3.0, 1.0, math.inf])
      3.0
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return float((ordered[middle - 1] + ordered[middle]) / 2)


def paired_ratios(arm: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Return ``arm / plain`` pair by pair, with infinity for a run that missed the target.

    Missed by the arm only: infinity. Missed by the plain run only: 0. A pair in which both
    missed says nothing and is left out, and so is one in which the plain time is 0.

    Example:
      >>> paired_ratios([1.0, math.inf, 3.0, math.inf], [2.0, 1.0, math.inf, math.inf])
      [0.5, inf, 0.0]
    """
    ratios = []
    for ours, theirs in zip(arm, plain, strict=True):
        both_missed = math.isinf(ours) and math.isinf(theirs)
        if both_missed or math.isnan(ours) or math.isnan(theirs) or theirs == 0:
            continue
        ratios.append(0.0 if math.isinf(theirs) else ours / theirs)
    return ratios


def bootstrap_median(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median with a 95 % percentile bootstrap interval over the values.

    For paired ratios a value is a pair, so pairs are what is drawn again. The draws come from a
    fixed generator: the same runs give the same report. The ends are order statistics, without
    interpolation, because values may be infinite. With five values the interval runs from the
    smallest to the largest.

    Args:
      values: any number of floats; infinities allowed.
      seed: of the generator. Default 0.

    Returns:
      An :class:`Interval`; NaN throughout if there are no values.

    Example:
      >>> bootstrap_median([0.8, 0.7, 0.9, 0.75, 0.85])
      Interval(median=0.8, low=0.7, high=0.9)
    """
    data = np.asarray(values, np.float64)
    if data.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    draws = np.random.RandomState(seed).randint(0, data.size, size=(_RESAMPLES, data.size))
    drawn = np.sort(data[draws], axis=1)
    middle = data.size // 2
    upper = drawn[:, middle]
    medians = np.sort(upper if data.size % 2 else (drawn[:, middle - 1] + upper) / 2)
    tail = int(0.025 * _RESAMPLES)
    return Interval(median(values), float(medians[tail]), float(medians[-1 - tail]))


def verdict(arm: Sequence[Outcome], plain: Sequence[Outcome]) -> str:
    """Say in words what the pairs show about the time to the target.

    A verdict of a difference takes two clocks: the intervals of the paired ratios of wall seconds and
    of CPU seconds both have to leave out 1, on the same side. What else the machine does disturbs
    the two in different ways, so that chance seldom speaks on both.

    Args:
      arm: outcomes of the arm, one a seed.
      plain: outcomes of the plain arm at the same seeds, in the same order.

    Returns:
      ``"not enough seeds to tell"`` for fewer than five pairs, always; otherwise ``"did not
      reach the target"``, ``"only this arm reached the target"``, ``"too few runs reached the target
      to tell"``, ``"faster"``, ``"slower"`` or ``"no benefit here"`` (an interval holds 1, or the two
      contradict each other), with the number of runs that missed.
    """
    if len(arm) != len(plain):
        raise ValueError(f"arm and plain must be paired, got {len(arm)} and {len(plain)} runs")
    if len(arm) < MIN_PAIRS:
        return "not enough seeds to tell"
    missed = sum(not outcome.reached for outcome in arm)
    if missed == len(arm):
        return "did not reach the target"
    if not any(outcome.reached for outcome in plain):
        words = "only this arm reached the target"
    else:
        walls = paired_ratios([o.seconds for o in arm], [o.seconds for o in plain])
        cpus = paired_ratios([o.cpu_seconds for o in arm], [o.cpu_seconds for o in plain])
        if len(walls) < MIN_PAIRS:
            words = "too few runs reached the target to tell"
        else:
            # A clock too coarse for any ratio leaves no pairs, and NaN is on neither side of 1.
            both = [bootstrap_median(walls), bootstrap_median(cpus)]
            if all(ratio.high < 1 for ratio in both):
                words = "faster"
            elif all(ratio.low > 1 for ratio in both):
                words = "slower"
            else:
                words = "no benefit here"
    return words + (f" ({missed} of {len(arm)} runs missed the target)" if missed else "")
