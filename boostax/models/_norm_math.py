"""Statistics of the norm layers that Flax lacks: two passes, float32 or better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax.models._norm_checks import check_unbiased

__all__ = [
    "Moments",
    "at_least_float32",
    "canonical",
    "ghost_normalized",
    "instance_normalized",
    "moments",
    "normalized",
    "result_dtype",
    "running",
    "stats_init",
    "unbiased_running_var",
    "value_of",
    "values_per_channel",
]


class Moments(NamedTuple):
    """Statistics with the reduced axes kept at size 1.

    Attributes:
      mean: float32 or better.
      var: biased variance, of the same shape and dtype.
      count: the number of values behind them, a Python int or, under a mask, an array.
    """

    mean: jax.Array
    var: jax.Array
    count: Any


def canonical(axes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return axes as sorted numbers from 0."""
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(sorted({axis % rank for axis in axes}))


def at_least_float32(values: Sequence[Any], dtype: Any = None) -> tuple[Any, ...]:
    """Promote arrays to their common dtype, float32 at least; None stays None.

    Flax casts the input down to ``dtype`` ahead of the statistics; here only the output is cast.
    """
    del dtype
    wide = jnp.result_type(jnp.float32, *(v for v in values if v is not None))
    return tuple(v if v is None else jnp.asarray(v, wide) for v in values)


def result_dtype(dtype: Any, *values: Any) -> Any:
    """Return ``dtype``, or the common dtype of the arrays that are not None."""
    return jnp.result_type(*(v for v in values if v is not None)) if dtype is None else dtype


def moments(
    x: jax.Array,
    axes: Sequence[int],
    *,
    mask: Any = None,
    axis_name: Any = None,
    axis_index_groups: Any = None,
) -> Moments:
    """Return mean and biased variance over ``axes``, and over the devices of ``axis_name``."""
    (x,) = at_least_float32([x])

    def total(value: Any) -> Any:
        summed = jnp.sum(value, axes, keepdims=True)
        if axis_name is None:
            return summed
        return lax.psum(summed, axis_name, axis_index_groups=axis_index_groups)

    if mask is None:
        count = math.prod(x.shape[axis] for axis in axes)
        if axis_name is not None:
            count = lax.psum(count, axis_name, axis_index_groups=axis_index_groups)
        divisor = max(count, 1)
        kept = lambda value: value
    else:
        mask = jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)
        count = total(mask.astype(x.dtype))
        divisor = jnp.maximum(count, 1)
        kept = lambda value: jnp.where(mask, value, 0)
    mean = total(kept(x)) / divisor
    var = total(kept(lax.square(x - mean))) / divisor
    return Moments(mean, var, count)


def normalized(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: Any,
    bias: Any,
    feature_axes: Sequence[int],
    epsilon: float,
) -> jax.Array:
    """Return ``(x - mean) / sqrt(var + epsilon) * scale + bias``, float32 or better."""
    x, mean, var, scale, bias = at_least_float32([x, mean, var, scale, bias])
    shape = [size if axis in feature_axes else 1 for axis, size in enumerate(x.shape)]
    factor = lax.rsqrt(var + epsilon)
    if scale is not None:
        factor = factor * scale.reshape(shape)
    y = (x - mean) * factor
    return y if bias is None else y + bias.reshape(shape)


def running(
    old: tuple[Any, Any],
    stats: Moments,
    feature_axes: Sequence[int],
    *,
    momentum: float,
    unbiased: bool,
    axis_name: Any = None,
    axis_index_groups: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the running mean and variance after statistics of several chunks, weighed by counts.

    ``axis_name`` averages over devices whose chunks are their own.
    """
    mean, var, count = stats
    if unbiased:
        var = var * (count / jnp.maximum(jnp.asarray(count) - 1, 1))
    others = tuple(axis for axis in range(mean.ndim) if axis not in feature_axes)
    weight = jnp.broadcast_to(jnp.asarray(count, mean.dtype), mean.shape)
    total = jnp.sum(weight, others)
    means = [jnp.sum(value * weight, others) for value in (mean, var)]
    if axis_name is not None:
        total, *means = (
            lax.psum(value, axis_name, axis_index_groups=axis_index_groups)
            for value in (total, *means)
        )
    some = total > 0
    new = []
    for before, summed in zip(old, means, strict=True):
        before = jnp.asarray(before)
        now = momentum * before + (1 - momentum) * (summed / jnp.where(some, total, 1))
        # A mask that left nothing leaves the running statistics too.
        new.append(lax.stop_gradient(jnp.where(some, now, before).astype(before.dtype)))
    return new[0], new[1]


def stats_init(value: float, shape: tuple[int, ...]) -> jax.Array:
    """Return a running statistic's first value."""
    return jnp.full(shape, value, jnp.float32)


def values_per_channel(
    shape: Sequence[int],
    feature_axes: Sequence[int],
    *,
    mask: Any = None,
    axis_name: Any = None,
    axis_index_groups: Any = None,
) -> Any:
    """Return how many values a batch norm's statistics come from: an int, or an array for a mask."""
    others = tuple(axis for axis in range(len(shape)) if axis not in feature_axes)
    if mask is None:
        count: Any = math.prod(shape[axis] for axis in others)
    else:
        count = jnp.sum(jnp.broadcast_to(jnp.asarray(mask, bool), shape), others, jnp.float32)
    if axis_name is None:
        return count
    return lax.psum(count, axis_name, axis_index_groups=axis_index_groups)


def unbiased_running_var(old: Any, new: Any, momentum: float, count: Any) -> jax.Array:
    """Turn a running variance that took in a biased variance of ``count`` values into an unbiased one.

    ``new = m old + (1 - m) var`` becomes ``m old + (1 - m) var count / (count - 1)``.
    """
    kept = momentum * jnp.asarray(old)
    factor = count / jnp.maximum(jnp.asarray(count) - 1, 1)
    return lax.stop_gradient(kept + (jnp.asarray(new) - kept) * factor)


def ghost_normalized(
    x: jax.Array,
    axes: tuple[int, ...],
    size: int,
    scale: Any,
    bias: Any,
    epsilon: float,
    mask: Any,
    name: str,
) -> tuple[jax.Array, Moments]:
    """Normalise chunks of ``size`` examples; return float32 values and the chunks' statistics."""
    if 0 in axes:
        raise ValueError(f"{name}: axis 0 is the batch's and can't be the channels'")
    if x.shape[0] % size:
        raise ValueError(
            f"{name}: the batch of {x.shape[0]} can't be cut into chunks of ghost_batch_size {size}; "
            f"give a multiple of {size} examples (on each device, where the layer sees its own part)"
        )
    cut = lambda value: value.reshape(value.shape[0] // size, size, *value.shape[1:])
    chunks = cut(x)
    features = tuple(axis + 1 for axis in axes)
    others = tuple(a for a in range(1, chunks.ndim) if a not in features)
    where = None if mask is None else cut(jnp.broadcast_to(jnp.asarray(mask, bool), x.shape))
    stats = moments(chunks, others, mask=where)
    y = normalized(chunks, stats.mean, stats.var, scale, bias, features, epsilon)
    return y.reshape(x.shape), stats


def instance_normalized(
    x: jax.Array,
    features: tuple[int, ...],
    scale: Any,
    bias: Any,
    old: tuple[Any, Any],
    use_running_average: bool,
    layer: Any,
    mask: Any,
) -> tuple[jax.Array, tuple[Any, Any]]:
    """Normalise by each example's statistics, or by running ones; return float32 and new ones.

    ``layer`` has the settings: epsilon, momentum, unbiased, axis_name, axis_index_groups.
    """
    if use_running_average:
        shape = [size if axis in features else 1 for axis, size in enumerate(x.shape)]
        mean, var = (jnp.asarray(value).reshape(shape) for value in old)
        return normalized(x, mean, var, scale, bias, features, layer.epsilon), old
    stats = moments(
        x,
        tuple(axis for axis in range(1, x.ndim) if axis not in features),
        mask=mask,
        axis_name=layer.axis_name,
        axis_index_groups=layer.axis_index_groups,
    )
    if layer.unbiased:
        check_unbiased(type(layer).__name__, stats.count)
    y = normalized(x, stats.mean, stats.var, scale, bias, features, layer.epsilon)
    new = running(old, stats, features, momentum=layer.momentum, unbiased=layer.unbiased)
    return y, new


def value_of(variable: Any) -> Any:
    """Return an nnx variable's array, or None for None."""
    return None if variable is None else variable[...]
