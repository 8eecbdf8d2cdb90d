"""Train a small convolutional network with batch norm on handwritten digits: Flax nnx and optax."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

EPOCHS, BATCH = 8, 32


class CNN(nnx.Module):
    """Two convolutions with batch norm and two dense layers."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dense = nnx.Linear(2 * 2 * 32, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.dense(x.reshape(x.shape[0], -1)))
        return self.head(x)


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


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


@nnx.jit
def evaluate(model, data):
    logits = nnx.view(model, use_running_average=True)(data["image"])
    return jnp.mean(jnp.argmax(logits, axis=-1) == data["label"])


def train(epochs=EPOCHS, seed=0):
    """Train, and return the accuracy on the held-out digits."""
    train_data, test_data = load_data()
    rng = np.random.default_rng(seed)
    model = CNN(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    for epoch in range(epochs):
        for batch in batches(train_data, rng):
            metrics = train_step(model, optimizer, batch)
        accuracy = float(evaluate(model, test_data))
        print(f"epoch {epoch + 1}: loss {float(metrics['loss']):.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    train()
