"""Arms of a comparison: a config, a level and a learning rate, built into a train step."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from boostax import _info
from boostax.compare._fitting import (
    captured,
    count_updates,
    device_notes,
    fewer_groups,
    horizons,
    injected,
    rate_of,
)
from boostax.compare.subspace import subspace_step
from boostax.compare.task import Task, UsageError

__all__ = ["Arm", "BuiltArm", "build_arm", "load_arms"]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
      name: unique among the arms; the column in the report.
      config: a boostax config as a dict; ``{}`` for the plain arm.
      level: ``"O0"``, ``"O1"`` or ``"O2"``. Default ``"O0"``.
      learning_rate: > 0, or None for the comparison's rate. Not beside an optimizer in the config,
        which has its own.
      adapts: whether ``grad_freeze.param_groups`` is lowered where the model has fewer layers, and
        thor or dim_reduce left out where they don't fit, with a note; for arms that the user did not
        write. Default False.
      dim_reduce_after: share of the steps, above 0 and below 1, after which the arm goes on with
        ``dim_reduce`` in the subspace of its own snapshots. Default None: it does not.
      dim_reduce_batches: int >= 1, batches that one step of that takes together. Default 8.
      task: the name of another task in the task's file, for an arm with a start, a loss, batches and
        an optimizer of its own. Default None: the comparison's task.
    """

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    level: str = "O0"
    learning_rate: float | None = None
    adapts: bool = False
    dim_reduce_after: float | None = None
    dim_reduce_batches: int = 8
    task: str | None = None


@dataclasses.dataclass(frozen=True)
class BuiltArm:
    """An arm's train step and what came of its config.

    Attributes:
      step: the :class:`boostax.training.step.TrainStep`, for all seeds.
      updates: optimizer updates in the budget; where the schedules end.
      config: the config as used.
      enabled: the names of the techniques that are on.
      notes: what the reader should know.
      learning_rate: a number, or what the config says in words where it is none.
    """

    step: Any
    updates: int
    config: Mapping[str, Any]
    enabled: tuple[str, ...]
    notes: tuple[str, ...]
    learning_rate: float | str


def load_arms(paths: Sequence[str], levels: Sequence[str] | None = None) -> list[Arm]:
    """Read one arm from each config file; the first is the plain arm that others are held against.

    A file is a boostax config; its section ``compare`` holds the arm's name, level and learning
    rate. The name defaults to the file's.

    Args:
      paths: JSON files.
      levels: one for all files, or one each, instead of the files' own; default None.

    Raises:
      UsageError: names or levels do not fit.
      ConfigError: a file can't be read, or its config has faults.
    """
    from boostax.config import load_config
    from boostax.rules import LEVELS

    if levels is not None and len(levels) not in (1, len(paths)):
        raise UsageError(
            f"--levels: got {len(levels)} levels for {len(paths)} configs; give one for all, or one "
            "for each"
        )
    arms = []
    for number, text in enumerate(paths):
        config = load_config(pathlib.Path(text))
        own = config.compare
        level = own.level or "O0"
        if levels is not None:
            level = levels[number if len(levels) > 1 else 0]
        if level not in LEVELS:
            raise UsageError(f"--levels: got {level!r}; allowed: {', '.join(LEVELS)}")
        plain = config.to_dict(defaults=False)
        plain.pop("compare", None)
        arms.append(
            Arm(
                own.name or pathlib.Path(text).stem,
                plain,
                level,
                own.learning_rate,
                dim_reduce_after=own.dim_reduce_after,
                dim_reduce_batches=own.dim_reduce_batches,
                task=own.task,
            )
        )
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--configs: two arms are called {name!r}; give one a name of its own in its file: "
                '{"compare": {"name": "..."}}'
            )
    return arms


def build_arm(
    arm: Arm,
    task: Task,
    *,
    steps: int,
    rate: float,
    model: Any,
    model_state: Any,
    batch: Any,
    mesh: Any = None,
) -> BuiltArm:
    """Build an arm's train step for a budget.

    The task's optimizer is made for the number of updates that the arm has: with a window of K
    batches an arm has ``steps // K`` updates, and its schedules end there. The same goes for the
    freeze schedule, unless the config gives its own ``total_steps``.

    Args:
      arm: the arm.
      task: the task.
      steps: int >= 1, calls of the step.
      rate: the learning rate; it is part of the state, so another rate compiles nothing anew.
      model: the parameters or the nnx model, as ``task.init`` made them.
      model_state: linen collections, or None.
      batch: one batch, for the order of the layers.
      mesh: the devices that share each batch. Default None: one device.

    Raises:
      UsageError: the config does not fit this model, budget or optimizer.
    """
    from boostax.auto import AutoBoost
    from boostax.gradients.forward_order import forward_order

    try:
        boost = AutoBoost(arm.level, copy.deepcopy(dict(arm.config)))
    except ValueError as error:
        raise UsageError(f"arm {arm.name!r}: {error}") from error
    named = boost.config.optimizer
    if named is not None and arm.learning_rate is not None:
        raise UsageError(
            f"arm {arm.name!r}: compare.learning_rate = {arm.learning_rate:g} would do nothing, "
            "because its config names the optimizer; give the rate in the section optimizer, or leave "
            "one of them out"
        )
    updates, left = count_updates(boost, steps)
    notes = list(boost.notes)
    if updates == 0:
        raise UsageError(
            f"arm {arm.name!r}: its window is longer than the budget of {steps} steps, so that it "
            "would never update; give a smaller grad_accumulation.every, or more --steps"
        )
    if left:
        every = boost.config.every
        window = "a window" if callable(every) else f"a window of {every}"
        notes.append(f"the last {left} batches do not fill {window}")
    config = copy.deepcopy(dict(arm.config))
    if "grad_freeze" in boost.enabled:
        section = config.setdefault("grad_freeze", {})
        given = section.setdefault("total_steps", updates)
        if given != updates:
            notes.append(
                f"its freeze schedule ends after {given} updates, its budget after {updates}"
            )
        boost = AutoBoost(arm.level, copy.deepcopy(config))
    learning_rate: float | str = rate
    base = None
    if named is None and "thor" in boost.enabled and boost.config.thor.kl:
        config.setdefault("thor", {}).setdefault("learning_rate", rate)
        boost = AutoBoost(arm.level, copy.deepcopy(config))
    if named is None:
        base = injected(task, rate, updates)
    else:
        learning_rate = rate_of(named)
        notes.append(
            "its config names the optimizer, so the task's optimizer and learning rate are not used"
        )
        notes += [
            f"its schedule {name} has {key} = {given}, its budget {updates} updates"
            for name, key, given in horizons(named)
            if given != updates
        ]
    order = None
    if "grad_freeze" in boost.enabled and boost.config.grad_freeze.patterns is None:
        # Outside the try below: a fault in the user's own loss keeps its traceback.
        order = forward_order(task.loss, model, batch, model_state=model_state)
    try:
        if arm.adapts and order is not None:
            boost, config, told = fewer_groups(arm, boost, config, model, order)
            notes += told
        layers = None
        if "thor" in boost.enabled:
            layers, boost, config, told = captured(
                arm, boost, config, task, model, model_state, batch
            )
            notes += told
        tx = boost.optimizer(base, model, order=order, layers=layers)
        notes += [n for n in boost.describe(tx=tx).resolution.notes if n not in notes]
        own = bool(_info.exchanged_axes(tx)) and boost.config.adasum.axis_name is None
        step = boost.train_step(task.loss, tx, has_aux=task.has_aux, mesh=None if own else mesh)
        notes += device_notes(boost, tx, step, batch, alone=mesh is None)
        enabled = tuple(name for name in boost.enabled if name != "less_bn")
        if "less_bn" in boost.enabled:
            notes.append(
                "less_bn is left out: a task's loss has its model inside; rewrite that in the task, "
                "with boostax.less_bn"
            )
        if arm.dim_reduce_after is not None:
            try:
                step, updates, told = subspace_step(
                    arm, boost, task, step, steps, alone=mesh is None
                )
                enabled = (*enabled, "dim_reduce")
            except ValueError as error:
                if not arm.adapts:
                    raise
                told = [f"dim_reduce is left out: {error}"]
            notes = [note for note in notes if not note.startswith("section dim_reduce")] + told
    except ValueError as error:
        hint = "\nGive arms of your own with --configs." if arm.adapts else ""
        raise UsageError(f"arm {arm.name!r}: {error}{hint}") from error
    return BuiltArm(step, updates, config, enabled, tuple(notes), learning_rate)
