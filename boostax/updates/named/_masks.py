"""Masks of the weight decay: what a user may give, checked, and two of them together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from boostax._tree import PathPattern, check_matched, matches, path_string
from boostax.updates.named._leaf_names import no_bias_or_norm
from boostax.updates.row_sparse import is_row_sparse

__all__ = ["read_mask", "without_bias_and_norm"]

_ALLOWED = (
    "a tree of True and False like the parameters, a function of the parameters that returns one, or "
    "a list of path patterns such as ['*/kernel']"
)


def read_mask(caller: str, argument: str, mask: Any) -> Any:
    """Return a mask as optax takes it: None, a tree of bools, or a function of the parameters."""
    if mask is None:
        return None
    patterns = _patterns_of(mask)
    if patterns is not None:
        return _by_patterns(f"{caller}: {argument}", patterns)
    if callable(mask):
        return lambda params: _checked(caller, argument, mask(params))
    return _checked(caller, argument, mask)


def without_bias_and_norm(mask: Any) -> Callable[[Any], Any]:
    """Return a mask that is true where ``mask`` is, but for biases and the parameters of norms."""

    def both(params: Any) -> Any:
        given = mask(params) if callable(mask) else mask
        # One flag of a given mask may stand for all leaves below it.
        below = lambda flag, part: jax.tree.map(lambda other: bool(flag) and other, part)
        return jax.tree.map(below, given, no_bias_or_norm(params))

    return no_bias_or_norm if mask is None else both


def _patterns_of(mask: Any) -> tuple[PathPattern, ...] | None:
    from boostax._config_types import PathMask

    if isinstance(mask, PathMask):
        return mask.patterns
    is_pattern = lambda value: isinstance(value, (str, re.Pattern)) or callable(value)
    if isinstance(mask, (list, tuple)) and all(map(is_pattern, mask)):
        return tuple(mask)
    return None


def _by_patterns(argument: str, patterns: tuple[PathPattern, ...]) -> Callable[[Any], Any]:
    def mask(params: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_row_sparse)
        paths = [path_string(path) for path, _ in leaves]
        # Groups and outer masks hide leaves that a pattern may have been meant for.
        hidden = any(map(_is_hidden, jax.tree.leaves(params, is_leaf=_is_hidden)))
        for pattern in () if hidden else patterns:
            check_matched(argument, pattern, paths)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(matches(pattern, path_string(path)) for pattern in patterns),
            params,
            is_leaf=is_row_sparse,
        )

    return mask


def _is_hidden(value: Any) -> bool:
    return isinstance(value, optax.MaskedNode)


def _checked(caller: str, argument: str, mask: Any) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
        if isinstance(leaf, (bool, np.bool_)):
            continue
        if getattr(leaf, "dtype", None) == np.bool_ and getattr(leaf, "shape", None) == ():
            continue
        where = f" at {path_string(path)!r}" if path else ""
        hint = f"; write [{leaf!r}]" if isinstance(leaf, str) and not path else ""
        raise TypeError(f"{caller}: {argument} must be {_ALLOWED}, got {leaf!r}{where}{hint}")
    return mask
