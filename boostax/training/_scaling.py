"""A train step's part for a loss scale: what is checked, who is to blame, what comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax.errors import StateMismatchError
from boostax.gradients import _grouped
from boostax.gradients._labels import Labels
from boostax.gradients._scale_checks import scale_for
from boostax.gradients.group_loss_scale import GroupLossScale
from boostax.gradients.loss_scale import DynamicLossScale, FixedLossScale, LossScaleState
from boostax.gradients.value_and_grad import trained_leaves
from boostax.updates._accumulate_leaves import in_dtype

__all__ = [
    "Blame",
    "blame",
    "check_scaling",
    "check_scaling_state",
    "first_scale",
    "next_scale",
    "seen_by_tx",
    "with_gradient",
]


class Blame(NamedTuple):
    """What a group loss scale learns from a call.

    Attributes:
      blamed: bool, one a group: whether an overflow arose in it.
      active: bool, one a group: whether a leaf of it was trained.
    """

    blamed: jax.Array
    active: jax.Array


def check_scaling(value: Any) -> Any:
    """Return the loss scale that ``train_step`` was given, a number as a fixed one.

    Raises:
      TypeError: it is none.
      ValueError: an array of another shape than () or (1,), or a scale out of range.
    """
    if value is None or isinstance(value, (DynamicLossScale, GroupLossScale, FixedLossScale)):
        return value
    if isinstance(value, type):
        raise TypeError(
            f"loss_scale: got the class {value.__name__}; call it: {value.__name__}(...)"
        )
    try:
        return FixedLossScale(float(scale_for("loss_scale", value, ())))
    except TypeError as error:
        raise TypeError(
            f"{error}; or a boostax.DynamicLossScale, or a boostax.GroupLossScale"
        ) from None


def check_scaling_state(scaling: Any, state: LossScaleState | None) -> None:
    """Raise where a state's loss scale does not belong to the step.

    Raises:
      StateMismatchError: one of the two has no loss scale, or the groups are others.
    """
    if (scaling is None) != (state is None):
        has, lacks = ("step", "state") if state is None else ("state", "step")
        raise StateMismatchError(
            f"loss_scale: the {has} has a loss scale and the {lacks} has none; make the state with "
            "step.init of a step with the same loss_scale="
        )
    if state is None:
        return
    if not isinstance(state, LossScaleState):
        raise StateMismatchError(
            f"loss_scale: the state's part is a {type(state).__name__}, not a LossScaleState; restore "
            "the checkpoint with step.init(...) as its target"
        )
    wanted = (len(scaling),) if isinstance(scaling, GroupLossScale) else ()
    if any(np.shape(leaf) != wanted for leaf in state):
        raise StateMismatchError(
            f"loss_scale: the state's scale has the shape {np.shape(state.scale)}, this step's "
            f"{wanted}; make the state with step.init of a step with the same loss_scale="
        )


def first_scale(scaling: Any, params: Any) -> LossScaleState:
    """Return the first state of a loss scale, after a look at the groups' leaves."""
    if isinstance(scaling, GroupLossScale):
        scaling.assign(params)
    return scaling.init_state()


def seen_by_tx(scaling: Any, params: Any) -> Any:
    """Return the parameters as ``tx`` sees them.

    Unscaled gradients are float32, since half precision could not hold them; so that moments and the
    like are float32 from the start, ``tx`` sees the parameters so too.
    """
    return params if scaling is None else in_dtype(params, jnp.float32)


def with_gradient(value_fn: Callable[[Any], Any], grad_fn: Callable[[Any], Any]) -> Any:
    """Return ``value_fn`` with the gradient that ``grad_fn`` gives.

    Line searches differentiate the loss at their trial points by themselves; without the scale a
    float16 gradient would underflow there.
    """

    @jax.custom_vjp
    def value(params: Any) -> Any:
        return value_fn(params)

    def forward(params: Any) -> Any:
        return value_fn(params), (params, grad_fn(params))

    def backward(kept: Any, cotangent: Any) -> Any:
        return (jax.tree.map(lambda p, g: _times(p, g, cotangent), *kept),)

    value.defvjp(forward, backward)
    return value


def _times(param: Any, grad: Any, cotangent: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(param), jnp.inexact):
        return np.zeros(jnp.shape(param), jax.dtypes.float0)
    # optax hands a Python number over as the cotangent.
    return (grad * jnp.asarray(cotangent, grad.real.dtype)).astype(jnp.result_type(param))


def blame(
    scaling: Any,
    labels: Labels | None,
    params: Any,
    trainable: Any,
    grads: Any,
    amax: jax.Array,
    axes: Any,
) -> Blame | None:
    """Say what a call tells a group loss scale; None for any other.

    Args:
      scaling: the step's loss scale.
      labels: where its boundaries are.
      params: the parameters.
      trainable: pytree of Python bools, or None for all.
      grads: the gradients, unscaled.
      amax: what the boundaries emitted, nothing of it on a device of weight 0.
      axes: the mesh axes over which devices decide together, or None.
    """
    if not isinstance(scaling, GroupLossScale):
        return None
    assert labels is not None
    flags = trained_leaves(params, trainable)
    return Blame(**_grouped.blame(scaling, labels, params, flags, grads, amax, axes)[1])


def next_scale(
    scaling: Any,
    state: LossScaleState | None,
    finite: Any,
    found: Blame | None,
    counts: Any,
    micro_batches: int,
) -> LossScaleState | None:
    """Return the loss scale's state after a call.

    Args:
      scaling: the step's loss scale, or None.
      state: the state before the call.
      finite: bool scalar, the decision of all devices.
      found: what :func:`blame` returned.
      counts: bool scalar, whether the call had any weight; True where that is always so.
      micro_batches: how many micro-batches the call was.
    """
    if scaling is None or state is None:
        return state
    more = {} if found is None else found._asdict()
    new = scaling.update(state, finite, micro_batches=micro_batches, **more)
    if counts is True:
        return new
    return jax.tree.map(lambda after, before: jnp.where(counts, after, before), new, state)
