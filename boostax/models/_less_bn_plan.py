"""What less_bn does to which layer, once it is known which batch norms go."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from flax import nnx

from boostax.models._activation_gain import activation_gain
from boostax.models._branches import Fate, layer_ahead, needs_bias
from boostax.models._layer_graph import LayerCall, LayerGraph
from boostax.models._left_over import (
    LeftOver,
    SkipGain,
    Standardized,
    can_change,
    gained,
    left_over,
    standardized,
)
from boostax.models._surgery_linen import Rule, rewrite
from boostax.models._surgery_nnx import replace_modules
from boostax.models.report import Change

__all__ = ["Plan"]


class Plan:
    """What is done to which layer, by path."""

    def __init__(
        self,
        graph: LayerGraph,
        fates: dict[int, Fate],
        gains: dict[int, str],
        bias: Any,
        compensation: Any,
    ) -> None:
        self.graph, self.fates = graph, fates
        self.bias, self.compensation = bias, compensation
        self.linen: list[Rule] = []
        self.nnx: dict[str, Any] = {}
        self.changes: list[Change] = []
        self.left: list[tuple[str, str]] = []
        self.notes: list[str] = []
        # Layers whose kernels are to be standardised: path -> a call, and the norm behind it.
        self.kernels: dict[str, tuple[int, str]] = {}
        self.going = {norm for norm, fate in fates.items() if fate.goes}
        calls: dict[str, list[int]] = {}
        for node in graph.layers():
            calls.setdefault(graph.call(node).path, []).append(node)
        for path, nodes in calls.items():
            gain = next((gains[n] for n in nodes if n in gains), None)
            if nodes[0] in fates:
                self._norm(path, nodes, gain)
            elif gain is not None:
                call = graph.call(nodes[0])
                change = Change(path, call.type, f"{call.type} and skip_gain", gain)
                self._put(change, call.layer, gained, SkipGain())
        for path, (layer, norm) in self.kernels.items():
            name, factor = activation_gain(graph, layer)
            call = graph.call(layer)
            after = f"{call.type}, kernel standardised"
            why = f"ahead of {norm}; gain {factor:.4g} (activation: {name})"
            change = Change(path, call.type, after, why)
            self._put(change, call.layer, standardized(factor), Standardized(factor))

    def _norm(self, path: str, nodes: Sequence[int], gain: str | None) -> None:
        staying = [n for n in nodes if n not in self.going]
        if staying:
            shared = "shared, and another of its calls is: " if len(staying) < len(nodes) else ""
            self.left.append((path, shared + self.fates[staying[0]].why))
            return
        call = self.graph.call(nodes[0])
        wanted = self.bias
        if wanted == "auto":
            wanted = any(needs_bias(self.graph, n) for n in nodes)
        kept = LeftOver(bias=bool(wanted and call.layer.use_bias), skip_gain=gain is not None)
        if self.compensation == "scaled_ws" and self._standardizes(path, nodes):
            kept = dataclasses.replace(kept, scale=call.layer.use_scale)
        change = Change(path, call.type, str(kept), self.fates[nodes[0]].why)
        self._put(change, call.layer, left_over(kept), kept)

    def _put(self, change: Change, layer: Any, make: Any, run: Any) -> None:
        self.changes.append(change)
        if isinstance(layer, nnx.Module):
            self.nnx[change.path] = make
        else:
            self.linen.append(Rule(change.path, type(layer), run))

    def _standardizes(self, path: str, nodes: Sequence[int]) -> bool:
        """Note the kernels ahead of a norm; say whether they can be standardised."""
        found = {}
        for node in nodes:
            layer = layer_ahead(self.graph, node)
            if layer is None or not can_change(self.graph.call(layer)):
                self.notes.append(f"{path}: no layer ahead whose kernel could be standardised")
                return False
            ahead = self.graph.call(layer).path
            if _has_one_input(self.graph.call(layer)):
                self.notes.append(f"{path}: each unit of {ahead} has one input, kernel left")
                return False
            if not self.graph.goes_only_to(layer, self.going):
                self.notes.append(f"{path}: what {ahead} gives is used elsewhere too, kernel left")
                return False
            found[ahead] = (layer, path)
        self.kernels |= found
        return True

    def apply(self, model: Any) -> Any:
        """Return the rewritten model."""
        if isinstance(model, nnx.Module):
            return replace_modules(model, self.nnx)
        return rewrite(model, self.linen)


def _has_one_input(call: LayerCall) -> bool:
    """Say whether a unit's kernel is one number, of which standardising would leave zero."""
    layer: Any = call.layer
    size = getattr(layer, "kernel_size", ())
    window = math.prod((size,) if isinstance(size, int) else size)
    groups = getattr(layer, "feature_group_count", 1)
    return window * (call.inputs[-1] // groups) == 1
