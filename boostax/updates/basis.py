"""A basis of a few directions in the space of the parameters, leaf by leaf.

| symbol | shape | meaning |
|---|---|---|
| V | (k, n) | orthonormal rows; the basis |
| g | (n,) | a gradient, or another tree like the parameters |
| c | (k,) | coefficients |

``project(g) = V g`` and ``combine(c) = V^T c``. V is never one array: each leaf of shape ``s`` has its
part ``(k, *s)``, split over devices as the leaf is. Both sum in float32, whatever dtype V is kept in.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from boostax._tree import PathPattern, leaf_paths
from boostax.errors import did_you_mean
from boostax.updates import _basis_files
from boostax.updates._basis_array import FROM_ARRAY, columns, rows_from_array
from boostax.updates._basis_leaves import Layout, layout_of, match, nested
from boostax.updates._basis_place import place_rows, put_like
from boostax.updates._basis_products import times_coefficients, times_leaf, wide, zeros_of

__all__ = ["TrajectoryBasis", "basis_dtype"]

_POINTS = ("first", "mean", "nearest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryBasis:
    """Orthonormal directions in the space of the parameters, and where they were found.

    ``boostax.trajectory_basis`` makes one from snapshots; :meth:`from_array` and :meth:`load` are
    the other ways. It is a pytree: pass it to compiled functions as an argument.

    Attributes:
      components: for each covered leaf, in tree order, its part of the basis, ``(k, *shape)``.
      mean: the snapshots' mean, for each covered leaf; None for a basis from an array.
      first: the first snapshot, for each covered leaf; None for a basis from an array.
      k: the number of directions.
      layout: the parameters' leaves, and which of them the basis covers.
      centered: whether the directions are of snapshots less their mean.
      snapshots: how many snapshots it was made of; 0 for a basis from an array.
      singular_values: of the centred snapshots, falling; empty without centring.
      explained: the part of the snapshots' variance along each direction; empty without centring.

    Example:
      >>> import jax.numpy as jnp
      >>> basis = TrajectoryBasis.from_array([[0.6, 0.8, 0.0]], {"w": jnp.zeros(3)})
      >>> coefficients = basis.project({"w": jnp.array([5.0, 10.0, 1.0])})
      >>> round(float(coefficients[0]), 4)
      11.0
      >>> print(basis.combine(coefficients)["w"].round(4))
      [6.6 8.8 0. ]
    """

    components: tuple[Any, ...]
    mean: tuple[Any, ...] | None
    first: tuple[Any, ...] | None
    k: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    centered: bool = dataclasses.field(default=True, metadata={"static": True})
    snapshots: int = dataclasses.field(default=0, metadata={"static": True})
    singular_values: tuple[float, ...] = dataclasses.field(default=(), metadata={"static": True})
    explained: tuple[float, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the covered leaves, in the order of ``components``."""
        return self.layout.covered_paths

    @property
    def size(self) -> int:
        """n, the number of weights that the basis covers."""
        return self.layout.size

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the basis is kept in."""
        return self.components[0].dtype

    @property
    def tree(self) -> Any:
        """The parts of the basis in the parameters' structure, None where it covers nothing."""
        return self.layout.fill(self.components, [None] * len(self.layout.paths))

    def project(self, tree: Any) -> jax.Array:
        """Return the k coefficients of a tree: ``V g``.

        Args:
          tree: gradients, updates or parameters; covered leaves are found by their names, others are
            not looked at.

        Returns:
          Shape (k,), float32 (float64 where a leaf or the basis is).

        Raises:
          ValueError: a covered leaf is missing or has another shape.
        """
        named = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
        leaves = match("TrajectoryBasis.project: the tree", named, self.layout, extra_ok=True)
        total = jnp.zeros(self.k, jnp.float32)
        for rows, leaf in zip(self.components, leaves, strict=True):
            total = total + times_leaf(rows, leaf)
        return total

    def combine(self, coefficients: Any) -> Any:
        """Return the tree that k coefficients stand for: ``V^T c``.

        Args:
          coefficients: shape (k,).

        Returns:
          A tree like the parameters: float32 (float64 where the basis or the coefficients are) at
          the covered leaves, zeros of their own dtype at the others.

        Raises:
          ValueError: ``coefficients`` has another shape.
        """
        coefficients = jnp.asarray(coefficients)
        if coefficients.shape != (self.k,):
            raise ValueError(
                f"TrajectoryBasis.combine: coefficients has shape {coefficients.shape}, expected "
                f"({self.k},)"
            )
        return self._fill([times_coefficients(rows, coefficients) for rows in self.components])

    def start(self, params: Any, point: str = "first") -> Any:
        """Return parameters to start from, in the subspace or on the trajectory.

        Args:
          params: the parameters now; leaves that the basis does not cover are taken from them.
          point: ``"first"`` (default), the first snapshot; ``"mean"``, the snapshots' mean;
            ``"nearest"``, the point nearest to ``params`` among ``mean + V^T c`` (without centring,
            among ``V^T c``).

        Returns:
          A tree like ``params``, in their dtypes and placed as they are.

        Raises:
          ValueError: ``point`` is another word, or the basis is from an array and has no snapshots.

        When not to use:
          Batch-norm statistics belong to the parameters they were taken with: take them anew.
        """
        if point not in _POINTS:
            raise ValueError(
                f"TrajectoryBasis.start: point is {point!r}, expected one of {', '.join(_POINTS)}."
                + did_you_mean(point, _POINTS)
            )
        if self.mean is None or self.first is None:
            raise ValueError(
                f"TrajectoryBasis.start: the basis was made from an array, so point={point!r} is not "
                "known; start from your own parameters"
            )
        own = self.place_layout(params)
        old = own.only(jax.tree.leaves(params))
        if point == "nearest":
            moved = [
                jnp.asarray(leaf).astype(wide(mean, leaf)) - (mean if self.centered else 0.0)
                for leaf, mean in zip(old, self.mean, strict=True)
            ]
            zeros = [np.zeros(0)] * len(self.layout.paths)
            inside = self.combine(self.project(self.layout.fill(moved, zeros)))
            new = self.layout.only(jax.tree.leaves(inside))
            if self.centered:
                new = [part + mean for part, mean in zip(new, self.mean, strict=True)]
        else:
            new = self.first if point == "first" else self.mean
        new = self._reorder(own, new)
        old = own.only(jax.tree.leaves(params))
        placed = [put_like(value, leaf) for value, leaf in zip(new, old, strict=True)]
        return own.fill(placed, jax.tree.leaves(params))

    def place(self, params: Any) -> TrajectoryBasis:
        """Return the same basis in the structure of ``params`` and split over devices as they are.

        Args:
          params: arrays, or ``ShapeDtypeStruct`` leaves with a sharding.

        Raises:
          ValueError: a covered leaf is missing or has another shape.
        """
        own = self.place_layout(params)
        leaves = own.only(jax.tree.leaves(params))
        rows = self._reorder(own, self.components)
        return dataclasses.replace(
            self,
            components=tuple(place_rows(r, leaf) for r, leaf in zip(rows, leaves, strict=True)),
            mean=None if self.mean is None else tuple(self._reorder(own, self.mean)),
            first=None if self.first is None else tuple(self._reorder(own, self.first)),
            layout=own,
        )

    def place_layout(self, params: Any) -> Layout:
        """Return the layout of ``params`` with this basis's covered leaves."""
        covered = set(self.paths)
        named = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
        match("TrajectoryBasis: params", named, self.layout, extra_ok=True)
        others = any(path not in covered for path in named)
        own = layout_of("TrajectoryBasis", params, [lambda p: p not in covered] if others else ())
        return dataclasses.replace(own, covered=tuple(path in covered for path in own.paths))

    def without_points(self) -> TrajectoryBasis:
        """Return the directions alone, as a train state should carry them.

        Without ``mean`` and ``first``, which would be two more copies of the parameters, and without
        the snapshots' numbers, which are static: another basis needs no new compilation.
        """
        return dataclasses.replace(
            self, mean=None, first=None, snapshots=0, singular_values=(), explained=()
        )

    def to_array(self, order: Sequence[str] | None = None) -> np.ndarray:
        """Return V as one array (k, n).

        Args:
          order: the names of the covered leaves in the order of the columns. Default: tree order.
        """
        places = columns("TrajectoryBasis.to_array", order, self.paths)
        flat = [np.asarray(self.components[i]).reshape(self.k, -1) for i in places]
        return np.concatenate(flat, axis=1)

    @classmethod
    def from_array(
        cls,
        array: Any,
        params: Any,
        *,
        k: int | None = None,
        order: Sequence[str] | None = None,
        exclude: Iterable[PathPattern] = (),
        dtype: Any = jnp.float32,
    ) -> TrajectoryBasis:
        """Make a basis from an array whose rows are the directions, or from a .npy file of one.

        Args:
          array: shape (k, n), orthonormal rows, or the path of a .npy file.
          params: the parameters: structure, shapes and placement.
          k: the number of rows that is expected. Default None: any.
          order: the names of the covered leaves in the order of the columns; each leaf's numbers in C
            order. Default None: tree order, which is alphabetical for dicts.
          exclude: patterns of leaves that have no columns. Integer leaves have none either.
          dtype: float32 (default), bfloat16 or float64.

        Raises:
          ValueError: n or k is wrong, the rows are not orthonormal (to 1e-5), or an argument is out of
            range.

        Example:
          >>> import numpy as np
          >>> params = {"kernel": np.zeros((2, 1)), "bias": np.zeros(1)}
          >>> rows = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
          >>> basis = TrajectoryBasis.from_array(rows, params, order=["kernel", "bias"])
          >>> basis.tree["bias"].tolist()
          [[0.0], [1.0]]
        """
        parts, layout = rows_from_array(
            array, params, k, order, exclude, basis_dtype(FROM_ARRAY, dtype)
        )
        bare = cls(tuple(parts), None, None, k=len(parts[0]), layout=layout, centered=False)
        return bare.place(params)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the basis to a .npz file, under a temporary name that is then changed."""
        _basis_files.save(pathlib.Path(path), self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], params: Any = None) -> TrajectoryBasis:
        """Read a basis that :meth:`save` wrote; nothing is unpickled.

        Args:
          path: the file.
          params: the parameters it is for: structure and placement. Default None: nested dicts, on
            the default device.

        Raises:
          ValueError: the file is of something else, not whole, or does not fit ``params``; the message
            names it.
        """
        fields, named = _basis_files.load(pathlib.Path(path))
        read = cls(**fields)
        if params is not None:
            return read.place(params)
        return read.place(nested(named))

    def describe(self) -> str:
        """Say in a few lines what the basis covers and what it explains."""
        from boostax.updates._basis_text import describe

        return describe(self)

    def _fill(self, values: Sequence[Any]) -> Any:
        shaped = zip(self.layout.shapes, self.layout.dtypes, self.layout.covered, strict=True)
        others = [None if taken else zeros_of(shape, name) for shape, name, taken in shaped]
        return self.layout.fill(values, others)

    def _reorder(self, own: Layout, values: Sequence[Any]) -> list[Any]:
        named = dict(zip(self.paths, values, strict=True))
        return [named[path] for path in own.covered_paths]


def _to_state_dict(basis: TrajectoryBasis) -> dict[str, Any]:
    leaves = {"components": basis.components, "mean": basis.mean, "first": basis.first}
    return serialization.to_state_dict(leaves)


def _from_state_dict(basis: TrajectoryBasis, state: dict[str, Any]) -> TrajectoryBasis:
    # What is static comes from the target, as for every pytree.
    leaves = {"components": basis.components, "mean": basis.mean, "first": basis.first}
    return dataclasses.replace(basis, **serialization.from_state_dict(leaves, state))


serialization.register_serialization_state(TrajectoryBasis, _to_state_dict, _from_state_dict)


def basis_dtype(name: str, dtype: Any) -> np.dtype:
    """Return the dtype of a basis, or raise a ValueError."""
    try:
        got = jnp.dtype(dtype)
    except TypeError:
        got = None
    # numpy takes None for float64 where dtypes are compared.
    if got is None or got.name not in ("float32", "bfloat16", "float64"):
        raise ValueError(f"{name}: dtype is {dtype!r}, expected float32, bfloat16 or float64")
    return got
