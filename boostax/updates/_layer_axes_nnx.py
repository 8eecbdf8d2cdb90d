"""Which axes of a parameter are inputs of its layer, read from an nnx model's module types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from boostax.updates.layer_axes import LayerAxes, Shape

__all__ = ["read_model"]


def read_model(model: Any) -> dict[str, LayerAxes]:
    """Read the parameters of all layers of Flax in an nnx model.

    Args:
      model: an ``nnx.Module``; the values of its parameters are not looked at.

    Returns:
      Path to :class:`LayerAxes` for the parameters of known layers. Parameters that a model's own
      modules hold are not in it.

    Raises:
      ValueError: ``model`` is not an ``nnx.Module``.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise ValueError(
            f"model must be an nnx.Module, got {type(model).__name__}; for linen and plain "
            "functions leave it out, and name the axes of what can't be read with "
            "axes={pattern: (axis, ...)}"
        )
    found = {}
    for path, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Module):
            continue
        for name, base, kind, axes in _layer(module):
            parameter = getattr(module, name, None)
            if parameter is None or not hasattr(parameter, "shape"):
                continue
            leaf = "/".join(map(str, (*path, name)))
            found[leaf] = _unstack(type(module).__name__, tuple(parameter.shape), base, kind, axes)
    return found


def _layer(module: Any) -> Iterator[tuple[str, Shape, Any, tuple[int, ...]]]:
    """Yield name, shape of one layer, kind and input axes of each weight of a layer of Flax."""
    from flax import nnx

    if isinstance(module, nnx.Linear):
        yield "kernel", (module.in_features, module.out_features), "dense", (0,)
    elif isinstance(module, nnx.LinearGeneral):
        batch = tuple(module.batch_axis.values())
        inputs, outputs = _tuple(module.in_features), _tuple(module.out_features)
        first = len(batch)
        axes = tuple(range(first, first + len(inputs)))
        yield "kernel", (*batch, *inputs, *outputs), "dense", axes
    elif isinstance(module, nnx.Einsum):
        yield "kernel", tuple(module.kernel_shape), "dense", _einsum_inputs(module.einsum_str)
    elif isinstance(module, nnx.ConvTranspose):
        rank = len(tuple(module.kernel_shape))
        output = rank - 2 if module.transpose_kernel else rank - 1
        axes = tuple(axis for axis in range(rank) if axis != output)
        yield "kernel", tuple(module.kernel_shape), "conv", axes
    elif isinstance(module, nnx.Conv):
        shape = tuple(module.kernel_shape)
        yield "kernel", shape, "conv", tuple(range(len(shape) - 1))
    elif isinstance(module, nnx.Embed):
        yield "embedding", (module.num_embeddings, module.features), "none", ()
    elif isinstance(module, nnx.LoRA):
        for name in ("lora_a", "lora_b"):
            yield name, tuple(getattr(module, name).shape[-2:]), "dense", (0,)


def _unstack(layer: str, shape: Shape, base: Shape, kind: Any, axes: tuple[int, ...]) -> LayerAxes:
    """Place the input axes of one layer in a parameter that may hold a stack of them."""
    extra = len(shape) - len(base)
    if extra == 0:
        return LayerAxes(kind, axes, f"{layer} {shape}")
    # nnx.vmap stacks at axis 0 unless told otherwise, so that is looked at first.
    starts = [
        start for start in range(len(shape)) if shape[:start] + shape[start + extra :] == base
    ]
    if extra < 0 or not starts:
        return LayerAxes("unreadable", (), f"{layer} {shape} does not hold layers of shape {base}")
    kept = [axis for axis in range(len(shape)) if not starts[0] <= axis < starts[0] + extra]
    stacked = ", ".join(str(starts[0] + i) for i in range(extra))
    return LayerAxes(
        kind,
        tuple(kept[axis] for axis in axes),
        f"{layer} {shape}, layers stacked at axis {stacked}",
    )


def _einsum_inputs(formula: str) -> tuple[int, ...]:
    """Return the kernel's axes that the formula sums over: those that the output lacks."""
    operands, output = formula.replace(" ", "").replace("...", "").split("->")
    return tuple(i for i, letter in enumerate(operands.split(",")[1]) if letter not in output)


def _tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
