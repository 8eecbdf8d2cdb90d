"""Norm layers of a linen model turned into another kind."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

import boostax.linen
from boostax.models._calls import called_layers
from boostax.models._norm_swap import KINDS, Target, channel_axis, keeps_running, kind_of_norm
from boostax.models._norm_swap_plan import planned
from boostax.models._surgery_linen import Rule, rewrite
from boostax.models.report import ModelReport

__all__ = ["replace_linen"]


def replace_linen(
    model: nn.Module,
    target: Target,
    wanted: Any,
    example_inputs: Any,
    kwargs: Mapping[str, Any],
    method: str | None,
    rngs: Any,
) -> tuple[Any, ModelReport]:
    """Return the new model and the report."""
    calls = called_layers(model, example_inputs, kwargs, rngs=rngs, method=method)
    layers: dict[str, tuple[Any, int]] = {}
    for call in calls:
        kind = kind_of_norm(call.layer)
        if kind is None:
            continue
        try:
            axis = channel_axis(call.layer, kind)
        except ValueError:
            axis = -1
        layers.setdefault(call.path, (call.layer, call.inputs.shape[axis]))
    others = {call.path: type(call.layer).__name__ for call in calls}
    changes, report = planned(target, wanted, layers, others)
    rules = [Rule(path, type(layers[path][0]), _Swap(target)) for path in changes]
    if target.tracks and any(
        not keeps_running(layers[p][0], kind_of_norm(layers[p][0]) or "") for p in changes
    ):
        report = dataclasses.replace(
            report,
            notes=(
                *report.notes,
                "the new layers take the batch's statistics where the collection batch_stats is "
                "mutable, and running ones elsewhere",
            ),
        )
    new = rewrite(model, rules)
    # The new layers see their inputs here, so that what they refuse is told now.
    called_layers(new, example_inputs, kwargs, rngs=rngs, method=method)
    return new, report


@dataclasses.dataclass(frozen=True)
class _Swap:
    """Runs a norm of another kind in a layer's place, in the layer's scope."""

    target: Target

    def __call__(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        del call
        kind = kind_of_norm(layer) or ""
        arguments = self.target.arguments(layer, kind)
        given = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs).arguments
        named = {} if given.get("mask") is None else {"mask": given["mask"]}
        if self.target.tracks:
            use = given.get("use_running_average")
            if use is None:
                use = getattr(layer, "use_running_average", None)
            if use is None and not keeps_running(layer, kind):
                use = not layer.is_mutable_collection("batch_stats")
            arguments["use_running_average"] = use
        made = getattr(boostax.linen, KINDS[self.target.kind])
        return made(parent=layer.scope, **arguments)(given["x"], **named)
