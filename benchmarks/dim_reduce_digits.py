"""dim_reduce on scikit-learn's digits: forty full-batch steps in the subspace of a training run.

    python benchmarks/dim_reduce_digits.py [--seeds 5] [--steps 40] [--rate 0.1] [--quick]
        [--out results.json]

An MLP 64-64-32-10 with ReLU (6570 weights) is trained by 600 steps of batches of 64 by SGD with
momentum (its rate decayed to zero by a cosine), and a snapshot is taken at the start and after every
tenth, 61 in all. dim_reduce then starts anew from the first snapshot, the initial parameters, and
takes ``--steps`` steps on the whole training part (1347 examples, a quarter of the digits is held
out). A seed gives split, initial parameters and order of the batches. Beside it: the reference's rule,
other k and alpha, a bfloat16 basis, a random subspace of the same dimension (orthonormalised Gaussian
rows), and in the whole space full-batch SGD with momentum (the best of five rates by the mean test
accuracy, which flatters it) and optax's L-BFGS.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import environment, write_results
from _tables import percent, points, table

import boostax
from boostax.errors import require

WIDTHS = (64, 64, 32, 10)
TRAIN, BATCH, STEPS, EVERY = 1347, 64, 600, 10
BASE = "k = 20"
ARMS: dict[str, dict[str, Any]] = {
    BASE: {},
    "k = 20, alpha 0": {"alpha": 0.0},
    "k = 10": {"k": 10},
    "k = 40": {"k": 40},
    "k = 20, bfloat16 basis": {"dtype": jnp.bfloat16},
    "k = 20, mode='reference'": {"mode": "reference"},
    "20 random directions": {"random": True},
    "20 random directions, alpha 0": {"random": True, "alpha": 0.0},
}
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)


class Run(NamedTuple):
    """A trained network and what it was trained on.

    Attributes:
      train: the training part, a batch.
      test: the test part.
      snapshots: of the parameters, the initial ones first.
      params: at the end.
    """

    train: dict[str, jax.Array]
    test: dict[str, jax.Array]
    snapshots: list[Any]
    params: Any


def logits_of(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = logits_of(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@jax.jit
def accuracy(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(logits_of(params, batch["x"]).argmax(-1) == batch["y"])


def initial(rng: np.random.Generator) -> Any:
    return [
        {
            "kernel": jnp.asarray(rng.normal(size=(i, o)) * np.sqrt(2 / i), jnp.float32),
            "bias": jnp.zeros(o),
        }
        for i, o in itertools.pairwise(WIDTHS)
    ]


@functools.cache
def trainer(rate: float) -> Any:
    tx = optax.sgd(optax.cosine_decay_schedule(rate, STEPS), momentum=0.9)
    return boostax.train_step(loss_fn, tx)


def trained(seed: int, rate: float) -> Run:
    """Train a network and keep its snapshots."""
    images, labels = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    params = initial(rng)
    step = trainer(rate)
    state = step.init(params)
    with boostax.SnapshotWriter(every_steps=EVERY) as writer:
        writer.write(state.params)
        epochs = [rng.permutation(TRAIN) for _ in range(-(-STEPS * BATCH // TRAIN))]
        for chosen in np.concatenate(epochs)[: STEPS * BATCH].reshape(STEPS, BATCH):
            state, _ = step(state, {"x": x[chosen], "y": y[chosen]})
            writer.step(state.params)
        snapshots = writer.snapshots
    parts = (slice(TRAIN), slice(TRAIN, None))
    first, rest = ({"x": jnp.asarray(x[part]), "y": jnp.asarray(y[part])} for part in parts)
    return Run(first, rest, snapshots, state.params)


def basis_of(
    run: Run, seed: int, k: int = 20, random: bool = False, dtype: Any = jnp.float32
) -> Any:
    """Return the trajectory's basis, or one of random directions."""
    if not random:
        return boostax.trajectory_basis(run.snapshots, k, dtype=dtype, params=run.params)
    size = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    rows = np.linalg.qr(np.random.default_rng(1000 + seed).normal(size=(size, k)))[0].T
    return boostax.TrajectoryBasis.from_array(rows.astype(np.float32), run.params, dtype=dtype)


def loop(tx: Any, steps: int) -> Callable[..., Any]:
    """Return a compiled function that trains on one batch, and gives each step's numbers."""

    @jax.jit
    def run(params: Any, state: Any, batch: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss_fn)(params, batch)
            value_fn = lambda p: loss_fn(p, batch)
            given = {"value": value, "grad": grads, "value_fn": value_fn}
            updates, state = tx.update(grads, state, params, **given)
            told = (
                {"status": state.status, "trials": state.trials}
                if isinstance(state, boostax.DimReduceState)
                else {}
            )
            return (optax.apply_updates(params, updates), state), told

        (params, _), told = jax.lax.scan(one, (params, state), None, steps)
        return params, told

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.1, help="of the training run")
    parser.add_argument("--quick", action="store_true", help="two seeds, five steps")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    seeds, steps = (2, 5) if arguments.quick else (arguments.seeds, arguments.steps)
    if seeds < 2:
        parser.error(f"--seeds must be at least 2, got {seeds}")
    runs = [trained(seed, arguments.rate) for seed in range(seeds)]
    kept: dict[str, dict[str, list[float]]] = {}

    def keep(arm: str, run: Run, params: Any, told: Any) -> None:
        status = np.asarray(told.get("status", []))
        values = {
            "test": float(accuracy(params, run.test)),
            "train": float(accuracy(params, run.train)),
            "loss": float(loss_fn(params, run.train)),
            "failed": float(np.isin(status, (2, 5)).sum()),
            "trials": float(np.mean(told["trials"])) if told else float("nan"),
        }
        for name, value in values.items():
            kept.setdefault(arm, {}).setdefault(name, []).append(value)

    for run in runs:
        keep("the training run", run, run.params, {})
        keep(
            "its snapshots' mean",
            run,
            boostax.trajectory_basis(run.snapshots, 1).start(run.params, "mean"),
            {},
        )
    for arm, settings in ARMS.items():
        made = {k: settings[k] for k in ("k", "random", "dtype") if k in settings}
        rest = {k: v for k, v in settings.items() if k not in made}
        go = None
        for seed, run in enumerate(runs):
            tx = boostax.dim_reduce(basis_of(run, seed, **made), **rest)
            # The basis lies in the state: one program for all seeds.
            go = go or loop(tx, steps)
            start = jax.tree.map(jnp.asarray, run.snapshots[0])
            keep(arm, run, *go(start, tx.init(start), run.train))
    for rate in RATES:
        tx = optax.sgd(rate, momentum=0.9)
        go = loop(tx, steps)
        for run in runs:
            start = jax.tree.map(jnp.asarray, run.snapshots[0])
            keep(f"full-batch SGD, rate {rate:g}", run, *go(start, tx.init(start), run.train))
    tx = optax.lbfgs()
    go = loop(tx, steps)
    for run in runs:
        start = jax.tree.map(jnp.asarray, run.snapshots[0])
        keep("L-BFGS, whole space", run, *go(start, tx.init(start), run.train))

    best = max((a for a in kept if "rate" in a), key=lambda a: np.mean(kept[a]["test"]))
    rows = []
    for arm, got in kept.items():
        if "rate" in arm and arm != best:
            continue
        test = np.array(got["test"])
        searched = arm in ARMS
        rows.append(
            [
                arm,
                f"{percent(test.mean())} [{percent(test.min())}, {percent(test.max())}]",
                "" if arm == BASE else points(test - np.array(kept[BASE]["test"])),
                percent(float(np.mean(got["train"]))),
                f"{np.mean(got['loss']):.4f}",
                f"{sum(got['failed']):.0f} of {seeds * steps}" if searched else "",
                f"{np.mean(got['trials']):.1f}" if searched else "",
            ]
        )
    head = [
        "arm",
        "test accuracy, % [min, max]",
        f"less {BASE}, points [95 %]",
        "training accuracy",
        "training loss",
        "failed searches",
        "trials a step",
    ]
    rate = f"training run at rate {arguments.rate:g}"
    print(f"{seeds} seeds, {steps} full-batch steps, {rate}.\n\n{table(head, rows)}\n")
    where = environment()
    print(f"{where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, {"argv": vars(arguments), "arms": kept})


if __name__ == "__main__":
    main()
