"""How soon a normalised head gets to 80 % test accuracy, by what its multiplier starts with.

    python benchmarks/norm_head.py > benchmarks/results/norm_head.md

Three arms, the same network and batches: the dense head, and the normalised head with its multiplier
starting at 1 (as in mindspore.boost) and at the default, sqrt(2) ln 9 = 3.1. SGD with momentum 0.9
at constant rates. Each arm's rate is the one with the fewest steps over the tuning seeds; the fresh
seeds are paired: initial kernels and batches are the same. Two tasks: digits with an MLP, MNIST-1D
with a convolutional network. Takes about ten minutes of CPU time.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import environment
from _mnist1d import CNN, load
from _tables import percent, points, table
from flax import linen as nn
from sklearn.datasets import load_digits

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax
from boostax.compare.statistics import bootstrap_median, paired_ratios

TARGET = 0.8
ARMS: dict[str, dict[str, float | None] | None] = {
    "dense": None,
    "multiplier 1": {"multiplier_init": 1.0},
    "default": {"multiplier_init": None},
}
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SAME = (0.01, 0.03, 0.1, 0.3)  # at which the arms are compared too
TUNING, SEEDS = 3, 12


class MLP(nn.Module):
    """64-64-64-10."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


class Task(NamedTuple):
    """A network, its data, and how long it is trained.

    Attributes:
      net: the network.
      x, y: training part.
      test_x, test_y: test part.
      steps: steps of a run.
      every: steps between evaluations.
      batch: examples of a step.
    """

    net: Any
    x: jax.Array
    y: jax.Array
    test_x: jax.Array
    test_y: jax.Array
    steps: int
    every: int
    batch: int


def digits() -> Task:
    """Return the digits (1437 for training, 360 for the test) and an MLP."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = jnp.asarray(x[order] / 16, jnp.float32), jnp.asarray(y[order], jnp.int32)
    return Task(MLP(), x[:1437], y[:1437], x[1437:], y[1437:], 600, 2, 32)


def mnist1d() -> Task:
    """Return MNIST-1D (4000 for training, 500 for the test) and a convolutional network."""
    data = load()
    return Task(CNN(), data.x, data.y, data.test_x[:500], data.test_y[:500], 2000, 10, 64)


def runner(task: Task, arm: str) -> Callable[..., np.ndarray]:
    """Return a function of seeds and rates that gives test accuracies ``(runs, evaluations)``."""
    settings, net = ARMS[arm], task.net
    if settings is not None:
        net, _ = boostax.norm_head(net, task.x[:2], **settings)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = net.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def run(seed: jax.Array, rate: jax.Array) -> jax.Array:
        start, order = jax.random.split(jax.random.key(seed))
        params = net.init(start, task.x[:2])["params"]
        tx = optax.sgd(rate, momentum=0.9)

        def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
            params, state = carry
            key = jax.random.fold_in(order, i)
            at = jax.random.randint(key, (task.batch,), 0, len(task.x))
            grads = jax.grad(loss)(params, task.x[at], task.y[at])
            updates, state = tx.update(grads, state)
            return (optax.apply_updates(params, updates), state), None

        def stretch(carry: Any, first: jax.Array) -> tuple[Any, jax.Array]:
            carry, _ = jax.lax.scan(step, carry, first + jnp.arange(task.every))
            logits = net.apply({"params": carry[0]}, task.test_x)
            return carry, jnp.mean(logits.argmax(-1) == task.test_y)

        firsts = jnp.arange(0, task.steps, task.every)
        return jax.lax.scan(stretch, (params, tx.init(params)), firsts)[1]

    compiled = jax.jit(jax.vmap(run))
    return lambda seeds, rates: np.asarray(compiled(jnp.asarray(seeds), jnp.asarray(rates)))


def steps_to_target(task: Task, accuracies: np.ndarray) -> list[float]:
    """Return the steps of each run until the test accuracy is at the target; infinity: never."""
    hit = accuracies >= TARGET
    return [task.every * float(h.argmax() + 1) if h.any() else float("inf") for h in hit]


def cell(values: list[float]) -> str:
    missed = sum(map(np.isinf, values))
    return f"{statistics.median(values):.0f}" + (f" ({missed} missed)" if missed else "")


def report(name: str, task: Task) -> None:
    """Train all arms and print the tables of a task."""
    tuning, fresh = range(100, 100 + TUNING), list(range(SEEDS))
    runs = {arm: runner(task, arm) for arm in ARMS}
    tuned: dict[str, dict[float, list[float]]] = {}
    for arm, run in runs.items():
        pairs = [(seed, rate) for rate in RATES for seed in tuning]
        steps = steps_to_target(task, run(*map(list, zip(*pairs, strict=True))))
        tuned[arm] = {r: steps[i * TUNING : (i + 1) * TUNING] for i, r in enumerate(RATES)}
    cost = lambda values: statistics.mean(min(v, 2 * task.steps) for v in values)
    best = {arm: min(RATES, key=lambda r, grid=grid: cost(grid[r])) for arm, grid in tuned.items()}
    rates = sorted({*best.values(), *SAME})
    accuracy = {
        (arm, rate): run(fresh, [rate] * SEEDS) for arm, run in runs.items() for rate in rates
    }
    steps = {key: steps_to_target(task, curve) for key, curve in accuracy.items()}

    print(f"## {name}\n\n{task.steps} steps of {task.batch} examples, {SEEDS} paired seeds.\n")
    print(f"Steps to {percent(TARGET)} %, each arm at its own rate:\n")
    base, rows = "multiplier 1", []
    for arm in ARMS:
        own, other = steps[arm, best[arm]], steps[base, best[base]]
        final = accuracy[arm, best[arm]][:, -1]
        ratio = "" if arm == base else _ratio(own, other)
        gain = "" if arm == base else points(final - accuracy[base, best[base]][:, -1])
        rows.append([arm, f"{best[arm]:g}", cell(own), ratio, percent(final.mean()), gain])
    head = [
        "head",
        "rate",
        "steps (median)",
        "over multiplier 1",
        "end, %",
        "minus multiplier 1, points",
    ]
    print(table(head, rows))
    print("\nSteps (median), and the default over multiplier 1, at the same rate:\n")
    rows = []
    for rate in SAME:
        pair = _ratio(steps["default", rate], steps[base, rate])
        rows.append([f"{rate:g}", *(cell(steps[arm, rate]) for arm in ARMS), pair])
    print(table(["rate", *ARMS, "default over multiplier 1"], rows))
    print(f"\nSteps over {TUNING} tuning seeds (mean, a miss counts as {2 * task.steps}):\n")
    rows = [[arm, *(f"{cost(grid[r]):.0f}" for r in RATES)] for arm, grid in tuned.items()]
    print(table(["head", *(f"{r:g}" for r in RATES)], rows), end="\n\n", flush=True)


def _ratio(values: list[float], base: list[float]) -> str:
    pairs = paired_ratios(values, base)
    if not pairs:
        return ""
    middle = bootstrap_median(pairs)
    return f"{middle.median:.2f} [{middle.low:.2f}, {middle.high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=("digits", "mnist1d", "both"), default="both")
    task = parser.parse_args().task
    about = environment()
    print("# The multiplier of a normalised head\n")
    print(
        f"`python benchmarks/norm_head.py`; JAX {about['jax']}, {about['cpu_count']} CPU cores.\n"
    )
    for name, make in (("digits", digits), ("mnist1d", mnist1d)):
        if task in (name, "both"):
            report({"digits": "Digits, MLP", "mnist1d": "MNIST-1D, CNN"}[name], make())


if __name__ == "__main__":
    main()
