"""What less_bn does to which layer, once it is known which batch norms go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from boostax.models._activation_gain import activation_gain
from boostax.models._branches import Fate, layer_ahead, needs_bias
from boostax.models._layer_graph import LayerGraph
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
        self.linen: list[Rule] = []
        self.nnx: dict[str, Any] = {}
        self.changes: list[Change] = []
        self.left: list[tuple[str, str]] = []
        self.notes: list[str] = []
        going = {norm for norm, fate in fates.items() if fate.goes}
        by_path: dict[str, list[int]] = {}
        for norm in graph.layers():
            call = graph.nodes[norm].call
            assert call is not None
            by_path.setdefault(call.path, []).append(norm)
        kernels: dict[str, tuple[int, str]] = {}
        for path, nodes in by_path.items():
            call = graph.nodes[nodes[0]].call
            assert call is not None
            norms = [n for n in nodes if n in fates]
            gain = any(n in gains for n in nodes)
            if norms and not going.issuperset(nodes):
                stays = next(fates[n] for n in nodes if n not in going)
                shared = "shared, and another of its calls is: " if going & set(nodes) else ""
                self.left.append((path, shared + stays.why))
            elif norms:
                kept = LeftOver(bias=self._bias(graph, nodes, call.layer, bias), skip_gain=gain)
                if compensation == "scaled_ws":
                    kept = self._scaled(graph, path, nodes, going, kept, kernels)
                change = Change(path, call.type, str(kept), fates[norms[0]].why)
                self._put(change, call.layer, left_over(kept), kept)
            elif gain:
                why = next(gains[n] for n in nodes if n in gains)
                change = Change(path, call.type, f"{call.type} and skip_gain", why)
                self._put(change, call.layer, gained, SkipGain())
        for path, (layer, ahead_of) in kernels.items():
            name, factor = activation_gain(graph, layer)
            call = graph.nodes[layer].call
            assert call is not None
            after = f"{call.type}, kernel standardised"
            why = f"ahead of {ahead_of}; gain {factor:.4g} (activation: {name})"
            change = Change(path, call.type, after, why)
            self._put(change, call.layer, standardized(factor), Standardized(factor))

    def _put(self, change: Change, layer: Any, make: Any, run: Any) -> None:
        self.changes.append(change)
        if isinstance(layer, nnx.Module):
            self.nnx[change.path] = make
        else:
            self.linen.append(Rule(change.path, type(layer), run))

    def _bias(self, graph: LayerGraph, nodes: Sequence[int], layer: Any, bias: Any) -> bool:
        wanted = any(needs_bias(graph, n) for n in nodes) if bias == "auto" else bias
        return bool(wanted and layer.use_bias)

    def _scaled(
        self,
        graph: LayerGraph,
        path: str,
        nodes: Sequence[int],
        going: set[int],
        kept: LeftOver,
        kernels: dict[str, tuple[int, str]],
    ) -> LeftOver:
        ahead = {n: layer_ahead(graph, n) for n in nodes}
        for layer in ahead.values():
            call = None if layer is None else graph.nodes[layer].call
            if layer is None or call is None or not can_change(call):
                self.notes.append(f"{path}: no layer ahead whose kernel could be standardised")
                return kept
            others = [u for u in graph.users[layer] if u not in going]
            if others:
                self.notes.append(
                    f"{path}: what {call.path} gives is used elsewhere too, kernel left"
                )
                return kept
            kernels[call.path] = (layer, path)
        norm = graph.nodes[nodes[0]].call
        assert norm is not None
        return LeftOver(norm.layer.use_scale, kept.bias, kept.skip_gain)

    def apply(self, model: Any) -> Any:
        """Return the rewritten model."""
        if isinstance(model, nnx.Module):
            return replace_modules(model, self.nnx)
        return rewrite(model, self.linen)
