"""What AutoBoost says of itself: the report of a model's rewrite, and the description."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from boostax import rules
from boostax.training.describe import format_table

if TYPE_CHECKING:
    from boostax.config import BoostConfig
    from boostax.training.describe import ParameterFate, StepDescription

__all__ = ["BoostDescription", "ModelReport", "chain_order"]


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """What :meth:`AutoBoost.model` changed.

    Attributes:
      changed: the paths of the changed layers, each with what was done to it.
      notes: what the level or the flags ask for and is not built yet.
    """

    changed: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{path}: {what}" for path, what in self.changed] or ["no layer was changed"]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


@dataclasses.dataclass(frozen=True)
class BoostDescription:
    """The answer of :meth:`AutoBoost.describe`; ``print`` shows it as tables.

    Attributes:
      resolution: which techniques are on, and why.
      order: the parts of the chain, outermost first.
      parameters: what happens to each parameter, where parameters were given.
      step: the compiled step's costs, where a step, a state and a batch were given.
    """

    resolution: rules.Resolution
    order: tuple[str, ...]
    parameters: tuple[ParameterFate, ...] = ()
    step: StepDescription | None = None

    def __str__(self) -> str:
        parts = [str(self.resolution)]
        if self.step is not None:
            return "\n\n".join([*parts, str(self.step)])
        lines = ["order of the chain (outermost first)"]
        lines += [f"  {i}. {text}" for i, text in enumerate(self.order, 1)]
        parts.append("\n".join(lines))
        if self.parameters:
            rows = [
                (p.path, "x".join(map(str, p.shape)) or "-", p.dtype, p.fate)
                for p in self.parameters
            ]
            table = format_table(("path", "shape", "dtype", "what happens"), rows)
            parts.append("\n".join(["parameters", *table]))
        return "\n\n".join(parts)


def chain_order(config: BoostConfig, enabled: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chain's parts without building it, outermost first, each with its reason."""
    clip = any(getattr(config.clip, key) is not None for key in type(config.clip).model_fields)
    there = {
        "accumulate": "grad_accumulation" in enabled and config.has_window,
        "freeze": "grad_freeze" in enabled,
        "centralize": "centralize" in enabled and config.centralize.on == "gradient",
        "clip": clip,
        "optimizer": True,
        "centralize_update": "centralize" in enabled and config.centralize.on == "update",
    }
    whys = {} if there["accumulate"] else {"clip": "on the gradient of the trainable leaves"}
    names = {"optimizer": config.optimizer.name if config.optimizer else "your optimizer"}
    return tuple(
        f"{names.get(place.part, place.part)}: {whys.get(place.part, place.why)}"
        for place in rules.ORDER
        if there[place.part]
    )
