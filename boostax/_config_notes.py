"""What a config's reader should know: overridden flags, sections without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from boostax._exclusions import NORMALISES

if TYPE_CHECKING:
    from boostax.config import BoostConfig
    from boostax.rules import Resolution

__all__ = ["notes"]


def notes(
    config: BoostConfig,
    wanted: Mapping[str, tuple[bool, str]],
    resolution: Resolution,
    parts: frozenset[str] = frozenset(),
) -> list[str]:
    """Return the notes.

    Args:
      config: the config.
      wanted: for every technique whether it is asked for, and why.
      resolution: what is on.
      parts: the names of optax's parts in the base optimizer, as far as it is known.
    """
    notes = []
    states = {d.technique: d for d in resolution.decisions}
    for name in states:
        if name in config.given("boost") and resolution.mode != "manual":
            flag, decided = getattr(config.boost, name), wanted[name][0]
            if flag != decided:
                notes.append(
                    f"boost.{name} is {str(flag).lower()}, but mode {resolution.mode!r} overrides it: "
                    f"{states[name].state} ({states[name].reason})"
                )
    for name in states:
        keys = set(config.given(name)) if name in type(config).model_fields else set()
        if name == "less_bn":
            keys.discard("gc_flag")
        if keys and states[name].state != "on":
            notes.append(
                f"section {name} is accepted and has no effect: {name} is {states[name].state}"
            )
    if "grad_accumulation_step" in config.given("common") and "grad_accumulation" not in (
        resolution.enabled
    ):
        notes.append(
            "common.grad_accumulation_step is accepted and has no effect: grad_accumulation is "
            f"{states['grad_accumulation'].state}"
        )
    notes += [
        f"common.{key} is accepted and has no effect on training: adasum is {states['adasum'].state}"
        for key in ("gradient_split_groups", "device_number")
        if key in config.given("common") and "adasum" not in resolution.enabled
    ]
    if (
        "adasum" in resolution.enabled
        and config.adasum.granularity == "tree"
        and "gradient_split_groups" in config.given("common")
    ):
        notes.append(
            "common.gradient_split_groups is accepted and has no effect: with adasum.granularity = "
            "'tree' all leaves travel together"
        )
    if "grad_accumulation" in resolution.enabled:
        if not config.has_window and config.grad_accumulation.microbatch == 1:
            notes.append(
                "grad_accumulation is on with every = 1 and microbatch = 1, which changes nothing; "
                "set one of them"
            )
        elif config.every != 1 and "grad_freeze" in resolution.enabled:
            notes.append(
                "the freeze index changes between windows; grad_freeze.total_steps counts windows"
            )
    if "thor" in resolution.enabled:
        notes += _thor(config, parts)
    if "dim_reduce" in resolution.enabled:
        notes += _dim_reduce(config)
    return notes + _loss_scales(config, resolution.enabled)


def _loss_scales(config: BoostConfig, enabled: tuple[str, ...]) -> list[str]:
    notes = []
    if "loss_scale" in enabled and not config.loss_scale.dynamic:
        notes += [
            f"loss_scale.{key} is accepted and has no effect: loss_scale.dynamic is false"
            for key in ("factor", "window", "min_scale", "max_scale")
            if key in config.given("loss_scale")
        ]
    if "loss_scale_group" in enabled and config.loss_scale_group.rule == "reference":
        notes += [
            f"loss_scale_group.{key} is accepted and has no effect: rule reference has its own"
            for key in ("factor", "window")
            if key in config.given("loss_scale_group")
        ]
    return notes


def _thor(config: BoostConfig, parts: frozenset[str]) -> list[str]:
    section, given = config.thor, config.given("thor")
    notes = [
        f"thor: the base optimizer ({part}) sets the length of its step by itself, so that the KL clip "
        "does not bound the step that is taken, and one damping no longer goes with one learning "
        "rate; optax.sgd with momentum is THOR's own"
        for part in sorted(parts & NORMALISES)[:1]
    ]
    idle = []
    if section.mode == "reference":
        idle = [k for k in ("early", "factor_decay", "pi_split", "kl_clip") if k in given]
    elif not section.kl and "kl_clip" in given:
        idle = ["kl_clip"]
    if not section.kl and "learning_rate" in given:
        idle.append("learning_rate")
    notes += [
        f"thor.{key} is accepted and has no effect: "
        + (
            "mode reference has none"
            if section.mode == "reference"
            else f"thor.clip is {section.clip!r}, and only the KL clip reads it"
        )
        for key in idle
    ]
    return notes


def _dim_reduce(config: BoostConfig) -> list[str]:
    named = f" ({config.optimizer.name})" if config.optimizer else ""
    notes = [
        f"dim_reduce takes the place of the base optimizer{named}, passed or named: its step is the "
        "line search's, and that optimizer makes no update"
    ]
    notes += [
        f"clip.{key} is accepted and has no effect: dim_reduce takes the place of the clip"
        for key in sorted(config.given("clip"))
    ]
    section, given = config.dim_reduce, config.given("dim_reduce")
    idle = []
    if section.mode == "reference" and "max_backtracks" in given:
        idle.append(("max_backtracks", "mode reference tries twice"))
    if section.alpha == 0 and "gamma" in given:
        idle.append(("gamma", "with alpha = 0 there is no momentum"))
    if section.pca_mat_path is None and "timeout" in given:
        idle.append(("timeout", "there is no pca_mat_path to wait for"))
    return notes + [f"dim_reduce.{key} is accepted and has no effect: {why}" for key, why in idle]
