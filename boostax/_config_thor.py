"""The section ``thor`` of a config: what ``capture_layers`` and ``scale_by_thor`` take."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from boostax._config_catalogue import catalogue
from boostax._config_named import Named
from boostax._config_types import (
    INT32,
    Allowed,
    Count,
    Flag,
    OptionalPositive,
    Pattern,
    Positive,
    Section,
    one_of,
)

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["Thor", "known_rate"]

_RATE = Allowed("a number above 0, or a schedule by name")
_Rate = Positive | SkipJsonSchema[Named] | SkipJsonSchema[Callable[..., Any]]
_Counts = tuple[Annotated[int, Field(ge=0, le=INT32)], ...]
_COUNTS = Allowed("a list of increasing integers of at least 0")
_PATTERNS = Allowed("a list of path patterns")


class Thor(Section):
    """THOR, a natural gradient by layers."""

    damping: Annotated[_Rate, _RATE] = Field(
        default=0.01,
        description="What is added to the factors, in the unit of the loss's curvature: scale it "
        "with the loss. A number, or a schedule by name.",
    )
    learning_rate: Annotated[_Rate | None, _RATE] = Field(
        default=None,
        description="What the updates are multiplied by afterwards; only the KL clip asks for it. "
        "Default: the learning_rate of the section optimizer.",
    )
    frequency: Count = Field(default=100, description="Updates between two refreshes.")
    early: Annotated[_Counts, _COUNTS] = Field(
        default=(0, 1, 3, 6), description="Updates with a refresh of their own, at the start."
    )
    factor_decay: Annotated[
        Annotated[float, Field(ge=0, lt=1)], Allowed("a number of at least 0 and below 1")
    ] = Field(default=0.9, description="The most that a refresh keeps of the old factors.")
    pi_split: Flag = Field(
        default=True, description="Split the damping between the two factors by their size."
    )
    clip: Annotated[
        bool | Literal["kl", "tensor"], Allowed("true or false, or one of 'kl', 'tensor'")
    ] = Field(
        default=True,
        description="true and kl: bound the KL divergence of a step; tensor: shorten each tensor to "
        "the length 1; in mode reference true is tensor.",
    )
    kl_clip: Annotated[Positive, Allowed("a number above 0")] = Field(
        default=0.001, description="The bound of the KL clip."
    )
    trace_rule: OptionalPositive = Field(
        default=None,
        description="A layer whose trace changes by less than this share between two refreshes is "
        "left alone from then on. Default: never.",
    )
    split_indices: Annotated[_Counts | None, _COUNTS] = Field(
        default=None,
        description="The last layer of each bucket of statistics that devices exchange at a time.",
    )
    block_size: Count = Field(
        default=256, description="The most rows of a factor; larger ones are cut into pieces."
    )
    fisher: Annotated[Literal["empirical", "true"], one_of("empirical", "true")] = Field(
        default="empirical",
        description="G from the loss's own derivatives, or from labels drawn from the model.",
    )
    exclude: Annotated[tuple[Pattern, ...], _PATTERNS] = Field(
        default=(), description="Path patterns of leaves that stay first order."
    )
    layer_norms: Annotated[tuple[Pattern, ...], _PATTERNS] = Field(
        default=(),
        description="Path patterns of leaves that get the reference's rule for layer norms; only in "
        "mode reference.",
    )
    mode: Annotated[Literal["default", "reference"], one_of("default", "reference")] = Field(
        default="default",
        description="reference: the numbers of mindspore.nn.thor.",
    )

    @pydantic.field_validator("early", "split_indices")
    @classmethod
    def _increasing(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and any(a >= b for a, b in itertools.pairwise(value)):
            raise ValueError("not increasing")
        return value

    @pydantic.field_validator("damping", "learning_rate")
    @classmethod
    def _no_class(cls, value: Any) -> Any:
        if isinstance(value, type):  # float(5) and the like would be called without complaint
            raise ValueError("a class is no schedule")
        return value

    @property
    def kl(self) -> bool:
        """Whether the KL clip is on."""
        return self.mode == "default" and self.clip in (True, "kl")


def known_rate(config: BoostConfig) -> Any:
    """Return the number or schedule that updates are multiplied by, as the config tells, or None."""
    given = config.thor.learning_rate
    named = config.optimizer
    if given is None and named is not None:
        given = named.get("learning_rate")
        parameter = inspect.signature(catalogue("optimizer")[named.name]).parameters.get(
            "learning_rate"
        )
        if given is None and parameter is not None and isinstance(parameter.default, (int, float)):
            given = parameter.default
    return given.build() if isinstance(given, Named) else given
