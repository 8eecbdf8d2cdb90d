"""The mean, or the sum, of what the devices hold: the exchange that most training uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from boostax._info import TransformInfo, with_info
from boostax._tree import leaf_paths
from boostax.errors import did_you_mean
from boostax.parallel._axes import axis_size, check_axis, check_varying
from boostax.parallel.reduce import Reduce

__all__ = ["all_reduce"]

_OPS = ("mean", "sum")


def all_reduce(
    axis_name: str | Sequence[str], *, op: Literal["mean", "sum"] = "mean"
) -> optax.GradientTransformationExtraArgs:
    r"""Take the mean, or the sum, over the devices of one axis or of several.

    With the gradient :math:`g_i` of device ``i`` and its weight :math:`w_i`:

    .. math:: \text{mean: } \sum_i w_i g_i \Big/ \sum_i w_i, \qquad \text{sum: } \sum_i g_i

    ``update`` takes the extra argument ``weight``, a float scalar >= 0 of each device (the number
    of examples that its mean loss is over), which ``op="mean"`` weighs by. Default 1. A device of
    weight 0 adds nothing, whatever it holds; where all weights are 0, the result is zeros.

    It runs inside ``jax.shard_map``, ``jax.pmap(axis_name=...)`` or ``jax.vmap(axis_name=...)``.
    Sums are taken in float32 or better; leaves keep their dtype. Leaves that are not floating pass,
    and so do masked ones. Under ``shard_map`` with its checks on, a gradient that arrives summed
    already is refused: take it at ``jax.lax.pcast(params, axis_name, to="varying")``.

    Args:
      axis_name: the axis, or a tuple of axes.
      op: ``"mean"`` (default) or ``"sum"``.

    Returns:
      A transformation without state. Its update raises a NameError where an axis is not bound, and
      a ValueError for a leaf that is the same on all devices where ``shard_map`` tells so.

    Raises:
      TypeError: ``axis_name`` is no name and no tuple of names.
      ValueError: it is empty or names an axis twice, or ``op`` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = all_reduce("devices")
      >>> grads, weights = jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])
      >>> combine = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]
      >>> jax.vmap(combine, axis_name="devices")(grads, weights).tolist()
      [2.0, 2.0]

    Source:
      ``jax.lax.pmean`` and ``jax.lax.psum``, with weights, and as a transformation.

    When not to use:
      With ``jit`` alone, where a batch is split over devices and the loss is a mean over it: the
      gradient is the devices' mean already.
    """
    axes = _axes(axis_name)
    if op not in _OPS:
        raise ValueError(
            f"all_reduce: op must be one of {', '.join(map(repr, _OPS))}, got {op!r}."
            f"{did_you_mean(str(op), _OPS)}"
        )
    combine = Reduce(axes, op)

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        named = zip(leaf_paths(updates), jax.tree.leaves(updates), strict=True)
        sent = {path: leaf for path, leaf in named if _travels(leaf)}
        for axis in axes:
            if axis_size("all_reduce", axis) > 1:
                check_varying("all_reduce", list(sent), list(sent.values()), axis)
        return combine(updates, weight), state

    def fates(params: Any) -> dict[str, str]:
        over = f"{op} over {' and '.join(map(repr, axes))}"
        named = zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
        return {
            path: over if _travels(leaf) else "not exchanged (not floating)" for path, leaf in named
        }

    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo("all_reduce", {"axis_name": axes, "op": op}, fates=fates, axes=axes),
    )


def _travels(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _axes(axis_name: Any) -> tuple[str, ...]:
    if isinstance(axis_name, (tuple, list)):
        axes = tuple(check_axis("all_reduce", "axis_name", name) for name in axis_name)
    else:
        axes = (check_axis("all_reduce", "axis_name", axis_name),)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"all_reduce: axis_name must name at least one axis, and each once; got {axis_name!r}"
        )
    return axes
