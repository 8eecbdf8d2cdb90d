"""Find the layers in a loss's jaxpr: where each parameter leaf multiplies data.

Nothing is evaluated. Every value gets a :mod:`fact <boostax.gradients._facts>`; a leaf is followed
through casts, reshapes and transposes, into jit, remat, scan and functions with derivatives of their
own, to the operations that use it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from boostax import _compat
from boostax.gradients._facts import Axes, Fact, Leaf, Made, Out, Spread, regrouped
from boostax.gradients._sites import Call, conv_call, dense_call, gather_call
from boostax.gradients._views import View

__all__ = ["Found", "Site", "find_layers"]

Place = tuple[int, ...]

# What keeps shape and meaning of a value.
SAME = frozenset(
    {"convert_element_type", "reduce_precision", "copy", "copy_p", "name", "device_put"}
    | {"sharding_constraint", "pvary", "pcast", "reshard", "layout_constraint"}
)
INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "named_call"})
REMAT = frozenset({"remat", "remat2", "checkpoint"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


@dataclasses.dataclass(frozen=True)
class Site:
    """One call of a layer.

    Attributes:
      place: the positions of its equation, and of those around it, in their jaxprs.
      leaf: the kernel's number.
      call: the operation.
      view: how the kernel's whole leaf becomes ``(groups, inputs, outputs)``, all slices together.
      scans: where the scans over slices of the kernel are, outermost first.
      lengths: how many slices each has.
      repeats: how often it runs with the same kernel, in other scans.
      eps: the machine epsilon of the coarsest of its dtypes.
      bias: the bias's number, and how its whole leaf becomes ``(groups, 1, outputs)``; or None.
      custom: the place of the function with a derivative of its own that it is the result of, and
        which of the results; or None.
    """

    place: Place
    leaf: int
    call: Call
    view: View
    scans: tuple[Place, ...]
    lengths: tuple[int, ...]
    repeats: int
    eps: float
    bias: tuple[int, View] | None = None
    custom: tuple[Place, int] | None = None

    @property
    def rows(self) -> int:
        """Rows that it sees of one slice in one forward pass."""
        return self.call.rows * self.repeats


@dataclasses.dataclass
class Found:
    """What was found.

    Attributes:
      sites: by place.
      others: for each leaf, how else it is used.
      penalised: the leaves in terms that are added to the loss and don't depend on the batch.
    """

    sites: dict[Place, Site]
    others: dict[int, list[str]]
    penalised: set[int]


def find_layers(jaxpr: Any, facts: Sequence[Fact]) -> Found:
    """Return the layers in a jaxpr.

    Args:
      jaxpr: an open or closed jaxpr.
      facts: what is known of each of its inputs.
    """
    walk = _Walk()
    walk.run(_compat.open_jaxpr(jaxpr), facts, ())
    others = {leaf: list(kinds) for leaf, kinds in walk.others.items()}
    return Found(walk.sites, others, walk.penalised)


class _Walk:
    def __init__(self) -> None:
        self.sites: dict[Place, Site] = {}
        self.others: dict[int, dict[str, None]] = collections.defaultdict(dict)
        self.made_by: dict[int, str] = {}
        self.penalised: set[int] = set()
        self.scans: list[tuple[Place, int]] = []

    def run(self, jaxpr: Any, facts: Sequence[Fact], place: Place) -> list[Fact]:
        known: dict[Any, Fact] = {v: Made() for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, facts, strict=True))
        uses = collections.Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not _literal(v))
        uses.update(v for v in jaxpr.outvars if not _literal(v))

        def read(atom: Any) -> Fact:
            if _literal(atom):
                return Made()
            fact = known[atom]
            # A bias added to one of several copies would miss the others' derivatives.
            return Made(data=True) if isinstance(fact, Out) and uses[atom] > 1 else fact

        for index, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(eqn, [read(atom) for atom in eqn.invars], (*place, index))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, facts: list[Fact], place: Place) -> list[Fact]:
        name = eqn.primitive.name
        if name in INLINED | REMAT:
            return self.run(_compat.called(eqn)[0], facts, place)
        if name == "scan":
            return self.scan(eqn, facts, place)
        if name in CUSTOM:
            return self.custom(eqn, facts, place)
        if len(eqn.outvars) == 1:
            found = self.seen(eqn, facts) or self.layer(eqn, facts, place) or self.bias(eqn, facts)
            if found is not None:
                return [found]
        return [self.combined(name, eqn, facts)] * len(eqn.outvars)

    def seen(self, eqn: Any, facts: list[Fact]) -> Fact | None:
        """Return the fact of a value that is the operand in another layout, or None."""
        name, fact = eqn.primitive.name, facts[0] if facts else None
        if isinstance(fact, (Leaf, Out, Spread)) and name in SAME:
            # An integer on the way has no derivative.
            return fact if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None
        shape = tuple(eqn.outvars[0].aval.shape)
        # A reshape can hold a transposition, as that of a mapped convolution does.
        first = eqn.params.get("dimensions") if name == "reshape" else None
        if isinstance(fact, Leaf):
            if name in ("reshape", "squeeze", "expand_dims") and len(facts) == 1:
                view = fact.view if first is None else fact.view.transpose(tuple(first))
                return fact.seen(view.reshape(*shape))
            if name == "transpose":
                return fact.seen(fact.view.transpose(tuple(eqn.params["permutation"])))
            if name == "rev":
                return fact.seen(fact.view.rev(tuple(eqn.params["dimensions"])))
            if name == "broadcast_in_dim":
                if math.prod(shape) == math.prod(fact.view.out_shape):
                    return fact.seen(fact.view.reshape(*shape))
                return Spread(fact, tuple(eqn.params["broadcast_dimensions"]))
        if isinstance(fact, Out):
            axes: Axes | None = None
            if name in ("reshape", "squeeze", "expand_dims") and len(facts) == 1:
                order = range(len(fact.axes)) if first is None else first
                axes = regrouped(tuple(fact.axes[axis] for axis in order), shape)
            elif name == "transpose":
                axes = tuple(fact.axes[axis] for axis in eqn.params["permutation"])
            if axes is not None:
                return Out(fact.site, axes, exact=False)
        return None

    def layer(self, eqn: Any, facts: list[Fact], place: Place) -> Fact | None:
        """Note a layer and return its output's fact, or None where this is none."""
        name = eqn.primitive.name
        if name not in ("dot_general", "conv_general_dilated", "gather"):
            return None
        kernels = [i for i, fact in enumerate(facts) if isinstance(fact, Leaf)]
        if len(kernels) != 1 or any(isinstance(fact, Spread) for fact in facts):
            return None
        (kernel,) = kernels
        leaf: Any = facts[kernel]
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        out = tuple(eqn.outvars[0].aval.shape)
        call: Call | str
        if name == "dot_general":
            numbers = eqn.params["dimension_numbers"]
            call = dense_call(numbers, kernel, shapes[kernel], shapes[1 - kernel])
        elif name == "conv_general_dilated":
            call = (
                conv_call(eqn.params, shapes[1], out) if kernel == 1 else "as a convolution's image"
            )
        else:
            call = (
                gather_call(eqn.params, shapes[0], out)
                if kernel == 0
                else "as the indices of gather"
            )
        if isinstance(call, str):
            self.others[leaf.index][call] = None
            return Made(data=True)
        over = leaf.scans
        inner = call.matrix
        view = View(leaf.view.shape, (*leaf.view.steps, *inner.steps))
        view = leaf.whole(view)
        if leaf.outside:
            view = view.reshape(math.prod(leaf.lengths) * inner.out_shape[0], *inner.out_shape[1:])
        self.sites[place] = Site(
            place=place,
            leaf=leaf.index,
            call=call,
            view=view,
            scans=over,
            lengths=leaf.lengths,
            repeats=math.prod(length for at, length in self.scans if at not in over),
            eps=max(float(jnp.finfo(v.aval.dtype).eps) for v in (eqn.invars[kernel], *eqn.outvars)),
        )
        return Out(place, call.axes)

    def bias(self, eqn: Any, facts: list[Fact]) -> Fact | None:
        """Note the bias of a layer whose output it is added to; None where this is something else."""
        if eqn.primitive.name != "add":
            return None
        out = next((fact for fact in facts if isinstance(fact, Out)), None)
        added = next((fact for fact in facts if isinstance(fact, (Leaf, Spread))), None)
        if out is None or added is None:
            return None
        site = self.sites[out.site]
        leaf = added if isinstance(added, Leaf) else added.leaf
        places = added.places if isinstance(added, Spread) else range(len(leaf.view.out_shape))
        view = _bias_view(leaf.view, tuple(places), out.axes, site.call.matrix.out_shape)
        if site.bias is not None or view is None or leaf.scans != site.scans:
            return None
        groups, _, outputs = site.view.out_shape
        whole = leaf.whole(view).reshape(groups, 1, outputs)
        self.sites[out.site] = dataclasses.replace(site, bias=(leaf.index, whole))
        return out

    def scan(self, eqn: Any, facts: list[Fact], place: Place) -> list[Fact]:
        body, length = _compat.called(eqn)[0], eqn.params["length"]
        consts, carried = _compat.scan_parts(eqn)
        fixed, carry, over = (
            [_plain(fact) for fact in facts[:consts]],
            facts[consts : consts + carried],
            facts[consts + carried :],
        )
        for fact in carry:
            self.use(_leaves(fact), "carried through a scan")
        slices: list[Fact] = []
        for fact in over:
            if isinstance(fact, Leaf):
                slices.append(fact.sliced(place))
            else:
                if isinstance(fact, Spread):
                    self.use(_leaves(fact), "broadcast and scanned over")
                slices.append(Made(data=True) if isinstance(fact, (Out, Spread)) else fact)
        self.scans.append((place, length))
        outs = self.run(body, [*fixed, *[Made(data=True)] * carried, *slices], place)
        self.scans.pop()
        results: list[Fact] = []
        for number, fact in enumerate(outs):
            leaves = _leaves(fact)
            if number < carried:
                self.use(leaves, "carried through a scan")
            for leaf in leaves:
                self.made_by.setdefault(leaf, "given out by a scan")
            results.append(Made(leaves, data=number < carried or not leaves))
        return results

    def custom(self, eqn: Any, facts: list[Fact], place: Place) -> list[Fact]:
        """Look into a function with a derivative of its own.

        That derivative is kept, so that a layer in it can only be watched from outside: where its
        output is the function's, and its derivative therefore what comes in.
        """
        known = set(self.sites)
        if not any(_leaves(fact) for fact in facts):
            return [self.combined(eqn.primitive.name, eqn, facts)] * len(eqn.outvars)
        given = [_plain(fact) for fact in facts]
        outs = self.run(_compat.called(eqn)[0], given, place)
        inside = "in a function with a derivative of its own"
        results: list[Fact] = []
        watched: set[Place] = set()
        for number, fact in enumerate(outs):
            if isinstance(fact, Out) and fact.exact and fact.site not in known:
                site = self.sites[fact.site]
                self.sites[fact.site] = dataclasses.replace(site, custom=(place, number))
                watched.add(fact.site)
                results.append(fact)
            else:
                # A view of a leaf too: its derivative may be another one.
                leaves = _leaves(fact)
                for leaf in leaves:
                    self.made_by.setdefault(leaf, inside)
                results.append(Made(leaves, data=not leaves))
        for at in set(self.sites) - known - watched:
            site = self.sites.pop(at)
            self.use({site.leaf} | ({site.bias[0]} if site.bias else set()), inside)
        return results

    def combined(self, name: str, eqn: Any, facts: list[Fact]) -> Fact:
        """Return the fact of a result of arithmetic; leaves that meet data in it are noted."""
        leaves = frozenset[int]().union(*(_leaves(fact) for fact in facts))
        for fact in facts:
            if isinstance(fact, (Leaf, Spread)):
                for leaf in _leaves(fact):
                    self.made_by.setdefault(leaf, name)
        if _compat.inner_jaxprs(eqn):
            self.use(leaves, f"in {name}")
            return Made(data=True)
        if not any(
            isinstance(fact, Out) or (isinstance(fact, Made) and fact.data) for fact in facts
        ):
            return Made(leaves)
        met = leaves
        if name in ("add", "sub", "add_any"):
            # A penalty on the parameters that is added to the loss is no use in a layer.
            met = frozenset[int]().union(
                *(
                    _leaves(fact)
                    for atom, fact in zip(eqn.invars, facts, strict=True)
                    if not (isinstance(fact, Made) and math.prod(atom.aval.shape) == 1)
                )
            )
            self.penalised |= leaves - met
        for leaf in met:
            self.use({leaf}, self.made_by.get(leaf, name))
        return Made(data=True)

    def use(self, leaves: Any, how: str) -> None:
        for leaf in leaves:
            self.others[leaf][how] = None


def _bias_view(
    view: View, places: tuple[int, ...], axes: Axes, matrix: tuple[int, ...]
) -> View | None:
    """Return how a bias becomes ``(groups, 1, outputs)``; None where it is no bias of the layer."""
    wanted = {part for dim in axes for part in dim if part[0] != "r" and part[1] != 1}
    parts: list[tuple[str, int]] = []
    for size, place in zip(view.out_shape, places, strict=True):
        if size == 1:
            continue
        dim = [part for part in axes[place] if part[1] != 1]
        if math.prod(length for _, length in dim) != size or any(k == "r" for k, _ in dim):
            return None
        parts += dim
    if set(parts) != wanted or len(parts) != len(wanted):
        return None
    order = sorted(range(len(parts)), key=lambda i: (parts[i][0][0] != "g", int(parts[i][0][1:])))
    groups, _, outputs = matrix
    if math.prod(length for _, length in parts) != groups * outputs:
        return None
    return (
        view.reshape(*(length for _, length in parts))
        .transpose(tuple(order))
        .reshape(groups, 1, outputs)
    )


def _plain(fact: Fact) -> Fact:
    return Made(data=True) if isinstance(fact, Out) else fact


def _leaves(fact: Fact) -> frozenset[int]:
    if isinstance(fact, Leaf):
        return frozenset({fact.index})
    if isinstance(fact, Spread):
        return frozenset({fact.leaf.index})
    return fact.leaves if isinstance(fact, Made) and not fact.data else frozenset()


def _literal(atom: Any) -> bool:
    return hasattr(atom, "val")
