"""The parts of the chain that AutoBoost composes, made from the config's sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from boostax import _info
from boostax.errors import ConfigError
from boostax.updates._optimizer_groups import described
from boostax.updates.accumulate import accumulate
from boostax.updates.centralize import centralize
from boostax.updates.freeze import Freezing, freeze
from boostax.updates.freeze_schedule import freeze_schedule
from boostax.updates.local_steps import local_steps
from boostax.updates.parameter_groups import parameter_groups

if TYPE_CHECKING:
    from boostax._config_sections import GradFreeze
    from boostax.config import BoostConfig

__all__ = ["base_optimizer", "inner_chain", "outer_chain"]


def base_optimizer(config: BoostConfig, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that was given, or the one that the config names."""
    named = config.optimizer
    if tx is None and named is None:
        raise ConfigError(
            "optimizer: no base optimizer; pass tx, or name one in the config: "
            '{"optimizer": {"name": "adam", "learning_rate": 1e-3}}'
        )
    if tx is not None and named is not None:
        raise ConfigError(
            f"optimizer: tx was given, and the config names {named.name!r}; leave one of them out"
        )
    if tx is None:
        assert named is not None
        return _as_a_whole(named.build(), named.name)
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        hint = "; params come second: optimizer(tx, params)" if jax.tree.leaves(tx) else ""
        raise TypeError(
            f"optimizer: tx must be an optax transformation, got {type(tx).__name__}{hint}"
        )
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


def inner_chain(
    config: BoostConfig,
    enabled: tuple[str, ...],
    base: Any,
    params: Any,
    model: Any,
    exchange: Any = None,
    thor: Any = None,
) -> Any:
    """Return what stands inside the freeze: exchange, centralize, clip, thor, the base optimizer."""
    section, centralized = config.centralize, "centralize" in enabled
    before, after = [], []
    steps = config.adasum.local_steps
    if exchange is not None and steps == 1:
        (before if config.adasum.on == "gradient" else after).append(exchange)
    if centralized:
        axes = None if section.axes is None else dict(section.axes.pairs)
        part = centralize(
            layers=section.layers, axes=axes, model=model, unreadable=section.unreadable
        )
        part.init(params)  # leaves that can't be read are told here, not at step.init
        (before if section.on == "gradient" else after).append(part)
    # dim_reduce, which is the base then, takes the clip's place.
    clip = None if "dim_reduce" in enabled else _clip(config.clip)
    before += [part for part in (clip, thor) if part is not None]
    if exchange is not None and steps > 1:
        outer = None if config.adasum.outer is None else config.adasum.outer.build()
        inner = optax.chain(*before, base) if before else base
        base, before = local_steps(inner, steps, exchange, outer=outer), []
    return optax.chain(*before, base, *after) if before or after else base


def outer_chain(
    config: BoostConfig,
    enabled: tuple[str, ...],
    inner: Any,
    params: Any,
    order: Sequence[str] | None,
    *,
    needs_value: bool,
) -> Any:
    """Return freezing and the window around ``inner``."""
    if "grad_freeze" in enabled:
        inner = freeze(inner, _make_freezing(config.grad_freeze, params, order))
    if "grad_accumulation" in enabled and config.has_window:
        section = config.grad_accumulation
        inner = accumulate(
            inner,
            config.every,
            reduce=section.reduce,
            nonfinite=section.nonfinite or "skip_micro",
            average_extra=("value",) if needs_value else (),
        )
    return inner


def _clip(clip: Any) -> Any | None:
    makers = {
        "global_norm": optax.clip_by_global_norm,
        "value": optax.clip,
        "adaptive": optax.adaptive_grad_clip,
    }
    for key, make in makers.items():
        limit = getattr(clip, key)
        if limit is not None:
            return _named(make(limit), "clip", {key: limit})
    return None


def _make_freezing(section: GradFreeze, params: Any, order: Sequence[str] | None) -> Freezing:
    """Return groups and schedule for these parameters."""
    try:
        if section.patterns is not None:
            groups = parameter_groups(params, patterns=section.patterns)
        else:
            groups = parameter_groups(params, section.param_groups, order=order, by=section.by)
    except ValueError as error:
        raise ConfigError(
            f"grad_freeze.param_groups = {section.param_groups}: {error}"
            if section.patterns is None
            else f"grad_freeze.patterns: {error}"
        ) from error
    schedule = freeze_schedule(
        section.schedule_kind,
        groups,
        full_fraction=section.share_of_full_steps,
        total_steps=section.total_steps,
        seed=section.seed,
    )
    return Freezing(groups, schedule)


def _as_a_whole(tx: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """Describe an optimizer without its parts; ``learning_rate`` is what the step's metric reads."""
    info = _info.info_of(tx)
    told = _info.TransformInfo(name) if info is None else dataclasses.replace(info, inner=None)
    return described(tx, told)


def _named(tx: Any, name: str, settings: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
    return described(tx, _info.TransformInfo(name, settings))
