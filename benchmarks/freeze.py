"""Freezing: step time against the FLOPs that are left, on a ResNet-20 and a 10-layer MLP.

    python benchmarks/freeze.py [--repeats 7] [--quick] [--output results.json]

Per model: the step with 20, 40, 60 and 80 % of the layers frozen against the plain step (CPU time,
FLOPs, temp memory of the compiled step), and the mean step over interval schedules in which 30 % and
70 % of the steps are frozen, with the share of the saving predicted by the FLOPs that is reached.
All runs go through ``boostax.train_step``; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
from _measure import interleaved, ratio_line, ratios, write_results
from _models import Task, mlp, resnet20

import boostax

GROUPS = 5  # index i freezes i / 5 of the layers


class Run:
    """A training run that goes on for as long as it is called; each call is ``steps`` steps."""

    def __init__(self, task: Task, freezing: boostax.Freezing | None, steps: int):
        tx: Any = optax.sgd(1e-3, momentum=0.9)
        tx = tx if freezing is None else boostax.freeze(tx, freezing)
        self.freezing, self.task, self.steps = freezing, task, steps
        self.step = boostax.train_step(task.loss_fn, tx, has_aux=task.has_aux, metrics=("loss",))
        self.state = self.step.init(task.params, model_state=task.model_state)

    def __call__(self) -> Any:
        for _ in range(self.steps):
            self.state, metrics = self.step(self.state, self.task.batch)
        return metrics

    def cost(self, index: int | None = None) -> dict[str, float]:
        compiled = self.step.lower(self.state, self.task.batch, index=index).compile()
        analysis: Any = compiled.cost_analysis()
        return {
            "flops": float(analysis["flops"]),
            "temp_bytes": float(compiled.memory_analysis().temp_size_in_bytes),
        }


def measure(name: str, task: Task, repeats: int, number: int, windows: int) -> dict[str, Any]:
    if task.model_state is None:
        order = boostax.forward_order(task.loss_fn, task.params, task.batch)
    else:
        order = boostax.forward_order(
            task.loss_fn, task.params, task.batch, model_state=task.model_state
        )
    groups = boostax.parameter_groups(task.params, GROUPS, order=order)
    plain = Run(task, None, number)
    # Far more windows than will run: after the end of a schedule nothing is frozen.
    runs = {
        f"{100 * i // GROUPS} % frozen": Run(
            task, boostax.Freezing(groups, np.full(100_000, i)), number
        )
        for i in range(GROUPS)
    }
    costs = {"plain": plain.cost()}
    costs |= {n: run.cost(i) for i, (n, run) in enumerate(runs.items())}
    print(f"{name}: step against the plain step")
    times = interleaved({"plain": plain, **runs}, repeats=repeats, warmup=1)
    frozen = {}
    for label in runs:
        flops = costs[label]["flops"] / costs["plain"]["flops"]
        time = statistics.median(ratios(times, label, "plain"))
        frozen[label] = {"flops": flops, "time": time, "time_per_flops": time / flops}
        print(" ", ratio_line(times, label, "plain"))
        print(
            f"    FLOPs {flops:.3f}x, time/FLOPs {time / flops:.3f}, "
            f"temp memory {costs[label]['temp_bytes'] / 1e6:.1f} MB"
        )

    schedules = {}
    for share in (0.7, 0.3):
        once = boostax.freeze_schedule(
            "interval", groups, full_fraction=share, total_steps=windows, seed=0
        )
        rounds = repeats + 2
        run = Run(task, boostax.Freezing(groups, np.tile(once, rounds)), 1)
        label = f"interval, {100 * np.mean(once > 0):.0f} % of the steps frozen"
        base = Run(task, None, 1)
        times_s = interleaved(
            {"plain": base, label: run}, repeats=repeats, warmup=1, number=windows, alternate=True
        )
        labels = list(runs)
        flops = float(np.mean([costs[labels[i]]["flops"] / costs["plain"]["flops"] for i in once]))
        time = statistics.median(ratios(times_s, label, "plain"))
        reached = (1 - time) / (1 - flops)
        schedules[label] = {"flops": flops, "time": time, "saving_reached": reached}
        print(" ", ratio_line(times_s, label, "plain"))
        print(f"    FLOPs {flops:.3f}x, {100 * reached:.0f} % of the predicted saving")
    return {"frozen": frozen, "schedules": schedules, "costs": costs, "seconds": times}


def main() -> None:
    # The same programs are compiled for their cost and for several runs.
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="boostax-freeze-"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--number", type=int, default=3, help="steps a round (default 3)")
    parser.add_argument("--windows", type=int, default=20, help="steps a schedule (default 20)")
    parser.add_argument("--quick", action="store_true", help="one round, to see that it runs")
    parser.add_argument("--only", choices=["mlp", "resnet20"], help="one model alone")
    parser.add_argument("--output", help="write the results to this JSON file")
    args = parser.parse_args()
    repeats, number, windows = (
        (1, 1, 10) if args.quick else (args.repeats, args.number, args.windows)
    )
    tasks = {"mlp": mlp, "resnet20": resnet20}
    results = {
        name: measure(name, make(), repeats, number, windows)
        for name, make in tasks.items()
        if args.only in (None, name)
    }
    print(f"on {jax.default_backend()}")
    if args.output:
        command = "python benchmarks/freeze.py " + " ".join(sys.argv[1:])
        write_results(args.output, {"command": command, **results})


if __name__ == "__main__":
    main()
