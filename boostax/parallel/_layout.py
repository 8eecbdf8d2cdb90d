"""Which leaves travel together: buffers cut in forward order, and vectors within a buffer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from boostax._tree import natural_key

__all__ = ["Buckets", "Cut", "pack", "unpack"]

# Leaves up to this size are stacked with those of the same size, so that their dot products are
# one operation. Larger ones are not worth the copy.
_SMALL = 1 << 14


class Cut(NamedTuple):
    """Where the leaves of a tree are cut into buffers.

    Attributes:
      buffers: the leaves' paths, a tuple a buffer, in forward order.
      beyond: split points that lie at or beyond the last leaf, and cut nothing.
    """

    buffers: tuple[tuple[str, ...], ...]
    beyond: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Split points of the exchange.

    Attributes:
      points: leaf counts from the front, ascending.
      order: paths in forward order, or None for the natural order of the names.
    """

    points: tuple[int, ...]
    order: tuple[str, ...] | None

    def places(self, paths: Sequence[str]) -> tuple[list[list[int]], tuple[int, ...]]:
        """Return the leaves' places, a list a buffer, and the points that cut nothing.

        Leaves that ``order`` leaves out come last.
        """
        if self.order is None:
            keys = [natural_key(path) for path in paths]
        else:
            at = {path: i for i, path in enumerate(self.order)}
            keys = [at.get(path, len(at)) for path in paths]
        ordered = sorted(range(len(paths)), key=lambda i: keys[i])
        beyond = tuple(point for point in self.points if point >= len(ordered))
        edges = [0, *(point for point in self.points if point not in beyond), len(ordered)]
        slices = itertools.pairwise(edges)
        return [ordered[first:last] for first, last in slices if last > first], beyond

    def cut(self, paths: Sequence[str]) -> Cut:
        """Return the same with paths for places."""
        buffers, beyond = self.places(paths)
        return Cut(tuple(tuple(paths[i] for i in places) for places in buffers), beyond)


class Run(NamedTuple):
    """Leaves of one size and dtype, stacked.

    Attributes:
      leaves: their places in the list of leaves.
    """

    leaves: tuple[int, ...]


def pack(leaves: Sequence[jax.Array]) -> tuple[list[Run], list[jax.Array]]:
    """Return the leaves as stacks ``(c, size)`` of vectors; a complex one is its two parts."""
    flat = [_real(leaf).reshape(-1) for leaf in leaves]
    runs: dict[Any, list[int]] = {}
    for i, vector in enumerate(flat):
        alone = i if vector.size > _SMALL else -1
        runs.setdefault((vector.dtype.name, vector.size, alone), []).append(i)
    stacks = [
        flat[places[0]][None] if len(places) == 1 else jnp.stack([flat[i] for i in places])
        for places in runs.values()
    ]
    return [Run(tuple(places)) for places in runs.values()], stacks


def unpack(
    runs: Sequence[Run], stacks: Sequence[jax.Array], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return what :func:`pack` made of ``leaves``, in their shapes."""
    out: list[Any] = [None] * len(leaves)
    for run, stack in zip(runs, stacks, strict=True):
        for place, vector in zip(run.leaves, stack, strict=True):
            out[place] = _as(vector, leaves[place])
    return out


def _real(leaf: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(leaf):
        return leaf
    return jnp.stack([leaf.real, leaf.imag])


def _as(vector: jax.Array, leaf: jax.Array) -> jax.Array:
    if not jnp.iscomplexobj(leaf):
        return vector.reshape(leaf.shape)
    real, imaginary = vector.reshape(2, *leaf.shape)
    return jax.lax.complex(real, imaginary)
