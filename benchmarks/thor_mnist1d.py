"""THOR against tuned SGD, AdamW and Muon on MNIST-1D: steps and CPU time to a test accuracy.

    OPENBLAS_NUM_THREADS=1 python benchmarks/thor_mnist1d.py [--quick] [--nets MLP CNN] [--seeds 10]
        [--cache runs.jsonl] [--out results.json]

Needs the package mnist1d (extra ``demo``). Steps to the target are the smallest budget of a ladder
(factors of 1.19) whose run, its schedule decayed to that budget (5 % linear warm-up, cosine to zero),
ends at the target: with one fixed budget the last, cold steps would decide, and all arms would come in
close to its end. Each arm has two hyper-parameters and as many trials as the others, at the same
points of its ranges (16 over the whole, 8 around the best); a trial counts by the smallest budget at
which the median validation accuracy of five tuning seeds reaches the target, and the three best meet at
ten seeds more. Then come fresh seeds; a seed gives all arms the same initial parameters, split and
order of the data. THOR's momentum is 0.9, its frequency 25; all else is the library's default.

CPU time to the target: whole runs of each arm's median steps, with the compiled train step called
from Python, arms in turn, the median of --rounds.

Prints Markdown. Runs are kept in --cache, if given, and not repeated. About 20 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from _measure import environment, interleaved, ratios, write_results
from _tables import percent, table
from _thor_runs import (
    ARMS,
    BATCH,
    BROAD,
    LADDER,
    NEAR,
    NETS,
    Race,
    Tuned,
    crossing,
    first,
    loss_of,
    schedule_to,
)

import boostax
from boostax.compare.statistics import Interval, bootstrap_median, median, paired_ratios

PLAIN = "SGD"


class Found(NamedTuple):
    """What the tables of one net are made of.

    Attributes:
      tuned: arm -> what its trials found.
      curves: arm -> budget -> test accuracy of each fresh seed.
      steps: arm -> steps to the target of each fresh seed.
    """

    tuned: dict[str, Tuned]
    curves: dict[str, dict[int, list[float]]]
    steps: dict[str, list[float]]


def crossing_ratio(found: Found, arm: str, target: float) -> Interval:
    """Return the ratio of the budgets at which the means cross the target, over drawn seeds."""
    ours, plain = found.curves[arm], found.curves[PLAIN]
    seeds = len(found.steps[arm])
    draws = np.random.RandomState(0).randint(0, seeds, size=(1000, seeds))
    values = []
    for drawn in draws:
        a, b = crossing(ours, target, drawn), crossing(plain, target, drawn)
        values.append(math.inf if math.isinf(b) else a / b)
    low, high = np.sort(values)[[25, -26]]
    whole = crossing(ours, target) / crossing(plain, target)
    return Interval(whole, float(low), float(high))


def shown(interval: Interval) -> str:
    return f"{interval.median:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def runner(
    race: Race, net: str, arm: str, hyper: dict[str, float], budget: int
) -> Callable[[], Any]:
    """Return a function that makes a whole run from Python, its step compiled once."""
    model = NETS[net]
    fisher = "true" if "true" in arm else "empirical"
    params, order, _ = race.inputs(net, 0)
    chosen = np.asarray(order)
    x, y = np.asarray(race.data.x), np.asarray(race.data.y)
    batches = [{"x": x[chosen[i]], "y": y[chosen[i]]} for i in range(budget)]
    batches = jax.device_put(batches)
    tx, _ = ARMS[arm].make(model, batches[0], hyper, schedule_to(budget, hyper["rate"]))
    step = boostax.train_step(
        loss_of(model, fisher), tx, metrics=("loss",), has_aux=fisher == "true"
    )

    def run() -> Any:
        state = step.init(params, rng=jax.random.key(0) if fisher == "true" else None)
        for batch in batches:
            state, _ = step(state, batch)
        return state

    return run


def outcome_table(found: Found, target: float, times: Any) -> str:
    rows = []
    for arm, steps in found.steps.items():
        hyper = ", ".join(f"{value:.3g}" for value in found.tuned[arm].hyper.values())
        missed = sum(map(math.isinf, steps))
        reach = f"{median(steps):.0f}" + (f" ({missed} missed)" if missed else "")
        cells = ["", ""]
        if arm != PLAIN:
            pairs = paired_ratios(steps, found.steps[PLAIN])
            cells = [shown(bootstrap_median(pairs)), shown(crossing_ratio(found, arm, target))]
        time_cells = ["", "", "", ""]
        if arm in times:
            cpu = statistics.median(times[arm]["cpu"])
            cpus, walls = (ratios(times, arm, PLAIN, clock) for clock in ("cpu", "wall"))
            time_cells = [
                f"{1e3 * cpu / median(steps):.2f}",
                f"{cpu:.3f}",
                f"{statistics.median(cpus):.2f} [{min(cpus):.2f}, {max(cpus):.2f}]",
                f"{statistics.median(walls):.2f}",
            ]
        rows.append([arm, hyper, reach, *cells, *time_cells])
    head = [
        "arm",
        "rate, then 1 - momentum or damping",
        "steps to target (median)",
        "over SGD's, pairs of seeds",
        "over SGD's, where the means cross",
        "CPU ms a step",
        "CPU s to target",
        "over SGD's [min, max]",
        "wall, over SGD's",
    ]
    return table(head, rows)


def curve_table(found: Found) -> str:
    budgets = sorted(set().union(*found.curves.values()))
    rows = [
        [
            str(budget),
            *(percent(np.mean(c[budget])) if budget in c else "" for c in found.curves.values()),
        ]
        for budget in budgets
    ]
    return table(["budget", *found.curves], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=["MLP", "CNN"], choices=list(NETS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, default=10, help="fresh seeds, at least 2")
    parser.add_argument("--rounds", type=int, default=7, help="of whole runs, for their time")
    parser.add_argument("--quick", action="store_true", help="few trials and seeds")
    parser.add_argument("--cache", help="keep the runs in this file of JSON lines")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds must be at least 2, got {arguments.seeds}")
    seeds, count, rounds, tuning = arguments.seeds, (BROAD, NEAR), arguments.rounds, 5
    if arguments.quick:
        seeds, count, rounds, tuning = 2, (3, 1), 1, 1
    race = Race(arguments.cache)
    results: dict[str, Any] = {"ladder": LADDER, "batch": BATCH}
    arms = [PLAIN, *(arm for arm in arguments.arms if arm != PLAIN)]
    for net in arguments.nets:
        target = NETS[net].target
        tuned = {arm: race.tune(net, arm, [1000 + i for i in range(tuning)], count) for arm in arms}
        curves = {arm: race.curve(net, arm, tuned[arm], list(range(seeds))) for arm in arms}
        found = Found(tuned, curves, {arm: first(curves[arm], target) for arm in arms})
        reached = [arm for arm in arms if math.isfinite(median(found.steps[arm]))]
        times = interleaved(
            {
                arm: runner(race, net, arm, tuned[arm].hyper, round(median(found.steps[arm])))
                for arm in reached
            },
            repeats=rounds,
            warmup=1,
        )
        print(f"""\
{net} to {100 * target:.0f} % test accuracy, {seeds} paired seeds, batch {BATCH}. In brackets: 95 %
intervals by bootstrap; for times the smallest and largest of {rounds} rounds.

{outcome_table(found, target, times)}

Test accuracy (%) at the end of each budget, mean over the seeds.

{curve_table(found)}
""")
        sys.stdout.flush()
        results[net] = {
            "tuned": {arm: t._asdict() for arm, t in tuned.items()},
            "curves": curves,
            "steps": found.steps,
            "times": times,
        }
    where = environment()
    spent = (time.process_time() - race.begin) / 60
    print(f"{spent:.0f} minutes of CPU time, {where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, results)


if __name__ == "__main__":
    main()
