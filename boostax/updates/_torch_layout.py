"""How the axes of PyTorch's parameters become those of the leaves here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from boostax._tree import matches
from boostax.errors import did_you_mean
from boostax.updates._thor_checks import whole_number

__all__ = ["Layout", "read_layout"]

Layout = Callable[[str, str, np.ndarray, tuple[int, ...]], np.ndarray]
_NAMED = ("torch", "same")


def read_layout(caller: str, layout: Any) -> Layout:
    """Return ``(caller, path, array, shape) -> array`` with the axes as they are here."""
    if isinstance(layout, str):
        if layout not in _NAMED:
            raise ValueError(
                f"{caller}: layout must be 'torch', 'same' or a mapping from path patterns to axes, got "
                f"{layout!r}.{did_you_mean(layout, _NAMED)}"
            )
        by_name = layout == "torch"
        axes_of = lambda path, rank: _turned(path, rank) if by_name else None
    elif isinstance(layout, Mapping):
        for pattern, axes in layout.items():
            if not all(map(whole_number, axes)) or sorted(axes) != list(range(len(axes))):
                raise ValueError(
                    f"{caller}: layout[{pattern!r}] must have each of PyTorch's axes once, such as "
                    f"(1, 0), got {axes!r}"
                )
        axes_of = lambda path, rank: next(
            (tuple(axes) for pattern, axes in layout.items() if matches(pattern, path)), None
        )
    else:
        raise TypeError(f"{caller}: layout must be text or a mapping, got {layout!r}")

    def turn(caller: str, path: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        axes = axes_of(path, array.ndim)
        if axes is not None and len(axes) != array.ndim:
            raise ValueError(
                f"{caller}: layout has {len(axes)} axes for {path!r}, which has the shape {array.shape} "
                "there"
            )
        out = array if axes is None else array.transpose(axes)
        if out.shape != shape:
            became = "" if axes is None else f", {out.shape} with the axes {axes}"
            raise ValueError(
                f"{caller}: {path!r} has the shape {shape}, but PyTorch's buffer has {array.shape}"
                f"{became}; check order and layout"
            )
        return out

    return turn


def _turned(path: str, rank: int) -> tuple[int, ...] | None:
    """Return (out, in, *window) as (*window, in, out), for kernels."""
    if path.split("/")[-1] != "kernel" or rank < 2:
        return None
    return (*range(2, rank), 1, 0)
