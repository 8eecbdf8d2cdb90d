"""The small linear algebra of ``dim_reduce``, and its line search.

| symbol | shape | meaning |
|---|---|---|
| B | (k, k) | estimate of the inverse Hessian in the subspace |
| g | (k,) | projected gradient |
| s, y | (k,) | an accepted step, and the change of the projected gradient along it |
| t | () | rho^m, the factor that the direction is shortened by |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from boostax import _compat

__all__ = ["Found", "backtrack", "curvature", "dot", "next_metric"]

_EXACT = jax.lax.Precision.HIGHEST


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a matrix or vector product without reduced precision."""
    return jnp.matmul(a, b, precision=_EXACT)


def curvature(step: jax.Array, change: jax.Array, tolerance: float) -> tuple[jax.Array, jax.Array]:
    """Return ``y^T s``, and whether it is positive beside ``|y| |s|``."""
    product = dot(change, step)
    scale = jnp.sqrt(dot(change, change)) * jnp.sqrt(dot(step, step))
    return product, (product > tolerance * scale) & (product > 0) & jnp.isfinite(scale)


def next_metric(
    metric: jax.Array, step: jax.Array, change: jax.Array, product: jax.Array, use: jax.Array
) -> jax.Array:
    """Return ``(I - s y^T / c) B (I - y s^T / c) + s s^T / c`` with ``c = y^T s``, or B."""
    over = 1 / jnp.where(use, product, 1)
    left = jnp.eye(len(step), dtype=metric.dtype) - over * jnp.outer(step, change)
    new = dot(dot(left, metric), left.T) + over * jnp.outer(step, step)
    # Rounding alone makes it unsymmetric, and in time not positive definite.
    new = 0.5 * (new + new.T)
    return jnp.where(use & jnp.all(jnp.isfinite(new)), new, metric)


class Found(NamedTuple):
    """What a line search ended with.

    Attributes:
      accepted: whether a trial was accepted.
      factor: its ``t``; 0 where none was.
      value: the loss there; the loss before where none was.
      trials: the number of trials.
    """

    accepted: jax.Array
    factor: jax.Array
    value: jax.Array
    trials: jax.Array


def backtrack(
    loss_at: Callable[[jax.Array], jax.Array],
    value: jax.Array,
    slope: jax.Array,
    *,
    rho: float,
    sigma: float,
    limit: jax.Array,
) -> Found:
    """Try ``t = 1, rho, rho^2, ...`` until ``loss_at(t) < value + sigma t slope``.

    A loss that is not finite is not lower.

    Args:
      loss_at: the loss of the point that belongs to ``t``.
      value: the loss before.
      slope: the derivative of the loss by ``t`` at 0.
      rho: what ``t`` is multiplied by after each trial.
      sigma: the part of the decrease by the slope that is asked for.
      limit: the most trials, an int32 scalar.
    """

    def trying(carry: Found) -> jax.Array:
        return ~carry.accepted & (carry.trials < limit)

    def one(carry: Found) -> Found:
        trials = carry.trials
        factor = jnp.where(trials == 0, jnp.ones_like(carry.factor), rho * carry.factor)
        new = loss_at(factor).astype(carry.value.dtype)
        bound = value + sigma * (factor * slope).astype(value.dtype)
        return Found(jnp.isfinite(new) & (new < bound), factor, new, trials + 1)

    start = Found(jnp.zeros((), bool), jnp.zeros_like(slope), value, jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(trying, one, _compat.as_carry(one, start))
    return end._replace(
        factor=jnp.where(end.accepted, end.factor, 0),
        value=jnp.where(end.accepted, end.value, value),
    )
