"""Which batch norms can be folded into the layer ahead of them, and why the others can't."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax import nnx

from boostax.models._layer_graph import LayerGraph
from boostax.models._left_over import StandardizedKernel

__all__ = ["foldable", "kernel_rank", "out_axis"]

_INTO = (nn.Conv, nn.ConvTranspose, nn.Dense, nnx.Conv, nnx.ConvTranspose, nnx.Linear)
_CASTS = {"convert_element_type", "name", "copy", "optimization_barrier", "reduce_precision"}


def foldable(graph: LayerGraph) -> tuple[dict[str, str], dict[str, str]]:
    """Return by path: the layer that a batch norm can be folded into, and why others stay."""
    into: dict[str, str] = {}
    left = dict.fromkeys(graph.opaque, "inside a loop that can't be followed")
    calls: dict[str, list[int]] = {}
    for node in graph.layers():
        calls.setdefault(graph.call(node).path, []).append(node)
    for path, nodes in calls.items():
        if graph.call(nodes[0]).kind != "batch_norm":
            continue
        found = [_ahead(graph, node) for node in nodes]
        why = next((text for text in found if isinstance(text, str)), None)
        layers = {graph.call(at).path for at in found if isinstance(at, int)}
        if why is None and len(layers) > 1:
            why = f"shared, and behind several layers: {', '.join(sorted(layers))}"
        if why is not None:
            left[path] = why
            continue
        (layer,) = layers
        if len(calls[layer]) != len(nodes):
            left[path] = f"{layer} is shared: it is called without this norm too"
        else:
            into[path] = layer
    return into, left


def _ahead(graph: LayerGraph, norm: int) -> int | str:
    """Return the layer that takes one call of a norm, or why there is none."""
    call = graph.call(norm)
    if call.normalizes_batch:
        return "it takes the batch's statistics; call the model for evaluation, as with train=False"
    if not type(call.layer).__module__.startswith(("flax.", "boostax.")):
        return f"{call.type} is not known to be a plain batch norm in evaluation"
    axis = call.layer.axis
    if not isinstance(axis, int) or axis % len(call.inputs) != len(call.inputs) - 1:
        return f"it normalises the axis {axis}, and layers give their channels last"
    found = graph.ahead(norm, _CASTS)
    if len(found) != 1:
        return "nothing ahead of it"
    node = graph.nodes[found[0]]
    if node.call is None:
        near = [graph.call(n).path for n in graph.nearest(norm)]
        behind = f" between it and {', '.join(near)}" if near and node.op != "input" else ""
        return f"its input comes from {_word(node.op)}{behind}"
    layer = node.call
    if layer.kind != "weight":
        return f"{layer.path}, a {layer.type}, is ahead of it"
    if type(layer.layer) not in _INTO:
        return f"{layer.path} is a {layer.type}, whose kernel is not known"
    if layer.made_by:
        return f"the kernel of {layer.path} is made by a {layer.made_by}"
    if isinstance(layer.layer.promote_dtype, StandardizedKernel):
        return f"the kernel of {layer.path} is standardised"
    if not graph.goes_only_to(found[0], {norm}, _CASTS):
        return f"what {layer.path} gives is used elsewhere too"
    return found[0]


def _word(op: str) -> str:
    words = {"input": "the model's input", "add": "an addition", "max": "a maximum, such as ReLU,"}
    return words.get(op, f"the operation {op!r}")


def out_axis(layer: Any) -> int:
    """Return the axis of a kernel along which the outputs lie."""
    swapped = isinstance(layer, nn.ConvTranspose | nnx.ConvTranspose) and layer.transpose_kernel
    return -2 if swapped else -1


def kernel_rank(layer: Any) -> int:
    """Return the number of axes of a layer's kernel, those of a stack of layers aside."""
    size = getattr(layer, "kernel_size", ())
    return 2 + (1 if isinstance(size, int) else len(size))
