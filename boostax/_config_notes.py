"""What a config's reader should know: overridden flags, sections without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from boostax.config import BoostConfig
    from boostax.rules import Resolution

__all__ = ["notes"]


def notes(
    config: BoostConfig, wanted: Mapping[str, tuple[bool, str]], resolution: Resolution
) -> list[str]:
    """Return the notes; ``wanted`` tells for every technique whether it is asked for, and why."""
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
    return notes
