"""The comparison: every arm with every seed, interleaved, each finished run put on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from boostax.compare import together
from boostax.compare.arms import Arm, BuiltArm, build_arm
from boostax.compare.measure import compilations, evaluate, run_arm, start_of, take_batches
from boostax.compare.storage import RunStore, check_names
from boostax.compare.task import Target, Task, UsageError
from boostax.errors import did_you_mean

__all__ = ["Plan", "build_all", "compare", "machine", "run_order", "versions"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is fixed before the first run.

    Attributes:
      task: the task.
      arms: the arms; the first is the plain one that the others are held against.
      seeds: int >= 1; the seeds are 0, 1, ...
      steps: int >= 1, the budget of every run, in batches.
      target: the metric and the value to reach.
      learning_rate: of the arms that have none of their own.
      eval_every: int >= 1, steps between evaluations.
      task_digest: digest of the task's source, so that its runs are not mixed with another's.
      own_tasks: the tasks of the arms that have one of their own, by its name in the task's file.
    """

    task: Task
    arms: tuple[Arm, ...]
    seeds: int
    steps: int
    target: Target
    learning_rate: float
    eval_every: int
    task_digest: str = ""
    own_tasks: Mapping[str, Task] = dataclasses.field(default_factory=dict)

    def task_of(self, arm: Arm) -> Task:
        """Return the task that an arm trains."""
        return self.task if arm.task is None else self.own_tasks[arm.task]

    def rate(self, arm: Arm) -> float:
        """Return the learning rate of an arm."""
        return self.learning_rate if arm.learning_rate is None else arm.learning_rate

    def settings(self, arm: Arm) -> dict[str, Any]:
        """Return what a run depends on; runs on disk are taken up only if it is the same."""
        return {
            "task": self.task.name,
            "task_digest": self.task_digest,
            "config": dict(arm.config),
            **(
                {}
                if arm.dim_reduce_after is None
                else {"dim_reduce": [arm.dim_reduce_after, arm.dim_reduce_batches]}
            ),
            **({} if arm.task is None else {"own_task": arm.task}),
            "level": arm.level,
            "learning_rate": self.rate(arm),
            "steps": self.steps,
            "eval_every": self.eval_every,
            "target": str(self.target),
            "versions": versions(),
            "machine": machine(),
        }


class Watcher:
    """What a comparison tells while it runs; the default says nothing."""

    def begin(self, total: int, kept: int) -> None:
        """There are ``total`` runs, ``kept`` of them already on disk."""

    def start(self, arm: str, seed: int) -> None:
        """A run starts."""

    def progress(
        self, step: int, steps: int, loss: float | None, metrics: Mapping[str, float]
    ) -> None:
        """A run was evaluated."""

    def finish(self, run: Mapping[str, Any]) -> None:
        """A run is on disk."""


def run_order(arms: Sequence[Any], seeds: int) -> Iterator[tuple[int, Any]]:
    """Yield ``(seed, arm)``: all arms with a seed before the next, beginning with another arm each.

    A machine that gets slower or warmer over the minutes then falls on all arms alike.

    Example:
      >>> list(run_order("ab", 2))
      [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for seed in range(seeds):
        first = seed % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            yield seed, arm


def compare(
    plan: Plan, store: RunStore | None, watcher: Watcher | None = None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """Make the runs that are not on disk yet, and return all.

    With several processes, all must call it, and each batch is split over all devices.

    Args:
      plan: what to run.
      store: where finished runs are; None in processes other than 0.
      watcher: told of the progress. Default None.

    Returns:
      ``runs``: by arm, the records in the order of the seeds; and by arm, what is known of its
      build (``updates``, ``config``, ``enabled``, ``notes``, ``learning_rate``). Both are empty in
      processes other than 0.

    Raises:
      UsageError: the task, a config or what is on disk does not fit.
    """
    watcher = watcher or Watcher()
    check_names([arm.name for arm in plan.arms])
    order = list(run_order(plan.arms, plan.seeds))
    done = together.on_main(lambda: _finished(plan, store, order)) or {}
    there = together.flags_of_main([(arm.name, seed) in done for seed, arm in order])
    watcher.begin(len(order), sum(there))
    compilations()
    built: dict[str, BuiltArm] = {}
    for (seed, arm), is_there in zip(order, there, strict=True):
        if is_there:
            continue
        if not built:
            # All arms, before any training: a config that does not fit shows at once.
            built = build_all(plan)
        watcher.start(arm.name, seed)
        record = run_arm(
            plan.task_of(arm),
            built[arm.name].step,
            seed=seed,
            steps=plan.steps,
            eval_every=plan.eval_every,
            progress=watcher.progress,
        )
        if store is None:
            continue
        run = {
            "arm": arm.name,
            "seed": seed,
            "settings": plan.settings(arm),
            "build": {
                "updates": built[arm.name].updates,
                "config": built[arm.name].config,
                "enabled": built[arm.name].enabled,
                "notes": built[arm.name].notes,
                "learning_rate": built[arm.name].learning_rate,
            },
            **record,
        }
        store.save(run)
        # Read back, so that a fresh run and one taken up again are the same kind of object.
        loaded = store.load(arm.name, seed, plan.settings(arm))
        assert loaded is not None
        done[arm.name, seed] = loaded
        watcher.finish(loaded)
    if store is None:
        return {}, {}
    runs = {arm.name: [done[arm.name, seed] for seed in range(plan.seeds)] for arm in plan.arms}
    return runs, {name: records[0]["build"] for name, records in runs.items()}


def _finished(
    plan: Plan, store: RunStore | None, order: Sequence[tuple[int, Arm]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the runs on disk by arm and seed."""
    assert store is not None
    runs = {(arm.name, seed): store.load(arm.name, seed, plan.settings(arm)) for seed, arm in order}
    return {key: run for key, run in runs.items() if run is not None}


def build_all(plan: Plan) -> dict[str, BuiltArm]:
    """Build every arm, and check the target against what the tasks evaluate."""
    parts = {}
    for arm in plan.arms:
        if arm.task not in parts:
            task = plan.task_of(arm)
            parts[arm.task] = (*start_of(task, jax.random.key(0)), next(take_batches(task, 0, 1)))
    built = {}
    for arm in plan.arms:
        model, model_state, batch = parts[arm.task]
        one = build_arm(
            arm,
            plan.task_of(arm),
            steps=plan.steps,
            rate=plan.rate(arm),
            model=model,
            model_state=model_state,
            batch=batch,
            mesh=together.mesh(),
        )
        if arm.task is not None:
            own = f"its start, loss, batches and optimizer are those of the task {arm.task!r}"
            one = dataclasses.replace(one, notes=(*one.notes, own))
        built[arm.name] = one
    for name, (model, model_state, _) in parts.items():
        arm = next(arm for arm in plan.arms if arm.task == name)
        state = built[arm.name].step.init(model, model_state=model_state, rng=jax.random.key(0))
        _check_target(plan, arm, evaluate(plan.task_of(arm), model, state))
    return built


def _check_target(plan: Plan, arm: Arm, metrics: Mapping[str, float]) -> None:
    whose = "" if arm.task is None else f" of the task {arm.task!r}"
    if plan.target.metric not in metrics:
        raise UsageError(
            f"--target: evaluate{whose} returns no metric {plan.target.metric!r}."
            f"{did_you_mean(plan.target.metric, metrics)} It returns: {', '.join(metrics)}"
        )
    if plan.target.met(metrics[plan.target.metric]):
        raise UsageError(
            f"--target: {plan.target} is met before any training{whose} "
            f"({metrics[plan.target.metric]:.4g}); choose a harder one"
        )


def source_digest(path: pathlib.Path | str) -> str:
    """Return a digest of a source file."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    import flax
    import jaxlib.version
    import numpy
    import optax

    import boostax

    return {
        "boostax": boostax.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """Return what the times depend on: the device, and the cores that this process may use."""
    count = getattr(os, "process_cpu_count", os.cpu_count)()
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    device = jax.local_devices()[0]
    several = {"processes": jax.process_count(), "devices": jax.device_count()}
    return {
        **(several if jax.process_count() > 1 else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": count,
        "backend": jax.default_backend(),
        "device": device.device_kind,
    }
