"""Parallel training: exchange between devices, and runs over several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boostax.parallel.processes import Processes as Processes
    from boostax.parallel.processes import start as start

__all__ = ["Processes", "start"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from boostax.parallel import processes

        return getattr(processes, name)
    raise AttributeError(f"module 'boostax.parallel' has no attribute {name!r}")
