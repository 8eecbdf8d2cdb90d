"""The linear algebra of a basis, on the host: Gram matrix, directions, orthonormal rows.

Everything large is done leaf by leaf and in slices of a leaf, in float64 for a slice at a time. Only
matrices between snapshots are ever whole: m x m, and k x m.

| symbol | shape | meaning |
|---|---|---|
| Z | (p, n) | the vectors held: snapshots less the first one (or as they are), rows of a sketch |
| G | (p, p) | Z Z^T, summed over slices |
| W | (k, p) | weights; the wanted rows are W Z |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = [
    "Held",
    "RankError",
    "check_finite",
    "fix_signs",
    "gram_schmidt",
    "orthonormalise",
    "principal",
    "wide_dtype",
]

_SLICE = 1 << 20  # numbers in a float64 slice of all vectors: 8 MB
_EPS32 = float(np.finfo(np.float32).eps)
_EPS64 = float(np.finfo(np.float64).eps)


class RankError(ValueError):
    """Fewer independent directions than were asked for; ``rank`` says how many there are."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank}")
        self.rank = rank


@dataclasses.dataclass
class Held:
    """Vectors in memory, each a list of leaves.

    Attributes:
      snapshots: the snapshots' leaves.
      base: what is subtracted from the snapshots, or None.
      extra: further vectors, taken as they are, behind the snapshots.
    """

    snapshots: Sequence[Sequence[Any]]
    base: Sequence[Any] | None = None
    extra: Sequence[Sequence[Any]] = ()

    def slices(self) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Yield (leaf, slice of the flat leaf, the part of Z there)."""
        count = len(self.snapshots)
        for leaf, first in enumerate((*self.snapshots, *self.extra)[0]):
            flat = [_flat(vector[leaf]) for vector in (*self.snapshots, *self.extra)]
            base = None if self.base is None else _flat(self.base[leaf])
            for part in _parts(int(np.size(first)), len(flat)):
                z = np.empty((len(flat), part.stop - part.start))
                for row, vector in zip(z, flat, strict=True):
                    row[:] = vector[part]
                if base is not None:
                    z[:count] -= base[part].astype(np.float64)
                yield leaf, part, z

    def gram(self) -> np.ndarray:
        """Return Z Z^T."""
        total: Any = 0.0
        for _, _, z in self.slices():
            total = total + z @ z.T
        return total

    def cross(self, other: Held) -> np.ndarray:
        """Return Z Z'^T with the vectors of another one, without extra ones."""
        total = np.zeros((len(self.snapshots), len(other.snapshots)))
        both = Held((*self.snapshots, *other.snapshots), self.base)
        count = len(self.snapshots)
        for _, _, z in both.slices():
            total += z[:count] @ z[count:].T
        return total

    def combine(self, weights: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Add W Z to ``out``: for each leaf an array (rows, *shape)."""
        flat = [rows.reshape(len(weights), -1) for rows in out]
        for leaf, part, z in self.slices():
            flat[leaf][:, part] += weights @ z


def principal(gram: np.ndarray, k: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return W (k, p) of the k largest principal directions, and their singular values.

    Args:
      gram: the Gram matrix of centred vectors.
      k: the number of directions.
      noise: the singular value that rounding of the vectors themselves explains.

    Raises:
      RankError: there are fewer directions.
    """
    values, vectors = np.linalg.eigh(gram)
    values, vectors = values[::-1], vectors[:, ::-1]
    singular = np.sqrt(np.maximum(values, 0.0))
    # The Gram matrix squares the condition: what lies below its rounding can't be told from zero.
    floor = max(np.sqrt(8 * len(gram) * _EPS64) * singular[0], noise)
    rank = int(np.sum(singular > floor))
    if rank < k:
        raise RankError(rank)
    return vectors[:, :k].T / singular[:k, None], singular[:k]


def gram_schmidt(gram: np.ndarray, k: int) -> np.ndarray:
    """Return W (k, p) that makes the first k independent vectors orthonormal, in order.

    Raises:
      RankError: there are fewer independent ones.
    """
    size = len(gram)
    floor = max(8 * size * _EPS64, _EPS32**2)
    chosen: list[np.ndarray] = []
    for index in range(size):
        row = np.zeros(size)
        row[index] = 1.0
        for _ in range(2):  # twice is enough
            for other in chosen:
                row -= (other @ gram @ row) * other
        norm2 = float(row @ gram @ row)
        if norm2 > floor * gram[index, index]:
            chosen.append(row / np.sqrt(norm2))
        if len(chosen) == k:
            return np.stack(chosen)
    raise RankError(len(chosen))


def orthonormalise(rows: Sequence[np.ndarray]) -> None:
    """Make rows that are nearly orthonormal exactly so, in place and in order."""
    eps = max(float(np.finfo(leaf.dtype).eps) for leaf in rows)
    for _ in range(3):
        gram = row_gram(rows)
        if np.max(np.abs(gram - np.eye(len(gram)))) <= 8 * eps:
            return
        mend = np.linalg.inv(np.linalg.cholesky(gram))
        for leaf in rows:
            flat = leaf.reshape(len(leaf), -1)
            for part in _parts(flat.shape[1], len(flat)):
                flat[:, part] = mend @ flat[:, part].astype(np.float64)


def row_gram(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the Gram matrix of rows given as leaves (k, *shape), in float64."""
    total = np.zeros((len(rows[0]), len(rows[0])))
    for leaf in rows:
        flat = leaf.reshape(len(leaf), -1)
        for part in _parts(flat.shape[1], len(flat)):
            piece = flat[:, part].astype(np.float64)
            total += piece @ piece.T
    return total


def fix_signs(rows: Sequence[np.ndarray]) -> None:
    """Turn each row so that its largest entry by size, the first of equals, is positive."""
    count = len(rows[0])
    largest, positive = np.full(count, -1.0), np.ones(count, bool)
    for leaf in rows:
        flat = leaf.reshape(count, -1)
        if not flat.shape[1]:
            continue
        for index, row in enumerate(flat):
            place = max(int(row.argmax()), int(row.argmin()), key=lambda i: (abs(row[i]), -i))
            if abs(row[place]) > largest[index]:
                largest[index], positive[index] = abs(row[place]), row[place] > 0
    for leaf in rows:
        for index in np.flatnonzero(~positive):
            np.negative(leaf[index], out=leaf[index, ...])


def check_finite(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise a ValueError naming the snapshot and the leaf that hold a NaN or an infinity."""
    for path, leaf in zip(paths, leaves, strict=True):
        flat = _flat(leaf)
        for part in _parts(flat.size, 1):
            # In float64, since a sum of finite numbers of a narrow dtype may overflow.
            if not np.isfinite(flat[part].astype(np.float64)).all():
                raise ValueError(
                    f"trajectory_basis: {name} has a NaN or an infinity in the leaf {path}; leave "
                    "this snapshot out"
                )


def norm(leaves: Sequence[Any]) -> float:
    """Return the norm of a vector given as leaves, in float64."""
    return float(np.sqrt(max(float(Held([leaves]).gram()[0, 0]), 0.0)))


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that rows are computed in before they are stored."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _flat(array: Any) -> np.ndarray:
    return np.asarray(array).reshape(-1)


def _parts(size: int, rows: int) -> Iterator[slice]:
    step = max(1, _SLICE // rows)
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))
