"""The arithmetic of a scaled backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax import _compat

__all__ = ["checked", "divided", "pulled", "seed", "usable", "wide_zeros"]

# Smaller ratios are subnormal, and flushed to zero.
_SMALLEST = 2.0**-126
# XLA may divide by multiplying with the reciprocal; beyond, that is subnormal and flushed to zero.
_LARGEST = 2.0**126


def pulled(function: Callable[..., tuple[Any, Any]], args: Sequence[Any], scale: Any) -> Any:
    """Return ``(value, gradients of args, aux)`` of a backward pass that starts from ``scale``.

    ``function(*args)`` returns ``(value, aux)``. The gradients are unscaled.
    """
    value, pull, aux = jax.vjp(lambda *given: checked(*function(*given)), *args, has_aux=True)
    # A float16 loss rounds a scale that is no power of two: the rounded one is what was used.
    used = jnp.asarray(scale).astype(jnp.result_type(value))
    return value, unscaled(pull(seed(value, scale)), used), aux


def checked(value: Any, aux: Any) -> tuple[Any, Any]:
    """Return both, where ``value`` can be a loss.

    Raises:
      TypeError: it is no real floating scalar.
    """
    what = "the function must return a real floating scalar"
    if isinstance(value, (tuple, list, dict)) or value is None or isinstance(value, str):
        raise TypeError(f"{what}, got {type(value).__name__}; with (scalar, aux) pass has_aux=True")
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(
            f"{what}, got shape {jnp.shape(value)} and dtype {jnp.result_type(value)}; take the mean "
            "over the batch"
        )
    return value, aux


def seed(value: Any, scale: Any) -> Any:
    """Return what the backward pass of ``value`` starts from."""
    return _compat.like(usable(scale).astype(jnp.result_type(value)), value)


def usable(scale: Any) -> jax.Array:
    """Return scales for the backward pass: one that can't be undone is infinite, and so overflows."""
    scale = jnp.asarray(scale)
    return jnp.where(scale <= _LARGEST, scale, jnp.inf).astype(scale.dtype)


def ratio_of(scale: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``scale / other``; infinite, and so an overflow, where float32 can't hold that."""
    ratio = scale / other
    return jnp.where(ratio >= _SMALLEST, ratio, jnp.inf)


def unscaled(grads: Any, scale: Any) -> Any:
    """Return gradients divided by the scale, in float32 or better."""
    return jax.tree.map(lambda grad: divided(grad, scale), grads)


def divided(grad: Any, scale: Any) -> Any:
    """Return one leaf divided by the scale, in float32 or better."""
    if not jnp.issubdtype(jnp.result_type(grad), jnp.inexact):
        return grad
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    return wide / jnp.asarray(scale, wide.real.dtype)


def wide_zeros(leaf: Any) -> jax.Array:
    """Return zeros for a leaf that is not trained, of the dtype that an unscaled gradient has."""
    dtype = jnp.result_type(leaf)
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
    return jnp.zeros_like(leaf, dtype=wide)
