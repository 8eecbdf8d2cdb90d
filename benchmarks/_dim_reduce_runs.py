"""Runs on MNIST-1D that are stopped early, and what two more epochs make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist1d import Conv, load
from _thor_runs import MLP, schedule_to
from flax import linen as nn
from jax import lax

import boostax

BATCH, TRAIN = 100, 3200  # of the 4000; the other 800 validate
EPOCH = TRAIN // BATCH
MORE = 2  # epochs after the stop
MOMENTUM = 0.9


class NormCNN(nn.Module):
    """Three convolutions, each with batch norm, and a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = x[..., None]
        for width in (5, 3, 3):
            x = Conv(24, width)(x)
            # Nothing is kept of older batches: statistics are taken anew in the end.
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.0)(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


NETS: Mapping[str, nn.Module] = {"MLP": MLP(), "CNN with batch norm": NormCNN()}


class Run(NamedTuple):
    """A run at the point where it was stopped.

    Attributes:
      start: the initial parameters.
      snapshots: of the parameters up to that point, the initial ones first.
      params, state: parameters and optimizer's state at that point.
      full: the parameters at the end of the whole schedule.
      data: training, validation and test part, each a batch.
      order: of the training examples in the two epochs to come, (2, TRAIN).
      rate: the learning rate of the last step.
    """

    start: Any
    snapshots: list[Any]
    params: Any
    state: Any
    full: Any
    data: tuple[Any, Any, Any]
    order: jax.Array
    rate: float


class Bench:
    """One net's runs, compiled once.

    Attributes:
      end, stop: steps of the schedule, and of the run, which is stopped at 70 % of it.
      every: steps between two snapshots.
    """

    def __init__(self, name: str, epochs: int):
        self.net = NETS[name]
        self.end, self.stop = epochs * EPOCH, 7 * epochs // 10 * EPOCH
        self.every = 8 if epochs > 15 else 2
        self.source = load()
        self.trained = functools.cache(self._trained)
        self.loops: dict[Any, Any] = {}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        logits, _ = self.net.apply({"params": params}, batch["x"], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @functools.cached_property
    def evaluate(self) -> Any:
        """Return test accuracy and loss, with statistics of the whole training part."""

        @jax.jit
        def run(params: Any, train: Any, test: Any) -> tuple[jax.Array, jax.Array]:
            _, stats = self.net.apply({"params": params}, train["x"], mutable=["batch_stats"])
            given: Any = {"train": False} if stats else {}
            logits: Any = self.net.apply({"params": params, **stats}, test["x"], **given)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, test["y"]).mean()
            return jnp.mean(logits.argmax(-1) == test["y"]), loss

        return run

    @functools.cached_property
    def steps(self) -> Any:
        """Return a function of SGD steps, with snapshots after every few."""

        @functools.partial(jax.jit, static_argnames="count")
        def run(
            carry: Any, data: Any, order: Any, rate: Any, first: Any, count: int
        ) -> tuple[Any, Any]:
            tx = optax.sgd(schedule_to(self.end, rate), momentum=MOMENTUM)

            def one(i: jax.Array, carry: Any) -> Any:
                params, state = carry
                batch = taken(data, order[i])
                updates, state = tx.update(jax.grad(self.loss)(params, batch), state, params)
                return optax.apply_updates(params, updates), state

            def some(carry: Any, i: jax.Array) -> Any:
                begin = first + i * self.every
                carry = lax.fori_loop(begin, begin + self.every, one, carry)
                return carry, carry[0]

            return lax.scan(some, carry, jnp.arange(count // self.every))

        return run

    def _trained(self, seed: int, rate: float) -> Run:
        draw = np.random.default_rng(seed)
        split = draw.permutation(len(self.source.x))
        whole = {"x": self.source.x, "y": self.source.y}
        train, validation = (taken(whole, part) for part in (split[:TRAIN], split[TRAIN:]))
        test = {"x": self.source.test_x, "y": self.source.test_y}
        epochs = np.stack([draw.permutation(TRAIN) for _ in range(self.end // EPOCH)])
        order = jnp.asarray(epochs.reshape(-1, BATCH))
        start = self.net.init(jax.random.key(seed), jnp.zeros((2, 40)))["params"]
        state = optax.sgd(lambda count: 0.0, momentum=MOMENTUM).init(start)
        stop, end = self.stop, self.end
        rate_ = jnp.float32(rate)
        at, seen = self.steps((start, state), train, order, rate_, 0, stop)
        full, _ = self.steps(at, train, order, rate_, stop, end - stop)
        seen = jax.tree.map(np.asarray, seen)
        snapshots = [taken(seen, i) for i in range(stop // self.every)]
        return Run(
            start=start,
            snapshots=[jax.tree.map(np.asarray, start), *snapshots],
            params=at[0],
            state=at[1],
            full=full[0],
            data=(train, validation, test),
            order=jnp.asarray(epochs[stop // EPOCH :][:MORE]),
            rate=float(schedule_to(end, rate_)(stop - 1)),
        )

    def more(self, run: Run, tx: Any, params: Any, state: Any, size: int, key: Any) -> Any:
        """Take two more epochs with batches of a size; return parameters and what the steps told.

        Args:
          key: what the compiled loop is kept under; ``tx`` of one key differ in their state alone.
        """
        if key not in self.loops:
            self.loops[key] = jax.jit(self._loop(tx))
        return self.loops[key](params, state, run.data[0], run.order.reshape(-1, size))

    def _loop(self, tx: Any) -> Callable[..., Any]:
        def loop(params: Any, state: Any, data: Any, order: jax.Array) -> Any:
            def one(carry: Any, chosen: jax.Array) -> Any:
                params, state = carry
                batch = taken(data, chosen)
                value, grads = jax.value_and_grad(self.loss)(params, batch)
                given = {"value": value, "value_fn": lambda p: self.loss(p, batch)}
                updates, state = tx.update(grads, state, params, **given)
                found = isinstance(state, boostax.DimReduceState)
                told = (state.status, state.trials) if found else ()
                return (optax.apply_updates(params, updates), state), told

            (params, _), told = lax.scan(one, (params, state), order)
            return params, told

        return loop


def taken(tree: Any, part: Any) -> Any:
    """Return a part of each leaf."""
    return jax.tree.map(lambda leaf: leaf[part], tree)


def mean_of(trees: Sequence[Any]) -> Any:
    """Return the mean of parameter trees."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.mean(leaves, axis=0)), *trees)


def random_basis(params: Any, k: int, seed: int) -> boostax.TrajectoryBasis:
    """Return a basis of k orthonormalised Gaussian directions."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = np.linalg.qr(np.random.default_rng(10_000 + seed).normal(size=(size, k)))[0].T
    return boostax.TrajectoryBasis.from_array(rows.astype(np.float32), params)
