"""Reading and writing .npz files: whole or not there, never pickled, with a header of our own."""

from __future__ import annotations

import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["HEADER", "read_npz", "write_npz"]

HEADER = "__boostax__"
_FAULTS = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def write_npz(path: pathlib.Path, form: str, header: Mapping[str, Any], arrays: Mapping[str, Any]):
    """Write arrays under a temporary name and rename the file.

    Args:
      path: where.
      form: the format's name and version, for the header.
      header: what else stands in the header; plain JSON.
      arrays: arrays by name. bfloat16 and the like, which NumPy's format lacks, are kept as integers
        with their dtype in the header.
    """
    stored, dtypes = {}, {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.isbuiltin != 1:
            dtypes[name] = str(array.dtype)
            array = array.view(f"u{array.dtype.itemsize}")
        stored[name] = array
    text = json.dumps({"format": form, "dtypes": dtypes, **header})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            # numpy.savez takes the names as keyword arguments, of which it has some of its own.
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in {HEADER: np.array(text), **stored}.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_npz(path: pathlib.Path, what: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a .npz file whole, and its header, which is empty where there is none.

    Args:
      path: the file.
      what: what it should be, for the message.

    Raises:
      ValueError: the file is not whole, not a .npz file, or has entries that need unpickling.
    """
    try:
        # Opened here, since numpy.load leaves its own file open when it finds a fault.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array, not several by name")
            with archive:
                arrays = {name: archive[name] for name in archive.files}
        header = json.loads(str(arrays.pop(HEADER))) if HEADER in arrays else {}
        for name, dtype in header.get("dtypes", {}).items():
            arrays[name] = arrays[name].view(jnp.dtype(dtype))
    except (*_FAULTS, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not {what}, or not whole: {error}") from None
    for name, array in arrays.items():
        if array.dtype.isbuiltin != 1 and name not in header.get("dtypes", {}):
            raise ValueError(
                f"{path}: the entry {name} has dtype {array.dtype}, which says nothing about its "
                "numbers; save it as float32"
            )
    return header, arrays
