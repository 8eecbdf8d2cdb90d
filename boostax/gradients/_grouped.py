"""A group loss scale at work: scales by label, whom an overflow is due to, and the loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import leaf_paths
from boostax.gradients._labels import Labels, label_jaxpr
from boostax.gradients._scaled_pass import checked
from boostax.gradients.loss_scale import check_own_function, check_own_state
from boostax.parallel.reduce import any_device

if TYPE_CHECKING:
    from boostax.gradients.group_loss_scale import GroupLossScale

__all__ = ["blame", "by_label", "group_numbers", "labels_of"]


def by_label(scales: jax.Array) -> jax.Array:
    """Return the scale of each label: the two ends have the scale 1."""
    one = jnp.ones(1, jnp.float32)
    return jnp.concatenate([one, scales, one])


def group_numbers(scaling: GroupLossScale, params: Any) -> list[int]:
    """Return the group of each leaf, in tree order."""
    owners = scaling.assign(params)
    return [owners[path] for path in leaf_paths(params)]


def labels_of(
    scaling: GroupLossScale, jaxpr: Any, params: Any, flags: Sequence[bool], others: int
) -> Labels:
    """Label a loss's jaxpr, whose inputs are the leaves of ``params`` and ``others`` more.

    ``flags`` tells which leaves are differentiated.
    """
    groups = group_numbers(scaling, params)
    leaves = [group if flag else None for group, flag in zip(groups, flags, strict=True)]
    return label_jaxpr(jaxpr, [*leaves, *[None] * others], len(scaling))


def _leaf_overflows(grads: Sequence[Any], groups: Sequence[int], count: int) -> jax.Array:
    """Say for each group whether a gradient in it is not finite."""
    bad = [jnp.bool_(False)] * count
    for grad, group in zip(grads, groups, strict=True):
        if jnp.issubdtype(jnp.result_type(grad), jnp.inexact):
            bad[group - 1] |= ~jnp.all(jnp.isfinite(grad))
    return jnp.stack(bad)


def blame(
    scaling: GroupLossScale,
    labels: Labels,
    params: Any,
    flags: Sequence[bool],
    grads: Any,
    amax: jax.Array,
    axes: Any = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """Say whether a gradient is not finite, and what ``scaling.update`` is to know of the groups.

    Args:
      scaling: the loss scale.
      labels: where its boundaries are.
      params: the parameters.
      flags: which leaves are differentiated.
      grads: the gradients, unscaled.
      amax: what the boundaries emitted.
      axes: names of the mesh axes over which the devices decide together. Default None.

    Returns:
      A bool of this device, and ``blamed`` and ``active`` by name.
    """
    pairs = zip(group_numbers(scaling, params), jax.tree.leaves(grads), flags, strict=True)
    used = [(group, grad) for group, grad, flag in pairs if flag]
    groups = [group for group, _ in used]
    bad = _leaf_overflows([grad for _, grad in used], groups, len(scaling))
    active = jnp.asarray(np.isin(np.arange(1, len(scaling) + 1), groups))
    return jnp.any(bad), {"blamed": _blamed(labels, amax, bad, axes), "active": active}


def _blamed(labels: Labels, amax: jax.Array, leaves: jax.Array, axes: Any) -> jax.Array:
    """Say for each group whether an overflow arose in it.

    It arose in a group that something not finite comes out of, towards its leaves or the groups ahead,
    and nothing went into. Where no group is so (as where a group has several parts of the network,
    one behind the other), it arose where the backward pass met it first.

    Args:
      labels: the boundaries.
      amax: what they emitted.
      leaves: bool, one a group: whether a gradient is not finite.
      axes: names of the mesh axes over which the devices decide together, or None.

    Returns:
      bool, one a group. What it holds where all is finite has no meaning.
    """
    count = leaves.shape[0]
    bad = ~jnp.isfinite(amax)
    if axes is not None:
        flags = any_device(jnp.concatenate([leaves, bad]), axes)
        leaves, bad = flags[:count], flags[count:]
    source, target = labels.sides()
    numbers = np.arange(1, count + 1)[:, None]
    out = leaves | jnp.any(bad[None] & (target == numbers), axis=1)
    into = jnp.any(bad[None] & (source == numbers), axis=1)
    blamed = out & ~into
    if bad.shape[0]:
        # The backward pass goes through the program from its end.
        first = jnp.argmax(jnp.where(bad, labels.order(), -1))
        met = jnp.any(bad) & (jnp.arange(1, count + 1) == jnp.asarray(target)[first])
        blamed = jnp.where(jnp.any(blamed), blamed, met)
    blamed = jnp.where(jnp.any(blamed), blamed, out)
    # The loss itself can be infinite where no gradient is.
    return blamed | ~jnp.any(blamed)


def own_group_loop(
    scaling: GroupLossScale, fun: Callable[..., Any], has_aux: bool, axis_name: Any
) -> Callable[..., Any]:
    """Return ``fn(state, params, *args) -> (value, grads, finite, state)``."""
    from boostax.gradients._statistics import watched_value_and_grad
    from boostax.gradients.value_and_grad import trained_leaves
    from boostax.training.contract import LossAux

    check_own_function(fun, has_aux)

    def fn(state: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check_own_state(state, (len(scaling),))
        given = _Split((args, kwargs))
        returned: list[_Split] = []

        def loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
            del model_state, rng
            args, kwargs = given.joined(batch)
            out = fun(params, *args, **kwargs)
            value, aux = checked(*(out if has_aux else (out, None)))
            returned.append(_Split(aux))
            return value, LossAux(aux=returned[-1].arrays)

        noted: list[Labels] = []
        passes = watched_value_and_grad(loss, groups=scaling, note=noted.append)
        (value, aux), grads, _, amax = passes(params, None, given.arrays, None, scales=state.scale)
        flags = trained_leaves(params, None)
        bad, found = blame(scaling, noted[-1], params, flags, grads, amax, axis_name)
        finite = ~bad & jnp.isfinite(value)
        if axis_name is not None:
            finite = ~any_device(~finite, axis_name)
        state = scaling.update(state, finite, **found)
        shown = (value, returned[-1].joined(aux.aux)) if has_aux else value
        return shown, grads, finite, state

    return fn


class _Split:
    """A tree, its arrays apart from all else, which a trace takes as it is.

    Attributes:
      arrays: the arrays.
    """

    def __init__(self, tree: Any):
        leaves, self._treedef = jax.tree.flatten(tree)
        is_array = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
        self.arrays = [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag]
        self._rest = [
            None if flag else (leaf,) for leaf, flag in zip(leaves, is_array, strict=True)
        ]

    def joined(self, arrays: Any) -> Any:
        """Return the tree with other arrays."""
        supply = iter(arrays)
        return self._treedef.unflatten([rest[0] if rest else next(supply) for rest in self._rest])
