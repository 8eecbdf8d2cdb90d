"""What a basis does to one leaf, in float32 or better and without a float32 copy of the basis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["times_coefficients", "times_leaf", "wide", "zeros_of"]


def times_leaf(rows: Any, leaf: Any) -> jax.Array:
    """Return V g for one leaf: rows (k, *shape) and the leaf's shape, to (k,)."""
    dtype = wide(rows, leaf)
    # A product and a sum, not a dot: it reads a bfloat16 basis without a float32 copy, is as exact on
    # every device, and needs no word about split axes.
    product = jnp.asarray(rows).astype(dtype) * jnp.asarray(leaf).astype(dtype)[None]
    return jnp.sum(product, axis=tuple(range(1, product.ndim)))


def wide(*values: Any) -> Any:
    """Return the dtype to sum in: float32, or float64 where a value is."""
    return jnp.result_type(jnp.float32, *values)


def times_coefficients(rows: Any, coefficients: jax.Array) -> jax.Array:
    """Return V^T c for one leaf's rows (k, *shape) and coefficients (*many, k): (*many, *shape).

    Several vectors of coefficients cost one pass over the rows.
    """
    rows = jnp.asarray(rows)
    dtype = wide(rows, coefficients)
    if rows.dtype != jnp.bfloat16 or dtype != jnp.float32:
        return jax.lax.dot_general(
            coefficients.astype(dtype),
            rows.astype(dtype),
            (((coefficients.ndim - 1,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=dtype,
        )
    # Three bfloat16 numbers carry a float32 coefficient whole, and the basis needs no float32 copy.
    parts, rest = [], coefficients.astype(dtype)
    for _ in range(3):
        # Not a cast there and back, which compilers may drop.
        head = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(head.astype(rows.dtype))
        rest = rest - head
    product = jax.lax.dot_general(
        jnp.stack(parts),
        rows,
        (((coefficients.ndim,), (0,)), ((), ())),
        preferred_element_type=dtype,
    )
    return jnp.sum(product, axis=0)


def zeros_of(shape: tuple[int, ...], name: str) -> Any:
    """Return zeros of a dtype given by name."""
    try:
        return jnp.zeros(shape, jnp.dtype(name))
    except TypeError:  # a random key, which has no zero
        return np.zeros(shape, jax.dtypes.float0)
