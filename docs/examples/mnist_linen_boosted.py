"""Train a small convolutional network on handwritten digits: Flax linen and optax."""

import boostax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

EPOCHS, BATCH = 8, 32


class CNN(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def load_data():
    """Return training and test images with labels, a third of the 1797 digits held out."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    data = {"image": images[order], "label": labels[order].astype(np.int32)}
    return {k: v[600:] for k, v in data.items()}, {k: v[:600] for k, v in data.items()}


def batches(data, rng):
    """Yield one epoch of shuffled batches."""
    order = rng.permutation(len(data["label"]))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        yield {k: v[order[start : start + BATCH]] for k, v in data.items()}


def loss_fn(params, batch):
    logits = CNN().apply({"params": params}, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def evaluate(params, data):
    logits = CNN().apply({"params": params}, data["image"])
    return jnp.mean(jnp.argmax(logits, axis=-1) == data["label"])


def train(epochs=EPOCHS, seed=0):
    """Train, and return the accuracy on the held-out digits."""
    train_data, test_data = load_data()
    rng = np.random.default_rng(seed)
    params = CNN().init(jax.random.key(seed), train_data["image"][:1])["params"]
    tx = optax.sgd(0.1, momentum=0.9)
    boost = boostax.AutoBoost("O1", {"grad_freeze": {"param_groups": 3, "total_steps": 296}})
    tx = boost.optimizer(tx, params, order=boostax.forward_order(loss_fn, params, train_data))
    train_step = boost.train_step(loss_fn, tx)
    state = train_step.init(params)
    for epoch in range(epochs):
        for batch in batches(train_data, rng):
            state, metrics = train_step(state, batch)
        accuracy = float(evaluate(state.params, test_data))
        print(f"epoch {epoch + 1}: loss {float(metrics['loss']):.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    train()
