"""What of a config's techniques is in a transformation that AutoBoost made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from boostax import _info, rules
from boostax._auto_thor import NO_LAYERS

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["absent", "base_parts", "part_of", "resolution_in", "with_left_out"]

_LEFT_OUT = "__boostax_left_out__"

# What the chain must hold for a technique that is on: technique -> part.
_PARTS = {
    "grad_freeze": "freeze",
    "adasum": "adasum",
    "centralize": "centralize",
    "grad_accumulation": "accumulate",
    "thor": "scale_by_thor",
    "dim_reduce": "dim_reduce",
}

# Techniques whose notes depend on the base optimizer.
_NOTED = frozenset({"thor", "loss_scale", "loss_scale_group"})


def part_of(config: BoostConfig, name: str) -> str:
    """Return the name of the part that a technique puts into the chain."""
    local = name == "adasum" and config.adasum.local_steps > 1
    return "local_steps" if local else _PARTS[name]


def absent(config: BoostConfig, tx: Any, enabled: Sequence[str]) -> list[str]:
    """Return the techniques among ``enabled`` whose part is not in ``tx``."""
    return [
        name
        for name in enabled
        if name in _PARTS
        and (name != "grad_accumulation" or config.has_window)
        and _info.find(tx, part_of(config, name)) is None
    ]


def base_parts(config: BoostConfig, base: Any) -> frozenset[str]:
    """Return the names of optax's parts in the base optimizer, given or named."""
    return rules.optimizer_parts(config.optimizer.build() if config.optimizer else base)


def with_left_out(tx: Any, reasons: Mapping[str, str]) -> Any:
    """Note which techniques ``tx`` was built without, and why, and return ``tx``."""
    if reasons:
        setattr(tx.update, _LEFT_OUT, dict(reasons))
    return tx


def resolution_in(config: BoostConfig, resolution: rules.Resolution, tx: Any) -> rules.Resolution:
    """Return the resolution as it is in ``tx``: ``enable_all`` leaves out what clashes."""
    base = _info.noted_plain(tx)
    if resolution.mode != "enable_all":
        if not _NOTED & set(resolution.enabled):
            return resolution
        parts = base_parts(config, tx if base is None else base)
        return rules.without(config, resolution, {}, parts)
    enabled = resolution.enabled
    parts = rules.optimizer_parts(tx) if base is None else base_parts(config, base)
    among = None if base is not None else absent(config, tx, enabled)
    told = rules.with_optimizer(config, resolution, parts, among)
    if "thor" in absent(config, tx, told.enabled):
        reason = getattr(tx.update, _LEFT_OUT, {}).get("thor", NO_LAYERS)
        return rules.without(config, told, {"thor": reason}, parts)
    return told
