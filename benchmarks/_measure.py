"""Shared tools of the benchmarks: interleaved timing, and the cost of a compiled function.

Process CPU time (``time.process_time``) adds up what all threads of this process used, and so
depends less than wall time on what else runs on the machine. Candidates are run in turn, round
after round, so that a slow spell of the machine hits all of them; ratios are formed within a
round, and the median over the rounds is reported with its spread.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Results = dict[str, dict[str, list[float]]]


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    repeats: int = 7,
    warmup: int = 1,
    number: int = 1,
    alternate: bool = False,
) -> Results:
    """Time callables in turn; each call's result is waited for.

    Args:
      candidates: name -> function without arguments. It keeps its own state if it donates.
      repeats: rounds that count.
      warmup: rounds before them that don't (compilation happens here).
      number: calls per candidate and round; times are per call.
      alternate: take turns after every call instead of after ``number`` calls: for long rounds,
        during which the machine's speed changes.

    Returns:
      ``{name: {"cpu": [seconds, ...], "wall": [seconds, ...]}}``, one entry a round.
    """
    if repeats < 1 or number < 1:
        raise ValueError(f"repeats and number must be at least 1, got {repeats} and {number}")
    results: Results = {name: {"cpu": [], "wall": []} for name in candidates}
    names = list(candidates)
    turns, calls = (number, 1) if alternate else (1, number)
    for round_ in range(warmup + repeats):
        spent = {name: [0.0, 0.0] for name in names}
        for turn in range(turns):
            # The order rotates, so that nobody is always the one after the heaviest.
            shift = (round_ + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                cpu, wall = time.process_time(), time.perf_counter()
                for _ in range(calls):
                    jax.block_until_ready(candidates[name]())
                spent[name][0] += time.process_time() - cpu
                spent[name][1] += time.perf_counter() - wall
        if round_ >= warmup:
            for name, (cpu, wall) in spent.items():
                results[name]["cpu"].append(cpu / number)
                results[name]["wall"].append(wall / number)
    return results


def ratios(results: Results, name: str, base: str, clock: str = "cpu") -> list[float]:
    """Return the ratio of ``name`` to ``base`` of each round."""
    pairs = zip(results[name][clock], results[base][clock], strict=True)
    return [a / b if b > 0 else float("nan") for a, b in pairs]


def ratio_line(results: Results, name: str, base: str) -> str:
    """Return one printable line: median ratio of CPU time, its spread, and the median times."""
    cpu = ratios(results, name, base)
    wall = statistics.median(ratios(results, name, base, "wall"))
    ms = 1e3 * statistics.median(results[name]["cpu"])
    return (
        f"{name:<34} {statistics.median(cpu):6.3f}x of {base}  "
        f"[{min(cpu):.3f}, {max(cpu):.3f}] over {len(cpu)} rounds; "
        f"{ms:9.3f} ms CPU; wall {wall:.3f}x"
    )


def compiled_cost(jitted: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Return FLOPs, bytes accessed and temp memory of a jitted function for these arguments.

    The arguments may be ``ShapeDtypeStruct`` trees. XLA counts the body of a loop once,
    whatever its trip count, and both branches of a ``cond``.
    """
    compiled = jitted.lower(*args, **kwargs).compile()
    analysis = compiled.cost_analysis() or {}
    if isinstance(analysis, (list, tuple)):
        analysis = analysis[0] if analysis else {}
    memory = compiled.memory_analysis()
    return {
        "flops": float(analysis.get("flops", 0.0)),
        "bytes": float(analysis.get("bytes accessed", 0.0)),
        "temp_bytes": float(getattr(memory, "temp_size_in_bytes", 0) or 0),
    }


def environment() -> dict[str, Any]:
    """Return what a reader of a number needs to know of the machine and the versions."""
    import flax
    import optax

    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
    }


def write_results(path: str | os.PathLike[str], results: Mapping[str, Any]) -> None:
    """Write results and the environment as JSON, under a temporary name first."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    content = {"environment": environment(), **results}
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True, default=float) + "\n")
    temporary.replace(path)
