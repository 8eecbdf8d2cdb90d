"""What the reference's GPU class does differently, for ``mode="reference"``.

Its statistics come raw from the capture: the batch size and the loss scale are put right here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax._tree import check_matched, matches
from boostax.gradients._blocks import Block, Factors
from boostax.parallel.reduce import Reduce
from boostax.updates._thor_groups import paths_of, patterns_of
from boostax.updates._thor_inverses import add_diagonal

__all__ = ["batch_size", "damped", "finished", "layer_norm", "layer_norm_paths"]


def batch_size(caller: str, weight: Any, axes: tuple[str, ...]) -> Any:
    """Return the weight as the batch size that the reference is told; of several, their mean."""
    if weight is None:
        raise ValueError(
            f'{caller}: mode="reference" needs the batch size; call update(..., weight=batch size), '
            "as train_step does"
        )
    weight = jnp.asarray(weight, jnp.float32)
    return Reduce(axes)(weight) if axes else weight


def damped(block: Block, raw: Factors, damping: Any, batch: Any, loss_scale: float) -> Factors:
    """Return A and G, damped by a root of the damping each."""
    damping = jnp.asarray(damping, jnp.float32)
    amount = jnp.sqrt(damping / block.positions if block.kind == "conv" else damping)
    inputs = raw.inputs / batch if block.inputs.diagonal else raw.inputs
    outputs = raw.outputs * (1 / loss_scale) * (1 / loss_scale) * (batch * batch)
    return Factors(
        add_diagonal(block.inputs, inputs, amount), add_diagonal(block.outputs, outputs, amount)
    )


def finished(block: Block, matrix: Factors, inverse: Factors) -> Factors:
    """Return the inverses that the reference uses in the place of these."""
    if block.kind == "conv":
        scale = (1 / block.positions) ** 0.5
        return Factors(inverse.inputs * scale, inverse.outputs * scale)
    if block.kind == "embedding" and not block.outputs.diagonal:
        # The reference multiplies the inverse root by itself without transposing it.
        lower = lax.linalg.cholesky(matrix.outputs)
        unit = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
        half = lax.linalg.triangular_solve(lower, unit, left_side=True, lower=True)
        product = jnp.matmul(half, half, precision=lax.Precision.HIGHEST)
        return Factors(inverse.inputs, product)
    return inverse


def layer_norm(gradient: jax.Array, damping: Any, batch: Any) -> jax.Array:
    """Return a layer norm's gradient over its own square and a root of the damping."""
    root = jnp.sqrt(jnp.asarray(damping, jnp.float32))
    return gradient / (gradient * gradient / batch + root)


def layer_norm_paths(caller: str, patterns: Any, layers: Any, mode: str) -> frozenset[str]:
    """Return the leaves that the rule for layer norms is for."""
    patterns = patterns_of(caller, "layer_norms", patterns)
    if mode != "reference":
        if patterns:
            raise ValueError(f'{caller}: layer_norms is for mode="reference" only; leave it out')
        return frozenset()
    in_blocks = {path for block in layers.blocks for path in block.leaves}
    known = [path for path in paths_of(layers) if path not in in_blocks]
    for pattern in patterns:
        check_matched(f"{caller}: layer_norms", pattern, known)
    named = {path for path, reason in layers.first_order.items() if "layer norm" in reason.lower()}
    return frozenset(named | {p for p in known for pattern in patterns if matches(pattern, p)})
