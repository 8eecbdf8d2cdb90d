"""What lies around the leaves that a transformation is given, while some are taken out of its sight.

What a leaf is can depend on its neighbours: the bias beside a kernel tells the kernel's output axes.
``freeze`` hands its inner transformation the trained leaves only; for the length of that call the
paths and shapes of all leaves can be read here. Nothing is kept after the call.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from boostax._tree import path_string

__all__ = ["Shapes", "around", "shapes_of", "within"]

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

_WHOLE: contextvars.ContextVar[Shapes] = contextvars.ContextVar("boostax_whole_tree", default=())


def shapes_of(tree: Any) -> Shapes:
    """Return path and shape of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple((path_string(path), tuple(np.shape(leaf))) for path, leaf in leaves)


@contextlib.contextmanager
def within(tree: Any) -> Iterator[None]:
    """For the length of the block, say that what is worked on are leaves of ``tree``."""
    token = _WHOLE.set(around(shapes_of(tree)))
    try:
        yield
    finally:
        _WHOLE.reset(token)


def around(shapes: Shapes) -> Shapes:
    """Return the largest known tree that these leaves are part of: at least themselves."""
    whole = _WHOLE.get()
    return whole if set(shapes) <= set(whole) else shapes
