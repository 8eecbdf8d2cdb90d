"""Where a state stands, and whether it belongs to this step: what the host can know."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import optax

from boostax import _info
from boostax.errors import StateMismatchError
from boostax.training._settings import Settings
from boostax.updates._skip import find_state, find_states
from boostax.updates._window import AccumulateState
from boostax.updates.freeze import FreezeState
from boostax.updates.scale_by_thor import ThorState


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a state stands: attempted windows so far, and calls into the open one."""

    windows: int
    calls: int

    def next(self, every: Any) -> Position:
        if not isinstance(every, (int, np.integer)) or self.calls + 1 >= every:
            return Position(self.windows + 1, 0)
        return Position(self.windows, self.calls + 1)


def check_static_facts(tx: Any, opt_state: Any) -> None:
    """Raise where a part of ``tx`` finds no state in ``opt_state`` that was made for it."""
    parts = [
        opt_state,
        *find_states(opt_state, AccumulateState),
        *find_states(opt_state, FreezeState),
    ]
    for info in _info.walk(tx):
        if info.check is None:
            continue
        faults = []
        for part in parts:
            try:
                info.check(part)
                break
            except StateMismatchError as fault:
                faults.append(fault)
        else:
            raise faults[0]


def check_parts(settings: Settings, opt_state: Any) -> None:
    """Hold what the optimizer state has against what was found in ``tx``."""
    frozen, windows = (
        find_states(opt_state, FreezeState),
        find_state(opt_state, AccumulateState),
    )
    if len(frozen) > 1:
        raise ValueError(
            f"tx holds {len(frozen)} boostax.freeze, but a step follows one schedule; use one "
            "Freezing with groups that cover all parameters"
        )
    if frozen and settings.freezing is None:
        raise ValueError(
            "tx holds a boostax.freeze that can't be seen from outside; pass freezing= to train_step"
        )
    if settings.freezing is not None and not frozen:
        raise ValueError(
            "freezing was given, but tx holds no boostax.freeze; wrap the optimizer: "
            "freeze(optimizer, freezing)"
        )
    if len(find_states(opt_state, ThorState)) != (settings.layers is not None):
        raise ValueError(
            "tx must hold boostax.thor or scale_by_thor once where a step has layers, and where "
            "it can be seen from outside, or with layers= given to train_step"
        )
    if windows is not None and settings.window_policy is None:
        raise ValueError(
            "tx holds a boostax.accumulate that can't be seen from outside, so the step can't "
            "tell its policy; put accumulate around the wrapper instead of into it"
        )


def called_every_window(opt_state: Any) -> bool:
    """Say whether freeze is called at every step, or at every end of one window of accumulate."""
    part: Any = opt_state
    windows = 0
    while not isinstance(part, FreezeState):
        if isinstance(part, AccumulateState):
            windows, part = windows + 1, part.inner_state
        elif isinstance(part, optax.PartitionState):
            part = tuple(part.inner_states.values())
        elif isinstance(part, optax.MaskedState) or hasattr(part, "hyperparams"):
            part = part.inner_state
        elif type(part) is tuple:
            holders = [child for child in part if find_state(child, FreezeState) is not None]
            if not holders:
                return False
            part = holders[0]
        else:
            return False
    return windows <= 1
