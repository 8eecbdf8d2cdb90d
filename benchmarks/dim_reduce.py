"""What a step of dim_reduce costs: reads of the basis, time beside the gradient's, memory, precision.

    python benchmarks/dim_reduce.py [--part cost precision] [--sizes 1e5 1e6 1e7] [--k 32]
        [--batch 1024] [--repeats 7] [--quick] [--out results.json]

- ``cost``: three square layers and a head of 10 on random data, the train step with a basis of k
  orthonormal directions, for alpha = 0 and 0.001 and a basis in float32 and bfloat16. Passes over the
  basis are counted in the optimized HLO of the compiled step: the bytes of all operands that are a part
  of the basis, over k n itemsize. Time as ratio of CPU time to the gradient's, contenders in turn;
  steps have one trial each (max_backtracks=0), and the loss alone is timed beside them. Memory:
  the optimizer's state and the temporary memory of the step over k n itemsize.
- ``precision``: projections and sums of rows of a random basis kept in bfloat16 against float64.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _basis_reads import basis_reads
from _measure import compiled_cost, environment, interleaved, ratios, write_results
from _tables import table

import boostax

PARTS = ("cost", "precision")
DTYPES = ("float32", "bfloat16")
ALPHAS = (0.0, 0.001)


class Case(NamedTuple):
    """A model to time: ``loss(params, batch)``, its parameters, and one batch."""

    loss: Callable[..., Any]
    params: Any
    batch: Any

    @property
    def size(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def mlp(size: float, batch: int) -> Case:
    """Return three square layers and a head of 10, with about ``size`` weights."""
    # Multiples of 32, so that the rows of `orthonormal` come out even.
    width = 32 * max(1, round(math.sqrt(size / 3) / 32))
    rng = np.random.default_rng(0)
    params = {
        f"layer_{i}": jnp.asarray(rng.normal(size=(width, out)) * np.sqrt(2 / width), jnp.float32)
        for i, out in enumerate((width, width, width, 10))
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        for i in range(3):
            x = jax.nn.relu(x @ params[f"layer_{i}"])
        logits = x @ params["layer_3"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    x = jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)
    return Case(loss, params, (x, jnp.asarray(rng.integers(0, 10, batch))))


def orthonormal(case: Case, k: int, dtype: str) -> Any:
    """Return a basis whose rows are those of a Hadamard matrix, repeated under random signs."""
    rows = np.ones((1, 1), np.float32)
    while len(rows) < k:
        rows = np.vstack([np.hstack([rows, rows]), np.hstack([rows, -rows])])
    rng = np.random.default_rng(1)
    signs = rng.choice(np.array([-1, 1], np.float32), case.size) / np.float32(math.sqrt(case.size))
    array = np.tile(rows[:k], (1, case.size // len(rows)))
    array *= signs
    return boostax.TrajectoryBasis.from_array(array, case.params, dtype=dtype)


class Stepper:
    """A train step that keeps its own state, and what its program says."""

    def __init__(self, case: Case, k: int, dtype: str, alpha: float):
        basis = orthonormal(case, k, dtype)
        tx = boostax.dim_reduce(basis, alpha=alpha, max_backtracks=0)
        self.step = boostax.train_step(case.loss, tx, metrics=("loss",))
        self.state, self.batch = self.step.init(case.params), case.batch
        jitted = self.step._jitted(None, self.state, due=None)
        whole = k * case.size * basis.dtype.itemsize
        compiled = jitted.lower(self.state, self.batch, {}).compile()
        shapes = [(k, *leaf.shape) for leaf in jax.tree.leaves(case.params)]
        reads = basis_reads(compiled, shapes)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.opt_state))
        self.told = {
            "passes": sum(read.bytes for read in reads) / whole,
            "state": held / whole,
            **compiled_cost(jitted, self.state, self.batch, {}),
        }
        self.told["temp"] = self.told["temp_bytes"] / whole

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def cost(size: float, k: int, batch: int, repeats: int, number: int) -> tuple[str, Any]:
    """Return the table of one size, and what it was made of."""
    case = mlp(size, batch)
    gradient = jax.jit(jax.value_and_grad(case.loss))
    loss = jax.jit(case.loss)
    given = (case.params, case.batch)
    steps = {f"{d}, alpha {a:g}": Stepper(case, k, d, a) for d in DTYPES for a in ALPHAS}
    plain = {"gradient": lambda: gradient(*given), "loss": lambda: loss(*given)}
    results = interleaved({**plain, **steps}, repeats=repeats, number=number)
    alone = {"gradient": compiled_cost(gradient, *given), "loss": compiled_cost(loss, *given)}
    rows = []
    for label in (*plain, *steps):
        cpu, wall = (ratios(results, label, "gradient", clock) for clock in ("cpu", "wall"))
        told = steps[label].told if label in steps else alone[label]
        cells = ["", "", ""]
        if label in steps:
            cells = [f"{told[name]:.3f}" for name in ("passes", "state", "temp")]
        rows.append(
            [
                label,
                f"{1e3 * statistics.median(results[label]['cpu']):.2f}",
                f"{statistics.median(cpu):.2f} [{min(cpu):.2f}, {max(cpu):.2f}]",
                f"{statistics.median(wall):.2f}",
                f"{told['flops'] / 1e6:.0f}",
                f"{told['bytes'] / 1e6:.1f}",
                *cells,
            ]
        )
    head = [
        f"n = {case.size:,}, batch {batch}",
        "CPU, ms",
        "over the gradient's [min, max]",
        "wall",
        "MFLOP",
        "MB accessed",
        "passes over the basis",
        "state over k n",
        "temp over k n",
    ]
    kept = {"n": case.size, "times": results, "told": {k: s.told for k, s in steps.items()}}
    return table(head, rows), kept


def precision(size: float, k: int) -> tuple[str, Any]:
    """Return the errors of products with a random basis in float32 and bfloat16."""
    n = int(size)
    rng = np.random.default_rng(0)
    exact = np.linalg.qr(rng.normal(size=(n, k)))[0].T
    # A gradient that lies half in the subspace, and one of no relation to it.
    noise = rng.normal(size=n)
    noise /= np.linalg.norm(noise)
    inside = exact.T @ rng.normal(size=k)
    inside /= np.linalg.norm(inside)
    params = {"w": jnp.zeros(n)}
    rows, kept = [], {}
    coefficients = rng.normal(size=k)
    for dtype in DTYPES:
        basis = boostax.TrajectoryBasis.from_array(exact.astype(np.float32), params, dtype=dtype)
        stored = basis.to_array().astype(np.float64)
        gram = np.abs(stored @ stored.T - np.eye(k)).max()
        errors = [float(gram)]
        for g in (inside, (inside + noise) / math.sqrt(2), noise):
            got = np.asarray(jax.jit(basis.project)({"w": jnp.asarray(g, jnp.float32)}))
            errors.append(float(np.linalg.norm(got - exact @ g) / np.linalg.norm(g)))
        back = np.asarray(jax.jit(basis.combine)(jnp.asarray(coefficients, jnp.float32))["w"])
        want = exact.T @ coefficients
        errors.append(float(np.linalg.norm(back - want) / np.linalg.norm(want)))
        rows.append([dtype, *(f"{e:.1e}" for e in errors)])
        kept[dtype] = errors
    head = [
        f"n = {n:,}",
        "off orthonormal",
        "V g, g inside",
        "half inside",
        "outside",
        "V^T c",
    ]
    return table(head, rows), kept


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="these alone")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1024])
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    if arguments.k not in (1, 2, 4, 8, 16, 32):
        parser.error(f"--k must be a power of two up to 32, got {arguments.k}")
    sizes, repeats = arguments.sizes, arguments.repeats
    if arguments.quick:
        sizes, repeats = [1e4], 1
    kept: dict[str, Any] = {}
    if "cost" in arguments.part:
        for size in sizes:
            for batch in arguments.batch:
                # About as long a round at each size.
                number = max(1, min(20, round(2e6 / size)))
                text, kept[f"cost {size:g} {batch}"] = cost(
                    size, arguments.k, batch, repeats, number
                )
                print(f"{text}\n\n{repeats} rounds of {number}\n", flush=True)
    if "precision" in arguments.part:
        text, kept["precision"] = precision(1e4 if arguments.quick else 1e5, arguments.k)
        print(f"{text}\n", flush=True)
    where = environment()
    print(f"{where['cpu_count']} CPU cores, JAX {where['jax']}")
    if arguments.out is not None:
        write_results(arguments.out, kept)


if __name__ == "__main__":
    main()
