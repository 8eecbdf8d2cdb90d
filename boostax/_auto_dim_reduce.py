"""DimReduce's part of the chain that AutoBoost composes: the basis, from files, and its steps."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
import zipfile
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import matches
from boostax.errors import ConfigError
from boostax.updates.basis import TrajectoryBasis
from boostax.updates.dim_reduce import dim_reduce
from boostax.updates.trajectory_basis import trajectory_basis

if TYPE_CHECKING:
    from boostax._config_dim_reduce import DimReduce
    from boostax.config import BoostConfig

__all__ = ["dim_reduce_part", "steps_of"]

_POLL_SECONDS = 0.1
# A file that is not whole and was left alone for so long is a broken one.
_STILL_SECONDS = 10.0


def dim_reduce_part(config: BoostConfig, params: Any) -> Any:
    """Return ``dim_reduce`` with the section's settings, on the basis that it names.

    Args:
      config: the config; its section knows where the basis comes from.
      params: the parameters; arrays or ``ShapeDtypeStruct`` leaves.

    Raises:
      ConfigError: a file is not what the section says, or does not fit the parameters.
      TimeoutError: the file at ``pca_mat_path`` did not come in time.
    """
    section = config.dim_reduce
    try:
        basis = _basis(section, params)
    except ValueError as error:
        raise ConfigError(f"dim_reduce: {error}") from error
    return dim_reduce(basis, **steps_of(section))


def steps_of(section: DimReduce) -> dict[str, Any]:
    """Return the section's keys that ``dim_reduce`` itself takes."""
    names = ("rho", "gamma", "alpha", "sigma", "max_backtracks", "mode")
    return {name: getattr(section, name) for name in names}


def _basis(section: DimReduce, params: Any) -> TrajectoryBasis:
    file = None if section.pca_mat_path is None else pathlib.Path(section.pca_mat_path)
    makes = section.weight_load_dir is not None and jax.process_index() == 0
    if file is None or (makes and not file.exists()):
        basis = _made(section, params)
        if file is not None:
            _write(file, basis)
        return basis
    _wait_for(file, section.timeout)
    return _read(section, file, params)


def _made(section: DimReduce, params: Any) -> TrajectoryBasis:
    assert section.weight_load_dir is not None
    folder = pathlib.Path(section.weight_load_dir)
    if not folder.is_dir():
        raise ValueError(f"weight_load_dir: there is no folder {folder}")
    return trajectory_basis(
        folder,
        section.n_components,
        center=section.center,
        exclude=section.exclude,
        dtype=section.dtype or "float32",
        params=params,
    )


def _write(file: pathlib.Path, basis: TrajectoryBasis) -> None:
    if file.suffix != ".npz":
        raise ValueError(
            f"pca_mat_path: there is no {file}, and what is made of snapshots is written as .npz; "
            "give a path that ends with .npz"
        )
    basis.save(file)


def _wait_for(file: pathlib.Path, timeout: int) -> None:
    """Wait until the file is there, and whole as far as its own header tells."""
    end = time.monotonic() + timeout
    while not (file.exists() and _is_whole(file)):
        if time.monotonic() > end:
            there = "is not whole" if file.exists() else "is not there"
            raise TimeoutError(
                f"dim_reduce.pca_mat_path: {file} {there} after {timeout} seconds (dim_reduce.timeout); "
                "write it there (boostax basis, TrajectoryBasis.save), or set dim_reduce."
                "weight_load_dir to the snapshots' folder"
            )
        time.sleep(_POLL_SECONDS)


def _is_whole(file: pathlib.Path) -> bool:
    """Whether nothing more is to be waited for: the file is whole, or nobody has written for a while."""
    if not file.is_file() or time.time() - file.stat().st_mtime > _STILL_SECONDS:
        return True
    if file.suffix == ".npz":
        return zipfile.is_zipfile(file)  # its table of contents is written last
    try:
        with file.open("rb") as opened:
            version = np.lib.format.read_magic(opened)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, _, dtype = read(opened)
            return file.stat().st_size >= opened.tell() + math.prod(shape) * dtype.itemsize
    except ValueError:
        return False


def _read(section: DimReduce, file: pathlib.Path, params: Any) -> TrajectoryBasis:
    if file.suffix == ".npy":
        return TrajectoryBasis.from_array(
            file,
            params,
            k=section.n_components,
            order=section.leaf_order,
            exclude=section.exclude,
            dtype=section.dtype or "float32",
        )
    basis = TrajectoryBasis.load(file, params)
    if basis.k != section.n_components:
        raise ValueError(
            f"n_components is {section.n_components}, but the basis in {file} has {basis.k} directions; "
            f"set n_components to {basis.k}"
        )
    both = [path for path in basis.paths if any(matches(p, path) for p in section.exclude)]
    if both:
        raise ValueError(
            f"exclude names {both[0]}, which the basis in {file} moves; make one without it (boostax "
            "basis --exclude)"
        )
    if section.dtype is not None and jnp.dtype(section.dtype) != basis.dtype:
        cast = tuple(rows.astype(section.dtype) for rows in basis.components)
        basis = dataclasses.replace(basis, components=cast)
    return basis
