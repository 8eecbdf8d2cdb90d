"""Tasks for ``boostax compare``: few labelled digits 5 to 9, with the help of many digits 0 to 4.

Four ways to train the same network on the same few labelled target images: from scratch, from a
pretrained backbone (alone), and from that together with the source images that are nearest to them
(joint) or with as many random ones (joint_random).

    boostax compare finetune_digits.py:alone --configs alone.json joint.json scratch.json --seeds 8
"""

import functools

import boostax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from boostax.compare import Task
from flax import linen as nn
from sklearn.datasets import load_digits

PER_CLASS, STEPS, BATCH, NEIGHBOURS = 10, 120, 32, 10

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
shuffled = np.random.RandomState(0).permutation(len(images))
source = shuffled[labels[shuffled] < 5]
target = shuffled[labels[shuffled] >= 5]
test, pool = target[:400], target[400:]
labels = (labels % 5).astype(np.int32)  # each head has its own five classes


class Net(nn.Module):
    """Three convolutions with batch norm, and a head for each of the two data sets."""

    @nn.compact
    def __call__(self, x, train=True):
        for i, (features, stride) in enumerate(((16, 1), (32, 2), (32, 1))):
            x = nn.Conv(features, (3, 3), strides=stride, use_bias=False, name=f"conv{i}")(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm{i}")(x)
            x = nn.relu(x)
        x = x.mean((1, 2))
        return {side: nn.Dense(5, name=f"{side}_head")(x) for side in ("source", "target")}


net = Net()


def side_loss(side):
    """Return the loss of one head on its own data."""

    def loss(params, batch, *, model_state):
        variables = {"params": params, **model_state}
        logits, changed = net.apply(variables, batch["x"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[side], batch["y"])
        return losses.mean(), boostax.LossAux(model_state=changed)

    return loss


def draw_batches(rows, seed, size=BATCH):
    """Yield batches of these images for ever, shuffled anew in each pass."""
    draw, left = np.random.RandomState(seed), np.zeros(0, int)
    while True:
        while len(left) < size:
            left = np.concatenate([left, draw.permutation(rows)])
        chosen, left = left[:size], left[size:]
        yield {"x": images[chosen], "y": labels[chosen]}


def optimizer(rate, steps):
    return optax.sgd(optax.cosine_decay_schedule(rate, steps), momentum=0.9)


@jax.jit
def fresh(key):
    variables = net.init(key, images[:1])
    return variables["params"], {"batch_stats": variables["batch_stats"]}


pretraining = boostax.train_step(side_loss("source"), optimizer(0.1, 200), has_aux=True)


@functools.cache
def pretrained(network=0):
    """Train the backbone and the source head on all source images; the target head stays new."""
    params, model_state = fresh(jax.random.key(network))
    state = pretraining.init(params, model_state=model_state)
    for _, batch in zip(range(200), draw_batches(source, network), strict=False):
        state, _ = pretraining(state, batch)
    return state.params, state.model_state


def start(key, network=0):
    """Return a pretrained network with a new target head."""
    params, model_state = pretrained(network)
    known = {name: leaf for name, leaf in params.items() if name != "target_head"}
    loaded, _ = boostax.load_weights(fresh(key)[0], known, allow_missing="target_head/*")
    return loaded, model_state


def labelled(seed, per_class=PER_CLASS):
    """Return the few target images whose labels are known."""
    rows = np.random.RandomState(seed).permutation(pool)
    return np.concatenate([rows[labels[rows] == c][:per_class] for c in range(5)])


@functools.cache
def descriptors(network=0):
    """Return histograms of the first layers' responses to all images."""
    params, model_state = pretrained(network)
    layers = []
    for path in ("norm0", "norm1"):
        tap = boostax.feature_tap(
            net, path, {"params": params, **model_state}, kwargs={"train": False}
        )
        responses = tap(images)
        edges = boostax.histogram_edges(responses, 10)
        layers.append(boostax.feature_histograms(responses, edges))
    return np.concatenate(layers, axis=1)


def nearest(rows, network=0):
    """Return the source images that are nearest to these target images."""
    found = descriptors(network)
    subset = boostax.nearest_source_subset(
        found[source], found[rows], NEIGHBOURS, metric="symmetric_kl"
    )
    return source[subset.indices]


def target_batches(seed, per_class=PER_CLASS):
    return draw_batches(labelled(seed, per_class), seed)


def joint_batches(seed, per_class=PER_CLASS, network=0, at_random=False):
    rows = labelled(seed, per_class)
    chosen = nearest(rows, network)
    if at_random:
        chosen = np.random.RandomState(seed).permutation(source)[: len(chosen)]
    # Both are endless, so the steps end the run; the source's order has a seed of its own.
    pairs = boostax.joint_batches(
        lambda _: draw_batches(chosen, seed + 1000), lambda _: draw_batches(rows, seed)
    )
    return iter(pairs)


@jax.jit
def evaluate(params, model_state):
    logits = net.apply({"params": params, **model_state}, images[test], train=False)["target"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[test])
    return {"accuracy": jnp.mean(logits.argmax(-1) == labels[test]), "loss": losses.mean()}


joint_loss = boostax.joint_loss(side_loss("source"), side_loss("target"))
common = {
    "evaluate": evaluate,
    "optimizer": optimizer,
    "learning_rate": 0.03,
    "steps": STEPS,
    "target": "accuracy=0.9",
    "has_aux": True,
}
scratch = Task(init=fresh, loss=side_loss("target"), batches=target_batches, **common)
alone = Task(init=start, loss=side_loss("target"), batches=target_batches, **common)
joint = Task(init=start, loss=joint_loss, batches=joint_batches, **common)
joint_random = Task(
    init=start,
    loss=joint_loss,
    batches=functools.partial(joint_batches, at_random=True),
    **common,
)
