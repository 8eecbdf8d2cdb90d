"""Loss, gradients and the layers' statistics from one forward and backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from boostax.gradients._assemble import to_factors
from boostax.gradients._blocks import Factors
from boostax.gradients._plan import plan_of
from boostax.gradients._watch import Watch
from boostax.gradients.value_and_grad import trained_leaves
from boostax.training.contract import CanonicalLoss, LossAux, weight_of

if TYPE_CHECKING:
    from boostax.gradients.layers import CapturedLayers

__all__ = ["gradient_errors", "value_grad_and_factors"]


def value_grad_and_factors(
    loss: CanonicalLoss, layers: CapturedLayers, *, trainable: Any | None = None
) -> Callable[..., tuple[tuple[jax.Array, LossAux], Any, dict[str, Factors]]]:
    """Return a function that gives loss, gradients and factors from one forward and backward pass.

    Args:
      loss: ``(params, model_state, batch, rng) -> (loss, LossAux)``.
      layers: the captured layers.
      trainable: as for :func:`~boostax.gradients.value_and_grad.value_and_grad`; layers whose kernel
        is not trained are not watched, and their factors are zeros.

    Returns:
      ``fn(params, model_state, batch, rng, rest=None) -> ((loss, LossAux), grads, factors)``. ``rest``
      is a bool array with one entry a block, True for those whose statistics are not wanted.
    """

    def fn(params: Any, model_state: Any, batch: Any, rng: Any, rest: Any = None) -> Any:
        plan = plan_of(layers, loss, params, model_state, batch, rng)
        leaves, treedef = jax.tree.flatten(params)
        flags = trained_leaves(params, trainable)
        trained_paths = {p for p, flag in zip(layers.paths, flags, strict=True) if flag}
        parts = [part for part in plan.parts if part.layer in trained_paths]
        watch = Watch(plan.found.sites, {part.place: part.reading for part in parts})
        others = jax.tree.leaves((model_state, batch, rng))
        active = {}
        if rest is not None:
            order = {block.kernel: i for i, block in enumerate(layers.blocks)}
            active = {part.place: jnp.logical_not(rest[order[part.layer]]) for part in parts}

        def run(trained: list[Any], emitted: Any) -> tuple[jax.Array, LossAux]:
            supply = iter(trained)
            merged = [next(supply) if f else x for f, x in zip(flags, leaves, strict=True)]
            outs = watch.run(plan.jaxpr, [*merged, *others], emitted, active)
            return plan.out_tree.unflatten(outs)

        def with_sampled(trained: list[Any], emitted: Any) -> Any:
            value, aux = run(trained, emitted)
            key = jax.random.fold_in(_key(rng), _DRAW)
            sampled = _predictive(aux).sampled_loss(key, weight_of(aux, batch))
            return (value, sampled), aux

        trained = [leaf for flag, leaf in zip(flags, leaves, strict=True) if flag]
        if layers.fisher == "true":
            (value, sampled), pull, aux = jax.vjp(
                with_sampled, trained, watch.zeros(), has_aux=True
            )
            grads, _ = pull((jnp.ones_like(value), jnp.zeros_like(sampled)))
            _, read = pull((jnp.zeros_like(value), jnp.ones_like(sampled)))
        else:
            (value, aux), (grads, read) = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(
                trained, watch.zeros()
            )
        supply = iter(grads)
        filled = [
            next(supply) if f else jnp.zeros_like(x) for f, x in zip(flags, leaves, strict=True)
        ]
        weight = weight_of(aux, batch)
        factors = to_factors(layers.blocks, parts, read, weight, layers.mode)
        return (value, aux), treedef.unflatten(filled), factors

    return fn


def gradient_errors(
    loss: CanonicalLoss,
    layers: CapturedLayers,
    params: Any,
    model_state: Any,
    batch: Any,
    rng: Any,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the error of ``sum a^T g`` against the gradient, and the dtype's, by the kernel's path."""
    plan = plan_of(layers, loss, params, model_state, batch, rng)
    leaves = jax.tree.leaves(params)
    others = jax.tree.leaves((model_state, batch, rng))
    readings = {
        part.place: dataclasses.replace(part.reading, what="gradient", weighted=False)
        for part in plan.parts
    }
    watch = Watch(plan.found.sites, readings)

    def run(leaves: list[Any], emitted: Any) -> Any:
        return plan.out_tree.unflatten(watch.run(plan.jaxpr, [*leaves, *others], emitted))

    @jax.jit
    def both(leaves: list[Any], emitted: Any) -> Any:
        return jax.grad(run, argnums=(0, 1), has_aux=True, allow_int=True)(leaves, emitted)[0]

    grads, read = both(leaves, watch.zeros())
    by_path = dict(zip(layers.paths, grads, strict=True))
    numbers = {path: i for i, path in enumerate(layers.paths)}
    errors, eps = {}, {}
    for block in plan.blocks:
        if any(numbers[path] in plan.found.penalised for path in block.leaves):
            continue
        expected = block.join(*(jnp.asarray(by_path[path], jnp.float32) for path in block.leaves))
        total = jnp.zeros_like(expected)
        for part in plan.parts:
            if part.layer == block.kernel:
                own = read[part.place][0]
                own = own.reshape(block.groups, *own.shape[-2:])
                total = total + (jnp.swapaxes(own, 1, 2) if part.flipped else own)
        norm = jnp.linalg.norm(expected)
        difference = jnp.linalg.norm(total - expected)
        errors[block.kernel] = float(
            jnp.where(norm == 0, difference, difference / jnp.where(norm == 0, 1, norm))
        )
        eps[block.kernel] = max(
            plan.found.sites[p.place].eps for p in plan.parts if p.layer == block.kernel
        )
    return errors, eps


# Folded into the step's key, so that the drawn labels don't repeat the loss's own draws.
_DRAW = 0x7406


def _key(rng: Any) -> Any:
    if rng is None:
        raise ValueError(
            'layers: fisher="true" draws labels and needs a random key; pass rng= (to step.init, '
            "where train_step is used)"
        )
    return rng


def _predictive(aux: LossAux) -> Any:
    if not hasattr(aux.predictive, "sampled_loss"):
        raise ValueError(
            'layers: fisher="true" needs LossAux(predictive=boostax.Categorical(logits)) or '
            f"boostax.Gaussian(mean, scale) from the loss, got {aux.predictive!r}"
        )
    return aux.predictive
