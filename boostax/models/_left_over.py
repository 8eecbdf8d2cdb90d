"""What takes a batch norm's place: part of its parameters, under its name, or nothing at all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

__all__ = [
    "BatchNormLeftOver",
    "LeftOver",
    "SkipGain",
    "Standardized",
    "StandardizedKernel",
    "can_change",
    "gained",
    "left_over",
    "standardized",
]

_CHANNELS_LAST = (nn.Conv, nn.Dense, nnx.Conv, nnx.Linear)
_TRANSPOSED = (nn.ConvTranspose, nnx.ConvTranspose)


def can_change(call: Any) -> bool:
    """Say whether a called layer's kernel is its own, and laid out in one of the known ways."""
    return isinstance(call.layer, _CHANNELS_LAST + _TRANSPOSED) and not call.made_by


@dataclasses.dataclass(frozen=True)
class LeftOver:
    """What stays of a batch norm: ``y = skip_gain * (x * scale + bias)``, each where it is True.

    ``dtype`` is the result's; None: as the batch norm's would be with these parameters only.

    As the rule of a linen layer it makes the parameters under the layer's own name.
    """

    scale: bool = False
    bias: bool = False
    skip_gain: bool = False
    dtype: Any = None

    def __str__(self) -> str:
        there = [name for name in ("scale", "bias", "skip_gain") if getattr(self, name)]
        return " and ".join(there) or "nothing"

    def __call__(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> jax.Array:
        del call
        x = args[0] if args else kwargs["x"]
        shape = tuple(x.shape[axis] for axis in _axes(x.ndim, layer.axis))
        kind = layer.param_dtype
        scale = layer.param("scale", layer.scale_init, shape, kind) if self.scale else None
        bias = layer.param("bias", layer.bias_init, shape, kind) if self.bias else None
        gain = layer.param("skip_gain", nn.initializers.zeros, (), kind) if self.skip_gain else None
        return _applied(x, scale, bias, gain, layer.axis, self.dtype or layer.dtype)


def _axes(rank: int, axis: int | Sequence[int]) -> list[int]:
    return sorted(a % rank for a in ([axis] if isinstance(axis, int) else axis))


def _applied(x: Any, scale: Any, bias: Any, gain: Any, axis: Any, dtype: Any) -> jax.Array:
    there = [value for value in (scale, bias) if value is not None]
    y = x.astype(jnp.result_type(x, *there) if dtype is None else dtype)
    axes = _axes(x.ndim, axis)
    shape = [x.shape[i] if i in axes else 1 for i in range(x.ndim)]
    if scale is not None:
        y = y * scale.reshape(shape).astype(y.dtype)
    if bias is not None:
        y = y + bias.reshape(shape).astype(y.dtype)
    return y if gain is None else y * gain.astype(y.dtype)


class BatchNormLeftOver(nnx.Module):
    """What stays of an nnx batch norm: ``y = skip_gain * (x * scale + bias)``, each where there is one.

    It takes the arguments of a batch norm's call; ``use_running_average`` is there for code that
    sets it on all layers, and has no effect.
    """

    def __init__(self, norm: nnx.BatchNorm, kept: LeftOver) -> None:
        self.scale = norm.scale if kept.scale else nnx.data(None)
        self.bias = norm.bias if kept.bias else nnx.data(None)
        # A norm stacked over layers has its channels last, and one scalar for each of them.
        stack = norm.mean.shape[:-1]
        zeros = jnp.zeros(stack, norm.param_dtype)
        self.skip_gain = nnx.Param(zeros) if kept.skip_gain else nnx.data(None)
        self.axis, self.dtype = norm.axis, kept.dtype or norm.dtype
        self.use_running_average = norm.use_running_average

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Apply what is left."""
        read = lambda variable: None if variable is None else variable[...]
        scale, bias, gain = read(self.scale), read(self.bias), read(self.skip_gain)
        return _applied(x, scale, bias, gain, self.axis, self.dtype)


def left_over(kept: LeftOver) -> Callable[[Any], nnx.Module]:
    """Return a function from an nnx batch norm to what stays of it."""

    def make(norm: Any) -> nnx.Module:
        if norm.mean.shape[-1] != norm.num_features:
            raise ValueError(
                f"a batch norm of {norm.num_features} channels has statistics of the shape "
                f"{norm.mean.shape}; layers must be stacked along axis 0"
            )
        return BatchNormLeftOver(norm, kept)

    return make


@dataclasses.dataclass(frozen=True)
class SkipGain:
    """The rule of a linen layer whose result is multiplied by a scalar that starts at 0."""

    def __call__(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> jax.Array:
        gain = layer.param("skip_gain", nn.initializers.zeros, (), layer.param_dtype)
        out = call(*args, **kwargs)
        return out * gain.astype(out.dtype)


def gained(layer: Any) -> Any:
    """Give an nnx layer a scalar ``skip_gain`` that starts at 0, times its result."""
    kernel_size = getattr(layer, "kernel_size", ())
    rank = 2 + (1 if isinstance(kernel_size, int) else len(kernel_size))
    stack = layer.kernel.shape[: layer.kernel.ndim - rank]
    layer.skip_gain = nnx.Param(jnp.zeros(stack, layer.param_dtype))
    object.__setattr__(layer, "__class__", _gained_class(type(layer)))
    return layer


@functools.cache
def _gained_class(base: type) -> type:
    # A subclass of the layer's own class: its parameters keep their paths.
    def call(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        out = base.__call__(self, *args, **kwargs)
        return out * self.skip_gain[...].astype(out.dtype)

    body = {"__call__": functools.wraps(base.__call__)(call), "__module__": base.__module__}
    return type(f"SkipGain{base.__name__}", (base,), body)


@dataclasses.dataclass(frozen=True)
class StandardizedKernel:
    """A layer's ``promote_dtype`` that standardises the kernel over each unit's inputs.

    ``gain * (w - mean(w)) / sqrt(max(n * var(w), 1e-4))`` with ``n`` inputs to a unit.
    """

    gain: float
    out_axis: int
    promote: Callable[..., Any]

    def __call__(self, *values: Any, **kwargs: Any) -> Any:
        # linen hands over the arrays one by one, nnx as a tuple.
        if len(values) == 1:
            x, kernel, bias = values[0]
            return self.promote((x, self.kernel(kernel), bias), **kwargs)
        x, kernel, bias = values
        return self.promote(x, self.kernel(kernel), bias, **kwargs)

    def kernel(self, kernel: jax.Array) -> jax.Array:
        """Return the standardised kernel, computed in float32 or better, with its own dtype."""
        axes = tuple(i for i in range(kernel.ndim) if i != self.out_axis % kernel.ndim)
        inputs = math.prod(kernel.shape[i] for i in axes)
        w = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
        mean = jnp.mean(w, axes, keepdims=True)
        var = jnp.mean(jnp.square(w - mean), axes, keepdims=True)
        return (self.gain * (w - mean) * lax.rsqrt(jnp.maximum(inputs * var, 1e-4))).astype(
            kernel.dtype
        )


def _standardized_kernel(layer: Any, gain: float) -> StandardizedKernel:
    swapped = isinstance(layer, _TRANSPOSED) and layer.transpose_kernel
    return StandardizedKernel(gain, -2 if swapped else -1, layer.promote_dtype)


def standardized(gain: float) -> Callable[[Any], nnx.Module]:
    """Return a function that makes an nnx layer standardise its kernel."""

    def make(layer: Any) -> nnx.Module:
        layer.promote_dtype = _standardized_kernel(layer, gain)
        return layer

    return make


@dataclasses.dataclass(frozen=True)
class Standardized:
    """The rule of a linen layer that standardises its kernel."""

    gain: float

    def __call__(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> jax.Array:
        del call
        new = layer.clone(parent=layer.scope, promote_dtype=_standardized_kernel(layer, self.gain))
        return new(*args, **kwargs)
