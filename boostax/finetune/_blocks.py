"""Feature matrices as blocks of rows: from arrays, .npy files, or any iterable of blocks."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = ["matrix", "native", "row_blocks", "row_count"]


def native(array: Any) -> Any:
    """Return an array in the machine's byte order, which JAX needs; others are left as they are."""
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def row_count(argument: str, features: Any) -> int | None:
    """Return how many rows a matrix or file has; None for an iterable of blocks."""
    array = _opened(argument, features)
    return len(_checked(argument, array)) if isinstance(array, (np.ndarray, jax.Array)) else None


def matrix(argument: str, features: Any) -> Any:
    """Return a feature matrix of real numbers, checked; files are memory-mapped."""
    array = _opened(argument, features)
    if not isinstance(array, (np.ndarray, jax.Array)):
        array = _array(argument, array)
    return native(_checked(argument, array))


def row_blocks(argument: str, features: Any, rows: int) -> Iterator[tuple[Any, int]]:
    """Yield ``(block, used)``: blocks of one shape, of which the first ``used`` rows count.

    One compiled function serves them all; the last is filled up with zeros. A block has ``rows`` rows,
    or fewer where a matrix of known length is cut more evenly so.
    """
    features = _opened(argument, features)
    if isinstance(features, (np.ndarray, jax.Array)):
        whole = _checked(argument, features)
        # Blocks of about one size: little is filled up.
        size = -(-len(whole) // -(-len(whole) // rows))
        for start in range(0, len(whole), size):
            yield _filled(native(whole[start : start + size]), size)
        return
    if not isinstance(features, Iterable) or isinstance(features, (dict, bytes)):
        raise TypeError(
            f"{argument} must be an array, a .npy file or an iterable of blocks of rows, got "
            f"{type(features).__name__}"
        )
    yield from _gathered(argument, features, rows)


def _gathered(argument: str, blocks: Iterable[Any], rows: int) -> Iterator[tuple[Any, int]]:
    """Cut blocks of any sizes into blocks of ``rows``."""
    held: list[np.ndarray] = []
    count, width, number = 0, None, -1
    for number, given in enumerate(blocks):
        name = f"{argument}, block {number}"
        known = given if hasattr(given, "ndim") else _array(name, given)
        block = native(np.asarray(_checked(name, known)))
        if width is not None and block.shape[1] != width:
            raise ValueError(f"{name} has {block.shape[1]} features, the blocks before it {width}")
        width = block.shape[1]
        while count + len(block) >= rows:
            taken = rows - count
            yield np.concatenate([*held, block[:taken]]), rows
            held, count, block = [], 0, block[taken:]
        if len(block):
            # A copy: the iterable may fill the same memory anew for its next block.
            held.append(block.copy())
            count += len(block)
    if number < 0:
        raise ValueError(f"{argument} is empty: the iterable gave no block")
    if held:
        yield _filled(np.concatenate(held), rows)


def _filled(block: Any, rows: int) -> tuple[Any, int]:
    used = len(block)
    if used == rows:
        return block, used
    xp = jnp if isinstance(block, jax.Array) else np
    return xp.concatenate([block, xp.zeros((rows - used, block.shape[1]), block.dtype)]), used


def _opened(argument: str, features: Any) -> Any:
    if not isinstance(features, (str, os.PathLike)):
        return features
    path = pathlib.Path(features)
    if path.suffix != ".npy":
        raise ValueError(f"{argument}: {str(path)!r} is no .npy file; other files can be iterated")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _array(argument: str, rows: Any) -> np.ndarray:
    if isinstance(rows, (dict, bytes)):
        raise TypeError(f"{argument} must be a matrix of numbers, got {type(rows).__name__}")
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise ValueError(f"{argument} must be a matrix of numbers: {error}") from error


def _checked(argument: str, array: Any) -> Any:
    if isinstance(array, Tracer):
        raise TypeError(f"{argument} is traced: call this outside jit, grad and vmap")
    dtype = array.dtype
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{argument} must hold real numbers, got dtype {dtype}")
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{argument} must be a matrix (examples, features), not empty, got shape "
            f"{tuple(array.shape)}; flatten or pool other shapes"
        )
    return array
