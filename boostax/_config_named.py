"""Optimizers and schedules by name: ``{"name": "adamw", "learning_rate": 1e-3}``.

Only functions of optax and optax.contrib and boostax's own optimizers can be named, and only with
arguments that their signatures have; nothing else is ever looked up, imported or called.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from boostax._config_catalogue import accepts, catalogue, limits
from boostax._config_types import INT32, Pairs, PathMask
from boostax.errors import did_you_mean
from boostax.updates._optimizer_names import argument_problem, whose


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a config: where, and what is wrong with it."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclasses.dataclass(frozen=True)
class Named:
    """A function of optax or boostax by name with its arguments; equal and hashable by value.

    Attributes:
      kind: ``"optimizer"``, ``"schedule"`` or ``"transformation"``.
      name: the function's name in the catalogue.
      arguments: sorted pairs of argument name and value; values may be ``Named`` themselves.
    """

    kind: str
    name: str
    arguments: tuple[tuple[str, Any], ...]

    def build(self) -> Any:
        """Return the optax object, its own nested names built first."""
        arguments = {key: _build_value(key, value) for key, value in self.arguments}
        if self.kind != "optimizer":
            return catalogue(self.kind)[self.name](**arguments)
        from boostax.updates.optimizer import optimizer

        return optimizer(self.name, **arguments)

    def with_built_arguments(self) -> dict[str, Any]:
        """Return name and arguments, the arguments built."""
        return {"name": self.name} | {k: _build_value(k, v) for k, v in self.arguments}

    def get(self, argument: str) -> Any:
        """Return an argument as it was given, or None."""
        return dict(self.arguments).get(argument)

    def to_dict(self) -> dict[str, Any]:
        """Return the object as a config writes it."""
        return {"name": self.name} | {key: plain(value) for key, value in self.arguments}


def plain(value: Any) -> Any:
    """Return a config value as JSON has it; functions become their names."""
    if isinstance(value, Named):
        return value.to_dict()
    if isinstance(value, PathMask):
        return list(value.patterns)
    if isinstance(value, Pairs):
        value = dict(value.pairs)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"<{getattr(value, '__qualname__', type(value).__name__)}>"


def show(value: Any) -> str:
    """Word a value that was got: ``"8" (text)``, ``true (a boolean)``, ``null``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    try:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        text = "a very large integer"
    text = text if len(text) <= 60 else text[:57] + "..."
    kinds = (
        (str, "text"),
        ((int, float), "a number"),
        (Mapping, "an object"),
        (Sequence, "a list"),
    )
    kind = next((word for types, word in kinds if isinstance(value, types)), type(value).__name__)
    return f"{text} ({kind})"


_WORDS = {
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
    "text": "text",
    "null": "null",
    "dtype": "the name of a float dtype",
    "schedule": "a schedule by name",
    "transformation": "an optimizer or transformation by name, or a list of them",
    "mask": "a list of path patterns, or an object of true and false like the parameters",
    "steps": "an object from steps (whole numbers, each once) to factors of at least 0",
    "list": "a list of numbers",
    "schedules": "a list of schedules by name",
    "objects": "a list of objects with numbers",
    "function": "(not in JSON) a function",
}


def parse(raw: Any, path: str, kind: str) -> tuple[Named | None, list[Fault]]:
    """Read ``{"name": ..., **arguments}`` against optax; return it, or the faults.

    Args:
      raw: the object from the config, with numpy values already converted.
      path: its JSON path, for the faults.
      kind: ``"optimizer"``, ``"schedule"`` or ``"transformation"``.
    """
    from boostax._config_groups import OF_GROUPS, parse_of_groups

    known = catalogue(kind)
    if not isinstance(raw, Mapping):
        return None, [Fault(path, f"got {show(raw)}; allowed: an object with a name and arguments")]
    if "name" not in raw:
        hint = did_you_mean("name", [str(k) for k in raw])
        return None, [
            Fault(f"{path}.name", f"missing; allowed: the name of an optax {kind}.{hint}")
        ]
    name = raw["name"]
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        problem = f"got {show(name)}; allowed: an optax {kind}.{hint} Known: {', '.join(known)}"
        return None, [Fault(f"{path}.name", problem)]
    takes, faults, arguments = accepts(kind, name), [], {}
    for key, value in raw.items():
        if key == "name":
            continue
        here = f"{path}.{key}"
        if kind == "optimizer" and key in OF_GROUPS:
            arguments[key], found = parse_of_groups(str(key), value, here, raw)
        else:
            arguments[key], found = parse_argument(kind, name, key, value, here)
        faults += found
    parameters = inspect.signature(known[name]).parameters
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in raw:
            faults.append(Fault(f"{path}.{key}", f"missing; {name} needs {_allowed(takes[key])}"))
    if faults:
        return None, faults
    named = Named(kind, name, tuple(sorted(arguments.items())))
    try:
        named.build()
    except Exception as error:  # optax's own checks raise whatever they like
        called = f"optax.{name}" if kind == "schedule" else whose(name)
        return None, [Fault(path, f"{called} refuses these arguments: {error}")]
    return named, []


def parse_argument(kind: str, name: str, key: Any, value: Any, path: str) -> Any:
    """Read one argument of a function by name; return its value and the faults."""
    takes = accepts(kind, name)
    if key not in takes:
        return None, [Fault(path, argument_problem(name, str(key), takes))]
    return _parse_value(value, path, takes[key], limits(kind, name, key))


def _allowed(words: frozenset[str]) -> str:
    return " or ".join(text for word, text in _WORDS.items() if word in words) or "a value"


def _parse_value(
    value: Any, path: str, words: frozenset[str], limit: Mapping[str, float]
) -> tuple[Any, list[Fault]]:
    bad = [Fault(path, f"got {show(value)}; allowed: {_allowed(words)}")]
    if value is None:
        return None, [] if "null" in words else bad
    if isinstance(value, bool):
        return value, [] if "boolean" in words else bad
    if isinstance(value, (int, float)):
        if not _is_finite(value):
            return value, [Fault(path, f"got {show(value)}; allowed: a finite number")]
        if not ("number" in words or ("integer" in words and isinstance(value, int))):
            return value, bad
        return value, _outside(value, path, limit)
    if isinstance(value, str):
        if "dtype" in words:
            name = _float_dtype(value)
            return name, [] if name else bad
        return value, [] if "text" in words else bad
    if isinstance(value, Mapping):
        return _parse_object(value, path, words, bad)
    if type(value) is tuple:
        return _parse_list(value, path, words, bad)
    # What JSON can't write. Whatever is taken must be hashable and equal to itself.
    if "dtype" in words:
        name = _float_dtype(value)
        return name, [] if name else bad
    if isinstance(value, type) or not _is_hashable(value):
        return None, bad
    if hasattr(value, "init") and hasattr(value, "update"):
        return value, [] if "transformation" in words else bad
    if callable(value):
        return value, [] if words & {"schedule", "function", "transformation"} else bad
    return None, bad


def _outside(value: float, path: str, limit: Mapping[str, float]) -> list[Fault]:
    low, high = limit.get("minimum"), limit.get("maximum")
    below = limit.get("exclusiveMaximum")
    right = (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (below is None or value < below)
    )
    if right:
        return []
    words = [] if low is None else [f"of at least {low}"]
    words += [] if high is None else [f"at most {high}"]
    words += [] if below is None else [f"below {below}"]
    return [Fault(path, f"got {show(value)}; allowed: a number {' and '.join(words)}")]


def _parse_object(
    value: Mapping[Any, Any], path: str, words: frozenset[str], bad: list[Fault]
) -> Any:
    if "schedule" in words:
        return parse(value, path, "schedule")
    if "transformation" in words:
        return parse(value, path, "transformation")
    if "mask" in words:
        tree = _mask_tree(value)
        return tree, bad if tree is None else []
    if "steps" not in words:
        return None, bad
    pairs = {_step(step): factor for step, factor in value.items()}
    right = len(pairs) == len(value) and all(
        step is not None and _is_number(factor) and factor >= 0 for step, factor in pairs.items()
    )
    return (Pairs(tuple(sorted(pairs.items()))), []) if right else (None, bad)


def _step(key: Any) -> int | None:
    """Return a step given as an integer, or in JSON's keys as text; None for anything else."""
    if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,9}", key):
        key = int(key)
    return key if type(key) is int and 0 <= key <= INT32 else None


def _mask_tree(value: Mapping[Any, Any]) -> Pairs | None:
    """Return a mask like the parameters as nested pairs, or None where a leaf is no boolean."""
    pairs = []
    for key, entry in value.items():
        entry = _mask_tree(entry) if isinstance(entry, Mapping) else entry
        if not isinstance(key, str) or not isinstance(entry, (bool, Pairs)):
            return None
        pairs.append((key, entry))
    return Pairs(tuple(sorted(pairs, key=lambda pair: pair[0]))) if pairs else None


def _objects(value: Sequence[Any], path: str) -> Any:
    """Return a list of objects with numbers, as ``sgdr_schedule`` takes them."""
    faults = [
        Fault(f"{path}[{i}].{key}", f"got {show(entry)}; allowed: a number of at least 0")
        for i, part in enumerate(value)
        for key, entry in part.items()
        if not isinstance(key, str) or not _is_number(entry) or entry < 0
    ]
    if faults:
        return None, faults
    return tuple(Pairs(tuple(sorted(part.items()))) for part in value), []


def _parse_list(value: Sequence[Any], path: str, words: frozenset[str], bad: list[Fault]) -> Any:
    if "mask" in words and all(isinstance(v, str) for v in value):
        return PathMask(tuple(value)), []
    for word, kind in (("transformation", "transformation"), ("schedules", "schedule")):
        if word in words and value:
            parsed = [parse(v, f"{path}[{i}]", kind) for i, v in enumerate(value)]
            return tuple(p for p, _ in parsed), [fault for _, faults in parsed for fault in faults]
    if "objects" in words and value and all(isinstance(v, Mapping) for v in value):
        return _objects(value, path)
    if "list" in words and all(_is_number(v) for v in value):
        return tuple(value), []
    return value, bad


_OF_A_GROUP = "groups[].optimizer"


def _build_value(argument: str, value: Any) -> Any:
    if isinstance(value, Named):
        # That of a group is built with the group's settings.
        return value.with_built_arguments() if argument == _OF_A_GROUP else value.build()
    if isinstance(value, Pairs):
        return {key: _build_value(argument, entry) for key, entry in value.pairs}
    if isinstance(value, tuple) and value and all(isinstance(v, Named) for v in value):
        built = [v.build() for v in value]
        if argument == "schedules":
            return built
        import optax

        return optax.chain(*built)
    if isinstance(value, tuple) and value and all(isinstance(v, Pairs) for v in value):
        if argument == "groups":
            return [
                {k: _build_value(_OF_A_GROUP if k == "optimizer" else k, v) for k, v in group.pairs}
                for group in value
            ]
        return [dict(v.pairs) for v in value]
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _float_dtype(value: Any) -> str | None:
    """Return the name of a float dtype that was given by name, class or dtype; else None."""
    import jax.numpy as jnp

    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        return None
    return dtype.name if jnp.issubdtype(dtype, jnp.floating) else None
