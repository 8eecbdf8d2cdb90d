"""JSON text as Python values that still say what JSON would lose: repeated keys and NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from boostax._config_named import Fault
from boostax.errors import ConfigError

__all__ = ["parse_json", "repeated"]


class _Object(dict[str, Any]):
    """An object of a file, with the keys that stood in it more than once; the last one counts."""

    twice: tuple[str, ...] = ()


class _Constant(float):
    """NaN or an infinity, which JSON does not have; it prints as it was written."""

    def __repr__(self) -> str:
        return "NaN" if self != self else "Infinity" if self > 0 else "-Infinity"


def parse_json(text: str, prefix: str) -> Any:
    """Return what the text holds, or raise a ConfigError that begins with ``prefix``."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_Constant)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{prefix}line {error.lineno}, column {error.colno}: broken JSON: {error.msg}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{prefix}the config is nested too deeply") from None
    except ValueError as error:  # a number with too many digits
        raise ConfigError(f"{prefix}{error}") from None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        names = [key for key, _ in pairs]
        result.twice = tuple(key for key in result if names.count(key) > 1)
    return result


def repeated(value: Any, path: str = "") -> list[Fault]:
    """Return a fault for every key that stands more than once in an object of a file."""
    faults = []
    if isinstance(value, Mapping):
        stem = f"{path}." if path else ""
        faults += [
            Fault(f"{stem}{key}", f"the key {key!r} stands twice in one object; keep one of them")
            for key in getattr(value, "twice", ())
        ]
        for key, entry in value.items():
            faults += repeated(entry, f"{stem}{key}")
    elif type(value) in (list, tuple):
        for i, entry in enumerate(value):
            faults += repeated(entry, f"{path}[{i}]")
    return faults
