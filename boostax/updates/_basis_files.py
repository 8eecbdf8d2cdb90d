"""A basis in a .npz file: ``component/NAME`` and the snapshots' ``mean/NAME`` and ``first/NAME``."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax.updates._basis_leaves import Layout, nested
from boostax.updates._npz import read_npz, write_npz

__all__ = ["BASIS_FORMAT", "check_free", "load", "read_npy", "save"]

BASIS_FORMAT = "boostax-basis/1"
_PLAIN = ("k", "centered", "snapshots", "singular_values", "explained")


def save(path: pathlib.Path, basis: Any) -> None:
    """Write a basis; see ``TrajectoryBasis.save``."""
    arrays = {}
    for kind, leaves in (
        ("component", basis.components),
        ("mean", basis.mean),
        ("first", basis.first),
    ):
        for name, leaf in zip(basis.paths, leaves or (), strict=False):
            arrays[f"{kind}/{name}"] = np.asarray(leaf)
    layout = basis.layout
    header = {name: getattr(basis, name) for name in _PLAIN}
    header["leaves"] = [
        {"path": path, "shape": shape, "dtype": dtype, "covered": covered}
        for path, shape, dtype, covered in zip(
            layout.paths, layout.shapes, layout.dtypes, layout.covered, strict=True
        )
    ]
    write_npz(path, BASIS_FORMAT, header, arrays)


def load(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a basis: the fields of a ``TrajectoryBasis``, and the parameters' shapes by name.

    Raises:
      ValueError: the file is not a whole basis; the message names it.
    """
    header, arrays = read_npz(path, "a file of a basis")
    form = header.get("format")
    if form != BASIS_FORMAT:
        newer = str(form).startswith("boostax-basis/")
        raise ValueError(
            f"{path} has the format {form!r}, this version reads {BASIS_FORMAT!r}"
            if newer
            else f"{path} is not a file of a basis; TrajectoryBasis.save or boostax basis writes one"
        )
    try:
        fields = {name: header[name] for name in _PLAIN}
        fields |= {name: tuple(fields[name]) for name in ("singular_values", "explained")}
        leaves = header["leaves"]
        named = {
            leaf["path"]: jax.ShapeDtypeStruct(tuple(leaf["shape"]), _dtype(leaf["dtype"]))
            for leaf in leaves
        }
        layout = Layout(
            paths=tuple(named),
            shapes=tuple(leaf.shape for leaf in named.values()),
            dtypes=tuple(leaf["dtype"] for leaf in leaves),
            covered=tuple(bool(leaf["covered"]) for leaf in leaves),
            treedef=jax.tree.structure(list(named)),
        )
        fields["layout"] = layout
        fields["components"] = tuple(arrays[f"component/{name}"] for name in layout.covered_paths)
        for point in ("mean", "first"):
            there = f"{point}/{layout.covered_paths[0]}" in arrays
            fields[point] = (
                tuple(arrays[f"{point}/{name}"] for name in layout.covered_paths) if there else None
            )
        shapes = [(fields["k"], *shape) for shape in layout.covered_shapes]
        if [rows.shape for rows in fields["components"]] != shapes:
            raise ValueError("the shapes of its arrays do not fit together")
        nested(named)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole file of a basis: {error}") from None
    return fields, named


def check_free(path: pathlib.Path) -> None:
    """Check that a basis can be written to ``path`` and nobody else's file is overwritten.

    Raises:
      ValueError: the folder is not there, or the file is of something else.
    """
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; make it first")
    if path.exists():
        try:
            load(path)
        except ValueError:
            raise ValueError(
                f"{path} is there and not a basis, and would be overwritten; give another name"
            ) from None


def read_npy(path: pathlib.Path) -> np.ndarray:
    """Open a .npy file without reading it whole, or raise a ValueError naming it."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file, or not whole: {error}") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{path} holds several arrays; give a .npy file of one")
    return array


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:  # a random key; only its place counts
        return np.dtype(np.uint32)
