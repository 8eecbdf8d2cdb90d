"""What a gradient transformation says of itself, so that a chain can be described and checked."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optax

_ATTRIBUTE = "__boostax_info__"
_PLAIN = "__boostax_plain__"
# What optax and others call the functions that make up a transformation.
_UPDATE = re.compile(r"(\w+_)?update(_fn)?")


@dataclasses.dataclass(frozen=True)
class TransformInfo:
    """The description of one transformation.

    Attributes:
      name: its public name, such as ``"accumulate"``.
      settings: argument names and values, for the description.
      inner: the transformation that it wraps, if any.
      static: the frozen object that both seams share (a ``Freezing``, say), if any.
      fates: tells what happens to each parameter: ``fates(params) -> {path: text}``; paths that it
        leaves out are not concerned.
      check: raises a ``StateMismatchError`` for an optimizer state on the host that was made with
        other static facts.
      keywords: the extra arguments that the update takes, where it refuses all others (optax's SAM
        does); None where it swallows what it doesn't know.
      axes: the axes that it exchanges over; whatever decides whether it runs decides so for all
        devices of these axes together.
      exchanges: whether its update takes ``boostax_exchange``, a function of gradients and weight
        that combines them over devices, and calls it as late and on as little as it can.
      averaged: the extra arguments of its update that are means over a window by weight: names, and
        trees of ``ShapeDtypeStruct``s.
    """

    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inner: Any = None
    static: Any = None
    fates: Callable[[Any], Mapping[str, str]] | None = None
    check: Callable[[Any], None] | None = None
    keywords: frozenset[str] | None = None
    axes: tuple[str, ...] = ()
    exchanges: bool = False
    averaged: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def with_info(
    tx: optax.GradientTransformationExtraArgs, info: TransformInfo
) -> optax.GradientTransformationExtraArgs:
    """Attach ``info`` to a transformation and return it."""
    setattr(tx.update, _ATTRIBUTE, info)
    return tx


def with_plain(tx: Any, plain: Any) -> Any:
    """Note which transformation ``tx`` was built around, and return ``tx``."""
    if tx is not plain:
        setattr(tx.update, _PLAIN, plain)
    return tx


def info_of(tx: Any) -> TransformInfo | None:
    """Return the description of ``tx`` itself, or None."""
    return getattr(tx.update, _ATTRIBUTE, None)


def noted_plain(tx: Any) -> Any | None:
    """Return what :func:`with_plain` noted, or None."""
    return getattr(tx.update, _PLAIN, None)


def plain_of(tx: Any) -> Any:
    """Return what ``tx`` is without boostax's parts at its outside.

    What was noted by :func:`with_plain`; else the transformation beneath the outer wrappers.
    """
    while True:
        noted = noted_plain(tx)
        if noted is not None:
            return noted
        info = info_of(tx)
        if info is None or info.inner is None:
            return tx
        tx = info.inner


def walk(tx: Any) -> Iterator[TransformInfo]:
    """Yield what is in a transformation, outermost first, through chains and wrappers.

    boostax's own transformations carry their description. For others the name of the function
    that made them is all there is; their closures are searched for transformations within, and the
    factory of ``optax.inject_hyperparams`` is called for the one that it makes.
    """
    yield from _walk_function(getattr(tx, "update", tx), set())


def find(tx: Any, name: str) -> TransformInfo | None:
    """Return the first description called ``name`` inside ``tx``, or None."""
    return next((info for info in walk(tx) if info.name == name), None)


def exchanged_axes(tx: Any) -> tuple[str, ...]:
    """Return the axes that anything inside ``tx`` exchanges over, each once."""
    return tuple(dict.fromkeys(axis for info in walk(tx) for axis in info.axes))


def _walk_function(function: Any, seen: set[int]) -> Iterator[TransformInfo]:
    # Bound methods (MultiSteps and user classes) keep their parts on the instance.
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if id(function) in seen and owner is None:
        return
    seen.add(id(function))
    info = getattr(function, _ATTRIBUTE, None)
    if info is not None:
        yield info
        if info.inner is not None:
            yield from _walk_function(info.inner.update, seen)
        return
    if owner is not None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        yield TransformInfo(type(owner).__name__)
        yield from _walk_values(list(vars(owner).values()), seen)
        return
    inner = list(_walk_values([*_closure(function).values(), *_injected(function)], seen))
    name = getattr(function, "__qualname__", "").split(".")[0]
    if name not in {"chain", "named_chain", "with_extra_args_support", ""}:
        yield TransformInfo(name, keywords=_only_keywords(function))
    yield from inner


def _only_keywords(function: Any) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) or None


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    values = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    return values


def _injected(function: Any) -> list[Any]:
    """Return the transformation within ``optax.inject_hyperparams``, as a list of one or none.

    optax makes it anew in each ``init`` and ``update``, from the factory and the hyperparameters.
    Here it is made once more, to be looked at only: the static arguments as they are, and for the
    others, which an update gets as traced arrays, a number in their place. Where optax has other
    internals, or the factory refuses, nothing is found.
    """
    held = _closure(function)
    factory, static = held.get("inner_factory"), held.get("other_hps")
    if not callable(factory) or not isinstance(static, dict):
        return []
    try:
        numeric = {
            name: p.default if isinstance(p.default, numbers.Real) else 0.5
            for name, p in inspect.signature(factory).parameters.items()
            if name not in static
        }
        return [factory(**static, **numeric)]
    except Exception:  # a user's function: whatever it raises, it says nothing to us
        return []


def _walk_values(values: list[Any], seen: set[int]) -> Iterator[TransformInfo]:
    for value in values:
        if isinstance(value, optax.GradientTransformation):
            yield from _walk_function(value.update, seen)
        elif isinstance(value, (tuple, list)):
            yield from _walk_values(list(value), seen)
        elif isinstance(value, dict):
            yield from _walk_values(list(value.values()), seen)
        elif callable(value) and (
            hasattr(value, _ATTRIBUTE) or _UPDATE.fullmatch(getattr(value, "__name__", ""))
        ):
            yield from _walk_function(value, seen)
