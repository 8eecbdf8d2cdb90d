"""The section ``less_bn`` of a config: how a model is rewritten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from boostax._config_named import Fault
from boostax._config_types import Allowed, Flag, OptionalPositive, Pattern, Section, one_of

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["LessBN", "less_bn_faults"]


class LessBN(Section):
    """Fewer batch norms, and a normalised classifier head."""

    fn_flag: Flag = Field(default=True, description="Normalise the classifier head.")
    gc_flag: Flag = Field(default=True, description="Centralize gradients where less_bn is on.")
    keep: Annotated[Literal["last", "none"], one_of("last", "none")] = Field(
        default="last",
        description="last: each branch keeps its last batch norm; none: all go, the stem's too.",
    )
    shortcut: Flag = Field(
        default=False, description="Keep the batch norms of projection shortcuts."
    )
    bias: Annotated[bool | Literal["auto"], Allowed("true or false, or 'auto'")] = Field(
        default="auto",
        description="Whether the bias of a norm that goes stays; auto: where the layer ahead has none.",
    )
    compensation: Annotated[
        Literal["skip_init", "scaled_ws"] | None, one_of("skip_init", "scaled_ws")
    ] = Field(
        default=None,
        description="skip_init: a learnable scalar in place of each branch's last norm; scaled_ws: "
        "standardised kernels ahead of the norms that go. Default: nothing.",
    )
    patterns: Annotated[
        Annotated[tuple[Pattern, ...], Field(min_length=1)] | None,
        Allowed("a list of path patterns"),
    ] = Field(
        default=None,
        description="Path patterns of the norms that go, instead of blocks that are found.",
    )
    head: Annotated[Pattern | None, Allowed("text: a path pattern")] = Field(
        default=None,
        description="Path pattern of the classifier. Default: the dense layer that makes the output.",
    )
    multiplier_init: OptionalPositive = Field(
        default=None,
        description="First multiplier of the normalised head; the reference has 1. Default: "
        "sqrt(2) ln(classes - 1), at least 1.",
    )
    fold: Flag = Field(
        default=False,
        description="With inference=True and a state, fold the norms that are left into the layers "
        "ahead.",
    )


def less_bn_faults(config: BoostConfig) -> list[Fault]:
    """Return the faults that only several keys of the section make."""
    section, given = config.less_bn, config.given("less_bn")
    faults = []
    if section.patterns is not None and section.keep == "none":
        faults.append(
            Fault(
                "less_bn.patterns", 'says which norms go, but less_bn.keep is "none": all of them'
            )
        )
    if section.patterns is not None and section.compensation == "skip_init":
        faults.append(
            Fault(
                "less_bn.patterns",
                'says which norms go, but less_bn.compensation is "skip_init", which needs blocks',
            )
        )
    if not section.fn_flag:
        faults += [
            Fault(f"less_bn.{key}", "is about the head, but less_bn.fn_flag is false")
            for key in ("head", "multiplier_init")
            if key in given
        ]
    return faults
