"""Going on with a run from PyTorch: an optimizer's ``state_dict()`` becomes optimizer and state here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._tree import leaf_paths, natural_key
from boostax.errors import did_you_mean
from boostax.updates._thor_checks import whole_number
from boostax.updates._torch_files import read_state
from boostax.updates._torch_layout import Layout, read_layout
from boostax.updates._torch_settings import CLASSES, class_of, settings_of
from boostax.updates.optimizer import optimizer

__all__ = ["from_torch_state"]

_CALLER = "from_torch_state"


def from_torch_state(
    state: Mapping[str, Any] | str | os.PathLike[str],
    params: Any,
    *,
    order: Sequence[str],
    name: str | None = None,
    layout: str | Mapping[Any, Sequence[int]] = "torch",
    learning_rate: Any = None,
    updates: int | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, Any]:
    """Return the optimizer and the state that go on where a PyTorch optimizer stopped.

    ``SGD``, ``Adagrad``, ``Adadelta``, ``RMSprop``, ``Adam`` and ``AdamW`` are read. The next updates
    are PyTorch's: settings, buffers, averages and step counts are taken over, parameter groups become
    groups. The parameters themselves are yours to bring.

    Args:
      state: what ``torch.optim.Optimizer.state_dict()`` returned, with its tensors as numpy arrays; or
        the path of an .npz file with the entries ``state/INDEX/KEY`` and, as JSON text,
        ``param_groups``. Nothing is unpickled. ``docs/techniques/optimizers.md`` has the lines that
        write one.
      params: the parameters here, arrays or ``ShapeDtypeStruct`` leaves.
      order: the path of the leaf that each of PyTorch's parameters became, by their numbers in the
        ``state_dict``, which is the order in which the optimizer was given them.
      name: ``"sgd"``, ``"adagrad"``, ``"adadelta"``, ``"rmsprop"``, ``"adam"`` or ``"adamw"``. Default
        None: it is told by the groups' settings, where those tell.
      layout: how PyTorch's axes become those here. ``"torch"``: leaves named ``kernel`` are turned, a
        linear weight (out, in) to (in, out), a convolution's (out, in, *window) to (*window, in, out);
        all others are taken as they are. ``"same"``: all are. A mapping from path patterns to the
        order of PyTorch's axes here, ``{"*/kernel": (1, 0)}``; what none fits is taken as it is.
      learning_rate: a number or a schedule of the update count, for all groups. Default None: each
        group's ``lr``, as the scheduler left it.
      updates: how many updates were made; needed for a schedule with SGD, which does not count them,
        and not taken otherwise. Default None: PyTorch's own step count.

    Returns:
      ``(tx, opt_state)``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an optimizer or a setting that is not read, leaves that are missing, left over or of
        another shape, parameters of one group with different step counts.

    Example:
      >>> import numpy as np, jax.numpy as jnp
      >>> there = {
      ...     "state": {0: {"momentum_buffer": np.array([[1.0], [2.0]])}},  # a Linear(1, 2)'s weight
      ...     "param_groups": [{"lr": 0.1, "momentum": 0.5, "dampening": 0, "params": [0]}],
      ... }
      >>> params = {"kernel": jnp.zeros((1, 2))}
      >>> tx, opt_state = from_torch_state(there, params, order=["kernel"])
      >>> step, _ = tx.update({"kernel": jnp.ones((1, 2))}, opt_state, params)
      >>> (-100 * step["kernel"]).round().tolist()  # 100 * 0.1 * (0.5 * [1, 2] + 1)
      [[15.0, 20.0]]

    Source:
      PyTorch's ``torch.optim``.

    When not to use:
      At a new start: ``boostax.optimizer`` has the same settings. The random state of data and
      dropout is not carried over, so that a run goes on alike and not bit for bit.
    """
    entries, torch_groups = read_state(_CALLER, state)
    name = class_of(_CALLER, name, torch_groups)
    turned = read_layout(_CALLER, layout)
    _check_updates(name, learning_rate, updates)
    paths = leaf_paths(params)
    leaves = dict(zip(paths, jax.tree.leaves(params), strict=True))
    numbers = _numbers(torch_groups, order, paths)
    settings = [
        settings_of(_CALLER, name, number, group, learning_rate)
        for number, group in enumerate(torch_groups)
    ]
    base, *others = settings
    groups = [
        {"params": [_exactly(order[i]) for i in numbers[k]], **own}
        for k, own in enumerate(others, 1)
    ]
    tx = optimizer(name, groups=groups, **base)
    counts, values = [], []
    for number, members in enumerate(numbers):
        dampened = bool(settings[number].get("dampening"))
        count, trees = _read_group(
            name, number, members, entries, order, leaves, turned, updates, dampened
        )
        counts.append(count)
        values.append(trees)
    return tx, _filled(tx.init(params), params, values, counts)


def _check_updates(name: str, learning_rate: Any, updates: Any) -> None:
    if updates is None:
        if name == "sgd" and callable(learning_rate):
            raise ValueError(
                f"{_CALLER}: SGD's state does not count its steps; say with updates= how many were "
                "made, so that the schedule goes on from there"
            )
    elif name != "sgd":
        raise ValueError(f"{_CALLER}: updates is for sgd; {name}'s state counts its steps itself")
    elif not whole_number(updates) or updates < 1:
        raise ValueError(f"{_CALLER}: updates must be an int of at least 1, got {updates!r}")


def _exactly(path: str) -> Any:
    return lambda other: other == path


def _numbers(
    torch_groups: Sequence[Mapping[str, Any]], order: Any, paths: Sequence[str]
) -> list[list[int]]:
    """Return the numbers of each group's parameters, after checking ``order`` against the leaves."""
    if isinstance(order, str) or not all(isinstance(path, str) for path in order):
        raise TypeError(
            f"{_CALLER}: order must be a sequence of leaf paths, PyTorch's parameter by parameter, got "
            f"{order!r}"
        )
    numbers = [[int(i) for i in group["params"]] for group in torch_groups]
    flat = [i for members in numbers for i in members]
    if sorted(flat) != list(range(len(order))):
        raise ValueError(
            f"{_CALLER}: order has {len(order)} paths, but PyTorch's groups have {len(flat)} "
            "parameters; give one path for each"
        )
    for path in order:
        if path not in paths:
            raise ValueError(
                f"{_CALLER}: order has {path!r}, which is no leaf.{did_you_mean(path, paths)} Leaves: "
                f"{', '.join(sorted(paths, key=natural_key))}"
            )
    left = sorted(set(paths) - set(order), key=natural_key)
    if left or len(set(order)) < len(order):
        problem = f"leaves out {', '.join(left)}" if left else "names a leaf twice"
        raise ValueError(f"{_CALLER}: order {problem}; give each leaf's path once")
    return numbers


def _read_group(
    name: str,
    number: int,
    members: Sequence[int],
    entries: Mapping[int, Mapping[str, Any]],
    order: Sequence[str],
    leaves: Mapping[str, Any],
    turned: Layout,
    updates: int | None,
    dampened: bool,
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return a group's update count, and per field of the state its values by path."""
    fields = CLASSES[name].fields
    steps: set[int] = set()
    trees: dict[str, dict[str, Any]] = {}
    for index in members:
        entry = entries.get(index) or {}
        unknown = set(entry) - {"step", *fields}
        if unknown:
            raise ValueError(
                f"{_CALLER}: state[{index}] has {', '.join(sorted(map(repr, unknown)))}, which "
                f"{name} does not keep; say with name= which optimizer it is. Known: step, "
                f"{', '.join(fields)}"
            )
        # SGD's buffers are None before the first step.
        held = {key: value for key, value in entry.items() if value is not None and key != "step"}
        if "step" in entry:
            steps.add(int(np.asarray(entry["step"]).item()))
        elif name != "sgd":
            steps.add(0)
        for key, value in held.items():
            path = order[index]
            array = turned(_CALLER, path, np.asarray(value), tuple(leaves[path].shape))
            trees.setdefault(fields[key], {})[path] = array
    lacking = [order[i] for i in members if "trace" in trees and order[i] not in trees["trace"]]
    if name == "sgd" and lacking and dampened:
        raise ValueError(
            f"{_CALLER}: {', '.join(lacking)} has no momentum_buffer yet, others of group {number} "
            "have; with dampening they count their first step apart. Put them into a group of their own"
        )
    if len(steps) > 1:
        raise ValueError(
            f"{_CALLER}: the parameters of group {number} have made {min(steps)} to {max(steps)} steps "
            "there; here one group counts once. Put those with other counts into a group of their own"
        )
    made = steps.pop() if steps else int(bool(trees))
    return (made if updates is None else int(updates)), trees


def _filled(
    state: Any, params: Any, values: Sequence[Mapping[str, Any]], counts: Sequence[int]
) -> Any:
    """Put the values and counts into a fresh state, group by group."""
    if isinstance(state, optax.PartitionState):
        labels = ["rest", *(f"group {k}" for k in range(len(values) - 1))]
        parts = {
            label: _filled_one(state.inner_states[label], params, tree, count)
            for label, tree, count in zip(labels, values, counts, strict=True)
        }
        return state._replace(inner_states=parts)
    return _filled_one(state, params, values[0], counts[0])


def _filled_one(state: Any, params: Any, trees: Mapping[str, Any], count: int) -> Any:
    structure, paths = jax.tree.structure(params), leaf_paths(params)

    def replaced(field: str, old: Any) -> Any:
        if field == "count":
            return jnp.asarray(count, old.dtype)
        if field not in trees:
            return old
        fresh = structure.flatten_up_to(old)
        filled = [
            _placed(trees[field][path], leaf) if path in trees[field] else leaf
            for path, leaf in zip(paths, fresh, strict=True)
        ]
        return structure.unflatten(filled)

    unplaced = set(trees)

    def visit(part: Any) -> Any:
        if _is_named_tuple(part):
            unplaced.difference_update(part._fields)
            new = {
                field: replaced(field, old) if field == "count" or field in trees else visit(old)
                for field, old in zip(part._fields, part, strict=True)
            }
            return part._replace(**new)
        return tuple(visit(inner) for inner in part) if type(part) is tuple else part

    filled = visit(state)
    if unplaced:
        raise ValueError(
            f"{_CALLER}: the state has buffers that its settings have no use for (they belong to "
            f"{', '.join(sorted(unplaced))} here); check name and the groups' settings"
        )
    return filled


def _is_named_tuple(part: Any) -> Any:
    return isinstance(part, tuple) and hasattr(part, "_fields")


def _placed(value: Any, like: Any) -> jax.Array:
    return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)
