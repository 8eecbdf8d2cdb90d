"""Evaluate a loss's jaxpr with its layers watched, and with boundaries between scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from boostax import _compat
from boostax.gradients._boundary import boundary
from boostax.gradients._find import CUSTOM, INLINED, REMAT, Place, Site
from boostax.gradients._labels import Labels
from boostax.gradients._scaled_pass import ratio_of
from boostax.gradients._tag import Reading, watched

__all__ = ["Emitted", "Watch"]


class Emitted(NamedTuple):
    """Zeros, whose cotangents are what was read.

    Attributes:
      layers: by the layer's place, the results of its reading.
      cuts: by the equation's place, for each boundary ahead of its operands the magnitudes, one for
        each turn of the scans around it.
    """

    layers: Mapping[Place, Any]
    cuts: Mapping[Place, Any]


class _Given(NamedTuple):
    """What goes along on the way through a jaxpr.

    Attributes:
      emitted: see :class:`Emitted`.
      active: bool scalars, which of the layers to read; those that are not in it are read.
      scales: float32, one a label.
      inputs: where not None, nothing is read; the layers' inputs are noted here.
    """

    emitted: Emitted
    active: Mapping[Place, Any]
    scales: Any
    inputs: dict[Place, Any] | None = None


class Watch:
    """An interpreter of one jaxpr.

    Args:
      sites: the layers to watch, by place.
      readings: what to read of each.
      labels: the boundaries; None: there are none.
    """

    def __init__(
        self,
        sites: Mapping[Place, Site],
        readings: Mapping[Place, Reading],
        labels: Labels | None = None,
    ):
        self._sites = {at: site for at, site in sites.items() if at in readings}
        self._readings = readings
        self._cuts = {} if labels is None else labels.cuts
        # The equations on the way to these have to be opened, all others are taken as they are.
        places = [*self._sites, *self._cuts]
        self._open = {at[:n] for at in places for n in range(1, len(at))}
        self._custom = {
            site.custom[0]: [
                s for s in self._sites.values() if s.custom and s.custom[0] == site.custom[0]
            ]
            for site in self._sites.values()
            if site.custom is not None
        }

    def zeros(self) -> Emitted:
        """Return what to pass for ``emitted``."""
        layers = {
            at: tuple(
                jnp.zeros((*self._sites[at].lengths, *shape), jnp.float32)
                for shape in reading.shapes()
            )
            for at, reading in self._readings.items()
        }
        cuts = {
            at: tuple(jnp.zeros(cut.lengths, jnp.float32) for cut in cuts)
            for at, cuts in self._cuts.items()
        }
        return Emitted(layers, cuts)

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Any],
        emitted: Emitted,
        active: Mapping[Place, Any] | None = None,
        scales: Any = None,
    ) -> list[Any]:
        """Return the results of the jaxpr.

        Args:
          jaxpr: the jaxpr that sites and labels were found in, with its constants.
          values: its inputs.
          emitted: zeros as :meth:`zeros` gives; what is read are their cotangents.
          active: bool scalars, which of the layers to read; None: all.
          scales: float32 scales, one a label; needed where there are boundaries.
        """
        consts = list(getattr(jaxpr, "consts", ()))
        given = _Given(emitted, active or {}, scales)
        return self._run(_compat.open_jaxpr(jaxpr), consts, values, (), given)

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], place: Place, along: _Given
    ) -> list[Any]:
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, values, strict=True))
        read = lambda atom: atom.val if hasattr(atom, "val") else known[atom]
        for index, eqn in enumerate(jaxpr.eqns):
            at = (*place, index)
            given = [read(atom) for atom in eqn.invars]
            if at in self._cuts and along.inputs is None:
                self._cut(at, given, along)
            if at in self._sites:
                outs = _compat.bind(eqn, given)
                data = given[1 - self._sites[at].call.kernel]
                if along.inputs is not None:
                    along.inputs[at] = data
                elif self._sites[at].custom is None:
                    outs = [self._watched(at, outs[0], data, along)]
            elif at in self._open:
                outs = self._opened(eqn, given, at, along)
            else:
                outs = _compat.bind(eqn, given)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _cut(self, at: Place, given: list[Any], along: _Given) -> None:
        for cut, zero in zip(self._cuts[at], along.emitted.cuts[at], strict=True):
            ratio = ratio_of(along.scales[cut.source], along.scales[cut.target])
            given[cut.operand] = boundary(given[cut.operand], ratio, zero)

    def _watched(self, at: Place, value: Any, data: Any, along: _Given) -> Any:
        still = lax.stop_gradient(data)
        emitted = along.emitted.layers[at]
        return watched(self._readings[at], value, still, along.active.get(at), emitted)

    def _opened(self, eqn: Any, given: list[Any], at: Place, along: _Given) -> list[Any]:
        name = eqn.primitive.name
        body, consts = _compat.called(eqn)
        if name in CUSTOM:
            return self._beside(eqn, given, at, along)
        if name in INLINED or (name in REMAT and along.inputs is not None):
            return self._run(body, consts, given, at, along)
        if name in REMAT:

            def again(*values: Any) -> list[Any]:
                return self._run(body, consts, values, at, along)

            policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
            return jax.checkpoint(again, policy=policy, prevent_cse=prevent)(*given)
        return self._scan(eqn, given, at, along)

    def _beside(self, eqn: Any, given: list[Any], at: Place, along: _Given) -> list[Any]:
        """Evaluate a function with a derivative of its own as it is, and watch its results.

        What goes into the layer is found by evaluating the function once more; where nothing is
        read, XLA drops that.
        """
        outs = _compat.bind(eqn, given)
        found: dict[Place, Any] = {} if along.inputs is None else along.inputs
        values = [lax.stop_gradient(value) for value in given]
        self._run(*_compat.called(eqn), values, at, along._replace(inputs=found))
        if along.inputs is None:
            for site in self._custom.get(at, ()):
                assert site.custom is not None
                number = site.custom[1]
                outs[number] = self._watched(site.place, outs[number], found[site.place], along)
        return outs

    def _scan(self, eqn: Any, given: list[Any], at: Place, along: _Given) -> list[Any]:
        body, consts = _compat.called(eqn)
        fixed, carried = _compat.scan_parts(eqn)
        first, over = given[fixed : fixed + carried], given[fixed + carried :]
        layers, cuts = along.emitted
        inside = lambda place: len(place) > len(at) and place[: len(at)] == at
        sliced = [
            {p: e for p, e in layers.items() if p in self._sites and at in self._sites[p].scans},
            {p: e for p, e in cuts.items() if inside(p)},
        ]
        keys = [list(part) for part in sliced]

        def step(carry: list[Any], slices: tuple[list[Any], list[list[Any]]]) -> Any:
            values, own = slices
            named = [dict(zip(k, v, strict=True)) for k, v in zip(keys, own, strict=True)]
            emitted = Emitted({**layers, **named[0]}, {**cuts, **named[1]})
            outs = self._run(
                body,
                consts,
                [*given[:fixed], *carry, *values],
                at,
                along._replace(emitted=emitted),
            )
            return outs[:carried], outs[carried:]

        last, stacked = lax.scan(
            step,
            first,
            (over, [list(part.values()) for part in sliced]),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*last, *stacked]
