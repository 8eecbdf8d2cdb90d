"""Gradient accumulation across steps: one optimizer update for a window of micro-batches.

A window is ``every`` micro-batches. Their gradients g_i, with weights w_i, make one gradient::

    reduce="mean":  sum(w_i * g_i) / sum(w_i)        reduce="sum":  sum(w_i * g_i)

which the inner transformation sees once, at the window's last call. On the other calls the
emitted updates are zeros and the inner state rests. A mean is kept as a running mean, so that it is
finite wherever the gradients are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax import _compat
from boostax._info import TransformInfo, exchanged_axes, info_of, walk, with_info
from boostax.parallel.reduce import Devices, Reduce, any_device
from boostax.updates._accumulate_checks import (
    averaged_values,
    check_choice,
    check_every,
    check_inner,
    check_no_trials,
    check_sums,
    extra_templates,
    is_float0,
    is_inexact,
    one_name,
    takes,
)
from boostax.updates._accumulate_leaves import (
    all_finite,
    as_dtype_of,
    in_dtype,
    mean_of,
    skip_where,
    sum_dtype,
    unshared,
    window_size,
    zero_extra,
    zero_sum,
    zero_update,
)
from boostax.updates._window import AccumulateState, check_window_size, flush, has_updated

__all__ = ["AccumulateState", "accumulate", "flush", "has_updated"]

_POLICIES = ("skip_micro", "skip_window", "off")
Every = int | Callable[[Any], Any]


def accumulate(
    inner: optax.GradientTransformation,
    every: Every | None = None,
    *,
    reduce: Literal["mean", "sum"] | None = None,
    nonfinite: Literal["skip_micro", "skip_window", "off"] = "skip_micro",
    accumulator_dtype: Any = jnp.float32,
    average_extra: Sequence[str] | Mapping[str, Any] = (),
    every_k_schedule: Every | None = None,
    use_grad_mean: bool | None = None,
    should_skip_update_fn: Callable[..., Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Run ``inner`` once per window of ``every`` micro-batches, on their combined gradient.

    The window's gradient is :math:`\sum_i w_i g_i / \sum_i w_i` (``reduce="mean"``) or
    :math:`\sum_i w_i g_i` (``"sum"``). On finite gradients with weights of 1 the result equals
    ``optax.MultiSteps``, whose arguments are understood too.

    A state made with another ``every`` is refused where it is on the host: at a call outside of
    ``jit`` and by :func:`boostax.train_step`. An ``update`` in a ``jit`` of your own can't look, and
    goes on with the new window size; pass such a state through the check once, as by a call
    ``tx.update(grads, state, params)`` outside of ``jit``.

    ``update`` takes these keyword arguments beside those that ``inner`` wants:

    - ``weight``: scalar >= 0, the micro-batch's weight (number of examples or tokens that its mean
      loss is over). Default 1. A micro-batch of weight 0 adds nothing, whatever it holds; a window
      whose weights add up to 0, NaN or inf is dropped. ``inner`` gets the window's total.
    - ``finite``: bool scalar, a decision on this micro-batch taken elsewhere (for all devices
      together, say); it replaces the check of the gradients and sums. Default: they are checked.

    Around an exchange between devices (:func:`boostax.adasum`) all devices leave a micro-batch out
    that is bad on one of them, and drop a window that has no weight on any.

    Args:
      inner: the transformation that runs once a window. It sees gradients, and parameters, in
        ``accumulator_dtype``; the emitted updates have the incoming gradients' dtypes.
      every: micro-batches per window: an int >= 1 (numpy ints too), or a function of the number of
        updates so far (int32 scalar, traced) that returns one.
      reduce: ``"mean"`` (the default) or ``"sum"``.
      nonfinite: what to do about a micro-batch with NaN or inf, with a weight that is NaN, inf or
        negative, or that makes a sum overflow. ``"skip_micro"`` (default) leaves it
        out, and the window waits for ``every`` good ones. ``"skip_window"`` drops the window that it
        is in, without moving the boundary. ``"off"`` does not look.
      accumulator_dtype: dtype of the sums and of what ``inner`` sees. Default float32; float64
        leaves then stay float64.
      average_extra: extra arguments of ``update`` that ``inner`` gets as their weighted mean over the
        window. Names of float scalars, or a mapping from name to an example pytree (arrays or
        ``ShapeDtypeStruct``). The ``stats`` of :func:`boostax.thor` are averaged in any case. The
        other extra arguments are those of the window's last call.
      every_k_schedule: ``optax.MultiSteps``'s name for ``every``.
      use_grad_mean: ``optax.MultiSteps``'s form of ``reduce``: True is ``"mean"``, False ``"sum"``.
      should_skip_update_fn: as for ``optax.MultiSteps``, ``(updates, update_count, params) ->
        (bool scalar, skip_state)``: True leaves the micro-batch out, beside the policy.

    Returns:
      A transformation with an :class:`AccumulateState`.

    Raises:
      TypeError: an argument has a wrong type, or both names of one argument are given.
      ValueError: ``every`` is less than 1, or a name is unknown.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(())
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.float32(6.0), state, params, weight=1)
      >>> updates, state = tx.update(jnp.float32(2.0), state, params, weight=3)
      >>> float(updates), int(state.micro_steps), int(state.updates)
      (-3.0, 2, 1)

    Source:
      The interface follows ``optax.MultiSteps`` (DeepMind et al., The DeepMind JAX Ecosystem, 2020).

    When not to use:
      If the micro-batches are at hand together, :func:`boostax.microbatch` inside one step is
      cheaper. If the whole batch fits into memory, use it whole: that is the fastest.
    """
    inner = check_inner(inner)
    every = one_name("every", every, "every_k_schedule", every_k_schedule)
    if use_grad_mean is not None and not isinstance(use_grad_mean, (bool, np.bool_)):
        raise TypeError(f"use_grad_mean must be a bool, got {use_grad_mean!r}")
    if reduce is not None and use_grad_mean is not None:
        raise TypeError("reduce and use_grad_mean mean the same; give one of them")
    if reduce is None:
        reduce = "sum" if use_grad_mean is not None and not use_grad_mean else "mean"
    every = check_every(every)
    check_no_trials(inner, every)
    check_choice("reduce", reduce, ("mean", "sum"))
    check_choice("nonfinite", nonfinite, _POLICIES)
    dtype = jax.dtypes.canonicalize_dtype(accumulator_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"accumulator_dtype must be a floating dtype, got {dtype}")
    # Those that a part of inner declares it exchanges between devices itself, when it needs them.
    declared = {k: v for info in walk(inner) for k, v in info.averaged.items()}
    templates = extra_templates(average_extra, declared)
    takes_weight = takes(inner.update, "weight")
    single = not callable(every) and every == 1
    # If the devices disagreed on a window's end, some would wait for ever for the others.
    inner_axes = exchanged_axes(inner)
    # A train step may ask for the mean over devices. What exchanges less than all leaves goes first.
    described = info_of(inner)
    hands_on = described is not None and described.exchanges
    fixed_size = 0 if callable(every) else int(every or 0)

    def init(params: Any) -> Any:
        sums = jax.tree.map(lambda leaf: zero_sum(leaf, dtype), params)
        zero, no = lambda: jnp.zeros((), jnp.int32), lambda: jnp.zeros((), jnp.bool_)
        skip_state = ()
        if should_skip_update_fn is not None:
            nothing = jax.tree.map(jnp.zeros_like, params)
            skip_state = should_skip_update_fn(nothing, zero(), params)[1]
        seen = in_dtype(params, dtype)
        return AccumulateState(
            *(zero() for _ in range(5)),
            emitted=no(),
            weight=None if single else jnp.zeros((), jnp.float32),
            spoiled=no() if nonfinite == "skip_window" and not single else None,
            grads=None if single else sums,
            extra={} if single else {n: jax.tree.map(zero_extra, t) for n, t in templates.items()},
            skip_state=skip_state,
            every=jnp.asarray(fixed_size, jnp.int32),
            inner_state=unshared(inner.init(seen), seen),
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        weight: Any = None,
        finite: Any = None,
        boostax_flush: bool = False,
        boostax_exchange: Reduce | None = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        check_window_size(state, fixed_size)
        axes = inner_axes if boostax_exchange is None else boostax_exchange.axes
        anywhere = lambda flag: any_device(flag, axes) if axes else flag
        grads, treedef = jax.tree.flatten(updates)
        if boostax_flush and single:
            return jax.tree.map(zero_update, updates), state
        # Declared ones that are missing are not wanted by inner at this window, or it will say so.
        missing = set() if boostax_flush else {name for name in declared if name not in extra}
        asked = {name: t for name, t in templates.items() if name not in missing}
        averaged = {} if boostax_flush else averaged_values(asked, extra)
        sums: list[Any] = [None] * len(grads) if single else treedef.flatten_up_to(state.grads)
        has_sum = [is_inexact(g) for g in grads]
        if not single:
            check_sums(updates, sums)
        skip_state = state.skip_state
        if weight is not None:
            weight = jnp.asarray(weight, jnp.float32)

        mean = reduce == "mean"
        # A window of one needs no sum, and its mean no weight: w * g / w is g.
        scaled = weight is not None and not mean
        gathered: Any = True if single else state.weight > 0
        new_dtypes = [
            None if not ok else sum_dtype(g, dtype) if single else s.dtype
            for s, g, ok in zip(sums, grads, has_sum, strict=True)
        ]

        def summed(old: Any, value: Any, to: Any) -> Any:
            new = value.astype(to)
            if scaled:
                new = new * jnp.asarray(weight, new.real.dtype)
            return new if single else jnp.where(gathered, old + new, new)

        # Which micro-batches are bad, and which count: Python bools wherever that is known.
        bad = left_out = False
        if not boostax_flush:
            if nonfinite != "off":
                # A finite gradient can still make a sum overflow. A mean can't.
                each = zip(sums, grads, new_dtypes, strict=True)
                values = [g if mean else summed(s, g, to) for s, g, to in each if to is not None]
                bad = jnp.logical_not(all_finite((values, averaged)) if finite is None else finite)
                if weight is not None:
                    total = weight if single else state.weight + weight
                    bad = (weight != 0) & (bad | ~jnp.isfinite(total) | (weight < 0))
                bad = anywhere(bad)
            if should_skip_update_fn is not None:
                left_out, skip_state = should_skip_update_fn(updates, state.updates, params)
                left_out = anywhere(jnp.asarray(left_out, jnp.bool_))
        used: Any = not boostax_flush
        counted: Any = not boostax_flush
        if bad is not False or left_out is not False:
            used = jnp.logical_not(jnp.logical_or(bad, left_out))
            counted = used if nonfinite == "skip_micro" else jnp.logical_not(left_out)

        # Where that takes the window.
        one = jnp.float32(1.0) if weight is None else weight
        added = one if used is True else jnp.where(used, one, 0.0)
        total_weight = added if single else state.weight + added
        if weight is not None and not boostax_flush:
            used = used & (weight != 0) & jnp.isfinite(total_weight)
        if boostax_flush:
            total_weight, position = state.weight, state.position
            boundary = position > 0
        elif single:
            position, boundary = state.position, counted
        else:
            position = state.position + jnp.asarray(counted, jnp.int32)
            boundary = position >= window_size(every, state.updates)
        spoiled = None
        viable: Any = True
        if weight is not None or boostax_flush:
            common = jax.lax.psum(total_weight, axes) if axes else total_weight
            viable = (common > 0) & jnp.isfinite(common)
        if nonfinite == "skip_window":
            spoiled = bad if single else state.spoiled | bad
            viable = viable & ~spoiled
        emit = boundary if viable is True else boundary & viable
        drop = False if viable is True else boundary & ~viable

        # The sums stay outside of the cond, where XLA updates them in place. For the same reason a
        # closed window's sums are not zeroed but overwritten by what the next window gathers first.
        def add(old: Any, value: Any, to: Any, as_mean: bool) -> Any:
            if boostax_flush:
                new = old
            elif single or not as_mean:
                new = summed(old, value, to)
            else:
                value = value.astype(to)
                new = mean_of(old, value, state.weight, weight, total_weight)
                new = jnp.where(gathered, new, value)
            if used is not True and not boostax_flush:
                new = jnp.where(used, new, jnp.zeros_like(new) if single else old)
            return new if drop is False or single else jnp.where(drop, jnp.zeros_like(new), new)

        new_sums = [
            old if to is None else add(old, g, to, mean)
            for old, g, to in zip(sums, grads, new_dtypes, strict=True)
        ]

        def gather(name: str, old: Any) -> Any:
            if name in missing:
                return old
            new = averaged.get(name, old)
            run = lambda: jax.tree.map(lambda o, v: add(o, v, o.dtype, True), old, new)
            # What inner does not want at this window stays out of it.
            due = extra.get("boostax_due", True) if name in declared else True
            return _compat.cond(due, run, lambda: old)

        new_extra = {name: gather(name, old) for name, old in state.extra.items()}

        def close() -> Any:
            passed = dict(averaged if single else new_extra)
            passed = {name: value for name, value in passed.items() if name not in missing}
            if axes:
                common = {k: v for k, v in passed.items() if k not in declared}
                passed |= Reduce(axes)(common, total_weight)
            if (devices := extra.get("boostax_devices")) is not None:
                passed["boostax_devices"] = Devices(devices.axes, total_weight)
            seen = [s if ok else g for s, g, ok in zip(new_sums, grads, has_sum, strict=True)]
            if axes and not single and (weight is not None or boostax_flush):
                # Others gathered something; this device may have nothing but what it had before.
                some = total_weight > 0
                seen = [
                    jnp.where(some, s, jnp.zeros_like(s)) if ok else s
                    for s, ok in zip(seen, has_sum, strict=True)
                ]
            seen = treedef.unflatten(seen)
            given_weight = total_weight
            if boostax_exchange is not None:
                given_weight = jax.lax.psum(total_weight, axes)
                exchange = boostax_exchange if mean else Reduce(axes, "sum")
                if hands_on:
                    passed["boostax_exchange"] = functools.partial(exchange, weight=total_weight)
                else:
                    seen = exchange(seen, total_weight)
            if weight is not None or (boostax_flush and takes_weight):
                passed["weight"] = given_weight
            out, inner_state = inner.update(
                seen,
                state.inner_state,
                None if params is None else in_dtype(params, dtype),
                **{**extra, **passed},
            )
            out = zip(treedef.flatten_up_to(out), grads, strict=True)
            emitted = [as_dtype_of(u, g) for u, g in out if not is_float0(g)]
            return emitted, jax.tree.map(as_dtype_of, inner_state, state.inner_state)

        def rest() -> Any:
            zeros = [zero_update(g) for g in grads if not is_float0(g)]
            return zeros, skip_where(drop, state.inner_state)

        emitted, inner_state = close() if emit is True else _compat.cond(emit, close, rest)
        supply = iter(emitted)
        out = treedef.unflatten([g if is_float0(g) else next(supply) for g in grads])
        clear = lambda value: jnp.where(boundary, jnp.zeros_like(value), value)
        calls = state.micro_steps if boostax_flush else state.micro_steps + 1
        missed = (
            jnp.logical_or(bad, left_out) if bad is not False or left_out is not False else None
        )
        return out, AccumulateState(
            micro_steps=calls,
            updates=state.updates + (1 if emit is True else emit.astype(jnp.int32)),
            position=position if single else clear(position),
            skipped_micro=state.skipped_micro + (0 if missed is None else missed.astype(jnp.int32)),
            skipped_windows=state.skipped_windows
            + (0 if drop is False else drop.astype(jnp.int32)),
            emitted=jnp.where(boundary, emit, state.emitted & bool(boostax_flush)),
            weight=None if single else clear(total_weight),
            spoiled=None if state.spoiled is None else clear(spoiled),
            grads=None if single else treedef.unflatten(new_sums),
            extra=new_extra,
            skip_state=skip_state,
            every=state.every,
            inner_state=inner_state,
        )

    settings = {
        "every": every,
        "reduce": reduce,
        "nonfinite": nonfinite,
        "accumulator_dtype": str(dtype),
        "average_extra": tuple(templates),
        "skips_by_function": should_skip_update_fn is not None,
    }
    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo(
            "accumulate",
            settings,
            inner=inner,
            check=lambda state: check_window_size(state, fixed_size),
            exchanges=True,
        ),
    )
