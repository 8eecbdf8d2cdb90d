"""The search for the nearest source examples against one matrix product and ``lax.top_k``.

    python benchmarks/finetune.py
    python benchmarks/finetune.py --corners    # few targets, many neighbours
    python benchmarks/finetune.py --large      # 1M x 10k x 512, streamed from a .npy file

Both search the same arrays in turn, round after round: ours in blocks, the other one with all
scores in memory at once. Prints the ratio of process CPU time (median, spread), and FLOPs and bytes
of the compiled code: ours is a step of one block, times the number of blocks. ``--large`` has nothing
to be compared with, because its scores alone would take 40 GB: it prints seconds, FLOPs a second and
the peak memory of the process. The first takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import resource
import sys
import tempfile
import time
from typing import Any

import _measure
import _tables
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import boostax
from boostax.finetune import _search, nearest

# Source examples, targets, features, neighbours.
SHAPES = (
    (65_536, 1_024, 512, 10),
    (65_536, 1_024, 512, 100),
    (65_536, 1_024, 64, 10),
    (20_000, 4_096, 128, 10),
)
# Where searching in blocks costs most: little product for each row that is prepared, or a large merge.
CORNERS = (
    (65_536, 64, 64, 10),
    (65_536, 8, 512, 10),
    (65_536, 256, 64, 1_000),
)
BLOCK = 8192


@functools.partial(jax.jit, static_argnames=("k", "metric"))
def at_once(source: jax.Array, target: jax.Array, *, k: int, metric: str) -> Any:
    """All scores in one product, and their largest; the plain way to write it."""
    if metric == "cosine":
        unit = lambda rows: rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
        return lax.top_k(unit(target) @ unit(source).T, k)
    if metric == "symmetric_kl":
        left = jnp.concatenate([target, jnp.log(target)], axis=1)
        right = jnp.concatenate([jnp.log(source), source], axis=1)
        own = jnp.sum(source * jnp.log(source), axis=1)
        return lax.top_k(left @ right.T - own, k)
    return lax.top_k(2 * target @ source.T - jnp.sum(source * source, axis=1), k)


def cost_of_ours(source: Any, target: Any, k: int, metric: str) -> dict[str, float]:
    """Return FLOPs and bytes of all blocks together, and of preparing the targets."""
    tile = -(-len(target) // -(-len(target) // nearest._TILE))
    prepare = functools.partial(_search.prepare_targets, metric=metric, tile=tile)
    first = _measure.compiled_cost(
        _search.prepare_targets, jax.typeof(target), metric=metric, tile=tile
    )
    held = jax.eval_shape(prepare, target)[0]
    found = jax.eval_shape(lambda held: _search.start(held, k), held)
    rows = -(-len(source) // -(-len(source) // BLOCK))
    block = jax.ShapeDtypeStruct((rows, source.shape[1]), source.dtype)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    prepare_block = functools.partial(_search.prepare_block, metric=metric)
    halves = jax.eval_shape(prepare_block, block, held, number, number)
    costs = [
        _measure.compiled_cost(_search.prepare_block, block, held, number, number, metric=metric),
        _measure.compiled_cost(_search.step, found, held, *halves, number),
    ]
    step = {name: sum(cost[name] for cost in costs) for name in first}
    blocks = -(-len(source) // rows)
    return {name: first[name] + blocks * step[name] for name in ("flops", "bytes")} | {
        "temp_bytes": step["temp_bytes"]
    }


def compare(repeats: int, corners: bool) -> dict[str, Any]:
    """Time both on every shape and metric, print a table, and return the numbers."""
    rng = np.random.default_rng(0)
    rows, results = [], {}
    cases = [(shape, "euclidean") for shape in (CORNERS if corners else SHAPES)]
    if not corners:
        cases += [(SHAPES[0], metric) for metric in ("cosine", "symmetric_kl")]
    for (n, m, d, k), metric in cases:
        draw = lambda count, d=d: jnp.asarray(rng.uniform(0.1, 1.0, (count, d)), jnp.float32)
        source, target = draw(n), draw(m)
        ours = functools.partial(
            boostax.nearest_source_subset, source, target, k, metric=metric, block=BLOCK
        )
        theirs = functools.partial(at_once, source, target, k=k, metric=metric)
        same = np.mean(ours().neighbours == np.asarray(theirs()[1]))
        times = _measure.interleaved({"ours": ours, "at once": theirs}, repeats=repeats)
        cpu = sorted(_measure.ratios(times, "ours", "at once"))
        cost = cost_of_ours(source, target, k, metric)
        plain = _measure.compiled_cost(at_once, source, target, k=k, metric=metric)
        name = f"{n} x {m} x {d}, k = {k}, {metric}"
        rows.append(
            [
                name,
                f"{cpu[len(cpu) // 2]:.2f}x [{cpu[0]:.2f}, {cpu[-1]:.2f}]",
                f"{cost['flops'] / plain['flops']:.3f}x",
                f"{cost['bytes'] / plain['bytes']:.2f}x",
                f"{cost['temp_bytes'] / plain['temp_bytes']:.2f}x",
                f"{100 * same:.2f} %",
            ]
        )
        print(name, _measure.ratio_line(times, "ours", "at once"), flush=True)
        results[name] = {"cpu_ratios": cpu, "ours": cost, "at_once": plain, "same": float(same)}
    head = ["source x targets x features", "CPU time", "FLOPs", "bytes", "temp memory", "same"]
    print("\n" + _tables.table(head, rows))
    return results


def large(sources: int, targets: int, width: int, k: int) -> dict[str, Any]:
    """Search a .npy file that is read through a memory map, and print what it took."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "source.npy"
        file = np.lib.format.open_memmap(path, "w+", np.float16, (sources, width))
        for start in range(0, sources, BLOCK):
            file[start : start + BLOCK] = rng.normal(size=file[start : start + BLOCK].shape)
        file.flush()
        del file
        target = rng.normal(size=(targets, width)).astype(np.float32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, cpu = time.perf_counter(), time.process_time()
        subset = boostax.nearest_source_subset(path, target, k, block=BLOCK)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flops = 2.0 * sources * targets * width
    print(
        f"{sources} x {targets} x {width}, k = {k}, float16 .npy file: {wall:.0f} s, {cpu:.0f} s CPU, "
        f"{flops / wall / 1e9:.0f} GFLOP/s; {len(subset.indices)} chosen; peak memory "
        f"{peak / 2**20:.2f} GiB ({before / 2**20:.2f} before)"
    )
    return {"wall": wall, "cpu": cpu, "peak_kib": peak, "before_kib": before}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count")
    parser.add_argument("--corners", action="store_true", help="few targets, many neighbours")
    parser.add_argument("--large", action="store_true", help="stream 1M x 10k x 512 from a file")
    parser.add_argument("--sources", type=int, default=1_000_000, help="of --large")
    parser.add_argument("--targets", type=int, default=10_000, help="of --large")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    if arguments.large:
        numbers = large(arguments.sources, arguments.targets, 512, 10)
    else:
        numbers = compare(arguments.repeats, arguments.corners)
    if arguments.out is not None:
        _measure.write_results(arguments.out, numbers)
