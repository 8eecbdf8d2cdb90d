"""A three-layer perceptron 4-8-8-3 as a dict of arrays and a function."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.data import CLASSES, FEATURES, cross_entropy

SIZES = (FEATURES, 8, 8, CLASSES)


def init(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return fresh parameters; the values don't depend on JAX's random generator."""
    rng = np.random.default_rng(11)
    return {
        f"layers_{i}": {
            "kernel": jnp.asarray((rng.normal(size=(a, b)) / np.sqrt(a)).astype(dtype)),
            "bias": jnp.asarray((0.1 * rng.normal(size=(b,))).astype(dtype)),
        }
        for i, (a, b) in enumerate(itertools.pairwise(SIZES))
    }


def apply(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the logits."""
    last = len(SIZES) - 2
    for i in range(last + 1):
        layer = params[f"layers_{i}"]
        x = x @ layer["kernel"] + layer["bias"][None, :]
        x = x if i == last else jnp.tanh(x)
    return x


def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean cross entropy."""
    return cross_entropy(apply(params, batch["x"]), batch["y"])
