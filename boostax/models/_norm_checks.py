"""Checks of the norm layers' settings, when they are built, and of their input, at a call."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

__all__ = [
    "axis_in",
    "channel_axis",
    "check_affine",
    "check_channels",
    "check_epsilon",
    "check_flag",
    "check_floating",
    "check_int",
    "check_momentum",
    "check_rank",
    "check_tracking",
    "check_unbiased",
    "count_of",
    "dims_of",
    "group_count",
    "group_settings",
]


def count_of(layer: str, argument: str, value: Any) -> int:
    """Return an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{layer}: {argument} must be an int of at least 1, got {value!r} "
            f"({type(value).__name__})"
        )
    if value < 1:
        raise ValueError(f"{layer}: {argument} must be at least 1, got {value}")
    return int(value)


def _number(layer: str, argument: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{layer}: {argument} must be a number {allowed}, got {value!r} ({type(value).__name__})"
        )
    return float(value)


def check_momentum(layer: str, value: Any) -> None:
    """Refuse a momentum outside [0, 1]."""
    if not 0 <= _number(layer, "momentum", value, "in [0, 1]") <= 1:
        raise ValueError(
            f"{layer}: momentum is the share of the old value that running statistics keep and "
            f"must be in [0, 1], got {value}"
        )


def check_epsilon(layer: str, value: Any) -> None:
    """Refuse an epsilon that is not positive and finite."""
    if not 0 < _number(layer, "epsilon", value, "above 0") < float("inf"):
        raise ValueError(f"{layer}: epsilon must be above 0 and finite, got {value}")


def check_flag(layer: str, argument: str, value: Any) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{layer}: {argument} must be True or False, got {value!r}")


def check_affine(layer: str, epsilon: Any, use_scale: Any, use_bias: Any) -> None:
    """Refuse what epsilon, use_scale and use_bias can't be."""
    check_epsilon(layer, epsilon)
    check_flag(layer, "use_scale", use_scale)
    check_flag(layer, "use_bias", use_bias)


def check_tracking(layer: str, track: Any, momentum: Any, unbiased: Any, fast: Any) -> None:
    """Refuse what the settings of running statistics can't be."""
    check_flag(layer, "track_running_stats", track)
    check_momentum(layer, momentum)
    check_flag(layer, "unbiased", unbiased)
    if track and fast:
        raise ValueError(
            f"{layer}: use_fast_variance does not go with track_running_stats; leave it out"
        )
    if unbiased and not track:
        raise ValueError(
            f"{layer}: unbiased is for running statistics; set track_running_stats=True"
        )


def check_int(layer: str, argument: str, value: Any) -> None:
    """Refuse anything but an int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{layer}: {argument} must be an int, got {value!r}")


def channel_axis(layer: str, argument: str, value: Any) -> int:
    """Return a channel axis, which is not the batch's."""
    check_int(layer, argument, value)
    if value == 0:
        raise ValueError(
            f"{layer}: {argument} 0 is the batch axis; channels are on another, such as -1"
        )
    return int(value)


def axis_in(layer: str, argument: str, axis: Any, rank: int, batch: bool = False) -> int:
    """Return ``axis`` counted from 0; ``batch`` allows the first axis too."""
    if not -rank <= axis < rank or (axis == -rank and not batch):
        raise ValueError(
            f"{layer}: {argument} {axis} is not a channel axis of an input of rank {rank}"
        )
    return axis % rank


def dims_of(layer: str, value: Any) -> tuple[int, ...] | None:
    """Return the numbers of spatial axes that are allowed, or None for any."""
    if value is None:
        return None
    several = (
        tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    )
    for one in several:
        if isinstance(one, bool) or not isinstance(one, numbers.Integral):
            raise TypeError(f"{layer}: spatial_dims must be an int or several, got {value!r}")
        if one < 0:
            raise ValueError(f"{layer}: spatial_dims must not be negative, got {value!r}")
    return tuple(int(one) for one in several)


def check_floating(layer: str, x: Any) -> None:
    """Refuse an input that is not floating."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        raise TypeError(
            f"{layer}: the input must be floating, got {jnp.result_type(x)}; cast it, for example "
            "to float32"
        )


def check_rank(layer: str, x: Any, least: int, dims: tuple[int, ...] | None = None) -> None:
    """Refuse an input of another rank: batch, spatial axes, channels."""
    rank = jnp.ndim(x)
    if rank < least:
        spatial = " and at least one spatial axis" if least > 2 else ""
        raise ValueError(
            f"{layer}: the input must have a batch axis, a channel axis{spatial} (rank {least} or "
            f"more), got shape {jnp.shape(x)}"
        )
    if dims is not None and rank - 2 not in dims:
        allowed = " or ".join(str(n + 2) for n in dims)
        raise ValueError(
            f"{layer}: with spatial_dims={dims[0] if len(dims) == 1 else dims} the input must have "
            f"rank {allowed} (batch, spatial axes, channels), got shape {jnp.shape(x)}"
        )


def check_channels(layer: str, x: Any, axes: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse an input whose feature axes have other sizes than the parameters."""
    got = tuple(jnp.shape(x)[axis] for axis in axes)
    if got != tuple(expected):
        what = f"num_features={expected[0] if len(expected) == 1 else tuple(expected)}"
        raise ValueError(
            f"{layer}({what}): the input has {got[0] if len(got) == 1 else got} channels on axis "
            f"{axes[0] if len(axes) == 1 else tuple(axes)}, shape {jnp.shape(x)}; channels are last "
            "unless the layer is told another axis"
        )


def check_unbiased(layer: str, count: Any) -> None:
    """Refuse the unbiased variance of one value."""
    if isinstance(count, int) and count < 2:
        raise ValueError(
            f"{layer}(unbiased=True): the variance of {count} value a channel has no unbiased "
            "estimate; give more examples, or set unbiased=False"
        )


def group_settings(layer: str, num_groups: Any, group_size: Any) -> None:
    """Refuse what num_groups and group_size can't be, whatever the channels."""
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"{layer}: give one of num_groups and group_size, got num_groups={num_groups!r} and "
            f"group_size={group_size!r}; num_groups=None takes its default of 32 away"
        )
    if group_size is not None:
        count_of(layer, "group_size", group_size)
    else:
        count_of(layer, "num_groups", num_groups)


def group_count(layer: str, channels: int, num_groups: Any, group_size: Any) -> int:
    """Return the number of groups that ``channels`` are cut into."""
    group_settings(layer, num_groups, group_size)
    argument = "num_groups" if group_size is None else "group_size"
    value = int(num_groups if group_size is None else group_size)
    if channels % value:
        allowed = [n for n in range(1, channels + 1) if channels % n == 0]
        raise ValueError(
            f"{layer}: {argument} {value} does not divide the {channels} channels; allowed are "
            f"{allowed}"
        )
    return value if group_size is None else channels // value
