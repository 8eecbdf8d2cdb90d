"""Parameter groups: what is trained at each freeze index, as nested suffixes in forward order."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from boostax._tree import PathPattern, check_matched, leaf_paths, matches
from boostax.errors import did_you_mean
from boostax.updates._layers import natural_order, split_layers

__all__ = ["ParameterGroups", "parameter_groups"]


@dataclasses.dataclass(frozen=True)
class ParameterGroups:
    """What is trained at each freeze index; hashable, made by :func:`parameter_groups`.

    ``len(groups)`` is the number of freeze indices.

    Attributes:
      trained: for each index, the paths of the leaves that are trained, in the given order.
      paths: every leaf's path, in tree order.
      segments: the disjoint parts in forward order (group ``i`` is segment ``i`` and all that
        follow), or () where the groups were given one by one.
      treedef: the parameters' structure, not part of the comparison.
    """

    trained: tuple[tuple[str, ...], ...]
    paths: tuple[str, ...]
    segments: tuple[tuple[str, ...], ...] = ()
    treedef: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.trained)

    def trainable_by_path(self, index: int) -> dict[str, bool]:
        """Return ``path -> trained at this index`` for every leaf."""
        on = frozenset(self.trained[check_index(index, len(self))])
        return {path: path in on for path in self.paths}

    def trainable(self, index: int) -> Any:
        """Return the parameters' tree with a Python bool for each leaf: trained at this index."""
        by_path = self.trainable_by_path(index)
        return jax.tree.unflatten(self.treedef, [by_path[path] for path in self.paths])


def parameter_groups(
    params: Any,
    n: int | None = None,
    *,
    order: Sequence[str] | None = None,
    by: Literal["count", "parameters"] = "count",
    patterns: Sequence[PathPattern] | None = None,
) -> ParameterGroups:
    r"""Split a network into nested groups for freezing.

    With layers :math:`l_0, \dots, l_{L-1}` in forward order and starts
    :math:`0 = s_0 < s_1 < \dots < s_{n-1} < L`, group ``i`` is :math:`\{l_{s_i}, \dots, l_{L-1}\}`:
    what is still trained at freeze index ``i``. Group 0 is everything.

    A layer is a module with its direct leaves, so that kernel and bias never part. A norm (a
    module with nothing but ``scale`` and ``bias`` vectors) belongs to the layer before it.

    Args:
      params: the parameters (linen dict, ``nnx.State``, any pytree); ``ShapeDtypeStruct`` leaves do.
      n: number of groups, in [1, number of layers]. May be left out with ``patterns``.
      order: every leaf's path in forward order, as :func:`boostax.forward_order` returns it.
        Default None: sorted by number, only where all siblings are one numbered series
        (``layer_0`` ... ``layer_11``); anything else is refused.
      by: ``"count"`` (default) makes groups of equally many layers,
        :math:`s_i = \lfloor i L / n \rfloor`; ``"parameters"`` of about equally many numbers.
      patterns: one path pattern a segment, in forward order, instead of ``n``, ``order`` and
        ``by``: shell-style text (``"encoder/*"``; ``*`` crosses ``/``), a compiled regex, or a
        function of the path. A leaf goes to the first pattern that fits; each leaf needs one.

    Returns:
      A :class:`ParameterGroups` with ``n`` groups, to be handed to :class:`boostax.Freezing`.

    Raises:
      ValueError: more groups than layers, an order that can't be told or does not list every leaf
        once, a pattern that fits nothing, a leaf without a pattern, a layer that would be split.
      TypeError: an argument has the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {f"layer_{i}": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)} for i in range(12)}
      >>> groups = parameter_groups(params, 3)
      >>> [segment[0] for segment in groups.segments]
      ['layer_0/bias', 'layer_4/bias', 'layer_8/bias']
      >>> groups.trainable(2)["layer_7"], groups.trainable(2)["layer_8"]
      ({'bias': False, 'kernel': False}, {'bias': True, 'kernel': True})

    Source:
      ``mindspore.boost.GradientFreeze.split_parameters_groups``, which finds layers by "bn" and
      "bias" in the names; with one norm per layer and ``n`` up to the number of layers the groups
      are the same.

    When not to use:
      Layers stacked by ``scan`` are one leaf and can't be split: the whole stack is one layer.
    """
    paths = leaf_paths(params)
    if not paths:
        raise ValueError("parameter_groups: params has no leaves")
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"parameter_groups: several leaves have the same path: {', '.join(twice)}")
    if patterns is not None:
        if order is not None or by != "count":
            raise ValueError(
                "parameter_groups: patterns give the order and the split; leave out order and by"
            )
        segments = _by_patterns(paths, patterns)
        if n is not None and _positive("n", n) != len(segments):
            raise ValueError(f"parameter_groups: n is {n}, but there are {len(segments)} patterns")
    else:
        if by not in ("count", "parameters"):
            raise ValueError(
                f"parameter_groups: by must be 'count' or 'parameters', got {by!r}."
                f"{did_you_mean(str(by), ('count', 'parameters'))}"
            )
        if n is None:
            raise ValueError(
                "parameter_groups: n (the number of groups) is needed without patterns"
            )
        segments = _by_layers(params, paths, _positive("n", n), order, by)
    trained = tuple(
        tuple(path for segment in segments[i:] for path in segment) for i in range(len(segments))
    )
    return ParameterGroups(trained, paths, segments, jax.tree.structure(params))


def _by_layers(
    params: Any, paths: tuple[str, ...], n: int, order: Sequence[str] | None, by: str
) -> tuple[tuple[str, ...], ...]:
    shapes = dict(zip(paths, (np.shape(leaf) for leaf in jax.tree.leaves(params)), strict=True))
    if order is not None:
        ordered = _check_order(order, paths)
    else:
        ordered = paths if n == 1 else natural_order(paths)
    layers = split_layers(ordered, {path: len(shape) for path, shape in shapes.items()})
    if n > len(layers):
        raise ValueError(
            f"parameter_groups: n={n} groups, but the network has only {len(layers)} layers "
            f"({', '.join(layer.name for layer in layers)}); take n <= {len(layers)}. A layer's "
            "kernel, bias and norm are never split, and layers stacked by scan are one layer"
        )
    if by == "count":
        starts = [i * len(layers) // n for i in range(n)]
    else:
        costs = [sum(math.prod(shapes[path]) for path in layer.paths) for layer in layers]
        starts = _balanced_starts(costs, n)
    ends = [*starts[1:], len(layers)]
    return tuple(
        tuple(path for layer in layers[start:end] for path in layer.paths)
        for start, end in zip(starts, ends, strict=True)
    )


def _balanced_starts(costs: Sequence[int], n: int) -> list[int]:
    """Start each segment where the sum before it is nearest to its share; no segment is empty."""
    before = np.concatenate([[0], np.cumsum(costs)])
    starts = [0]
    for i in range(1, n):
        allowed = np.arange(starts[-1] + 1, len(costs) - (n - 1 - i))
        distance = np.abs(before[allowed] * n - i * int(before[-1]))
        starts.append(int(allowed[np.argmin(distance)]))
    return starts


def _by_patterns(
    paths: tuple[str, ...], patterns: Sequence[PathPattern]
) -> tuple[tuple[str, ...], ...]:
    if isinstance(patterns, (str, Mapping)) or not isinstance(patterns, Sequence) or not patterns:
        raise TypeError(
            f"parameter_groups: patterns must be a non-empty sequence of path patterns, got {patterns!r}"
        )
    for pattern in patterns:
        check_matched("parameter_groups: patterns", pattern, paths)
    owner: dict[str, int] = {}
    for path in paths:
        fits = [i for i, pattern in enumerate(patterns) if matches(pattern, path)]
        if not fits:
            raise ValueError(
                f"parameter_groups: no pattern fits the leaf {path!r}; add one, such as '*' at the end"
            )
        owner[path] = fits[0]
    for module in dict.fromkeys(path.rpartition("/")[0] for path in paths if "/" in path):
        own = [path for path in paths if path.rpartition("/")[0] == module]
        if len({owner[path] for path in own}) > 1:
            raise ValueError(
                f"parameter_groups: the patterns split the layer {module!r}: "
                + ", ".join(f"{path} -> segment {owner[path]}" for path in own)
            )
    segments = tuple(tuple(p for p in paths if owner[p] == i) for i in range(len(patterns)))
    for pattern, segment in zip(patterns, segments, strict=True):
        if not segment:
            raise ValueError(
                f"parameter_groups: earlier patterns already took every leaf of {pattern!r}"
            )
    return segments


def _check_order(order: Sequence[str], paths: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(order, str) or not all(isinstance(path, str) for path in order):
        raise TypeError(
            "parameter_groups: order must be a sequence of leaf paths such as 'Dense_0/kernel' "
            "(boostax.forward_order returns one)"
        )
    order = tuple(order)
    unknown = [path for path in order if path not in set(paths)]
    missing = [path for path in paths if path not in set(order)]
    if unknown or missing or len(order) != len(paths):
        faults = [f"{path!r} is no leaf.{did_you_mean(path, paths)}" for path in unknown[:5]]
        if missing:
            faults.append(f"missing: {', '.join(missing)}")
        if len(set(order)) < len(order):
            faults.append(f"twice: {', '.join(sorted({p for p in order if order.count(p) > 1}))}")
        raise ValueError("parameter_groups: order must list every leaf once; " + "; ".join(faults))
    return order


def check_index(index: Any, count: int) -> int:
    """Return a freeze index as an int, or raise."""
    if isinstance(index, (bool, np.bool_)) or not isinstance(index, numbers.Integral):
        raise TypeError(f"freeze index: must be an integer, got {index!r} ({type(index).__name__})")
    number = int(index)
    if not 0 <= number < count:
        raise ValueError(f"freeze index: must be in [0, {count - 1}], got {number}")
    return number


def _positive(argument: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"parameter_groups: {argument} must be an integer >= 1, got {value!r} "
            f"({type(value).__name__})"
        )
    if value < 1:
        raise ValueError(f"parameter_groups: {argument} must be >= 1, got {value}")
    return int(value)
