"""Blocked search for nearest rows: a matrix product, its largest entries, and a merge, per block.

Every metric is a score that is a matrix product and a bias, largest where the distance is smallest::

    score(t, s) = A(t) . B(s) + b(s),    distance = f(c(t) - score)

Of equal scores the one with the lowest index is kept: ``top_k`` prefers what stands first, and what
was found earlier stands first in a merge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "METRICS",
    "NO_ROW",
    "Found",
    "distances",
    "prepare_block",
    "prepare_targets",
    "start",
    "step",
    "widen",
]

NO_ROW = 2**31 - 1


class Found(NamedTuple):
    """The nearest rows so far, targets cut into tiles.

    Attributes:
      scores: (tiles, rows of a tile, k), falling along the last axis; -inf where there is none yet.
      indices: int32, the same shape; -1 where there is none yet.
      unfit: int32 scalar, the first source row that the metric can't take; ``NO_ROW`` if none.
    """

    scores: jax.Array
    indices: jax.Array
    unfit: jax.Array


class Targets(NamedTuple):
    """The targets' half of the scores.

    Attributes:
      left: A(t), (tiles, rows of a tile, features).
      constant: c(t), (tiles, rows of a tile).
      centre: (2, features), what is taken first from all rows, and from their logarithms.
      scale: a power of two that all rows are multiplied by, so that no square vanishes.
    """

    left: jax.Array
    constant: jax.Array
    centre: jax.Array
    scale: jax.Array


class Half(NamedTuple):
    """What a metric makes of rows: the matrix, the bias or constant, and which rows it can take."""

    rows: jax.Array
    offset: jax.Array
    fits: jax.Array


def _euclidean(rows: jax.Array, centre: jax.Array, is_target: bool) -> Half:
    rows = rows - centre[:1]
    squares = jnp.sum(rows * rows, axis=-1)
    return Half(2 * rows if is_target else rows, squares, jnp.isfinite(squares))


def _cosine(rows: jax.Array, centre: jax.Array, is_target: bool) -> Half:
    del centre, is_target
    # By the largest entry first, so that no square overflows or vanishes.
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    scaled = rows / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.sqrt(jnp.sum(scaled * scaled, axis=-1, keepdims=True))
    # A row of zeros has no direction: its cosine with every row is 0.
    unit = scaled / jnp.where(norm > 0, norm, 1.0)
    return Half(unit, jnp.zeros(rows.shape[:-1], rows.dtype), jnp.isfinite(unit).all(-1))


def _symmetric_kl(rows: jax.Array, centre: jax.Array, is_target: bool) -> Half:
    fits = (rows > 0).all(axis=-1) & jnp.isfinite(rows).all(axis=-1)
    rows = jnp.where(fits[..., None], rows, 1.0)
    logs = jnp.log(rows) - centre[1:]
    rows = rows - centre[:1]
    parts = [rows, logs] if is_target else [logs, rows]
    return Half(jnp.concatenate(parts, axis=-1), jnp.sum(rows * logs, axis=-1), fits)


METRICS: dict[str, Callable[[jax.Array, jax.Array, bool], Half]] = {
    "euclidean": _euclidean,
    "cosine": _cosine,
    "symmetric_kl": _symmetric_kl,
}


def _wide(rows: jax.Array) -> jax.Array:
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnames=("metric", "tile"))
def prepare_targets(rows: Any, *, metric: str, tile: int) -> tuple[Targets, jax.Array]:
    """Return the targets' half of the scores, and the first row that the metric can't take."""
    rows = _wide(jnp.asarray(rows))
    scale = jnp.ones((), rows.dtype)
    if metric == "euclidean":
        scale = _scale(rows)
        rows = rows * scale
    # Distances stay, and what would cancel in |t|^2 - 2 t.s + |s|^2 is taken away.
    known = jnp.where(jnp.isfinite(rows), rows, 0.0)
    logs = jnp.log(jnp.where(known > 0, known, 1.0))
    centre = jnp.stack([_middle(known), _middle(logs)])
    tiles = -(-rows.shape[0] // tile)
    padding = tiles * tile - rows.shape[0]
    half = METRICS[metric](rows, centre, True)
    left = jnp.pad(half.rows, ((0, padding), (0, 0))).reshape(tiles, tile, -1)
    constant = jnp.pad(half.offset, (0, padding)).reshape(tiles, tile)
    return Targets(left, constant, centre, scale), _first_unfit(half.fits, 0, rows.shape[0])


def _scale(rows: jax.Array) -> jax.Array:
    """Return the power of two that brings small targets to about 1, and 1 for others."""
    largest = jnp.max(jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0.0))
    exponent = jnp.frexp(largest)[1]
    small = (largest > 0) & (exponent < -30)
    return jnp.ldexp(jnp.ones_like(largest), jnp.where(small, jnp.minimum(-exponent, 120), 0))


def _middle(rows: jax.Array) -> jax.Array:
    """Return about the mean of each column: to some 1/16 of its range, on a grid of powers of two.

    On the grid, so that the differences of small whole numbers are exact, and ties stay ties.
    """
    # From the first row on, so that a sum of large numbers costs no digits.
    mean = rows[0] + jnp.mean(rows - rows[:1], axis=0)
    exponent = jnp.frexp(jnp.max(rows, axis=0) - jnp.min(rows, axis=0))[1]
    grid = jnp.ldexp(jnp.ones_like(mean), jnp.clip(exponent - 5, -100, 100))
    on_grid = jnp.round(mean / grid) * grid
    # Where that overflows, so do the squares, which is reported by the row.
    return jnp.where(jnp.isfinite(on_grid), on_grid, 0.0)


def widen(found: Found, k: int) -> Found:
    """Return the same with room for k neighbours of each target."""
    more = ((0, 0), (0, 0), (0, k - found.scores.shape[-1]))
    return Found(
        jnp.pad(found.scores, more, constant_values=-jnp.inf),
        jnp.pad(found.indices, more, constant_values=-1),
        found.unfit,
    )


def start(targets: Targets, k: int) -> Found:
    """Return that nothing was found yet."""
    shape = (*targets.constant.shape, k)
    return Found(
        jnp.full(shape, -jnp.inf, targets.left.dtype),
        jnp.full(shape, -1, jnp.int32),
        jnp.int32(NO_ROW),
    )


@functools.partial(jax.jit, static_argnames="metric")
def prepare_block(
    block: Any, targets: Targets, first: Any, used: Any, *, metric: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a block's half of the scores: B(s), b(s), and the first row that doesn't fit.

    Args:
      block: (rows, features) of the source.
      targets: what :func:`prepare_targets` returned.
      first: int32, the index of the block's first row among all.
      used: int32, how many of its rows count.
      metric: a key of ``METRICS``.
    """
    rows = jnp.asarray(block).astype(targets.left.dtype)
    if metric == "euclidean":
        rows = rows * targets.scale
    half = METRICS[metric](rows, targets.centre, False)
    # What is not there, or unfit, is never near. top_k tells -0 from 0, so the bias is 0 - 0 and
    # not -0: then no score is -0.
    counts = (jnp.arange(rows.shape[0]) < used) & half.fits
    bias = jnp.where(counts, 0.0 - half.offset, -jnp.inf)
    return half.rows, bias, _first_unfit(half.fits, first, used)


@functools.partial(jax.jit, donate_argnums=0)
def step(
    found: Found, targets: Targets, right: jax.Array, bias: jax.Array, unfit: Any, first: Any
) -> Found:
    """Look through one block of source rows.

    Args:
      found: what the blocks before it gave; donated.
      targets: what :func:`prepare_targets` returned.
      right: what :func:`prepare_block` returned, and the two that follow.
      bias: (rows,).
      unfit: int32.
      first: int32, the index of the block's first row among all.
    """
    rows, k = right.shape[0], found.scores.shape[-1]

    def look(left: jax.Array, scores: jax.Array, indices: jax.Array) -> tuple[Any, Any]:
        product = jnp.matmul(left, right.T, precision=lax.Precision.HIGHEST)
        near, at = lax.top_k(product + bias[None], min(k, rows))
        best, place = lax.top_k(jnp.concatenate([scores, near], axis=-1), k)
        merged = jnp.concatenate([indices, at.astype(jnp.int32) + first], axis=-1)
        return best, jnp.take_along_axis(merged, place, axis=-1)

    if targets.left.shape[0] == 1:
        scores, indices = look(targets.left[0], found.scores[0], found.indices[0])
        scores, indices = scores[None], indices[None]
    else:
        scores, indices = lax.map(
            lambda each: look(*each), (targets.left, found.scores, found.indices)
        )
    return Found(scores, indices, jnp.minimum(found.unfit, unfit))


def _first_unfit(fits: jax.Array, first: Any, used: Any) -> jax.Array:
    number = jnp.arange(fits.shape[0], dtype=jnp.int32)
    bad = ~fits & (number < used)
    return jnp.min(jnp.where(bad, number + jnp.int32(first), jnp.int32(NO_ROW)))


@functools.partial(jax.jit, static_argnames="metric")
def distances(scores: jax.Array, targets: Targets, *, metric: str) -> jax.Array:
    """Return distances from scores (tiles, rows of a tile, k)."""
    if metric == "cosine":
        return jnp.maximum(1.0 - scores, 0.0)
    apart = jnp.maximum(targets.constant[..., None] - scores, 0.0)
    return jnp.sqrt(apart) / targets.scale if metric == "euclidean" else apart
