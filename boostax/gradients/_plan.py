"""A trace of the loss, and the layers in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError
from boostax.gradients._assemble import Part, assemble
from boostax.gradients._blocks import Block
from boostax.gradients._facts import Leaf, Made
from boostax.gradients._find import Found, find_layers
from boostax.gradients._views import View
from boostax.training.contract import CanonicalLoss

if TYPE_CHECKING:
    from boostax.gradients.layers import CapturedLayers

__all__ = ["Plan", "make_plan", "plan_of", "trace_loss"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A trace of the loss, and the layers found in it."""

    jaxpr: Any
    out_tree: Any
    found: Found
    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    first_order: Mapping[str, str]


def trace_loss(
    loss: CanonicalLoss, params: Any, model_state: Any, batch: Any, rng: Any
) -> tuple[Any, Any]:
    """Return the loss's jaxpr, whose first inputs are the leaves of ``params``, and what it returns."""
    leaves, treedef = jax.tree.flatten(params)

    def flat(leaves: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return loss(treedef.unflatten(leaves), model_state, batch, rng)

    return jax.make_jaxpr(flat, return_shape=True)(leaves, model_state, batch, rng)


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
    leaves = jax.tree.leaves(params)
    jaxpr, shape = trace_loss(loss, params, model_state, batch, rng)
    shapes = [tuple(jnp.shape(leaf)) for leaf in leaves]
    facts: list[Any] = []
    for i, leaf in enumerate(leaves):
        known = jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and not exclude(paths[i])
        facts.append(Leaf(i, View(shapes[i])) if known else Made())
    others = len(jax.tree.leaves((model_state, batch, rng)))
    found = find_layers(jaxpr, [*facts, *[Made(data=True)] * others])
    blocks, parts, first = assemble(
        found, paths, shapes, block_size=block_size, mode=mode, weighted=shape[1].weight is not None
    )
    for path, leaf in zip(paths, leaves, strict=True):
        if exclude(path):
            first[path] = "excluded"
        elif not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            first[path] = f"of dtype {jnp.result_type(leaf)}"
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
