"""Paths of leaves, path patterns, and the parts of an optimizer state that mirror the parameters."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from boostax.errors import did_you_mean

PathPattern = str | re.Pattern[str] | Callable[[str], bool]


def path_string(key_path: Sequence[Any]) -> str:
    """Return a leaf's path as ``"Dense_0/kernel"``, the same for linen dicts and nnx states."""
    parts = []
    for entry in key_path:
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
        else:
            parts.append(str(entry))
    # An nnx Variable is a pytree node of its own; its child says nothing about the layer.
    is_variable = (
        len(parts) > 1
        and parts[-1] == "value"
        and not isinstance(key_path[-1], jax.tree_util.DictKey)
    )
    return "/".join(parts[:-1] if is_variable else parts)


def leaf_paths(tree: Any) -> tuple[str, ...]:
    """Return the path string of every leaf, in tree order."""
    return tuple(path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def natural_key(text: str) -> tuple[Any, ...]:
    """Sort key that puts ``layer_2`` before ``layer_10``."""
    return tuple(
        (1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text) if part
    )


def matches(pattern: PathPattern, path: str) -> bool:
    """Say whether ``path`` fits: shell-style text (``*`` also crosses ``/``), a regex, or a test."""
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(path, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(path) is not None
    return bool(pattern(path))


def check_matched(argument: str, pattern: PathPattern, paths: Iterable[str]) -> None:
    """Raise a ValueError listing the leaves when ``pattern`` fits none of them."""
    paths = tuple(paths)
    if not any(matches(pattern, path) for path in paths):
        hint = did_you_mean(pattern, paths) if isinstance(pattern, str) else ""
        raise ValueError(
            f"{argument}: the pattern {pattern!r} matches no leaf.{hint} Leaves: {', '.join(paths)}"
        )


def _is_held(value: Any) -> bool:
    return isinstance(value, optax.MaskedNode) or jax.tree_util.all_leaves([value])


def map_params_like(
    fn: Callable[..., Any],
    state: Any,
    params: Any,
    *rest: Any,
    others: Callable[..., Any] | None = None,
) -> Any:
    """Map ``fn(leaf, *rest_leaves)`` over the parts of ``state`` that mirror ``params``.

    A part mirrors the parameters when it has their tree structure, leaf for leaf; masked leaves
    (``optax.MaskedNode``) stay as they are. This finds momenta, accumulators and the like inside
    any optax state, without calling its ``init`` (which may look at the parameters' values).

    Args:
      fn: called with the state's leaf and the leaves of ``rest`` at the same parameter.
      state: any optax state.
      params: the parameters that the state belongs to; only the structure is used, except for
        parameters that are one bare array, whose shape tells which leaves are meant.
      *rest: trees with the structure of ``params`` (leaves may be any object).
      others: called as ``others(leaf)`` on every other leaf; default: leave as it is.

    Returns:
      A state of the same structure.
    """
    treedef = jax.tree.structure(params)
    rest_leaves = [treedef.flatten_up_to(tree) for tree in rest]
    bare = jax.tree_util.treedef_is_leaf(treedef)

    def mirrors(part: Any) -> bool:
        if bare:
            return getattr(part, "shape", None) == getattr(params, "shape", ()) and hasattr(
                part, "dtype"
            )
        try:
            children = treedef.flatten_up_to(part)
        except (ValueError, TypeError, KeyError):
            return False
        return all(_is_held(child) for child in children) and len(children) > 0

    def visit(part: Any) -> Any:
        if not mirrors(part):
            return part if others is None or not _is_array(part) else others(part)
        leaves = [part] if bare else treedef.flatten_up_to(part)
        mapped = [
            leaf if isinstance(leaf, optax.MaskedNode) else fn(leaf, *(r[i] for r in rest_leaves))
            for i, leaf in enumerate(leaves)
        ]
        return treedef.unflatten(mapped)

    return jax.tree.map(visit, state, is_leaf=mirrors)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
