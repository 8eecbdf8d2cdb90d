"""The static facts of a train step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from boostax.training._replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static facts of a train step; ``train_step`` documents each."""

    metrics: tuple[str, ...]
    has_aux: bool
    microbatch: int
    stats: str
    batch_norm_momentum: float | None
    freezing: Any
    skip_nonfinite: bool
    learning_rate: Any
    window_policy: str | None
    window_every: Any
    replicas: Replicas | None = None
    example_weights: str | None = None
    layers: Any = None
    due_dispatch: str = "auto"
    loss_scale: Any = None
    batch_parts: tuple[str, ...] = ()

    @property
    def may_skip(self) -> bool:
        """Whether a call can leave the state as it was (only a LossAux can give a weight of 0)."""
        return self.skip_nonfinite or self.has_aux

    @property
    def window_decides(self) -> bool:
        """Whether ``accumulate`` decides what is skipped, by a policy of its own."""
        return self.window_policy in ("skip_micro", "skip_window")

    @property
    def own_gradients(self) -> bool:
        """Whether ``tx`` gets each device's own gradients."""
        return self.replicas is not None and self.replicas.exchange != "step"

    @property
    def fixed_windows(self) -> bool:
        """Whether the number of calls a window takes is known without looking at the device."""
        if self.window_policy is None:
            return True
        if not isinstance(self.window_every, (int, np.integer)):
            return False
        return self.window_policy == "skip_window" or (
            self.window_policy == "off" and not self.skip_nonfinite
        )
