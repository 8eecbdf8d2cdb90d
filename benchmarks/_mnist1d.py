"""MNIST-1D and a small convolutional network for it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from boostax.errors import require


class Conv(nn.Module):
    """A 1-D convolution as one matrix product: XLA's own is slow on a CPU under ``vmap``."""

    features: int
    width: int
    stride: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        half = self.width // 2
        x = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
        last = x.shape[1] - self.width + 1
        parts = [x[:, i : i + last : self.stride] for i in range(self.width)]
        return nn.Dense(self.features)(jnp.concatenate(parts, -1))


class CNN(nn.Module):
    """Three convolutions and a dense layer, for signals of 40 values in 10 classes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., None]
        for width in (5, 3, 3):
            x = nn.relu(Conv(24, width)(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


class Data(NamedTuple):
    """The training part (4000, 40), which each seed splits, and the test part (1000, 40)."""

    x: jax.Array
    y: jax.Array
    test_x: jax.Array
    test_y: jax.Array


def load() -> Data:
    """Return MNIST-1D with its default settings.

    Raises:
      MissingExtraError: mnist1d is not there; it comes with the extra ``demo``.
    """
    source = require("mnist1d.data", "demo")
    held = np.random.get_state()  # make_dataset seeds the global generator
    data = source.make_dataset(source.get_dataset_args())
    np.random.set_state(held)
    x, y = np.float32(data["x"]), np.int32(data["y"])
    test_x, test_y = np.float32(data["x_test"]), np.int32(data["y_test"])
    return Data(*map(jnp.asarray, (x, y, test_x, test_y)))
