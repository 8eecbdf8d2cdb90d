"""What the train step costs when every technique is off: nothing.

The compiled step against a hand-written optax step with the same metrics, and with the loss alone:
FLOPs and bytes of the compiled functions (which don't depend on the machine's load), and the time
of a call from Python, interleaved.

    python benchmarks/off.py [--repeats 9] [--number 20] [--out results.json]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import compiled_cost, interleaved, ratio_line, write_results

import boostax

WIDTHS = (64, 512, 512, 10)
METRICS = ("loss", "grad_norm", "finite", "updates", "micro_steps")


def init(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(k, (a, b)) / np.sqrt(a),
            "bias": jnp.zeros((1, b)),
        }
        for i, (k, a, b) in enumerate(zip(keys, WIDTHS, WIDTHS[1:], strict=False))
    }


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x, labels = batch
    for i in range(len(WIDTHS) - 1):
        layer = params[f"layer_{i}"]
        x = x @ layer["kernel"] + layer["bias"]
        x = jax.nn.relu(x) if i < len(WIDTHS) - 2 else x
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


def hand_written(tx: optax.GradientTransformation, metrics: tuple[str, ...]) -> Any:
    """Return the step that a careful person writes: state in, state and metrics out, donated."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        count = state["step"] + 1
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": count,
        }
        if metrics == ("loss",):
            return new, {"loss": loss}
        finite = jnp.isfinite(loss)
        for leaf in jax.tree.leaves(grads):
            finite &= jnp.all(jnp.isfinite(leaf))
        shown = {"loss": loss, "grad_norm": optax.global_norm(grads), "finite": finite}
        return new, {**shown, "updates": count, "micro_steps": count}

    return jax.jit(step, donate_argnums=0)


def runner(step: Any, state: Any, batch: Any) -> Any:
    """Return a function that makes one step and keeps the state."""

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    tx = optax.adamw(1e-3)
    params = init(jax.random.key(0))
    rng = np.random.RandomState(0)
    batch = (
        jnp.asarray(rng.randn(128, WIDTHS[0]), jnp.float32),
        jnp.asarray(rng.randint(0, 10, 128), jnp.int32),
    )
    candidates, costs = {}, {}
    for name, metrics in (("same metrics", METRICS), ("loss alone", ("loss",))):
        step = boostax.train_step(loss_fn, tx, metrics=metrics)
        state = step.init(params)
        by_hand = hand_written(tx, metrics)
        # Copies, because both sides donate their state.
        start = jax.tree.map(
            jnp.copy, {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
        )
        costs[f"boostax, {name}"] = compiled_cost(step._jitted(None, state), state, batch, {})
        costs[f"by hand, {name}"] = compiled_cost(by_hand, start, batch)
        candidates[f"boostax, {name}"] = runner(step, state, batch)
        candidates[f"by hand, {name}"] = runner(by_hand, start, batch)
    for name in ("same metrics", "loss alone"):
        ours, theirs = costs[f"boostax, {name}"], costs[f"by hand, {name}"]
        for key in ours:
            print(
                f"{name:<14} {key:<11} {ours[key]:.0f} / {theirs[key]:.0f} = {ours[key] / theirs[key]}"
            )
    results = interleaved(candidates, repeats=arguments.repeats, warmup=2, number=arguments.number)
    for name in ("same metrics", "loss alone"):
        print(ratio_line(results, f"boostax, {name}", f"by hand, {name}"))
    if arguments.out:
        write_results(arguments.out, {"off": {"costs": costs, "times": results}})


if __name__ == "__main__":
    main()
