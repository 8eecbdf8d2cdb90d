"""Arms of a comparison: a config, a level and a learning rate, built into a train step."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from boostax.compare.task import Task, UsageError

__all__ = ["Arm", "BuiltArm", "build_arm", "load_arms"]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
      name: unique among the arms; the column in the report.
      config: a boostax config as a dict; ``{}`` for the plain arm.
      level: ``"O0"``, ``"O1"`` or ``"O2"``. Default ``"O0"``.
      learning_rate: > 0, or None for the comparison's rate.
    """

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    level: str = "O0"
    learning_rate: float | None = None


@dataclasses.dataclass(frozen=True)
class BuiltArm:
    """An arm's train step and what came of its config.

    Attributes:
      step: the :class:`boostax.training.step.TrainStep`, for all seeds.
      updates: optimizer updates in the budget; where the schedules end.
      config: the config as used.
      enabled: the names of the techniques that are on.
      notes: what the reader should know.
    """

    step: Any
    updates: int
    config: Mapping[str, Any]
    enabled: tuple[str, ...]
    notes: tuple[str, ...]


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
        arms.append(Arm(own.name or pathlib.Path(text).stem, plain, level, own.learning_rate))
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--configs: two arms are called {name!r}; give one a name of its own in its file: "
                '{"compare": {"name": "..."}}'
            )
    return arms


def build_arm(
    arm: Arm, task: Task, *, steps: int, rate: float, model: Any, model_state: Any, batch: Any
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

    Raises:
      UsageError: the config does not fit this model or budget.
    """
    from boostax.auto import AutoBoost
    from boostax.gradients.forward_order import forward_order

    try:
        boost = AutoBoost(arm.level, copy.deepcopy(dict(arm.config)))
    except ValueError as error:
        raise UsageError(f"arm {arm.name!r}: {error}") from error
    every = _window(boost)
    updates = max(1, steps // every)
    notes = list(boost.notes)
    if steps % every:
        notes.append(f"the last {steps % every} batches do not fill a window of {every}")
    config = copy.deepcopy(dict(arm.config))
    if "grad_freeze" in boost.enabled:
        section = config.setdefault("grad_freeze", {})
        given = section.setdefault("total_steps", updates)
        if given != updates:
            notes.append(
                f"its freeze schedule ends after {given} updates, its budget after {updates}"
            )
        boost = AutoBoost(arm.level, copy.deepcopy(config))
    if boost.config.optimizer is None:
        base = _injected(task, rate, updates)
    else:
        base = None
        notes.append(
            "its config names the optimizer, so the task's optimizer and learning rate are not used"
        )
    order = None
    if "grad_freeze" in boost.enabled and boost.config.grad_freeze.patterns is None:
        # Outside the try below: a fault in the user's own loss keeps its traceback.
        order = forward_order(task.loss, model, batch, model_state=model_state)
    try:
        tx = boost.optimizer(base, model, order=order)
        step = boost.train_step(task.loss, tx, has_aux=task.has_aux)
    except ValueError as error:
        raise UsageError(f"arm {arm.name!r}: {error}") from error
    return BuiltArm(step, updates, config, tuple(boost.enabled), tuple(notes))


def _injected(task: Task, rate: float, updates: int) -> optax.GradientTransformationExtraArgs:
    """Return the task's optimizer with its learning rate as a part of the state."""
    optimizer = task.optimizer(rate, updates)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UsageError(
            f"{task.name}: optimizer(learning_rate, steps) must return an optax transformation, got "
            f"{type(optimizer).__name__}"
        )

    def make(learning_rate: Any) -> Any:
        return task.optimizer(learning_rate, updates)

    return optax.inject_hyperparams(make)(learning_rate=rate)


def _window(boost: Any) -> int:
    """Return how many calls one update takes."""
    if "grad_accumulation" not in boost.enabled or not boost.config.has_window:
        return 1
    every = boost.config.every
    return 1 if callable(every) else int(every)
