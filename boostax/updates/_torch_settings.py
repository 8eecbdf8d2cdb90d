"""What PyTorch's optimizers call their settings and their state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from boostax.errors import did_you_mean

__all__ = ["CLASSES", "classes_of", "settings_of"]


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
# By decoupled_weight_decay.
_ADAMS = ("adam", "adamw")
# What changes the step in some optimizer of PyTorch. All other keys (how it is computed, what a
# scheduler reads, names that the user gave) don't.
_SETTINGS = frozenset(
    {"maximize", "lambd", "t0", "momentum_decay", "etas", "step_sizes", "beta2_decay", "d"}
    | {"max_iter", "max_eval", "history_size", "line_search_fn", "ns_steps", "adjust_lr_fn"}
).union(*(known.settings for known in CLASSES.values()))
# Settings that are not here, with the one value that changes nothing.
_OFF = {"maximize": False, "amsgrad": False}
_TELLS = {"rho": "adadelta", "centered": "rmsprop", "lr_decay": "adagrad", "dampening": "sgd"}


def classes_of(caller: str, name: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which optimizer each group had: the one that was said, or what the settings tell."""
    if name is None:
        return [_told(caller, number, groups) for number in range(len(groups))]
    if not isinstance(name, str) or name not in CLASSES:
        raise ValueError(
            f"{caller}: name must be one of {', '.join(map(repr, CLASSES))}, got {name!r}."
            f"{did_you_mean(str(name), CLASSES)}"
        )
    for number, group in enumerate(groups):
        decoupled = _plain(group.get("decoupled_weight_decay"))
        if name in _ADAMS and decoupled is not None and _ADAMS[bool(decoupled)] != name:
            raise ValueError(
                f"{caller}: name is {name!r}, but param_groups[{number}] has decoupled_weight_decay="
                f"{decoupled!r}, which is {_ADAMS[bool(decoupled)]!r}; leave name out"
            )
    return [name] * len(groups)


def _told(caller: str, number: int, groups: Sequence[Mapping[str, Any]]) -> str:
    group = groups[number]
    for setting, told in _TELLS.items():
        if setting in groups[0]:
            return told
    # AdamW is told by decoupled_weight_decay, which older versions don't write.
    if {"betas", "amsgrad"} <= set(groups[0]):
        if group.get("decoupled_weight_decay") is not None:
            return _ADAMS[bool(_plain(group["decoupled_weight_decay"]))]
        if not group.get("weight_decay"):
            return "adam"
    raise ValueError(
        f"{caller}: the settings of param_groups[{number}] ({', '.join(map(str, group))}) don't tell "
        f"which optimizer this was; say so with name=, one of {', '.join(map(repr, CLASSES))}"
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
        elif key in _SETTINGS and (key not in _OFF or _plain(value) != _OFF[key]):
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
