"""An nnx network with batch normalization and dropout: Linear, BatchNorm, Dropout, Linear."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.models.data import CLASSES, FEATURES, cross_entropy


class Net(nnx.Module):
    """4-8-3 with batch normalization and dropout after the first layer."""

    def __init__(self, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, dropout: float = 0.25) -> None:
        kinds = {"dtype": dtype, "param_dtype": dtype}
        self.first = nnx.Linear(FEATURES, 8, rngs=rngs, **kinds)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs, **kinds)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(8, CLASSES, rngs=rngs, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def init(dtype: Any = jnp.float32, dropout: float = 0.25) -> Net:
    """Return a fresh model."""
    return Net(rngs=nnx.Rngs(0), dtype=dtype, dropout=dropout)


def loss(model: Net, batch: Any) -> jax.Array:
    """Return the mean cross entropy; the model's statistics and dropout counter move."""
    return cross_entropy(model(batch["x"]), batch["y"])
