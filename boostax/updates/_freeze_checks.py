"""Read what a user wrote for groups and schedule of a freezing run."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from boostax import _info
from boostax._tree import check_matched, leaf_paths, matches
from boostax.updates.parameter_groups import ParameterGroups


def check_no_window(inner: Any) -> None:
    """Refuse an inner transformation that adds up gradients itself, through any wrapper."""
    found = next(
        (i.name for i in _info.walk(inner) if i.name in {"accumulate", "MultiSteps"}), None
    )
    if _info.find(inner, "local_steps") is not None:
        raise ValueError(
            "freeze: inner holds local_steps. A leaf frozen between two exchanges would stay apart on "
            "each device for as long; freeze inside it, local_steps(freeze(inner, freezing), ...)"
        )
    if _info.find(inner, "dim_reduce") is not None:
        raise ValueError(
            "freeze: inner holds dim_reduce, which takes curvature from differences of projected "
            "gradients, and these would mix leaves that are frozen with leaves that are not; make the "
            "basis without the leaves that are to stay (trajectory_basis(..., exclude=...))"
        )
    if found is not None:
        raise ValueError(
            f"freeze: inner holds {found}, whose window of several gradients would lie inside the "
            "freeze. The freeze index changes at every update of freeze, so a window would mix "
            "gradients of leaves that were frozen for a part of it; the index has to change between "
            "windows only. Put the window outside: accumulate(freeze(inner, freezing), every)"
        )


def explicit_groups(groups: Any, params: Any = None) -> ParameterGroups:
    """Read groups that a user wrote out: path lists, or trees of bools, one for each freeze index."""
    if isinstance(groups, ParameterGroups):
        return groups
    if groups is None:
        raise ValueError(
            "Freezing: a schedule needs groups; pass boostax.parameter_groups(params, n)"
        )
    if isinstance(groups, numbers.Integral):
        raise TypeError(
            f"Freezing: groups can't be a number ({groups}); pass "
            f"boostax.parameter_groups(params, {groups})"
        )
    if isinstance(groups, (str, Mapping)) or not isinstance(groups, (tuple, list)):
        raise TypeError(
            "Freezing: groups must be what boostax.parameter_groups returned, or a tuple or list "
            f"with one entry for each freeze index, got {type(groups).__name__}"
        )
    if not groups:
        raise ValueError("Freezing: groups is empty; give one entry for each freeze index")
    if all(_is_path_list(group) for group in groups):
        return _from_path_lists(groups, params)
    return _from_masks(groups)


def _is_path_list(group: Any) -> bool:
    return isinstance(group, (tuple, list, set, frozenset)) and all(
        isinstance(path, str) for path in group
    )


def _from_path_lists(groups: Sequence[Any], params: Any) -> ParameterGroups:
    for index, group in enumerate(groups):
        if not group:
            raise ValueError(f"Freezing: groups[{index}] is empty: nothing would be trained")
    ordered = [sorted(g) if isinstance(g, (set, frozenset)) else list(g) for g in groups]
    if params is None:
        trained = tuple(tuple(dict.fromkeys(group)) for group in ordered)
        paths = tuple(sorted({path for group in trained for path in group}))
        return ParameterGroups(trained, paths)
    paths = leaf_paths(params)
    resolved = []
    for index, group in enumerate(ordered):
        for pattern in group:
            check_matched(f"Freezing: groups[{index}]", pattern, paths)
        resolved.append(tuple(p for p in paths if any(matches(pattern, p) for pattern in group)))
    return ParameterGroups(tuple(resolved), paths, (), jax.tree.structure(params))


def _from_masks(masks: Sequence[Any]) -> ParameterGroups:
    treedef = jax.tree.structure(masks[0])
    paths = leaf_paths(masks[0])
    trained = []
    for index, mask in enumerate(masks):
        leaves = jax.tree.leaves(mask)
        wrong = next((leaf for leaf in leaves if not isinstance(leaf, (bool, np.bool_))), None)
        if wrong is not None or not leaves:
            raise TypeError(
                f"Freezing: groups[{index}] must be a list of leaf paths, or a tree with True for "
                f"each leaf that is trained at this index, got "
                f"{type(mask).__name__ if wrong is None else repr(wrong)}"
            )
        if jax.tree.structure(mask) != treedef:
            raise ValueError(f"Freezing: groups[{index}] has another structure than groups[0]")
        if not any(leaves):
            raise ValueError(f"Freezing: groups[{index}] trains nothing")
        trained.append(tuple(path for path, on in zip(paths, leaves, strict=True) if on))
    return ParameterGroups(tuple(trained), paths, (), treedef)


def has_masked(tree: Any) -> bool:
    held = jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, optax.MaskedNode))
    return any(isinstance(part, optax.MaskedNode) for part in held)


def check_schedule(schedule: Any, groups: int) -> np.ndarray:
    if schedule is None:
        raise ValueError(
            "Freezing: groups need a schedule; pass boostax.freeze_schedule(...), or one freeze "
            "index for each window"
        )
    if isinstance(schedule, (str, bytes)) or not (
        isinstance(schedule, (tuple, list, range)) or hasattr(schedule, "__array__")
    ):
        raise TypeError(
            "Freezing: schedule must be a tuple, a list, a range or a 1-D integer array of freeze "
            f"indices, got {type(schedule).__name__}"
        )
    try:
        table = np.asarray(schedule)
    except ValueError as error:  # ragged lists
        raise TypeError(
            "Freezing: schedule must be one-dimensional, with one index per window"
        ) from error
    if table.size == 0:
        raise ValueError("Freezing: schedule is empty; give one freeze index for each window")
    if table.ndim != 1 or table.dtype.kind not in "iu":
        raise TypeError(
            f"Freezing: schedule must be 1-D and of integers, got shape {table.shape} and dtype "
            f"{table.dtype}"
        )
    # np.asarray([0, True]) is an integer array; a bool there is a slip all the same.
    if isinstance(schedule, (tuple, list)) and any(
        isinstance(i, (bool, np.bool_)) for i in schedule
    ):
        raise TypeError("Freezing: schedule holds bools; give integer freeze indices")
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= groups:
        raise ValueError(
            f"Freezing: schedule holds the index {low if low < 0 else high}, but with {groups} groups "
            f"the indices are 0 to {groups - 1}"
        )
    table = table.astype(np.int32)
    table.setflags(write=False)
    return table
