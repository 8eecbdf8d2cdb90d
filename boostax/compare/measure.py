"""One timed run of one arm: step time, compile time and CPU time apart, and the compiled FLOPs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from boostax.compare.subspace import SubspaceStep
from boostax.compare.task import Task, UsageError
from boostax.compare.together import local, part_of
from boostax.training.describe import compiled_cost

__all__ = ["Compilations", "compiled_costs", "evaluate", "run_arm", "start_of", "take_batches"]

Progress = Callable[[int, int, float | None, dict[str, float]], None]


class Compilations:
    """Counts the compilations of this process, through JAX's monitoring events.

    Attributes:
      count: compiled programs so far.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        # A listener can't be taken out again, so one object serves the whole process.
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == self._EVENT


_COMPILATIONS: list[Compilations] = []


def compilations() -> Compilations:
    """Return the one counter of this process."""
    if not _COMPILATIONS:
        _COMPILATIONS.append(Compilations())
    return _COMPILATIONS[0]


def start_of(task: Task, key: jax.Array) -> tuple[Any, Any]:
    """Call ``task.init`` and return ``(params or nnx model, model_state or None)``."""
    made = task.init(key)
    if isinstance(made, tuple):
        if len(made) != 2:
            raise UsageError(
                f"{task.name}: init must return params, (params, model_state) or an nnx.Module, "
                f"got a tuple of {len(made)}"
            )
        return made
    return made, None


def evaluate(task: Task, model: Any, state: Any) -> dict[str, float]:
    """Evaluate a train state with the task's own function, and check what it returns.

    Raises:
      UsageError: it does not return a dict of numbers.
    """
    from flax import nnx

    state = local(state)
    if isinstance(model, nnx.Module):
        values = task.evaluate(state.merge(model))
    else:
        values = task.evaluate(state.params, state.model_state)
    if not isinstance(values, dict) or not values:
        raise UsageError(
            f"{task.name}: evaluate must return a dict of numbers by name, got "
            f"{type(values).__name__}"
        )
    result = {}
    for name, value in values.items():
        if np.shape(value) != () or not np.issubdtype(np.asarray(value).dtype, np.number):
            raise UsageError(
                f"{task.name}: evaluate must return scalars, got {name!r} of shape "
                f"{np.shape(value)} and type {type(value).__name__}"
            )
        result[str(name)] = float(value)
    return result


def run_arm(
    task: Task,
    step: Any,
    *,
    seed: int,
    steps: int,
    eval_every: int,
    progress: Progress = lambda step, steps, loss, metrics: None,
) -> dict[str, Any]:
    """Train once and return the record: losses, times and evaluations, as plain lists.

    A step is timed from its call until all it returns is computed. The calls that compile are
    found by JAX's own events; such a call's step time is taken to be the median of the other
    calls (of the same freeze index, where there are any), and the rest of it is compile time.
    Drawing the batch and evaluating are in neither.

    Args:
      task: the task.
      step: the arm's train step; used again for every seed, so that it compiles once.
      seed: int >= 0, of the start, the batches and the step's random key.
      steps: int >= 1, calls of the step.
      eval_every: int >= 1, steps between evaluations; the start and the end are evaluated too.
      progress: called as ``progress(step, steps, loss, metrics)`` after every evaluation.

    Raises:
      UsageError: ``batches`` ended early, or ``evaluate`` returned no numbers.
    """
    counter = compilations()
    init_key, step_key = jax.random.split(jax.random.key(seed))
    model, model_state = start_of(task, init_key)
    state = step.init(model, model_state=model_state, rng=step_key)
    batches = take_batches(task, seed, steps)
    loss = None
    losses: list[float] = []
    indices: list[int] = []
    walls: list[float] = []
    cpus: list[float] = []
    compiled: list[bool] = []
    evaluations = [(0, evaluate(task, model, state))]
    progress(0, steps, None, evaluations[0][1])
    metrics: dict[str, Any] = {}
    batch: Any = None
    programs = 0
    for number, batch in enumerate(batches, start=1):
        batch = part_of(batch)
        before, cpu_start, start = counter.count, time.process_time(), time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        programs += counter.count - before
        compiled.append(counter.count > before)
        walls.append(wall)
        cpus.append(cpu)
        loss = float(metrics["loss"])
        losses.append(loss)
        indices.append(int(metrics.get("freeze_index", 0)))
        if number % eval_every == 0 or number == steps:
            evaluations.append((number, evaluate(task, model, state)))
            progress(number, steps, loss, evaluations[-1][1])
    step_seconds, compile_seconds = split_compile_time(walls, compiled, indices)
    cpu_seconds, _ = split_compile_time(cpus, compiled, indices)
    wall_at, cpu_at = np.cumsum([0.0, *step_seconds]), np.cumsum([0.0, *cpu_seconds])
    return {
        "steps": steps,
        "updates": int(metrics.get("updates", steps)),
        "loss": losses,
        "freeze_index": indices,
        "step_seconds": step_seconds,
        "cpu_seconds": cpu_seconds,
        "compile_seconds": compile_seconds,
        "compilations": programs,
        "evaluations": [
            {"step": at, "seconds": wall_at[at], "cpu_seconds": cpu_at[at], "metrics": values}
            for at, values in evaluations
        ],
        **(
            step.costs(steps)
            if isinstance(step, SubspaceStep)
            else compiled_costs(step, state, batch, indices)
        ),
    }


def split_compile_time(
    times: Sequence[float], compiled: Sequence[bool], indices: Sequence[int]
) -> tuple[list[float], float]:
    """Return the times of the steps themselves, and the sum of what compiling added.

    Example:
      >>> split_compile_time([5.0, 1.0, 1.5, 2.0], [True, False, False, False], [0, 0, 0, 1])
      ([1.25, 1.0, 1.5, 2.0], 3.75)
    """
    steady = [t for t, c in zip(times, compiled, strict=True) if not c]
    result, extra = [], 0.0
    for time_, was_compiled, index in zip(times, compiled, indices, strict=True):
        if not was_compiled:
            result.append(time_)
            continue
        alike = [
            t for t, c, i in zip(times, compiled, indices, strict=True) if not c and i == index
        ] or steady
        # With nothing to compare with, all of the call counts as compiling.
        typical = min(statistics.median(alike), time_) if alike else 0.0
        result.append(typical)
        extra += time_ - typical
    return result, extra


def compiled_costs(
    step: Any, state: Any, batch: Any, indices: Sequence[int]
) -> dict[str, float | None]:
    """Return the FLOPs of a step, averaged over the calls made, and the largest temp memory.

    The variants were compiled by the run; asking again costs nothing, JAX keeps them.

    Args:
      step: a :class:`boostax.training.step.TrainStep` after its run.
      state: a train state, arrays or shapes.
      batch: a batch, arrays or shapes.
      indices: the freeze index of every call of the run.
    """
    flops, memory = {}, []
    freezes = step.dispatches_on_host  # one compiled variant for each freeze index
    for index in sorted(set(indices)) if freezes else [None]:
        cost = compiled_cost(str(index), step.lower(state, batch, index=index).compile())
        # A training step has some of both, so that 0 means that the backend does not tell.
        flops[index] = cost.flops or None
        memory += [cost.temp_bytes] if cost.temp_bytes else []
    each = [flops[index if freezes else None] for index in indices]
    known = [f for f in each if f is not None]
    return {
        "flops_per_step": sum(known) / len(known) if known and len(known) == len(each) else None,
        "temp_bytes": max(memory) if memory else None,
    }


def take_batches(task: Task, seed: int, steps: int) -> Iterator[Any]:
    """Yield ``steps`` batches of a task, or raise a UsageError where it has fewer."""
    try:
        batches = iter(task.batches(seed))
    except TypeError as error:
        if "not iterable" not in str(error):
            raise
        raise UsageError(f"{task.name}: batches(seed) must return an iterable: {error}") from None
    for number in range(steps):
        try:
            batch = next(batches)
        except StopIteration:
            raise UsageError(
                f"{task.name}: batches({seed}) ended after {number} of {steps} batches; go over "
                "the data again (and shuffle anew), or ask for fewer --steps"
            ) from None
        yield batch
