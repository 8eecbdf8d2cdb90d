"""What a state does when the step or window that it belongs to is skipped.

A skipped window changes nothing except counters of attempts. A state that has such a counter
defines ``on_skip(self) -> Self``; every other part of the optimizer state stays as it is.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class CountsAttempts(Protocol):
    """A state that moves on when its step is skipped."""

    def on_skip(self) -> Any: ...


def skip(state: Any) -> Any:
    """Return ``state`` as it is after a skipped window: only counters of attempts have moved."""
    return jax.tree.map(
        lambda part: part.on_skip() if isinstance(part, CountsAttempts) else part,
        state,
        is_leaf=lambda part: isinstance(part, CountsAttempts),
    )


def find_state(state: Any, kind: type) -> Any | None:
    """Return the outermost part of ``state`` that is a ``kind``, or None."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, kind))
    return next((part for part in parts if isinstance(part, kind)), None)


def find_states(state: Any, kind: type) -> list[Any]:
    """Return every part of ``state`` that is a ``kind``, outermost first, those within others too."""
    found = []
    for part in jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, kind)):
        if isinstance(part, kind):
            found.append(part)
            inner = getattr(part, "inner_state", None)
            found += [] if inner is None else find_states(inner, kind)
    return found
