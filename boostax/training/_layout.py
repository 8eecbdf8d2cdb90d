"""Which parts of an optimizer state differ between devices, and their leading axis.

What an exchange inside ``tx`` has not seen yet (the sums of an open window, the moments of an
optimizer ahead of AdaSum) is each device's own. In a train state such a leaf has a leading axis, one
entry a device, split over the data axes. JAX's types in ``shard_map`` tell which leaves these are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from boostax import _compat
from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError
from boostax.parallel.reduce import Devices
from boostax.training._arguments import declaring
from boostax.training._placement import batch_specs
from boostax.training._replicas import Replicas


class _SearchError(ValueError):
    """A line search whose parameters differ between devices."""


def differing(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    replicas: Replicas,
    accept: Callable[[dict[str, Any]], dict[str, Any]],
    extra: Mapping[str, Any],
    layers: Any = None,
) -> tuple[bool, ...]:
    """Say for each leaf of the optimizer state, in tree order, whether it differs between devices.

    Traces ``tx.update`` without running it.

    Args:
      tx: the whole transformation.
      params: the parameters, or their shapes.
      replicas: the devices.
      accept: leaves out what ``tx`` does not take of the extra arguments of a step.
      extra: the user's own extra arguments, the same on all devices.
      layers: the captured layers whose statistics ``tx`` takes, or None.

    Raises:
      ValueError: the updates differ between devices too, or it can't be told.
    """
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(tx.init, shapes)
    leaves, treedef = jax.tree.flatten(state)
    marks = [False] * len(leaves)
    while replicas.exchange != "step":
        updates, found = _trace(tx, shapes, leaves, treedef, marks, replicas, accept, extra, layers)
        if found == marks:
            if updates:
                raise ValueError(
                    f"tx: the updates of {', '.join(map(repr, updates[:5]))} would differ between "
                    f"the devices of {list(replicas.axes)}; the exchange in tx must combine every "
                    "leaf, over all of these axes (adasum's inner_axis takes the mean over one), "
                    "and nothing behind it may bring the devices' own values back (accumulate goes "
                    "around the exchange, not behind it)"
                )
            break
        marks = found
    return tuple(marks)


def _trace(
    tx: Any,
    params: Any,
    leaves: list[Any],
    treedef: Any,
    marks: list[bool],
    replicas: Replicas,
    accept: Callable[[dict[str, Any]], dict[str, Any]],
    extra: Mapping[str, Any],
    layers: Any,
) -> tuple[list[str], list[bool]]:
    """Return the paths of the updates that vary, and which leaves of the new state do."""
    told: list[Any] = []

    def varies(value: Any) -> bool:
        return bool(_compat.varying_axes(value) & set(replicas.axes))

    def differ(value: Any) -> Any:
        missing = tuple(a for a in replicas.axes if a not in _compat.varying_axes(value))
        return lax.pcast(value, missing, to="varying") if missing else value

    def own(value: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact) or not jnp.size(value):
            return value  # the gradient of integers is zero everywhere
        return differ(value)

    def value_fn(at: Any, **_: Any) -> jax.Array:
        if any(map(varies, jax.tree.leaves(at))):
            raise _SearchError(
                "tx searches along a line with parameters that differ between devices, and each "
                "would wait for the others' loss; leave the exchange out of tx, and the step takes the "
                "mean ahead of the line search"
            )
        return jnp.float32(0)

    def body(params: Any, leaves: list[Any]) -> jax.Array:
        grads = jax.tree.map(own, params)
        state = [differ(x) if mark else x for x, mark in zip(leaves, marks, strict=True)]
        given: dict[str, Any] = {
            "value": jnp.float32(0),
            "grad": grads,
            "grad_fn": lambda at, *_, **__: jax.tree.map(own, at),
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "weight": own(jnp.float32(1)),
            "finite": jnp.bool_(True),
            "freeze_index": 0,
        }
        if replicas.exchange == "window":
            given["boostax_exchange"] = replicas.mean
        if layers is not None:
            given["stats"] = jax.tree.map(own, layers.zeros())
            given["boostax_devices"] = Devices(replicas.axes, own(jnp.float32(1)))
        given = {**accept(given), **extra}
        for name in ("value_fn", "obj_fn"):
            if name in given:
                given[name] = declaring(value_fn, given)
        updates, new = tx.update(grads, treedef.unflatten(state), params, **given)
        flat = jax.tree.leaves(updates)
        paths = leaf_paths(updates)
        told.append([path or "params" for path, u in zip(paths, flat, strict=True) if varies(u)])
        told.append(
            [mark or varies(x) for mark, x in zip(marks, treedef.flatten_up_to(new), strict=True)]
        )
        return jnp.zeros(())

    mapped = jax.shard_map(
        body,
        mesh=replicas.mesh,
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(replicas.axes),
    )
    try:
        jax.eval_shape(mapped, params, leaves)
    except _SearchError:
        raise
    except Exception as error:
        missing = re.search(r"required (?:keyword-only )?arguments?:? (.*)", str(error))
        if missing or "average_extra" in str(error):
            raise ValueError(
                f"init: tx takes extra arguments of your own, and its update is traced here: {error}; "
                "give examples of them, step.init(..., extra={'name': value})"
            ) from error
        raise ValueError(
            "tx exchanges between devices, and what of its state differs between them can't be "
            "told, because its update can't be traced in shard_map (around an exchange use "
            "boostax.accumulate for optax.MultiSteps, and train_step(skip_nonfinite=True) for "
            f"optax.apply_if_finite): {error}"
        ) from error
    return told[0], told[1]


def change_leaves(state: Any, marks: tuple[bool, ...], change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the leaves that are marked."""
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(
        [change(x) if mark else x for x, mark in zip(leaves, marks, strict=True)]
    )


def over_mesh(
    function: Callable[..., Any],
    replicas: Replicas,
    marks_of: Callable[[Any, Any], tuple[bool, ...]],
) -> Callable[..., Any]:
    """Let ``function(state, batch, extra) -> (state, metrics)`` run on each device's part.

    Args:
      function: what a device does; the leaves that are its own have no leading axis in it.
      replicas: the devices.
      marks_of: tells from the state and the extra arguments which leaves of the optimizer state
        these are, and checks the state.
    """

    def mapped(state: Any, batch: Any, extra: Any) -> tuple[Any, Any]:
        marks = marks_of(state, extra)
        specs = _state_specs(state, marks, replicas)

        def body(state: Any, batch: Any, extra: Any) -> tuple[Any, Any]:
            state, metrics = function(_own(state, marks), batch, extra)
            return _stacked(state, marks), metrics

        parts = batch_specs(batch, replicas)
        run = _shard_map(body, replicas, (specs, parts, PartitionSpec()), (specs, PartitionSpec()))
        return run(state, batch, extra)

    return mapped


def flush_over_mesh(
    function: Callable[..., Any],
    replicas: Replicas,
    marks_of: Callable[[Any, Any], tuple[bool, ...]],
) -> Callable[..., Any]:
    """Let ``function(state, extra) -> state`` run on each device; see :func:`over_mesh`."""

    def mapped(state: Any, extra: Any) -> Any:
        marks = marks_of(state, extra)
        specs = _state_specs(state, marks, replicas)

        def body(state: Any, extra: Any) -> Any:
            return _stacked(function(_own(state, marks), extra), marks)

        return _shard_map(body, replicas, (specs, PartitionSpec()), specs)(state, extra)

    return mapped


def _shard_map(body: Callable[..., Any], replicas: Replicas, in_specs: Any, out_specs: Any) -> Any:
    # Without the check of what varies: a loss may scan over a carry that starts from zeros.
    return jax.shard_map(
        body,
        mesh=replicas.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(replicas.axes),
        check_vma=False,
    )


def _state_specs(state: Any, marks: tuple[bool, ...], replicas: Replicas) -> Any:
    whole = jax.tree.map(lambda _: PartitionSpec(), state)
    own = change_leaves(whole.opt_state, marks, lambda _: PartitionSpec(replicas.axes))
    return whole.replace(opt_state=own)


def _own(state: Any, marks: tuple[bool, ...]) -> Any:
    return state.replace(opt_state=change_leaves(state.opt_state, marks, lambda leaf: leaf[0]))


def _stacked(state: Any, marks: tuple[bool, ...]) -> Any:
    return state.replace(opt_state=change_leaves(state.opt_state, marks, lambda leaf: leaf[None]))


class MadeShapes:
    """The shapes of the arrays that ``tx.init`` makes; None where it looks at values.

    Kept for each set of parameter shapes, because a state is looked at in many calls.
    """

    def __init__(self, tx: optax.GradientTransformation):
        self._tx = tx
        self._known: dict[Any, list[tuple[int, ...]] | None] = {}

    def __call__(self, params: Any) -> list[tuple[int, ...]] | None:
        key = tuple(np.shape(leaf) for leaf in jax.tree.leaves(params))
        if key not in self._known:
            self._known[key] = self._traced(params)
        return self._known[key]

    def _traced(self, params: Any) -> list[tuple[int, ...]] | None:
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(np.shape(p), p.dtype), params)
        try:
            return [x.shape for x in jax.tree.leaves(jax.eval_shape(self._tx.init, shapes))]
        except Exception:  # some look at values, and then the shapes go unchecked
            return None


def check_shapes(opt_state: Any, expected: list[tuple[int, ...]] | None, maker: str = "tx") -> None:
    """Raise where an optimizer state was made on a mesh and this step has none, and the like.

    Args:
      opt_state: the optimizer state.
      expected: the shapes that its arrays must have; None where they can't be told.
      maker: what makes these shapes, for the message.

    Raises:
      StateMismatchError: an array has another shape.
    """
    if expected is None:
        return
    leaves = jax.tree.leaves(opt_state)
    if len(leaves) != len(expected):
        raise StateMismatchError(
            f"state: its optimizer state has {len(leaves)} arrays, {maker} makes {len(expected)}; make "
            "it with step.init, or restore it with that as the target"
        )
    for path, leaf, shape in zip(leaf_paths(opt_state), leaves, expected, strict=True):
        if np.shape(leaf) != shape:
            raise StateMismatchError(
                f"state: {path!r} of the optimizer state has the shape {np.shape(leaf)}, and {maker} "
                f"makes {shape}. A state from a mesh can have one entry a device ahead; go on with the "
                "tx and the mesh that it was made with, or start with step.init"
            )


def check_leading(
    opt_state: Any, marks: tuple[bool, ...], made: list[tuple[int, ...]] | None, size: int
) -> None:
    """Raise where a state was made for another number of devices.

    Raises:
      StateMismatchError: a leaf that is each device's own has not one entry a device.
    """
    for path, leaf, mark in zip(
        leaf_paths(opt_state), jax.tree.leaves(opt_state), marks, strict=False
    ):
        if mark and (np.ndim(leaf) == 0 or np.shape(leaf)[0] != size):
            entries = np.shape(leaf)[0] if np.ndim(leaf) else "no"
            raise StateMismatchError(
                f"state: {path!r} of the optimizer state is each device's own and has {entries} "
                f"entries, but the batch is split over {size} devices; go on with as many devices "
                "as it was made for, or start with step.init"
            )
    if made is not None:
        expected = [(size, *x) if mark else x for x, mark in zip(made, marks, strict=True)]
        check_shapes(opt_state, expected, "tx on this mesh")
