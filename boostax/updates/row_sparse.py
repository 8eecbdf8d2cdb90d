"""Gradients of which only some rows are there, such as an embedding table's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from boostax import _compat

__all__ = ["RowSparse", "coalesced", "is_row_sparse"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSparse:
    """Some rows of an array of which all others are zero; a row that is named twice counts twice.

    .. math::
        \\text{dense}[r] = \\sum_{i:\\ \\text{indices}[i] = r} \\text{values}[i]

    It is a pytree, and may stand for a gradient's leaf where :func:`boostax.optimizer` says so. Added
    to an array it gives an array, so that ``optax.apply_updates`` takes updates of this form; the
    rows that are not named stay as they are, bit for bit.

    Attributes:
      indices: (n,), integers; the rows. Those outside of 0 to ``shape[0] - 1`` name none, and serve
        to fill up to a fixed n.
      values: ``(n, *shape[1:])``, floats.
      shape: the shape of the whole array, static.

    Example:
      >>> import jax.numpy as jnp
      >>> rows = RowSparse(jnp.array([2, 0, 2]), jnp.array([[1.0], [2.0], [3.0]]), (4, 1))
      >>> rows.todense()[:, 0].tolist()
      [2.0, 0.0, 4.0, 0.0]
      >>> (jnp.ones((4, 1)) + rows)[:, 0].tolist()
      [3.0, 1.0, 5.0, 1.0]

    When not to use:
      Where most rows are named: a dense gradient is faster then.
    """

    indices: Any
    values: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    # Else numpy would take it for an object, and add it to each of an array's entries.
    __array_ufunc__ = None

    @classmethod
    def from_bcoo(cls, array: BCOO) -> RowSparse:
        """Return the same rows of a ``BCOO`` with one sparse axis, the first, and no batch axes."""
        if array.n_batch or array.n_sparse != 1:
            raise ValueError(
                "RowSparse: a BCOO gradient must have n_batch = 0 and n_sparse = 1, the rows, got "
                f"n_batch = {array.n_batch} and n_sparse = {array.n_sparse} at shape "
                f"{array.shape}; BCOO.fromdense(x, n_dense=x.ndim - 1) makes such a one"
            )
        return cls(array.indices[:, 0], array.data, tuple(array.shape))

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return jnp.result_type(self.values)

    def todense(self) -> jax.Array:
        """Return the whole array."""
        return jnp.zeros(self.shape, self.dtype) + self

    def __radd__(self, other: Any) -> jax.Array:
        """Return the sum with an array of this shape."""
        other = jnp.asarray(other)
        if other.shape != tuple(self.shape):
            raise ValueError(f"RowSparse: can't add shape {self.shape} to shape {other.shape}")
        rows = _known(self.indices, self.shape[0])
        return other.at[rows].add(jnp.asarray(self.values).astype(other.dtype), mode="drop")

    __add__ = __radd__


def is_row_sparse(value: Any) -> bool:
    """Say whether this stands for a leaf of which only some rows are there."""
    return isinstance(value, (RowSparse, BCOO))


def coalesced(rows: RowSparse | BCOO, dtype: Any) -> RowSparse:
    """Return each row once, in order, with the sum of its values; what is left over names no row."""
    if isinstance(rows, BCOO):
        rows = RowSparse.from_bcoo(rows)
    values, count = jnp.asarray(rows.values, dtype), rows.shape[0]
    n = values.shape[0]
    if jnp.shape(rows.indices) != (n,) or values.shape[1:] != tuple(rows.shape[1:]):
        raise ValueError(
            f"RowSparse: indices must be (n,) and values (n, {', '.join(map(str, rows.shape[1:]))}) "
            f"for the shape {rows.shape}, got {jnp.shape(rows.indices)} and {values.shape}"
        )
    known = _known(rows.indices, count)
    unique, place = jnp.unique(known, size=n, fill_value=count, return_inverse=True)
    sums = _compat.zeros_like(values).at[place.reshape(n)].add(values)
    return RowSparse(unique, sums, tuple(rows.shape))


def _known(indices: Any, count: int) -> jax.Array:
    """Return the indices with all that name no row at ``count``, where a scatter drops them."""
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"RowSparse: indices must be integers, got {indices.dtype}. What works on a gradient's "
            "numbers (clipping, accumulation) does not know row-sparse gradients; take it away, or give "
            "it the dense gradient"
        )
    # In a narrow dtype the count itself may wrap around to a row.
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    return jnp.where((indices < 0) | (indices >= count), count, indices)
