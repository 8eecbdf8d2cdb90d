"""THOR's part of the chain that AutoBoost composes: the layers, and what preconditions them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from boostax._config_named import Named
from boostax._config_thor import known_rate
from boostax.errors import ConfigError
from boostax.gradients.capture import capture_layers
from boostax.gradients.layers import CapturedLayers
from boostax.updates.scale_by_thor import scale_by_thor

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["NO_LAYERS", "Source", "thor_part"]

# Why mode "enable_all" leaves THOR out, where nothing more is known.
NO_LAYERS = (
    "thor needs the layers of the loss and, for its KL clip, the learning rate; call "
    "boost.optimizer(tx, params, loss_fn=loss_fn, batch=batch), and set thor.learning_rate"
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the layers come from: ready-made, or from a loss, parameters and a batch.

    Attributes:
      layers: what ``capture_layers`` returned, or None.
      loss_fn: the loss, or None.
      batch: one batch, or None.
      model: the parameters or the nnx model.
      options: the keywords of ``capture_layers`` that the config does not have.
    """

    layers: CapturedLayers | None
    loss_fn: Callable[..., Any] | None
    batch: Any
    model: Any
    options: dict[str, Any]


def thor_part(config: BoostConfig, source: Source) -> Any:
    """Return ``scale_by_thor`` with the section's settings.

    Raises:
      ConfigError: the layers are missing, can't be captured or are not those that the section asks
        for, a key does not fit them, or the KL clip does not know the learning rate.
    """
    section = config.thor
    rate = known_rate(config)
    if section.kl and rate is None:
        raise ConfigError(
            "thor.learning_rate: the KL clip asks for what the updates are multiplied by afterwards, "
            "and an optimizer that is passed does not tell; set thor.learning_rate to its number or "
            "schedule, name the optimizer in the config, or set thor.clip to false"
        )
    layers = _layers(config, source)
    damping = section.damping.build() if isinstance(section.damping, Named) else section.damping
    try:
        return scale_by_thor(
            layers=layers,
            damping=damping,
            learning_rate=rate if section.kl else None,
            frequency=section.frequency,
            early=section.early,
            factor_decay=section.factor_decay,
            pi_split=section.pi_split,
            clip=section.clip,
            kl_clip=section.kl_clip,
            trace_rule=section.trace_rule,
            split_indices=section.split_indices,
            layer_norms=section.layer_norms,
            mode=section.mode,
        )
    except ValueError as error:
        raise ConfigError(f"thor: {error}") from error


def _layers(config: BoostConfig, source: Source) -> CapturedLayers:
    section = config.thor
    if source.layers is not None:
        if not isinstance(source.layers, CapturedLayers):
            raise TypeError(
                "optimizer: layers must be what boostax.capture_layers returned, got "
                f"{type(source.layers).__name__}"
            )
        for key in ("block_size", "fisher", "mode"):
            wanted, got = getattr(section, key), getattr(source.layers, key)
            if wanted != got and (key == "mode" or key in config.given("thor")):
                raise ConfigError(
                    f"thor.{key}: is {wanted!r}, but the layers that were given have {got!r}; capture "
                    f"them with {key}={wanted!r}, or pass loss_fn and batch in their place"
                )
        if "exclude" in config.given("thor"):
            raise ConfigError(
                "thor.exclude: has no effect on layers that were given; give it to capture_layers, or "
                "pass loss_fn and batch in their place"
            )
        return source.layers
    missing = [name for name in ("loss_fn", "batch") if getattr(source, name) is None]
    if source.model is None:
        missing.append("params")
    if missing:
        raise ConfigError(
            "boost.thor: thor needs the layers of the loss; call boost.optimizer(tx, params, "
            "loss_fn=loss_fn, batch=batch), or give layers=boostax.capture_layers(loss_fn, params, "
            f"batch); missing: {', '.join(missing)}"
        )
    assert source.loss_fn is not None
    try:
        return capture_layers(
            source.loss_fn,
            source.model,
            source.batch,
            block_size=section.block_size,
            fisher=section.fisher,
            exclude=section.exclude,
            mode=section.mode,
            **source.options,
        )
    except ValueError as error:
        raise ConfigError(f"boost.thor: {error}") from error
