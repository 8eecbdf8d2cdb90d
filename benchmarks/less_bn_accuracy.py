"""What fewer batch norms cost: test accuracy of a small ResNet on digits and on MNIST-1D.

    python benchmarks/less_bn_accuracy.py

ResNet-8 of width 8, SGD with momentum 0.9 and a cosine schedule, batch 64, paired seeds (the same
examples, order and initial kernels for all arms). Each arm takes the rate with the best mean
accuracy on validation data; the test accuracy is compared with that of all norms, pair by pair. Takes
about twenty minutes of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any

import _measure
import _mnist1d
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax
from tests.models import zoo_linen

BATCH = 64
ARMS: dict[str, dict[str, Any] | None] = {
    "all": None,
    "less_bn": {},
    "scaled_ws": {"compensation": "scaled_ws"},
    "skip_init, no norm": {"keep": "none", "compensation": "skip_init"},
    "none": {"keep": "none"},
}


def digits() -> tuple[np.ndarray, ...]:
    """Return inputs and labels for training, and the same for validation and test."""
    images, labels = load_digits(return_X_y=True)
    x = (images.astype(np.float32) / 16).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(x))
    parts = np.split(order, [900, 1200])
    return tuple(part for idx in parts for part in (x[idx], labels[idx]))


def mnist1d() -> tuple[np.ndarray, ...]:
    """Return the same of MNIST-1D: signals of 40 values as images of 40 x 1."""
    data = _mnist1d.load()
    x, y = np.asarray(data.x)[:, :, None, None], np.asarray(data.y)
    test = np.asarray(data.test_x)[:, :, None, None], np.asarray(data.test_y)
    return (x[:3200], y[:3200], x[3200:], y[3200:], *test)


def trainer(settings: dict[str, Any] | None, data: tuple[np.ndarray, ...], steps: int) -> Any:
    """Return a function of seed and rate that trains, and gives validation and test accuracy."""
    net: Any = zoo_linen.resnet8(width=8)
    shape = jax.ShapeDtypeStruct((BATCH, *data[0].shape[1:]), jnp.float32)
    if settings is not None:
        net, _ = boostax.less_bn(net, shape, train=True, **settings)
    x, y, *held = data
    tx = optax.sgd(optax.cosine_decay_schedule(1.0, steps), momentum=0.9)
    init = jax.jit(lambda key: net.init(key, x[:2], train=True))

    @jax.jit
    def accuracy(values: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean(jnp.argmax(net.apply(values, x, train=False), -1) == y)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, stats: Any, state: Any, rate: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            values = {"params": params, "batch_stats": stats}
            logits, new = net.apply(values, x, train=True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), new.get("batch_stats", {})

        grads, new = jax.grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return optax.apply_updates(params, updates), new, state

    def train(seed: int, rate: float) -> tuple[float, float]:
        values = init(jax.random.key(seed))
        params, stats = values["params"], values.get("batch_stats", {})
        state, draw = tx.init(params), np.random.default_rng(seed)
        for _ in range(steps):
            chosen = draw.choice(len(x), BATCH, replace=False)
            params, stats, state = step(params, stats, state, rate, x[chosen], y[chosen])
        values = {"params": params, "batch_stats": stats}
        return float(accuracy(values, *held[:2])), float(accuracy(values, *held[2:]))

    return train


def task(
    name: str, data: tuple[np.ndarray, ...], steps: int, asked: argparse.Namespace
) -> dict[str, Any]:
    """Train the arms, and print their test accuracies against those of the first one."""
    scores: dict[str, np.ndarray] = {}
    for arm in asked.arms:
        train = trainer(ARMS[arm], data, steps)
        runs = [[train(seed, rate) for seed in range(asked.seeds)] for rate in asked.rates]
        scores[arm] = np.array(runs, np.float64)
    base: np.ndarray | None = None
    for arm, runs in scores.items():
        best = int(np.argmax(runs[:, :, 0].mean(1)))
        test = 100 * runs[best, :, 1]
        base = test if base is None else base
        gain = test - base
        error = gain.std(ddof=1) / np.sqrt(asked.seeds)
        spread = test.std(ddof=1)
        print(
            f"{name}: {arm:<20} rate {asked.rates[best]}: {test.mean():6.2f} % (std {spread:.2f}), "
            f"{gain.mean():+.2f} +- {error:.2f} points",
            flush=True,
        )
    return {arm: runs.tolist() for arm, runs in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--digits-steps", type=int, default=150)
    parser.add_argument("--mnist1d-steps", type=int, default=600)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.1, 0.2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--tasks", nargs="+", default=["digits", "mnist1d"])
    parser.add_argument("--out", default=None, help="write the results to this JSON file")
    asked = parser.parse_args()
    tasks = {
        "digits": (digits, asked.digits_steps),
        "mnist1d": (mnist1d, asked.mnist1d_steps),
    }
    results = {name: task(name, tasks[name][0](), tasks[name][1], asked) for name in asked.tasks}
    if asked.out:
        _measure.write_results(asked.out, results)


if __name__ == "__main__":
    main()
