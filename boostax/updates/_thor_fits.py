"""Whether captured layers, parameters and statistics fit together, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError
from boostax.gradients._blocks import Factors
from boostax.updates._freeze_checks import has_masked
from boostax.updates._thor_settings import Settings

__all__ = ["check_params", "checked_stats", "shown"]


def checked_stats(
    settings: Settings, stats: Mapping[str, Factors] | None, live: Sequence[int]
) -> Mapping[str, Factors]:
    if stats is None:
        raise ValueError(
            f"{settings.caller}: this update is to refresh the factors, but it got no statistics; "
            "train_step hands them over by itself where it finds the layers in tx, or is given layers=; "
            "in a loop of your own take stats from layers.value_and_grad(params, batch, due=state.due) "
            "and call tx.update(..., stats=stats), not Flax's apply_gradients"
        )
    for i in live:
        block = settings.blocks[i]
        if block.kernel not in stats:
            raise ValueError(
                f"{settings.caller}: stats lacks the layer {block.kernel!r}; it has "
                f"{', '.join(map(repr, stats)) or 'none'}. Take it from layers.value_and_grad of "
                "the same layers"
            )
        got = [jnp.shape(factor) for factor in stats[block.kernel]]
        due = [factor.shape for factor in block.shapes()]
        if got != due:
            raise ValueError(
                f"{settings.caller}: stats[{block.kernel!r}] has the shapes {got}, where the layer "
                f"has {due}; take it from layers.value_and_grad of the same layers"
            )
    return stats


def check_params(settings: Settings, params: Any) -> None:
    shapes = dict(zip(leaf_paths(params), map(jnp.shape, jax.tree.leaves(params)), strict=True))
    partial = has_masked(params)
    for block in settings.blocks:
        views = (block.view,) if block.bias_view is None else (block.view, block.bias_view)
        for path, view in zip(block.leaves, views, strict=True):
            if path not in shapes and partial:
                continue
            if shapes.get(path) != view.shape:
                has = f"is {shapes[path]} here" if path in shapes else "is not among these"
                raise StateMismatchError(
                    f"{settings.caller}: the layers were captured with other parameters: "
                    f"{path!r} of shape {view.shape} {has}; call capture_layers with these "
                    "parameters"
                )


def shown(settings: Settings) -> dict[str, Any]:
    settings_shown: dict[str, Any] = {
        "damping": settings.damping,
        "frequency": settings.frequency,
        "clip": settings.clip or False,
        "loss_scale": settings.loss_scale,
        "mode": settings.mode,
    }
    if settings.mode == "default":
        settings_shown |= {
            "early": settings.early,
            "factor_decay": settings.factor_decay,
            "pi_split": settings.pi_split,
            "kl_clip": settings.kl_clip,
            "trace_rule": settings.trace_rule,
        }
    return settings_shown | ({"axis_name": settings.axes} if settings.axes else {})
