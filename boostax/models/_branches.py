"""Find the branches of residual, inverted residual and dense blocks in a graph of layers.

A branch ends at an addition (a residual block) or a concatenation (a dense block). With ``before(a)``
for all that a value depends on, what belongs to operand ``a`` alone is ``before(a) - before(b)``; the
operand with more layers of its own is the main path, the other one the shortcut.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from boostax.models._kinds import has_bias
from boostax.models._layer_graph import TRANSPARENT, LayerCall, LayerGraph

__all__ = ["Branch", "Fate", "fates_of_norms", "find_branches", "gain_place", "layer_ahead"]


@dataclasses.dataclass(frozen=True)
class Branch:
    """The way from where a block begins to its addition or concatenation, and its shortcut.

    Attributes:
      kind: ``"residual"`` or ``"dense"``.
      end: the operand of the addition or concatenation.
      own: bit set of the nodes on the main path only.
      shortcut: bit set of the nodes on the shortcut only.
    """

    kind: str
    end: int
    own: int
    shortcut: int


@dataclasses.dataclass(frozen=True)
class Fate:
    """What happens to one call of a batch norm: whether it goes, why, and on whose main path it is."""

    goes: bool
    why: str
    branch: Branch | None = None


def find_branches(graph: LayerGraph) -> tuple[list[Branch], list[tuple[int, str]]]:
    """Return the branches, and the batch norms ahead of additions that are no residual blocks."""
    branches, unclear = [], []
    for node in graph.nodes:
        if node.op == "add" and len(node.inputs) == 2:
            a, b = node.inputs
            own = [graph.before[a] & ~graph.before[b], graph.before[b] & ~graph.before[a]]
            count = [graph.weights(bits) for bits in own]
            shared = graph.before[a] & graph.before[b]
            if not shared or max(count) == 0:
                continue
            main = count.index(max(count))
            if count[0] != count[1] and min(count) <= 1:
                end = (a, b)[main]
                branches.append(Branch("residual", end, own[main], own[1 - main]))
            else:
                why = (
                    "ahead of an addition whose sides have equally many layers"
                    if count[0] == count[1]
                    else "ahead of an addition of two long branches"
                )
                unclear += [(n, why) for n in graph.layers("batch_norm", own[0] | own[1])]
        elif node.op == "concatenate" and len(node.inputs) > 1:
            branches += _dense(graph, node.inputs)
    return branches, unclear


def _dense(graph: LayerGraph, parts: Sequence[int]) -> list[Branch]:
    """Return the branch of a dense block: norm, layer, norm, layer, appended to its own input."""
    own = [
        graph.before[part]
        & ~functools.reduce(int.__or__, (graph.before[p] for p in parts if p != part), 0)
        for part in parts
    ]
    grown = [i for i, bits in enumerate(own) if graph.weights(bits)]
    if len(grown) != 1:
        return []
    bits = own[grown[0]]
    norms = graph.layers("batch_norm", bits)
    layers = graph.layers(None, bits)
    kinds = [graph.call(i).kind for i in layers]
    # Exactly this order: the branch of a U-net, which also ends at a concatenation, is no such.
    if kinds != ["batch_norm", "weight"] * 2 or not _in_a_row(graph, layers, norms):
        return []
    return [Branch("dense", parts[grown[0]], bits, 0)]


def _in_a_row(graph: LayerGraph, layers: Sequence[int], norms: Sequence[int]) -> bool:
    pairs = itertools.pairwise(layers)
    return len(norms) == 2 and all(graph.nearest(b) == [a] for a, b in pairs)


def fates_of_norms(graph: LayerGraph, *, shortcut: bool) -> dict[int, Fate]:
    """Return for each call of a batch norm whether it goes.

    Args:
      graph: the model's graph.
      shortcut: keep the norms of projection shortcuts.
    """
    branches, unclear = find_branches(graph)
    fates = dict.fromkeys(graph.layers("batch_norm"), Fate(False, "in no block"))
    fates |= {norm: Fate(False, why) for norm, why in unclear}
    middle, around = _inverted(graph)
    # The innermost block that holds a norm decides; sizes grow outwards.
    order = sorted(branches, key=lambda b: (b.own | b.shortcut).bit_count(), reverse=True)
    for branch in order:
        norms = graph.layers("batch_norm", branch.own)
        fates |= {norm: _fate(graph, norm, norms, branch) for norm in norms}
        for norm in graph.layers("batch_norm", branch.shortcut):
            fates[norm] = Fate(not shortcut, "on the shortcut")
    for norm in around:
        why = "around the depthwise convolution's, which goes"
        fates[norm] = dataclasses.replace(fates[norm], goes=False, why=why)
    for norm in middle:
        why = "after a depthwise convolution, between two norms that stay"
        fates[norm] = dataclasses.replace(fates[norm], goes=True, why=why)
    return fates


def _fate(graph: LayerGraph, norm: int, norms: Sequence[int], branch: Branch) -> Fate:
    later = [n for n in norms if n != norm and graph.before[n] >> norm & 1]
    if not later:
        what = "addition" if branch.kind == "residual" else "concatenation"
        return Fate(False, f"the last of its branch before the {what}", branch)
    why = "an earlier one of its branch" if branch.kind == "residual" else "after the concatenation"
    return Fate(True, f"{why}; {graph.call(later[-1]).path} stays", branch)


def _inverted(graph: LayerGraph) -> tuple[list[int], list[int]]:
    """Return the norms after depthwise convolutions of inverted residuals, and those around.

    The chain is: a layer with more outputs than inputs, norm, depthwise convolution, norm, a layer
    with fewer outputs than inputs, norm; anything without weights may lie between, and a
    squeeze-and-excite.
    """
    middle, around = [], []
    for norm in graph.layers("batch_norm"):
        deep = layer_ahead(graph, norm)
        if deep is None or not _depthwise(graph.call(deep)):
            continue
        up = graph.nearest(deep)
        if len(up) != 1 or graph.call(up[0]).kind != "batch_norm":
            continue
        first = layer_ahead(graph, up[0])
        if first is None or _width(graph, first) <= 1:
            continue
        last = [
            after
            for layer in graph.nearest(norm, down=True)
            if graph.call(layer).kind == "weight" and _width(graph, layer) < 1
            for after in graph.nearest(layer, down=True)
            if layer_ahead(graph, after) == layer and graph.call(after).kind == "batch_norm"
        ]
        if last:
            middle.append(norm)
            around += [up[0], *last]
    return middle, around


def _depthwise(call: LayerCall) -> bool:
    groups = getattr(call.layer, "feature_group_count", 1)
    return call.kind == "weight" and bool(call.inputs) and 1 < groups == call.inputs[-1]


def _width(graph: LayerGraph, layer: int) -> float:
    call = graph.call(layer)
    known = call.inputs and call.output and not _depthwise(call)
    return call.output[-1] / call.inputs[-1] if known else 1.0


def layer_ahead(graph: LayerGraph, node: int) -> int | None:
    """Return the layer with weights whose result a node gets as it is, or None."""
    found = graph.ahead(node)
    if len(found) == 1 and graph.nodes[found[0]].call is not None:
        return found[0] if graph.call(found[0]).kind == "weight" else None
    return None


def needs_bias(graph: LayerGraph, norm: int) -> bool:
    """Say whether a norm is all that shifts what the layer ahead of it gives."""
    layer = layer_ahead(graph, norm)
    return layer is not None and not has_bias(graph.call(layer).layer)


# What may stand between the end of a branch and a factor 0 at its last layer, so that the factor
# still learns: nothing that is flat at 0, such as ReLU.
_KEEPS_SLOPE = TRANSPARENT | {
    "mul",
    "select_n",
    "div",
    "transpose",
    "cond",
    "pad",
    "plus",
    "add",
    "neg",
}


def gain_place(graph: LayerGraph, branch: Branch) -> int | None:
    """Return the layer at whose result a branch's scalar goes: its last norm, or its last layer."""
    found: list[int] = []
    queue = [branch.end]
    while queue:
        at = queue.pop(0)
        if not branch.own >> at & 1:
            continue
        if graph.nodes[at].call is not None:
            found.append(at)
        elif graph.nodes[at].op in _KEEPS_SLOPE:
            queue += graph.nodes[at].inputs
    norms = [i for i in found if graph.call(i).kind == "batch_norm"]
    layers = [i for i in found if graph.call(i).kind == "weight"]
    return next(iter([*norms, *layers]), None)
