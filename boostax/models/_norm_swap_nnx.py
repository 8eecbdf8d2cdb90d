"""Norm layers of an nnx model turned into another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import boostax.nnx
from boostax.models._calls import split_arrays
from boostax.models._norm_swap import KINDS, Target, kind_of_norm
from boostax.models._norm_swap_plan import planned
from boostax.models._surgery_nnx import named_modules, replace_modules
from boostax.models.report import ModelReport

__all__ = ["replace_nnx"]


def replace_nnx(
    model: nnx.Module,
    target: Target,
    wanted: Any,
    example_inputs: Any,
    kwargs: Mapping[str, Any],
    method: str | None,
) -> tuple[Any, ModelReport]:
    """Return the new model and the report; example inputs check that the model takes them."""
    modules = named_modules(model)
    layers = {
        path: (module, _channels(module))
        for path, module in modules.items()
        if kind_of_norm(module) is not None
    }
    others = {path: type(module).__name__ for path, module in modules.items()}
    changes, report = planned(target, wanted, layers, others)
    new = replace_modules(model, {path: _nnx_maker(target) for path in changes})
    if example_inputs:
        arrays, rebuild = split_arrays(example_inputs, kwargs)
        graphdef, state = nnx.split(new)

        def call(arrays: Any) -> Any:
            args, named = rebuild(arrays)
            merged = nnx.merge(graphdef, state, copy=True)
            return jax.tree.leaves(getattr(merged, method or "__call__")(*args, **named))

        jax.eval_shape(call, arrays)
    return new, report


def _nnx_maker(target: Target) -> Callable[[nnx.Module], nnx.Module]:
    def make(layer: Any) -> nnx.Module:
        kind = kind_of_norm(layer) or ""
        arguments = target.arguments(layer, kind)
        running = getattr(layer, "use_running_average", False)
        if target.tracks:
            arguments["use_running_average"] = bool(running)
        made = getattr(boostax.nnx, KINDS[target.kind])
        new = made(_channels(layer), rngs=nnx.Rngs(0), **arguments)
        for name in ("scale", "bias"):
            # The variables themselves: their values, dtypes and metadata.
            if getattr(layer, name) is not None:
                setattr(new, name, getattr(layer, name))
        if target.tracks and target.passes_on(kind):
            new.mean, new.var = layer.mean, layer.var
        elif target.tracks:
            # Layers that nnx.vmap stacked have one more axis.
            params = [p for p in (layer.scale, layer.bias) if p is not None]
            lead = params[0].shape[:-1] if params else ()
            for name in ("mean", "var"):
                value = getattr(new, name)[...]
                setattr(new, name, nnx.BatchStat(jnp.broadcast_to(value, (*lead, *value.shape))))
        return new

    return make


def _channels(layer: Any) -> int:
    if hasattr(layer, "num_features"):
        return layer.num_features
    return layer.num_groups * layer.group_size
