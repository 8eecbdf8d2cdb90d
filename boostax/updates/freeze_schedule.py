"""Freeze schedules: which freeze index applies at which window.

Index 0 means that nothing is frozen; index ``i`` means that the layers before group ``i`` are.
"""

from __future__ import annotations

import numbers
from typing import Any, Literal, get_args

import numpy as np

from boostax.errors import did_you_mean

__all__ = ["freeze_schedule"]

Kind = Literal["continuous", "interval", "ramp", "unfreeze"]
_KINDS: tuple[str, ...] = get_args(Kind)


def freeze_schedule(
    kind: Kind,
    groups: Any,
    *,
    full_fraction: float = 0.7,
    total_steps: int,
    seed: int = 0,
) -> np.ndarray:
    r"""Return one freeze index per window, ``total_steps`` long.

    With ``G`` groups and the share ``p = full_fraction`` of windows in which nothing is frozen:

    * ``"continuous"`` repeats ``z`` zeros followed by ``1, 2, ..., G - 1``, where
      :math:`z = \lfloor p (G - 1) / (1 - p) \rfloor`.
    * ``"interval"`` starts with 0, then, while the share of frozen windows is below ``1 - p``,
      draws an index from ``1 ... G - 1`` with probabilities proportional to
      ``G - 1, ..., 2, 1``: few frozen layers are likelier than many. Otherwise it takes 0.
    * ``"ramp"`` never goes back: 0 for the first ``p * total_steps`` windows, then equally long
      stretches of ``1, 2, ..., G - 1``. Most published freezing results use this kind.
    * ``"unfreeze"`` is the ramp backwards, for fine-tuning: equally long stretches of
      ``G - 1, ..., 2, 1``, from the last group alone on, then 0 for ``p * total_steps`` windows.

    After the end of a schedule nothing is frozen.

    Args:
      kind: ``"continuous"``, ``"interval"``, ``"ramp"`` or ``"unfreeze"``.
      groups: what :func:`boostax.parameter_groups` returned, or the number of groups, >= 1. With
        one group the schedule is all zeros.
      full_fraction: share of windows with nothing frozen, in [0, 1]. Default 0.7. With 1 nothing
        is ever frozen. ``"interval"`` starts with one full window even at 0.
      total_steps: windows in the schedule (optimizer updates tried, not micro-batches), >= 1.
      seed: seed of the draws of ``"interval"``, in [0, 2**32 - 1]. Default 0. The sequence is the
        one that ``numpy.random.seed(seed)`` gives; numpy's global generator is not touched.

    Returns:
      A read-only int32 array of shape ``(total_steps,)`` with values in ``[0, G - 1]``.

    Raises:
      ValueError: an argument is out of range or ``kind`` is unknown.
      TypeError: an argument has the wrong type.

    Example:
      >>> freeze_schedule("continuous", 3, full_fraction=0.5, total_steps=8).tolist()
      [0, 0, 1, 2, 0, 0, 1, 2]
      >>> freeze_schedule("ramp", 3, full_fraction=0.5, total_steps=8).tolist()
      [0, 0, 0, 0, 1, 1, 2, 2]
      >>> freeze_schedule("unfreeze", 3, full_fraction=0.5, total_steps=8).tolist()
      [2, 2, 1, 1, 0, 0, 0, 0]
      >>> freeze_schedule("interval", 4, full_fraction=0.5, total_steps=8, seed=1).tolist()
      [0, 2, 0, 1, 0, 3, 0, 2]

    Source:
      "continuous" and "interval": ``mindspore.boost.GradientFreeze``, strategies 0 and 1, entry for
      entry. "ramp": A. Brock, T. Lim, J. M. Ritchie, N. Weston, "FreezeOut: Accelerate Training by
      Progressively Freezing Layers", 2017. "unfreeze": J. Howard and S. Ruder, "Universal Language
      Model Fine-tuning for Text Classification", 2018.

    When not to use:
      "interval" at its defaults freezes in 30 % of the windows and saves little: at most about 7 % of
      a step. Take a smaller ``full_fraction``, or "ramp".
    """
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"freeze_schedule: kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}."
            f"{did_you_mean(str(kind), _KINDS)}"
        )
    count = _group_count(groups)
    steps = _integer("total_steps", total_steps, 1, None)
    share = _share(full_fraction)
    start = _integer("seed", seed, 0, 2**32 - 1)
    if count == 1 or share == 1.0:
        table = np.zeros(steps, np.int32)
    elif kind == "continuous":
        table = _continuous(count, share, steps)
    elif kind == "interval":
        table = _interval(count, share, steps, start)
    else:
        table = _ramp(count, share, steps)
        if kind == "unfreeze":
            table = table[::-1].copy()
    table.setflags(write=False)
    return table


def _continuous(groups: int, share: float, steps: int) -> np.ndarray:
    # The reference's own expression: its floor division makes the "+ 0.5" idle, and its rounding
    # errors decide (0.9 * 9 // (1 - 0.9) is 81 or 80), so it is kept to the letter.
    zeros = int(share * (groups - 1) // (1 - share) + 0.5)
    # A share next to 1 asks for more zeros than there are steps.
    cycle = np.concatenate(
        [np.zeros(min(zeros, steps), np.int32), np.arange(1, groups, dtype=np.int32)]
    )
    return np.resize(cycle, steps)


def _interval(groups: int, share: float, steps: int, seed: int) -> np.ndarray:
    # The reference lists the indices from the last to the first, with rising probabilities.
    indices = np.arange(groups - 1, 0, -1)
    probabilities = np.arange(1, groups) / (groups * (groups - 1) // 2)
    frozen = np.zeros(steps, bool)
    others = 0
    for step in range(1, steps):
        # Compared as shares of frozen windows: 1 - 0.7 is not 0.3, and ties are frequent.
        if others / step < 1 - share:
            frozen[step] = True
            others += 1
    # RandomState.choice(indices, p=...) one by one, in one go: the same draws and the same search.
    cumulative = np.cumsum(probabilities)
    cumulative /= cumulative[-1]
    draws = np.random.RandomState(seed).random_sample(others)
    table = np.zeros(steps, np.int32)
    table[frozen] = indices[cumulative.searchsorted(draws, side="right")]
    return table


def _ramp(groups: int, share: float, steps: int) -> np.ndarray:
    start = min(round(share * steps), steps)
    rest = steps - start
    table = np.zeros(steps, np.int32)
    if rest:
        table[start:] = 1 + np.arange(rest, dtype=np.int64) * (groups - 1) // rest
    return table


def _group_count(groups: Any) -> int:
    if isinstance(groups, (numbers.Integral, bool)):
        return _integer("groups", groups, 1, None)
    try:
        count = len(groups)
    except TypeError:
        raise TypeError(
            "freeze_schedule: groups must be what boostax.parameter_groups returned, or the number "
            f"of groups, got {type(groups).__name__}"
        ) from None
    if count == 0 or isinstance(groups, (str, dict)):
        raise ValueError(f"freeze_schedule: groups must hold at least one group, got {groups!r}")
    return count


def _integer(argument: str, value: Any, low: int, high: int | None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"freeze_schedule: {argument} must be an integer, got {value!r} ({type(value).__name__})"
        )
    number = int(value)
    if number < low or (high is not None and number > high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"freeze_schedule: {argument} must be {allowed}, got {number}")
    return number


def _share(value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"freeze_schedule: full_fraction must be a number in [0, 1], got {value!r} "
            f"({type(value).__name__})"
        )
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(
            f"freeze_schedule: full_fraction must be in [0, 1], got {value}; it is the share of "
            "windows in which nothing is frozen"
        )
    return float(value)
