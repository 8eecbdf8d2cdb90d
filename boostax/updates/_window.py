"""The state of an accumulation window, and what can be asked of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax import _compat
from boostax.errors import StateMismatchError
from boostax.updates._skip import find_state, skip

__all__ = ["AccumulateState", "flush", "has_updated"]


class AccumulateState(NamedTuple):
    """Where the window stands. ``every=1`` keeps no sums, and no part as large as the parameters.

    Attributes:
      micro_steps: int32 scalar, the calls so far, skipped ones included.
      updates: int32 scalar, how often the inner transformation has run.
      position: int32 scalar, the micro-batches of the open window so far.
      skipped_micro: int32 scalar, the micro-batches that were left out.
      skipped_windows: int32 scalar, the windows that were dropped.
      emitted: bool scalar, whether the last call ran the inner transformation.
      weight: float32 scalar, the sum of weights in the open window; None with ``every=1``.
      spoiled: bool scalar, whether the open window will be dropped; None without ``skip_window``.
      grads: the weighted mean of the open window's gradients so far (their weighted sum with
        ``reduce="sum"``), in ``accumulator_dtype``, with the parameters' structure
        (``optax.MaskedNode`` for leaves that have no gradient); None with ``every=1``. While
        ``weight`` is 0 nothing has been gathered: then it holds the last window's, always finite
        unless ``nonfinite="off"``, or zeros after a dropped one, and is not read.
      extra: weighted means of the extra arguments in ``average_extra``, by name, likewise.
      skip_state: what ``should_skip_update_fn`` returned last; ``()`` without it.
      every: int32 scalar, the window size that the state was made for; 0 where a schedule tells it.
      inner_state: the inner transformation's state.
    """

    micro_steps: jax.Array
    updates: jax.Array
    position: jax.Array
    skipped_micro: jax.Array
    skipped_windows: jax.Array
    emitted: jax.Array
    weight: jax.Array | None
    spoiled: jax.Array | None
    grads: Any
    extra: dict[str, Any]
    skip_state: Any
    every: jax.Array
    inner_state: Any

    def on_skip(self) -> AccumulateState:
        """A step skipped outside leaves an open window where it was; ``every=1`` has none."""
        if self.grads is not None:
            return self
        return self._replace(inner_state=skip(self.inner_state))


def check_window_size(state: Any, every: int) -> None:
    """Raise where the window size of an optimizer state on the host is another one.

    Args:
      state: an optimizer state with an :class:`AccumulateState` in it.
      every: the window size of the transformation; 0 for a schedule.

    Raises:
      StateMismatchError: the sizes differ, or there is no ``AccumulateState``.
    """
    found = find_state(state, AccumulateState)
    if found is None:
        raise StateMismatchError(
            "accumulate: there is no AccumulateState in this optimizer state. Either the "
            "transformation has no boostax.accumulate, or the state was restored without a target "
            "and came back as dicts and lists: restore it with the target tx.init(params)"
        )
    if isinstance(found.every, (Tracer, jax.ShapeDtypeStruct)):
        return
    known = np.unique(np.asarray(found.every))
    if known.tolist() != [every]:
        told = lambda size: "a schedule" if size == 0 else f"every={size}"
        raise StateMismatchError(
            f"accumulate: the state was made with {told(int(known[0]))}, here it is {told(every)}; go "
            "on with the window size that it was made with, or start with tx.init(params)"
        )


def has_updated(state: Any) -> jax.Array:
    """Say whether the last call ran the inner transformation: a bool scalar.

    Args:
      state: an optimizer state with an :class:`AccumulateState` anywhere in it. With several, it is
        enough that one of them has updated.

    Raises:
      ValueError: there is no :class:`AccumulateState` in ``state``.

    Example:
      >>> import jax.numpy as jnp, optax, boostax
      >>> tx = boostax.accumulate(optax.sgd(1.0), 1)
      >>> bool(boostax.has_updated(tx.init(jnp.zeros(3))))
      False
    """
    emitted = [found.emitted for found in _windows(state, "has_updated")]
    return emitted[0] if len(emitted) == 1 else jnp.any(jnp.stack(emitted), axis=0)


def flush(
    tx: optax.GradientTransformation,
    state: Any,
    params: Any,
    *,
    gradient_dtype: Any = None,
    **extra: Any,
) -> tuple[Any, Any]:
    """Apply what is left of an open window, as at the end of an epoch.

    The partial window is divided by the weight that it really gathered. What comes before
    ``accumulate`` in a chain sees no gradient and keeps its state; what comes after it sees the
    window's update. Where no window is open, nothing changes and the updates are zeros.

    Args:
      tx: the whole transformation that ``state`` belongs to; ``accumulate`` may stand anywhere in
        it, also inside ``optax.chain``, ``masked`` or ``multi_transform``.
      state: its state.
      params: the parameters.
      gradient_dtype: floating dtype of the gradients that ``tx`` gets otherwise, and so of the
        updates. Default None: each parameter's own, as ``jax.grad`` gives. The window itself doesn't
        tell it: give ``jnp.float32`` for low-precision parameters with float32 gradients.
      **extra: extra arguments of ``update``; those in ``average_extra`` come from the window, and
        so does ``weight``, the window's total, for an inner transformation that takes it.

    Returns:
      ``(updates, state)``, as of ``tx.update``.

    Raises:
      TypeError: ``gradient_dtype`` is not a floating dtype.
      ValueError: there is no :class:`AccumulateState` in ``state``.

    Example:
      >>> import jax.numpy as jnp, optax, boostax
      >>> tx = boostax.accumulate(optax.sgd(1.0), 4)
      >>> params = jnp.zeros(())
      >>> state = tx.init(params)
      >>> for gradient in (5.0, 6.0):
      ...     _, state = tx.update(jnp.float32(gradient), state, params)
      >>> updates, state = boostax.flush(tx, state, params)
      >>> float(updates), int(state.position)
      (-5.5, 0)

    When not to use:
      If the last micro-batches of an epoch may join the next epoch's first ones, leave them there.
    """
    windows = _windows(state, "flush")
    open_ = [jnp.any(window.position > 0) for window in windows]
    pending = open_[0] if len(open_) == 1 else jnp.any(jnp.stack(open_))
    tx = optax.with_extra_args_support(tx)
    if gradient_dtype is not None and not jnp.issubdtype(gradient_dtype, jnp.floating):
        raise TypeError(f"flush: gradient_dtype must be a floating dtype, got {gradient_dtype!r}")
    zeros = jax.tree.map(lambda p: _zero_gradient(p, gradient_dtype), params)

    def run() -> Any:
        updates, new_state = tx.update(zeros, state, params, **extra, boostax_flush=True)
        return updates, _keep_before(state, new_state)

    def rest() -> Any:
        shapes = jax.eval_shape(lambda: run()[0])
        return jax.tree.map(_zero_like, shapes, params), state

    return _compat.cond(pending, run, rest)


def _windows(state: Any, caller: str) -> list[AccumulateState]:
    found = [part for part in _parts(state) if isinstance(part, AccumulateState)]
    if not found:
        raise ValueError(
            f"{caller}: there is no AccumulateState in the state; pass the optimizer state of a "
            "transformation that holds boostax.accumulate"
        )
    return found


def _zero_gradient(param: Any, dtype: Any) -> Any:
    own = jnp.result_type(param)
    if jnp.issubdtype(own, jnp.inexact):
        zeros = _compat.zeros_like(param)
        if dtype is None or jnp.issubdtype(own, jnp.complexfloating):
            return zeros
        return zeros.astype(dtype)
    return np.zeros(jnp.shape(param), jax.dtypes.float0)


def _zero_like(struct: Any, param: Any) -> Any:
    # An update is laid out like its parameter; on an Explicit mesh that is part of its type.
    if jnp.shape(param) == struct.shape and struct.dtype != jax.dtypes.float0:
        return _compat.zeros_like(param).astype(struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype)


def _keep_before(old: Any, new: Any) -> Any:
    """Take over ``new`` from the window on; what a chain has before it keeps its old state."""
    if type(old) is not tuple:
        return new
    holds = [any(isinstance(p, AccumulateState) for p in _parts(part)) for part in old]
    if not any(holds):
        return new
    at = holds.index(True)
    return (*old[:at], _keep_before(old[at], new[at]), *new[at + 1 :])


def _parts(state: Any) -> list[Any]:
    return jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, AccumulateState))
