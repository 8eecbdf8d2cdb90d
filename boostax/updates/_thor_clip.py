"""Bounds on the updates of ``scale_by_thor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["clip_tensors", "kl_scale"]


def kl_scale(
    updates: Mapping[str, jax.Array],
    grads: Mapping[str, jax.Array],
    rate: Callable[[str, Any], Any],
    count: Any,
    bound: float,
) -> jax.Array:
    """Return ``min(1, sqrt(bound / sum(rate^2 * update * gradient)))``, 1 for a sum that is not > 0."""
    # In units of the largest elements, whose products can leave float32's range.
    units = [_unit(updates), _unit(grads)]
    terms = [
        jnp.asarray(rate(path, count), jnp.float32) ** 2
        * jnp.real(jnp.vdot(_over(grads[path], units[1]), _over(update, units[0])))
        for path, update in updates.items()
    ]
    total = sum(terms, jnp.zeros((), jnp.float32))
    root = jnp.sqrt(bound / jnp.where(total > 0, total, 1.0))
    bounded = jnp.minimum(1.0, root / jnp.sqrt(units[0]) / jnp.sqrt(units[1]))
    return jnp.where(total > 0, bounded, 1.0)


def _unit(leaves: Mapping[str, jax.Array]) -> jax.Array:
    sizes = [jnp.max(jnp.abs(leaf)).astype(jnp.float32) for leaf in leaves.values() if leaf.size]
    largest = jnp.max(jnp.stack(sizes)) if sizes else jnp.float32(0)
    return jnp.where(largest > 0, largest, 1.0)


def _over(leaf: jax.Array, unit: jax.Array) -> jax.Array:
    return leaf / unit.astype(leaf.real.dtype)


def clip_tensors(updates: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Shorten each tensor that is longer than 1 to the length 1."""

    def one(leaf: jax.Array) -> jax.Array:
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        norm = jnp.sqrt(jnp.sum(jnp.real(wide * jnp.conj(wide))))
        return jnp.where(norm > 1, wide / jnp.where(norm > 1, norm, 1), wide).astype(leaf.dtype)

    return {path: one(leaf) for path, leaf in updates.items()}
