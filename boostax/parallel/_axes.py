"""Names of axes, and what is to be the same or not the same over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from boostax import _compat

__all__ = ["axis_size", "check_axis", "check_varying"]


def check_axis(caller: str, argument: str, name: Any) -> str:
    """Return the name of one axis."""
    if not isinstance(name, str):
        raise TypeError(f"{caller}: {argument} must be the name of one axis, a str; got {name!r}")
    if not name:
        raise ValueError(f"{caller}: {argument} is empty; give the name of an axis")
    return name


def axis_size(caller: str, axis_name: str) -> int:
    """Return how many devices a bound axis has."""
    try:
        return int(lax.axis_size(axis_name))
    except NameError as error:
        raise NameError(
            f"{caller}: the axis {axis_name!r} is not bound here. Run the update inside "
            f"jax.shard_map over a mesh with an axis {axis_name!r}, or inside jax.pmap or jax.vmap "
            f"with axis_name={axis_name!r}"
        ) from error


def check_varying(caller: str, paths: Sequence[str], leaves: Sequence[Any], axis_name: str) -> None:
    """Raise where types tell that leaves are the same on all devices of the axis already."""
    if not _compat.tracks_varying(axis_name):
        return
    values = zip(paths, leaves, strict=True)
    same = [path for path, leaf in values if axis_name not in _compat.varying_axes(leaf)]
    if same:
        raise ValueError(
            f"{caller}: {', '.join(map(repr, same))} {'is' if len(same) == 1 else 'are'} the same on "
            f"all devices of the axis {axis_name!r}: shard_map has summed the gradient already. "
            f"Take it at jax.lax.pcast(params, {axis_name!r}, to='varying'); if the value is meant "
            "to be the same, leave it out or pcast it"
        )
