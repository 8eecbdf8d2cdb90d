"""Runs of MNIST-1D decayed to a budget: the arms, their training, their tuning and the race."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist1d import CNN, Data, load
from flax import linen as nn
from jax import lax

import boostax

BATCH = 100
TRAIN = 3200  # of the 4000; the other 800 validate
LADDER = tuple(round(2 ** (k / 4)) for k in range(16, 41))  # budgets: 16 to 1024 steps, times 1.19
BROAD, NEAR = 16, 8  # trials of each arm, over its whole range and around the best of those
REACH = 0.2  # of the range, to both sides: the trials around the best


class MLP(nn.Module):
    """Two hidden layers of 100, for signals of 40 values in 10 classes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(100)(x))
        return nn.Dense(10)(x)


class TrueCNN(nn.Module):
    """The convolutional network with ``flax.linen.Conv``, which takes longer on a CPU."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., None]
        for width in (5, 3, 3):
            pad = (width // 2, width // 2)
            x = nn.relu(nn.Conv(24, (width,), strides=2, padding=[pad])(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


class Net(NamedTuple):
    """A network, and the test accuracy that steps are counted to."""

    module: nn.Module
    target: float

    def init(self, seed: Any) -> Any:
        """Return the initial parameters of a seed."""
        return self.module.init(jax.random.key(seed), jnp.zeros((1, 40)))["params"]

    def logits(self, params: Any, x: jax.Array) -> Any:
        """Return the network's outputs."""
        return self.module.apply({"params": params}, x)

    def loss(self, params: Any, batch: Any) -> Any:
        """Return the mean cross-entropy."""
        return self.predicted(params, batch)[0]

    def predicted(self, params: Any, batch: Any) -> Any:
        """Return the mean cross-entropy, and the distribution that it is made of."""
        logits = self.logits(params, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), boostax.Categorical(logits)


NETS = {"MLP": Net(MLP(), 0.62), "CNN": Net(CNN(), 0.85), "CNN, Conv": Net(TrueCNN(), 0.85)}


class Range(NamedTuple):
    """A hyper-parameter's range, searched evenly in its logarithm."""

    low: float
    high: float

    def at(self, share: float) -> float:
        """Return the value at a share of the range, to four digits."""
        return float(f"{self.low * (self.high / self.low) ** share:.4g}")


class Arm(NamedTuple):
    """An optimizer in the race.

    Attributes:
      space: hyper-parameter -> range; the learning rate is called ``rate``.
      make: of a net, an example batch, the hyper-parameters (may be traced) and the schedule returns
        the optimizer and, for THOR, its layers.
    """

    space: Mapping[str, Range]
    make: Callable[..., tuple[Any, Any]]


def sgd(net: Any, batch: Any, hyper: Any, schedule: Any) -> tuple[Any, Any]:
    del net, batch
    return optax.sgd(schedule, momentum=1 - hyper["one_minus_momentum"]), None


def adamw(net: Any, batch: Any, hyper: Any, schedule: Any) -> tuple[Any, Any]:
    del net, batch
    return optax.adamw(schedule, b1=1 - hyper["one_minus_momentum"]), None


def muon(net: Any, batch: Any, hyper: Any, schedule: Any) -> tuple[Any, Any]:
    del net, batch

    def dimensions(params: Any) -> Any:
        def of(leaf: Any) -> Any:
            if leaf.ndim < 2:
                return None
            return optax.contrib.MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

        return jax.tree.map(of, params)

    beta = 1 - hyper["one_minus_momentum"]
    return optax.contrib.muon(schedule, beta=beta, muon_weight_dimension_numbers=dimensions), None


def thor(fisher: str, **options: Any) -> Callable[..., tuple[Any, Any]]:
    """Return the maker of a THOR arm; options go to ``boostax.thor``."""
    options = {"frequency": 25, **options}

    def make(net: Any, batch: Any, hyper: Any, schedule: Any) -> tuple[Any, Any]:
        params = jax.eval_shape(net.init, 0)
        layers = boostax.capture_layers(loss_of(net, fisher), params, batch, fisher=fisher)
        damping = hyper["damping"]
        tx = boostax.thor(schedule, lambda count: damping, momentum=0.9, layers=layers, **options)
        return tx, layers

    return make


def loss_of(net: Any, fisher: str) -> Any:
    """Return the loss; the true Fisher draws its labels from what the model predicts."""
    if fisher != "true":
        return net.loss

    def loss(params: Any, batch: Any) -> Any:
        value, predictive = net.predicted(params, batch)
        return value, boostax.LossAux(predictive=predictive)

    return loss


MOMENTUM = Range(0.02, 0.3)  # one minus it
SECOND = {"rate": Range(0.01, 1.0), "damping": Range(1e-3, 0.1)}
ARMS = {
    "SGD": Arm({"rate": Range(0.03, 2.0), "one_minus_momentum": MOMENTUM}, sgd),
    "AdamW": Arm({"rate": Range(2e-3, 0.25), "one_minus_momentum": MOMENTUM}, adamw),
    "Muon": Arm({"rate": Range(4e-3, 0.25), "one_minus_momentum": MOMENTUM}, muon),
    "THOR, empirical": Arm(SECOND, thor("empirical")),
    "THOR, true": Arm(SECOND, thor("true")),
}


def schedule_to(budget: Any, rate: Any) -> Callable[[Any], Any]:
    """Return the schedule of a run: 5 % linear warm-up, then a cosine to zero."""
    warm = 0.05 * budget

    def schedule(count: Any) -> Any:
        share = (count - warm) / (budget - warm)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * share))
        return rate * jnp.where(count < warm, (count + 1) / jnp.maximum(warm, 1), falling)

    return schedule


def training(arm: Arm, net: Any, data: Any, size: int = BATCH) -> Callable[..., Any]:
    """Return a function that trains one run from start to end, to be compiled.

    It takes initial parameters, the order ``(steps, size)`` of the examples in ``data`` (a dict of
    arrays), the budget, the hyper-parameters and a key, and returns the parameters.
    """
    example = {name: value[:size] for name, value in data.items()}

    def run(params: Any, order: Any, budget: Any, hyper: Any, key: Any) -> Any:
        tx, layers = arm.make(net, example, hyper, schedule_to(budget, hyper["rate"]))

        def step(i: jax.Array, carry: Any) -> Any:
            params, state = carry
            batch = {name: value[order[i]] for name, value in data.items()}
            if layers is None:
                grads, extra = jax.grad(net.loss)(params, batch), {}
            else:
                due = optax.tree.get(state, "due")
                _, grads, stats = layers.value_and_grad(
                    params, batch, due=due, rng=jax.random.fold_in(key, i)
                )
                extra = {"stats": stats}
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        return lax.fori_loop(0, budget, step, (params, tx.init(params)))[0]

    return run


def trainer(arm: Arm, net: Net, data: Data) -> Callable[..., Any]:
    """Return :func:`training`, compiled, that takes the validation examples' indices as well.

    It returns the validation and the test accuracy at the end.
    """
    train = training(arm, net, {"x": data.x, "y": data.y})

    def accuracy(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jnp.argmax(net.logits(params, x), -1) == y)

    @jax.jit
    def run(params: Any, order: Any, held_out: Any, budget: Any, hyper: Any, key: Any) -> Any:
        params = train(params, order, budget, hyper, key)
        return (
            accuracy(params, data.x[held_out], data.y[held_out]),
            accuracy(params, data.test_x, data.test_y),
        )

    return run


def halton(index: int, base: int) -> float:
    """Return a term of the Halton sequence: shares that fill their range evenly."""
    value, part = 0.0, 1.0
    while index:
        part /= base
        value += part * (index % base)
        index //= base
    return value


def trials(
    space: Mapping[str, Range], count: tuple[int, int], best: Callable[[], list[float] | None]
) -> Iterator[tuple[list[float], dict[str, float]]]:
    """Yield each trial's shares of the ranges, and the hyper-parameters there.

    Args:
      space: the ranges.
      count: trials over the whole ranges, and then around the best of those.
      best: tells the shares of the best trial so far, None before there is one.
    """
    center = [0.5] * len(space)
    for index in range(sum(count)):
        shares = [halton(index + 1, base) for base in (2, 3, 5)[: len(space)]]
        if index == count[0]:
            center = best() or center
        if index >= count[0]:
            around = zip(center, shares, strict=True)
            shares = [min(max(c + (2 * s - 1) * REACH, 0.0), 1.0) for c, s in around]
        places = zip(space.items(), shares, strict=True)
        yield shares, {name: limits.at(share) for (name, limits), share in places}


class Tuned(NamedTuple):
    """What the trials found.

    Attributes:
      hyper: the best hyper-parameters.
      rung: the lowest of the ladder at which any trial reached the target.
      steps: the budget at which the mean of these crossed it, at the seeds of the finals.
      edge: the hyper-parameters whose best value is within a twentieth of its range's end.
    """

    hyper: dict[str, float]
    rung: int
    steps: float
    edge: list[str]


class Race:
    """Trains runs and keeps what they gave, in a file too if one is named."""

    def __init__(self, cache: str | None = None):
        self.begin = time.process_time()
        self.data = load()
        self.cache = None if cache is None else pathlib.Path(cache)
        self.kept: dict[str, list[float]] = {}
        if self.cache is not None and self.cache.exists():
            lines = self.cache.read_text().splitlines()
            self.kept = dict(json.loads(line) for line in lines)
        self.trainer = functools.cache(lambda arm, net: trainer(ARMS[arm], NETS[net], self.data))
        self.inputs = functools.cache(self._inputs)

    def _inputs(self, net: str, seed: int) -> tuple[Any, ...]:
        draw = np.random.default_rng(seed)
        split = draw.permutation(len(self.data.x))
        train, held_out = split[:TRAIN], split[TRAIN:]
        epochs = [draw.permutation(train) for _ in range(-(-LADDER[-1] * BATCH // TRAIN))]
        order = np.concatenate(epochs)[: LADDER[-1] * BATCH].reshape(-1, BATCH)
        return jax.jit(NETS[net].init)(seed), jnp.asarray(order), jnp.asarray(held_out)

    def __call__(
        self, net: str, arm: str, hyper: Mapping[str, float], budget: int, seed: int
    ) -> list[float]:
        """Return validation and test accuracy at the end of a run."""
        name = json.dumps([net, arm, dict(sorted(hyper.items())), budget, seed])
        if name not in self.kept:
            self.kept[name] = self.train(net, arm, hyper, budget, seed)
            if self.cache is not None:
                with self.cache.open("a") as file:
                    file.write(json.dumps([name, self.kept[name]]) + "\n")
        return self.kept[name]

    def train(
        self, net: str, arm: str, hyper: Mapping[str, float], budget: int, seed: int
    ) -> list[float]:
        """Make one run."""
        run = self.trainer(arm, net)
        key = jax.random.key(seed + 1)
        values = {k: jnp.float32(v) for k, v in hyper.items()}
        got = run(*self.inputs(net, seed), jnp.int32(budget), values, key)
        return [float(value) for value in got]

    def validation(self, net: str, arm: str, hyper: Any, rung: int, seeds: Iterable[int]) -> float:
        """Return the median validation accuracy at a rung."""
        return float(np.median([self(net, arm, hyper, LADDER[rung], s)[0] for s in seeds]))

    def tune(
        self,
        net: str,
        arm: str,
        seeds: list[int],
        count: tuple[int, int],
        start: int = len(LADDER) - 1,
    ) -> Tuned:
        """Return the hyper-parameters that reach the target in the fewest steps.

        A trial starts at the lowest rung that any trial before it reached, the first at ``start``;
        where it reaches the target too, it goes on downwards until it does not. Equal rungs are told
        apart by the accuracy. The three best then meet at twice as many seeds of their own, where the
        budget counts at which the mean accuracy crosses the target.
        """
        space, target = ARMS[arm].space, NETS[net].target
        reached: list[tuple[int, float, list[float], dict[str, float]]] = []
        lowest = start
        for shares, hyper in trials(space, count, lambda: min(reached)[2] if reached else None):
            got, at = self.validation(net, arm, hyper, lowest, seeds), lowest
            if got < target:
                continue
            while at > 0:
                lower = self.validation(net, arm, hyper, at - 1, seeds)
                if lower < target:
                    break
                got, at = lower, at - 1
            lowest = min(lowest, at)
            reached.append((at, -got, shares, hyper))
        if not reached:
            raise RuntimeError(f"no trial of {arm} brought the {net} to its target")
        finals = [max(seeds) + 1 + i for i in range(2 * len(seeds))]
        rungs = range(max(lowest - 2, 0), min(lowest + 4, len(LADDER)))

        def budget(hyper: dict[str, float]) -> float:
            curve = {
                LADDER[rung]: [self(net, arm, hyper, LADDER[rung], seed)[0] for seed in finals]
                for rung in rungs
            }
            return crossing(curve, target)

        final = [(budget(hyper), shares, hyper) for _, _, shares, hyper in sorted(reached)[:3]]
        steps, shares, hyper = min(final)
        edge = [name for name, s in zip(space, shares, strict=True) if not 0.05 < s < 0.95]
        spent = time.process_time() - self.begin
        line = f"{spent:5.0f} s CPU: {net}, {arm}: {hyper}, {steps:.0f} steps of {final}"
        print(line, f"at the edge: {edge}" if edge else "", file=sys.stderr, flush=True)
        return Tuned(hyper, lowest, steps, edge)

    def curve(self, net: str, arm: str, tuned: Tuned, seeds: list[int]) -> dict[int, list[float]]:
        """Return budget -> test accuracy of each seed.

        From six rungs below the tuned one, upwards to four above it and on until all have reached it.
        """
        curve: dict[int, list[float]] = {}
        for rung in range(max(tuned.rung - 6, 0), len(LADDER)):
            budget = LADDER[rung]
            curve[budget] = [self(net, arm, tuned.hyper, budget, seed)[1] for seed in seeds]
            if rung >= tuned.rung + 4 and math.inf not in first(curve, NETS[net].target):
                break
        return curve


def first(curve: Mapping[int, list[float]], target: float) -> list[float]:
    """Return the smallest budget at which each seed reached the target; infinity for none."""
    steps = [math.inf] * len(next(iter(curve.values())))
    for budget in sorted(curve, reverse=True):
        for i, accuracy in enumerate(curve[budget]):
            steps[i] = float(budget) if accuracy >= target else steps[i]
    return steps


def crossing(curve: Mapping[int, list[float]], target: float, drawn: Any = slice(None)) -> float:
    """Return the budget at which the mean over the seeds crosses the target, between the rungs."""
    budgets = sorted(curve)
    means = [float(np.asarray(curve[budget])[drawn].mean()) for budget in budgets]
    for i, mean in enumerate(means):
        if mean >= target:
            if i == 0:
                return float(budgets[0])
            share = (target - means[i - 1]) / (mean - means[i - 1])
            return budgets[i - 1] * (budgets[i] / budgets[i - 1]) ** share
    return math.inf
