"""AdaSum of two vectors, in parts: sums that devices can merge, and the combination.

The dot products are taken of vectors scaled by powers of two, which is exact, so that squares
neither overflow nor vanish, and the scales travel with the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from boostax import _compat

__all__ = ["Sums", "combine", "compute_dtype", "merge", "merge_all", "sums_of", "sums_of_all"]

_CHAIN = 128
Pairs = list[tuple[jax.Array, jax.Array]]


class Sums(NamedTuple):
    """Dot products of two vectors, or of a part of them.

    Attributes:
      scale_a: power of two that ``a`` was divided by.
      scale_b: the same for ``b``.
      aa: |a / scale_a|^2.
      bb: |b / scale_b|^2.
      ab: (a / scale_a) . (b / scale_b).
    """

    scale_a: Any
    scale_b: Any
    aa: Any
    bb: Any
    ab: Any

    def swapped(self) -> Sums:
        """Return the sums of ``(b, a)``."""
        return Sums(self.scale_b, self.scale_a, self.bb, self.aa, self.ab)


def compute_dtype(dtype: Any) -> Any:
    """Return the dtype that dot products of ``dtype`` are taken in: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def sums_of(a: jax.Array, b: jax.Array) -> Sums:
    """Return the sums over the last axis of two floating arrays of the same shape."""
    scale_a, scale_b = _scale(a), _scale(b)
    dots = _dots(a * (1 / scale_a)[..., None], b * (1 / scale_b)[..., None])
    return Sums(scale_a, scale_b, *dots)


def sums_of_all(make: Callable[[], Pairs]) -> list[Sums]:
    """Return the sums of several pairs of arrays, over their last axes.

    On a CPU the scales are left out where no square needs them: there they cost more than all else,
    and a branch costs nothing. ``make`` gives the pairs; it is called anew for the other branch, so
    that nothing is put into memory for that branch alone.
    """
    scaled = lambda: [sums_of(a, b) for a, b in make()]
    return lax.platform_dependent(cpu=lambda: _where_safe(make, scaled), default=scaled)


def _where_safe(make: Callable[[], Pairs], scaled: Callable[[], list[Sums]]) -> list[Sums]:
    pairs = make()
    plain = [_plain_sums(a, b) for a, b in pairs]
    safe = jnp.bool_(True)
    for sums in plain:
        # With the squares in here, what got lost below the smallest normal number is nothing to them.
        info = jnp.finfo(sums.aa.dtype)
        low, high = info.tiny**0.5, info.max**0.5
        for square in (sums.aa, sums.bb):
            safe &= jnp.all((square > low) & (square < high))
    return _compat.cond(safe, lambda: plain, scaled)


def _plain_sums(a: jax.Array, b: jax.Array) -> Sums:
    one = _compat.like(jnp.ones(a.shape[:-1], a.dtype), a)
    return Sums(one, one, *_dots(a, b))


def _dots(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """Return a.a, b.b and a.b over the last axis, in one pass, in short chains of additions."""
    size = a.shape[-1]
    width = _width(size)
    whole = size - size % width

    def short(a: jax.Array, b: jax.Array, width: int) -> list[jax.Array]:
        a, b = (x.reshape(*x.shape[:-1], -1, width) for x in (a, b))
        zero = np.zeros((), a.dtype)
        add = lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True))
        sums = lax.reduce((a * a, b * b, a * b), (zero,) * 3, add, (a.ndim - 1,))
        return [x.sum(-1) for x in sums]

    dots = short(a[..., :whole], b[..., :whole], width)
    if whole < size:
        rest = short(a[..., whole:], b[..., whole:], size - whole)
        dots = [x + y for x, y in zip(dots, rest, strict=True)]
    return dots


def _width(size: int) -> int:
    """Return how many numbers to add up in a chain: near 128, a divisor of the size if there is one."""
    if size <= 2 * _CHAIN:
        return size
    divisors = [w for w in range(_CHAIN // 4, 4 * _CHAIN + 1) if size % w == 0]
    return min(divisors, key=lambda w: abs(w - _CHAIN), default=_CHAIN)


def merge(one: Sums, other: Sums) -> Sums:
    """Return the sums of two disjoint parts of the same vectors; the order does not matter."""
    stacked = Sums(*(jnp.stack(pair) for pair in zip(one, other, strict=True)))
    return merge_all(stacked)


def merge_all(parts: Sums) -> Sums:
    """Merge all parts that lie along the first axis."""
    scale_a, scale_b = parts.scale_a.max(0), parts.scale_b.max(0)
    ratio_a, ratio_b = parts.scale_a / scale_a[None], parts.scale_b / scale_b[None]
    return Sums(
        scale_a,
        scale_b,
        jnp.sum(parts.aa * ratio_a * ratio_a, 0),
        jnp.sum(parts.bb * ratio_b * ratio_b, 0),
        jnp.sum(parts.ab * ratio_a * ratio_b, 0),
    )


def combine(a: jax.Array, b: jax.Array, sums: Sums) -> jax.Array:
    """Return ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``; sums have the rank of ``a``."""
    # a.b / 2|a|^2 itself may lie outside of the dtype's range where a is much smaller than b. What
    # is taken away from a has b's magnitude, and never does.
    from_a = _ratio(sums.ab, sums.aa) * sums.scale_b
    from_b = _ratio(sums.ab, sums.bb) * sums.scale_a
    return (a - from_a * (a * (1 / sums.scale_a))) + (b - from_b * (b * (1 / sums.scale_b)))


def _ratio(dot: jax.Array, square: jax.Array) -> jax.Array:
    # A zero vector has no direction, and gives nothing away. NaN stays NaN.
    zero = square == 0
    return jnp.where(zero, jnp.zeros_like(dot), dot / (2 * jnp.where(zero, 1, square)))


def _scale(x: jax.Array) -> jax.Array:
    """Return a power of two close to the largest magnitude along the last axis."""
    info = jnp.finfo(x.dtype)
    largest = jnp.maximum(jnp.max(x, -1), -jnp.min(x, -1))
    nearest = lax.reduce_precision(largest, exponent_bits=info.nexp, mantissa_bits=0)
    # Both the scale and its inverse are normal numbers.
    return jnp.clip(nearest, info.tiny, 1 / info.tiny)
