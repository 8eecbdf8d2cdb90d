"""A task for ``boostax compare``: a small MLP that tells two moons apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from boostax.compare import Task
from flax import linen as nn
from sklearn.datasets import make_moons

x, y = (np.asarray(a, np.float32) for a in make_moons(2000, noise=0.15, random_state=0))
model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(1)])


def loss(params, batch):
    logits = model.apply({"params": params}, batch["x"])[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()


def batches(seed):
    for chosen in np.random.RandomState(seed).randint(0, 1500, size=(10_000, 64)):
        yield {"x": x[chosen], "y": y[chosen]}


@jax.jit
def evaluate(params, model_state):
    logits = model.apply({"params": params}, x[1500:])[:, 0]
    return {"accuracy": jnp.mean((logits > 0) == (y[1500:] > 0))}


task = Task(
    init=lambda key: model.init(key, x[:1])["params"],
    loss=loss,
    batches=batches,
    evaluate=evaluate,
    optimizer=lambda rate, steps: optax.adam(optax.cosine_decay_schedule(rate, steps)),
    learning_rate=0.01,
    steps=200,
    target="accuracy=0.95",
)
