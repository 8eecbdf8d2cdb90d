"""Batches for the tiny models: 24 examples divide evenly over 1, 2, 3, 4 and 8 devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES, FEATURES, CLASSES = 24, 4, 3


def batches(steps: int, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    """Return ``steps`` batches stacked on the leading axis: ``x (steps, 24, 4)``, ``y (steps, 24)``."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(steps, EXAMPLES, FEATURES))
    y = np.argmax(x[..., :CLASSES] + 0.3 * rng.normal(size=(steps, EXAMPLES, CLASSES)), axis=-1)
    return {"x": x.astype(dtype), "y": y.astype(np.int32)}


def random_like(tree: Any, steps: int, seed: int = 3) -> Any:
    """Return ``steps`` random trees like ``tree``, stacked on the leading axis: a gradient stream."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=(steps, *leaf.shape)).astype(leaf.dtype), tree)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy over the batch, in float32 as mixed-precision code has it."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
