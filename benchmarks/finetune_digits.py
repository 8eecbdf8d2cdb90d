"""Joint fine-tuning against fine-tuning alone and training from scratch, on few labelled digits.

    python benchmarks/finetune_digits.py

The tasks of docs/examples/finetune_digits.py: digits 0 to 4 are the source, 5 to 9 the target with 5,
10 or 20 labelled images a class, 400 held out. Each seed has a pretrained network, a target head,
labelled images and batches of its own, the same for all arms. Prints the held-out accuracy after 30
and after 120 steps at each learning rate, and paired differences to fine-tuning alone, each at the
rate that is best for it in the mean over seeds. Takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import sys
import time
from typing import Any

import _measure
import _tables
import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "examples"))
sys.path.insert(0, str(ROOT))

import finetune_digits as digits

import boostax

RATES = (0.01, 0.03, 0.1, 0.3)
SIZES = (5, 10, 20)
EARLY = 30
ARMS = ("alone", "scratch", "joint", "joint_random")


def batches(arm: str, seed: int, per_class: int) -> Any:
    """Return the batches of an arm for one seed."""
    if not arm.startswith("joint"):
        return digits.target_batches(seed, per_class)
    at_random = arm == "joint_random"
    return digits.joint_batches(seed, per_class, network=seed, at_random=at_random)


def run(arm: str, step: Any, seed: int, per_class: int) -> tuple[float, float]:
    """Train once, and return the accuracy early and in the end."""
    key = jax.random.key(1000 + seed)
    made = digits.fresh(key) if arm == "scratch" else digits.start(key, network=seed)
    state = step.init(made[0], model_state=made[1])
    reached = []
    for number, batch in enumerate(itertools.islice(batches(arm, seed, per_class), digits.STEPS)):
        state, _ = step(state, batch)
        if number + 1 in (EARLY, digits.STEPS):
            reached.append(float(digits.evaluate(state.params, state.model_state)["accuracy"]))
    return reached[0], reached[1]


def main(seeds: int, out: str | None) -> None:
    """Run everything, print the tables, and write the results where asked."""
    start = time.perf_counter()
    tasks = {arm: getattr(digits, arm) for arm in ARMS}
    build = functools.partial(boostax.train_step, has_aux=True, metrics=("loss",))
    steps = {
        (arm, rate): build(task.loss, task.optimizer(rate, digits.STEPS))
        for arm, task in tasks.items()
        for rate in RATES
    }
    got = {
        (size, arm, rate): np.array([run(arm, step, seed, size) for seed in range(seeds)])
        for size in SIZES
        for (arm, rate), step in steps.items()
    }
    for when, name in enumerate((f"{EARLY} steps", f"{digits.STEPS} steps")):
        rows = []
        for size in SIZES:
            best = {
                arm: max(RATES, key=lambda rate, arm=arm: got[size, arm, rate][:, when].mean())
                for arm in ARMS
            }
            plain = got[size, "alone", best["alone"]][:, when]
            for arm in ARMS:
                accuracy = got[size, arm, best[arm]][:, when]
                at_rates = ", ".join(
                    _tables.percent(got[size, arm, rate][:, when].mean()) for rate in RATES
                )
                gain = "" if arm == "alone" else _tables.points(accuracy - plain)
                share = f"{_tables.percent(accuracy.mean())} ({best[arm]})"
                rows.append([f"{size} a class, {arm}", at_rates, share, gain])
        head = [f"after {name}", f"accuracy at {RATES}", "best (rate)", "against alone, points"]
        print("\n" + _tables.table(head, rows), flush=True)
    nearest = {
        size: np.mean([len(digits.nearest(digits.labelled(s, size), s)) for s in range(seeds)])
        for size in SIZES
    }
    print("\nsource images chosen, mean:", {size: round(float(n)) for size, n in nearest.items()})
    print(f"{time.perf_counter() - start:.0f} s")
    if out is not None:
        results = {f"{k[0]} {k[1]} {k[2]}": v.tolist() for k, v in got.items()}
        _measure.write_results(out, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="paired seeds")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.out)
