"""Fit an arm to a task: its groups, layers, optimizer and windows, with notes for the reader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import optax

from boostax import _info
from boostax._config_types import Pairs
from boostax.compare.task import Task, UsageError

if TYPE_CHECKING:
    from boostax.compare.arms import Arm

__all__ = [
    "captured",
    "count_updates",
    "device_notes",
    "fewer_groups",
    "horizons",
    "injected",
    "rate_of",
]


def fewer_groups(
    arm: Arm, boost: Any, config: dict[str, Any], model: Any, order: Sequence[str]
) -> tuple[Any, dict[str, Any], list[str]]:
    """Lower the number of groups to the number of layers; return the boost, config and notes."""
    from flax import nnx

    from boostax.auto import AutoBoost
    from boostax.updates.parameter_groups import parameter_groups

    params = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    asked = boost.config.grad_freeze.param_groups
    # One group always fits; where even that fails, the message is about something else.
    for groups in range(asked, 1, -1):
        try:
            parameter_groups(params, groups, order=order, by=boost.config.grad_freeze.by)
        except ValueError:
            continue
        break
    else:
        groups = 1
    if groups == asked:
        return boost, config, []
    config = {**config, "grad_freeze": {**config["grad_freeze"], "param_groups": groups}}
    told = [f"{asked} groups of layers were asked for, and the model has layers for {groups}"]
    if groups == 1:
        told.append("with one group nothing is ever frozen")
    return AutoBoost(arm.level, copy.deepcopy(config)), config, told


def captured(
    arm: Arm,
    boost: Any,
    config: dict[str, Any],
    task: Task,
    model: Any,
    model_state: Any,
    batch: Any,
) -> tuple[Any, Any, dict[str, Any], list[str]]:
    """Capture the layers of the task's loss; return them, the boost, the config and notes."""
    from boostax.auto import AutoBoost
    from boostax.gradients.capture import capture_layers

    section = boost.config.thor
    try:
        layers = capture_layers(
            task.loss,
            model,
            batch,
            model_state=model_state,
            has_aux=task.has_aux,
            block_size=section.block_size,
            fisher=section.fisher,
            mode=section.mode,
            exclude=section.exclude,
        )
    except ValueError as error:
        if not arm.adapts:
            raise
        config = {**config, "boost": {**config["boost"], "thor": False}}
        boost = AutoBoost(arm.level, copy.deepcopy(config))
        return None, boost, config, [f"thor is left out: {error}"]
    return layers, boost, config, []


def device_notes(boost: Any, tx: Any, step: Any, batch: Any, *, alone: bool) -> list[str]:
    """Say over which devices an arm with an exchange is trained.

    Raises:
      ValueError: there is one process (``alone``), and its devices can't share a batch.
    """
    from boostax.training._placement import filled_batch

    replicas = step.settings.replicas
    if replicas is None or not _info.exchanged_axes(tx):
        return []
    told = list(boost.describe(tx=tx).notes)
    if alone:
        filled_batch(batch, replicas, step.settings.example_weights, step.settings.microbatch)
    if alone and replicas.size > 1:
        told.append(
            f"its batch is split over {replicas.size} devices, and its FLOPs and memory are those of "
            "one; an arm without adasum runs on one device"
        )
    return told


def rate_of(named: Any) -> float | str:
    """Return the learning rate of an optimizer that a config names, or what tells it in words."""
    given = named.get("learning_rate")
    if isinstance(given, (int, float)):
        return float(given)
    name = getattr(given, "name", None)
    return f"by its config ({name})" if name else "by its config"


# Arguments of optax's schedules that say where they end. exponential_decay has one too, but goes on.
_ENDS = ("decay_steps", "transition_steps")
_ENDLESS = ("exponential_decay", "warmup_exponential_decay_schedule")


def horizons(value: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the name, the argument and the length of every schedule in a config's optimizer."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from horizons(part)
    elif isinstance(value, Pairs):  # a group of the optimizer
        for _, given in value.pairs:
            yield from horizons(given)
    elif hasattr(value, "arguments"):
        for key, given in value.arguments:
            if value.kind == "schedule" and key in _ENDS and value.name not in _ENDLESS:
                yield value.name, key, given
            yield from horizons(given)


def injected(task: Task, rate: float, updates: int) -> optax.GradientTransformationExtraArgs:
    """Return the task's optimizer with its learning rate as a part of the state."""
    optimizer = task.optimizer(rate, updates)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UsageError(
            f"{task.name}: optimizer(learning_rate, steps) must return an optax transformation, got "
            f"{type(optimizer).__name__}"
        )

    def make(learning_rate: Any) -> Any:
        return task.optimizer(learning_rate, updates)

    # The factory hides what it makes, and what may stand around it depends on its parts (a line
    # search, L-BFGS).
    return _info.with_info(
        optax.inject_hyperparams(make)(learning_rate=rate),
        _info.TransformInfo("inject_hyperparams", inner=optimizer),
    )


def count_updates(boost: Any, steps: int) -> tuple[int, int]:
    """Return how many updates ``steps`` calls make, and how many calls are left after the last."""
    if "grad_accumulation" not in boost.enabled or not boost.config.has_window:
        return steps, 0
    every = boost.config.every
    if not callable(every):
        return divmod(steps, int(every))
    length: Callable[[int], Any] = every
    updates, start = 0, 0
    for number in range(1, steps + 1):
        if number - start >= int(length(updates)):
            updates, start = updates + 1, number
    return updates, steps - start
