"""Tasks: what a person writes so that their own model can be compared, and the target."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import numbers
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from boostax.errors import ConfigError, did_you_mean

__all__ = ["Target", "Task", "UsageError", "as_task", "load_task", "own_tasks", "parse_target"]


class UsageError(ConfigError):
    """Wrong input of a comparison; the command prints the message alone and exits with 2."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss, its data and how to judge it: all that a comparison needs.

    Any object with these attributes will do (a class instance with methods, say); this class is
    the short way to make one. All arms of a comparison get the same start and the same batches
    at the same seed, but for arms that name another task of the file (``compare.task``).

    Attributes:
      init: ``init(key) -> params``, ``-> (params, model_state)`` or ``-> nnx.Module``, from a
        ``jax.random`` key. ``model_state`` is a dict of linen collections such as batch_stats.
      loss: the loss, as for ``boostax.train_step``: ``loss(params, batch)`` (for nnx
        ``loss(model, batch)``) with the optional keywords ``model_state`` and ``rng``.
      batches: ``batches(seed) -> iterable`` of batches, at least as many as there are steps.
      evaluate: ``evaluate(params, model_state) -> {name: float}`` on held-out data; for nnx
        ``evaluate(model)``. It is not timed; put ``jax.jit`` on it so that it is quick.
      optimizer: ``optimizer(learning_rate, steps) -> optax transformation``. ``learning_rate``
        is a traced number; ``steps`` (an int) is the arm's number of updates, where a schedule
        has to end.
      learning_rate: the default learning rate, > 0.
      steps: the default number of training steps (batches), >= 1.
      target: the default target, such as ``"accuracy=0.95"``.
      has_aux: whether the loss returns ``(loss, boostax.LossAux(...))``. Default False.
      name: the title of the report. Default: the file and name it was loaded from.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> x = jnp.ones((4, 3))
      >>> task = Task(
      ...     init=lambda key: jax.random.normal(key, (3,)),
      ...     loss=lambda w, batch: jnp.mean((batch @ w) ** 2),
      ...     batches=lambda seed: iter([x] * 100),
      ...     evaluate=lambda w, model_state: {"loss": jnp.mean((x @ w) ** 2)},
      ...     optimizer=lambda learning_rate, steps: optax.sgd(learning_rate),
      ...     learning_rate=0.1, steps=100, target="loss<=0.001")
      >>> task.steps
      100
    """

    init: Callable[[Any], Any]
    loss: Callable[..., Any]
    batches: Callable[[int], Iterable[Any]]
    evaluate: Callable[..., Mapping[str, Any]]
    optimizer: Callable[[Any, int], optax.GradientTransformation]
    learning_rate: float
    steps: int
    target: str
    has_aux: bool = False
    name: str = ""


_FUNCTIONS = {"init": 1, "loss": 2, "batches": 1, "evaluate": 1, "optimizer": 2}
_OPTIONAL = {"has_aux": False, "name": ""}


def as_task(thing: Any, origin: str) -> Task:
    """Check that ``thing`` follows the protocol and return it as a :class:`Task`.

    Args:
      thing: an object with the attributes of :class:`Task`, or a class or function without
        required arguments that makes one.
      origin: where it comes from, for messages and as the default name.

    Raises:
      UsageError: every missing or unfit attribute, in one message.
    """
    if inspect.isclass(thing) or inspect.isfunction(thing):
        needed = [
            p.name
            for p in inspect.signature(thing).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise UsageError(
                f"{origin} needs the arguments {', '.join(needed)}; a task is an object with "
                f"{', '.join(_FUNCTIONS)}, or a function without required arguments that makes one"
            )
        thing = thing()
    faults = []
    for name, count in _FUNCTIONS.items():
        value = getattr(thing, name, None)
        if value is None:
            faults.append(f"{name} is missing")
        elif not callable(value):
            faults.append(f"{name} must be a function, got {type(value).__name__}")
        elif (signature := _signature(value)) and not _takes(signature, count):
            faults.append(f"{name} must take {count} positional argument(s), got {signature}")
    rate: Any = getattr(thing, "learning_rate", None)
    if not _is_number(rate) or not 0 < float(rate) < math.inf:
        faults.append(f"learning_rate must be a number > 0, got {rate!r}")
    steps: Any = getattr(thing, "steps", None)
    # Numpy's ints are Integral too; 20.0 would only fail later, as a count.
    if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or int(steps) < 1:
        faults.append(f"steps must be an int >= 1, got {steps!r}")
    target = getattr(thing, "target", None)
    try:
        parse_target(target)
    except UsageError as error:
        faults.append(str(error))
    if faults:
        known = [n for n in dir(thing) if not n.startswith("_")]
        hints = [did_you_mean(n, known) for n in _FUNCTIONS if getattr(thing, n, None) is None]
        raise UsageError(
            f"{origin} ({type(thing).__name__}) is not a task: {'; '.join(faults)}."
            f"{''.join(hints)} See boostax.compare.Task for the protocol."
        )
    values = {
        f.name: getattr(thing, f.name, _OPTIONAL.get(f.name)) for f in dataclasses.fields(Task)
    }
    return Task(**{**values, "name": values["name"] or origin, "steps": int(steps)})


def load_task(spec: str) -> tuple[Task, pathlib.Path]:
    """Load a task from ``"path/to/file.py:name"`` (the name defaults to ``task``).

    The file's own folder is importable while it runs, as for ``python file.py``. What goes wrong
    inside the file's own code is not wrong input and keeps its traceback.

    Returns:
      The task and the file.

    Raises:
      UsageError: no such file, no such attribute, or not a task.
    """
    name_match = re.search(r":([A-Za-z_]\w*)$", spec)
    name = name_match.group(1) if name_match else "task"
    path = pathlib.Path(spec[: name_match.start()] if name_match else spec)
    if not path.is_file():
        raise UsageError(f"TASK: there is no file {str(path)!r}; give path/to/file.py:name")
    if path.suffix != ".py":
        raise UsageError(f"TASK: {str(path)!r} is not a Python file; give path/to/file.py:name")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A name of its own, so that a file called random.py or jax.py hides no other module.
    module_name = _module_name(path)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Registered before it runs, because dataclasses and pickling look their module up by name.
    sys.modules[module_name] = module
    module_spec.loader.exec_module(module)
    return _named_task(module, path, name, "TASK"), path


def own_tasks(names: Iterable[str | None], path: pathlib.Path | None) -> dict[str, Task]:
    """Return the tasks that arms name with ``compare.task``, from a file that was loaded already.

    Raises:
      UsageError: there is no file, no such attribute, or not a task.
    """
    wanted = dict.fromkeys(name for name in names if name is not None)
    if wanted and path is None:
        raise UsageError(
            f"compare.task: {next(iter(wanted))!r} is looked for in the TASK's file; give a TASK"
        )
    # As it was loaded, not run again: what its tasks share is made once.
    return {
        name: _named_task(sys.modules[_module_name(path)], path, name, "compare.task")
        for name in wanted
        if path is not None
    }


def _module_name(path: pathlib.Path) -> str:
    return f"_boostax_task_{path.stem}"


def _named_task(module: Any, path: pathlib.Path, name: str, argument: str) -> Task:
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UsageError(
            f"{argument}: {path} has no attribute {name!r}.{did_you_mean(name, public)} It defines: "
            f"{', '.join(sorted(public)) or 'nothing'}"
        )
    return as_task(getattr(module, name), f"{path.name}:{name}")


@dataclasses.dataclass(frozen=True)
class Target:
    """A metric and the value at which a run counts as having got there.

    Attributes:
      metric: the name, as ``evaluate`` returns it.
      value: the threshold.
      lower_is_better: whether a metric at or below the value meets it. Default False.
    """

    metric: str
    value: float
    lower_is_better: bool = False

    def met(self, value: float) -> bool:
        """Say whether a metric's value meets the target; NaN never does."""
        return value <= self.value if self.lower_is_better else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.lower_is_better else '>='} {self.value:g}"


_LOWER = re.compile(r"(^|[_\W])(loss|error|err|perplexity|ppl|nll|mse|mae|rmse)($|[_\W])", re.I)


def parse_target(text: Any) -> Target:
    """Read ``"accuracy=0.95"``, ``"accuracy>=0.95"`` or ``"loss<=0.1"``.

    With a bare ``=`` lower is better for names with the word loss, error, err, perplexity, ppl,
    nll, mse, mae or rmse in them, and higher for all others.

    Raises:
      UsageError: the text has another form or the value is not a finite number.

    Example:
      >>> str(parse_target("accuracy=0.95")), str(parse_target("val_loss=0.1"))
      ('accuracy >= 0.95', 'val_loss <= 0.1')
    """
    match = re.fullmatch(r"\s*([^<>=\s][^<>=]*?)\s*(>=|<=|=)\s*(\S+)\s*", str(text))
    try:
        value = float(match.group(3)) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise UsageError(
            f"target must be METRIC=NUMBER, METRIC>=NUMBER or METRIC<=NUMBER, such as "
            f"accuracy=0.95, got {text!r}"
        )
    metric, sign = match.group(1), match.group(2)
    lower = sign == "<=" or (sign == "=" and _LOWER.search(metric) is not None)
    return Target(metric, value, lower)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins and some jitted callables do not tell
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    positional = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) >= count or any(
        p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()
    )
