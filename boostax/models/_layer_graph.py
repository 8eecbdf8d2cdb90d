"""The graph of a model's layers, read from its traced forward pass.

Each call of a layer is one node, whatever it does inside; the operations between layers are nodes
of their own. Nothing is computed: the model is traced with abstract inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from boostax import _compat
from boostax.models._layer_marks import IN, OUT, LayerCall, marked_jaxpr

__all__ = ["TRANSPARENT", "LayerCall", "LayerGraph", "Node", "layer_graph"]

# Operations that change no value of their input, other than its shape, order or dtype.
TRANSPARENT = {"convert_element_type", "reshape", "squeeze", "expand_dims", "name", "copy"}
TRANSPARENT |= {
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
    "layout_constraint",
}


@dataclasses.dataclass(frozen=True)
class Node:
    """A value that depends on the model's inputs.

    Attributes:
      op: ``"input"``, ``"layer"``, ``"add"`` and ``"concatenate"`` of such values, or the name of
        another primitive.
      inputs: the nodes it is made from.
      call: the call, for a layer.
    """

    op: str
    inputs: tuple[int, ...] = ()
    call: LayerCall | None = None


class LayerGraph:
    """Nodes in the order of the forward pass, each with all those it depends on.

    Attributes:
      nodes: the nodes.
      before: for each node, a bit set of the nodes it depends on, itself included.
      users: for each node, the nodes made from it.
      outputs: the nodes of the model's results.
      opaque: paths of layers inside loops and the like, which can't be followed.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.before: list[int] = []
        self.users: list[list[int]] = []
        self.outputs: tuple[int, ...] = ()
        self.opaque: tuple[str, ...] = ()

    def add(self, node: Node) -> int:
        """Append a node and return its number."""
        number = len(self.nodes)
        self.nodes.append(node)
        self.before.append(functools.reduce(int.__or__, (self.before[i] for i in node.inputs), 0))
        self.before[number] |= 1 << number
        self.users.append([])
        for i in set(node.inputs):
            self.users[i].append(number)
        return number

    def layers(self, kind: str | None = None, among: int = -1) -> list[int]:
        """Return the nodes of layers of one kind, in a bit set of nodes (default: all)."""
        return [
            i
            for i, node in enumerate(self.nodes)
            if node.call is not None and among >> i & 1 and kind in (None, node.call.kind)
        ]

    def weights(self, among: int) -> int:
        """Count the layers with weights in a bit set, and bare products with weights."""
        ops = ("dot_general", "conv_general_dilated")
        return sum(
            (n.op in ops and len(n.inputs) == 1) or (n.call is not None and n.call.kind == "weight")
            for i, n in enumerate(self.nodes)
            if among >> i & 1
        )

    def ahead(self, node: int, through: Set[str] = frozenset(TRANSPARENT)) -> list[int]:
        """Return the nodes that feed this one directly, or through some operations only."""
        found: list[int] = []
        queue = list(self.nodes[node].inputs)
        while queue:
            at = queue.pop(0)
            if self.nodes[at].op in through:
                queue += self.nodes[at].inputs
            elif at not in found:
                found.append(at)
        return found

    def call(self, node: int) -> LayerCall:
        """Return the call of a layer's node."""
        call = self.nodes[node].call
        assert call is not None
        return call

    def goes_only_to(
        self, node: int, users: Set[int], through: Set[str] = frozenset(TRANSPARENT)
    ) -> bool:
        """Say whether a value goes nowhere but to some nodes, directly or through operations."""
        queue = [node]
        while queue:
            at = queue.pop()
            if at in self.outputs:
                return False
            for user in self.users[at]:
                if self.nodes[user].op in through:
                    queue.append(user)
                elif user not in users:
                    return False
        return True

    def nearest(self, node: int, *, down: bool = False) -> list[int]:
        """Return the next layers up (or down) from a node, whatever operations lie between."""
        found: list[int] = []
        seen = set()
        step = (lambda i: self.users[i]) if down else (lambda i: self.nodes[i].inputs)
        queue = list(step(node))
        while queue:
            at = queue.pop()
            if at in seen:
                continue
            seen.add(at)
            if self.nodes[at].call is not None:
                found.append(at)
            else:
                queue += step(at)
        return sorted(found)


def layer_graph(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rngs: Any = None,
    method: str | None = None,
) -> LayerGraph:
    """Trace a model's forward pass, and return the graph of its layers.

    Args:
      model: an unbound linen module, or an nnx module (it is not touched).
      args: example inputs; abstract ones do.
      kwargs: keyword arguments of the call.
      rngs: linen only, a key or a dict of them.
      method: the name of the method that is called. Default None: ``__call__``.
    """
    jaxpr, inputs, calls = marked_jaxpr(model, args, kwargs, rngs=rngs, method=method)
    graph = LayerGraph()
    reader = _Reader(graph, calls)
    ids: list[int | None] = [graph.add(Node("input")) for _ in range(inputs)]
    found = reader.read(jaxpr, ids + [None] * (len(jaxpr.invars) - inputs))
    graph.outputs = tuple(i for i in found if i is not None)
    graph.opaque = tuple(dict.fromkeys(reader.opaque))
    return graph


class _Reader:
    """Reads a jaxpr into a graph; a value that does not depend on the inputs has number None."""

    def __init__(self, graph: LayerGraph, calls: Sequence[LayerCall]):
        self.graph, self.calls = graph, calls
        # Layers whose calls have begun, with what they got; and what those that ended gave.
        self.open: list[tuple[int, int | None]] = []
        self.ended: dict[int, int | None] = {}
        self.opaque: list[str] = []

    def read(self, jaxpr: Any, ids: Sequence[int | None]) -> list[int | None]:
        known = dict(zip(jaxpr.invars, ids, strict=True))
        look = lambda atom: None if hasattr(atom, "val") else known.get(atom)
        for eqn in jaxpr.eqns:
            known.update(
                zip(eqn.outvars, self._equation(eqn, list(map(look, eqn.invars))), strict=True)
            )
        return [look(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, ids: list[int | None]) -> list[int | None]:
        op = eqn.primitive.name
        if op == "name" and eqn.params["name"].startswith((IN, OUT)):
            return [self._mark(eqn.params["name"], ids[0])]
        if self.open:
            # Inside a layer. Its statistics may leave it otherwise than by its result.
            return [next((i for i in ids if i is not None), None)] * len(eqn.outvars)
        inner = _compat.inner_jaxprs(eqn)
        if op == "cond":
            outs = [self.read(branch, ids[1:]) for branch in inner["branches"]]
            return [self._joined(op, [*each]) for each in zip(*outs, strict=True)]
        if inner and op != "while":
            held = [j for jaxprs in inner.values() for j in jaxprs if len(j.invars) == len(ids)]
            if held and len(held[0].outvars) == len(eqn.outvars):
                return self.read(held[0], ids)
        for jaxprs in inner.values():
            for jaxpr in jaxprs:
                self._note_layers(jaxpr)
        return [self._joined(op, ids)] * len(eqn.outvars)

    def _joined(self, op: str, ids: Sequence[int | None]) -> int | None:
        inputs = tuple(i for i in ids if i is not None)
        if not inputs:
            return None
        if op == "cond" and len(set(inputs)) == 1:
            return inputs[0]
        if op in ("add", "add_any", "concatenate"):
            op = "plus" if len(inputs) == 1 else op.removesuffix("_any")
        return self.graph.add(Node(op, inputs))

    def _mark(self, name: str, at: int | None) -> int | None:
        if name.startswith(IN):
            self.open.append((int(name.removeprefix(IN)), at))
            return at
        number = int(name.removeprefix(OUT))
        if number not in self.ended:
            _, entered = self.open.pop()
            apart = entered is not None and not self.open
            node = Node("layer", (entered,), self.calls[number]) if apart else None  # pyright: ignore
            self.ended[number] = self.graph.add(node) if node else entered
        return self.ended[number]

    def _note_layers(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(OUT):
                number = int(eqn.params["name"].removeprefix(OUT))
                self.opaque.append(self.calls[number].path)
            for jaxprs in _compat.inner_jaxprs(eqn).values():
                for each in jaxprs:
                    self._note_layers(each)
