"""The axes of a layer norm, from the first axis that is normalised and the first with parameters."""

from __future__ import annotations

from typing import NamedTuple

from boostax.models._norm_checks import check_int

__all__ = ["LayerNormAxes", "axes_for_rank", "axes_from_end"]


class LayerNormAxes(NamedTuple):
    """What an input of any rank needs, counted from its end.

    Attributes:
      reduction: the normalised axes.
      features: the axes with parameters.
      rank: the only rank that fits, or None for any.
      merge: the first axis of those that have to be merged into one, because their number is not
        known before the input is, or None.
    """

    reduction: tuple[int, ...]
    features: tuple[int, ...]
    rank: int | None
    merge: int | None


def axes_from_end(
    layer: str, sizes: int, begin_norm_axis: int | None, begin_params_axis: int | None
) -> LayerNormAxes:
    """Return the axes for parameters with ``sizes`` axes.

    Raises:
      ValueError: the two arguments and the number of axes contradict each other.
    """
    for argument, value in (
        ("begin_norm_axis", begin_norm_axis),
        ("begin_params_axis", begin_params_axis),
    ):
        if value is not None:
            check_int(layer, argument, value)
    rank = None
    if begin_params_axis is not None and begin_params_axis >= 0:
        rank = begin_params_axis + sizes
    elif begin_params_axis not in (None, -sizes):
        raise ValueError(
            f"{layer}: begin_params_axis {begin_params_axis} needs num_features with "
            f"{-begin_params_axis} axes, got {sizes}; give the shape of the input from that axis on"
        )
    features = tuple(range(-sizes, 0))
    if begin_norm_axis is None:
        return LayerNormAxes(features, features, rank, None)
    if begin_norm_axis >= 0 and rank is None:
        return LayerNormAxes(tuple(range(-sizes - 1, 0)), features, None, begin_norm_axis)
    begin = begin_norm_axis if begin_norm_axis < 0 else begin_norm_axis - rank  # pyright: ignore
    if begin >= 0 or (rank is not None and begin < -rank):
        raise ValueError(
            f"{layer}: begin_norm_axis {begin_norm_axis} is not an axis of an input of rank {rank} "
            f"(begin_params_axis {begin_params_axis} and {sizes} axes of num_features)"
        )
    return LayerNormAxes(tuple(range(begin, 0)), features, rank, None)


def axes_for_rank(layer: str, argument: str, begin: int, rank: int) -> tuple[int, ...]:
    """Return all axes from ``begin`` on.

    Raises:
      ValueError: an input of that rank has no such axis.
    """
    if not -rank <= begin < rank:
        raise ValueError(f"{layer}: {argument} {begin} is not an axis of an input of rank {rank}")
    return tuple(range(begin % rank - rank, 0))
