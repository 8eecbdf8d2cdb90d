"""What may stand around ``dim_reduce``: nothing that would move the point that it accepted."""

from __future__ import annotations

from typing import Any

from boostax import _info
from boostax._exclusions import AROUND_A_SEARCH, WINDOWS

__all__ = ["check_terminal"]

_SEARCH = "dim_reduce"


def check_terminal(tx: Any) -> None:
    """Raise a ValueError where a part of ``tx`` changes what ``dim_reduce`` in it returned."""
    # A window of one call is none.
    infos = [info for info in _info.walk(tx) if info.settings.get("every") != 1]
    names = [info.name for info in infos]
    if _SEARCH not in names:
        return
    place = names.index(_SEARCH)
    before, after = names[:place], names[place + 1 :]
    for name in before:
        if name in WINDOWS:
            raise ValueError(
                f"train_step: {name} around dim_reduce: a window across steps keeps only the last "
                "micro-batch, and its trials need the loss of the whole window; use train_step(..., "
                "microbatch=)"
            )
        if name in AROUND_A_SEARCH:
            raise ValueError(f"train_step: {name} around dim_reduce {AROUND_A_SEARCH[name]}")
    for name in after:
        if name != "identity":
            raise ValueError(
                f"train_step: {name} stands behind dim_reduce and would move the point that its line "
                "search accepted; dim_reduce is a whole optimizer and must be the last part of the "
                "chain. What shapes the gradient goes in front of it"
            )
