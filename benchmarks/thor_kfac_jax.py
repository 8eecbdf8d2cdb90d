"""THOR against kfac-jax: cost of a step, and steps to a test accuracy on MNIST-1D.

    python -m venv kfac && kfac/bin/pip install jax==0.7.2 jaxlib==0.7.2 kfac-jax==0.0.8
    OPENBLAS_NUM_THREADS=1 python benchmarks/thor_kfac_jax.py --kfac-python kfac/bin/python [--quick]
        [--cache runs.jsonl] [--out results.json]

kfac-jax 0.0.8 does not run on current JAX, so each side is a process with an environment of its own,
and the two take turns. Both have the same net, initial parameters, data order, momentum of 0.9, KL clip
(norm constraint) of 1e-3, labels drawn from the model, and statistics and inverses every 10 steps, and
defaults for all else; THOR refreshes at the steps 1, 3 and 6 as well.

Cost: rounds of 40 steps called from Python, on the MLP 784-512-256-10 with batches of 128 and on that
of the race. Race: as in ``thor_mnist1d.py``, with the same trials for both sides.

Prints Markdown. About 15 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from _measure import environment, write_results
from _mnist1d import load
from _tables import table
from _thor_runs import ARMS, BROAD, NEAR, SECOND, Arm, Race, crossing, first

from boostax.compare.statistics import bootstrap_median, median, paired_ratios

SIDES = ("boostax", "kfac-jax")
START = 17  # the rung of 304 steps, for the first trial
STEPS = 40  # of a round of timing: whole periods of both sides


class Worker:
    """A process of one side."""

    def __init__(self, python: str, side: str, data: str):
        script = pathlib.Path(__file__).with_name("_thor_kfac_worker.py")
        self.side = side
        self.process = subprocess.Popen(
            [python, str(script), side, data],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, **ask: Any) -> list[float]:
        """Return the answer to a request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.side} ended")
        return json.loads(line)


class Sides(Race):
    """The race, with runs made by the workers."""

    def __init__(self, workers: dict[str, Worker], cache: str | None):
        super().__init__(cache)
        self.workers = workers

    def train(self, net: str, arm: str, hyper: Any, budget: int, seed: int) -> list[float]:
        ask = {"hyper": dict(hyper), "budget": budget, "seed": seed}
        return self.workers[arm](do="train", net="race", **ask)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kfac-python", required=True, help="the interpreter that has kfac-jax")
    parser.add_argument("--part", choices=("cost", "race"), help="one part alone")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--seeds", type=int, default=10, help="fresh seeds")
    parser.add_argument(
        "--trials", nargs=2, type=int, default=[BROAD, NEAR], help="broad ones, then near the best"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of steps, for their time")
    parser.add_argument("--quick", action="store_true", help="few trials and seeds")
    parser.add_argument("--cache", help="keep the runs in this file of JSON lines")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    broad, near = arguments.trials
    seeds, count, rounds, tuning = arguments.seeds, (broad, near), arguments.rounds, 5
    if arguments.quick:
        seeds, count, rounds, tuning = 2, (3, 1), 1, 1
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = str(pathlib.Path(folder) / "data.npz")
        np.savez(data, **{name: np.asarray(v) for name, v in load()._asdict().items()})
        pythons = {"boostax": sys.executable, "kfac-jax": arguments.kfac_python}
        workers = {side: Worker(pythons[side], side, data) for side in arguments.sides}
        try:
            if arguments.part in (None, "cost"):
                text, kept["cost"] = costs(workers, rounds)
                print(
                    f"Cost of a step, {rounds} rounds of {STEPS} in turn.\n\n{text}\n", flush=True
                )
            if arguments.part in (None, "race"):
                race = Sides(workers, arguments.cache)
                text, kept["race"] = steps(race, arguments.sides, seeds, count, tuning)
                print(f"Steps to 62 % test accuracy, {seeds} seeds.\n\n{text}\n", flush=True)
        finally:
            for worker in workers.values():
                assert worker.process.stdin is not None
                worker.process.stdin.close()
                worker.process.wait(timeout=60)
    where = environment()
    print(f"{where['cpu_count']} CPU cores, JAX {where['jax']} and 0.7.2")
    if arguments.out is not None:
        write_results(arguments.out, kept)


def costs(workers: dict[str, Worker], rounds: int) -> tuple[str, Any]:
    """Return the table of step times."""
    rows, kept = [], {}
    contenders = [(side, "step") for side in workers]
    if "boostax" in workers:
        contenders.append(("boostax", "plain"))
    for net, name in (("cost", "784-512-256-10, batch 128"), ("race", "40-100-100-10, batch 100")):
        found: dict[tuple[str, str], list[list[float]]] = {c: [] for c in contenders}
        for round_ in range(rounds + 1):
            for side, what in contenders:
                got = workers[side](do="time", net=net, what=what, steps=STEPS)
                if round_:
                    found[side, what].append(got)
        base = found["kfac-jax", "step"] if "kfac-jax" in workers else found["boostax", "plain"]
        for side, what in contenders:
            times = found[side, what]
            ratios = [a[0] / b[0] for a, b in zip(times, base, strict=True)]
            wall = statistics.median(a[1] / b[1] for a, b in zip(times, base, strict=True))
            rows.append(
                [
                    name,
                    "SGD with momentum" if what == "plain" else side,
                    f"{1e3 / STEPS * statistics.median(t[0] for t in times):.2f}",
                    f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
                    f"{wall:.2f}",
                ]
            )
        kept[net] = {f"{side}, {what}": times for (side, what), times in found.items()}
    head = ["MLP", "", "CPU ms a step", "over kfac-jax's [min, max]", "wall, over kfac-jax's"]
    return table(head, rows), kept


def steps(
    race: Race, sides: list[str], seeds: int, count: tuple[int, int], tuning: int
) -> tuple[str, Any]:
    """Return the table of steps to the target."""
    rows, kept, base = [], {}, None
    for side in reversed(sides):
        ARMS[side] = Arm(SECOND, ARMS["THOR, true"].make)
        tuned = race.tune("MLP", side, [1000 + i for i in range(tuning)], count, start=START)
        curve = race.curve("MLP", side, tuned, list(range(seeds)))
        reached = first(curve, 0.62)
        ratio = ""
        if base is None:
            base = reached
        else:
            middle = bootstrap_median(paired_ratios(reached, base))
            ratio = f"{middle.median:.2f} [{middle.low:.2f}, {middle.high:.2f}]"
        missed = sum(map(math.isinf, reached))
        rows.append(
            [
                side,
                *(f"{value:.3g}" for value in tuned.hyper.values()),
                f"{median(reached):.0f}" + (f" ({missed} missed)" if missed else ""),
                f"{crossing(curve, 0.62):.0f}",
                ratio,
            ]
        )
        kept[side] = {"tuned": tuned._asdict(), "curve": curve, "steps": reached}
    head = ["", "rate", "damping", "steps (median)", "where the mean crosses", "over kfac-jax's"]
    return table(head, rows), kept


if __name__ == "__main__":
    main()
