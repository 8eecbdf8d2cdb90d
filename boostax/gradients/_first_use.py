"""Find where in a jaxpr each of its inputs is first used together with the data.

Each value of the jaxpr is either data (it depends on the batch), or made of parameters alone, or
neither. A leaf's use is the first equation in which something made of it alone meets data. So casts,
transposes, weight normalisation and penalties on the parameters, which may come before the forward
pass and in any order, say nothing about the order of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from boostax import _compat

# What a value may go through without having been put to use.
_VIEWS = frozenset(
    {
        *("convert_element_type", "reduce_precision", "copy", "name", "device_put"),
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "slice"),
        *("sharding_constraint", "optimization_barrier", "pvary"),
    }
)


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
      data: it depends on the batch.
      leaves: otherwise, the parameter leaves that it is made of.
    """

    data: bool = False
    leaves: tuple[int, ...] = ()


def first_uses(jaxpr: Any, facts: Sequence[Fact]) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by leaf, when it first meets data, and when it is first touched at all.

    Args:
      jaxpr: an open or closed jaxpr.
      facts: one :class:`Fact` for each of its inputs.

    Returns:
      Two dicts from leaf to a running number; leaves to which it never happens are absent.
    """
    walk = _Walk()
    walk.run(_compat.open_jaxpr(jaxpr), facts)
    return walk.met, walk.touched


class _Walk:
    def __init__(self) -> None:
        self.met: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        self.clock = 0
        self.recording = True

    def run(self, jaxpr: Any, facts: Sequence[Fact]) -> list[Fact]:
        known: dict[Any, Fact] = dict(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> Fact:
            return Fact() if hasattr(atom, "val") else known.get(atom, Fact())

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, facts: list[Fact]) -> list[Fact]:
        name = eqn.primitive.name
        inner = _compat.inner_jaxprs(eqn)
        if name == "scan":
            return self.scan(eqn, inner["jaxpr"][0], facts)
        if name == "while":
            return self.while_loop(eqn, inner, facts)
        if name == "cond":
            return self.cond(inner["branches"], facts)
        for called, *_ in inner.values():
            if len(called.invars) == len(facts) and len(called.outvars) == len(eqn.outvars):
                return self.run(called, facts)
        return [self.combine(facts, touches=name not in _VIEWS)] * len(eqn.outvars)

    def combine(self, facts: Sequence[Fact], *, touches: bool = True) -> Fact:
        """One step of arithmetic: the result's fact; leaves that meet data here are noted."""
        leaves = tuple(
            dict.fromkeys(leaf for fact in facts if not fact.data for leaf in fact.leaves)
        )
        data = any(fact.data for fact in facts)
        if self.recording and leaves:
            self.clock += 1
            if touches:
                for leaf in leaves:
                    self.touched.setdefault(leaf, self.clock)
            if data:
                self.meet(leaves)
        return Fact(True) if data else Fact(False, leaves)

    def meet(self, leaves: Sequence[int]) -> None:
        # Several leaves in one value meet the data at once; they go by when they were touched.
        late = self.clock + 1
        for leaf in sorted(leaves, key=lambda leaf: self.touched.get(leaf, late)):
            if leaf not in self.met:
                self.clock += 1
                self.met[leaf] = self.clock

    def settle(
        self, body: Any, fixed: list[Fact], carry: list[Fact], after: list[Fact]
    ) -> list[Fact]:
        """Return the facts of a loop's carry that hold in every round."""
        recording, self.recording = self.recording, False
        while True:
            outs = self.run(body, [*fixed, *carry, *after])[: len(carry)]
            joined = [_join(a, b) for a, b in zip(carry, outs, strict=True)]
            if joined == carry:
                self.recording = recording
                return carry
            carry = joined

    def scan(self, eqn: Any, body: Any, facts: list[Fact]) -> list[Fact]:
        def same(outer: Any, inner: Any) -> bool:
            return outer.aval.shape == inner.aval.shape

        # Carried results keep their shape, stacked ones gain an axis; the same holds for inputs.
        carried = sum(map(same, eqn.outvars, body.outvars))
        stacked = sum(not same(o, i) for o, i in zip(eqn.invars, body.invars, strict=True))
        split = len(facts) - stacked
        fixed, carry, after = (
            facts[: split - carried],
            facts[split - carried : split],
            facts[split:],
        )
        carry = self.settle(body, fixed, carry, after)
        return self.run(body, [*fixed, *carry, *after])

    def while_loop(self, eqn: Any, inner: dict[str, Any], facts: list[Fact]) -> list[Fact]:
        test, body = inner["cond_jaxpr"][0], inner["body_jaxpr"][0]
        carried = len(eqn.outvars)
        tested = len(test.invars) - carried
        fixed, carry = facts[tested : len(facts) - carried], facts[len(facts) - carried :]
        carry = self.settle(body, fixed, carry, [])
        again = self.run(test, [*facts[:tested], *carry])[0]
        outs = self.run(body, [*fixed, *carry])
        return [self.combine([again, out]) if again.data else out for out in outs]

    def cond(self, branches: Sequence[Any], facts: list[Fact]) -> list[Fact]:
        results = [self.run(branch, facts[1:]) for branch in branches]
        outs = results[0]
        for result in results[1:]:
            outs = [_join(a, b) for a, b in zip(outs, result, strict=True)]
        return [self.combine([facts[0], out]) for out in outs] if facts[0].data else outs


def _join(a: Fact, b: Fact) -> Fact:
    if a.data or b.data:
        return Fact(True)
    return Fact(False, tuple(sorted({*a.leaves, *b.leaves})))
