"""The sections ``loss_scale`` and ``loss_scale_group`` of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from boostax._config_named import Fault
from boostax._config_types import Allowed, Flag, Pattern, Section, one_of

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["NO_GROUPS", "LossScale", "LossScaleGroup", "scale_faults"]

# Why loss_scale_group can't be set up.
NO_GROUPS = (
    "loss_scale_group needs to know the groups; set loss_scale_group.groups to a list with a path "
    "pattern, or a list of them, for each group"
)

# The least and the largest normal number of float32.
_Value = Annotated[float, Field(ge=2.0**-126, le=(2 - 2.0**-23) * 2.0**127)]
_Scale = Annotated[_Value, Allowed("a number above 0, in float32's range")]
_Scales = Annotated[
    _Value | Annotated[tuple[_Value, ...], Field(min_length=1)],
    Allowed("a number above 0, in float32's range, or a list with one for each group"),
]
_Factor = Annotated[float, Field(gt=1), Allowed("a number above 1")]
_Window = Annotated[int, Field(ge=1, le=2**30), Allowed(f"an integer from 1 to {2**30}")]
_Group = Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1)]


class LossScale(Section):
    """One loss scale, for float16."""

    dynamic: Flag = Field(
        default=True,
        description="true: the scale grows and shrinks; false: it stays at init, until "
        "boostax.set_loss_scale.",
    )
    init: _Scale = Field(default=2.0**15, description="The first scale.")
    factor: _Factor = Field(default=2.0, description="What the scale grows and shrinks by.")
    window: _Window = Field(
        default=2000, description="Finite micro-batches in a row before the scale grows."
    )
    min_scale: _Scale = Field(default=1.0, description="The smallest scale.")
    max_scale: _Scale = Field(default=2.0**24, description="The largest scale.")


class LossScaleGroup(Section):
    """One loss scale a group of parameters, for float16."""

    groups: Annotated[
        Annotated[tuple[_Group, ...], Field(min_length=1)] | None,
        Allowed("a list with a path pattern, or a list of them, for each group"),
    ] = Field(
        default=None,
        description="Path patterns of each group's leaves; each leaf must be in one group.",
    )
    init: _Scales = Field(default=2.0**15, description="The first scale, or one a group.")
    factor: _Factor = Field(default=2.0, description="What scales grow and shrink by.")
    window: _Window = Field(
        default=2000, description="Finite micro-batches in a row before a group's scale grows."
    )
    min_scale: _Scales = Field(default=2.0**-24, description="The smallest scale, or one a group.")
    max_scale: _Scales = Field(default=2.0**24, description="The largest scale, or one a group.")
    rule: Annotated[Literal["window", "reference"], one_of("window", "reference")] = Field(
        default="window",
        description="window: as loss_scale, group by group; reference: the numbers of "
        "mindspore.boost.GroupLossScaleManager.",
    )


def scale_faults(config: BoostConfig) -> list[Fault]:
    """Return the faults that only several keys of these sections make."""
    one, several = config.loss_scale, config.loss_scale_group
    faults = []
    if one.dynamic:
        faults += _bounds("loss_scale", one.min_scale, one.init, one.max_scale, "")
    values = {key: getattr(several, key) for key in ("min_scale", "init", "max_scale")}
    lists = {key: value for key, value in values.items() if isinstance(value, tuple)}
    count = max((len(value) for value in lists.values()), default=1)
    if several.groups is not None:
        count = len(several.groups)
    wrong = [
        Fault(
            f"loss_scale_group.{key}",
            f"has the length {len(value)}, but there are {count} groups; give one number, or one a "
            "group",
        )
        for key, value in lists.items()
        if len(value) != count
    ]
    if wrong:
        return faults + wrong
    for i in range(count):
        low, first, high = (v[i] if isinstance(v, tuple) else v for v in values.values())
        where = f" in group {i + 1}" if lists else ""
        found = _bounds("loss_scale_group", low, first, high, where)
        if found:
            return faults + found
    return faults


def _bounds(section: str, low: Any, first: Any, high: Any, where: str) -> list[Fault]:
    if low > high:
        problem = f"is {high:g}{where}, below min_scale = {low:g}"
        return [Fault(f"{section}.max_scale", problem)]
    if not low <= first <= high:
        problem = (
            f"is {first:g}{where}, out of [min_scale, max_scale] = [{low:g}, {high:g}]; move the bound, "
            "or start elsewhere"
        )
        return [Fault(f"{section}.init", problem)]
    return []
