"""THOR against Muon, SGD and AdamW on an autoencoder of scikit-learn's digits: training loss.

    OPENBLAS_NUM_THREADS=1 python benchmarks/thor_autoencoder.py [--quick] [--steps 400] [--seeds 5]
        [--out results.json]

Needs scikit-learn (extra ``demo``). The net is 64-128-64-16-64-128-64 with tanh; the loss half the
squared error, summed over the pixels (a Gaussian's, up to a constant). Each arm has the same number of
trials, scored by the training loss at the end of ``--steps`` decayed steps at two tuning seeds. Then
fresh seeds, twice: after the same steps, and after the same CPU time, where each arm gets as many
steps, its schedule decayed to them, as it makes in the time of ``--steps`` steps of SGD.

Prints Markdown. About ten minutes of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from _measure import environment, interleaved, ratios, write_results
from _tables import table
from _thor_runs import (
    ARMS,
    BROAD,
    MOMENTUM,
    NEAR,
    Arm,
    Range,
    loss_of,
    schedule_to,
    training,
    trials,
)

import boostax
from boostax.compare.statistics import bootstrap_median
from boostax.errors import require

WIDTHS = (64, 128, 64, 16, 64, 128, 64)
SIZE = 100
SECOND = {"rate": Range(0.01, 1.0), "damping": Range(3e-3, 30.0)}
SPACES = {
    "SGD": {"rate": Range(3e-4, 0.1), "one_minus_momentum": MOMENTUM},
    "AdamW": {"rate": Range(3e-4, 0.06), "one_minus_momentum": MOMENTUM},
    "Muon": {"rate": Range(1e-3, 0.25), "one_minus_momentum": MOMENTUM},
    "THOR, empirical": SECOND,
    "THOR, true": SECOND,
}
MOST = 4  # times --steps: no arm's steps are so cheap that it gets more


class Autoencoder:
    """The net, in the form that the arms take."""

    def init(self, seed: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
        pairs = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
        return [
            {"kernel": jax.random.normal(k, (m, n)) / m**0.5, "bias": jnp.zeros(n)}
            for k, m, n in pairs
        ]

    def outputs(self, params: Any, x: jax.Array) -> jax.Array:
        for i, layer in enumerate(params):
            x = x @ layer["kernel"] + layer["bias"]
            x = x if i == len(params) - 1 else jnp.tanh(x)
        return x

    def loss(self, params: Any, batch: Any) -> jax.Array:
        error = self.outputs(params, batch["x"]) - batch["x"]
        return 0.5 * jnp.sum(error**2, -1).mean()

    def predicted(self, params: Any, batch: Any) -> Any:
        mean = self.outputs(params, batch["x"])
        value = 0.5 * jnp.sum((mean - batch["x"]) ** 2, -1).mean()
        return value, boostax.Gaussian(mean, 1.0)


class Runs:
    """Trains runs and keeps their training losses."""

    def __init__(self, steps: int):
        images, _ = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
        self.net, self.steps = Autoencoder(), steps
        self.data = {"x": jnp.asarray(images.astype(np.float32) / 16)}
        self.compiled: dict[str, Any] = {}
        self.init, self.inputs = jax.jit(self.net.init), functools.cache(self._inputs)

    def __call__(self, arm: str, hyper: dict[str, float], budget: int, seed: int) -> float:
        if arm not in self.compiled:
            train = training(Arm(SPACES[arm], ARMS[arm].make), self.net, self.data, SIZE)

            def run(*args: Any) -> Any:
                return self.net.loss(train(*args), self.data)

            self.compiled[arm] = jax.jit(run)
        values = {name: jnp.float32(value) for name, value in hyper.items()}
        params, order = self.inputs(seed)
        loss = self.compiled[arm](
            params, order, jnp.int32(budget), values, jax.random.key(seed + 1)
        )
        return float(loss) if math.isfinite(loss) else math.inf

    def _inputs(self, seed: int) -> tuple[Any, jax.Array]:
        draw = np.random.default_rng(seed)
        count, most = len(self.data["x"]), MOST * self.steps * SIZE
        order = np.concatenate([draw.permutation(count) for _ in range(-(-most // count))])
        return self.init(seed), jnp.asarray(order[:most].reshape(-1, SIZE))

    def tune(self, arm: str, seeds: list[int], count: tuple[int, int]) -> dict[str, float]:
        """Return the hyper-parameters with the smallest loss; the mean over the seeds counts."""
        space = SPACES[arm]
        found: list[tuple[float, list[float], dict[str, float]]] = []
        for shares, hyper in trials(space, count, lambda: min(found)[1]):
            loss = statistics.mean(self(arm, hyper, self.steps, seed) for seed in seeds)
            found.append((loss, shares, hyper))
        least, best, hyper = min(found)
        line = f"{time.process_time():5.0f} s CPU: {arm}: {hyper}, loss {least:.4f}"
        edge = [n for n, s in zip(space, best, strict=True) if not 0.05 < s < 0.95]
        print(line, f"at the edge: {edge}" if edge else "", file=sys.stderr, flush=True)
        return hyper

    def stepper(self, arm: str, hyper: dict[str, float]) -> Any:
        """Return a compiled train step that keeps its state."""
        fisher = "true" if arm.endswith("true") else "empirical"
        schedule = schedule_to(self.steps, hyper["rate"])
        example = {"x": self.data["x"][:SIZE]}
        tx, _ = ARMS[arm].make(self.net, example, hyper, schedule)
        loss = loss_of(self.net, fisher)
        step = boostax.train_step(loss, tx, metrics=("loss",), has_aux=fisher == "true")
        state = step.init(self.net.init(0), rng=jax.random.key(0) if fisher == "true" else None)

        def call() -> Any:
            nonlocal state
            state, metrics = step(state, example)
            return metrics

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5, help="fresh seeds")
    parser.add_argument("--quick", action="store_true", help="few trials, seeds and steps")
    parser.add_argument("--arms", nargs="+", default=list(SPACES), choices=list(SPACES))
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    steps, seeds, count, rounds = arguments.steps, arguments.seeds, (BROAD, NEAR), 7
    if arguments.quick:
        steps, seeds, count, rounds = 40, 2, (2, 1), 1
    runs = Runs(steps)
    hyper = {arm: runs.tune(arm, [1000, 1001], count) for arm in arguments.arms}
    # A hundred steps: whole periods of THOR's refreshes.
    times = interleaved(
        {arm: runs.stepper(arm, hyper[arm]) for arm in arguments.arms},
        repeats=rounds,
        warmup=1,
        number=100,
    )
    rows, kept = [], {}
    losses: dict[str, list[float]] = {}
    for arm in arguments.arms:
        cost = statistics.median(ratios(times, arm, arguments.arms[0]))
        budget = min(round(steps / cost), MOST * steps)
        equal = [runs(arm, hyper[arm], steps, seed) for seed in range(seeds)]
        timed = [runs(arm, hyper[arm], budget, seed) for seed in range(seeds)]
        losses[arm] = equal
        kept[arm] = {"hyper": hyper[arm], "equal": equal, "timed": timed, "budget": budget}
        cells = []
        for found in (equal, timed):
            middle = bootstrap_median(found)
            cells.append(f"{middle.median:.3f} [{middle.low:.3f}, {middle.high:.3f}]")
        given = ", ".join(f"{value:.3g}" for value in hyper[arm].values())
        milliseconds = 1e3 * statistics.median(times[arm]["cpu"])
        rows.append(
            [arm, given, cells[0], f"{milliseconds:.2f}", f"{cost:.2f}", str(budget), cells[1]]
        )
    head = [
        "arm",
        "rate, damping or 1 - momentum",
        f"loss after {steps} steps",
        "CPU ms a step",
        "over SGD's",
        "steps in that time",
        "loss then",
    ]
    print(
        f"Training loss, median over {seeds} seeds with its 95 % interval.\n\n{table(head, rows)}"
    )
    where = environment()
    print(f"\n{where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, {"steps": steps, "arms": kept, "times": times})


if __name__ == "__main__":
    main()
