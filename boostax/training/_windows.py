"""Model state across the calls of an accumulation window, and when a call is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from boostax.training.batch_stats import (
    Window,
    add_micro,
    close_window,
    init_window,
    momenta_for,
    pair_paths,
    reset,
    thread,
)
from boostax.updates._skip import find_state
from boostax.updates._window import AccumulateState


def first_window(stats: str, window_policy: str | None, model_state: Any) -> Any:
    """Return what the train state keeps of an open window, or None where nothing is needed.

    Statistics per window need partial sums. Statistics per micro-batch move at once; only where a
    whole window can be dropped is the state at its start kept, to go back to.
    """
    if window_policy is None or not jax.tree.leaves(model_state):
        return None
    if stats == "per_window":
        return init_window(model_state) if pair_paths(model_state) else None
    return jax.tree.map(jnp.copy, model_state) if window_policy == "skip_window" else None


def after_call(
    window: Any,
    start: Any,
    new: Any,
    *,
    weight: Any,
    ok: Any,
    old_opt_state: Any,
    opt_state: Any,
    momenta: Mapping[str, float],
    momentum: float | None,
) -> tuple[Any, Any]:
    """Return the model state and the open window after one call.

    Args:
      window: what :func:`first_window` or the call before gave.
      start: the model state that the call started from.
      new: the model state that its forward pass led to.
      weight: the call's weight.
      ok: bool scalar, whether the call counts; True where that is always so.
      old_opt_state: the optimizer state before the call.
      opt_state: the optimizer state after it; tells whether the window closed, and how.
      momenta: batch-norm momentum by module path.
      momentum: one momentum for all layers, or None.
    """
    if window is None:
        return hold_unless(ok, new, start), None
    emitted, dropped = _closed(old_opt_state, opt_state)
    if isinstance(window, Window):
        window = add_micro(window, start, new, weight, ok)
        model_state = thread(start, new, ok)
    else:
        model_state = hold_unless(ok, new, start)
    return _close(window, model_state, emitted, dropped, momenta, momentum)


def after_flush(
    window: Any,
    model_state: Any,
    *,
    old_opt_state: Any,
    opt_state: Any,
    momenta: Mapping[str, float],
    momentum: float | None,
) -> tuple[Any, Any]:
    """Return the model state and the window after a flush; arguments as for :func:`after_call`."""
    if window is None:
        return model_state, None
    emitted, dropped = _closed(old_opt_state, opt_state)
    return _close(window, model_state, emitted, dropped, momenta, momentum)


def _close(
    window: Any,
    model_state: Any,
    emitted: Any,
    dropped: Any,
    momenta: Mapping[str, float],
    momentum: float | None,
) -> tuple[Any, Any]:
    """Pool the statistics of a window that ended, or go back to those before a dropped one."""
    if isinstance(window, Window):
        pooled = close_window(window, model_state, momenta_for(model_state, momenta, momentum))
        model_state = _select(emitted, pooled, model_state)
        return model_state, _select(emitted | dropped, reset(window), window)
    model_state = _select(dropped, window, model_state)
    return model_state, _select(emitted | dropped, model_state, window)


def _closed(old_opt_state: Any, opt_state: Any) -> tuple[Any, Any]:
    """Say whether the window was closed by an update, and whether it was dropped."""
    before = find_state(old_opt_state, AccumulateState)
    after = find_state(opt_state, AccumulateState)
    if before is None or after is None:
        raise ValueError("an accumulation window is open, but tx holds no boostax.accumulate")
    return after.updates != before.updates, after.skipped_windows != before.skipped_windows


def hold_unless(ok: Any, new: Any, old: Any) -> Any:
    """Return ``new`` where ``ok``, else ``old``; an nnx model's key counters always move on."""
    if ok is True or new is None:
        return new

    def choose(after: Any, before: Any) -> Any:
        return after if _is_key_count(after) else jnp.where(ok, after, before)

    return jax.tree.map(choose, new, old, is_leaf=_is_key_count)


def _select(condition: Any, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _is_key_count(node: Any) -> bool:
    return type(node).__name__ == "RngCount"
