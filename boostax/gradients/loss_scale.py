"""Loss scaling: float16 gradients that neither underflow nor overflow, by one dynamic factor.

The backward pass starts from a scale s instead of 1, so that every cotangent is s times as large, and
the gradients are divided by the same s in float32. s follows what happens::

    gradients finite:      after exactly `window` such calls  s <- min(s * factor, max_scale)
    an inf or NaN in them: the call is skipped,                s <- max(s / factor, min_scale)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax.gradients._scale_checks import (
    check_argnums,
    check_bounds,
    check_differentiable,
    check_factor,
    check_scale,
    check_window,
    scale_for,
)
from boostax.gradients._scaled_pass import pulled
from boostax.parallel.reduce import all_devices
from boostax.training.metrics import all_finite

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScaleState", "set_loss_scale"]


class LossScaleState(NamedTuple):
    """What a loss scale remembers.

    Attributes:
      scale: float32, shape (), or (groups,) for a :class:`boostax.GroupLossScale`: what the next
        backward pass starts from.
      good_steps: int32 of the same shape: finite micro-batches since the scale last changed.
      overflows: int32 of the same shape: calls so far that were skipped on its account.
      stuck: int32 of the same shape: overflows in a row while the scale was at ``min_scale`` already.
        Anything above 0 says that no smaller scale would help: look for the NaN in the model.
    """

    scale: jax.Array
    good_steps: jax.Array
    overflows: jax.Array
    stuck: jax.Array


def first_state(scale: Any) -> LossScaleState:
    """Return a state with this scale and all counts zero."""
    scale = jnp.asarray(scale, jnp.float32)
    return LossScaleState(scale, *(jnp.zeros(scale.shape, jnp.int32) for _ in range(3)))


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    r"""One loss scale that grows while gradients are finite and shrinks when they overflow.

    The backward pass computes :math:`s \, \partial L / \partial \theta`, and the gradient is that
    divided by :math:`s` in float32. After ``window`` finite calls in a row :math:`s` is multiplied by
    ``factor``; after an overflow it is divided by it, and the call changes nothing else.

    Give it to :func:`boostax.train_step` as ``loss_scale=``; in a loop of your own use
    :meth:`init_state` and :meth:`value_and_grad`.

    Args:
      init: the first scale, in [``min_scale``, ``max_scale``]. Default 2**15.
      factor: what the scale grows and shrinks by, > 1. Default 2; with powers of two (here and in
        ``init``) scaling and unscaling lose nothing.
      window: finite micro-batches before the scale grows, an int >= 1. Default 2000.
      min_scale: the smallest scale, > 0. Default 1, as in the reference.
      max_scale: the largest scale, finite. Default 2**24.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp, boostax
      >>> scaling = boostax.DynamicLossScale(init=1024.0, window=2)
      >>> state = scaling.init_state()
      >>> grad_fn = scaling.value_and_grad(lambda w, x: jnp.sum((w * x) ** 2))
      >>> value, grads, finite, state = grad_fn(state, jnp.float32(2.0), jnp.float32(3.0))
      >>> float(value), float(grads), bool(finite), float(state.scale), int(state.good_steps)
      (36.0, 36.0, True, 1024.0, 1)

    Source:
      P. Micikevicius et al., Mixed Precision Training, 2018. The rule is that of
      ``mindspore.nn.DynamicLossScaleUpdateCell``.

    When not to use:
      With bfloat16 or float32: their exponents reach as far as float32's own, so that nothing
      underflows which would not without a scale. With float8: it needs a scale for each tensor, not
      for the loss. Where one part of the network overflows at a scale at which another part
      underflows, use :class:`boostax.GroupLossScale`.
    """

    init: float = 2.0**15
    factor: float = 2.0
    window: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        caller = "DynamicLossScale"
        low, high = check_bounds(caller, self.min_scale, self.max_scale)
        set_ = lambda name, value: object.__setattr__(self, name, value)
        set_("min_scale", low)
        set_("max_scale", high)
        set_("init", check_scale(caller, "init", self.init, low, high))
        set_("factor", check_factor(caller, self.factor))
        set_("window", check_window(caller, self.window))

    def init_state(self) -> LossScaleState:
        """Return the first state."""
        return first_state(self.init)

    def update(
        self, state: LossScaleState, finite: Any, *, micro_batches: int = 1
    ) -> LossScaleState:
        """Return the state after a call.

        Args:
          state: the state before it.
          finite: bool scalar: whether its gradients were finite, the same on all devices.
          micro_batches: how many micro-batches the call counts for. Default 1.
        """
        grown = after_good(
            state, micro_batches, self.factor, self.window, jnp.float32(self.max_scale)
        )
        shrunk = after_overflow(state, 1 / self.factor, jnp.float32(self.min_scale))
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), grown, shrunk)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | tuple[int, ...] = 0,
        has_aux: bool = False,
        *,
        axis_name: Any = None,
    ) -> Callable[..., Any]:
        """Return a ``value_and_grad`` that scales the backward pass, for a loop of your own.

        Args:
          fun: a function with a real floating scalar as its result, or ``(scalar, aux)``.
          argnums: as for ``jax.value_and_grad``. Default 0.
          has_aux: as for ``jax.value_and_grad``. Default False.
          axis_name: name(s) of the mapped axis over which devices decide together whether the
            gradients are finite. The gradients stay each device's own. Default None.

        Returns:
          ``fn(state, *args, **kwargs) -> (value, grads, finite, state)``. ``value`` is the unscaled
          result (``(value, aux)`` with ``has_aux``), ``grads`` are unscaled and at least float32. Where
          ``finite`` is False leave everything but the state as it was, with ``jnp.where`` or
          ``lax.cond``.

        Raises:
          TypeError: an argument has a wrong type. When traced: ``state`` is no ``LossScaleState``, a
            chosen argument has leaves without gradients, or the result is no real floating scalar.
          ValueError: when traced: ``argnums`` is out of range, or ``state`` is that of groups.
        """
        return own_loop(self, fun, argnums, has_aux, axis_name)


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
    """A scale that only :func:`boostax.set_loss_scale` changes; calls that overflow are skipped."""

    init: float

    def init_state(self) -> LossScaleState:
        """Return the first state."""
        return first_state(self.init)

    def update(
        self, state: LossScaleState, finite: Any, *, micro_batches: int = 1
    ) -> LossScaleState:
        """Return the state after a call."""
        del micro_batches
        overflow = jnp.logical_not(finite).astype(jnp.int32)
        return state._replace(overflows=state.overflows + overflow)


def after_good(
    state: LossScaleState, micro_batches: int, factor: float, window: int, most: Any
) -> LossScaleState:
    """Return the state after good calls: the scale grows once ``window`` of them are full."""
    good = state.good_steps + micro_batches
    full = good >= window
    grown = jnp.minimum(state.scale * jnp.float32(factor), most)
    # One that was set higher by hand stays there.
    scale = jnp.where(full, jnp.maximum(grown, state.scale), state.scale)
    # A call of many micro-batches can hold more than a window; it counts for one.
    left = jnp.minimum(good - window, window - 1)
    return LossScaleState(
        scale, jnp.where(full, left, good), state.overflows, jnp.zeros_like(state.stuck)
    )


def after_overflow(state: LossScaleState, ratio: float, least: Any) -> LossScaleState:
    """Return the state after an overflow."""
    lower = jnp.minimum(state.scale, jnp.maximum(state.scale * jnp.float32(ratio), least))
    return LossScaleState(
        lower,
        jnp.zeros_like(state.good_steps),
        state.overflows + 1,
        jnp.where(lower < state.scale, 0, state.stuck + 1),
    )


def own_loop(
    scaling: Any, fun: Callable[..., Any], argnums: Any, has_aux: bool, axis_name: Any
) -> Callable[..., Any]:
    """Return ``fn(state, *args) -> (value, grads, finite, state)`` for one scale."""
    check_own_function(fun, has_aux)
    numbers = check_argnums(argnums)

    def fn(state: LossScaleState, *args: Any, **kwargs: Any) -> Any:
        check_own_state(state, ())
        for number in numbers:
            if not -len(args) <= number < len(args):
                raise ValueError(
                    f"value_and_grad: argnums={number}, but there are {len(args)} positional "
                    "arguments behind the state"
                )
            check_differentiable(number, args[number])

        def of_chosen(*chosen: Any) -> Any:
            given = list(args)
            for number, value in zip(numbers, chosen, strict=True):
                given[number] = value
            out = fun(*given, **kwargs)
            return out if has_aux else (out, None)

        value, grads, aux = pulled(of_chosen, [args[n] for n in numbers], state.scale)
        finite = all_finite(value, jax.tree.leaves(grads))
        if axis_name is not None:
            finite = all_devices(finite, axis_name)
        shown = (value, aux) if has_aux else value
        chosen = tuple(grads) if isinstance(argnums, (tuple, list)) else grads[0]
        return shown, chosen, finite, scaling.update(state, finite)

    return fn


def check_own_function(fun: Any, has_aux: Any) -> None:
    """Raise where a loop of one's own asks for the gradient of something else than a function."""
    if not callable(fun):
        raise TypeError(f"value_and_grad: fun must be a function, got {type(fun).__name__}")
    if not isinstance(has_aux, bool):
        raise TypeError(f"value_and_grad: has_aux must be a bool, got {has_aux!r}")


def check_own_state(state: Any, shape: tuple[int, ...], caller: str = "value_and_grad") -> None:
    """Raise where a loop of one's own passes something else than a state with scales of ``shape``."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            f"{caller}: state must be a boostax.LossScaleState, the first argument, got "
            f"{type(state).__name__}; start with init_state()"
        )
    if jnp.shape(state.scale) != shape:
        of = lambda s: f"the scales of {s[0]} groups" if s else "one scale"
        raise ValueError(
            f"{caller}: the state has {of(jnp.shape(state.scale))}, this loss scale "
            f"{of(shape)}; start with init_state()"
        )


def set_loss_scale(state: Any, value: Any) -> Any:
    """Return a state whose loss scale is another one; nothing is compiled anew.

    Args:
      state: a :class:`boostax.TrainState` of a step with ``loss_scale=``, or a
        :class:`boostax.LossScaleState`.
      value: the scale, a number > 0 or an array of shape () or (1,); for a group loss scale one
        number for all groups, or one a group.

    Returns:
      The state, of the same type, with the count of good steps at 0.

    Raises:
      TypeError: ``state`` or ``value`` has a wrong type.
      ValueError: ``value`` has a wrong shape, or is not finite and above 0; or the state has no loss
        scale.

    Example:
      >>> import boostax
      >>> state = boostax.DynamicLossScale().init_state()
      >>> float(boostax.set_loss_scale(state, 128).scale)
      128.0
    """
    if isinstance(state, LossScaleState):
        shape = jnp.shape(state.scale)
        scale, zero = scale_for("set_loss_scale: value", value, shape), np.zeros(shape, np.int32)
        return state._replace(
            scale=_placed_as(state.scale, scale),
            good_steps=_placed_as(state.good_steps, zero),
            stuck=_placed_as(state.stuck, zero),
        )
    if not hasattr(state, "loss_scale"):
        raise TypeError(
            "set_loss_scale: state must be a boostax.TrainState or a boostax.LossScaleState, got "
            f"{type(state).__name__}"
        )
    if state.loss_scale is None:
        raise ValueError(
            "set_loss_scale: this train state has no loss scale; pass loss_scale= to train_step"
        )
    return state.replace(loss_scale=set_loss_scale(state.loss_scale, value))


def _placed_as(old: Any, new: np.ndarray) -> jax.Array:
    """Return ``new`` where ``old`` lies: an array that is bound to a device compiles anew."""
    bound = isinstance(old, jax.Array) and not isinstance(old, Tracer) and old.committed
    return jax.device_put(new, old.sharding) if bound else jnp.asarray(new)
