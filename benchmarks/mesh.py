"""What the train step over a mesh costs beside a hand-written one with ``jax.shard_map``.

Eight simulated devices; the same optimizer, the loss as the one metric. FLOPs, bytes and the
collectives' elements of the compiled functions, and the time of a call from Python, interleaved.

    python benchmarks/mesh.py [--repeats 7] [--number 10] [--out results.json]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import compiled_cost, interleaved, ratio_line, write_results
from jax.sharding import NamedSharding, PartitionSpec
from off import WIDTHS, init, loss_fn, runner

import boostax

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|collective-permute)(-start)?\(")


def hand_written(tx: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Any:
    """Return the step that a careful person writes: gradients and loss averaged, state donated."""

    def body(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    replicated, split = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(replicated, split),
        out_specs=(replicated, replicated),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def sent(jitted: Any, *args: Any) -> int:
    """Return how many elements the collectives give out."""
    text = jitted.lower(*args).compile().as_text()
    shapes = [
        s for found in COLLECTIVE.findall(text) for s in re.findall(r"\[([\d,]*)\]", found[0])
    ]
    return sum(int(np.prod([int(d) for d in shape.split(",") if d] or [1])) for shape in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--number", type=int, default=10)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    tx = optax.adamw(1e-3)
    mesh = jax.make_mesh((8,), ("data",))
    params = init(jax.random.key(0))
    rng = np.random.RandomState(0)
    batch = jax.device_put(
        (
            rng.randn(256, WIDTHS[0]).astype(np.float32),
            rng.randint(0, 10, 256).astype(np.int32),
        ),
        NamedSharding(mesh, PartitionSpec("data")),
    )
    step = boostax.train_step(loss_fn, tx, metrics=("loss",), mesh=mesh)
    state = step.init(params)
    by_hand = hand_written(tx, mesh)
    start = jax.device_put(
        jax.tree.map(
            jnp.copy, {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
        ),
        NamedSharding(mesh, PartitionSpec()),
    )
    ours = compiled_cost(step._jitted(None, state), state, batch, {})
    theirs = compiled_cost(by_hand, start, batch)
    ours["sent"] = sent(step._jitted(None, state), state, batch, {})
    theirs["sent"] = sent(by_hand, start, batch)
    for key in ours:
        print(f"{key:<11} {ours[key]:.0f} / {theirs[key]:.0f} = {ours[key] / theirs[key]:.4f}")
    candidates = {"boostax": runner(step, state, batch), "by hand": runner(by_hand, start, batch)}
    results = interleaved(candidates, arguments.repeats, 2, arguments.number)
    print(ratio_line(results, "boostax", "by hand"))
    if arguments.out:
        write_results(arguments.out, {"mesh": {"costs": [ours, theirs], "times": results}})


if __name__ == "__main__":
    main()
