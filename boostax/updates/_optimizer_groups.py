"""Settings of an optimizer for groups of parameters, by path."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import optax

from boostax._info import TransformInfo, walk, with_info
from boostax._tree import PathPattern, check_matched, leaf_paths, matches, path_string
from boostax.updates._optimizer_names import call, function_of, mask_argument
from boostax.updates._thor_checks import check_bool
from boostax.updates._thor_groups import patterns_of
from boostax.updates.centralize import centralize
from boostax.updates.named._masks import read_mask, without_bias_and_norm
from boostax.updates.named._parts import is_zero
from boostax.updates.row_sparse import is_row_sparse

__all__ = ["Built", "build_groups", "described"]

_REST = "rest"
# What a group says beside the arguments of its optimizer.
GROUP_KEYS = ("params", "optimizer", "centralize")


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """One group, read.

    Attributes:
      label: what stands for it in the labels.
      patterns: the leaves that are in it.
      transform: what updates them.
      centralize: whether their gradients are centralized first.
      says: its settings, in words.
    """

    label: str
    patterns: tuple[PathPattern, ...]
    transform: Any
    centralize: bool
    says: str


@dataclasses.dataclass(frozen=True, eq=False)
class Built:
    """An optimizer with its groups.

    Attributes:
      base: what updates the leaves outside of groups.
      transform: what updates all.
      labels: leaf path -> label; None where there are neither groups nor centralization.
      fates: parameters -> what happens to each, in words.
    """

    base: Any
    transform: Any
    labels: Callable[[Any], Any] | None
    fates: Callable[[Any], dict[str, str]] | None


def build_groups(
    caller: str, name: Any, settings: Any, groups: Any, decay_all: Any, centralized: Any
) -> Built:
    """Check everything that can be checked without parameters, and build the transformation."""
    decay_all = check_bool(caller, "decay_bias_and_norm", decay_all)
    centralized = check_bool(caller, "centralize", centralized)
    function_of(caller, name)
    if not decay_all and mask_argument(name) is None:
        raise ValueError(
            f"{caller}: decay_bias_and_norm=False does not go with {name!r}, which has no weight decay "
            "that leaves could be taken out of; leave it out"
        )
    base = call(caller, name, _masked(caller, name, settings, decay_all))
    if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
        raise TypeError(
            f"{caller}: groups must be a sequence of mappings such as "
            f"{{'params': 'head/*', 'learning_rate': 0.1}}, got {groups!r}"
        )
    read = [
        _read(caller, f"groups[{number}]", group, name, settings, decay_all, centralized)
        for number, group in enumerate(groups)
    ]
    if not read and not centralized:
        return Built(base, base, None, None)

    def label_of(path: str) -> str:
        fitting = (g.label for g in read if any(matches(p, path) for p in g.patterns))
        return next(fitting, _REST)

    transform = _checked(caller, read, base, label_of)
    flags = {g.label: g.centralize for g in read} | {_REST: centralized}
    if any(flags.values()):
        ahead = _centralized_where(lambda path: flags[label_of(path)])
        transform = optax.chain(ahead, transform)

    def fates(params: Any) -> dict[str, str]:
        words = {g.label: f"{g.label}: {g.says}" for g in read}
        return {
            path: words[label_of(path)] for path in leaf_paths(params) if label_of(path) != _REST
        }

    return Built(base, transform, label_of, fates)


def _masked(caller: str, name: str, settings: Mapping[str, Any], decay_all: bool) -> dict[str, Any]:
    """Return the settings, with biases and norms out of the decay where that was asked for."""
    argument = mask_argument(name)
    if decay_all:
        return dict(settings)
    if argument is None:
        if not _is_none(settings.get("weight_decay")):
            raise ValueError(
                f"{caller}: {name} has a weight decay but no mask, so that decay_bias_and_norm=False "
                "does not go with it; set its weight_decay to 0, or take another optimizer"
            )
        return dict(settings)
    given = read_mask(caller, argument, settings.get(argument))
    return {**settings, argument: without_bias_and_norm(given)}


def _read(
    caller: str,
    where: str,
    group: Any,
    name: str,
    settings: Mapping[str, Any],
    decay_all: bool,
    centralized: bool,
) -> Group:
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"{caller}: {where} must be a mapping with 'params', path patterns, and settings for them, "
            f"got {group!r}"
        )
    patterns = patterns_of(caller, f"{where}['params']", group["params"])
    if not patterns:
        raise ValueError(f"{caller}: {where}['params'] has no pattern; give one or more")
    flag = check_bool(caller, f"{where}['centralize']", group.get("centralize", centralized))
    own = {key: value for key, value in group.items() if key not in GROUP_KEYS}
    says = ", ".join(f"{k}={v}" for k, v in own.items() if isinstance(v, (bool, int, float, str)))
    if "optimizer" not in group:
        inside = f"{caller}: {where}"
        transform = call(inside, name, _masked(inside, name, {**settings, **own}, decay_all))
    elif own:
        raise ValueError(
            f"{caller}: {where} has an optimizer of its own; put {', '.join(own)} into its settings"
        )
    else:
        transform, says = _other(caller, where, group["optimizer"], settings, decay_all)
    says = says or "as the others"
    label = where.replace("[", " ").replace("]", "").replace("groups", "group")
    return Group(label, patterns, transform, flag, says + (", centralized" if flag else ""))


def _other(
    caller: str, where: str, other: Any, settings: Mapping[str, Any], decay_all: bool
) -> tuple[Any, str]:
    """Return another optimizer for a group, and what it is called."""
    if hasattr(other, "init") and hasattr(other, "update"):
        if not decay_all and any(map(_decays, walk(other))):
            raise ValueError(
                f"{caller}: {where}['optimizer'] is a transformation that decays what it is given, and "
                "decay_bias_and_norm=False can't reach into it; give it by name, such as "
                "{'name': 'adamw', 'weight_decay': 0.1}, which then decays no biases and norms"
            )
        return other, "an optimizer of its own"
    given = {"name": other} if isinstance(other, str) else other
    if not isinstance(given, Mapping) or "name" not in given:
        raise TypeError(
            f"{caller}: {where}['optimizer'] must be the name of an optimizer, a mapping with 'name' "
            f"and settings, or an optax transformation, got {other!r}"
        )
    given = dict(given)
    name = given.pop("name")
    function_of(f"{caller}: {where}['optimizer']", name)
    if "learning_rate" in settings:
        given = {"learning_rate": settings["learning_rate"]} | given
    inside = f"{caller}: {where}['optimizer']"
    built = call(inside, name, _masked(inside, name, given, decay_all))
    return built, str(name)


def _decays(info: TransformInfo) -> bool:
    """Say whether this part of a transformation decays weights, as far as it tells."""
    return info.name == "add_decayed_weights" or not _is_none(info.settings.get("weight_decay"))


def _is_none(weight_decay: Any) -> bool:
    return weight_decay is None or is_zero(weight_decay)


def _checked(caller: str, read: Sequence[Group], base: Any, label_of: Callable[[str], str]) -> Any:
    """Return the partition by labels; its init looks at the parameters' paths."""

    def labels(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: label_of(path_string(path)), tree, is_leaf=is_row_sparse
        )

    parts = {_REST: base, **{g.label: g.transform for g in read}}
    transforms: dict[Hashable, Any] = {}
    for label, tx in parts.items():
        transforms[label] = described(tx, TransformInfo(label, inner=tx))
    inner = optax.partition(transforms, labels)

    def init(params: Any) -> Any:
        paths = leaf_paths(params)
        # What an outer mask has taken away, a pattern may have been meant for.
        hidden = any(map(_is_masked, jax.tree.leaves(params, is_leaf=_is_masked)))
        member: dict[str, str] = {}
        for group in read:
            for pattern in () if hidden else group.patterns:
                check_matched(f"{caller}: {group.label}", pattern, paths)
            inside = [p for p in paths if any(matches(pattern, p) for pattern in group.patterns)]
            twice = next((path for path in inside if path in member), None)
            if twice is not None:
                raise ValueError(
                    f"{caller}: {twice!r} is in {member[twice]} and in {group.label}; a leaf can be in "
                    "one group only"
                )
            member |= dict.fromkeys(inside, group.label)
        return inner.init(params)

    return optax.GradientTransformationExtraArgs(init, inner.update) if read else base


def described(tx: Any, info: TransformInfo) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation with a description of its own."""
    tx = optax.with_extra_args_support(tx)

    # A function of our own, because optax's may be shared between transformations.
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return tx.update(updates, state, params, **extra_args)

    return with_info(optax.GradientTransformationExtraArgs(tx.init, update), info)


def _is_masked(value: Any) -> bool:
    return isinstance(value, optax.MaskedNode)


def _centralized_where(wanted: Callable[[str], bool]) -> Any:
    """Centralize the gradients of some leaves; which, is known once the paths are."""

    @functools.lru_cache(maxsize=16)
    def part(paths: tuple[str, ...]) -> Any:
        others = "|".join(re.escape(path) for path in paths if not wanted(path))
        axes: dict[PathPattern, Any] = {re.compile(f"^({others})$"): ()} if others else {}
        return centralize(axes=axes)

    def init(params: Any) -> Any:
        return part(leaf_paths(params)).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        # Rows of an embedding have no mean to take off; the reading of layers does not know them.
        dense = jax.tree.map(
            lambda u: optax.MaskedNode() if is_row_sparse(u) else u, updates, is_leaf=is_row_sparse
        )
        paths = leaf_paths(dense if params is None else params)
        out, state = part(paths).update(dense, state, params, **extra_args)
        back = lambda u, new: u if is_row_sparse(u) else new
        return jax.tree.map(back, updates, out, is_leaf=is_row_sparse), state

    return optax.GradientTransformationExtraArgs(init, update)
