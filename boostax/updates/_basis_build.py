"""From snapshots to rows: held in memory, read from disk twice, or sketched as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from boostax.updates._basis_compute import Held, RankError, gram_schmidt, norm, principal

__all__ = ["Rows", "block_size", "from_blocks", "from_held", "from_stream"]

_EPS32 = float(np.finfo(np.float32).eps)
Vector = Sequence[Any]


@dataclasses.dataclass
class Rows:
    """What the snapshots gave.

    Attributes:
      rows: for each leaf (k, *shape), nearly orthonormal.
      mean: for each leaf.
      count: the number of snapshots.
      singular: singular values of the centred snapshots, or None.
      variance: the sum of all squared singular values.
    """

    rows: list[np.ndarray]
    mean: list[np.ndarray]
    count: int
    singular: np.ndarray | None = None
    variance: float = 0.0


def from_held(vectors: Sequence[Vector], k: int, center: bool, dtype: np.dtype) -> Rows:
    """Make rows from snapshots in memory."""
    held = Held(vectors, vectors[0] if center else None)
    weights, found = _solve(held.gram(), k, center, _noise(vectors[0]))
    count = len(vectors)
    out = _zeros(vectors[0], k + 1, dtype)
    held.combine(np.vstack([weights, np.full(count, 1 / count)]), out)
    return _finish(out, vectors[0] if center else None, count, found)


def from_blocks(
    load: Callable[[int], Vector], count: int, held: int, k: int, center: bool, dtype: np.dtype
) -> Rows:
    """Make rows from snapshots that can be read again, at most ``held`` of them at a time."""
    first = load(0)
    base = first if center else None
    block = block_size(held)
    starts = range(0, count, block)
    gram = np.zeros((count, count))
    for begin in starts:
        left = [load(i) for i in range(begin, min(begin + block, count))]
        rows = slice(begin, begin + len(left))
        gram[rows, rows] = Held(left, base).gram()
        for other in range(begin + block, count, block):
            right = [load(i) for i in range(other, min(other + block, count))]
            columns = slice(other, other + len(right))
            gram[rows, columns] = Held(left, base).cross(Held(right))
            gram[columns, rows] = gram[rows, columns].T
            del right
        del left
    weights, found = _solve(gram, k, center, _noise(first))
    weights = np.vstack([weights, np.full(count, 1 / count)])
    out = _zeros(first, k + 1, dtype)
    for index in range(count):
        Held([load(index)], base).combine(weights[:, index : index + 1], out)
    return _finish(out, base, count, found)


def block_size(held: int) -> int:
    """Return the size of two blocks that are in memory together, beside the first snapshot."""
    return max(1, (held - 1) // 2)


def from_stream(vectors: Iterator[Vector], held: int, k: int, dtype: np.dtype) -> Rows:
    """Make rows from centred snapshots that come once, with at most ``held`` vectors in memory.

    While they fit, nothing is lost. Then the vectors so far are replaced by their ``held // 2``
    largest principal directions, scaled by their singular values, and by their mean.
    """
    sketch: list[list[np.ndarray]] = []
    mean: list[np.ndarray] = []
    fresh: list[Vector] = []
    base: Vector = ()
    seen, lost = 0, 0.0
    keep = max(held // 2, k)
    held = max(held, 2 * keep)
    for vector in vectors:
        base = base or vector
        if len(fresh) + len(sketch) >= held:
            sketch, mean, lost = _compress(sketch, mean, seen, fresh, base, keep, lost, dtype)
            seen, fresh = seen + len(fresh), []
        fresh.append(vector)
    if not fresh:
        raise RankError(0)
    if not seen:
        return from_held(fresh, k, True, dtype)
    vectors_held, weights = _stack(sketch, mean, seen, fresh, base)
    gram = weights @ vectors_held.gram() @ weights.T
    chosen, singular = principal(gram, k, _noise(base))
    out = _zeros(base, k + 1, dtype)
    vectors_held.combine(
        np.vstack([chosen @ weights, _mean_weights(len(sketch), seen, len(fresh))]), out
    )
    found = (singular, float(np.trace(gram)) + lost)
    return _finish(out, base, seen + len(fresh), found)


def _compress(
    sketch: list[list[np.ndarray]],
    mean: list[np.ndarray],
    seen: int,
    fresh: Sequence[Vector],
    base: Vector,
    keep: int,
    lost: float,
    dtype: np.dtype,
) -> tuple[list[list[np.ndarray]], list[np.ndarray], float]:
    held, weights = _stack(sketch, mean, seen, fresh, base)
    gram = weights @ held.gram() @ weights.T
    values, vectors = np.linalg.eigh(gram)
    scaled = vectors[:, ::-1][:, :keep].T @ weights
    out = _zeros(base, len(scaled) + 1, dtype)
    held.combine(np.vstack([scaled, _mean_weights(len(sketch), seen, len(fresh))]), out)
    lost += float(np.sum(np.maximum(values[:-keep], 0.0)))
    rows = [[leaf[i] for leaf in out] for i in range(len(scaled))]
    return rows, [leaf[-1] for leaf in out], lost


def _stack(
    sketch: list[list[np.ndarray]],
    mean: list[np.ndarray],
    seen: int,
    fresh: Sequence[Vector],
    base: Vector,
) -> tuple[Held, np.ndarray]:
    # Vectors: the fresh snapshots less the first of all, the sketch, the old mean less the first.
    # Rows made of them: the sketch, the fresh ones less their own mean, and what lies between the means.
    extra = [*sketch, mean] if seen else []
    new, old = len(fresh), len(sketch)
    weights = np.zeros((old + new + bool(seen), new + len(extra)))
    weights[:old, new : new + old] = np.eye(old)
    weights[old : old + new, :new] = np.eye(new) - 1 / new
    if seen:
        between = np.sqrt(seen * new / (seen + new))
        weights[-1, :new] = -between / new
        weights[-1, -1] = between
    return Held(fresh, base, extra), weights


def _mean_weights(old: int, seen: int, new: int) -> np.ndarray:
    weights = np.zeros(new + old + bool(seen))
    weights[:new] = 1 / (seen + new)
    if seen:
        weights[-1] = seen / (seen + new)
    return weights


def _solve(
    gram: np.ndarray, k: int, center: bool, noise: float
) -> tuple[np.ndarray, tuple[np.ndarray, float] | None]:
    if not center:
        return gram_schmidt(gram, k), None
    middle = np.eye(len(gram)) - 1 / len(gram)
    centered = middle @ gram @ middle
    weights, singular = principal(centered, k, noise)
    return weights @ middle, (singular, float(np.trace(centered)))


def _noise(vector: Vector) -> float:
    """The size of what rounding to the snapshots' dtype leaves: no direction is that short."""
    eps = min(_EPS32, max(_eps(leaf) for leaf in vector))
    return eps * norm(vector)


def _eps(leaf: Any) -> float:
    dtype = np.dtype(leaf.dtype)
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else _EPS32


def _zeros(vector: Vector, count: int, dtype: np.dtype) -> list[np.ndarray]:
    return [np.zeros((count, *np.shape(leaf)), dtype) for leaf in vector]


def _finish(
    out: list[np.ndarray],
    base: Vector | None,
    count: int,
    found: tuple[np.ndarray, float] | None,
) -> Rows:
    mean = [np.array(leaf[-1]) for leaf in out]
    if base is not None:
        for own, leaf in zip(mean, base, strict=True):
            own += np.asarray(leaf).astype(own.dtype)
    rows = [leaf[:-1] for leaf in out]
    singular, variance = (None, 0.0) if found is None else found
    return Rows(rows, mean, count, singular, variance)
