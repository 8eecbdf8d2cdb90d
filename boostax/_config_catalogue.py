"""What a config may name: the optimizers, transformations and schedules of optax, by signature."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

# Optimizers whose step size has another name than learning_rate.
_OTHER_OPTIMIZERS = {"polyak_sgd", "mechanize", "sam"}
# They take functions in ways that a config can't write.
_NOT_BY_NAME = {"inject_hyperparams", "inject_stateful_hyperparams"}


@functools.cache
def catalogue(kind: str) -> dict[str, Callable[..., Any]]:
    """Return the functions that a config may name: name -> function."""
    import optax
    import optax.contrib

    from boostax.updates.named import OPTIMIZERS

    found: dict[str, Callable[..., Any]] = {}
    if kind == "schedule":
        for name in dir(optax.schedules):
            function = getattr(optax.schedules, name)
            if inspect.isfunction(function) and name not in _NOT_BY_NAME:
                found[name] = function
        return found
    for module in (optax.contrib, optax):
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or not inspect.isfunction(function) or name in _NOT_BY_NAME:
                continue
            signature = inspect.signature(function)
            parameters = signature.parameters
            if kind == "optimizer":
                takes = "learning_rate" in parameters and not name.startswith("scale_by_")
                takes = takes or name in _OTHER_OPTIMIZERS
            else:
                takes = "GradientTransformation" in str(signature.return_annotation) or (
                    "learning_rate" in parameters
                )
                takes = takes and all(
                    p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()
                )
            if takes:
                found[name] = function
    # Ours go by the plain name; optax's function of that name stays within reach.
    for name, function in OPTIMIZERS.items():
        if name in found:
            found[f"optax.{name}"] = found[name]
        found[name] = function
    return dict(sorted(found.items()))


@functools.cache
def accepts(kind: str, name: str) -> dict[str, frozenset[str]]:
    """Return what each argument takes: words out of number, integer, boolean, text, dtype, ..."""
    function = catalogue(kind)[name]
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # an annotation that names a private type
        hints = {}
    result = {}
    for argument, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(argument, parameter.annotation)
        result[argument] = _accepted(argument, hint, parameter.default)
    return result


@functools.cache
def limits(kind: str, name: str, argument: str) -> dict[str, float]:
    """Return the range of a number, by the keywords of JSON Schema; empty where optax judges."""
    default = inspect.signature(catalogue(kind)[name]).parameters[argument].default
    if argument in _FRACTIONS and kind != "schedule":
        # Some parts of optax have a decay of 1, a sum without forgetting, as their default.
        top = "maximum" if default == 1 else "exclusiveMaximum"
        return {"minimum": 0, top: 1}
    if argument in (_RATES if kind == "schedule" else _NOT_NEGATIVE):
        return {"minimum": 0}
    return {}


# Weights of what was before, in optimizers and transformations.
_FRACTIONS = frozenset({"momentum", "decay", "b1", "b2", "b3", "adam_b1", "adam_b2"})
_NOT_NEGATIVE = frozenset(
    {"learning_rate", "adam_learning_rate", "max_learning_rate", "weight_decay"}
    | {"adam_weight_decay", "weight_decay_rate", "eps", "eps_root", "adam_eps_root"}
)
# A schedule's values, and the factors on them.
_RATES = frozenset({"init_value", "peak_value", "end_value", "value", "alpha", "decay_rate"})


def _accepted(argument: str, hint: Any, default: Any) -> frozenset[str]:
    text = str(hint)
    words = {"null"} if default is None or "None" in text or "Optional" in text else set()
    if "dtype" in argument:
        return frozenset(words | {"dtype"})
    if argument.endswith("mask"):
        # optax's own defaults for masks are None and True.
        return frozenset(words | {"mask", "function"} | ({"boolean"} if default is True else set()))
    # optax's array type also lists bool, so only a plain annotation or default means a flag.
    if hint is bool or isinstance(default, bool):
        return frozenset(words | {"boolean"})
    if hint is str or isinstance(default, str):
        return frozenset(words | {"text"})
    if argument in _BY_ARGUMENT:
        return frozenset(words | {_BY_ARGUMENT[argument]})
    if "GradientTransformation" in text:
        return frozenset(words | {"transformation"})
    if hint in (int, int | None):
        return frozenset(words | {"integer"})
    if argument.endswith(("_fn", "dimension_numbers")):
        return frozenset(words | {"function"})
    if "Callable" in text:
        words.add("schedule")
    if "Sequence" in text or "tuple" in text.lower() or isinstance(default, (tuple, list)):
        words.add("list")
    if "float" in text or isinstance(default, (int, float)) or hint is inspect.Parameter.empty:
        words.add("number")
    return frozenset(words)


# Arguments whose annotation does not say what a config can write for them.
_BY_ARGUMENT = {
    "boundaries_and_scales": "steps",
    "schedules": "schedules",
    "boundaries": "list",
    "cosine_kwargs": "objects",
}
