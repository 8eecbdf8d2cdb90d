"""What ``scale_by_thor`` and ``thor`` accept."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax.errors import did_you_mean
from boostax.parallel._axes import check_axis

__all__ = [
    "check_axes",
    "check_bool",
    "check_clip",
    "check_damping",
    "check_early",
    "check_frequency",
    "check_layers",
    "check_number",
    "check_rate",
    "check_split_indices",
    "whole_number",
]

MODES = ("default", "reference")


def whole_number(value: Any) -> bool:
    """Say whether this is an int; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _real(value: Any) -> bool:
    return isinstance(value, (numbers.Real, np.number)) and not isinstance(value, (bool, np.bool_))


def _injected(value: Any) -> bool:
    """Say whether this is a scalar array, such as a hyperparameter that is injected while traced."""
    return isinstance(value, jax.Array) and value.ndim == 0


def check_number(
    caller: str,
    argument: str,
    value: Any,
    low: float,
    *,
    open_: bool = False,
    high: float = math.inf,
) -> Any:
    """Return a number in ``[low, high)``, or in ``(low, high)``."""
    allowed = f"a number {'>' if open_ else '>='} {low:g}"
    if math.isfinite(high):
        allowed += f" and < {high:g}"
    if _injected(value):
        return value
    if not _real(value):
        raise TypeError(f"{caller}: {argument} must be {allowed}, got {value!r}")
    value = float(value)
    # Written so that a NaN is refused.
    if not ((value > low if open_ else value >= low) and value < high):
        raise ValueError(f"{caller}: {argument} must be {allowed}, got {value:g}")
    return value


def check_damping(caller: str, damping: Any) -> Any:
    """Return a positive number or a schedule."""
    if callable(damping):
        return damping
    try:
        return check_number(caller, "damping", damping, 0.0, open_=True)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}; or a schedule of the update count. Without damping a layer whose inputs or "
            "outputs are sometimes dead can't be inverted"
        ) from None


def check_rate(caller: str, argument: str, value: Any) -> Any:
    """Return a learning rate: a number, or a schedule."""
    if callable(value) or _injected(value):
        return value
    if not _real(value) or not math.isfinite(value):
        raise TypeError(
            f"{caller}: {argument} must be a number or a schedule of the update count, got {value!r}"
        )
    if value < 0:
        raise ValueError(f"{caller}: {argument} must be at least 0, got {value!r}")
    return float(value)


def check_bool(caller: str, argument: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{caller}: {argument} must be True or False, got {value!r}")
    return bool(value)


# Update counts are int32.
_INT32 = 2**31 - 1


def check_frequency(caller: str, frequency: Any, mode: str) -> Any:
    low = 2 if mode == "reference" else 1
    allowed = f"an int >= {low}" + (' in mode="reference"' if low == 2 else "")
    if _injected(frequency) and jnp.issubdtype(frequency.dtype, jnp.integer):
        return frequency
    if not whole_number(frequency):
        raise TypeError(f"{caller}: frequency must be {allowed}, got {frequency!r}")
    if not low <= frequency <= _INT32:
        raise ValueError(f"{caller}: frequency must be {allowed}, and int32, got {frequency}")
    return int(frequency)


def check_early(caller: str, early: Any) -> tuple[int, ...]:
    allowed = "increasing ints >= 0 (int32), the update counts of the early refreshes, or ()"
    if not isinstance(early, Sequence) or isinstance(early, str):
        raise TypeError(f"{caller}: early must be {allowed}, got {early!r}")
    if not all(whole_number(count) for count in early):
        raise TypeError(f"{caller}: early must be {allowed}, got {early!r}")
    counts = tuple(int(count) for count in early)
    if (
        any(a >= b for a, b in zip((-1, *counts), counts, strict=False))
        or max(counts, default=0) > _INT32
    ):
        raise ValueError(f"{caller}: early must be {allowed}, got {early!r}")
    return counts


def check_clip(caller: str, clip: Any, mode: str) -> str | None:
    """Return ``"kl"``, ``"tensor"`` or None."""
    allowed = "True, False, 'kl' or 'tensor'"
    if isinstance(clip, (bool, np.bool_)):
        if not clip:
            return None
        return "tensor" if mode == "reference" else "kl"
    if not isinstance(clip, str):
        raise TypeError(f"{caller}: clip must be {allowed}, got {clip!r}")
    if clip not in ("kl", "tensor"):
        raise ValueError(
            f"{caller}: clip must be {allowed}, got {clip!r}.{did_you_mean(clip, ('kl', 'tensor'))}"
        )
    if clip == "kl" and mode == "reference":
        raise ValueError(
            f"{caller}: clip is 'kl', which mode='reference' doesn't have; it has clip='tensor'"
        )
    return clip


def check_layers(caller: str, layers: Any, mode: Any) -> None:
    if not (hasattr(layers, "blocks") and hasattr(layers, "fingerprint")):
        raise TypeError(
            f"{caller}: layers must be what boostax.capture_layers(loss_fn, params, batch) "
            f"returned, got {type(layers).__name__}"
        )
    if mode not in MODES:
        raise ValueError(
            f"{caller}: mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}."
            f"{did_you_mean(str(mode), MODES)}"
        )
    if layers.mode != mode:
        raise ValueError(
            f"{caller}: mode is {mode!r}, but the layers were captured with mode={layers.mode!r}, "
            f"whose statistics are others; give capture_layers and {caller} the same mode"
        )


def check_split_indices(caller: str, split_indices: Any, layers: int) -> tuple[int, ...]:
    """Return the last layer of each bucket, the very last one included."""
    if split_indices is None:
        split_indices = ()
    allowed = f"None or increasing ints in 0 to {layers - 1}, the last layer of each bucket"
    if not isinstance(split_indices, Sequence) or isinstance(split_indices, str):
        raise TypeError(f"{caller}: split_indices must be {allowed}, got {split_indices!r}")
    if not all(whole_number(index) for index in split_indices):
        raise TypeError(f"{caller}: split_indices must be {allowed}, got {split_indices!r}")
    ends = tuple(int(index) for index in split_indices)
    if any(a >= b for a, b in zip((-1, *ends), ends, strict=False)) or any(
        end >= layers for end in ends
    ):
        raise ValueError(
            f"{caller}: split_indices must be {allowed} of the {layers} layers, got "
            f"{tuple(split_indices)!r}"
        )
    return ends


def check_axes(caller: str, axis_name: Any) -> tuple[str, ...]:
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    axes = tuple(check_axis(caller, "axis_name", name) for name in names)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{caller}: axis_name must name each axis once, got {axis_name!r}")
    return axes
