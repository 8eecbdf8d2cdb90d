"""Which scale each value's cotangent is carried at: a label for every equation of a loss's jaxpr.

Labels are group numbers, 1 to n; 0 and n + 1 stand for the scale 1. A leaf has its group's label, an
equation that a leaf goes into that label too, any other equation that of the latest value that goes
into it. Where an equation takes a value of another label stands a boundary. Any labels would give
the right gradients, since each boundary only moves a cotangent from one scale to another; these put
each layer's backward step at the scale of its own group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from boostax import _compat
from boostax.gradients._boundary import marked
from boostax.gradients._find import INLINED, REMAT, Place

__all__ = ["Cut", "Labels", "label_jaxpr"]


class Fact(NamedTuple):
    """What is known of a value that has a cotangent.

    Attributes:
      label: its label.
      leaf: whether it is made of parameters alone.
      when: the number of the equation that made it, in the order of the program.
    """

    label: int
    leaf: bool
    when: int = -1


@dataclasses.dataclass(frozen=True)
class Cut:
    """A boundary, ahead of one operand of an equation.

    Attributes:
      operand: the operand's number.
      source: the label of the value.
      target: the label of the equation.
      lengths: how often each scan around it runs, outermost first.
      what: the operand and the equation, in words.
    """

    operand: int
    source: int
    target: int
    lengths: tuple[int, ...]
    what: str


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of a jaxpr.

    Attributes:
      cuts: the boundaries, by the place of the equation, in the order of the program.
      at: the label of every equation that was looked at; what is not in it has no cotangent.
      outs: the label of each result, None where it has no cotangent.
      scans: where the scans are.
    """

    cuts: Mapping[Place, tuple[Cut, ...]]
    at: Mapping[Place, int]
    outs: tuple[int | None, ...]
    scans: Mapping[Place, tuple[int, bool]]

    def order(self) -> np.ndarray:
        """Return for each reading of :meth:`readings` its rank in the order of the program."""
        keys: list[tuple[float, ...]] = []
        for at, cuts in self.cuts.items():
            for cut in cuts:
                for turn in np.ndindex(*cut.lengths):
                    # Ahead of all that is in the equation, whatever its number.
                    keys.append((*self._key(at, turn), -math.inf, cut.operand))
        rank = np.empty(len(keys), np.int32)
        rank[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
        return rank

    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels before and behind the boundary of each reading."""
        pairs = [
            (cut.source, cut.target)
            for cuts in self.cuts.values()
            for cut in cuts
            for _ in range(math.prod(cut.lengths))
        ]
        both = np.asarray(pairs, np.int32).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _key(self, at: Place, turn: tuple[int, ...]) -> tuple[int, ...]:
        key: list[int] = []
        turns = iter(turn)
        for n, index in enumerate(at, 1):
            key.append(index)
            if n < len(at) and at[:n] in self.scans:
                _, backwards = self.scans[at[:n]]
                step = next(turns)
                key.append(-step if backwards else step)
        return tuple(key)


def label_jaxpr(jaxpr: Any, leaves: Sequence[int | None], groups: int) -> Labels:
    """Label a jaxpr.

    Args:
      jaxpr: an open or closed jaxpr.
      leaves: for each of its inputs the group of a leaf that is differentiated, 1 to ``groups``; None
        for all that has no cotangent.
      groups: how many groups there are.

    Raises:
      ValueError: a boundary that the user placed does not fit.
    """
    walk = _Walk(groups)
    facts = [None if label is None else Fact(label, True) for label in leaves]
    outs = walk.run(_compat.open_jaxpr(jaxpr), facts, (), ())
    cuts = {at: tuple(walk.cuts[at][i] for i in sorted(walk.cuts[at])) for at in sorted(walk.cuts)}
    labels = tuple(None if fact is None else fact.label for fact in outs)
    return Labels(cuts, walk.at, labels, walk.scans)


class _Walk:
    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.cuts: dict[Place, dict[int, Cut]] = {}
        self.at: dict[Place, int] = {}
        self.scans: dict[Place, tuple[int, bool]] = {}
        self.time = 0

    def run(
        self,
        jaxpr: Any,
        facts: Sequence[Fact | None],
        place: Place,
        lengths: tuple[int, ...],
    ) -> list[Fact | None]:
        known: dict[Any, Fact | None] = dict.fromkeys(jaxpr.constvars)
        known.update(zip(jaxpr.invars, facts, strict=True))
        read = lambda atom: None if hasattr(atom, "val") else known[atom]
        for index, eqn in enumerate(jaxpr.eqns):
            self.time += 1
            at = (*place, index)
            given = [read(atom) for atom in eqn.invars]
            known.update(zip(eqn.outvars, self.equation(eqn, given, at, lengths), strict=True))
        self.before_casts(jaxpr, place, lengths)
        return [read(atom) for atom in jaxpr.outvars]

    def equation(
        self, eqn: Any, facts: list[Fact | None], at: Place, lengths: tuple[int, ...]
    ) -> list[Fact | None]:
        name = eqn.primitive.name
        if name == "stop_gradient":
            return [None] * len(eqn.outvars)
        if name in INLINED | REMAT:
            return self.run(_compat.called(eqn)[0], facts, at, lengths)
        if name == "scan":
            return self.scan(eqn, facts, at, lengths)
        mark = marked(eqn)
        if mark is not None:
            return self.placed(eqn, facts[0], mark, at, lengths)
        return self.whole(eqn, facts, at, lengths)

    def whole(
        self, eqn: Any, facts: list[Fact | None], at: Place, lengths: tuple[int, ...]
    ) -> list[Fact | None]:
        """Give one label to an equation, whatever is in it."""
        _refuse_marks(eqn)
        label = _label(eqn, facts)
        if label is None:
            return [None] * len(eqn.outvars)
        self.at[at] = label
        for operand, fact in enumerate(facts):
            self.cut(eqn, at, operand, fact, label, lengths)
        leaf = all(fact.leaf for fact in facts if fact is not None) and not any(
            fact is None and not hasattr(atom, "val") and atom.aval.shape
            for fact, atom in zip(facts, eqn.invars, strict=True)
        )
        return [
            Fact(label, leaf, self.time) if jnp.issubdtype(out.aval.dtype, jnp.inexact) else None
            for out in eqn.outvars
        ]

    def placed(
        self,
        eqn: Any,
        fact: Fact | None,
        mark: tuple[int, int],
        at: Place,
        lengths: tuple[int, ...],
    ) -> list[Fact | None]:
        """Follow a boundary that the user placed."""
        before, after = mark
        if max(mark) > self.groups + 1:
            raise ValueError(
                f"GroupLossScale: a boundary stands between {before} and {after}, but there are "
                f"{self.groups} groups; the ends are 0 and {self.groups + 1}"
            )
        if fact is None:
            return [None]
        if fact.label != before and self._scaled(fact.label) + self._scaled(before) > 0:
            raise ValueError(
                f"GroupLossScale: a boundary says that it stands behind {self.word(before)}, but the "
                f"value there comes from {self.word(fact.label)}; call it with "
                f"({fact.label}, {after})"
            )
        self.at[at] = after
        self.cut(eqn, at, 0, fact, after, lengths)
        return [Fact(after, False, self.time)]

    def scan(
        self, eqn: Any, facts: list[Fact | None], at: Place, lengths: tuple[int, ...]
    ) -> list[Fact | None]:
        body = _compat.called(eqn)[0]
        fixed, carried = _compat.scan_parts(eqn)
        self.scans[at] = eqn.params["length"], eqn.params["reverse"]
        carry = [f and f._replace(leaf=False) for f in facts[fixed : fixed + carried]]
        inner = (*lengths, eqn.params["length"])
        for _ in range(self.groups + 3):
            self.forget(at)
            given = [*facts[:fixed], *carry, *facts[fixed + carried :]]
            outs = self.run(body, given, at, inner)
            ends = [
                before if after is None else Fact(after.label, False, self.time)
                for before, after in zip(carry, outs, strict=False)
            ]
            if [f and f.label for f in ends] == [f and f.label for f in carry]:
                break
            carry = ends
        else:
            # What is carried changes its label at every turn: then the loop is one.
            self.forget(at)
            return self.whole(eqn, facts, at, lengths)
        for number, fact in enumerate(carry):
            if fact is not None:
                operand = fixed + number
                self.cut(eqn, at, operand, facts[operand], fact.label, lengths)
        over = [f and Fact(f.label, False, self.time) for f in outs[carried:]]
        return [*[f and f._replace(when=self.time) for f in carry], *over]

    def cut(
        self,
        eqn: Any,
        at: Place,
        operand: int,
        fact: Fact | None,
        label: int,
        lengths: tuple[int, ...],
    ) -> None:
        if fact is None or self.same(fact.label, label):
            return
        aval = eqn.invars[operand].aval
        shape = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
        what = f"{shape} into {eqn.primitive.name}"
        cuts = self.cuts.setdefault(at, {})
        cuts[operand] = Cut(operand, fact.label, label, lengths, what)

    def before_casts(self, jaxpr: Any, place: Place, lengths: tuple[int, ...]) -> None:
        """Move boundaries behind a cast to fewer bits ahead of it: float32 loses nothing there."""
        for index, eqn in enumerate(jaxpr.eqns):
            if not _narrows(eqn) or eqn.outvars[0] in jaxpr.outvars:
                continue
            uses = [
                ((*place, j), operand)
                for j, user in enumerate(jaxpr.eqns)
                for operand, atom in enumerate(user.invars)
                if atom is eqn.outvars[0]
            ]
            found = [self.cuts.get(at, {}).get(operand) for at, operand in uses]
            if not found or None in found or len({c.target for c in found if c}) > 1:
                continue
            cut: Any = found[0]
            own = (*place, index)
            if 0 in self.cuts.get(own, {}):
                continue
            for at, operand in uses:
                del self.cuts[at][operand]
                if not self.cuts[at]:
                    del self.cuts[at]
            self.at[own] = cut.target
            self.cut(eqn, own, 0, Fact(cut.source, False), cut.target, lengths)

    def forget(self, place: Place) -> None:
        inside = lambda at: len(at) > len(place) and at[: len(place)] == place
        for known in (self.cuts, self.at, self.scans):
            for at in [at for at in known if inside(at)]:
                del known[at]

    def same(self, a: int, b: int) -> bool:
        return a == b or self._scaled(a) == self._scaled(b) == 0

    def word(self, label: int) -> str:
        return f"group {label}" if self._scaled(label) else "an end (scale 1)"

    def _scaled(self, label: int) -> int:
        """Return the label, or 0 for both ends."""
        return label if label <= self.groups else 0


def _label(eqn: Any, facts: Sequence[Fact | None]) -> int | None:
    data = [fact for fact in facts if fact is not None and not fact.leaf]
    leaves = [(i, fact) for i, fact in enumerate(facts) if fact is not None and fact.leaf]
    latest = max(data, key=lambda fact: fact.when).label if data else None
    if data and eqn.primitive.name in ("add", "sub", "add_any"):
        # A penalty on the parameters that is added to the loss makes no layer of it.
        leaves = [(i, fact) for i, fact in leaves if math.prod(eqn.invars[i].aval.shape) > 1]
    labels = {fact.label for _, fact in leaves}
    if not labels:
        return latest
    if len(labels) == 1:
        return labels.pop()
    return latest if latest in labels else max(labels)


def _narrows(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    both = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return both and jnp.dtype(new).itemsize < jnp.dtype(old).itemsize


def _refuse_marks(eqn: Any) -> None:
    """Raise where a boundary was placed inside something that is one equation for the labels."""
    for jaxprs in _compat.inner_jaxprs(eqn).values():
        for jaxpr in jaxprs:
            for inner in jaxpr.eqns:
                if marked(inner) is not None:
                    raise ValueError(
                        f"GroupLossScale: a boundary stands inside {eqn.primitive.name}, whose "
                        "derivative can't be taken apart; place it outside"
                    )
                _refuse_marks(inner)
