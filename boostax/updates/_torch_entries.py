"""What PyTorch keeps of each parameter, checked, and parted into leaves that count together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from boostax.updates._torch_layout import Layout
from boostax.updates._torch_settings import CLASSES

__all__ = ["Part", "counts_matter", "parts_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Parameters with the same optimizer, settings and count of updates.

    Attributes:
      name: the optimizer's name.
      settings: its settings under our names.
      paths: the leaves' paths.
      count: how many updates were made.
      values: field of the state here -> leaf path -> array.
    """

    name: str
    settings: Mapping[str, Any]
    paths: tuple[str, ...]
    count: int
    values: Mapping[str, Mapping[str, np.ndarray]]


def parts_of(
    caller: str,
    name: str,
    settings: Mapping[str, Any],
    members: Sequence[int],
    entries: Mapping[int, Mapping[str, Any]],
    order: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    turned: Layout,
) -> list[Part]:
    """Return one of PyTorch's groups as parts; more than one where its parameters' counts differ.

    Counts differ where a parameter was frozen for a while: without a gradient PyTorch skips it.
    """
    fields = CLASSES[name].fields
    read = {i: _entry(caller, name, settings, i, entries.get(i) or {}) for i in members}
    counts = {i: count for i, (count, _) in read.items()}
    if not counts_matter(name, settings):
        counts = dict.fromkeys(counts, max(counts.values()))
    parts = []
    for count in dict.fromkeys(counts.values()):
        inside = [i for i in members if counts[i] == count]
        values: dict[str, dict[str, np.ndarray]] = {}
        for i in inside:
            path = order[i]
            for key, array in read[i][1].items():
                values.setdefault(fields[key], {})[path] = turned(caller, path, array, shapes[path])
        parts.append(Part(name, settings, tuple(order[i] for i in inside), count, values))
    return parts


def counts_matter(name: str, settings: Mapping[str, Any]) -> bool:
    """Say whether the size of a step depends on the parameter's own count, at a given rate."""
    if name == "sgd":
        return bool(settings.get("dampening") and settings.get("momentum"))
    return name in ("adam", "adamw") or bool(settings.get("lr_decay"))


def _entry(
    caller: str, name: str, settings: Mapping[str, Any], index: int, entry: Mapping[str, Any]
) -> tuple[int, dict[str, np.ndarray]]:
    """Return a parameter's count of updates and its buffers."""
    fields = CLASSES[name].fields
    unknown = set(entry) - {"step", *fields}
    if unknown:
        raise ValueError(
            f"{caller}: state[{index}] has {', '.join(sorted(map(repr, unknown)))}, which {name} does "
            f"not keep; say with name= which optimizer it is. Known: step, {', '.join(fields)}"
        )
    # SGD's buffers are None before the first step.
    buffers = {k: np.asarray(v) for k, v in entry.items() if v is not None and k != "step"}
    if name == "sgd":
        return int(bool(buffers)), buffers
    count = _step(caller, index, entry["step"]) if "step" in entry else 0
    if not count and not buffers:
        return 0, {}
    needed = ["step", *_needed(name, settings)]
    lacking = [key for key in needed if entry.get(key) is None]
    if lacking:
        raise ValueError(
            f"{caller}: state[{index}] has no {' and no '.join(lacking)}, which {name} keeps of every "
            "parameter that it has updated; take the whole state, or leave out the entries of "
            "parameters without updates"
        )
    return count, buffers


def _needed(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the buffers that an optimizer keeps with these settings."""
    only_with = {"grad_avg": "centered", "momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}
    return [k for k in CLASSES[name].fields if k not in only_with or settings.get(only_with[k])]


def _step(caller: str, index: int, value: Any) -> int:
    array = np.asarray(value)
    # Not every dtype of a step has item(), but each has a float.
    number = (
        float(array.reshape(())) if array.size == 1 and array.dtype.kind in "biufV" else math.nan
    )
    if not (math.isfinite(number) and number >= 0 and number == int(number)):
        raise ValueError(
            f"{caller}: state[{index}]['step'] must be a whole number of at least 0, got {value!r}"
        )
    return int(number)
