"""What centralize costs, and whether it helps, on the digits with a small convolutional network.

    python benchmarks/centralize.py

Four arms: SGD with momentum, plain and centralized on the gradient; Adam, plain and centralized on
the update, each at several learning rates. Prints accuracy and loss over paired seeds, at the same
rate and between the best rates of both (by mean loss): the mean difference to the plain arm with
its standard error. Then FLOPs and CPU time of a step. Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax

STEPS, BATCH = 120, 32


class CNN(nn.Module):
    """Two convolutions and two dense layers, for 8x8 images in 10 classes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


RATES = {"sgd": (0.1, 0.2, 0.4), "adam": (0.001, 0.003, 0.01, 0.03)}


def optimizer(name: str, rate: float) -> optax.GradientTransformation:
    """Return ``"sgd"`` or ``"adam"``, with ``" centralized"`` behind the name centralized."""
    if name.startswith("sgd"):
        base = optax.sgd(rate, momentum=0.9)
        return optax.chain(boostax.centralize(), base) if " " in name else base
    base = optax.adam(rate)
    return optax.chain(base, boostax.centralize()) if " " in name else base


def gain_line(got: np.ndarray, plain: np.ndarray) -> str:
    """Return accuracy and loss of ``got`` (seeds, 2) and their paired difference to ``plain``."""
    gain = got - plain
    error = gain.std(0, ddof=1) / np.sqrt(len(gain))
    return (
        f"accuracy {got[:, 0].mean():.3f} ({gain[:, 0].mean():+.3f} +- {error[0]:.3f}), "
        f"loss {got[:, 1].mean():.3f} ({gain[:, 1].mean():+.3f} +- {error[1]:.3f})"
    )


def main(seeds: int, out: str | None) -> None:
    """Measure, print, and write the results where asked."""
    images, labels = load_digits(return_X_y=True)
    images = (images.astype(np.float32) / 16).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    test, rest = order[:600], order[600:]
    test_x, test_y = jnp.asarray(images[test]), jnp.asarray(labels[test])
    model = CNN()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    @jax.jit
    def evaluate(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply({"params": params}, test_x)
        return jnp.mean(jnp.argmax(logits, -1) == test_y), loss_fn(params, (test_x, test_y))

    def batches(seed: int) -> Iterator[Any]:
        draw = np.random.default_rng(seed)
        for _ in range(STEPS):
            chosen = draw.choice(rest, BATCH, replace=False)
            yield images[chosen], labels[chosen]

    arms = [(b + kind, rate) for b in RATES for kind in ("", " centralized") for rate in RATES[b]]
    steps = {arm: boostax.train_step(loss_fn, optimizer(*arm), metrics=("loss",)) for arm in arms}
    scores: dict[Any, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for seed in range(seeds):
        params = model.init(jax.random.key(seed), images[:1])["params"]
        for arm, step in steps.items():
            state = step.init(params)
            for batch in batches(seed):
                state, _ = step(state, batch)
            accuracy, loss = evaluate(state.params)
            scores[arm].append((float(accuracy), float(loss)))
    results: dict[str, Any] = {f"{name} {rate}": scores[name, rate] for name, rate in arms}
    for base, rates in RATES.items():
        got = {arm: np.array(scores[arm]) for arm in arms}
        for rate in rates:
            plain = got[base, rate]
            print(
                f"{base} {rate}: plain accuracy {plain[:, 0].mean():.3f}, loss {plain[:, 1].mean():.3f};"
                f" centralized {gain_line(got[base + ' centralized', rate], plain)}"
            )
        best = {
            name: min(rates, key=lambda r, name=name: got[name, r][:, 1].mean())
            for name in (base, base + " centralized")
        }
        ours, theirs = ((name, best[name]) for name in (base + " centralized", base))
        print(f"{base}, best rates {theirs[1]} and {ours[1]}: {gain_line(got[ours], got[theirs])}")

    batch = next(batches(0))
    timed = {name: steps[name, rate] for name, rate in arms if rate == RATES[name.split()[0]][1]}
    held = {name: step.init(params) for name, step in timed.items()}

    def run(name: str) -> Any:
        held[name], metrics = timed[name](held[name], batch)
        return metrics

    times = _measure.interleaved(
        {name: functools.partial(run, name) for name in timed}, repeats=9, number=20
    )
    for base in RATES:
        flops = {
            name: timed[name].describe(held[name], batch).variants[0].flops
            for name in (base, base + " centralized")
        }
        ratio = flops[base + " centralized"] / flops[base]
        print(
            f"{base}: FLOPs {ratio:.4f}x;", _measure.ratio_line(times, base + " centralized", base)
        )
        results[f"{base} flops ratio"] = ratio
    if out is not None:
        _measure.write_results(out, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, help="paired seeds")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.out)
