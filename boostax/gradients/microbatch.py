"""Micro-batches inside one step: the gradient of a large batch in the memory of a small one.

The batch is cut into n parts along its leading axis, part i holding every n-th example from the
i-th on, and a scan visits them::

    loss = sum(w_i * loss_i) / sum(w_i)         gradient, metrics: the same

with ``w_i`` the parts' ``LossAux.weight``, by default their size. The compiled step holds one
part's activations and one sum of gradients, whatever n is. A batch whose leading axis is split over
devices stays where it is: each device cuts its own share (if n divides that).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax import _compat
from boostax.gradients.value_and_grad import trained_leaves, value_and_grad
from boostax.training import batch_stats
from boostax.training.contract import (
    CanonicalLoss,
    LossAux,
    batch_sizes,
    canonical_loss,
    weight_of,
)
from boostax.training.contract import batch_parts as parts_of
from boostax.updates._accumulate_leaves import sum_dtype

__all__ = ["microbatch", "microbatched"]


def microbatch(
    loss_fn: Callable[..., Any],
    n: int,
    *,
    has_aux: bool = False,
    stats: str = "per_window",
    batch_norm_momentum: float | None = None,
    accumulator_dtype: Any = jnp.float32,
    gradient_dtype: Any = None,
) -> Callable[..., tuple[tuple[jax.Array, LossAux], Any]]:
    """Return a ``value_and_grad`` of a loss that visits the batch in ``n`` parts.

    Loss, gradients and metrics are means under the parts' weights,
    ``sum(w_i * x_i) / sum(w_i)``, so that the result is that of the whole batch.

    Args:
      loss_fn: ``loss_fn(params, batch, *, model_state, rng) -> loss | (loss, LossAux)`` with the
        loss a mean over the examples it is given.
      n: number of parts, an int >= 1 that divides the batch's leading size. Part i holds every n-th
        example: i, i + n, i + 2n, ... 1 is the plain ``value_and_grad``.
      has_aux: whether ``loss_fn`` returns ``(loss, LossAux)``. Default False.
      stats: what becomes of batch statistics (linen's ``batch_stats``, ``nnx.BatchStat``).
        ``"per_window"`` (default): every part starts from the same ones, and they are pooled as if
        the batch had been whole. ``"per_micro"``: they go from part to part, as if the parts were
        batches of their own.
      batch_norm_momentum: the share of the old value, for ``stats="per_window"``. Default None: read
        from the linen modules that the loss calls.
      accumulator_dtype: dtype of the sums of gradients. Default float32; float64 leaves, losses and
        metrics are then summed in float64.
      gradient_dtype: dtype of the gradients returned. Default None: the parameters' own, as
        ``jax.grad`` gives; ``jnp.float32`` keeps the sums' precision for low-precision parameters.

    Returns:
      ``fn(params, batch, *, model_state=None, rng=None) -> ((loss, LossAux), grads)``. Part i gets
      the key ``fold_in(rng, i)``. ``LossAux.weight`` is the total weight, ``aux`` the last
      part's, ``predictive`` None (unless n is 1). A part of weight 0 adds nothing, whatever its
      loss; if all weights are 0, loss, gradients and metrics are 0.

    Raises:
      TypeError: an argument has a wrong type, or the loss does not fit the contract.
      ValueError: an argument is out of range; when traced: n does not divide the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> loss_fn = lambda w, x: jnp.mean((w * x) ** 2)
      >>> (loss, aux), grad = microbatch(loss_fn, 2)(jnp.float32(1.0), jnp.arange(4.0))
      >>> float(loss), float(grad), float(aux.weight)
      (3.5, 7.0, 4.0)

    Source:
      Gradient accumulation by a scan is folklore; the pooling of variances is Chan, Golub and
      LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.

    When not to use:
      If the whole batch fits into memory: one large batch is faster. If micro-batches arrive one
      call at a time, use :func:`boostax.accumulate`. If a batch norm layer is called twice in one
      forward pass, ``stats="per_window"`` does not give the whole batch's variances.
    """
    if not isinstance(has_aux, bool):
        raise TypeError(f"microbatch: has_aux must be a bool, got {has_aux!r}")
    core = microbatched(
        canonical_loss(loss_fn, has_aux=has_aux),
        n,
        stats=stats,
        momentum=batch_norm_momentum,
        accumulator_dtype=accumulator_dtype,
        gradient_dtype=gradient_dtype,
        batch_parts=parts_of(loss_fn),
    )

    def fn(
        params: Any, batch: Any, *, model_state: Any = None, rng: Any = None
    ) -> tuple[tuple[jax.Array, LossAux], Any]:
        result, grads, _ = core(params, model_state, batch, rng)
        return result, grads

    return fn


def microbatched(
    loss: CanonicalLoss,
    n: int,
    *,
    trainable: Any | None = None,
    stats: str = "per_window",
    momentum: float | None = None,
    momenta: Mapping[str, float] | None = None,
    accumulator_dtype: Any = jnp.float32,
    gradient_dtype: Any = None,
    of_part: Callable[..., Any] | None = None,
    batch_parts: tuple[str, ...] = (),
) -> Callable[..., tuple[tuple[jax.Array, LossAux], Any, Any]]:
    """Return ``fn(params, model_state, batch, rng) -> ((loss, LossAux), grads, more)`` over n parts.

    The core of :func:`microbatch`, for a loss in canonical form.

    Args:
      loss: ``(params, model_state, batch, rng) -> (loss, LossAux)``.
      n: number of parts.
      trainable: pytree of Python bools with the structure of the parameters. The gradients of the
        other leaves are zeros; nothing is computed or kept for them. Default None: all are trained.
      stats: ``"per_window"`` or ``"per_micro"``.
      momentum: one batch-norm momentum (share of the old value) for all layers. Default None: each
        layer's own.
      momenta: momenta by module path, from :func:`boostax.training.batch_stats.collect_momenta`;
        those of linen modules that the loss calls are found without it. Default None.
      accumulator_dtype: dtype of the sums.
      gradient_dtype: dtype of the result; None: the parameters'.
      of_part: what computes a part, ``(params, model_state, batch, rng) -> ((loss, LossAux), grads,
        more)``; ``more`` are float arrays that are averaged by weight as metrics are. Default None:
        the gradients alone, and ``more`` is empty.
      batch_parts: parts of a batch that may have leading sizes of their own. Default ().
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"microbatch: n must be an int >= 1, got {n!r}")
    if n < 1:
        raise ValueError(f"microbatch: n must be an int >= 1, got {n}")
    if stats not in ("per_window", "per_micro"):
        raise ValueError(f"microbatch: stats must be 'per_window' or 'per_micro', got {stats!r}")
    for name, dtype in (
        ("accumulator_dtype", accumulator_dtype),
        ("gradient_dtype", gradient_dtype),
    ):
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"microbatch: {name} must be a floating dtype, got {dtype!r}")
    if of_part is None:
        gradients = value_and_grad(loss, trainable=trainable)
        of_part = lambda *given: (*gradients(*given), ())
    # What linen modules were seen to use; kept, because a cached trace calls no modules.
    seen: dict[str, float] = {}

    def fn(
        params: Any, model_state: Any, batch: Any, rng: Any
    ) -> tuple[tuple[jax.Array, LossAux], Any, Any]:
        leaves, treedef = jax.tree.flatten(params)
        trained = trained_leaves(params, trainable)
        if n == 1:
            (value, aux), grads, more = of_part(params, model_state, batch, rng)
            if gradient_dtype is not None:
                grads = treedef.unflatten(
                    [
                        g.astype(sum_dtype(g, gradient_dtype)) if flag else g
                        for g, flag in zip(jax.tree.leaves(grads), trained, strict=True)
                    ]
                )
            return (value, aux.replace(weight=weight_of(aux, batch))), grads, more
        parts = _split(batch, n, batch_parts)
        first = jax.eval_shape(lambda: _part(parts, 0))
        more_shape = jax.eval_shape(of_part, params, model_state, first, _key(rng, 0))[2]
        with batch_stats.recording_momenta() as found:
            # A new function each time, or JAX would answer from its cache and call no module.
            value_shape, shapes = jax.eval_shape(
                lambda *a: loss(*a), params, model_state, first, _key(rng, 0)
            )
        seen.update(found)
        layers = {**seen, **(momenta or {})}
        pooled = stats == "per_window" and bool(batch_stats.pair_paths(model_state))
        if pooled and momentum is None and batch_stats.unknown_momenta(model_state, layers):
            # A jit inside the loss that was traced before calls no module: look again without it.
            seen.update(batch_stats.collect_momenta(loss, params, model_state, first, _key(rng, 0)))
            layers = {**seen, **(momenta or {})}
        per_pair = batch_stats.momenta_for(model_state, layers, momentum) if pooled else ()

        def visit(carry: _Sums, index: jax.Array) -> tuple[_Sums, None]:
            part, start = _part(parts, index), carry.model_state
            (value, aux), grads, more = of_part(params, start, part, _key(rng, index))
            weight = weight_of(aux, part)
            used: Any = True if aux.weight is None else weight != 0

            def add(total: jax.Array, term: Any) -> jax.Array:
                scaled = jnp.asarray(term).astype(total.dtype) * weight.astype(total.real.dtype)
                return total + (scaled if used is True else jnp.where(used, scaled, 0))

            new_state = _merged(start, aux.model_state)
            window = carry.window
            if pooled:
                window = batch_stats.add_micro(window, start, new_state, weight, used)
                new_state = batch_stats.thread(start, new_state, used)
            elif used is not True and new_state is not start:
                new_state = jax.tree.map(
                    lambda new, old: jnp.where(used, new, old), new_state, start
                )
            kept = [g for g, flag in zip(jax.tree.leaves(grads), trained, strict=True) if flag]
            return _Sums(
                weight=carry.weight + weight,
                loss=add(carry.loss, value),
                metrics={name: add(carry.metrics[name], m) for name, m in aux.metrics.items()},
                grads=[add(total, g) for total, g in zip(carry.grads, kept, strict=True)],
                more=jax.tree.map(add, carry.more, more),
                model_state=new_state,
                window=window,
                aux=aux.aux,
            ), None

        sums = _Sums(
            weight=jnp.zeros((), jnp.float32),
            loss=_scalar_sum(value_shape),
            metrics={name: _scalar_sum(m) for name, m in shapes.metrics.items()},
            grads=[
                jnp.zeros_like(leaf, dtype=sum_dtype(leaf, accumulator_dtype))
                for leaf, flag in zip(leaves, trained, strict=True)
                if flag
            ],
            more=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), more_shape),
            model_state=jax.tree.map(jnp.asarray, model_state),
            window=batch_stats.init_window(model_state) if pooled else None,
            aux=jax.tree.map(_compat.zeros_of, shapes.aux),
        )
        indices = jnp.arange(n, dtype=jnp.int32)
        sums = _compat.as_carry(lambda carry: visit(carry, indices[0])[0], sums)
        sums, _ = jax.lax.scan(visit, sums, indices)

        # Where all weights are 0 the sums are 0 as well.
        total = jnp.where(sums.weight == 0, 1.0, sums.weight)
        mean = lambda value: value / total.astype(value.real.dtype)
        supply = iter(sums.grads)
        grads = [
            mean(next(supply)).astype(_result_dtype(leaf, gradient_dtype))
            if flag
            else jnp.zeros_like(leaf, dtype=_zero_dtype(leaf, gradient_dtype))
            for leaf, flag in zip(leaves, trained, strict=True)
        ]
        state = sums.model_state
        if pooled:
            state = batch_stats.close_window(sums.window, state, per_pair)
        aux = LossAux(
            model_state=None if shapes.model_state is None else state,
            metrics={name: mean(value) for name, value in sums.metrics.items()},
            weight=sums.weight,
            aux=sums.aux,
        )
        return (mean(sums.loss), aux), treedef.unflatten(grads), jax.tree.map(mean, sums.more)

    return fn


class _Sums(NamedTuple):
    """What the scan carries."""

    weight: jax.Array
    loss: jax.Array
    metrics: dict[str, jax.Array]
    grads: list[jax.Array]
    more: Any
    model_state: Any
    window: Any
    aux: Any


def _split(batch: Any, n: int, parts: tuple[str, ...]) -> Any:
    for size in batch_sizes(batch, parts):
        if size % n:
            raise ValueError(
                f"microbatch: the batch's leading size {size} can't be cut into n={n} equal parts; "
                f"choose an n that divides it, or drop {size % n} examples"
            )

    # Contiguous parts would each lie on a few of the devices that share the batch.
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf).reshape((-1, n, *jnp.shape(leaf)[1:])), batch
    )


def _part(parts: Any, index: Any) -> Any:
    # Taken in the loop: scanned over, the parts would be a copy of the batch in another order.
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), parts
    )


def _key(rng: Any, index: Any) -> Any:
    return None if rng is None else jax.random.fold_in(rng, index)


def _merged(start: Any, new: Any) -> Any:
    """Put the collections that the loss returned over those that it started from."""
    if new is None:
        return start
    if isinstance(start, dict) and isinstance(new, dict):
        new = {**start, **new}
    if jax.tree.structure(new) != jax.tree.structure(start):
        raise ValueError(
            "microbatch: LossAux.model_state has another structure than the model_state that was "
            f"passed in: got {jax.tree.structure(new)}, expected {jax.tree.structure(start)}; pass "
            "model_state= with all the collections that the loss changes"
        )
    return jax.tree.map(lambda after, before: jnp.asarray(after, before.dtype), new, start)


def _result_dtype(leaf: Any, dtype: Any) -> Any:
    return jnp.result_type(leaf) if dtype is None else sum_dtype(leaf, dtype)


def _zero_dtype(leaf: Any, dtype: Any) -> Any:
    inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    return _result_dtype(leaf, dtype if inexact else None)


def _scalar_sum(value: Any) -> jax.Array:
    return jnp.zeros((), jnp.promote_types(value.dtype, jnp.float32))
