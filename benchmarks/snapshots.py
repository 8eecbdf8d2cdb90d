"""What SnapshotWriter costs: an epoch of training with one snapshot against one without.

One model, one compiled step, the same batches; the three epochs (no snapshot, in memory, on disk) are
run in turn, round after round. The snapshot is taken in the middle, and waited for at the end, so that
all it costs falls into its own epoch. The cost in steps is its extra time over the time of a step.
CPU time counts the thread that writes; wall time is what a user waits. An epoch differs from the next
by more than a snapshot, so that snapshots are timed alone as well, each waited for, beside a step.

    python benchmarks/snapshots.py [--repeats 9] [--steps 100] [--width 512] [--batch 256]
        [--folder FOLDER] [--out results.json]
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
import jax.numpy as jnp
import numpy as np
import optax
from _measure import interleaved, ratio_line, ratios, write_results

import boostax


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="steps in an epoch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--folder", help="where snapshots go; default: a temporary folder")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    widths = (64, args.width, args.width, 10)
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    params = {
        f"layer_{i}": jax.random.normal(key, shape) / np.sqrt(shape[0])
        for i, (key, *shape) in enumerate(zip(keys, widths, widths[1:], strict=False))
    }
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{size:,} weights, {args.steps} steps of batch {args.batch} in an epoch")

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        for i in range(len(widths) - 1):
            x = x @ params[f"layer_{i}"]
            x = jax.nn.relu(x) if i < len(widths) - 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    rng = np.random.default_rng(0)
    batch = (
        jnp.asarray(rng.normal(size=(args.batch, widths[0])), jnp.float32),
        jnp.asarray(rng.integers(0, 10, args.batch)),
    )
    step = boostax.train_step(loss_fn, optax.sgd(0.01, 0.9))

    def epoch(writer: Any) -> Any:
        state = step.init(params)

        def run() -> Any:
            nonlocal state
            for index in range(args.steps):
                state, _ = step(state, batch)
                if writer is not None and index == args.steps // 2:
                    writer.epoch(state.params)
            if writer is not None:
                writer.wait()
            return state.params

        return run

    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        boostax.SnapshotWriter(every_epochs=1, keep=5) as in_memory,
        boostax.SnapshotWriter(folder, every_epochs=1, keep=5) as on_disk,
    ):
        results = interleaved(
            {"no snapshot": epoch(None), "in memory": epoch(in_memory), "on disk": epoch(on_disk)},
            repeats=args.repeats,
            warmup=2,
        )
        state = step.init(params)

        def one_step() -> Any:
            nonlocal state
            state, metrics = step(state, batch)
            return metrics

        def snapshot(writer: Any) -> Any:
            def run() -> None:
                writer.write(params)
                writer.wait()

            return run

        alone = interleaved(
            {
                "a step": one_step,
                "a snapshot in memory": snapshot(in_memory),
                "a snapshot on disk": snapshot(on_disk),
            },
            repeats=args.repeats,
            warmup=2,
            number=20,
        )
    for name in ("a snapshot in memory", "a snapshot on disk"):
        print(ratio_line(alone, name, "a step"))
    for name in ("in memory", "on disk"):
        print(ratio_line(results, name, "no snapshot"))
        extra = statistics.median(ratios(results, name, "no snapshot", "wall")) - 1
        print(
            f"    {100 * extra:+.2f} % of an epoch, {args.steps * extra:+.2f} steps, by wall time"
        )
    if args.out:
        write_results(
            args.out, {"argv": vars(args), "weights": size, "times": results, "alone": alone}
        )


if __name__ == "__main__":
    main()
