"""Going on with a run from PyTorch: an optimizer's ``state_dict()`` becomes optimizer and state here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._tree import leaf_paths, natural_key
from boostax.errors import did_you_mean
from boostax.updates._thor_checks import whole_number
from boostax.updates._torch_entries import Part, counts_matter, parts_of
from boostax.updates._torch_files import read_state
from boostax.updates._torch_layout import read_layout
from boostax.updates._torch_settings import classes_of, settings_of
from boostax.updates.optimizer import optimizer

__all__ = ["from_torch_state"]

_CALLER = "from_torch_state"


def from_torch_state(
    state: Mapping[str, Any] | str | os.PathLike[str],
    params: Any,
    *,
    order: Iterable[str],
    name: str | None = None,
    layout: str | Mapping[Any, Sequence[int]] = "torch",
    learning_rate: Any = None,
    updates: int | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, Any]:
    """Return the optimizer and the state that go on where a PyTorch optimizer stopped.

    ``SGD``, ``Adagrad``, ``Adadelta``, ``RMSprop``, ``Adam`` and ``AdamW`` are read. The next updates
    are PyTorch's: settings, buffers, averages and step counts are taken over, parameter groups become
    groups. Parameters of one group with different step counts (some were frozen for a while) become
    groups of their own. Leaves that PyTorch's optimizer was not given stay as they are. The parameters
    themselves are yours to bring.

    Args:
      state: what ``torch.optim.Optimizer.state_dict()`` returned, with its tensors as numpy arrays; or
        the path of an .npz file with the entries ``state/INDEX/KEY`` and, as JSON text,
        ``param_groups``. Nothing is unpickled. ``docs/techniques/optimizers.md`` has the lines that
        write one.
      params: the parameters here, arrays or ``ShapeDtypeStruct`` leaves.
      order: the path of the leaf that each of PyTorch's parameters became, by their numbers in the
        ``state_dict``, which is the order in which the optimizer was given them; any iterable of text
        that has an order.
      name: ``"sgd"``, ``"adagrad"``, ``"adadelta"``, ``"rmsprop"``, ``"adam"`` or ``"adamw"``. Default
        None: it is told by the groups' settings, where those tell; Adam with
        ``decoupled_weight_decay`` is AdamW, group by group.
      layout: how PyTorch's axes become those here. ``"torch"``: leaves named ``kernel`` are turned, a
        linear weight (out, in) to (in, out), a convolution's (out, in, *window) to (*window, in, out);
        all others are taken as they are. ``"same"``: all are. A mapping from path patterns to the
        order of PyTorch's axes here, ``{"*/kernel": (1, 0)}``; what none fits is taken as it is.
      learning_rate: a number or a schedule of the update count, for all groups. Default None: each
        group's ``lr``, as the scheduler left it. A schedule goes on at the largest step count.
      updates: how many updates were made; needed for a schedule with SGD, which does not count them,
        and not taken otherwise. Default None: PyTorch's own step count.

    Returns:
      ``(tx, opt_state)``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an optimizer or a setting that is not read, a ``name`` that the settings contradict,
        an entry that is incomplete or of no group, a path that is no leaf, a buffer of another shape.

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
    names = classes_of(_CALLER, name, torch_groups)
    turned = read_layout(_CALLER, layout)
    _check_updates(names[0], learning_rate, updates)
    paths = leaf_paths(params)
    leaves = jax.tree.leaves(params)
    shapes = {path: tuple(leaf.shape) for path, leaf in zip(paths, leaves, strict=True)}
    order = _read_order(order, paths)
    numbers = _numbers(torch_groups, entries, order)
    parts: list[Part] = []
    for number, (own, group, members) in enumerate(zip(names, torch_groups, numbers, strict=True)):
        if members:
            settings = settings_of(_CALLER, own, number, group, learning_rate)
            parts += parts_of(_CALLER, own, settings, members, entries, order, shapes, turned)
    made = max(part.count for part in parts) if updates is None else int(updates)
    if callable(learning_rate):
        _check_schedule(parts, made)
    first, *others = parts
    groups: list[dict[str, Any]] = [_group(part, first.name) for part in others]
    left = frozenset(paths) - frozenset(order)
    if left:  # PyTorch's optimizer was not given these, so that they stay as they are.
        groups.append({"params": left.__contains__, "optimizer": optax.set_to_zero()})
    tx = optimizer(first.name, groups=groups, **first.settings)
    return tx, _filled(tx.init(params), params, parts, made)


def _group(part: Part, base: str) -> dict[str, Any]:
    inside = {"params": frozenset(part.paths).__contains__}
    if part.name == base:
        return {**inside, **part.settings}
    return {**inside, "optimizer": {"name": part.name, **part.settings}}


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


def _check_schedule(parts: Sequence[Part], made: int) -> None:
    """Refuse a schedule where its count is also one that differs from parameter to parameter."""
    for part in parts:
        # Adam's averages have a count of their own.
        shared = part.name in ("sgd", "adagrad") and counts_matter(part.name, part.settings)
        behind = part.count == 0 if part.name == "sgd" else part.count < made
        if shared and behind:
            what = "dampening" if part.name == "sgd" else "lr_decay"
            raise ValueError(
                f"{_CALLER}: {', '.join(part.paths)} made {part.count} updates, the run {made}; {what} "
                "goes by the first number, a schedule by the second. Leave learning_rate out"
            )


def _read_order(order: Any, paths: Sequence[str]) -> list[str]:
    """Return ``order`` as a list, checked against the leaves."""
    listed = order
    if isinstance(order, Iterable) and not isinstance(order, (str, set, frozenset)):
        listed = list(order)
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise TypeError(
            f"{_CALLER}: order must be a sequence of leaf paths, PyTorch's parameter by parameter, got "
            f"{listed!r}"
        )
    for path in listed:
        if path not in paths:
            raise ValueError(
                f"{_CALLER}: order has {path!r}, which is no leaf.{did_you_mean(path, paths)} Leaves: "
                f"{', '.join(sorted(paths, key=natural_key))}"
            )
    if len(set(listed)) < len(listed):
        twice = sorted({path for path in listed if listed.count(path) > 1}, key=natural_key)
        raise ValueError(f"{_CALLER}: order names {', '.join(twice)} twice; give each path once")
    return listed


def _numbers(
    torch_groups: Sequence[Mapping[str, Any]], entries: Mapping[int, Any], order: Sequence[str]
) -> list[list[int]]:
    """Return the numbers of each group's parameters, after checking them against ``order``."""
    numbers = [list(group["params"]) for group in torch_groups]
    flat = [i for members in numbers for i in members]
    if not flat:
        raise ValueError(f"{_CALLER}: param_groups has no parameters")
    if sorted(flat) != list(range(len(order))):
        raise ValueError(
            f"{_CALLER}: order has {len(order)} paths, but PyTorch's groups have {len(set(flat))} "
            f"parameters, with the numbers {min(flat)} to {max(flat)}; give one path for each"
        )
    stray = sorted(set(entries) - set(flat))
    if stray:
        raise ValueError(
            f"{_CALLER}: state has an entry for parameter {', '.join(map(str, stray))}, which is in no "
            "group; state and param_groups must be those of one state_dict"
        )
    return numbers


def _filled(state: Any, params: Any, parts: Sequence[Part], made: int) -> Any:
    """Put the values and counts into a fresh state, group by group."""
    if not isinstance(state, optax.PartitionState):
        return _filled_one(state, params, parts[0], made)
    labels = ["rest", *(f"group {k}" for k in range(len(parts) - 1))]
    filled = {
        label: _filled_one(state.inner_states[label], params, part, made)
        for label, part in zip(labels, parts, strict=True)
    }
    return state._replace(inner_states={**state.inner_states, **filled})


def _filled_one(state: Any, params: Any, part: Part, made: int) -> Any:
    structure, paths, trees = jax.tree.structure(params), leaf_paths(params), part.values
    # A schedule goes by the updates of the run, an average by those of its parameter.
    own = part.count if counts_matter(part.name, part.settings) else made
    if part.name == "sgd":
        # All that dampening asks is whether there was an update.
        own = made = made if own else 0

    def replaced(holder: Any, field: str, old: Any) -> Any:
        if field == "count":
            of_run = isinstance(holder, optax.ScaleByScheduleState)
            return jnp.asarray(made if of_run else own, old.dtype)
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
                field: replaced(part, field, old)
                if field == "count" or field in trees
                else visit(old)
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
    # A copy: on a CPU the array would else be the caller's, who may go on with it.
    return jax.device_put(np.array(value, like.dtype), like.sharding)
