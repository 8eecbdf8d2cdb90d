"""Checks of the arguments of loss scales."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = [
    "check_argnums",
    "check_bounds",
    "check_differentiable",
    "check_factor",
    "check_scale",
    "check_window",
    "scale_for",
]

_LARGEST = float(np.finfo(np.float32).max)
# Below, float32 has no room left for what is multiplied by it.
_SMALLEST = float(np.finfo(np.float32).tiny)


def check_number(caller: str, name: str, value: Any) -> float:
    """Return a real number, or an array of shape (), as a float; or raise a TypeError."""
    if isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer):
        value = value.item() if value.shape == () else value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{caller}: {name} must be a number, got {value!r}")
    return _as_float(value)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int
        return math.inf if value > 0 else -math.inf


def check_bounds(caller: str, low: Any, high: Any) -> tuple[float, float]:
    """Return both bounds."""
    low, high = check_number(caller, "min_scale", low), check_number(caller, "max_scale", high)
    if not _SMALLEST <= low <= _LARGEST:
        raise ValueError(
            f"{caller}: min_scale must be a float32 number of at least {_SMALLEST:.3g}, got {low}"
        )
    if not low <= high <= _LARGEST:
        raise ValueError(
            f"{caller}: max_scale must be finite and at least min_scale={low}, got {high}"
        )
    return low, high


def check_scale(caller: str, name: str, value: Any, low: float, high: float) -> float:
    """Return a scale between the bounds."""
    value = check_number(caller, name, value)
    if not low <= value <= high:
        raise ValueError(
            f"{caller}: {name} must lie in [min_scale, max_scale] = [{low:g}, {high:g}], got {value}; "
            "move the bound, or start elsewhere"
        )
    return value


def check_factor(caller: str, value: Any) -> float:
    """Return what a scale grows and shrinks by."""
    value = check_number(caller, "factor", value)
    in_float32 = np.float32(min(value, _LARGEST))
    if not (in_float32 > 1 and np.float32(1 / value) < 1) or value == math.inf:
        raise ValueError(f"{caller}: factor must be a finite number > 1 in float32, got {value}")
    return value


def check_window(caller: str, value: Any) -> int:
    """Return how many finite calls a scale waits for."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{caller}: window must be an int >= 1, got {value!r}")
    if not 1 <= int(value) <= 2**30:
        raise ValueError(f"{caller}: window must be an int from 1 to 2**30, got {value}")
    return int(value)


def check_argnums(value: Any) -> tuple[int, ...]:
    """Return which positional arguments are differentiated."""
    several = isinstance(value, (tuple, list))
    chosen = tuple(value) if several else (value,)
    if not chosen or not all(
        isinstance(n, numbers.Integral) and not isinstance(n, (bool, np.bool_)) for n in chosen
    ):
        raise TypeError(
            f"value_and_grad: argnums must be an int or a non-empty tuple of them, got {value!r}"
        )
    return tuple(int(n) for n in chosen)


def check_differentiable(number: int, value: Any) -> None:
    """Raise where a positional argument has leaves without gradients."""
    for leaf in jax.tree.leaves(value):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"value_and_grad: argument {number} has a leaf of dtype {jnp.result_type(leaf)}, which "
                "has no gradient; pass such leaves in an argument that argnums leaves out"
            )


def scale_for(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return a scale that was given as a number or array, as float32 of this shape.

    Args:
      name: the argument's name, for messages.
      value: a number, or an array of shape (), (1,) or ``shape``.
      shape: the shape of the result, () or (groups,).

    Raises:
      TypeError: it is neither a number nor an array of numbers.
      ValueError: another shape, or a value that is not finite and above 0.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array)) or (
        shape != () and isinstance(value, (tuple, list))
    )
    is_array = is_array and _is_real(value)
    allowed = "a number, or an array of shape () or (1,)"
    if shape:
        allowed = f"one number for all {shape[0]} groups, or one a group"
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be {allowed}, known on the host; got a traced array: put it into the state's "
            "`scale` yourself"
        )
    if not (is_number or is_array):
        got = f"{value!r} ({type(value).__name__})"
        raise TypeError(f"{name} must be {allowed}, got {got}")
    array = np.asarray(_as_float(value) if is_number else value, np.float64)
    if array.shape not in ((), (1,), shape):
        raise ValueError(f"{name} must be {allowed}, got the shape {array.shape}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.all((array >= _SMALLEST) & (array <= _LARGEST)):
        raise ValueError(
            f"{name} must be finite and at least {_SMALLEST:.3g} in float32, got {value}"
        )
    array = array.reshape(() if array.size == 1 else shape)
    return np.broadcast_to(array, shape)


def _is_real(value: Any) -> bool:
    try:
        dtype = jnp.result_type(*(value if isinstance(value, (tuple, list)) else (value,)))
    except (TypeError, ValueError):
        return False
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
