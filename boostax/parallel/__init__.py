"""Parallel training: meshes, exchange between devices, and runs over several processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boostax.parallel.mesh import data_mesh as data_mesh
    from boostax.parallel.processes import Processes as Processes
    from boostax.parallel.processes import start as start

_HOME = {"Processes": "processes", "data_mesh": "mesh", "start": "processes"}

__all__ = ["Processes", "data_mesh", "start"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'boostax.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"boostax.parallel.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
