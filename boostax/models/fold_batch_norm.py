"""Fold batch norms into the layers ahead of them, for inference.

In evaluation a batch norm is a fixed affine map of each channel, and so is part of a convolution's
or dense layer's own map. With ``s = scale / sqrt(var + epsilon)``::

    kernel' = kernel * s          bias' = (bias - mean) * s + norm's bias
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict, freeze, meta, unfreeze

from boostax.models._fold_checks import foldable, kernel_rank, out_axis
from boostax.models._layer_graph import LayerCall, LayerGraph, layer_graph
from boostax.models._left_over import LeftOver, left_over
from boostax.models._read_elsewhere import read_elsewhere
from boostax.models._surgery_linen import Rule, rewrite
from boostax.models._surgery_nnx import named_modules, replace_modules
from boostax.models.report import Change, ModelReport, nothing_matched

__all__ = ["fold_batch_norm"]


def fold_batch_norm(
    model: Any,
    *example_inputs: Any,
    variables: Any = None,
    rngs: Any = None,
    method: str | None = None,
    **kwargs: Any,
) -> Any:
    r"""Fold each batch norm into the convolution or dense layer ahead of it, for inference.

    .. math::
        s = \frac{\text{scale}}{\sqrt{\text{var} + \epsilon}}, \qquad
        w' = w\,s, \qquad b' = (b - \text{mean})\,s + \text{bias},

    per output channel, with the running statistics. The outputs stay the same (to rounding), and
    nothing of the norm is left: neither its parameters nor its arithmetic. A layer without bias gets
    one. Grouped, depthwise and transposed convolutions, and layers stacked by ``nn.scan`` or
    ``nnx.vmap`` along axis 0, are folded as well.

    Args:
      model: a linen module (unbound) or an nnx module, which is not changed.
      *example_inputs: inputs for one call; ``ShapeDtypeStruct`` will do.
      variables: linen only, and needed there: the trained variables, with ``params`` and
        ``batch_stats``. They are not changed.
      rngs: linen only, a key or a dict of them, for models that need more than ``params`` and
        ``dropout``. Default None.
      method: name of the method that is called. Default None: ``__call__``.
      **kwargs: keyword arguments of the call for evaluation, such as ``train=False``.

    Returns:
      nnx: ``(model, report)``, the model in evaluation mode (``model.eval()``). linen:
      ``(model, variables, report)``. The :class:`~boostax.ModelReport` tells which norms were folded
      into which layer, and why each other one was not.

    Raises:
      ValueError: no norm can be folded; the message says why for each.
      TypeError: ``model`` is neither a linen nor an nnx module, ``variables`` does not fit it, or
        there are no arrays or no example inputs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layers = nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
      >>> model = nnx.Sequential(*layers, nnx.relu)
      >>> x = jnp.ones((1, 8, 8, 3))
      >>> folded, report = fold_batch_norm(model, x)
      >>> [(change.path, change.after) for change in report.changes]
      [('layers/1', 'part of layers/0')]
      >>> model.eval()
      >>> bool(jnp.allclose(folded(x), model(x), atol=1e-5))
      True

    Source:
      R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", 2018.

    When not to use:
      Before or during training: the batch's own statistics can't be folded. XLA fuses a batch norm in
      evaluation with its neighbours, so that the gain in time is small where the layer is large.
    """
    if isinstance(model, nnx.Module):
        if variables is not None:
            raise TypeError("fold_batch_norm: variables= is for linen; an nnx model holds its own")
        model = nnx.clone(model)
        model.eval()
    elif not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"fold_batch_norm: model must be a linen or nnx module, got {kind}")
    elif not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            "fold_batch_norm: a linen model needs variables=, a dict with params and batch_stats, got "
            f"{type(variables).__name__}"
        )
    arrays = nnx.state(model) if isinstance(model, nnx.Module) else variables
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)):
        raise TypeError("fold_batch_norm: folding needs the trained arrays, got ShapeDtypeStructs")
    graph = layer_graph(model, example_inputs, kwargs, rngs=rngs, method=method)
    into, left = foldable(graph)
    calls = {node.call.path: node.call for node in graph.nodes if node.call is not None}
    values = _NnxValues(model) if isinstance(model, nnx.Module) else _LinenValues(variables)
    kept = _left_overs(graph)
    folded: dict[str, str] = {}
    layers = list(into.values())
    read: set[str] = set()
    if layers:
        read = read_elsewhere(model, variables, layers, example_inputs, kwargs, method)
    for norm, layer in into.items():
        if layer in read:
            left[norm] = f"the model reads the kernel or bias of {layer} itself, beside calling it"
            continue
        why = values.fold(calls[norm], calls[layer])
        if why is None:
            folded[norm] = layer
        else:
            left[norm] = why
    if not folded:
        raise nothing_matched(
            "fold_batch_norm",
            "a batch norm that could be folded",
            list(left.items()) or [(path, call.type) for path, call in calls.items()],
        )
    changes = tuple(
        Change(norm, calls[norm].type, f"part of {layer}", f"behind a {calls[layer].type}")
        for norm, layer in folded.items()
    )
    report = ModelReport("fold_batch_norm", changes, tuple(left.items()))
    if isinstance(values, _NnxValues):
        return values.rewritten(folded, kept), report
    rules = [Rule(norm, type(calls[norm].layer), kept[norm]) for norm in folded]
    rules += [
        Rule(layer, type(calls[layer].layer), WithBias())
        for layer in folded.values()
        if not calls[layer].layer.use_bias
    ]
    linen: Any = model
    return rewrite(linen, rules), values.result(variables), report


def _left_overs(graph: LayerGraph) -> dict[str, LeftOver]:
    """Return what stands in each norm's place: a cast to the dtype that it gave."""
    dtypes: dict[str, set[Any]] = {}
    for node in graph.nodes:
        if node.call is not None:
            dtypes.setdefault(node.call.path, set()).add(node.call.dtype)
    return {p: LeftOver(dtype=next(iter(d)) if len(d) == 1 else None) for p, d in dtypes.items()}


@dataclasses.dataclass(frozen=True)
class WithBias:
    """The rule of a linen layer that has a bias from now on."""

    def __call__(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> jax.Array:
        del call
        return layer.clone(parent=layer.scope, use_bias=True)(*args, **kwargs)


def _folded(
    layer: Any, kernel: Any, bias: Any, norm: Any, values: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array] | str:
    """Return the new kernel and bias, or why the shapes don't allow it."""
    mean, var = values["mean"], values["var"]
    stack = kernel.shape[: kernel.ndim - kernel_rank(layer)]
    if kernel.ndim < kernel_rank(layer) or any(
        v is not None and v.shape != (*stack, kernel.shape[out_axis(layer)])
        for v in (mean, var, values["scale"], values["bias"], bias)
    ):
        return f"its statistics {mean.shape} don't match the kernel {kernel.shape}"
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    cast = lambda value: jnp.asarray(value).astype(wide)
    s = jax.lax.rsqrt(var.astype(wide) + norm.epsilon)
    if values["scale"] is not None:
        s = s * cast(values["scale"])
    shift = -cast(mean) if bias is None else cast(bias) - cast(mean)
    shift = shift * s + (0 if values["bias"] is None else cast(values["bias"]))
    shape = [*stack, *[1] * kernel_rank(layer)]
    shape[out_axis(layer)] = s.shape[-1]
    kind = kernel.dtype if bias is None else bias.dtype
    return (cast(kernel) * s.reshape(shape)).astype(kernel.dtype), shift.astype(kind)


class _NnxValues:
    """Folds values of an nnx model."""

    def __init__(self, model: nnx.Module) -> None:
        self.model, self.new = model, {}
        self.modules = named_modules(model)
        held = (vars(module).values() for module in self.modules.values())
        self.held = collections.Counter(id(value) for values in held for value in values)

    def fold(self, norm: LayerCall, layer: LayerCall) -> str | None:
        old: Any = self.modules[norm.path]
        into: Any = self.modules[layer.path]
        if self.held[id(into.kernel)] > 1 or (
            into.bias is not None and self.held[id(into.bias)] > 1
        ):
            return f"{layer.path} shares its kernel or bias with another layer"
        read = lambda owner, name: v[...] if (v := getattr(owner, name)) is not None else None
        values = {name: read(old, name) for name in ("mean", "var", "scale", "bias")}
        found = _folded(into, read(into, "kernel"), read(into, "bias"), old, values)
        if isinstance(found, str):
            return found
        self.new[layer.path] = found
        return None

    def rewritten(self, folded: Mapping[str, str], kept: Mapping[str, LeftOver]) -> nnx.Module:
        makers: dict[str, Any] = {norm: left_over(kept[norm]) for norm in folded}
        return replace_modules(self.model, makers | {p: self._filled(p) for p in self.new})

    def _filled(self, path: str) -> Any:
        def make(layer: Any) -> Any:
            kernel, bias = self.new[path]
            layer.kernel[...] = kernel
            if layer.bias is None:
                layer.bias, layer.use_bias = nnx.Param(bias), True
            else:
                layer.bias[...] = bias
            return layer

        return make


class _LinenValues:
    """Folds values of a linen model's variables."""

    def __init__(self, variables: Any) -> None:
        self.trees: dict[str, Any] = jax.tree.map(
            lambda leaf: leaf, unfreeze(variables), is_leaf=_is_box
        )

    def fold(self, norm: LayerCall, layer: LayerCall) -> str | None:
        stats, own, into = (
            self._at(name, path)
            for name, path in (
                ("batch_stats", norm.path),
                ("params", norm.path),
                ("params", layer.path),
            )
        )
        if stats is None or into is None or (own is None and _has_params(norm.layer)):
            return "variables hold nothing at its path"
        values = {"mean": stats["mean"], "var": stats["var"]}
        values |= {name: (own or {}).get(name) for name in ("scale", "bias")}
        values = {name: _unboxed(value) for name, value in values.items()}
        kernel, bias = _unboxed(into["kernel"]), _unboxed(into.get("bias"))
        found = _folded(layer.layer, kernel, bias, norm.layer, values)
        if isinstance(found, str):
            return found
        into["kernel"], into["bias"] = (
            old.replace_boxed(new) if _is_box(old) else new
            for old, new in zip((into["kernel"], into.get("bias")), found, strict=True)
        )
        _drop(self.trees["batch_stats"], norm.path.split("/"))
        _drop(self.trees["params"], norm.path.split("/"))
        return None

    def _at(self, collection: str, path: str) -> Any:
        found = self.trees.get(collection)
        for part in path.split("/") if path else ():
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def result(self, variables: Any) -> Any:
        trees = {name: tree for name, tree in self.trees.items() if tree or not variables[name]}
        return freeze(trees) if isinstance(variables, FrozenDict) else trees


def _has_params(norm: Any) -> bool:
    return norm.use_scale or norm.use_bias


def _is_box(value: Any) -> bool:
    return isinstance(value, meta.AxisMetadata)


def _unboxed(value: Any) -> Any:
    return value.unbox() if isinstance(value, meta.AxisMetadata) else value


def _drop(tree: Any, path: list[str]) -> None:
    """Take a subtree away, and what is empty then."""
    if path[0] not in tree:
        return
    if len(path) > 1:
        _drop(tree[path[0]], path[1:])
    if len(path) == 1 or not tree[path[0]]:
        del tree[path[0]]
