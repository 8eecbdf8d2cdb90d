"""What a step with THOR costs, and how large the blocks of its factors should be.

    OPENBLAS_NUM_THREADS=1 python benchmarks/thor.py [--part mlp batch cnn blocks loss]
        [--quick] [--repeats 7] [--out results.json]

All parts if none is named; the base is always the train step with SGD and momentum.

- ``mlp``, ``batch``, ``cnn``: a step between two refreshes ("without statistics"), one that refreshes
  ("frequency 1": statistics, inverses and all), the averages at frequency 10 and 100, and the gradient
  part alone, on an MLP with batches of 128 and of 1024 and on a small convolutional network.
  Time as ratios of CPU time, interleaved; FLOPs, bytes and temp memory of the compiled functions (XLA
  counts both branches of a ``cond``).
- ``blocks``: time of a refresh (statistics given) by block size, for a layer of 2048 x 2048 and one of
  4096 x 1024.
- ``loss``: training loss of a wide MLP on scikit-learn's digits after the same steps, by block size,
  and the CPU time that took.

Prints Markdown. Set OPENBLAS_NUM_THREADS=1: with threads of its own LAPACK stalls inside XLA's.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import compiled_cost, environment, interleaved, ratios, write_results
from _tables import table
from _thor_runs import schedule_to
from jax import lax

import boostax
from boostax.errors import require

RATE, DAMPING = 0.05, 0.1
BLOCKS = (128, 256, 512, 1024, 2049)  # the last holds 2048 inputs and the bias whole
NEVER = 10**6
PARTS = ("mlp", "batch", "cnn", "blocks", "loss")
CYCLE = 100  # steps of a round: whole periods of both frequencies


class Case(NamedTuple):
    """A model to time.

    Attributes:
      loss: ``loss(params, batch)``.
      params: initial parameters.
      batch: one batch.
    """

    loss: Callable[..., Any]
    params: Any
    batch: Any


def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    kernel = jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    logits = x @ params[-1]["kernel"] + params[-1]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def mlp(*widths: int, size: int = 128) -> Case:
    """Return an MLP on random data."""
    keys = jax.random.split(jax.random.key(0), len(widths) + 1)
    pairs = zip(keys, widths[:-1], widths[1:], strict=False)
    params = [dense(key, m, n) for key, m, n in pairs]
    x = jax.random.normal(keys[-2], (size, widths[0]))
    y = jax.random.randint(keys[-1], (size,), 0, widths[-1])
    return Case(mlp_loss, params, {"x": x, "y": y})


def cnn_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for kernel in params["convolutions"]:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(
            lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        )
    return mlp_loss([params["head"]], {"x": x.reshape(x.shape[0], -1), "y": batch["y"]})


def cnn(size: int = 64) -> Case:
    """Return three 3x3 convolutions with stride 2 and a dense layer, on random 28x28 images."""
    keys = jax.random.split(jax.random.key(0), 6)
    widths = (1, 16, 32, 64)
    pairs = zip(keys, widths[:-1], widths[1:], strict=False)
    kernels = [jax.random.normal(k, (3, 3, m, n)) * (2 / (9 * m)) ** 0.5 for k, m, n in pairs]
    params = {"convolutions": kernels, "head": dense(keys[3], 4 * 4 * 64, 10)}
    x = jax.random.normal(keys[4], (size, 28, 28, 1))
    return Case(cnn_loss, params, {"x": x, "y": jax.random.randint(keys[5], (size,), 0, 10)})


def thor(case: Case, frequency: int, block_size: int | None = None) -> tuple[Any, Any]:
    """Return the optimizer and its layers."""
    sized = {} if block_size is None else {"block_size": block_size}
    layers = boostax.capture_layers(case.loss, case.params, case.batch, **sized)
    tx = boostax.thor(RATE, DAMPING, momentum=0.9, layers=layers, frequency=frequency)
    return tx, layers


class Stepper:
    """A train step that keeps its own state."""

    def __init__(self, case: Case, tx: Any, first: int = 0):
        self.step = boostax.train_step(case.loss, tx, metrics=("loss",))
        self.state, self.batch = self.step.init(case.params), case.batch
        for _ in range(first):
            self()

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics

    def cost(self, due: bool | None = None) -> dict[str, float]:
        compiled = self.step._jitted(None, self.state, due=due)
        return compiled_cost(compiled, self.state, self.batch, {})


def cost(
    name: str, case: Case, repeats: int, number: int, blocks: tuple[int, ...]
) -> tuple[str, dict[str, Any]]:
    """Return the table of one model, and what it was made of."""
    _, layers = thor(case, 10)
    # A Python bool, as the train step has it on a CPU: convolutions are slow inside a cond.
    due = jax.jit(functools.partial(layers.value_and_grad, due=True))
    plain = jax.jit(jax.value_and_grad(case.loss))
    given = (case.params, case.batch)
    base, every = "SGD with momentum", "frequency 1"
    # The early refreshes come at steps 0, 1, 3 and 6; ten steps leave them behind.
    sgd = Stepper(case, optax.sgd(RATE, momentum=0.9))
    refreshing = Stepper(case, thor(case, 1)[0], first=10)
    rare = {
        "without statistics": Stepper(case, thor(case, NEVER)[0], first=10),
        "frequency 10": Stepper(case, thor(case, 10)[0], first=10),
    }
    if number % 100 == 0:
        rare["frequency 100"] = Stepper(case, thor(case, 100)[0], first=10)
    for size in blocks:
        for words, frequency in (("without statistics", NEVER), ("frequency 10", 10)):
            tx, _ = thor(case, frequency, size)
            rare[f"blocks of {size}, {words}"] = Stepper(case, tx, first=10)
    # The gradients alone, without any update: what statistics add.
    parts = {
        "gradient, plain": functools.partial(plain, *given),
        "gradient, due": functools.partial(due, *given),
    }
    often = interleaved(
        {base: sgd, every: refreshing, **parts}, repeats=repeats, number=number // 10
    )
    seldom = interleaved({base: sgd, **rare}, repeats=repeats, number=number)
    compiled = {base: sgd.cost(), every: refreshing.cost(due=True)}
    compiled["without statistics"] = rare["without statistics"].cost(due=False)
    compiled["gradient, plain"] = compiled_cost(plain, *given)
    compiled["gradient, due"] = compiled_cost(due, *given)
    rows = []
    for label in (base, *rare, every, *parts):
        results = often if label in often and label != base else seldom
        of = "gradient, plain" if label in parts else base
        cpu, wall = (ratios(results, label, of, clock) for clock in ("cpu", "wall"))
        cells = ["", "", ""]
        if label in compiled:
            flops, bytes_, temp = (
                compiled[label][k] / 1e6 for k in ("flops", "bytes", "temp_bytes")
            )
            cells = [f"{flops:.1f}", f"{bytes_:.1f}", f"{temp:.1f}"]
        rows.append(
            [
                label,
                f"{1e3 * statistics.median(results[label]['cpu']):.2f}",
                f"{statistics.median(cpu):.2f} [{min(cpu):.2f}, {max(cpu):.2f}]",
                f"{statistics.median(wall):.2f}",
                *cells,
            ]
        )
    # Statistics alone, as part of a whole step of SGD.
    rounds = zip(
        *(often[k]["cpu"] for k in ("gradient, due", "gradient, plain", base)), strict=True
    )
    shares = [1 + (with_it - bare) / step for with_it, bare, step in rounds]
    head = ["", "CPU, ms", "ratio [min, max]", "wall", "MFLOP", "MB accessed", "temp MB"]
    words = (
        "A step of SGD with the statistics added, inverses left out: "
        f"{statistics.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}] times the plain step."
    )
    text = (
        f"{name}: {repeats} rounds of {number} steps in turn, {number // 10} of those that refresh."
    )
    return f"{text}\n\n{table(head, rows)}\n\n{words}", {
        "often": often,
        "seldom": seldom,
        "compiled": compiled,
    }


def refresh_table(repeats: int) -> tuple[str, dict[str, Any]]:
    """Return the time of a refresh by block size."""
    rows, kept = [], {}
    for inputs, outputs in ((2048, 2048), (4096, 1024)):
        candidates: dict[str, Callable[[], Any]] = {}
        case = mlp(inputs, outputs, size=16)
        for block_size in BLOCKS:
            layers = thor(case, 1, block_size)[1]
            tx = boostax.thor(RATE, DAMPING, layers=layers, frequency=NEVER, early=())
            grads = jax.tree.map(jnp.ones_like, case.params)

            def stats_of(shape: Any) -> jax.Array:
                wave = jnp.cos(jnp.arange(shape.shape[-1], dtype=jnp.float32))
                return jnp.broadcast_to(
                    jnp.eye(shape.shape[-1]) + jnp.outer(wave, wave), shape.shape
                )

            stats = jax.tree.map(stats_of, layers.shapes())
            update = jax.jit(tx.update)
            state = tx.init(case.params)
            _, later = update(grads, state, case.params, stats=stats)
            for label, held in (("refresh", state), ("between", later)):
                call = functools.partial(update, grads, held, case.params, stats=stats)
                candidates[f"{label} {block_size}"] = call
        results = interleaved(candidates, repeats=repeats, warmup=1)
        kept[f"{inputs} x {outputs}"] = results
        cells = []
        for block_size in BLOCKS:
            with_it, without = (
                statistics.median(results[f"{label} {block_size}"]["cpu"])
                for label in ("refresh", "between")
            )
            cells.append(f"{1e3 * with_it:.0f} / {1e3 * without:.0f}")
        rows.append([f"{inputs} x {outputs}", *cells])
    head = ["layer", *map(str, BLOCKS)]
    return table(head, rows), kept


def wide_table(steps: int, seeds: int, rates: tuple[float, ...]) -> tuple[str, dict[str, Any]]:
    """Return training loss and CPU time of a wide MLP by block size."""
    images, labels = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
    x = jnp.asarray(images.astype(np.float32) / 16 - 0.5)
    y = jnp.asarray(labels.astype(np.int32))
    widths = (64, 1024, 512, 10)
    example = {"x": x[:128], "y": y[:128]}
    case = Case(mlp_loss, mlp(*widths).params, example)
    rows, kept = [], {}
    for block_size in (128, 256, 512, 1025):
        _, layers = thor(case, 10, block_size)

        @jax.jit
        def run(params: Any, order: Any, rate: Any, layers: Any = layers) -> Any:
            schedule = schedule_to(steps, rate)
            tx = boostax.thor(schedule, DAMPING, momentum=0.9, layers=layers, frequency=10)

            def step(i: jax.Array, carry: Any) -> Any:
                params, state = carry
                batch = {"x": x[order[i]], "y": y[order[i]]}
                due = optax.tree.get(state, "due")
                _, grads, stats = layers.value_and_grad(params, batch, due=due)
                updates, state = tx.update(grads, state, params, stats=stats)
                return optax.apply_updates(params, updates), state

            params, _ = lax.fori_loop(0, steps, step, (params, tx.init(params)))
            return mlp_loss(params, {"x": x, "y": y})

        found: dict[float, list[float]] = {rate: [] for rate in rates}
        spent = []
        for rate in rates:
            for seed in range(seeds):
                draw = np.random.default_rng(seed)
                orders = [draw.permutation(len(x)) for _ in range(-(-steps * 128 // len(x)))]
                order = jnp.asarray(np.concatenate(orders)[: steps * 128].reshape(steps, 128))
                keys = jax.random.split(jax.random.key(seed), 3)
                params = [dense(*a) for a in zip(keys, widths[:-1], widths[1:], strict=True)]
                begin = time.process_time()
                found[rate].append(float(run(params, order, jnp.float32(rate))))
                spent.append(time.process_time() - begin)
        best = min(rates, key=lambda rate: statistics.mean(found[rate]))
        kept[block_size] = {"loss": found, "cpu_seconds": spent}
        name = str(block_size) if block_size < 1025 else "whole"
        cells = [f"{statistics.mean(found[rate]):.2e}" for rate in rates]
        # The first call compiled.
        rows.append([name, *cells, f"{best:g}", f"{statistics.median(spent[1:]):.1f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    head = [
        "block size",
        *(f"loss at {rate:g}" for rate in rates),
        "best rate",
        "CPU seconds of a run",
    ]
    return table(head, rows), kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="these alone")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count")
    parser.add_argument(
        "--number",
        type=int,
        default=CYCLE,
        help="steps of a round, whole tens; frequency 100 is left out unless whole hundreds",
    )
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    quick, repeats = arguments.quick, 1 if arguments.quick else arguments.repeats
    kept: dict[str, Any] = {}
    models = {
        "mlp": ("MLP 784-512-256-10, batch 128", lambda: mlp(784, 512, 256, 10), arguments.number),
        "batch": ("the same, batch 1024", lambda: mlp(784, 512, 256, 10, size=1024), 20),
        "cnn": ("CNN 28x28, batch 64", cnn, arguments.number),
    }
    for part, (name, made, number) in models.items():
        if part in arguments.part:
            text, kept[name] = cost(
                name,
                made(),
                repeats,
                10 if quick else number,
                (128, 1024) if part == "mlp" else (),
            )
            print(f"{text}\n", flush=True)
    if "blocks" in arguments.part:
        text, kept["blocks"] = refresh_table(min(repeats, 5))
        print(
            f"CPU ms of an update that refreshes / that does not, by block size.\n\n{text}\n",
            flush=True,
        )
    if "loss" in arguments.part:
        steps, seeds, rates = (10, 1, (0.1,)) if quick else (60, 3, (0.03, 0.1, 0.3))
        text, kept["loss"] = wide_table(steps, seeds, rates)
        print(f"MLP 64-1024-512-10 on digits, {steps} steps of 128.\n\n{text}\n", flush=True)
    where = environment()
    print(f"{where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, kept)


if __name__ == "__main__":
    main()
