"""Arguments that are one path pattern or several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from boostax._tree import PathPattern

__all__ = ["pattern_list"]


def pattern_list(argument: str, value: Any) -> tuple[PathPattern, ...]:
    """Return the patterns as a tuple, or raise a TypeError that names ``argument``."""
    values: Any = (value,) if _is_pattern(value) else value
    if not isinstance(values, Sequence) or not all(map(_is_pattern, values)):
        raise TypeError(
            f"{argument} must be path patterns (text, a compiled regex, or a test of a path), got "
            f"{value!r}"
        )
    return tuple(values)


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str | re.Pattern) or callable(value)
