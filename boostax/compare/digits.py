"""The comparison that runs without arguments: a small conv net on scikit-learn's digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from boostax.compare.arms import Arm
from boostax.compare.task import Task
from boostax.errors import require
from boostax.training.contract import LossAux

__all__ = ["default_arms", "digits_arms", "digits_task"]

_STEPS, _BATCH = 200, 32


class ConvNet(nn.Module):
    """Three convolutions with batch norm, for 8x8 grey images in 10 classes."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features, stride in ((16, 1), (32, 2), (32, 1)):
            x = nn.Conv(features, (3, 3), strides=stride, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(10)(x)


def digits_task() -> Task:
    """Return the task: the 1797 digits, a third held out, the same split for every seed.

    Raises:
      MissingExtraError: scikit-learn is not there; it comes with the extra ``demo``.
    """
    datasets = require("sklearn.datasets", "demo")
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images.astype(np.float32) / 16).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    shuffled = np.random.RandomState(0).permutation(len(images))
    held_out, train = shuffled[:597], shuffled[597:]
    test_x, test_y = jnp.asarray(images[held_out]), jnp.asarray(labels[held_out])
    train_x, train_y = images[train], labels[train]
    model = ConvNet()

    @jax.jit
    def init(key: jax.Array) -> Any:
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(params: Any, batch: Any, *, model_state: Any) -> Any:
        logits, new_state = model.apply(
            {"params": params, **model_state}, batch["x"], train=True, mutable=["batch_stats"]
        )
        value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return value, LossAux(model_state=new_state)

    def batches(seed: int) -> Iterator[Any]:
        draw = np.random.RandomState(seed)
        while True:
            order = draw.permutation(len(train_x))
            for start in range(0, len(order) - _BATCH + 1, _BATCH):
                chosen = order[start : start + _BATCH]
                yield {"x": train_x[chosen], "y": train_y[chosen]}

    @jax.jit
    def evaluate(params: Any, model_state: Any) -> dict[str, jax.Array]:
        logits: Any = model.apply({"params": params, **model_state}, test_x, train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, test_y)
        return {
            "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == test_y),
            "loss": losses.mean(),
        }

    def optimizer(learning_rate: Any, steps: int) -> optax.GradientTransformation:
        return optax.sgd(optax.cosine_decay_schedule(learning_rate, steps), momentum=0.9)

    return Task(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        optimizer=optimizer,
        learning_rate=0.05,
        steps=_STEPS,
        target="accuracy=0.96",
        has_aux=True,
        name="digits, small conv net with batch norm",
    )


def digits_arms() -> tuple[Arm, ...]:
    """Return the six arms: plain, O1, a window of two batches, centralization, THOR, DimReduce."""
    return (
        Arm("plain"),
        Arm("O1", {"grad_freeze": {"param_groups": 4, "full_fraction": 0.3}}, level="O1"),
        Arm(
            "accumulation",
            {
                "boost": {"mode": "manual", "grad_accumulation": True},
                "grad_accumulation": {"every": 2, "nonfinite": "off"},
            },
        ),
        Arm("centralization", {"boost": {"mode": "manual", "centralize": True}}),
        Arm(
            "thor",
            {
                "boost": {"mode": "manual", "thor": True},
                "thor": {"damping": 0.1, "frequency": 50, "early": [0, 1, 3, 6, 20]},
            },
        ),
        Arm(
            "dim_reduce",
            {"dim_reduce": {"n_components": 20}},
            dim_reduce_after=0.7,
            dim_reduce_batches=6,
        ),
    )


def default_arms() -> tuple[Arm, ...]:
    """Return the same arms for any model: no more groups than layers, odd weights left alone."""
    plain, o1, accumulation, centralization, thor, subspace = digits_arms()
    skip = {"centralize": {"unreadable": "skip"}}
    return (
        plain,
        dataclasses.replace(o1, config={**o1.config, **skip}, adapts=True),
        dataclasses.replace(accumulation, adapts=True),
        dataclasses.replace(centralization, config={**centralization.config, **skip}, adapts=True),
        dataclasses.replace(thor, adapts=True),
        dataclasses.replace(subspace, adapts=True),
    )
