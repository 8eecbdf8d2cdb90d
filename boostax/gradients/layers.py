"""The layers of a loss, and the statistics of them that a second-order optimizer needs."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from boostax import _compat
from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError
from boostax.gradients._assemble import Part, assemble, to_factors
from boostax.gradients._blocks import Block, Factors
from boostax.gradients._facts import Leaf, Made
from boostax.gradients._find import Found, find_layers
from boostax.gradients._views import View
from boostax.gradients._watch import Watch
from boostax.gradients.value_and_grad import trained_leaves
from boostax.training.contract import CanonicalLoss, LossAux, weight_of

__all__ = ["CapturedLayers", "Plan", "value_grad_and_factors"]


@dataclasses.dataclass(frozen=True)
class CapturedLayers:
    """The layers of a loss: static, hashable, made by :func:`boostax.capture_layers`.

    Attributes:
      blocks: the layers that get Kronecker factors, in the order of their first call.
      first_order: for every other leaf, by path, why it has none.
      paths: the paths of all leaves, in tree order.
      shapes_by_path: the leaves' shapes.
      block_size: the largest number of rows of a piece of a factor.
      fisher: ``"empirical"`` or ``"true"``.
      mode: ``"default"`` or ``"reference"``.
    """

    blocks: tuple[Block, ...]
    first_order: Mapping[str, str]
    paths: tuple[str, ...]
    leaf_shapes: tuple[tuple[int, ...], ...]
    block_size: int
    fisher: str
    mode: str
    loss: Callable[[Any], tuple[CanonicalLoss, Any, Any]] = dataclasses.field(
        compare=False, repr=False
    )

    @functools.cached_property
    def fingerprint(self) -> int:
        """An unsigned 32-bit number that stands for the layers in a saved state."""
        facts = [
            [b.kernel, b.kind, b.bias, b.groups, list(dataclasses.astuple(b.inputs)),
             list(dataclasses.astuple(b.outputs))]
            for b in self.blocks
        ]  # fmt: skip
        return zlib.crc32(json.dumps([facts, list(self.paths), self.mode]).encode())

    def shapes(self) -> dict[str, Factors]:
        """Return the shapes of the statistics, by the kernel's path."""
        return {block.kernel: block.shapes() for block in self.blocks}

    def zeros(self) -> dict[str, Factors]:
        """Return statistics of zeros."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes())

    def fates(self) -> dict[str, str]:
        """Return for every leaf, by path, which layer it is in, or why it is in none."""
        fates = {}
        for block in self.blocks:
            for path in block.leaves:
                fates[path] = _fate(block, path)
        return {
            path: fates.get(path) or f"first order: {self.first_order[path]}" for path in self.paths
        }

    def describe(self) -> str:
        """Return a table: for every leaf the layer that it became, or why it stays first order."""
        from boostax.training.describe import format_table

        shapes = dict(zip(self.paths, self.leaf_shapes, strict=True))
        rows = [(path, str(shapes[path]), fate) for path, fate in self.fates().items()]
        return "\n".join(format_table(("leaf", "shape", "block"), rows))

    def value_and_grad(
        self,
        params: Any,
        batch: Any,
        *,
        due: Any = True,
        model_state: Any = None,
        rng: Any = None,
    ) -> tuple[tuple[jax.Array, LossAux], Any, dict[str, Factors]]:
        """Return loss, gradients and, where they are due, the layers' statistics.

        Args:
          params: the parameters, or the nnx model.
          batch: the batch.
          due: bool, or bool scalar array: whether the statistics are computed. A traced one compiles
            both ways into one conditional. Default True.
          model_state: linen's other collections, for a loss that declares ``model_state``.
          rng: a key, for a loss that declares ``rng``, and for ``fisher="true"``.

        Returns:
          ``((loss, LossAux), grads, stats)``; ``stats`` by the kernel's path, zeros where not due.
        """
        loss, values, state = self.loss(params)
        state = model_state if state is None else state
        both = value_grad_and_factors(loss, self)
        plain = lambda: (
            *jax.value_and_grad(lambda p: loss(p, state, batch, rng), has_aux=True)(values),
            self.zeros(),
        )
        watched = lambda: both(values, state, batch, rng)
        if isinstance(due, (bool, int)):
            return watched() if due else plain()
        return _compat.cond(jnp.asarray(due), watched, plain)

    def check(
        self,
        params: Any,
        batch: Any,
        *,
        model_state: Any = None,
        rng: Any = None,
        rtol: float = 1e-5,
    ) -> dict[str, float]:
        """Compare, for each layer, inputs times output derivatives with the loss's gradient.

        For a captured layer ``sum_rows a^T g`` is the gradient of its kernel and bias. Leaves that the
        loss penalises (weight decay inside the loss) have a gradient beside it and are left out.

        Args:
          params: the parameters, or the nnx model.
          batch: the batch.
          model_state: as for :meth:`value_and_grad`.
          rng: as for :meth:`value_and_grad`.
          rtol: largest allowed error, relative to the gradient's norm. Default 1e-5, for float32.

        Returns:
          The relative error by the kernel's path.

        Raises:
          ValueError: an error is larger.
        """
        loss, values, state = self.loss(params)
        state = model_state if state is None else state
        errors = gradient_errors(loss, self, values, state, batch, rng)
        wrong = {path: error for path, error in errors.items() if not error <= rtol}
        if wrong:
            raise ValueError(
                f"capture_layers: for {wrong} the layer's inputs times its output derivatives are not "
                f"the loss's gradient (relative error above {rtol}); leave these leaves to first order "
                "with exclude="
            )
        return errors

    def __hash__(self) -> int:
        return self.fingerprint


def _fate(block: Block, path: str) -> str:
    groups = "" if block.groups == 1 else f"{block.groups} x "
    if path == block.bias:
        return f"the last row of {block.kernel}"
    uses = "" if block.uses == 1 else f", called {block.uses} times"
    cut = lambda side: (
        f"diagonal of {side.size}"
        if side.diagonal
        else f"{side.size} x {side.size}"
        if side.pieces == 1
        else f"{side.pieces} pieces of {side.piece} x {side.piece}"
    )
    return f"{block.kind}: {groups}A {cut(block.inputs)}, G {cut(block.outputs)}{uses}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A trace of the loss, and the layers found in it."""

    jaxpr: Any
    out_tree: Any
    found: Found
    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    first_order: Mapping[str, str]


def make_plan(
    loss: CanonicalLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    rng: Any,
    *,
    block_size: int,
    mode: Any,
    exclude: Callable[[str], bool] = lambda path: False,
) -> Plan:
    """Trace the loss and find its layers."""
    paths = leaf_paths(params)
    leaves, treedef = jax.tree.flatten(params)

    def flat(leaves: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return loss(treedef.unflatten(leaves), model_state, batch, rng)

    jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(leaves, model_state, batch, rng)
    shapes = [tuple(jnp.shape(leaf)) for leaf in leaves]
    facts: list[Any] = []
    for i, leaf in enumerate(leaves):
        known = jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and not exclude(paths[i])
        facts.append(Leaf(i, View(shapes[i])) if known else Made())
    others = len(jax.tree.leaves((model_state, batch, rng)))
    found = find_layers(jaxpr, [*facts, *[Made(data=True)] * others])
    blocks, parts, first = assemble(found, paths, shapes, block_size=block_size, mode=mode)
    for path in paths:
        if exclude(path):
            first[path] = "excluded"
    return Plan(jaxpr, jax.tree.structure(shape), found, parts, blocks, first)


def plan_of(
    layers: CapturedLayers, loss: CanonicalLoss, params: Any, model_state: Any, batch: Any, rng: Any
) -> Plan:
    """Trace the loss anew, and hold the layers in it against those that were captured.

    Raises:
      StateMismatchError: they differ.
    """
    out = {path for path, reason in layers.first_order.items() if reason == "excluded"}
    plan = make_plan(
        loss,
        params,
        model_state,
        batch,
        rng,
        block_size=layers.block_size,
        mode=layers.mode,
        exclude=lambda path: path in out,
    )
    # Another batch size changes how many rows there are, and so may an unrolled loop the calls.
    same = lambda block: dataclasses.replace(block, uses=1, positions=1)
    ours, theirs = ([same(block) for block in found] for found in (layers.blocks, plan.blocks))
    if ours != theirs:
        gone = [b.kernel for b in ours if b not in theirs]
        new = [b.kernel for b in theirs if b not in ours]
        raise StateMismatchError(
            f"layers: the loss has other layers than those captured (captured and now otherwise: "
            f"{gone}; now and not captured so: {new}); capture the layers of the loss and of "
            "parameters of these shapes, with the same arguments"
        )
    return plan


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
) -> dict[str, float]:
    """Return the error of ``sum a^T g`` against the gradient, by the kernel's path."""
    plan = plan_of(layers, loss, params, model_state, batch, rng)
    leaves = jax.tree.leaves(params)
    others = jax.tree.leaves((model_state, batch, rng))
    readings = {
        part.place: dataclasses.replace(part.reading, what="gradient") for part in plan.parts
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
    errors = {}
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
    return errors


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
