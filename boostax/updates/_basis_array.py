"""A basis from one array, or a .npy file of it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from boostax._tree import PathPattern
from boostax.errors import did_you_mean
from boostax.updates._basis_compute import row_gram
from boostax.updates._basis_files import read_npy
from boostax.updates._basis_leaves import Layout, layout_of

__all__ = ["FROM_ARRAY", "columns", "rows_from_array"]

FROM_ARRAY = "TrajectoryBasis.from_array"
_TOLERANCE = 1e-5


def rows_from_array(
    array: Any,
    params: Any,
    k: int | None,
    order: Sequence[str] | None,
    exclude: Iterable[PathPattern],
    dtype: np.dtype,
) -> tuple[list[np.ndarray], Layout]:
    """Cut an array (k, n) into leaves (k, *shape); see ``TrajectoryBasis.from_array``."""
    layout = layout_of(FROM_ARRAY, params, exclude)
    places = columns(FROM_ARRAY, order, layout.covered_paths)
    shown, rows = "array", array
    if isinstance(array, (str, os.PathLike)):
        shown, rows = str(array), read_npy(pathlib.Path(array))
    rows = rows if isinstance(rows, np.ndarray) else np.asarray(rows)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(
            f"{FROM_ARRAY}: {shown} has shape {rows.shape} and dtype {rows.dtype}, expected (k, n) "
            "floating-point numbers"
        )
    if rows.shape[1] != layout.size:
        turned = " It looks transposed: n stands first." if rows.shape[0] == layout.size else ""
        raise ValueError(
            f"{FROM_ARRAY}: {shown} has shape {rows.shape}, so n = {rows.shape[1]}, but the parameters "
            f"have n = {layout.size} weights in {', '.join(layout.covered_paths)}.{turned}"
        )
    if rows.shape[0] < 1 or rows.shape[0] > layout.size or (k is not None and rows.shape[0] != k):
        wanted = f"k = {k}" if k is not None else f"k from 1 to n = {layout.size}"
        raise ValueError(f"{FROM_ARRAY}: {shown} has {rows.shape[0]} rows, expected {wanted}")
    wide = np.float64 if dtype == np.float64 else np.float32
    parts: list[Any] = [None] * len(places)
    begin = 0
    for place in places:
        shape = layout.covered_shapes[place]
        end = begin + int(np.prod(shape))
        parts[place] = np.array(rows[:, begin:end], wide).reshape(len(rows), *shape)
        begin = end
    off = float(np.max(np.abs(row_gram(parts) - np.eye(len(rows)))))
    if not off <= _TOLERANCE:
        raise ValueError(
            f"{FROM_ARRAY}: the rows of {shown} are not orthonormal: V V^T differs from the identity by "
            f"{off:.3g}, at most {_TOLERANCE:g} is allowed. numpy.linalg.qr(array.T)[0].T has the same "
            "span with orthonormal rows"
        )
    return [part.astype(dtype) for part in parts], layout


def columns(name: str, order: Sequence[str] | None, paths: tuple[str, ...]) -> list[int]:
    """Return the places of the leaves named in ``order`` among ``paths``, or raise a ValueError."""
    if order is None:
        return list(range(len(paths)))
    order = [order] if isinstance(order, str) else list(order)
    if sorted(order) != sorted(paths):
        missing = [path for path in paths if path not in order]
        strange = [path for path in order if path not in paths]
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has the unknown {', '.join(map(str, strange))}"] if strange else []
        hint = did_you_mean(strange[0], missing) if strange else ""
        raise ValueError(
            f"{name}: order {' and '.join(parts) or 'names a leaf twice'}; it must name each "
            f"covered leaf once.{hint}"
        )
    return [paths.index(path) for path in order]
