"""What a config says of an optimizer beside its arguments: groups, decay and centralization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from boostax._config_named import Fault, parse, parse_argument, show
from boostax._config_types import Pairs
from boostax.errors import did_you_mean

__all__ = ["OF_GROUPS", "group_schema", "parse_of_groups"]

# The arguments of boostax.optimizer that are not those of the optimizer itself.
OF_GROUPS = ("groups", "decay_bias_and_norm", "centralize")
_PATTERNS = "a path pattern, or a list of them"


def parse_of_groups(key: str, value: Any, path: str, raw: Mapping[Any, Any]) -> Any:
    """Read one of ``OF_GROUPS`` of the optimizer ``raw``; return its value and the faults."""
    if key != "groups":
        right = isinstance(value, bool)
        return value, [] if right else [Fault(path, f"got {show(value)}; allowed: true or false")]
    if type(value) is not tuple or not value:
        return None, [Fault(path, f"got {show(value)}; allowed: a list of one group or more")]
    read = [_group(group, f"{path}[{i}]", raw) for i, group in enumerate(value)]
    return tuple(group for group, _ in read), [fault for _, faults in read for fault in faults]


def _group(group: Any, path: str, raw: Mapping[Any, Any]) -> tuple[Any, list[Fault]]:
    if not isinstance(group, Mapping):
        allowed = "an object with params and settings for them"
        return None, [Fault(path, f"got {show(group)}; allowed: {allowed}")]
    read: dict[str, Any] = {}
    faults: list[Fault] = []
    if "params" not in group:
        hint = did_you_mean("params", [str(key) for key in group])
        faults.append(Fault(f"{path}.params", f"missing; allowed: {_PATTERNS}.{hint}"))
    for key, value in group.items():
        here = f"{path}.{key}"
        if key == "params":
            read[key], found = _patterns(value, here)
        elif key == "centralize":
            read[key], found = parse_of_groups("centralize", value, here, raw)
        elif key == "optimizer":
            read[key], found = _optimizer(value, here, raw)
        elif "optimizer" in group:
            problem = "the group has an optimizer of its own; put this into it"
            read[str(key)], found = None, [Fault(here, problem)]
        else:
            read[str(key)], found = parse_argument("optimizer", raw["name"], key, value, here)
        faults += found
    return Pairs(tuple(sorted(read.items()))), faults


def _patterns(value: Any, path: str) -> tuple[Any, list[Fault]]:
    patterns = value if type(value) is tuple else (value,)
    if patterns and all(isinstance(pattern, str) and pattern for pattern in patterns):
        return patterns, []
    return None, [Fault(path, f"got {show(value)}; allowed: {_PATTERNS}")]


def _optimizer(value: Any, path: str, raw: Mapping[Any, Any]) -> tuple[Any, list[Fault]]:
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping) and "learning_rate" in raw:
        value = {"learning_rate": raw["learning_rate"]} | dict(value)
    if isinstance(value, Mapping):
        twice = [key for key in OF_GROUPS if key in value]
        if twice:
            return None, [Fault(f"{path}.{twice[0]}", "a group has no groups; put it outside")]
    return parse(value, path, "optimizer")


def group_schema(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of ``OF_GROUPS`` for an optimizer with these arguments."""
    patterns = {"type": "string", "minLength": 1}
    flag = {"type": "boolean"}
    group = {
        "type": "object",
        "required": ["params"],
        "additionalProperties": False,
        "properties": {
            "params": {"anyOf": [patterns, {"type": "array", "items": patterns, "minItems": 1}]},
            "optimizer": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/optimizer"}]},
            "centralize": flag,
            **arguments,
        },
    }
    return {
        "groups": {"type": "array", "items": group, "minItems": 1},
        "decay_bias_and_norm": flag,
        "centralize": flag,
    }
