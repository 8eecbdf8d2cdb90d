"""What AutoBoost says of itself: its description."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optax
from flax import nnx

from boostax import _info, rules
from boostax._auto_devices import device_notes
from boostax._auto_scaling import scaling_notes
from boostax.training._scaling import check_scaling
from boostax.training.describe import format_table, order_line, parameter_fates

if TYPE_CHECKING:
    from boostax.auto import AutoBoost
    from boostax.config import BoostConfig
    from boostax.models.report import ModelReport
    from boostax.training.describe import ParameterFate, StepDescription

__all__ = ["BoostDescription", "chain_order", "describe_boost"]


@dataclasses.dataclass(frozen=True)
class BoostDescription:
    """The answer of :meth:`AutoBoost.describe`; ``print`` shows it as tables.

    Attributes:
      resolution: which techniques are on, and why.
      order: the parts of the chain, outermost first.
      parameters: what happens to each parameter, where parameters were given.
      step: the compiled step's costs, where a step, a state and a batch were given.
      notes: which devices AdaSum combines, and the loss scale, where they are on.
      model: what was changed in the model, where a report was given.
    """

    resolution: rules.Resolution
    order: tuple[str, ...]
    parameters: tuple[ParameterFate, ...] = ()
    step: StepDescription | None = None
    notes: tuple[str, ...] = ()
    model: ModelReport | None = None

    def __str__(self) -> str:
        parts = ["\n".join([str(self.resolution), *(f"note: {note}" for note in self.notes)])]
        if self.model is not None:
            parts.append(str(self.model))
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
    replaces = "dim_reduce" in enabled
    there = {
        "accumulate": "grad_accumulation" in enabled and config.has_window,
        "freeze": "grad_freeze" in enabled,
        "adasum": "adasum" in enabled and config.adasum.on == "gradient",
        "centralize": "centralize" in enabled and config.centralize.on == "gradient",
        "clip": clip and not replaces,
        "thor": "thor" in enabled,
        "dim_reduce": replaces,
        "optimizer": not replaces,
        "centralize_update": "centralize" in enabled and config.centralize.on == "update",
        "local_steps": "adasum" in enabled and config.adasum.local_steps > 1,
        "adasum_update": "adasum" in enabled and config.adasum.on == "update",
    }
    mean = "the window's mean gradient" if there["accumulate"] else "the gradient"
    combined = ", combined by AdaSum" if there["adasum"] else ""
    combined += ", each device's own" if there["adasum_update"] else ""
    whys = {"clip": f"on {mean} of the trainable leaves{combined}"}
    if there["local_steps"]:
        whys["adasum_update"] = "on what the devices have moved, at every exchange"
    names = {"optimizer": config.optimizer.name if config.optimizer else "your optimizer"}
    return tuple(
        f"{names.get(place.part, place.part)}: {whys.get(place.part, place.why)}"
        for place in rules.ORDER
        if there[place.part]
    )


def describe_boost(
    boost: AutoBoost,
    resolution_of: Callable[[Any], rules.Resolution],
    params: Any,
    tx: Any,
    running: tuple[Any, Any, Any],
    order: Sequence[str] | None,
    extra: Mapping[str, Any],
) -> BoostDescription:
    """Do the work of :meth:`AutoBoost.describe`; ``running`` is the step, its state and a batch."""
    step, state, batch = running
    scaling = check_scaling(boost.loss_scale)
    given = [
        name for name, v in (("step", step), ("state", state), ("batch", batch)) if v is not None
    ]
    if given and len(given) < 3:
        raise ValueError(f"describe: step, state and batch go together, got only {given}")
    if step is not None:
        told = step.describe(state, batch, **extra)
        resolution = resolution_of(step.tx)
        replicas = step.settings.replicas
        notes = scaling_notes(scaling, step.settings.loss_scale)
        if "adasum" in resolution.enabled and replicas is not None:
            notes += device_notes(boost.config, replicas.mesh, state.params)
        return BoostDescription(resolution, told.order, told.parameters, told, notes)
    if isinstance(params, nnx.Module):
        model, params = params, nnx.state(params, nnx.Param)
    else:
        model = params
    notes = scaling_notes(scaling, scaling)
    unknown = _unknown(boost)
    if tx is None and params is not None and not unknown:
        base = None if boost.config.optimizer is not None else optax.identity()
        tx = boost.optimizer(base, model, order=order)
    if tx is None:
        notes += device_notes(boost.config, None) if "adasum" in boost.enabled else ()
        if params is not None:
            notes += (f"the parameters are told with tx=, because {unknown}",)
        lines = chain_order(boost.config, boost.enabled)
        return BoostDescription(boost.resolution, lines, notes=notes)
    infos = list(_info.walk(tx))
    lines = tuple(order_line(info) for info in infos)
    fates = () if params is None else parameter_fates(infos, params, scaling)
    resolution = resolution_of(tx)
    if "adasum" in resolution.enabled:
        notes += device_notes(boost.config, None, params)
    return BoostDescription(resolution, lines, fates, notes=notes)


def _unknown(boost: AutoBoost) -> str:
    """Return why the chain can't be made for a description alone, or nothing."""
    if "dim_reduce" in boost.enabled:
        return "dim_reduce reads its basis from files"
    if "thor" in boost.enabled and boost.resolution.mode != "enable_all":
        return "thor needs the layers of a loss"
    return ""
