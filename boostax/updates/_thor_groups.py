"""Settings of ``thor`` for some leaves: rate, decay, centralization, and the layers' order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from boostax._tree import PathPattern, check_matched, leaf_paths, matches
from boostax.errors import did_you_mean
from boostax.updates import _thor_checks as checks

__all__ = ["Groups", "decay_rule", "paths_of", "patterns_of", "read_groups"]

# The reference's names beside ours.
_KEYS = {
    "params": "params",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "centralize": "centralize",
    "grad_centralization": "centralize",
    "order": "order",
    "order_params": "order",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """What groups say.

    Attributes:
      rate: learning rates by path, of the leaves that have their own.
      decay: weight decays by path, of the leaves that have their own.
      centralized: the kernels whose gradients are centralized.
      order: the indices of all layers, in the order in which their statistics travel.
    """

    rate: Mapping[str, Any]
    decay: Mapping[str, Any]
    centralized: frozenset[str]
    order: tuple[int, ...]

    def rates(self, learning_rate: Any) -> Callable[[str, Any], Any]:
        """Return ``(path, count) -> learning rate``; the others have ``learning_rate``."""

        def at(path: str, count: Any) -> Any:
            rate = self.rate.get(path, learning_rate)
            return rate(count) if callable(rate) else rate

        return at

    def buckets(self, ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Cut the layers behind the places ``ends`` of their order."""
        starts = [0, *(end + 1 for end in ends)]
        cut = [self.order[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        return tuple(bucket for bucket in cut if bucket)


def paths_of(layers: Any) -> tuple[str, ...]:
    """Return the paths of all leaves of the parameters that layers were captured with."""
    known = getattr(layers, "paths", None)
    if known is not None:
        return tuple(known)
    return (*(path for block in layers.blocks for path in block.leaves), *layers.first_order)


def patterns_of(caller: str, argument: str, value: Any) -> tuple[PathPattern, ...]:
    """Return one pattern or several as a tuple."""
    values = (value,) if _is_pattern(value) else value
    if not isinstance(values, (Sequence, set, frozenset)) or not all(map(_is_pattern, values)):
        raise TypeError(
            f"{caller}: {argument} must be a path pattern (text such as 'encoder/*', a compiled "
            f"regex, a function of the path) or a sequence of them, got {value!r}"
        )
    return tuple(values)


def read_groups(caller: str, groups: Any, layers: Any) -> Groups:
    """Check ``groups`` against the captured layers and return what they say."""
    if groups is None:
        groups = ()
    if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
        raise TypeError(
            f"{caller}: groups must be a sequence of mappings such as "
            f"{{'params': 'encoder/*', 'learning_rate': 0.1}}, got {groups!r}"
        )
    paths = paths_of(layers)
    rate: dict[str, Any] = {}
    decay: dict[str, Any] = {}
    centralized: set[str] = set()
    order: tuple[int, ...] | None = None
    member: dict[str, str] = {}
    for number, group in enumerate(groups):
        where = f"groups[{number}]"
        read = _read_keys(caller, where, group)
        if "order" in read:
            if order is not None:
                raise ValueError(f"{caller}: {where} gives a second order; give one")
            patterns = patterns_of(caller, f"{where}['order']", read["order"])
            order = _ordered(caller, where, patterns, layers)
            continue
        patterns = patterns_of(caller, f"{where}['params']", read["params"])
        for pattern in patterns:
            check_matched(f"{caller}: {where}['params']", pattern, paths)
        inside = [path for path in paths if any(matches(pattern, path) for pattern in patterns)]
        twice = [path for path in inside if path in member]
        if twice:
            raise ValueError(
                f"{caller}: {twice[0]!r} is in {member[twice[0]]} and in {where}; a leaf can be in "
                "one group only"
            )
        member |= dict.fromkeys(inside, where)
        if "learning_rate" in read:
            own = checks.check_rate(caller, f"{where}['learning_rate']", read["learning_rate"])
            rate |= dict.fromkeys(inside, own)
        if "weight_decay" in read:
            name = f"{where}['weight_decay']"
            own = checks.check_number(caller, name, read["weight_decay"], 0.0)
            decay |= dict.fromkeys(inside, own)
        if checks.check_bool(caller, f"{where}['centralize']", read.get("centralize", False)):
            kernels = {block.kernel for block in layers.blocks if block.kind == "conv"}
            if not kernels & set(inside):
                raise ValueError(
                    f"{caller}: {where} asks for centralization, but holds no convolution's "
                    f"kernel: {', '.join(inside)}. Convolutions: "
                    f"{', '.join(sorted(kernels)) or 'none'}"
                )
            centralized |= kernels & set(inside)
    if order is None:
        order = tuple(range(len(layers.blocks)))
    return Groups(rate, decay, frozenset(centralized), order)


def _read_keys(caller: str, where: str, group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping):
        raise TypeError(f"{caller}: {where} must be a mapping, got {group!r}")
    read: dict[str, Any] = {}
    for key, value in group.items():
        if key not in _KEYS:
            raise ValueError(
                f"{caller}: {where} has the unknown key {key!r}.{did_you_mean(str(key), _KEYS)} "
                f"Known: {', '.join(_KEYS)}"
            )
        if _KEYS[key] in read:
            raise ValueError(f"{caller}: {where} gives {_KEYS[key]!r} twice, under two names")
        read[_KEYS[key]] = value
    if ("params" in read) == ("order" in read) or ("order" in read and len(read) > 1):
        raise ValueError(
            f"{caller}: {where} must have 'params' (patterns) and settings for them, or 'order' "
            f"(patterns) alone; got the keys {', '.join(map(repr, group)) or 'none'}"
        )
    return read


def _ordered(
    caller: str, where: str, patterns: Sequence[PathPattern], layers: Any
) -> tuple[int, ...]:
    """Return the layers by the first pattern that fits one of their leaves; the others follow."""
    for pattern in patterns:
        check_matched(f"{caller}: {where}['order']", pattern, paths_of(layers))

    def rank(index: int) -> int:
        leaves = layers.blocks[index].leaves
        fitting = (
            n for n, pattern in enumerate(patterns) if any(matches(pattern, p) for p in leaves)
        )
        return next(fitting, len(patterns))

    return tuple(sorted(range(len(layers.blocks)), key=rank))


def decay_rule(
    caller: str, weight_decay: Any, mask: Any, groups: Groups, layers: Any
) -> Callable[[Any], dict[str, Any]]:
    """Return ``params -> {path: weight decay}``; leaves that are left out don't decay."""
    chosen = _read_mask(caller, mask, layers)

    def rule(params: Any) -> dict[str, Any]:
        own = dict(groups.decay)
        by_mask = {path: weight_decay for path in chosen(params) if path not in own}
        return {path: rate for path, rate in (own | by_mask).items() if not _is_zero(rate)}

    return rule


def _read_mask(caller: str, mask: Any, layers: Any) -> Callable[[Any], list[str]]:
    if mask is None:
        return lambda params: _decaying(params, layers)
    if callable(mask):
        return lambda params: _chosen(caller, mask(params))
    if _is_pattern(mask) or (
        isinstance(mask, (Sequence, set, frozenset)) and mask and all(map(_is_pattern, mask))
    ):
        patterns = patterns_of(caller, "decay_mask", mask)
        for pattern in patterns:
            check_matched(f"{caller}: decay_mask", pattern, paths_of(layers))
        return lambda params: [
            path for path in leaf_paths(params) if any(matches(p, path) for p in patterns)
        ]
    chosen = _chosen(caller, mask)
    known = set(paths_of(layers))
    strange = [path for path in leaf_paths(mask) if path not in known]
    if strange:
        raise ValueError(
            f"{caller}: decay_mask has {strange[0]!r}, which is no leaf of the parameters."
            f"{did_you_mean(strange[0], known)} Leaves: {', '.join(sorted(known))}"
        )
    return lambda params: chosen


def _chosen(caller: str, mask: Any) -> list[str]:
    flags = jax.tree.leaves(mask)
    for flag in flags:
        if not isinstance(flag, bool):
            raise TypeError(
                f"{caller}: decay_mask must be a tree of bools, a function of the parameters that "
                f"returns one, or path patterns; got {flag!r} in it"
            )
    return [path for path, flag in zip(leaf_paths(mask), flags, strict=True) if flag]


def _decaying(params: Any, layers: Any) -> list[str]:
    """Return what decays by default: kernels, and other leaves with two axes that are no norm's."""
    kernels = {block.kernel for block in layers.blocks}
    biases = {block.bias for block in layers.blocks}
    norms = {
        path
        for path, reason in layers.first_order.items()
        if "norm" in reason.lower() or "bias" in reason.lower()
    }
    out = []
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        wide = len(jax.numpy.shape(leaf)) >= 2 and path not in biases | norms
        if path in kernels or wide:
            out.append(path)
    return out


def _is_pattern(value: Any) -> bool:
    return isinstance(value, (str, re.Pattern)) or (
        callable(value) and not isinstance(value, (Mapping, Sequence))
    )


def _is_zero(rate: Any) -> bool:
    return isinstance(rate, float) and rate == 0
