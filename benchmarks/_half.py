"""Small networks in half precision, and the share of their gradients that is exactly zero.

Import it before JAX: XLA's CPU backend may keep float16 values in float32 from one operation to the next
(``xla_allow_excess_precision``), and then nothing underflows that would on an accelerator.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from boostax.errors import require

WEIGHTS = {"a": 2.0**16, "b": 2.0**-20}  # of the two towers in the loss


class Data(NamedTuple):
    """Scikit-learn's digits: images of 64 values in [-1/2, 1/2], and labels."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def digits() -> Data:
    """Return 1197 images to train on and 600 to test on."""
    images, labels = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16 - 0.5, labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[600:], order[:600]
    return Data(images[train], labels[train], images[test], labels[test])


def batches(data: Data, steps: int, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield random batches."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(len(data.x), size, replace=False)
        yield {"x": data.x[chosen], "y": data.y[chosen]}


def pairs(data: Data, steps: int, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield random batches for two towers, which see different images."""
    parts = zip(
        batches(data, steps, size, seed), batches(data, steps, size, seed + 1000), strict=True
    )
    for a, b in parts:
        yield {"a": a, "b": b}


def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    kernel = jax.random.normal(key, (inputs, outputs)) * (1.5 / inputs) ** 0.5
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def mlp_init(key: jax.Array, *widths: int) -> dict[str, Any]:
    """Return float32 parameters of an MLP, ``layer_00`` first."""
    keys = jax.random.split(key, len(widths))
    sizes = zip(keys, widths[:-1], widths[1:], strict=False)
    return {f"layer_{i:02d}": dense(k, m, n) for i, (k, m, n) in enumerate(sizes)}


def mlp(params: Any, x: jax.Array, dtype: Any) -> jax.Array:
    """Return logits in ``dtype``; all products and activations are in it."""
    x = x.astype(dtype)
    for i, layer in enumerate(params.values()):
        x = x @ layer["kernel"].astype(dtype) + layer["bias"].astype(dtype)
        x = x if i == len(params) - 1 else jax.nn.silu(x)
    return x


def cnn_init(key: jax.Array, channels: tuple[int, ...], pixels: int) -> dict[str, Any]:
    """Return float32 parameters of 3x3 convolutions and a dense layer behind them."""
    keys = jax.random.split(key, len(channels))
    params: dict[str, Any] = {}
    for i, (k, m, n) in enumerate(zip(keys, channels[:-1], channels[1:], strict=False)):
        kernel = jax.random.normal(k, (3, 3, m, n)) * (1.5 / (9 * m)) ** 0.5
        params[f"layer_{i:02d}"] = {"kernel": kernel, "bias": jnp.zeros(n)}
    params[f"layer_{len(channels) - 1:02d}"] = dense(keys[-1], pixels * channels[-1], 10)
    return params


def cnn(params: Any, x: jax.Array, dtype: Any, strides: tuple[int, ...]) -> jax.Array:
    """Return logits in ``dtype`` for square images of one channel."""
    side = round(x.shape[-1] ** 0.5)
    x = x.reshape(-1, side, side, 1).astype(dtype)
    layers = list(params.values())
    numbers = ("NHWC", "HWIO", "NHWC")
    for layer, stride in zip(layers[:-1], strides, strict=True):
        kernel = layer["kernel"].astype(dtype)
        x = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)
        x = jax.nn.silu(x + layer["bias"].astype(dtype))
    x = x.reshape(x.shape[0], -1)
    return x @ layers[-1]["kernel"].astype(dtype) + layers[-1]["bias"].astype(dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss, in float32 as is usual."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def towers_init(key: jax.Array, *widths: int) -> dict[str, Any]:
    """Return the parameters of two MLPs that share nothing."""
    a, b = jax.random.split(key)
    return {"a": mlp_init(a, *widths), "b": mlp_init(b, *widths)}


def towers_loss(dtype: Any) -> Callable[..., jax.Array]:
    """Return ``2^16 loss(tower a) + 2^-20 loss(tower b)``."""

    def loss(params: Any, batch: Any) -> jax.Array:
        each = {
            name: weight
            * cross_entropy(mlp(params[name], batch[name]["x"], dtype), batch[name]["y"])
            for name, weight in WEIGHTS.items()
        }
        return each["a"] + each["b"]

    return loss


def zero_shares(grads: Any, exact: Any) -> dict[str, float]:
    """Return, for each key of the gradients, the share of elements that are zero and should not be.

    Args:
      grads: gradients, a dict of trees.
      exact: the same in float32. What is zero there does not count.

    Returns:
      The shares; a part whose gradients overflowed is left out.
    """
    shares = {}
    for name, tree in exact.items():
        if not all(np.all(np.isfinite(np.asarray(g))) for g in jax.tree.leaves(grads[name])):
            continue
        both = zip(jax.tree.leaves(grads[name]), jax.tree.leaves(tree), strict=True)
        found = [(np.asarray(g)[np.asarray(e) != 0] == 0) for g, e in both]
        shares[name] = float(np.concatenate(found).mean())
    return shares


def check_underflow() -> None:
    """Raise where float16 does not underflow inside a compiled function, as it would on a GPU.

    Raises:
      RuntimeError: this backend computes in more precision than the program says.
    """
    half = lambda value: jnp.full((4, 4), value, jnp.float16)

    @jax.jit
    def product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (a @ b) @ half(2.0**14), (a * b) * half(2.0**14)

    if any(np.any(np.asarray(found)) for found in product(half(2.0**-14), half(2.0**-14))):
        raise RuntimeError(
            "float16 does not underflow here: this backend keeps it in float32. Import _half ahead of "
            "jax, or start Python with XLA_FLAGS=--xla_allow_excess_precision=false"
        )
