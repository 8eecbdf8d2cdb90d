"""What a train step reports of a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from boostax.training._settings import Settings
from boostax.training.metrics import global_norm, injected_learning_rate
from boostax.training.state import TrainState
from boostax.updates._skip import find_state, find_states
from boostax.updates._window import AccumulateState
from boostax.updates.dim_reduce import DimReduceState


def step_metrics(
    settings: Settings,
    old: TrainState,
    new: TrainState,
    *,
    loss: jax.Array,
    finite: jax.Array | None,
    counts: Any,
    trained: list[Any],
    index: Any,
) -> dict[str, jax.Array]:
    """Return the metrics that ``settings`` asks for.

    Args:
      settings: the step's static facts.
      old: the state before the call.
      new: the state after it.
      loss: the call's loss.
      finite: whether loss and gradients were finite, if that was looked at.
      counts: whether the call had any weight; True where that is always so.
      trained: the gradients of the trained leaves.
      index: the freeze index, or None.
    """
    shown: dict[str, Any] = {}
    for name in settings.metrics:
        if name == "loss":
            shown[name] = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
        elif name == "grad_norm":
            shown[name] = _norm(settings, _gathered(new, trained))
        elif name == "finite":
            shown[name] = finite
        elif name == "updates":
            shown[name] = new.updates
        elif name == "micro_steps":
            shown[name] = _micro_steps(settings, new)
        elif name == "freeze_index":
            shown[name] = jnp.asarray(index, jnp.int32)
        elif name == "loss_scale":
            shown[name] = old.loss_scale.scale
        elif name == "overflow":
            assert finite is not None
            # A call without weight adds nothing, whatever it holds.
            shown[name] = jnp.logical_not(finite) & counts
        elif name == "delta":
            search = find_state(new.opt_state, DimReduceState)
            assert search is not None
            # A call that was skipped has the state of the call before.
            shown[name] = jnp.where(new.updates > old.updates, search.delta, 0)
        elif (rate := _learning_rate(settings, old, new)) is not None:
            shown[name] = jnp.asarray(rate, jnp.float32)
    return shown


def _norm(settings: Settings, leaves: list[Any]) -> jax.Array:
    norm = global_norm(leaves)
    if settings.replicas is None or not settings.own_gradients:
        return norm
    # What the devices' gradients combine to is known inside tx alone.
    return settings.replicas.root_mean_square(norm)


def _gathered(state: TrainState, trained: list[Any]) -> list[Any]:
    """Return this call's gradients, or inside a window those that it has gathered so far.

    At a window's last call that is what the optimizer gets, and a clip in it measures.
    """
    windows = find_states(state.opt_state, AccumulateState)
    if len(windows) != 1 or windows[0].grads is None:
        return trained
    return jax.tree.leaves(windows[0].grads)


def _micro_steps(settings: Settings, state: TrainState) -> jax.Array:
    window = find_state(state.opt_state, AccumulateState)
    if window is not None:
        calls = window.micro_steps
    else:
        calls = state.attempt if state.skipped is None else state.attempt - state.skipped
    return calls if settings.microbatch == 1 else calls * settings.microbatch


def _learning_rate(settings: Settings, old: TrainState, new: TrainState) -> Any:
    rate = settings.learning_rate
    if callable(rate):
        return rate(old.updates)
    return injected_learning_rate(new.opt_state) if rate is None else rate
