"""Loss scaling's part of AutoBoost: what a config means for ``train_step``, and what is told of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from boostax.errors import ConfigError
from boostax.gradients.group_loss_scale import GroupLossScale
from boostax.gradients.loss_scale import DynamicLossScale
from boostax.training._describe_scaling import scaling_words

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["scaling_notes", "scaling_of"]


def scaling_of(
    config: BoostConfig, enabled: Collection[str]
) -> DynamicLossScale | GroupLossScale | float | None:
    """Return what ``train_step`` takes as ``loss_scale=``: None where no loss scale is on."""
    try:
        if "loss_scale_group" in enabled:
            section = config.loss_scale_group
            return GroupLossScale(
                section.groups,
                init=section.init,
                factor=section.factor,
                window=section.window,
                min_scale=section.min_scale,
                max_scale=section.max_scale,
                rule=section.rule,
            )
        if "loss_scale" not in enabled:
            return None
        one = config.loss_scale
        if not one.dynamic:
            return one.init
        return DynamicLossScale(one.init, one.factor, one.window, one.min_scale, one.max_scale)
    except ValueError as error:
        raise ConfigError(f"boost.loss_scale: {error}") from error


def scaling_notes(ours: Any, used: Any) -> tuple[str, ...]:
    """Say which loss scale a step has.

    Args:
      ours: what the config means.
      used: what the step has.
    """
    if used is None:
        if ours is None:
            return ()
        return ("loss scale: none, because train_step was given loss_scale=None",)
    given = "" if used == ours else ", as train_step was given it"
    return (
        f"loss scale: {scaling_words(used)}{given}; gradients are unscaled, and an overflow found, "
        "ahead of the chain",
    )
