"""What PyTorch's optimizers call their settings and their state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from boostax.errors import did_you_mean

__all__ = ["CLASSES", "class_of", "settings_of"]


@dataclasses.dataclass(frozen=True)
class TorchClass:
    """One of PyTorch's optimizers.

    Attributes:
      settings: its name of a setting -> ours.
      fields: its name of a buffer -> the field of the state here.
    """

    settings: Mapping[str, str]
    fields: Mapping[str, str]


_ALL = {"lr": "learning_rate", "weight_decay": "weight_decay"}
_SAME = lambda *names: {name: name for name in names}

CLASSES: dict[str, TorchClass] = {
    "sgd": TorchClass(
        {**_ALL, **_SAME("momentum", "dampening", "nesterov")}, {"momentum_buffer": "trace"}
    ),
    "adagrad": TorchClass(
        {**_ALL, **_SAME("lr_decay", "initial_accumulator_value", "eps")},
        {"sum": "sum_of_squares"},
    ),
    "adadelta": TorchClass(
        {**_ALL, **_SAME("rho", "eps")}, {"square_avg": "e_g", "acc_delta": "e_x"}
    ),
    "rmsprop": TorchClass(
        {**_ALL, "alpha": "decay", **_SAME("eps", "centered", "momentum")},
        {"square_avg": "nu", "grad_avg": "mu", "momentum_buffer": "trace"},
    ),
    "adam": TorchClass(
        {**_ALL, "betas": "betas", **_SAME("eps", "amsgrad")},
        {"exp_avg": "mu", "exp_avg_sq": "nu", "max_exp_avg_sq": "nu_max"},
    ),
    "adamw": TorchClass(
        {**_ALL, "betas": "betas", "eps": "eps"}, {"exp_avg": "mu", "exp_avg_sq": "nu"}
    ),
}
# How it is computed, and what only a scheduler reads.
_NO_SETTING = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
    | {"decoupled_weight_decay", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
# Settings that are not here, with the one value that changes nothing.
_OFF = {"maximize": False, "amsgrad": False}
_TELLS = {"rho": "adadelta", "centered": "rmsprop", "lr_decay": "adagrad", "dampening": "sgd"}


def class_of(caller: str, name: Any, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return which optimizer it was: the one that was said, or what the settings tell."""
    if name is not None:
        if name not in CLASSES:
            raise ValueError(
                f"{caller}: name must be one of {', '.join(map(repr, CLASSES))}, got {name!r}."
                f"{did_you_mean(str(name), CLASSES)}"
            )
        return name
    for setting, told in _TELLS.items():
        if setting in groups[0]:
            return told
    # AdamW is told by decoupled_weight_decay, which older versions don't write.
    if {"betas", "amsgrad"} <= set(groups[0]):
        if "decoupled_weight_decay" in groups[0]:
            return "adamw" if groups[0]["decoupled_weight_decay"] else "adam"
        if not any(group.get("weight_decay") for group in groups):
            return "adam"
    raise ValueError(
        f"{caller}: the groups' settings ({', '.join(map(str, groups[0]))}) don't tell which optimizer "
        f"this was; say so with name=, one of {', '.join(map(repr, CLASSES))}"
    )


def settings_of(
    caller: str, name: str, number: int, group: Mapping[str, Any], learning_rate: Any
) -> dict[str, Any]:
    """Return a group's settings under our names."""
    known = CLASSES[name].settings
    read: dict[str, Any] = {}
    for key, value in group.items():
        if key in known:
            read[known[key]] = _plain(value)
        elif key in _NO_SETTING:
            continue
        elif key not in _OFF or _plain(value) != _OFF[key]:
            raise ValueError(
                f"{caller}: param_groups[{number}] has {key}={value!r}, which {name} does not have here"
                f"{'; descend along the negative loss instead' if key == 'maximize' else ''}. Known: "
                f"{', '.join(known)}"
            )
    if "betas" in read:
        read["b1"], read["b2"] = read.pop("betas")
    if learning_rate is not None:
        read["learning_rate"] = learning_rate
    if "learning_rate" not in read:
        raise ValueError(f"{caller}: param_groups[{number}] has no lr; give learning_rate")
    return read


def _plain(value: Any) -> Any:
    """Return numbers out of numpy, and a pair as a tuple."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value
