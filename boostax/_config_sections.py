"""The sections of a config: every key with its type, range, default and meaning.

The sections ``boost``, ``common``, ``less_bn``, ``grad_freeze``, ``grad_accumulation`` and
``dim_reduce`` have the keys of mindspore.boost's ``boost_config_dict``, and its defaults but for
``common.device_number``. Keys that boostax adds default to None where they would compete with one
of those.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from boostax._config_dim_reduce import DimReduce
from boostax._config_less_bn import LessBN
from boostax._config_loss_scale import LossScale, LossScaleGroup
from boostax._config_named import Named
from boostax._config_thor import Thor
from boostax._config_types import (
    EVERY,
    FRACTION,
    INT32,
    Allowed,
    AxisName,
    Count,
    Every,
    Flag,
    Fraction,
    FreezeType,
    OpenFraction,
    OptionalPositive,
    Pairs,
    Pattern,
    Section,
    Seed,
    Stats,
    one_of,
)


class Boost(Section):
    """How techniques are switched on, and the flags."""

    mode: Annotated[
        Literal["auto", "manual", "enable_all", "disable_all"],
        one_of("auto", "manual", "enable_all", "disable_all"),
    ] = Field(
        default="auto",
        description="auto: the level decides; manual: the flags decide, at every level; "
        "enable_all: all that can be combined; disable_all: nothing.",
    )
    less_bn: Flag = Field(
        default=False, description="Drop batch norms and normalise the classifier head."
    )
    grad_freeze: Flag = Field(default=False, description="Freeze a varying prefix of the layers.")
    adasum: Flag = Field(default=False, description="Combine the devices' gradients by AdaSum.")
    grad_accumulation: Flag = Field(
        default=False, description="Update once per window of micro-batches."
    )
    dim_reduce: Flag = Field(
        default=False, description="Train in a reduced space with a line search."
    )
    loss_scale_group: Flag = Field(default=False, description="One dynamic loss scale per group.")
    centralize: Flag = Field(
        default=False,
        description="Gradient centralization on its own (boostax). With less_bn on, "
        "less_bn.gc_flag switches it on too.",
    )
    thor: Flag = Field(
        default=False, description="Natural gradient by layers, ahead of the optimizer (boostax)."
    )
    loss_scale: Flag = Field(default=False, description="One loss scale, for float16 (boostax).")


class Common(Section):
    """Settings shared by several techniques."""

    gradient_split_groups: Annotated[
        Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], ...],
        Allowed("an integer, or a list of increasing integers, of at least 1"),
    ] = Field(
        default=(50, 100),
        description="Leaf counts, in forward order, where the exchange between devices is cut into "
        "buffers.",
    )
    device_number: Annotated[Count | None, Allowed(f"an integer from 1 to {INT32}")] = Field(
        default=None,
        description="Devices of a group, for AdaSum: the mean inside a group, AdaSum between "
        "groups. It must divide the number of devices. Default: the devices of one process.",
    )
    grad_accumulation_step: Annotated[Every | None, EVERY] = Field(
        default=None,
        description="Micro-batches per update; the same as grad_accumulation.every.",
    )

    @pydantic.field_validator("gradient_split_groups")
    @classmethod
    def _increasing(cls, value: int | tuple[int, ...]) -> tuple[int, ...]:
        points = (value,) if isinstance(value, int) else value
        if any(a >= b for a, b in itertools.pairwise(points)):
            raise ValueError("not increasing")
        return points

    @property
    def split_points(self) -> tuple[int, ...]:
        """The split points as a tuple."""
        points = self.gradient_split_groups
        return (points,) if isinstance(points, int) else points


class GradFreeze(Section):
    """Freezing a varying prefix of the layers."""

    param_groups: Count = Field(default=10, description="Groups that the layers are divided into.")
    freeze_type: FreezeType = Field(
        default=1, description="0: continuous, 1: interval. boostax's own name is kind."
    )
    freeze_p: Fraction = Field(
        default=0.7,
        description="Share of the steps in which NOTHING is frozen. boostax's own name is "
        "full_fraction.",
    )
    total_steps: Count = Field(default=65536, description="Updates of the whole training.")
    full_fraction: Annotated[Fraction | None, FRACTION] = Field(
        default=None,
        description="Share of the steps in which nothing is frozen; instead of freeze_p.",
    )
    kind: Annotated[
        Literal["continuous", "interval", "ramp", "unfreeze"] | None,
        one_of("continuous", "interval", "ramp", "unfreeze"),
    ] = Field(default=None, description="The schedule; instead of freeze_type.")
    seed: Seed = Field(default=0, description="Seed of the interval schedule.")
    by: Annotated[Literal["count", "parameters"], one_of("count", "parameters")] = Field(
        default="count",
        description="Groups of equally many layers, or of about equally many parameters.",
    )
    patterns: Annotated[
        Annotated[tuple[Pattern, ...], Field(min_length=1)] | None,
        Allowed("a list of path patterns, one a segment, in forward order"),
    ] = Field(default=None, description="Path patterns of the segments; instead of param_groups.")

    @property
    def schedule_kind(self) -> Literal["continuous", "interval", "ramp", "unfreeze"]:
        """The schedule's name, from kind or else freeze_type."""
        if self.kind is not None:
            return self.kind
        return "interval" if self.freeze_type == 1 else "continuous"

    @property
    def share_of_full_steps(self) -> float:
        """The share of steps with nothing frozen, from full_fraction or else freeze_p."""
        return self.freeze_p if self.full_fraction is None else self.full_fraction


class GradAccumulation(Section):
    """Accumulation over steps, and micro-batches inside one step."""

    grad_accumulation_step: Annotated[Every | None, EVERY] = Field(
        default=None, description="Micro-batches per update; boostax's own name is every."
    )
    every: Annotated[Every | None, EVERY] = Field(
        default=None, description="Calls per update. Default: 1."
    )
    reduce: Annotated[Literal["mean", "sum"], one_of("mean", "sum")] = Field(
        default="mean", description="How a window's gradients are combined."
    )
    nonfinite: Annotated[
        Literal["skip_micro", "skip_window", "off"] | None,
        one_of("skip_micro", "skip_window", "off"),
    ] = Field(
        default=None,
        description="What a NaN or inf in a micro-batch does; a value here holds at every = 1 as "
        "well. Default: skip_micro where every is not 1.",
    )
    microbatch: Count = Field(
        default=1, description="Micro-batches that one call splits its batch into."
    )
    stats: Stats = Field(default="per_window", description="How often batch statistics advance.")
    batch_norm_momentum: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None, Allowed("a number of at least 0 and below 1")
    ] = Field(
        default=None,
        description="Weight of the old batch statistics; default: read from the model.",
    )


class Centralize(Section):
    """Gradient centralization."""

    on: Annotated[Literal["gradient", "update"], one_of("gradient", "update")] = Field(
        default="gradient",
        description="Centralize the gradient, or the final update (advised for Adam-like "
        "optimizers).",
    )
    layers: Annotated[Literal["conv_and_dense", "conv"], one_of("conv_and_dense", "conv")] = Field(
        default="conv_and_dense", description="Which kernels are centralized."
    )
    axes: Annotated[
        Pairs | None,
        pydantic.WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"minLength": 1},
                "additionalProperties": {
                    "anyOf": [
                        {"type": "integer"},
                        {"type": "array", "items": {"type": "integer"}},
                    ]
                },
            }
        ),
        Allowed("an object from path patterns to an input axis or a list of them"),
    ] = Field(default=None, description="Input axes of leaves whose layer can't be read.")
    unreadable: Annotated[Literal["error", "skip"], one_of("error", "skip")] = Field(
        default="error", description="What happens where no axes are known."
    )

    @pydantic.field_validator("axes", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        axes = {k: v if isinstance(v, tuple) else (v,) for k, v in value.items()}
        if not all(isinstance(path, str) and path for path in axes):
            raise ValueError("path patterns are text")
        if not all(type(axis) is int for group in axes.values() for axis in group):
            raise ValueError("axes are integers")
        return Pairs(tuple(axes.items()))


class AdaSum(Section):
    """AdaSum between devices."""

    on: Annotated[Literal["gradient", "update"], one_of("gradient", "update")] = Field(
        default="gradient",
        description="Combine the gradients ahead of the optimizer, or the final updates, where "
        "each device keeps moments of its own.",
    )
    granularity: Annotated[Literal["leaf", "tree"], one_of("leaf", "tree")] = Field(
        default="leaf", description="Coefficients for each leaf, or one pair for all."
    )
    algorithm: Annotated[Literal["halving", "gather"], one_of("halving", "gather")] = Field(
        default="halving",
        description="How the devices exchange: halving sends the least, gather is one operation, "
        "for small models.",
    )
    local_steps: Count = Field(
        default=1,
        description="Updates that each device makes alone between two exchanges; more than 1 needs "
        "on = update.",
    )
    outer: SkipJsonSchema[
        Annotated[Named | None, Allowed("an optimizer by name, as in the section optimizer")]
    ] = Field(
        default=None,
        description="Optimizer of the common parameters, which is given what the exchange moved; "
        "needs local_steps above 1. By name and arguments, as in the section optimizer.",
    )
    axis_name: AxisName = Field(
        default=None,
        description="Axis of your own mesh that AdaSum goes over. Default: the axes of boost.mesh.",
    )
    inner_axis: AxisName = Field(
        default=None,
        description="Axis of your own mesh that the mean is taken over before, beside axis_name.",
    )


class Clip(Section):
    """Clipping of the gradient before the optimizer; at most one key."""

    global_norm: OptionalPositive = Field(
        default=None, description="Largest norm over all parameters."
    )
    value: OptionalPositive = Field(default=None, description="Largest absolute value of an entry.")
    adaptive: OptionalPositive = Field(
        default=None, description="Largest ratio of a unit's gradient norm to its parameter norm."
    )


class Compare(Section):
    """What ``boostax compare`` reads of an arm's file; it changes nothing else."""

    name: Annotated[str | None, Allowed("text")] = Field(
        default=None, description="The arm's name; default: the file's."
    )
    level: Annotated[Literal["O0", "O1", "O2"] | None, one_of("O0", "O1", "O2")] = Field(
        default=None, description="The arm's level; default: O0."
    )
    learning_rate: OptionalPositive = Field(
        default=None, description="The arm's learning rate; default: the comparison's."
    )
    task: Annotated[str | None, Allowed("text")] = Field(
        default=None,
        description="Another task of the same file, whose start, loss, batches and optimizer the arm "
        "has; default: the comparison's task.",
    )
    dim_reduce_after: Annotated[OpenFraction | None, Allowed("a number above 0 and below 1")] = (
        Field(
            default=None,
            description="Share of the arm's steps after which it goes on with dim_reduce, in the "
            "subspace of its own snapshots, as the section dim_reduce says. Default: it does not.",
        )
    )
    dim_reduce_batches: Count = Field(
        default=8, description="Batches that one step of that dim_reduce takes together."
    )


SECTIONS: dict[str, type[Section]] = {
    "boost": Boost,
    "common": Common,
    "less_bn": LessBN,
    "grad_freeze": GradFreeze,
    "grad_accumulation": GradAccumulation,
    "centralize": Centralize,
    "adasum": AdaSum,
    "thor": Thor,
    "dim_reduce": DimReduce,
    "loss_scale": LossScale,
    "loss_scale_group": LossScaleGroup,
    "clip": Clip,
    "compare": Compare,
}
# Keys whose None default only says "not given"; a null in a config is a fault for them.
NULLABLE = {("dim_reduce", "pca_mat_path"), ("dim_reduce", "weight_load_dir")}
# Keys that take an optimizer or a schedule by name.
BY_NAME = {
    ("adasum", "outer"): "optimizer",
    ("thor", "damping"): "schedule",
    ("thor", "learning_rate"): "schedule",
}
# At most one key of each tuple may be given.
ALTERNATIVES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("grad_freeze", "freeze_p"), ("grad_freeze", "full_fraction")),
    (("grad_freeze", "param_groups"), ("grad_freeze", "patterns")),
    (("grad_freeze", "by"), ("grad_freeze", "patterns")),
    (("grad_freeze", "freeze_type"), ("grad_freeze", "kind")),
    (
        ("grad_accumulation", "every"),
        ("grad_accumulation", "grad_accumulation_step"),
        ("common", "grad_accumulation_step"),
    ),
    (("clip", "global_norm"), ("clip", "value"), ("clip", "adaptive")),
)
