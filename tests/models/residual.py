"""A residual block of dense layers with batch norms, rewritten at the model seam: nnx and linen."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import boostax
from tests.models.data import CLASSES, FEATURES, cross_entropy

WIDTH = 6


class NnxNet(nnx.Module):
    """Stem, one residual block, head."""

    def __init__(self, *, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        kinds = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.stem = nnx.Linear(FEATURES, WIDTH, **kinds)
        self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, **kinds)
        self.norm1 = nnx.BatchNorm(WIDTH, momentum=0.9, **kinds)
        self.second = nnx.Linear(WIDTH, WIDTH, use_bias=False, **kinds)
        self.norm2 = nnx.BatchNorm(WIDTH, momentum=0.9, **kinds)
        self.head = nnx.Linear(WIDTH, CLASSES, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        y = self.norm2(self.second(nnx.relu(self.norm1(self.first(x)))))
        return self.head(nnx.relu(x + y))


class LinenNet(nn.Module):
    """The same."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds = {"dtype": self.dtype, "param_dtype": self.dtype}
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, **kinds)
        x = nn.Dense(WIDTH, **kinds)(x)
        y = nn.relu(norm()(nn.Dense(WIDTH, use_bias=False, **kinds)(x)))
        y = norm()(nn.Dense(WIDTH, use_bias=False, **kinds)(y))
        return nn.Dense(CLASSES, **kinds, name="head")(nn.relu(x + y))


def nnx_net(dtype: Any = jnp.float32) -> Any:
    """Return the nnx model with standardised kernels, layer norms and a normalised head."""
    x = jax.ShapeDtypeStruct((4, FEATURES), dtype)
    net, _ = boostax.less_bn(NnxNet(rngs=nnx.Rngs(0), dtype=dtype), x, compensation="scaled_ws")
    net, _ = boostax.replace_norm(net, "layer")
    return boostax.norm_head(net, x)[0]


@functools.cache
def linen_net(dtype: Any = jnp.float32) -> Any:
    """Return the linen model with one batch norm left and a normalised head."""
    x = jax.ShapeDtypeStruct((4, FEATURES), dtype)
    net, _ = boostax.less_bn(LinenNet(dtype), x)
    return boostax.norm_head(net, x)[0]


def nnx_loss(model: Any, batch: Any) -> jax.Array:
    """Return the mean cross entropy."""
    return cross_entropy(model(batch["x"]), batch["y"])


def linen_init(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return the rewritten model's variables."""
    return dict(linen_net(dtype).init(jax.random.key(0), jnp.zeros((2, FEATURES), dtype)))


def linen_loss(params: Any, batch: Any, *, model_state: Any) -> tuple[jax.Array, boostax.LossAux]:
    """Return the mean cross entropy and the new batch statistics."""
    net = linen_net(batch["x"].dtype)
    logits, changed = net.apply(
        {"params": params, **model_state}, batch["x"], mutable=["batch_stats"]
    )
    return cross_entropy(logits, batch["y"]), boostax.LossAux(model_state=dict(changed))
