"""Models and data of the benchmarks: a ResNet-20 for 32x32 images, and a deep MLP."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from boostax import LossAux


class Task(NamedTuple):
    """What a benchmark needs to train a model.

    Attributes:
      params: the parameters.
      model_state: linen's other collections, or None.
      loss_fn: by the loss contract.
      has_aux: whether the loss returns a LossAux.
      batch: one batch.
    """

    params: Any
    model_state: Any
    loss_fn: Any
    has_aux: bool
    batch: Any


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm; the shortcut has no parameters (option A)."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = lambda: nn.BatchNorm(use_running_average=False)
        y = nn.Conv(self.width, (3, 3), (self.stride, self.stride), use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = norm()(nn.Conv(self.width, (3, 3), use_bias=False)(y))
        x = x[:, :: self.stride, :: self.stride]
        more = self.width - x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)))
        return nn.relu(x + y)


class ResNet20(nn.Module):
    """K. He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2."""

    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        for width in (16, 32, 64):
            for i in range(3):
                x = Block(width, 2 if width > 16 and i == 0 else 1)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def resnet20(batch_size: int = 32) -> Task:
    """Return a ResNet-20 on random 32x32 images with random labels."""
    net = ResNet20()
    kx, ky, kp = jax.random.split(jax.random.key(0), 3)
    batch = {
        "x": jax.random.normal(kx, (batch_size, 32, 32, 3)),
        "y": jax.random.randint(ky, (batch_size,), 0, 10),
    }
    variables = jax.jit(net.init)(kp, batch["x"])

    def loss_fn(params: Any, batch: Any, *, model_state: Any) -> Any:
        logits, state = net.apply(
            {"params": params, **model_state}, batch["x"], mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), LossAux(model_state=state)

    state = {"batch_stats": variables["batch_stats"]}
    return Task(variables["params"], state, loss_fn, True, batch)


def mlp(layers: int = 10, width: int = 512, batch_size: int = 256) -> Task:
    """Return an MLP of equally wide layers on random data."""
    keys = jax.random.split(jax.random.key(0), layers + 2)
    params = {
        f"layer_{i}": {
            "kernel": jax.random.normal(keys[i], (width, width)) * (2 / width) ** 0.5,
            "bias": jnp.zeros(width),
        }
        for i in range(layers)
    }
    batch = {
        "x": jax.random.normal(keys[-2], (batch_size, width)),
        "y": jax.random.normal(keys[-1], (batch_size, width)),
    }

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i in range(layers):
            x = x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"][None]
            x = jax.nn.relu(x) if i < layers - 1 else x
        return jnp.mean((x - batch["y"]) ** 2)

    return Task(params, None, loss_fn, False, batch)
