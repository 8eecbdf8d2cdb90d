"""A linen network with batch normalization: Dense, BatchNorm, Dense."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from boostax.training.contract import LossAux
from tests.models.data import CLASSES, FEATURES, cross_entropy


class Net(nn.Module):
    """4-8-3 with batch normalization after the first layer."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kinds = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Dense(8, **kinds)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, **kinds)(x)
        return nn.Dense(CLASSES, **kinds)(nn.relu(x))


def init(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return the variables: ``params`` and ``batch_stats``."""
    return dict(Net(dtype).init(jax.random.key(0), jnp.zeros((2, FEATURES), dtype)))


def loss(params: Any, batch: Any, *, model_state: Any) -> tuple[jax.Array, LossAux]:
    """Return the mean cross entropy and the new batch statistics."""
    net = Net(batch["x"].dtype)
    logits, changed = net.apply(
        {"params": params, **model_state}, batch["x"], mutable=["batch_stats"]
    )
    return cross_entropy(logits, batch["y"]), LossAux(model_state=dict(changed))
