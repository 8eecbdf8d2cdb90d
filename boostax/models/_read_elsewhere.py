"""Which layers' values a model reads itself, beside calling the layer: tied embeddings, penalties.

The model is run twice, with other kernels and biases the second time. Each call of a layer gives
made-up values, which follow from its inputs alone, so that what differs was read past the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from boostax.models._calls import split_arrays, watched
from boostax.models._kinds import kind_of
from boostax.models._surgery_linen import flag_trace
from boostax.models._surgery_nnx import named_modules

__all__ = ["read_elsewhere"]


def read_elsewhere(
    model: Any,
    variables: Any,
    paths: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: str | None,
) -> set[str]:
    """Return those of the layers at ``paths`` whose kernel or bias is read past their calls.

    Args:
      model: an nnx model, or a linen module with its ``variables``.
      variables: linen's; None for nnx.
      paths: paths of layers.
      args: example inputs; of abstract ones, arrays are made up.
      kwargs: keyword arguments of the call.
      method: the name of the method that is called, or None.
    """
    arrays, rebuild = split_arrays(args, kwargs)
    args, kwargs = rebuild([_made_up(array) for array in arrays])
    name = method or "__call__"
    if isinstance(model, nnx.Module):
        run, values = _nnx_run(model, args, kwargs, name)
    else:
        run, values = _linen_run(model, variables, args, kwargs, name)
    before = run(values)
    if _same(before, run(_changed(values, set(paths)))):
        return set()
    return {path for path in paths if not _same(before, run(_changed(values, {path})))}


def _nnx_run(model: Any, args: Any, kwargs: Any, name: str) -> tuple[Any, Any]:
    copy = nnx.clone(model)
    for module in named_modules(copy).values():
        if kind_of(module) is not None:
            object.__setattr__(module, "__class__", _stub(type(module)))
    graphdef, state = nnx.split(copy)

    def run(state: Any) -> Any:
        return getattr(nnx.merge(graphdef, state, copy=True), name)(*args, **kwargs)

    return jax.jit(run), state


def _linen_run(
    model: nn.Module, variables: Any, args: Any, kwargs: Any, name: str
) -> tuple[Any, Any]:
    def watch(path: str, layer: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        return out if kind_of(layer) is None else _replaced(out, (args, kwargs))

    def bound(module: nn.Module) -> Any:
        flag_trace(module)
        return getattr(module, name)(*args, **kwargs)

    def run(variables: Any) -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        with watched(watch):
            return nn.apply(bound, model, mutable=True)(variables, rngs=keys)[0]

    return jax.jit(run), variables


@functools.cache
def _stub(base: type) -> type:
    plain = base.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _replaced(plain(self, *args, **kwargs), (args, kwargs))

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _replaced(out: Any, inputs: Any) -> Any:
    """Return made-up values in a layer's place, all times a number that tells its inputs apart."""
    told = jnp.float32(1)
    for leaf in jax.tree.leaves(inputs):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size:
            x = leaf.astype(jnp.float32)
            told = told + jnp.tanh(jnp.mean(x * _made_up(x)))

    def scaled(leaf: Any) -> Any:
        new = _made_up(leaf)
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (new.astype(jnp.float32) * told).astype(leaf.dtype) if is_float else new

    return jax.tree.map(scaled, out)


def _made_up(leaf: Any) -> Any:
    """Return values that no operation makes all zero or all alike; integers stay, or are 0."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    flat = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)) + 0.5
    return flat.reshape(leaf.shape).astype(leaf.dtype)


def _changed(values: Any, paths: set[str]) -> Any:
    def change(key_path: Any, leaf: Any) -> Any:
        parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key_path]
        parts = [part for part in parts if part != "value"]
        if parts and parts[0] == "params":
            parts = parts[1:]
        own = "/".join(parts[:-1]) in paths and parts[-1] in ("kernel", "bias")
        return 2 * leaf + 1 if own else leaf

    return jax.tree_util.tree_map_with_path(change, values)


def _same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=_has_nan(x)) for x, y in pairs)


def _has_nan(value: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(value).dtype, jnp.inexact)
