"""What a description says of a loss scale: its settings, each group's leaves, the boundaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from boostax.gradients._grouped import labels_of
from boostax.gradients._plan import trace_loss
from boostax.gradients.group_loss_scale import GroupLossScale
from boostax.gradients.loss_scale import DynamicLossScale
from boostax.gradients.value_and_grad import trained_leaves

if TYPE_CHECKING:
    from boostax.training._train_step import TrainStep
    from boostax.training.state import TrainState

__all__ = [
    "ScaleBoundary",
    "ScaleGroup",
    "group_fates",
    "scale_boundaries",
    "scale_groups",
    "scaling_words",
]


@dataclasses.dataclass(frozen=True)
class ScaleGroup:
    """One group of a :class:`boostax.GroupLossScale`: its number, first scale and leaves."""

    number: int
    init: float
    leaves: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ScaleBoundary:
    """A place in the loss's program where the backward pass goes from one scale to another.

    Attributes:
      before: the group whose layers the value comes from, or an end, where the scale is 1.
      after: the group whose layers it goes into.
      equation: the number of the equation that the boundary stands ahead of, in the loss's jaxpr from
        0 on; ``"4.2"`` is number 2 inside of number 4.
      what: dtype and shape of the value, and the equation's primitive.
      times: how often a call passes it in one micro-batch; more than once inside of a scan.
    """

    before: str
    after: str
    equation: str
    what: str
    times: int


def scaling_words(scaling: Any) -> str:
    """Return a loss scale's settings in words."""
    if not isinstance(scaling, (DynamicLossScale, GroupLossScale)):
        return f"fixed at {_number(scaling.init)}"
    parts = [f"{len(scaling)} groups"] if isinstance(scaling, GroupLossScale) else []
    rule = getattr(scaling, "rule", "window")
    if rule != "window":
        parts.append(f"rule={rule!r}")
    without = () if rule == "window" else ("factor", "window")
    parts += [
        f"{key}={_numbers(getattr(scaling, key))}"
        for key in ("init", "factor", "window", "min_scale", "max_scale")
        if key not in without
    ]
    return f"{type(scaling).__name__}({', '.join(parts)})"


def group_fates(scaling: Any, params: Any) -> Mapping[str, str]:
    """Return each leaf's group by path; nothing where there is one scale for all, or none."""
    if not isinstance(scaling, GroupLossScale):
        return {}
    return {path: f"group {number}" for path, number in scaling.assign(params).items()}


def scale_groups(scaling: Any, params: Any) -> tuple[ScaleGroup, ...]:
    """Return the groups and their leaves; none where there is one scale for all, or none."""
    if not isinstance(scaling, GroupLossScale):
        return ()
    owners = scaling.assign(params)
    return tuple(
        ScaleGroup(number, init, tuple(path for path, own in owners.items() if own == number))
        for number, init in enumerate(scaling.init, 1)
    )


def scale_boundaries(step: TrainStep, state: TrainState, batch: Any) -> tuple[ScaleBoundary, ...]:
    """Return where the boundaries between groups stand while all leaves are trained.

    Args:
      step: the step.
      state: its state, of arrays or ``ShapeDtypeStruct``s.
      batch: a batch, of the same.
    """
    scaling = step.settings.loss_scale
    if not isinstance(scaling, GroupLossScale):
        return ()
    replicas = step.settings.replicas
    parts = step.settings.microbatch * (1 if replicas is None else replicas.size)
    batch = jax.tree.map(lambda leaf: _part(leaf, parts), batch)
    params, model_state = state.params, state.model_state
    rng = None if state.rng is None else jax.eval_shape(step.wrapped_key, state.rng)
    jaxpr, _ = trace_loss(step.canonical(), params, model_state, batch, rng)
    others = len(jax.tree.leaves((model_state, batch, rng)))
    labels = labels_of(scaling, jaxpr, params, trained_leaves(params, None), others)

    def word(label: int) -> str:
        return f"group {label}" if 1 <= label <= len(scaling) else "an end (scale 1)"

    return tuple(
        ScaleBoundary(
            word(cut.source),
            word(cut.target),
            ".".join(map(str, at)),
            cut.what,
            math.prod(cut.lengths),
        )
        for at, cuts in labels.cuts.items()
        for cut in cuts
    )


def _part(leaf: Any, parts: int) -> Any:
    """Return the shape of one part of a leaf, which need not divide evenly."""
    shape = tuple(leaf.shape)
    if parts > 1 and shape:
        shape = (-(-shape[0] // parts), *shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _numbers(value: Any) -> str:
    if not isinstance(value, tuple):
        return _number(value)
    if len(set(value)) == 1:
        return _number(value[0])
    return f"({', '.join(map(_number, value))})"


def _number(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 1 <= value < 1024:
        return f"2**{exponent - 1}"
    return f"{value:g}"
