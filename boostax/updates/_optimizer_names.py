"""Which optimizers there are by name, with which arguments, and what to say to a wrong one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from boostax.errors import did_you_mean
from boostax.updates.named._masks import read_mask

__all__ = ["argument_problem", "call", "function_of", "known_names", "mask_argument", "whose"]

# Names of PyTorch and MindSpore -> what is said here.
_ELSEWHERE = {
    "lr": "PyTorch's lr is learning_rate here.",
    "betas": "PyTorch's betas are b1 and b2 here.",
    "alpha": "PyTorch's alpha is decay here.",
    "beta1": "MindSpore's beta1 is b1 here.",
    "beta2": "MindSpore's beta2 is b2 here.",
    "epsilon": "MindSpore's epsilon is eps here.",
    "accum": "MindSpore's accum is initial_accumulator_value here.",
    "use_nesterov": "MindSpore's use_nesterov is nesterov here.",
    "use_amsgrad": "MindSpore's use_amsgrad is amsgrad here.",
    "coefficient": "MindSpore's coefficient is trust_coefficient here.",
    "use_clip": "MindSpore's use_clip is clip here.",
    "lars_filter": "MindSpore's lars_filter is mask here, of parameters instead of names.",
    "loss_scale": "Give it to train_step(loss_scale=...), which unscales the gradients.",
    "settings": (
        "Give them as keywords; optax.inject_hyperparams takes a function of the numbers: "
        "inject_hyperparams(lambda learning_rate: optimizer('sgd', learning_rate=learning_rate))(...)."
    ),
    "params": "The parameters go to init(params); settings of some of them into groups=.",
    "maximize": "Descend along the negative loss instead.",
    "order_params": "Leaves have paths here and no order; leave it out.",
    "grad_centralization": "MindSpore's grad_centralization is centralize here.",
    **dict.fromkeys(
        ("foreach", "fused", "capturable", "differentiable", "use_locking"),
        "It says how, not what is computed; leave it out.",
    ),
}
# What optimizers call the mask of their decay.
_MASKS = ("mask", "weight_decay_mask")


@functools.cache
def known_names() -> dict[str, Callable[..., Any]]:
    """Return every optimizer by name, ours and optax's."""
    from boostax._config_catalogue import catalogue

    return catalogue("optimizer")


def whose(name: str) -> str:
    """Return how an optimizer is called in a message: ``optax.adamw``, or ``adam`` for ours."""
    from boostax.updates.named import OPTIMIZERS

    return name if name in OPTIMIZERS or name.startswith("optax.") else f"optax.{name}"


def function_of(caller: str, name: Any) -> Callable[..., Any]:
    """Return the function of that name."""
    known = known_names()
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(name.removeprefix("optax."), known) if isinstance(name, str) else ""
        raise ValueError(
            f"{caller}: name must be the name of an optimizer, got {name!r}.{hint} Known: "
            f"{', '.join(known)}"
        )
    return known[name]


def argument_problem(name: str, argument: str, takes: Iterable[str]) -> str:
    """Say that an optimizer has no such argument, and which one is meant."""
    takes = list(takes)
    hint = _ELSEWHERE.get(argument)
    theirs = known_names().get(f"optax.{name}")
    if theirs is not None and argument in inspect.signature(theirs).parameters:
        hint = f"optax's own has it: 'optax.{name}'."
    hint = did_you_mean(argument, takes) if hint is None else f" {hint}"
    return f"{name} has no argument {argument!r}.{hint} Its arguments: {', '.join(takes)}"


def mask_argument(name: str) -> str | None:
    """Return the argument that tells which leaves decay, or None where nothing decays."""
    takes = inspect.signature(known_names()[name]).parameters
    return next((argument for argument in _MASKS if argument in takes), None)


def call(caller: str, name: str, settings: Mapping[str, Any]) -> optax.GradientTransformation:
    """Build an optimizer by name, with arguments that it has."""
    function = function_of(caller, name)
    parameters = inspect.signature(function).parameters
    for argument in settings:
        if argument not in parameters:
            raise TypeError(f"{caller}: {argument_problem(name, argument, parameters)}")
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and key not in settings
    ]
    if missing:
        raise TypeError(f"{caller}: {name} needs {' and '.join(missing)}; give it as a keyword")
    masks = {key: read_mask(caller, key, settings[key]) for key in _MASKS if key in settings}
    return function(**{**settings, **masks})
