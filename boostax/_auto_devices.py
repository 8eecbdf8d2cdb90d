"""AdaSum's part of AutoBoost: the mesh that a config means, the exchange, what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

from boostax import _info
from boostax.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from boostax.config import BoostConfig

__all__ = ["check_mesh", "device_notes", "exchange_part", "mesh_of", "needs_order"]


def mesh_of(config: BoostConfig) -> Mesh:
    """Return the mesh that the config means, of all devices.

    Raises:
      ConfigError: ``common.device_number`` does not divide the number of devices, or the config
        names axes of a mesh of the user's own.
    """
    from boostax.parallel.mesh import data_mesh

    axis = config.adasum.axis_name
    if axis is not None:
        raise ConfigError(
            f"adasum.axis_name = {axis!r} is an axis of a mesh of your own, so that the config means "
            "no mesh; pass yours: boost.train_step(loss_fn, tx, mesh=mesh)"
        )
    try:
        return data_mesh(config.common.device_number)
    except ValueError as error:
        raise ConfigError(f"common.device_number: {error}") from error


def axes_of(config: BoostConfig, mesh: Mesh | None) -> tuple[str, str | None]:
    """Return the axis that AdaSum goes over, and the one of the mean inside a group, if any."""
    if config.adasum.axis_name is not None:
        return config.adasum.axis_name, config.adasum.inner_axis
    assert mesh is not None
    outer, *inner = mesh.axis_names
    return outer, inner[0] if inner else None


def exchange_part(config: BoostConfig, mesh: Mesh | None, params: Any, order: Any) -> Any:
    """Return AdaSum by the config; split points beyond the last leaf of ``params`` are left out."""
    from boostax.updates.adasum import adasum

    section = config.adasum
    outer, inner = axes_of(config, mesh)
    points = config.common.split_points
    if params is not None:
        points = _kept(points, params)
    return adasum(
        outer,
        inner_axis=inner,
        granularity=section.granularity,
        algorithm=section.algorithm,
        buckets=points,
        order=order,
    )


def needs_order(config: BoostConfig, enabled: tuple[str, ...], model: Any, wrt: Any) -> bool:
    """Say whether the chain asks for the layers' forward order."""
    if "grad_freeze" in enabled and config.grad_freeze.patterns is None:
        return True
    if "adasum" not in enabled or config.adasum.granularity == "tree":
        return False
    params = model
    if isinstance(model, nnx.Module):
        params = nnx.state(model, nnx.Param if wrt is None else wrt)
    # With one buffer the order decides nothing.
    return bool(_kept(config.common.split_points, params))


def check_mesh(config: BoostConfig, tx: Any, mesh: Any) -> None:
    """Raise where AdaSum's axes are not those of the mesh that was given.

    Raises:
      ValueError: there is no mesh, or it lacks an axis.
    """
    axes = _info.exchanged_axes(tx)
    if mesh is None:
        raise ValueError(
            f"train_step: adasum goes over {list(axes)}, axes of a mesh of your own; pass mesh="
        )
    names = getattr(mesh, "axis_names", None)
    missing = [] if names is None else [axis for axis in axes if axis not in names]
    if missing:
        raise ValueError(
            f"train_step: mesh has the axes {list(names or ())}, but adasum goes over {list(axes)}; "
            + (
                "set adasum.axis_name (and inner_axis) to axes of your mesh"
                if config.adasum.axis_name is None
                else "pass the mesh that adasum.axis_name is an axis of"
            )
        )


def device_notes(config: BoostConfig, mesh: Mesh | None, params: Any = None) -> tuple[str, ...]:
    """Say which devices AdaSum combines, and which split points cut nothing.

    Args:
      config: the config.
      mesh: the mesh that a step runs on, or None for the one that the config means.
      params: the parameters, where they are known.
    """
    notes = []
    if mesh is None and config.adasum.axis_name is not None:
        outer, inner = axes_of(config, None)
        mean = "" if inner is None else f"the mean over {inner!r}, then "
        notes.append(f"adasum: {mean}AdaSum over {outer!r}, of the mesh that you pass")
    else:
        try:
            notes.append(_layout(config, mesh_of(config) if mesh is None else mesh))
        except ConfigError as error:  # a config may be looked at where it won't run
            notes.append(f"adasum: not with the devices here: {error}")
    if params is not None and config.adasum.granularity == "leaf":
        points = config.common.split_points
        beyond = [str(point) for point in points if point not in _kept(points, params)]
        if beyond:
            notes.append(
                f"common.gradient_split_groups: {', '.join(beyond)} at or beyond the last leaf: "
                "nothing is cut there"
            )
    return tuple(notes)


def _layout(config: BoostConfig, mesh: Mesh) -> str:
    outer, inner = axes_of(config, mesh)
    groups, size = mesh.shape[outer], 1 if inner is None else mesh.shape[inner]
    steps = config.adasum.local_steps
    every = f", every {steps} updates" if steps > 1 else ""
    if groups * size == 1:
        moved = f"; the parameters move once in {steps} updates" if steps > 1 else ""
        return f"adasum: one device: nothing to combine{moved}"
    return _combined(config, mesh, outer, inner) + every


def _combined(config: BoostConfig, mesh: Mesh, outer: str, inner: str | None) -> str:
    groups, size = mesh.shape[outer], 1 if inner is None else mesh.shape[inner]
    if config.adasum.axis_name is None and len(mesh.axis_names) == 1:
        several = "one group of {} devices" if outer == "device" else "{} groups of one device"
        return f"adasum: {several.format(groups)}, combined by AdaSum over {outer!r}"
    if inner is None:
        return f"adasum: {groups} devices, combined by AdaSum over {outer!r}"
    return (
        f"adasum: {groups} groups of {size} devices: the mean over {inner!r} inside a group, AdaSum "
        f"over {outer!r} between groups"
    )


def _kept(points: tuple[int, ...], params: Any) -> tuple[int, ...]:
    """Return the split points that lie ahead of the last leaf."""
    from boostax.updates.adasum import adasum

    info = _info.info_of(adasum("any", buckets=points))
    assert info is not None
    beyond = info.static.describe(params).beyond
    return tuple(point for point in points if point not in beyond)
