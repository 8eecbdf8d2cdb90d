"""Keys of a config that don't go together, or need one another, whatever is switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from boostax._config_dim_reduce import dim_reduce_faults
from boostax._config_less_bn import less_bn_faults
from boostax._config_loss_scale import scale_faults
from boostax._config_named import Fault
from boostax._config_thor import known_rate
from boostax._exclusions import LINE_SEARCHES, NEEDS_VALUE

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["together"]


def together(config: BoostConfig) -> list[Fault]:
    """Return the faults that only several keys make."""
    faults = (
        _local(config)
        + _thor(config)
        + scale_faults(config)
        + dim_reduce_faults(config)
        + less_bn_faults(config)
    )
    axis, inner = config.adasum.axis_name, config.adasum.inner_axis
    if axis is not None and config.common.device_number is not None:
        faults.append(
            Fault(
                "common.device_number",
                "shapes the mesh that boostax makes, but adasum.axis_name names an axis of your "
                "own; leave one of them out",
            )
        )
    if inner is not None and axis is None:
        faults.append(
            Fault(
                "adasum.inner_axis",
                "names an axis of a mesh of your own, and needs adasum.axis_name beside it",
            )
        )
    if inner is not None and inner == axis:
        faults.append(
            Fault(
                "adasum.inner_axis",
                f"is {inner!r}, as adasum.axis_name is; the mean goes over another axis than AdaSum",
            )
        )
    return faults


def _thor(config: BoostConfig) -> list[Fault]:
    section, faults = config.thor, []
    if section.mode == "default":
        if section.layer_norms:
            faults.append(Fault("thor.layer_norms", 'is for thor.mode = "reference" only'))
    else:
        if section.frequency < 2:
            faults.append(
                Fault("thor.frequency", 'is 1; with thor.mode = "reference" it is at least 2')
            )
        if section.clip == "kl":
            faults.append(
                Fault("thor.clip", 'is "kl", which thor.mode = "reference" has not; use "tensor"')
            )
        if section.trace_rule is not None:
            faults.append(Fault("thor.trace_rule", 'goes with thor.mode = "default" only'))
    wants_rate = config.boost.mode == "manual" and config.boost.thor and section.kl
    if wants_rate and config.optimizer is not None and known_rate(config) is None:
        problem = (
            "missing; the KL clip asks for what the updates are multiplied by, and "
            f"{config.optimizer.name} was given no learning_rate; set it, or set thor.clip to false"
        )
        faults.append(Fault("thor.learning_rate", problem))
    return faults


def _local(config: BoostConfig) -> list[Fault]:
    section = config.adasum
    faults = []
    if section.local_steps > 1 and section.on == "gradient":
        faults.append(
            Fault(
                "adasum.local_steps",
                f"is {section.local_steps}, so that each device makes updates of its own; set "
                'adasum.on = "update"',
            )
        )
    if section.outer is None:
        return faults
    if section.local_steps == 1:
        faults.append(
            Fault("adasum.outer", "is for local steps; set adasum.local_steps to more than 1")
        )
    from boostax import rules

    needs = rules.optimizer_parts(section.outer.build()) & (LINE_SEARCHES | NEEDS_VALUE)
    if needs:
        faults.append(
            Fault(
                "adasum.outer",
                f"{section.outer.name} needs the loss ({sorted(needs)[0]}), which is not known where "
                "the devices exchange; name another optimizer",
            )
        )
    return faults
