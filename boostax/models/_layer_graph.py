"""The graph of a model's layers, read from its traced forward pass.

Each call of a layer is one node, whatever it does inside; the operations between layers are nodes
of their own. Nothing is computed: the model is traced with abstract inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from boostax import _compat
from boostax.models._calls import init_call, split_arrays, watched
from boostax.models._kinds import REPARAMETRIZED, kind_of
from boostax.models._surgery_nnx import named_modules

__all__ = ["LayerCall", "LayerGraph", "Node", "layer_graph"]

_IN, _OUT = "layer in ", "layer out "
# Operations that change no value of their input, other than its shape, order or dtype.
TRANSPARENT = {"convert_element_type", "reshape", "squeeze", "expand_dims", "name", "copy"}
TRANSPARENT |= {
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
    "layout_constraint",
}


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
      path: the layer's path.
      kind: ``"batch_norm"``, ``"norm"`` or ``"weight"``.
      layer: the layer: an unbound linen module, or the nnx model's own module.
      inputs: shape of the first argument.
      output: shape of the result.
      dtype: dtype of the result.
      normalizes_batch: for a batch norm, whether it takes the batch's own statistics.
      made_by: the type of the module that makes the layer's kernel anew at each call, or "".
    """

    path: str
    kind: str
    layer: Any
    inputs: tuple[int, ...]
    output: tuple[int, ...]
    dtype: Any = None
    normalizes_batch: bool = False
    made_by: str = ""

    @property
    def type(self) -> str:
        """The name of the layer's class."""
        return type(self.layer).__name__


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

    def ahead(self, node: int, through: frozenset[str] | set[str] = TRANSPARENT) -> list[int]:
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
    calls: list[LayerCall] = []
    if isinstance(model, nnx.Module):
        arrays, call = _nnx_call(model, args, kwargs, method, calls)
        jaxpr = jax.make_jaxpr(call)(arrays)
    else:
        arrays, run = init_call(model, args, kwargs, rngs=rngs, method=method)

        makers: list[str] = []

        def watch(path: str, layer: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
            kind = kind_of(layer)
            if isinstance(layer, REPARAMETRIZED):
                makers.append(type(layer).__name__)
                out = call(*args, **kwargs)
                makers.pop()
                return out
            if kind is None:
                return call(*args, **kwargs)
            mark = _Mark(None, path, layer.clone(parent=None), "".join(makers[-1:]), calls)
            return _marked(mark, kind, call, args, kwargs)

        with watched(watch):
            jaxpr = jax.make_jaxpr(lambda arrays: run(arrays)[0])(arrays)
    graph = LayerGraph()
    ids = [graph.add(Node("input")) for _ in arrays]
    reader = _Reader(graph, calls)
    graph.outputs = tuple(i for i in reader.read(jaxpr.jaxpr, ids) if i is not None)
    graph.opaque = tuple(dict.fromkeys(reader.opaque))
    return graph


def _nnx_call(
    model: nnx.Module, args: Any, kwargs: Any, method: str | None, calls: list[LayerCall]
) -> tuple[list[Any], Any]:
    copy = nnx.clone(model)
    trace, originals = object(), named_modules(model)
    made = [(path, m) for path, m in originals.items() if isinstance(m, REPARAMETRIZED)]
    for path, module in named_modules(copy).items():
        if kind_of(module) is not None:
            # An attribute that no other trace has: nnx.jit reuses traces of equal models.
            maker = next((type(m).__name__ for p, m in made if _below(path, p)), "")
            module._layer_mark = _Mark(trace, path, originals[path], maker, calls)  # pyright: ignore
            object.__setattr__(module, "__class__", _marking(type(module)))
    arrays, rebuild = split_arrays(args, kwargs)
    graphdef, state = nnx.split(copy)

    def call(arrays: Sequence[Any]) -> Any:
        merged = nnx.merge(graphdef, state, copy=True)
        args, kwargs = rebuild(arrays)
        out = getattr(merged, method or "__call__")(*args, **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

    return arrays, call


def _below(path: str, other: str) -> bool:
    return path.startswith(f"{other}/") or not other


@dataclasses.dataclass(frozen=True)
class _Mark:
    trace: Any
    path: str
    layer: Any = dataclasses.field(compare=False)
    made_by: str
    calls: Any = dataclasses.field(compare=False)


@functools.cache
def _marking(base: type) -> type:
    """Return a subclass of a layer's class that marks where its calls begin and end."""
    plain = base.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark: _Mark = self._layer_mark
        kind = kind_of(self) or ""
        run = functools.partial(plain, self)
        return _marked(mark, kind, run, args, kwargs)

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _marked(mark: _Mark, kind: str, call: Any, args: Any, kwargs: Any) -> Any:
    path, layer, calls = mark.path, mark.layer, mark.calls
    number = len(calls)
    # Held first: layers inside this one come after it.
    calls.append(LayerCall(path, kind, layer, (), ()))
    first, args, kwargs = _mark_first(f"{_IN}{number}", args, kwargs)
    out = call(*args, **kwargs)
    own = kind == "batch_norm" and not _uses_average(layer, args, kwargs)
    shape = tuple(getattr(out, "shape", ()))
    dtype = getattr(out, "dtype", None)
    calls[number] = LayerCall(path, kind, layer, first, shape, dtype, own, mark.made_by)
    end = lambda leaf: checkpoint_name(leaf, f"{_OUT}{number}") if _is_array(leaf) else leaf
    return jax.tree.map(end, out)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _mark_first(name: str, args: Any, kwargs: Any) -> tuple[tuple[int, ...], Any, Any]:
    if args and isinstance(args[0], jax.Array):
        return tuple(args[0].shape), (checkpoint_name(args[0], name), *args[1:]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, jax.Array) and not args:
            return tuple(value.shape), args, {**kwargs, key: checkpoint_name(value, name)}
    return (), args, kwargs


def _uses_average(layer: Any, args: Any, kwargs: Any) -> bool:
    given = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
    return bool(layer.use_running_average if given is None else given)


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
        if op == "name" and eqn.params["name"].startswith((_IN, _OUT)):
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
        if name.startswith(_IN):
            self.open.append((int(name.removeprefix(_IN)), at))
            return at
        number = int(name.removeprefix(_OUT))
        if number not in self.ended:
            _, entered = self.open.pop()
            apart = entered is not None and not self.open
            node = Node("layer", (entered,), self.calls[number]) if apart else None  # pyright: ignore
            self.ended[number] = self.graph.add(node) if node else entered
        return self.ended[number]

    def _note_layers(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name" and eqn.params["name"].startswith(_OUT):
                number = int(eqn.params["name"].removeprefix(_OUT))
                self.opaque.append(self.calls[number].path)
            for jaxprs in _compat.inner_jaxprs(eqn).values():
                for each in jaxprs:
                    self._note_layers(each)
