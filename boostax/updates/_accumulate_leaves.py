"""What ``accumulate`` does leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax import _compat
from boostax.updates._accumulate_checks import is_float0, is_inexact
from boostax.updates._skip import skip


def window_size(every: Any, updates: jax.Array) -> Any:
    if not callable(every):
        return every
    return jnp.maximum(jnp.asarray(every(updates)).astype(jnp.int32), 1)


def sum_dtype(leaf: Any, dtype: Any) -> Any:
    """Return the dtype that a leaf is summed in: float32 is a floor, a lower one was asked for."""
    own = jnp.result_type(leaf)
    if dtype == jnp.float32 and own in (jnp.float64, jnp.complex128):
        dtype = jnp.float64
    if jnp.issubdtype(own, jnp.complexfloating):
        return jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    return dtype


def mean_of(old: Any, value: Any, old_weight: Any, weight: Any, total: Any) -> Any:
    """Return ``(old_weight * old + weight * value) / total`` without a product or sum that overflows.

    With weights of 1 this is ``old + (value - old) / total`` to the last bit.
    """
    if jnp.iscomplexobj(old):
        parts = [
            mean_of(part(old), part(value), old_weight, weight, total)
            for part in (jnp.real, jnp.imag)
        ]
        return jax.lax.complex(*parts)
    wide = lambda scalar: jnp.asarray(scalar, jnp.promote_types(old.dtype, jnp.float32))
    base, other, share = old, value, wide(1.0 if weight is None else weight)
    if weight is not None:
        # From the heavier side, so that the step is at most half the difference.
        heavy = weight > old_weight
        base, other = jnp.where(heavy, value, old), jnp.where(heavy, old, value)
        share = jnp.where(heavy, wide(old_weight), share)
    # Halves, because the difference of two finite numbers can be infinite. A factor where there are
    # weights, because XLA makes x / (total / share) a product that overflows.
    step = other * 0.5 - base * 0.5
    if weight is None:
        return base + step / (wide(total) * 0.5).astype(old.dtype)
    factor = 2.0 * (share / jnp.where(total == 0, 1.0, wide(total)))
    return base + step * factor.astype(old.dtype)


def zero_sum(leaf: Any, dtype: Any) -> Any:
    if not is_inexact(leaf):
        return optax.MaskedNode()
    return jnp.zeros_like(leaf, dtype=sum_dtype(leaf, dtype))


def zero_extra(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def zero_update(grad: Any) -> Any:
    return grad if is_float0(grad) else _compat.zeros_like(grad)


def in_dtype(params: Any, dtype: Any) -> Any:
    """Return the parameters with their floating leaves seen as ``dtype``."""
    return jax.tree.map(
        lambda p: jnp.asarray(p).astype(sum_dtype(p, dtype)) if is_inexact(p) else p, params
    )


def as_dtype_of(value: Any, like: Any) -> Any:
    if is_float0(value) or value is like or jnp.result_type(value) == jnp.result_type(like):
        return value
    return jnp.asarray(value).astype(jnp.result_type(like))


def unshared(state: Any, params: Any) -> Any:
    """Copy what ``inner.init`` took over from the parameters, so that both can be donated."""
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, copy=True) if id(leaf) in taken else leaf, state
    )


def all_finite(tree: Any) -> jax.Array:
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)


def skip_where(drop: Any, state: Any) -> Any:
    """Return ``state`` as a dropped window leaves it where ``drop``; most leaves never change."""
    if drop is False:
        return state
    return jax.tree.map(
        lambda new, old: old if new is old else jnp.where(drop, new, old), skip(state), state
    )
