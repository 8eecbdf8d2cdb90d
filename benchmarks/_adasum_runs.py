"""Runs of MNIST-1D on simulated workers: the arms, their training and their tuning."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist1d import CNN, Data, load
from jax import lax

import boostax

WORKERS, BATCH = 16, 16
TRAIN = 3200  # of the 4000; the other 800 validate
LANES = 8  # runs that one compiled call trains side by side, so that each arm compiles once
EVALUATIONS = 40
ARMS = ("mean", "AdaSum on gradients", "AdaSum on deltas", "mean, LAMB")
CONTROLS = ("mean, clipped", "mean, long warm-up")
GRIDS = {
    "mean": (-4, 2),
    "AdaSum on gradients": (-8, -2),
    "AdaSum on deltas": (-8, -2),
    "mean, LAMB": (-9, -3),
    "mean, clipped": (-4, 2),
    "mean, long warm-up": (-4, 2),
    "one worker, SGD": (-8, -2),
    "one worker, LAMB": (-10, -4),
}  # exponents of two, both ends included
ALONE = {arm: f"one worker, {'LAMB' if 'LAMB' in arm else 'SGD'}" for arm in ARMS}


class Run(NamedTuple):
    """One run: all of it but the rate follows from the seed."""

    seed: int
    rate: float


class Measured(NamedTuple):
    """The state of :func:`measured`.

    Attributes:
      ratio: the norm of what was exchanged over the norm of the mean, at the last update.
    """

    ratio: jax.Array


def measured(exchange: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Return a transformation that exchanges, and keeps the length of the step over the mean's."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Measured]:
        del params, state
        out = exchange(updates)
        length = optax.tree.norm(lax.pmean(updates, "data"))
        return out, Measured(optax.tree.norm(out) / jnp.where(length > 0, length, 1))

    return optax.GradientTransformation(lambda params: Measured(jnp.zeros(())), update)


def workers_of(arm: str) -> int:
    """Return how many workers an arm has."""
    return 1 if arm.startswith("one worker") else WORKERS


def optimizer(arm: str, rate: Any) -> tuple[Any, int]:
    """Return an arm's optimizer, and where the exchange is in its chain."""
    inner = optax.lamb(rate) if "LAMB" in arm else optax.sgd(rate, momentum=0.9)
    if "AdaSum" in arm:
        adasum = boostax.adasum("data")
        exchange = measured(lambda updates: adasum.update(updates, optax.EmptyState())[0])
    else:
        exchange = measured(lambda updates: lax.pmean(updates, "data"))
    if "clipped" in arm:
        inner = optax.chain(optax.clip_by_global_norm(1.0), inner)
    if "deltas" in arm:
        return optax.chain(inner, exchange), 1
    return optax.chain(exchange, inner), 0


def trainer(arm: str, data: Data, steps: int, workers: int) -> Callable[..., Any]:
    """Return the compiled function that trains LANES runs of an arm from start to end.

    It takes initial parameters, orders ``(LANES, steps, workers, BATCH)``, indices of the
    validation examples ``(LANES, 800)`` and rates ``(LANES,)``. It returns the validation accuracy at
    the end ``(LANES,)``, and ``(LANES, EVALUATIONS)`` of the test accuracy and of the length of the
    step over the mean's.
    """
    apply: Any = CNN().apply
    warm_up = max(steps // (4 if "long" in arm else 20), 1)
    shape = optax.warmup_cosine_decay_schedule(0.02, 1.0, warm_up, steps)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def accuracy(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.argmax(apply({"params": params}, x), -1) == y)

    def run(params: Any, order: jax.Array, held_out: jax.Array, rate: jax.Array) -> Any:
        tx, at = optimizer(arm, lambda count: rate * shape(count))

        def worker(params: Any, state: Any, chosen: jax.Array) -> tuple[Any, Any]:
            grads = jax.grad(loss)(params, data.x[chosen], data.y[chosen])
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        everyone: Any = jax.vmap(worker, in_axes=(None, 0, 0), axis_name="data")

        def step(carry: Any, chosen: jax.Array) -> Any:
            params, state = everyone(*carry, chosen)
            # All workers hold the same parameters; those of the first go on.
            params = jax.tree.map(lambda p: p[0], params)
            return (params, state), state[at].ratio[0]

        def stretch(carry: Any, chosen: jax.Array) -> Any:
            carry, ratio = lax.scan(step, carry, chosen)
            return carry, (accuracy(carry[0], data.test_x, data.test_y), ratio.mean())

        state = jax.vmap(lambda _: tx.init(params))(jnp.arange(workers))
        order = order.reshape(EVALUATIONS, -1, workers, BATCH)
        (params, _), (test, ratio) = lax.scan(stretch, (params, state), order)
        return accuracy(params, data.x[held_out], data.y[held_out]), test, ratio

    return jax.jit(jax.vmap(run))


class Bench:
    """Trains runs, LANES at a time, and keeps what they gave."""

    def __init__(self, steps: int):
        self.begin = time.process_time()
        self.data, self.steps = load(), steps
        self.init = jax.jit(lambda seed: CNN().init(jax.random.key(seed), jnp.zeros((1, 40))))
        self.kept: dict[tuple[str, Run], dict[str, Any]] = {}
        self.trainers = functools.cache(self._trainer)

    def _trainer(self, arm: str) -> Callable[..., Any]:
        workers = workers_of(arm)
        return trainer(arm, self.data, self.steps * WORKERS // workers, workers)

    def _inputs(self, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
        draw = np.random.default_rng(seed)
        split = draw.permutation(len(self.data.x))
        train, held_out = split[:TRAIN], split[TRAIN:]
        size = self.steps * WORKERS * BATCH
        epochs = [draw.permutation(train) for _ in range(-(-size // TRAIN))]
        return self.init(seed)["params"], np.concatenate(epochs)[:size], held_out

    def __call__(self, arm: str, runs: Iterable[Run]) -> None:
        """Train the runs that are not kept yet."""
        missing = [run for run in dict.fromkeys(runs) if (arm, run) not in self.kept]
        for first in range(0, len(missing), LANES):
            chosen = missing[first : first + LANES]
            lanes = chosen + [chosen[-1]] * (LANES - len(chosen))
            inputs = [self._inputs(run.seed) for run in lanes]
            params, orders, held_out = jax.tree.map(lambda *parts: np.stack(parts), *inputs)
            orders = orders.reshape(LANES, -1, workers_of(arm), BATCH)
            rates = np.array([run.rate for run in lanes], np.float32)
            got = jax.device_get(self.trainers(arm)(params, orders, held_out, rates))
            for i, run in enumerate(chosen):
                validation, test, ratio = (np.float64(value[i]).tolist() for value in got)
                self.kept[arm, run] = {"validation": validation, "test": test, "ratio": ratio}
            spent = time.process_time() - self.begin
            print(f"{spent:5.0f} s CPU: {arm}, {len(self.kept)} runs", file=sys.stderr, flush=True)

    def get(self, arm: str, rate: float, seeds: Iterable[int], what: str) -> np.ndarray:
        """Return what runs gave that are kept, the seeds first."""
        return np.array([self.kept[arm, Run(seed, rate)][what] for seed in seeds])

    def tune(self, arm: str, seeds: list[int], thin: int) -> tuple[float, dict[float, float]]:
        """Return the best rate and the validation accuracy at each.

        The grid grows by two rates while the best is at its edge; then the two between the best and
        its neighbours are tried as well.
        """

        def score(exponents: Iterable[float]) -> None:
            rates = [2.0**e for e in exponents]
            self(arm, [Run(seed, rate) for rate in rates for seed in seeds])
            for rate in rates:
                grid[rate] = float(self.get(arm, rate, seeds, "validation").mean())

        grid: dict[float, float] = {}
        low, high = GRIDS[arm]
        score(range(low, high + 1, thin))
        while (best := max(grid, key=grid.__getitem__)) in (min(grid), max(grid)):
            outwards = -thin if best == min(grid) else thin
            score(math.log2(best) + outwards * i for i in (1, 2))
        score(math.log2(best) + thin * i for i in (-0.5, 0.5))
        return max(grid, key=grid.__getitem__), dict(sorted(grid.items()))
