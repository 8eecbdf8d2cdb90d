"""The types of a config's keys: ranges, and in words what a key takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

__all__ = [
    "EVERY",
    "FRACTION",
    "INT32",
    "Allowed",
    "AxisName",
    "Count",
    "Every",
    "Flag",
    "Fraction",
    "FreezeType",
    "NotNegative",
    "OpenFraction",
    "OptionalPath",
    "OptionalPositive",
    "Pairs",
    "PathMask",
    "Pattern",
    "Positive",
    "Section",
    "Seed",
    "Stats",
    "one_of",
]

INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What a field takes, in words, for the message about a wrong value."""

    text: str


EVERY = Allowed(
    "an integer of at least 1, or (not in JSON) a function from the update count to one"
)
FRACTION = Allowed("a number from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A dict as pairs, so that it can be hashed."""

    pairs: tuple[tuple[Any, Any], ...]


def _function(value: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(value, type):  # int(5) and the like would be called without complaint
        raise ValueError("a class is no function")
    return value


Flag = Annotated[bool, Allowed("true or false")]
Count = Annotated[int, Field(ge=1, le=INT32), Allowed(f"an integer from 1 to {INT32}")]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), Allowed(f"an integer from 0 to {2**32 - 1}")]
Fraction = Annotated[float, Field(ge=0, le=1), FRACTION]
OpenFraction = Annotated[float, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
NotNegative = Annotated[float, Field(ge=0), Allowed("a number of at least 0")]
Positive = Annotated[float, Field(gt=0), Allowed("a number above 0")]
Every = Annotated[
    Count | SkipJsonSchema[Annotated[Callable[..., Any], pydantic.AfterValidator(_function)]],
    EVERY,
]
Pattern = Annotated[str, Field(min_length=1)]
AxisName = Annotated[
    Annotated[str, Field(min_length=1)] | None, Allowed("text: the name of a mesh axis")
]
OptionalPath = Annotated[str | None, Allowed("text (a path) or null")]
OptionalPositive = Annotated[Positive | None, Allowed("a number above 0")]


def one_of(*names: str) -> Allowed:
    """Word the choice between names."""
    return Allowed("one of " + ", ".join(repr(n) for n in names))


Stats = Annotated[Literal["per_window", "per_micro"], one_of("per_window", "per_micro")]
FreezeType = Annotated[int, Field(ge=0, le=1), Allowed("0 (continuous) or 1 (interval)")]


@dataclasses.dataclass(frozen=True)
class PathMask:
    """A mask given by path patterns: true for the leaves that one of them fits."""

    patterns: tuple[str, ...]

    def __call__(self, params: Any) -> Any:
        import jax

        from boostax._tree import check_matched, leaf_paths, matches

        paths = leaf_paths(params)
        for pattern in self.patterns:
            check_matched("mask", pattern, paths)
        fits = [any(matches(pattern, path) for pattern in self.patterns) for path in paths]
        return jax.tree.unflatten(jax.tree.structure(params), fits)


class Section(pydantic.BaseModel):
    """A frozen part of the config that takes no other keys and converts nothing."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )
