"""Two epochs of dim_reduce after a run that was stopped at 70 % of its schedule, on MNIST-1D.

    python benchmarks/dim_reduce_mnist1d.py [--nets MLP "CNN with batch norm"] [--epochs 30 10]
        [--seeds 10] [--quick] [--out results.json]

Needs the package mnist1d (extra ``demo``), which makes the data without a download. SGD with momentum
0.9, batches of 100, ``--epochs`` of 32 steps, 5 % warm-up and a cosine to zero; the rate is that of the
best validation accuracy at the end, mean over tuning seeds of their own, on a grid of factors of two
that grows until the best is not at its edge. Fresh seeds stop at 70 % of the schedule, with a snapshot
at the start and after every 8th step (2nd of 10 epochs). Every arm then has the same two epochs of
data, 6400 gradients of examples, in batches of its own size; what the line searches evaluate comes on
top and is counted. dim_reduce has k = 20 and its other defaults, and goes on from the stopped
parameters, or from the snapshots' mean. SGD goes on from the rate of the stop, falling to zero by a
line, with larger batches from multiples of it. "late": the basis of the snapshots of the last third
of the run. Batch statistics are taken anew from the whole training part, for every arm.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
from _dim_reduce_runs import (
    BATCH,
    MOMENTUM,
    MORE,
    NETS,
    TRAIN,
    Bench,
    Run,
    mean_of,
    random_basis,
)
from _measure import environment, write_results
from _tables import percent, points, table

import boostax

K = 20
ANNEALED, NOTHING = "SGD annealed to 0, batch 100", "nothing"
Outcome = tuple[Any, tuple[Any, ...]]


def late(run: Run) -> list[Any]:
    """Return the snapshots of the last third of a run."""
    return run.snapshots[-(len(run.snapshots) // 3) :]


def annealed(size: int, times: float) -> Callable[..., Outcome]:
    """Return an arm with SGD, from ``times`` the rate of the stop to zero."""

    def arm(bench: Bench, run: Run, seed: int) -> Outcome:
        del seed
        total = MORE * TRAIN // size
        # The rate is a part of the program, and is the same for all seeds.
        tx = optax.sgd(lambda count: times * run.rate * (1 - count / total), momentum=MOMENTUM)
        state = optax.tree.set(run.state, count=jax.numpy.zeros((), int))
        return bench.more(run, tx, run.params, state, size, ("annealed", size, times))

    return arm


def reduced(
    size: int, start: str = "stopped", basis: str = "all", **settings: Any
) -> Callable[..., Outcome]:
    """Return an arm with dim_reduce."""
    k = settings.pop("k", K)

    def arm(bench: Bench, run: Run, seed: int) -> Outcome:
        kept = late(run) if basis == "late" else run.snapshots
        if basis == "random":
            made = random_basis(run.params, k, seed)
        else:
            made = boostax.trajectory_basis(kept, k, params=run.params)
        params = run.params if start == "stopped" else made.start(run.params, start)
        tx = boostax.dim_reduce(made, **settings)
        key = (size, start, basis, k, *sorted(settings.items()))
        return bench.more(run, tx, params, tx.init(params), size, key)

    return arm


ARMS: dict[str, Callable[[Bench, Run, int], Outcome]] = {
    NOTHING: lambda bench, run, seed: (run.params, ()),
    ANNEALED: annealed(BATCH, 1),
    **{f"SGD annealed, batch 800, rate x {times}": annealed(800, times) for times in (1, 2, 4, 8)},
    "SWA, last third": lambda bench, run, seed: (mean_of(late(run)), ()),
    "SWA, all snapshots": lambda bench, run, seed: (mean_of(run.snapshots), ()),
    "the full run": lambda bench, run, seed: (run.full, ()),
    **{f"dim_reduce, batch {size}": reduced(size) for size in (100, 400, 800, 1600, 3200)},
    "dim_reduce, batch 800, alpha 0": reduced(800, alpha=0.0),
    "dim_reduce, batch 800, k = 40": reduced(800, k=40),
    "dim_reduce, batch 800, late": reduced(800, basis="late"),
    "dim_reduce, batch 800, from the mean": reduced(800, "mean"),
    "dim_reduce, batch 800, late, from the mean": reduced(800, "mean", "late"),
    "dim_reduce, batch 3200, late, from the mean": reduced(3200, "mean", "late"),
    "dim_reduce, batch 800, mode='reference'": reduced(800, mode="reference"),
    "20 random directions, batch 800": reduced(800, basis="random"),
    "20 random directions, batch 800, alpha 0": reduced(800, basis="random", alpha=0.0),
}


def tuned(bench: Bench, seeds: list[int]) -> tuple[float, dict[float, float]]:
    """Return the rate of the best mean validation accuracy at the end, and the grid."""
    grid: dict[float, float] = {}

    def score(rate: float) -> float:
        if rate not in grid:
            runs = [bench.trained(seed, rate) for seed in seeds]
            got = [bench.evaluate(run.full, run.data[0], run.data[1])[0] for run in runs]
            grid[rate] = float(np.mean(got))
        return grid[rate]

    for rate in (0.05, 0.1, 0.2):
        score(rate)
    while True:
        best = max(grid, key=lambda rate: grid[rate])
        before = len(grid)
        score(best / 2)
        score(best * 2)
        if len(grid) == before:
            return best, dict(sorted(grid.items()))


def report(name: str, epochs: int, arms: list[str], seeds: int, tuning: int) -> tuple[str, Any]:
    """Return the table of one net, and what it was made of."""
    bench = Bench(name, epochs)
    rate, grid = tuned(bench, [1000 + i for i in range(tuning)])
    accuracy: dict[str, list[float]] = {arm: [] for arm in arms}
    loss: dict[str, list[float]] = {arm: [] for arm in arms}
    training: dict[str, list[float]] = {arm: [] for arm in arms}
    failed: dict[str, list[float]] = {arm: [] for arm in arms}
    trials: dict[str, list[float]] = {arm: [] for arm in arms}
    steps: dict[str, int] = {}
    for seed in range(seeds):
        run = bench.trained(seed, rate)
        for arm in arms:
            params, told = ARMS[arm](bench, run, seed)
            got = bench.evaluate(params, run.data[0], run.data[2])
            accuracy[arm].append(float(got[0]))
            loss[arm].append(float(got[1]))
            training[arm].append(float(bench.loss(params, run.data[0])))
            if told:
                status, count = map(np.asarray, told)
                steps[arm] = len(status)
                failed[arm].append(float(np.isin(status, (2, 5)).sum()))
                # In losses of one example, as the gradients are counted.
                trials[arm].append(float(count.sum() * MORE * TRAIN / len(status)))
        bench.trained.cache_clear()
    rows = []
    base = {key: np.array(accuracy[key]) for key in (NOTHING, ANNEALED)}
    for arm in arms:
        got = np.array(accuracy[arm])
        cells = ["", "", ""]
        if arm in steps:
            cells = [
                str(steps[arm]),
                f"{sum(failed[arm]):.0f} of {seeds * steps[arm]}",
                f"{np.mean(trials[arm]):.0f}",
            ]
        elif arm.startswith("SGD annealed"):
            cells = [str(MORE * TRAIN // (BATCH if arm == ANNEALED else 800)), "", ""]
        rows.append(
            [
                arm,
                f"{percent(got.mean())} ± {percent(got.std(ddof=1))}",
                *("" if arm == other else points(got - base[other]) for other in base),
                f"{np.mean(loss[arm]):.3f}",
                f"{np.mean(training[arm]):.3f}",
                *cells,
            ]
        )
    head = [
        "arm",
        "test accuracy, % ± sd",
        "less nothing, points [95 %]",
        "less SGD annealed, points [95 %]",
        "test loss",
        "training loss",
        "steps",
        "failed searches",
        "trial losses of an example",
    ]
    tried = ", ".join(f"{100 * share:.1f} at {r:g}" for r, share in grid.items())
    text = (
        f"{name}, {seeds} paired seeds, rate {rate:g} (validation accuracy: {tried}), stopped after "
        f"{bench.stop} of {bench.end} steps.\n\n{table(head, rows)}"
    )
    kept = {"rate": rate, "grid": grid, "accuracy": accuracy, "loss": loss, "training": training}
    return text, {**kept, "failed": failed, "trials": trials}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--epochs", nargs="+", type=int, default=[30, 10], help="whole tens")
    parser.add_argument("--seeds", type=int, default=10, help="fresh seeds, at least 2")
    parser.add_argument("--quick", action="store_true", help="two seeds, one to tune with")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    seeds, tuning = (2, 1) if arguments.quick else (arguments.seeds, 4)
    if seeds < 2:
        parser.error(f"--seeds must be at least 2, got {seeds}")
    if any(epochs < 10 or epochs % 10 for epochs in arguments.epochs):
        parser.error(f"--epochs must be whole tens, got {arguments.epochs}")
    begin, kept = time.process_time(), {}
    for name in arguments.nets:
        for epochs in arguments.epochs:
            text, kept[f"{name}, {epochs}"] = report(name, epochs, list(ARMS), seeds, tuning)
            print(f"{text}\n", flush=True)
    where, spent = environment(), (time.process_time() - begin) / 60
    print(f"{spent:.0f} minutes of CPU time, {where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, kept)


if __name__ == "__main__":
    main()
