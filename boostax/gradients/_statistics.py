"""Loss, gradients, the layers' statistics and scales by group, from one forward and backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from boostax.gradients._assemble import to_factors
from boostax.gradients._blocks import Factors
from boostax.gradients._boundary import boundary
from boostax.gradients._grouped import by_label, group_numbers, labels_of
from boostax.gradients._labels import Labels
from boostax.gradients._plan import plan_of, trace_loss
from boostax.gradients._scaled_pass import divided, seed, usable, wide_zeros
from boostax.gradients._watch import Watch
from boostax.gradients.value_and_grad import trained_leaves
from boostax.training.contract import CanonicalLoss, LossAux, weight_of

if TYPE_CHECKING:
    from boostax.gradients.group_loss_scale import GroupLossScale
    from boostax.gradients.layers import CapturedLayers

__all__ = ["gradient_errors", "watched_value_and_grad"]


def watched_value_and_grad(
    loss: CanonicalLoss,
    *,
    layers: CapturedLayers | None = None,
    groups: GroupLossScale | None = None,
    trainable: Any | None = None,
    note: Callable[[Labels], None] = lambda labels: None,
) -> Callable[..., tuple[tuple[jax.Array, LossAux], Any, dict[str, Factors], jax.Array]]:
    """Return a function that gives loss, gradients and what was read, from one pass each way.

    Args:
      loss: ``(params, model_state, batch, rng) -> (loss, LossAux)``.
      layers: the captured layers whose factors are wanted. Default None: no factors.
      groups: the group loss scale. Default None: one scale, or none.
      trainable: as for :func:`~boostax.gradients.value_and_grad.value_and_grad`; layers whose kernel
        is not trained are not watched, and their factors are zeros.
      note: called, when traced, with the labels that ``groups`` led to.

    Returns:
      ``fn(params, model_state, batch, rng, rest=None, scales=None) -> ((loss, LossAux), grads,
      factors, amax)``. ``rest`` is a bool array with one entry a block, True for those whose statistics
      are not wanted. ``scales``: None, the loss scale, or those of the groups; gradients and
      factors are unscaled. ``amax``: what the boundaries between groups emitted.
    """

    def fn(
        params: Any, model_state: Any, batch: Any, rng: Any, rest: Any = None, scales: Any = None
    ) -> Any:
        leaves, treedef = jax.tree.flatten(params)
        flags = trained_leaves(params, trainable)
        others = jax.tree.leaves((model_state, batch, rng))
        if layers is None:
            jaxpr, shape = trace_loss(loss, params, model_state, batch, rng)
            out_tree, sites, parts = jax.tree.structure(shape), {}, []
        else:
            plan = plan_of(layers, loss, params, model_state, batch, rng)
            jaxpr, out_tree, sites = plan.jaxpr, plan.out_tree, plan.found.sites
            trained_paths = {p for p, flag in zip(layers.paths, flags, strict=True) if flag}
            parts = [part for part in plan.parts if part.layer in trained_paths]
        labels, owners = None, [0] * len(leaves)
        if groups is not None:
            labels = labels_of(groups, jaxpr, params, flags, len(others))
            owners = group_numbers(groups, params)
            note(labels)
        scale = _Scales(scales, labels)
        watch = Watch(sites, {part.place: part.reading for part in parts}, labels)
        active = {}
        if rest is not None and layers is not None:
            order = {block.kernel: i for i, block in enumerate(layers.blocks)}
            active = {part.place: jnp.logical_not(rest[order[part.layer]]) for part in parts}
        draws = layers is not None and layers.fisher == "true"

        def run(trained: list[Any], emitted: Any) -> Any:
            supply = iter(trained)
            merged = [next(supply) if f else x for f, x in zip(flags, leaves, strict=True)]
            outs = watch.run(jaxpr, [*merged, *others], emitted, active, scale.backward)
            value, aux = out_tree.unflatten(outs)
            if not draws:
                return (value, None), aux
            key = jax.random.fold_in(_key(rng), _DRAW)
            _, at_one = out_tree.unflatten(scale.together(outs, out_tree))
            return (value, _predictive(at_one).sampled_loss(key, weight_of(aux, batch))), aux

        trained = [leaf for flag, leaf in zip(flags, leaves, strict=True) if flag]
        (value, sampled), pull, aux = jax.vjp(run, trained, watch.zeros(), has_aux=True)
        start = seed(value, scale.of(0))
        # A float16 loss rounds a scale that is no power of two, and with it all that comes of it.
        used = scale.of(0).astype(value.dtype).astype(jnp.float32)
        rounded = jnp.where(used == scale.of(0), 1.0, used / scale.of(0))
        if draws:
            grads, read = pull((start, jnp.zeros_like(sampled)))
            from_drawn = seed(sampled, scale.of_drawn(out_tree))
            read = read._replace(layers=pull((jnp.zeros_like(value), from_drawn))[1].layers)
        else:
            grads, read = pull((start, None))
        supply = iter(grads)
        filled = []
        for leaf, flag, owner in zip(leaves, flags, owners, strict=True):
            if scales is None:
                filled.append(next(supply) if flag else jnp.zeros_like(leaf))
            else:
                own = scale.by_number(owner) * rounded
                filled.append(divided(next(supply), own) if flag else wide_zeros(leaf))
        factors = {}
        if layers is not None:
            more = jnp.float32(1) if draws else rounded
            sums = {
                at: scale.unscaled(sites[at], values, more) for at, values in read.layers.items()
            }
            factors = to_factors(layers.blocks, parts, sums, weight_of(aux, batch), layers.mode)
        emitted = [jnp.ravel(x) for cuts in read.cuts.values() for x in cuts]
        amax = jnp.concatenate(emitted) if emitted else jnp.zeros(0)
        return (value, aux), treedef.unflatten(filled), factors, amax

    return fn


class _Scales:
    """The scale at each place of one pass.

    Args:
      scales: None, one scale, or one a group.
      labels: where the groups are; None without groups.
    """

    def __init__(self, scales: Any, labels: Labels | None):
        self._labels = labels
        self._scaled = scales is not None
        self._one = scales if self._scaled and labels is None else jnp.float32(1)
        self.all = None if labels is None else by_label(scales)
        self.backward = None if self.all is None else usable(self.all)

    def by_number(self, group: int | None) -> Any:
        """Return the scale of a label; None stands for what has no cotangent."""
        return self._one if self.all is None or group is None else self.all[group]

    def of(self, result: int) -> Any:
        """Return the scale that the backward pass of a result starts from."""
        return self.by_number(None if self._labels is None else self._labels.outs[result])

    def together(self, outs: list[Any], out_tree: Any) -> list[Any]:
        """Bring the leaves of the predictive distribution to one scale."""
        outs, numbers = list(outs), self._predictive(out_tree)
        for number in numbers[1:]:
            ratio = self.of(number) / self.of(numbers[0])
            outs[number] = boundary(outs[number], ratio, jnp.zeros((), jnp.float32))
        return outs

    def of_drawn(self, out_tree: Any) -> Any:
        """Return the scale that the backward pass of the drawn labels' loss starts from."""
        numbers = self._predictive(out_tree)
        return self.of(numbers[0]) if numbers else self._one

    def _predictive(self, out_tree: Any) -> list[int]:
        """Return which results are the predictive distribution's and have a label."""
        if self._labels is None:
            return []
        _, aux = out_tree.unflatten(range(out_tree.num_leaves))
        return [n for n in jax.tree.leaves(aux.predictive) if self._labels.outs[n] is not None]

    def unscaled(
        self, site: Any, values: tuple[jax.Array, ...], more: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return what was read of a layer, with the scale of its derivatives taken out."""
        if not self._scaled:
            return values
        place = site.place if site.custom is None else site.custom[0]
        label = None if self._labels is None else self._labels.at.get(place)
        own = self.by_number(label) * more
        return (values[0], values[1] / own / own, *values[2:])


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
                own = read.layers[part.place][0]
                own = own.reshape(block.groups, *own.shape[-2:])
                total = total + (jnp.swapaxes(own, 1, 2) if part.flipped else own)
        norm = jnp.linalg.norm(expected)
        difference = jnp.linalg.norm(total - expected)
        errors[block.kernel] = float(
            jnp.where(norm == 0, difference, difference / jnp.where(norm == 0, 1, norm))
        )
        # Gradients of half-precision leaves are rounded, whatever they are computed in.
        kept = [jnp.finfo(by_path[path].dtype).eps for path in block.leaves]
        used = [plan.found.sites[p.place].eps for p in plan.parts if p.layer == block.kernel]
        eps[block.kernel] = float(max(*kept, *used))
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
