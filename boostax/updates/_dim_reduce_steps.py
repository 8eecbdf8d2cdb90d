"""One step of ``dim_reduce``: the default rule, and the reference's with its own bookkeeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax.updates._dim_reduce_checks import Settings
from boostax.updates._dim_reduce_math import backtrack, curvature, dot, next_metric

__all__ = ["ACCEPTED", "FAILED", "FLAT", "NONFINITE", "UPHILL", "Problem", "default", "reference"]

ACCEPTED, FAILED, NONFINITE, FLAT, UPHILL = 1, 2, 3, 4, 5
_REFERENCE_CURVATURE = 1e-20


@dataclasses.dataclass(frozen=True)
class Problem:
    """What one step is about.

    Attributes:
      gradient: the projected gradient that the direction is made of, (k,).
      raw: the projected gradient of the loss itself, (k,).
      leaves: the gradient's covered leaves, in float32 or better.
      momentum: the momentum's covered leaves; empty with alpha = 0.
      value: the loss, in float32 or better.
      back: from coefficients (j, k) to j lists of covered leaves, in one pass over the basis.
      loss_at: from covered leaves of an update to the loss behind it.
    """

    gradient: jax.Array
    raw: jax.Array
    leaves: Sequence[jax.Array]
    momentum: Sequence[jax.Array]
    value: jax.Array
    back: Callable[[jax.Array], Sequence[Sequence[jax.Array]]]
    loss_at: Callable[[Sequence[jax.Array]], jax.Array]


def default(
    settings: Settings, state: Any, problem: Problem
) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Return the update's leaves, the momentum's, and the state without its momentum."""
    gradient = problem.gradient
    product, sound = curvature(state.step, gradient - state.gradient, settings.curvature_tol)
    use = state.has_pair & sound
    metric = next_metric(state.metric, state.step, gradient - state.gradient, product, use)
    direction = -dot(metric, gradient)
    slope = dot(problem.raw, direction)

    finite = jnp.isfinite(problem.value) & jnp.all(jnp.isfinite(gradient)) & jnp.isfinite(slope)
    flat = jnp.all(gradient == 0)
    # Without a slope in the subspace there is still the part outside of it, whose length is fixed.
    without_slope = jnp.where(flat & (settings.alpha > 0), 1, 0)
    limit = jnp.where(slope < 0, settings.max_backtracks + 1, without_slope)

    moved, momentum = _back(settings, problem, direction, gradient)
    at = lambda factor: _update(settings, factor, moved, momentum)
    found = backtrack(
        lambda factor: problem.loss_at(at(factor)),
        problem.value,
        slope,
        rho=settings.rho,
        sigma=settings.sigma,
        limit=jnp.where(finite, limit, 0).astype(jnp.int32),
    )
    ok = found.accepted

    # x + -0.0 is x for every x, -0.0 included: a step that fails changes no bit.
    updates = [jnp.where(ok, leaf, -0.0) for leaf in at(found.factor)]
    status = jnp.where(flat, FLAT, jnp.where(slope < 0, FAILED, UPHILL))
    status = jnp.where(ok, ACCEPTED, jnp.where(finite, status, NONFINITE)).astype(jnp.int32)
    searched = (status == FAILED) | (status == UPHILL)
    failures = jnp.where(ok, 0, state.failures + searched.astype(jnp.int32))
    reset = searched & (failures >= settings.reset_after)
    tried, metric = metric, jnp.where(ok, metric, state.metric)
    new = state._replace(
        metric=jnp.where(reset, _fresh(settings, tried), metric),
        gradient=jnp.where(ok, gradient, state.gradient),
        step=jnp.where(ok, found.factor * direction, state.step),
        has_pair=ok | (state.has_pair & ~reset),
        status=status,
        trials=found.trials,
        factor=found.factor.astype(jnp.float32),
        curvature_skips=state.curvature_skips + (ok & state.has_pair & ~sound).astype(jnp.int32),
        failures=failures,
        value=problem.value.astype(jnp.float32),
        new_value=found.value.astype(jnp.float32),
    )
    kept = [jnp.where(ok, a, b) for a, b in zip(momentum, problem.momentum, strict=True)]
    return updates, kept, new


def _fresh(settings: Settings, metric: jax.Array) -> jax.Array:
    """Return the identity; after a failure with a multiple of it, as much less as was tried."""
    eye = jnp.eye(len(metric), dtype=metric.dtype)
    shorter = metric * settings.rho ** (settings.max_backtracks + 1)
    # Where even that is lost in rounding, the identity again.
    usable = jnp.all(metric == metric[0, 0] * eye) & (shorter[0, 0] > 1e-30)
    return jnp.where(usable, shorter, eye)


def reference(
    settings: Settings, state: Any, problem: Problem
) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Return the same by the reference's rule.

    It differs: trials are without the momentum, which is taken off afterwards, also where both trials
    failed; the momentum moves each time; a step that failed leaves the metric and the last gradient
    as they were, but counts as a first one; the curvature need only be above 1e-20; and the gradient
    outside of the subspace keeps a loss scale, from which the part inside is taken without it.
    """
    gradient = problem.gradient / settings.loss_scale
    change = gradient - state.gradient
    product = dot(change, state.step)
    sound = product > _REFERENCE_CURVATURE
    metric = next_metric(state.metric, state.step, change, product, state.has_pair & sound)
    direction = -dot(metric, gradient)
    slope = dot(problem.raw / settings.loss_scale, direction)

    moved, momentum = _back(settings, problem, direction, gradient)
    found = backtrack(
        lambda factor: problem.loss_at([factor * leaf for leaf in moved]),
        problem.value,
        slope,
        rho=settings.rho,
        sigma=settings.sigma,
        limit=jnp.int32(2),
    )
    ok = found.accepted
    new = state._replace(
        metric=jnp.where(ok, metric, state.metric),
        gradient=jnp.where(ok, gradient, state.gradient),
        step=jnp.where(ok, found.factor * direction, state.step),
        has_pair=jnp.ones_like(state.has_pair),
        status=jnp.where(ok, ACCEPTED, FAILED).astype(jnp.int32),
        trials=found.trials,
        factor=found.factor.astype(jnp.float32),
        curvature_skips=state.curvature_skips + (state.has_pair & ~sound).astype(jnp.int32),
        failures=jnp.where(ok, 0, state.failures + 1),
        value=problem.value.astype(jnp.float32),
        new_value=found.value.astype(jnp.float32),
    )
    moved = [jnp.where(ok, leaf, 0) for leaf in moved]
    return _update(settings, found.factor, moved, momentum), momentum, new


def _back(
    settings: Settings, problem: Problem, direction: jax.Array, gradient: jax.Array
) -> tuple[Sequence[jax.Array], list[jax.Array]]:
    """Return the direction's leaves and the next momentum's."""
    if settings.alpha == 0:
        return problem.back(direction[None])[0], []
    moved, inside = problem.back(jnp.stack([direction, gradient]))
    momentum = [
        settings.gamma * old + (leaf - part)
        for old, leaf, part in zip(problem.momentum, problem.leaves, inside, strict=True)
    ]
    return moved, momentum


def _update(
    settings: Settings,
    factor: jax.Array,
    moved: Sequence[jax.Array],
    momentum: Sequence[jax.Array],
) -> list[jax.Array]:
    if settings.alpha == 0:
        return [factor * leaf for leaf in moved]
    return [
        factor * leaf - settings.alpha * rest for leaf, rest in zip(moved, momentum, strict=True)
    ]
