"""Local steps: each replica trains alone for a while, then what it has moved is exchanged.

With the common parameters p, an inner optimizer and the replica's offset o::

    every call:            g at p + o,  o <- o + inner(g)
    every H-th call also:  D = exchange(o),  p <- p + D  or  p + outer(-D),  o <- 0

With the mean, AdamW inside and Nesterov momentum outside this is DiLoCo.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax import _compat
from boostax._info import TransformInfo, exchanged_axes, with_info
from boostax.updates._skip import find_state

__all__ = ["LocalStepsState", "local_params", "local_steps"]


class LocalStepsState(NamedTuple):
    """The state of :func:`local_steps`. A step that is skipped outside leaves it as it is.

    Attributes:
      step: int32 scalar, the local steps so far: the same on all devices.
      inner_state: the inner optimizer's state, each replica's own.
      outer_state: the states of the exchange and of the outer optimizer (``()`` without one).
      offset: how far this replica is from the common parameters; their structure, in float32 or
        better, and ``optax.MaskedNode`` for leaves that are not floating.
    """

    step: jax.Array
    inner_state: Any
    outer_state: tuple[Any, Any]
    offset: Any


def local_steps(
    inner: optax.GradientTransformation,
    every: int,
    exchange: optax.GradientTransformation,
    *,
    outer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Let each replica take ``every`` steps of its own, then exchange what they have moved.

    The parameters that ``update`` is given, and that its updates are applied to, are the last
    exchanged ones: the same on all devices. Where a replica stands meanwhile is
    :func:`local_params`, and there its gradient must be taken. With the offset :math:`o_i` of
    replica ``i``, each call does

    .. math:: o_i \leftarrow o_i + \mathrm{inner}(g_i, p + o_i)

    and every ``every``-th call, which alone sends anything,

    .. math::
        D = \mathrm{exchange}(o_1, \dots, o_n), \qquad
        u = D \;\text{ or }\; \mathrm{outer}(-D), \qquad o_i \leftarrow 0.

    On the other calls the emitted updates are zeros.

    ``update`` runs inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with the exchange's axis.
    Its extra arguments go to ``inner``; all replicas count the same in the exchange. A replica's
    offset and its inner state are its own: give them a leading axis that is split over the
    devices. Skip a step on all devices, or on none.

    Args:
      inner: the optimizer of a replica, such as ``optax.adamw``.
      every: local steps between exchanges: an int >= 1. With 1 it is the exchange on updates,
        behind the optimizer.
      exchange: :func:`boostax.adasum` or :func:`boostax.all_reduce`, say.
      outer: an optimizer of the common parameters, which is given ``-D`` for a gradient. DiLoCo's is
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. Default None: ``D`` is the update.

    Returns:
      A transformation with a :class:`LocalStepsState`.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: ``every`` is less than 1; ``inner`` exchanges between devices itself; at update,
        ``params`` is missing.

    Example:
      Two replicas that move by -1 and by -3 a step.

      >>> import boostax, jax, jax.numpy as jnp, optax
      >>> tx = local_steps(optax.sgd(1.0), 2, boostax.all_reduce("devices"))
      >>> def two_steps(gradient, params):
      ...     state = tx.init(params)
      ...     first, state = tx.update(gradient, state, params)
      ...     at = local_params(state, params)
      ...     second, state = tx.update(gradient, state, params)
      ...     return first, at, second
      >>> run = jax.vmap(two_steps, in_axes=(0, None), axis_name="devices")
      >>> [x.tolist() for x in run(jnp.array([1.0, 3.0]), jnp.float32(10))]
      [[0.0, 0.0], [9.0, 7.0], [-4.0, -4.0]]

    Source:
      A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam
      and J. Shen, "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

    When not to use:
      Where the exchange is not what limits you: the replicas drift apart between exchanges, and an
      exchange at every step follows the gradient of the whole batch.
    """
    for name, value in (("inner", inner), ("exchange", exchange), ("outer", outer)):
        if name == "outer" and value is None:
            continue
        if not isinstance(value, optax.GradientTransformation):
            raise TypeError(
                f"local_steps: {name} must be an optax.GradientTransformation, got {value!r}"
            )
    if isinstance(every, (bool, np.bool_)) or not isinstance(every, (int, np.integer)):
        raise TypeError(f"local_steps: every must be an int, got {every!r}")
    if every < 1:
        raise ValueError(f"local_steps: every must be at least 1, got {every}")
    if exchanged_axes(inner):
        raise ValueError(
            f"local_steps: inner exchanges over {list(exchanged_axes(inner))} at every step; give the "
            "exchange as exchange= alone"
        )
    own = optax.with_extra_args_support(inner)
    send = optax.with_extra_args_support(exchange)
    common = None if outer is None else optax.with_extra_args_support(outer)

    def init(params: Any) -> LocalStepsState:
        offset = jax.tree.map(_zero_offset, params)
        seen = jax.tree.map(_where_floating, params, offset, is_leaf=_is_masked)
        return LocalStepsState(
            step=jnp.zeros((), jnp.int32),
            inner_state=own.init(params),
            outer_state=(send.init(offset), () if common is None else common.init(seen)),
            offset=offset,
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, LocalStepsState]:
        if params is None:
            raise ValueError("local_steps: params are needed; call tx.update(grads, state, params)")
        at = jax.tree.map(_moved, params, state.offset, is_leaf=_is_masked)
        moves, inner_state = own.update(updates, state.inner_state, at, **extra_args)
        offset = jax.tree.map(_added, state.offset, moves, is_leaf=_is_masked)
        step = state.step + 1

        def close() -> Any:
            seen = jax.tree.map(_where_floating, params, offset, is_leaf=_is_masked)
            moved, send_state = send.update(offset, state.outer_state[0], seen)
            outer_state = ()
            if common is not None:
                against = jax.tree.map(jnp.negative, moved)
                moved, outer_state = common.update(against, state.outer_state[1], seen)
            emitted = jax.tree.map(_emitted, moves, moved, is_leaf=_is_masked)
            return emitted, (send_state, outer_state), jax.tree.map(_compat.zeros_like, offset)

        def rest() -> Any:
            emitted = jax.tree.map(
                lambda move, own: move if _is_masked(own) else _compat.zeros_like(move),
                moves,
                offset,
                is_leaf=_is_masked,
            )
            return emitted, state.outer_state, offset

        emitted, outer_state, offset = (
            close() if every == 1 else _compat.cond(step % int(every) == 0, close, rest)
        )
        return emitted, LocalStepsState(step, inner_state, outer_state, offset)

    settings = {"every": int(every), "outer": outer is not None}
    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo("local_steps", settings, inner=inner, axes=exchanged_axes(exchange)),
    )


def local_params(opt_state: Any, params: Any) -> Any:
    """Return where this replica stands: the parameters that its gradient must be taken at.

    Args:
      opt_state: an optimizer state with a :class:`LocalStepsState` anywhere in it.
      params: the parameters that the optimizer's updates are applied to.

    Returns:
      ``params`` plus the replica's offset, in the parameters' structure and dtypes.

    Raises:
      ValueError: there is no :class:`LocalStepsState` in ``opt_state``.

    Example:
      >>> import boostax, jax.numpy as jnp, optax
      >>> tx = local_steps(optax.sgd(1.0), 2, boostax.all_reduce("devices"))
      >>> params = jnp.float32(10)
      >>> _, state = tx.update(jnp.float32(3), tx.init(params), params)
      >>> float(local_params(state, params))
      7.0
    """
    found = find_state(opt_state, LocalStepsState)
    if found is None:
        raise ValueError(
            "local_params: there is no LocalStepsState in this state; pass the optimizer state of a "
            "transformation that holds boostax.local_steps"
        )
    return jax.tree.map(_moved, params, found.offset, is_leaf=_is_masked)


def _is_masked(part: Any) -> bool:
    return isinstance(part, optax.MaskedNode)


def _zero_offset(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return optax.MaskedNode()
    return jnp.zeros_like(leaf, dtype=jnp.promote_types(dtype, jnp.float32))


def _where_floating(param: Any, offset: Any) -> Any:
    # In the offset's dtype, which is that of what is exchanged: the outer state keeps it.
    return offset if _is_masked(offset) else param.astype(offset.dtype)


def _moved(param: Any, offset: Any) -> Any:
    return param if _is_masked(offset) else (param + offset).astype(param.dtype)


def _added(offset: Any, move: Any) -> Any:
    return offset if _is_masked(offset) else offset + move.astype(offset.dtype)


def _emitted(move: Any, moved: Any) -> Any:
    return move if _is_masked(moved) else moved.astype(move.dtype)
