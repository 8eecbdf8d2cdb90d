"""The mesh of data parallelism: groups of devices, as a rule the devices of one host each."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

__all__ = ["DEVICE_AXIS", "HOST_AXIS", "axis_names", "data_mesh", "groups_of"]

# Between groups, and inside one.
HOST_AXIS = "host"
DEVICE_AXIS = "device"


def data_mesh(device_number: int | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out as groups of ``device_number`` each, for a batch that is split over all.

    Args:
      device_number: int >= 1, devices of a group; the number of devices must be a multiple of it.
        Default None: those that each process has (on one machine without more processes, all).
      devices: the devices, group after group. Default None: all of ``jax.devices()``, process by
        process.

    Returns:
      A mesh with the axes ``"host"``, between groups, and ``"device"``, inside one, both of type
      Auto. ``"host"`` is left out where there is one group, ``"device"`` where there are several
      groups of one device.

    Raises:
      TypeError: ``device_number`` is no int.
      ValueError: it is below 1 or does not divide the number of devices; there is no device, or
        one twice; it is left out, and the processes have unequally many.

    Example:
      >>> import jax
      >>> mesh = data_mesh(1, jax.devices()[:1])
      >>> dict(mesh.shape)
      {'device': 1}

    When not to use:
      With parameters split over further axes, make the mesh with ``jax.make_mesh`` and name its
      axes in ``train_step(data_axes=...)`` and ``adasum``.
    """
    chosen = _all_devices() if devices is None else list(devices)
    if not chosen:
        raise ValueError("data_mesh: devices is empty; give at least one device")
    if len(set(chosen)) < len(chosen):
        raise ValueError("data_mesh: devices has a device twice; give each once")
    groups, size = groups_of(device_number, [device.process_index for device in chosen])
    names = axis_names(groups, size)
    shape = [{HOST_AXIS: groups, DEVICE_AXIS: size}[name] for name in names]
    grid = np.empty(len(chosen), dtype=object)
    grid[:] = chosen
    return Mesh(grid.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def axis_names(groups: int, size: int) -> tuple[str, ...]:
    """Return the axes of a mesh of ``groups`` groups of ``size`` devices."""
    names = [HOST_AXIS] if groups > 1 else []
    return (*names, DEVICE_AXIS) if size > 1 or groups == 1 else tuple(names)


def groups_of(device_number: Any, processes: Sequence[int]) -> tuple[int, int]:
    """Return how many groups there are, and the devices of each.

    Args:
      device_number: as for :func:`data_mesh`.
      processes: the process of each device.
    """
    count = len(processes)
    if device_number is None:
        sizes = sorted(set(collections.Counter(processes).values()))
        if len(sizes) > 1:
            # Each process would take its own number, and they would wait for each other.
            raise ValueError(
                f"data_mesh: the processes have unequally many devices ({sizes} of {count}), so "
                "that device_number can't be left out; give a number that divides "
                f"{count}"
            )
        return count // sizes[0], sizes[0]
    if isinstance(device_number, (bool, np.bool_)) or not isinstance(
        device_number, (int, np.integer)
    ):
        raise TypeError(f"data_mesh: device_number must be an int or None, got {device_number!r}")
    size = int(device_number)
    if size < 1 or count % size:
        divisors = [str(n) for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"data_mesh: device_number = {size} does not divide the {count} "
            f"device{'' if count == 1 else 's'}; give one of {', '.join(divisors)}, or leave it "
            "out for the devices that each process has"
        )
    return count // size, size


def _all_devices() -> list[Any]:
    return sorted(jax.devices(), key=lambda device: device.process_index)
