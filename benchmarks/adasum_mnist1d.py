"""AdaSum against the mean of the gradients and LAMB, on MNIST-1D with 16 workers.

    python benchmarks/adasum_mnist1d.py [--quick] [--seeds 12] [--steps 400] [--controls]
        [--out results.json]

Needs the package mnist1d (extra ``demo``), which makes the data without a download. The workers
are simulated by ``jax.vmap``, each with 16 examples a step. Four arms: the mean with SGD and
momentum, AdaSum ahead of it ("on gradients") and behind it ("on deltas", each worker keeps its own
momentum), and the mean with LAMB. All have the same steps, the same shape of schedule (5 % linear
warm-up, cosine to zero), no decay and no clipping. Each has a rate grid of its own: factors of two,
more until the best is not at the edge, then factors of 1.4 around it; the best is that of the
validation accuracy at four tuning seeds. Then come fresh seeds; a seed gives all arms the same
initial parameters, split and order of the data.

One worker is tuned too, on the same examples in the same order, 16 times as many steps of 16: its
rate is what the arms are given where they are run "untuned". ``--controls`` adds the mean with SGD
clipped to a global norm of 1, and with a warm-up of 25 %, two common ways to let it take higher rates.

Prints Markdown. About 17 minutes of CPU time, 21 with --controls; --quick takes three and shows only
that it runs.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from _adasum_runs import ALONE, ARMS, CONTROLS, EVALUATIONS, WORKERS, Bench, Run
from _measure import environment, write_results
from _tables import percent, points, table

from boostax.compare.statistics import bootstrap_median, median, paired_ratios

FACTORS = (1.0, 2.0, 2.5)  # of the one-worker rate; Horovod advises 2 to 2.5 for AdaSum
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the steps, for the tables
PLACES = [round(share * EVALUATIONS) - 1 for share in SHARES]
HEADS = [f"{100 * share:.0f} %" for share in SHARES]


class Found(NamedTuple):
    """What the tables are made of.

    Attributes:
      bench: holds all runs.
      seeds: the fresh ones.
      rate: arm -> its tuned rate, those of one worker included.
      grids: arm -> rate -> validation accuracy, mean over the tuning seeds.
      target: test accuracy that steps are counted to.
    """

    bench: Bench
    seeds: list[int]
    rate: dict[str, float]
    grids: dict[str, dict[float, float]]
    target: float

    @property
    def arms(self) -> list[str]:
        """All arms of 16 workers, with the controls where they were run."""
        return [arm for arm in (*ARMS, *CONTROLS) if arm in self.rate]

    def test(self, arm: str, rate: float | None = None) -> np.ndarray:
        """Return test accuracy ``(seeds, EVALUATIONS)``, at the tuned rate if none is given."""
        return self.bench.get(arm, self.rate[arm] if rate is None else rate, self.seeds, "test")

    def steps(self, arm: str) -> list[float]:
        """Return the steps to the target of each seed; infinity where it was missed."""
        every = self.bench.steps // EVALUATIONS
        hit = self.test(arm) >= self.target
        return [every * float(h.argmax() + 1) if h.any() else math.inf for h in hit]


def find(
    bench: Bench, seeds: list[int], tuning: list[int], thin: int, controls: Sequence[str]
) -> Found:
    """Tune, then train at the fresh seeds."""
    names = (*ARMS, *controls, *dict.fromkeys(ALONE.values()))
    tuned = {arm: bench.tune(arm, tuning, thin) for arm in names}
    rate = {arm: best for arm, (best, _) in tuned.items()}
    for arm in (*ARMS, *controls):
        given = [rate[ALONE[arm]] * factor for factor in FACTORS] if arm in ALONE else []
        bench(arm, [Run(seed, r) for r in (rate[arm], *given) for seed in seeds])
    # The target comes from the tuning seeds, and so does not depend on what it is used for.
    reached = bench.get("mean", rate["mean"], tuning, "validation").mean()
    grids = {arm: grid for arm, (_, grid) in tuned.items()}
    return Found(bench, seeds, rate, grids, math.floor(100 * reached - 2) / 100)


def outcome_table(found: Found) -> str:
    bases = [arm for arm in ("mean", CONTROLS[0]) if arm in found.arms]
    rows = []
    for arm in found.arms:
        steps, final = found.steps(arm), found.test(arm)[:, -1]
        missed = sum(map(math.isinf, steps))
        reach = f"{median(steps):.0f}" + (f" ({missed} missed)" if missed else "")
        gains = ["" if arm == base else points(final - found.test(base)[:, -1]) for base in bases]
        pairs = paired_ratios(steps, found.steps("mean")) if arm != "mean" else []
        middle = bootstrap_median(pairs)
        ratio = f"{middle.median:.2f} [{middle.low:.2f}, {middle.high:.2f}]" if pairs else ""
        rows.append([arm, f"{found.rate[arm]:.3g}", percent(final.mean()), *gains, reach, ratio])
    head = ["arm", "rate", "test accuracy, %", *(f"minus {base}, points" for base in bases)]
    return table([*head, "steps to target (median)", "over the mean's"], rows)


def curve_table(found: Found) -> str:
    rows = []
    for arm in found.arms:
        curves = found.test(arm)
        deviation = f"{100 * curves[:, -1].std(ddof=1):.1f}"
        rows.append([arm, *(percent(v) for v in curves.mean(0)[PLACES]), deviation])
    return table(["arm", *HEADS, "deviation"], rows)


def untuned_table(found: Found) -> str:
    tuned = found.test("mean")[:, -1]
    rows = []
    for arm in ARMS:
        rate = found.rate[ALONE[arm]]
        finals = [found.test(arm, rate * factor)[:, -1] for factor in FACTORS]
        cells = [f"{percent(final.mean())} ({points(final - tuned)})" for final in finals]
        rows.append([arm, f"{rate:.3g}", *cells])
    return table(["arm", "one-worker rate", "at that rate", "2 times", "2.5 times"], rows)


def grid_table(found: Found) -> str:
    grids = found.grids.values()
    rows = [
        [f"{rate:.3g}", *(percent(grid[rate]) if rate in grid else "" for grid in grids)]
        for rate in sorted(set().union(*grids))
    ]
    return table(["rate", *found.grids], rows)


def length_table(found: Found) -> str:
    rows = []
    for arm in ARMS[1:3]:
        for name, rate in (
            ("tuned rate", found.rate[arm]),
            ("one-worker rate", found.rate[ALONE[arm]]),
        ):
            ratios = found.bench.get(arm, rate, found.seeds, "ratio").mean(0)[PLACES]
            rows.append([f"{arm}, {name}", *(f"{v:.1f}" for v in ratios)])
    return table(["arm", *HEADS], rows)


def report(found: Found) -> str:
    """Return all tables, each with what it says."""
    return f"""\
Tuned rates, {len(found.seeds)} paired seeds, {found.bench.steps} steps. The target is
{100 * found.target:.0f} % test accuracy. In brackets: 95 % intervals.

{outcome_table(found)}

Learning curves at the tuned rates: test accuracy (%) after that share of the steps, mean over the
seeds; last the standard deviation between the seeds at the end.

{curve_table(found)}

Untuned: test accuracy (%) at the rate that was best for one worker, and at 2 and 2.5 times that. In
parentheses: minus the accuracy of the mean at its tuned rate, in points.

{untuned_table(found)}

The grids: validation accuracy (%) at each rate, mean over the tuning seeds.

{grid_table(found)}

Length of the exchanged step over that of the mean of the same workers (1: all agree; {WORKERS}: all
orthogonal), around that share of the steps.

{length_table(found)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=12, help="fresh paired seeds, at least 2")
    parser.add_argument("--steps", type=int, default=400, help=f"a multiple of {EVALUATIONS}")
    parser.add_argument("--quick", action="store_true", help="few seeds, steps and rates")
    parser.add_argument("--controls", action="store_true", help="with two more ways of the mean")
    parser.add_argument("--out", help="write all curves to this JSON file")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds must be at least 2, got {arguments.seeds}")
    if arguments.steps < EVALUATIONS or arguments.steps % EVALUATIONS:
        parser.error(f"--steps must be a multiple of {EVALUATIONS}, got {arguments.steps}")
    seeds, steps, tries, thin = arguments.seeds, arguments.steps, 4, 1
    if arguments.quick:
        seeds, steps, tries, thin = min(seeds, 2), min(steps, 80), 1, 2
    tuning = [1000 + i for i in range(tries)]
    bench = Bench(steps)
    controls = CONTROLS if arguments.controls else ()
    found = find(bench, list(range(seeds)), tuning, thin, controls)
    print(report(found), flush=True)
    spent = time.process_time() - bench.begin
    where = environment()
    print(
        f"\n{spent / 60:.0f} minutes of CPU time, {where['cpu_count']} CPU cores, JAX {where['jax']}"
    )
    if arguments.out is not None:
        runs = [{"arm": arm, **run._asdict(), **got} for (arm, run), got in bench.kept.items()]
        results = {
            "steps": steps,
            "seeds": found.seeds,
            "rates": found.rate,
            "grids": found.grids,
            "target": found.target,
            "steps_to_target": {arm: found.steps(arm) for arm in found.arms},
            "cpu_seconds": spent,
            "runs": runs,
        }
        write_results(arguments.out, results)


if __name__ == "__main__":
    main()
