"""Joint fine-tuning against fine-tuning alone and training from scratch, on few labelled digits.

    python benchmarks/finetune_digits.py
    python benchmarks/finetune_digits.py --variants    # of the joint loss: weights, batch statistics

The tasks of docs/examples/finetune_digits.py: digits 0 to 4 are the source, 5 to 9 the target with 5,
10 or 20 labelled images a class, 400 held out. Each seed has a pretrained network, a target head,
labelled images and batches of its own, the same for all arms. Prints the held-out accuracy after 30
and after 120 steps at each learning rate, and paired differences to fine-tuning alone, each at the
rate that is best for it in the mean over seeds. Each takes about six minutes on two cores.
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
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "docs" / "examples"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import finetune_digits as digits

import boostax

RATES = (0.01, 0.03, 0.1, 0.3)
SIZES = (5, 10, 20)
EARLY = 30
ARMS = ("alone", "scratch", "joint", "joint_random")


def one_pass(params: Any, x: Any, *, model_state: Any) -> Any:
    """Run the network on the joined batch, for common batch statistics."""
    return digits.net.apply({"params": params, **model_state}, x, mutable=["batch_stats"])


def head_loss(side: str) -> Any:
    """Return the loss of one head from both heads' logits."""
    return lambda out, batch: optax.softmax_cross_entropy_with_integer_labels(
        out[side], batch["y"]
    ).mean()


def variants() -> dict[str, Any]:
    """Return joint losses that differ in their weights or in what batch norm sees."""
    sides = [digits.side_loss(side) for side in ("source", "target")]
    heads = [head_loss(side) for side in ("source", "target")]
    joint = {f"joint, source weight {w}": {"weights": (w, 1.0)} for w in (0.03, 0.1, 0.3, 1.0)}
    losses = {name: boostax.joint_loss(*sides, **options) for name, options in joint.items()}
    losses["joint, both statistics"] = boostax.joint_loss(*sides, statistics="both")
    losses["joint, one pass"] = boostax.joint_loss(*heads, forward=one_pass)
    return {"alone": digits.alone.loss} | losses


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


def main(seeds: int, out: str | None, with_variants: bool) -> None:
    """Run everything, print the tables, and write the results where asked."""
    start = time.perf_counter()
    losses = variants() if with_variants else {arm: getattr(digits, arm).loss for arm in ARMS}
    build = functools.partial(boostax.train_step, has_aux=True, metrics=("loss",))
    steps = {
        (arm, rate): build(loss, digits.optimizer(rate, digits.STEPS))
        for arm, loss in losses.items()
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
                for arm in losses
            }
            plain = got[size, "alone", best["alone"]][:, when]
            for arm in losses:
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
    parser.add_argument("--variants", action="store_true", help="compare joint losses instead")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.out, arguments.variants)
