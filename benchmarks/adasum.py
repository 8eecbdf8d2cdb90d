"""What adasum sends, how exact it is, and what it costs beside the mean, on simulated devices.

    python benchmarks/adasum.py

Bytes are counted from the compiled program: what a device sends in each collective. A ring is
assumed for all-gathers: (n - 1) times the operand. Times are CPU times of all simulated devices
together against ``lax.pmean`` of the same tree. Takes about a minute on two cores.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import argparse
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import _measure
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax

_OP = re.compile(
    r"= (?P<result>.*?) (?P<op>collective-permute|all-gather|all-reduce|reduce-scatter|all-to-all)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?P<kind>[a-z]+)(?P<bits>\d+)\[(?P<shape>[\d,]*)\]")


def sent_bytes(text: str, n: int) -> dict[str, float]:
    """Return the bytes that a device sends, by kind of collective, from compiled HLO text."""
    sent: dict[str, float] = {}
    for line in text.splitlines():
        found = _OP.search(line)
        if found is None:
            continue
        size = 0.0
        for array in _ARRAY.finditer(found["result"]):
            shape = [int(d) for d in array["shape"].split(",") if d]
            size += math.prod(shape) * int(array["bits"]) / 8
        factor = {
            "collective-permute": 1.0,
            "all-gather": (n - 1) / n,  # of the result
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1.0,
            "all-to-all": (n - 1) / n,
        }[found["op"]]
        sent[found["op"]] = sent.get(found["op"], 0.0) + factor * size
    return sent


def network(size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network of about ``size`` parameters: 8 blocks, 34 leaves."""
    width = int(math.sqrt(size / 10))
    shapes: dict[str, tuple[int, ...]] = {"embed": (width, width), "head": (width, width)}
    for i in range(8):
        shapes |= {
            f"block_{i}/kernel": (width, width),
            f"block_{i}/bias": (width,),
            f"block_{i}/scale": (width,),
            f"block_{i}/gate": (7,),
        }
    return shapes


def reference(vectors: np.ndarray) -> np.ndarray:
    """Return AdaSum in float64, in the documented order."""
    rest = [v.astype(np.float64) for v in vectors]
    n = len(rest)
    extras = n - (1 << (n.bit_length() - 1))

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        dot, a2, b2 = (a * b).sum(), (a * a).sum(), (b * b).sum()
        return (1 - dot / (2 * a2)) * a + (1 - dot / (2 * b2)) * b

    rest = [pair(*rest[2 * i : 2 * i + 2]) for i in range(extras)] + rest[2 * extras :]
    while len(rest) > 1:
        rest = [pair(*rest[i : i + 2]) for i in range(0, len(rest), 2)]
    return rest[0]


def over(n: int, function: Callable[[Any], Any], shapes: dict[str, Any], seed: int) -> Any:
    """Return the compiled function over ``n`` devices, and its gradients."""
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    draw = np.random.default_rng(seed)
    # A common part and a part of one's own, as gradients have.
    grads = {
        name: (draw.standard_normal(shape) + draw.standard_normal((n, *shape))).astype(np.float32)
        for name, shape in shapes.items()
    }
    grads = jax.device_put(grads, NamedSharding(mesh, PartitionSpec("data")))
    inside = lambda tree: function(jax.tree.map(lambda x: x[0], tree))
    step = jax.jit(
        jax.shard_map(inside, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    )
    return step.lower(grads).compile(), grads


def combined(**settings: Any) -> Callable[[Any], Any]:
    """Return a function that combines a tree by AdaSum."""
    tx = boostax.adasum("data", **settings)
    return lambda tree: tx.update(tree, ())[0]


def mean(tree: Any) -> Any:
    """Return the mean of a tree over the devices."""
    return jax.lax.pmean(tree, "data")


def main(sizes: list[int], repeats: int, out: str | None, only_times: bool) -> None:
    """Measure, print, and write the results where asked."""
    results: dict[str, Any] = {}
    shapes = network(100_000)
    total = 4 * sum(math.prod(shape) for shape in shapes.values())
    for algorithm, counts in (("halving", (2, 4, 6, 8)), ("gather", (8,))):
        if only_times:
            break
        for n in counts:
            compiled, grads = over(n, combined(algorithm=algorithm), shapes, n)
            got = compiled(grads)
            sent = sent_bytes(compiled.as_text(), n)
            worst = 0.0
            for name, leaf in grads.items():
                right = reference(np.asarray(leaf).reshape(n, -1))
                error = np.linalg.norm(np.asarray(got[name], np.float64).ravel() - right)
                worst = max(worst, error / np.linalg.norm(right))
            share = sum(sent.values()) / total
            print(
                f"{algorithm:<8} {n} devices: sends {share:.4f} N a device (ring bound "
                f"{2 * (n - 1) / n:.4f} N), error {worst:.2e}"
            )
            results[f"{algorithm} {n}"] = {"share": share, "error": worst, **sent}
    for size in sizes:
        shapes = network(size)
        arms = {
            "lax.pmean": mean,
            "adasum": combined(),
        }
        runs = {name: over(8, function, shapes, 0) for name, function in arms.items()}
        times = _measure.interleaved(
            {name: lambda run=run: run[0](run[1]) for name, run in runs.items()}, repeats=repeats
        )
        count = sum(math.prod(shape) for shape in shapes.values())
        print(f"{count:,} parameters, 8 devices:")
        for name in arms:
            print(" ", _measure.ratio_line(times, name, "lax.pmean"))
        results[f"times {size}"] = times
    if out is not None:
        _measure.write_results(out, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=9, help="rounds of the timing")
    parser.add_argument("--only-times", action="store_true", help="leave the bytes out")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    main(arguments.sizes, arguments.repeats, arguments.out, arguments.only_times)
