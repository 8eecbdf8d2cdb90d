"""The factor that an activation takes from the variance of what it gets."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from boostax.models._layer_graph import LayerGraph

__all__ = ["activation_gain"]

# Operations that tell which activation it is, in the order in which they are looked for.
_TELLS: tuple[tuple[set[str], Callable[[jax.Array], jax.Array]], ...] = (
    ({"erf"}, jax.nn.gelu),
    ({"erfc"}, jax.nn.gelu),
    ({"tanh", "integer_pow"}, jax.nn.gelu),
    ({"logistic"}, jax.nn.silu),
    ({"max"}, jax.nn.relu),
    ({"tanh"}, jnp.tanh),
)


def activation_gain(graph: LayerGraph, layer: int) -> tuple[str, float]:
    """Return the activation ahead of a layer, and ``1 / std(f(z))`` for a standard normal ``z``.

    ``("none", 1.0)`` where no known activation is.
    """
    ops, seen, queue = set(), set(), list(graph.nodes[layer].inputs)
    while queue:
        at = queue.pop()
        node = graph.nodes[at]
        if at not in seen and node.call is None:
            ops.add(node.op)
            queue += node.inputs
        seen.add(at)
    for told, function in _TELLS:
        if told <= ops:
            return function.__name__, _gain(function)
    return "none", 1.0


@functools.cache
def _gain(function: Callable[[jax.Array], jax.Array]) -> float:
    at = np.linspace(-9, 9, 20_001)
    weight = np.exp(-(at**2) / 2)
    weight = weight / weight.sum()
    with jax.ensure_compile_time_eval():
        value = np.asarray(function(jnp.asarray(at, jnp.float32)), np.float64)
    return float(1 / np.sqrt(np.sum(weight * value**2) - np.sum(weight * value) ** 2))
