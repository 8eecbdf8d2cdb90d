"""The directions in which training moved: principal directions of snapshots of the parameters.

| symbol | shape | meaning |
|---|---|---|
| m | | snapshots |
| n | | weights that are covered |
| X | (m, n) | snapshots less their mean; never one array |
| G = X X^T | (m, m) | summed leaf by leaf in float64 |
| V | (k, n) | the basis: ``V = S^-1 U^T X`` with ``G = U S^2 U^T``, largest S first |

Without centring, V is the Gram-Schmidt orthogonalisation of the snapshots in their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import PathPattern, leaf_paths
from boostax.updates import _basis_build as build
from boostax.updates._basis_compute import (
    RankError,
    check_finite,
    fix_signs,
    orthonormalise,
    wide_dtype,
)
from boostax.updates._basis_leaves import layout_of, match, nested
from boostax.updates._snapshot_files import SnapshotFile, snapshot_files
from boostax.updates.basis import TrajectoryBasis, basis_dtype

__all__ = ["trajectory_basis"]

_NAME = "trajectory_basis"


def trajectory_basis(
    snapshots: Any,
    k: int,
    *,
    center: bool = True,
    exclude: Iterable[PathPattern] = (),
    dtype: Any = jnp.float32,
    params: Any = None,
    part: str | None = None,
    max_held: int = 64,
    progress: Callable[[int, int | None], None] | None = None,
) -> TrajectoryBasis:
    """Make an orthonormal basis of the k directions in which the parameters moved most.

    ``V = S^-1 U^T X`` for snapshots X less their mean and ``X X^T = U S^2 U^T``: the k principal
    directions, as rows. Integer and excluded leaves are left out. Each row's largest entry by size is
    positive, so the result does not depend on the machine. Snapshots on disk are ordered by the
    numbers in their names, ``checkpoint_2`` before ``checkpoint_10``; nothing is unpickled.

    Memory, for snapshots of n numbers: the basis itself (k n in float32, also on the way to bfloat16)
    and

    - a list or tuple of trees: nothing but slices of 8 MB (trees on an accelerator are copied to the
      host, where JAX keeps them as long as you keep the trees);
    - files: at most ``max_held`` snapshots. Where there are more, files are read several times;
    - another iterable, whose trees come once: copies of at most ``max_held`` of them (but room for 2 k).
      Where there are more, those so far are replaced by their ``max_held // 2`` largest directions, and
      the result is near the exact one, not equal to it; without centring, the rest is not read.

    Args:
      snapshots: an iterable of parameter trees (arrays of JAX or NumPy, the same names and shapes in
        each), or a folder or a list of paths: .npz files (of :class:`~boostax.SnapshotWriter`, or
        with an entry named like ``"Dense_0/kernel"`` for each leaf), flax msgpack files, or orbax step
        folders.
      k: the number of directions, at least 1. m snapshots have at most m - 1 (without centring, m).
      center: False gives the Gram-Schmidt orthogonalisation of the first k independent snapshots, in
        order, as in Trainable Weight Averaging. Default True.
      exclude: patterns of leaves to leave out, for frozen ones: shell-style text (``"*/bias"``), a
        compiled regular expression, or a function of the path. Default ().
      dtype: of the basis: float32 (default), bfloat16, which halves its memory, or float64, which
        stays in NumPy arrays where JAX has no float64.
      params: the parameters that it is for: arrays or ``ShapeDtypeStruct`` leaves, whose structure and
        split over devices the basis takes. Default None: those of the first snapshot; for files
        nested dicts on the default device.
      part: for files, the part that holds the parameters. Default None: ``"params"`` where a file has
        such a part, else all of it.
      max_held: how many snapshots are held in memory at a time, at least 4. Default 64.
      progress: called as ``progress(done, total)`` after each snapshot that is read; total is None
        where it is not known.

    Returns:
      :class:`~boostax.TrajectoryBasis`, with orthonormal rows.

    Raises:
      ValueError: k is larger than the number of independent directions (those longer than 1e-7 of the
        longest, and than rounding); snapshots differ in their
        leaves or shapes; a NaN or an infinity; a file that is not whole or of something else; an
        argument out of range. The message names the snapshot or file, and the leaf.

    Example:
      Three points on a line: one direction.

      >>> import jax.numpy as jnp
      >>> points = [{"w": jnp.array([0.0, 0.0])}, {"w": jnp.array([3.0, -4.0])},
      ...           {"w": jnp.array([6.0, -8.0])}]
      >>> basis = trajectory_basis(points, 1)
      >>> print(basis.to_array().round(4))
      [[-0.6  0.8]]
      >>> basis.mean[0].tolist()
      [3.0, -4.0]

    Source:
      T. Li, L. Tan, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True: DNNs
      can be Trained in Tiny Subspaces", 2021; T. Li, Z. Huang, Q. Tao, Y. Wu and X. Huang, "Trainable
      Weight Averaging", 2022.

    When not to use:
      With snapshots of another model or another training run: their directions say nothing about
      yours.
    """
    _check_int("k", k, 1)
    _check_int("max_held", max_held, 4)
    dtype = basis_dtype(_NAME, dtype)
    wide = wide_dtype(dtype)
    reader = _Reader(exclude, params, progress)
    try:
        if _are_paths(snapshots):
            files = snapshot_files(snapshots)
            found = _from_files(reader, files, part, int(max_held), int(k), center, wide)
        elif isinstance(snapshots, (list, tuple)):
            reader.total = len(snapshots)
            trees = [reader.tree(tree) for tree in snapshots]
            _check_count(trees, k, center)
            found = build.from_held(trees, int(k), center, wide)
        else:
            found = _from_stream(reader, snapshots, int(max_held), int(k), center, wide)
    except RankError as error:
        if reader.count == 0:
            raise ValueError(f"{_NAME}: there are no snapshots") from None
        raise _rank_error(int(k), error.rank, reader.count, center) from None
    assert reader.layout is not None
    assert reader.like is not None
    assert reader.first is not None
    orthonormalise(found.rows)
    fix_signs(found.rows)
    singular = () if found.singular is None else tuple(float(s) for s in found.singular)
    basis = TrajectoryBasis(
        components=tuple(found.rows.pop(0).astype(dtype, copy=False) for _ in reader.first),
        mean=tuple(found.mean),
        first=tuple(np.array(leaf) for leaf in reader.first),
        k=int(k),
        layout=reader.layout,
        centered=bool(center),
        snapshots=found.count,
        singular_values=singular,
        explained=tuple(s * s / found.variance for s in singular),
    )
    return basis.place(reader.like)


class _Reader:
    """Checks snapshots against the first one, or the parameters given, and counts them."""

    def __init__(
        self,
        exclude: Iterable[PathPattern],
        params: Any,
        progress: Callable[[int, int | None], None] | None,
    ):
        self.exclude = exclude
        self.like = params
        self.layout = None if params is None else layout_of(_NAME, params, exclude)
        self.first: list[Any] | None = None
        self.count = 0
        self.total: int | None = None
        self._reads = 0
        self._progress = progress

    def tree(self, tree: Any) -> list[Any]:
        """Take the next snapshot, a tree; return its covered leaves."""
        if self.layout is None:
            self.like, self.layout = tree, layout_of(_NAME, tree, self.exclude)
        named = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
        return self._taken(f"snapshot {self.count}", named)

    def file(self, file: SnapshotFile, part: str | None, again: bool = False) -> list[Any]:
        """Read a file; return its covered leaves."""
        named = file.load(part, None if self.layout is None else self.layout.paths)
        if self.layout is None:
            try:
                self.like = nested(named)
            except ValueError as error:
                raise ValueError(f"{file.path}: {error}") from None
            self.layout = layout_of(_NAME, self.like, self.exclude)
        return self._taken(str(file.path), named, again)

    def _taken(self, shown: str, named: dict[str, Any], again: bool = False) -> list[Any]:
        assert self.layout is not None
        leaves = match(f"{_NAME}: {shown}", named, self.layout)
        for path, leaf in zip(self.layout.covered_paths, leaves, strict=True):
            got = getattr(leaf, "dtype", type(leaf))
            if not jnp.issubdtype(got, jnp.floating) or not hasattr(leaf, "shape"):
                raise ValueError(
                    f"{_NAME}: {shown}: the leaf {path} has dtype {got}, but is a floating-point array "
                    "in the others"
                )
        for path, dtype in zip(self.layout.paths, self.layout.dtypes, strict=True):
            got = getattr(named.get(path), "dtype", jnp.int32)
            if jnp.issubdtype(got, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"{_NAME}: {shown}: the leaf {path} has dtype {got}, but {dtype} in the first one"
                )
        if not again:
            check_finite(shown, self.layout.covered_paths, leaves)
            self.count += 1
        if self.first is None:
            self.first = leaves
        self._reads += 1
        if self._progress is not None:
            self._progress(self._reads, self.total)
        return leaves


def _from_files(
    reader: _Reader,
    files: Sequence[SnapshotFile],
    part: str | None,
    held: int,
    k: int,
    center: bool,
    dtype: np.dtype,
) -> build.Rows:
    count = len(files)
    _check_count(files, k, center)
    if count <= held:
        reader.total = count
        return build.from_held([reader.file(file, part) for file in files], k, center, dtype)
    seen: set[int] = set()

    def load(index: int) -> list[Any]:
        leaves = reader.file(files[index], part, index in seen)
        seen.add(index)
        return leaves

    block = build.block_size(held)
    blocks = -(-count // block)
    # The first one, each block once and again for each block before it, and all for the sums.
    again = sum(min(block, count - i * block) * i for i in range(blocks))
    reader.total = 1 + 2 * count + again
    return build.from_blocks(load, count, held, k, center, dtype)


def _from_stream(
    reader: _Reader, snapshots: Any, held: int, k: int, center: bool, dtype: np.dtype
) -> build.Rows:
    try:
        trees = iter(snapshots)
    except TypeError:
        raise ValueError(
            f"{_NAME}: snapshots is a {type(snapshots).__name__}, expected trees in a list or another "
            "iterable, a folder, or a list of paths"
        ) from None
    if isinstance(snapshots, dict) or hasattr(snapshots, "shape"):
        raise ValueError(
            f"{_NAME}: snapshots is a single {type(snapshots).__name__}; give a list of parameter trees"
        )

    def copies() -> Iterator[list[Any]]:
        for tree in trees:
            # What comes once may be overwritten or donated as soon as the next one is asked for.
            yield [np.array(leaf) for leaf in reader.tree(tree)]

    if center:
        found = build.from_stream(copies(), held, k, dtype)
    else:
        kept = [leaves for leaves, _ in zip(copies(), range(max(held, k)), strict=False)]
        _check_count(kept, k, center)
        found = build.from_held(kept, k, center, dtype)
    return found


def _check_count(snapshots: Sequence[Any], k: int, center: bool) -> None:
    if not snapshots:
        raise ValueError(f"{_NAME}: there are no snapshots")
    possible = len(snapshots) - bool(center)
    if k > possible:
        raise _rank_error(k, possible, len(snapshots), center)


def _rank_error(k: int, rank: int, count: int, center: bool) -> ValueError:
    kind = "directions around their mean" if center else "independent directions"
    return ValueError(
        f"{_NAME}: k is {k}, but the {count} snapshots have only {rank} {kind}; give k <= {rank}, or "
        "more snapshots that differ"
        if rank
        else f"{_NAME}: k is {k}, but the {count} snapshots have 0 {kind}; give snapshots that differ"
    )


def _are_paths(snapshots: Any) -> bool:
    if isinstance(snapshots, (str, os.PathLike)):
        return True
    return (
        isinstance(snapshots, (list, tuple))
        and len(snapshots) > 0
        and all(isinstance(item, (str, os.PathLike)) for item in snapshots)
    )


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{_NAME}: {name} is {value!r}, expected an integer >= {least}")
