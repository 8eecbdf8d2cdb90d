"""Evaluate a loss's jaxpr with its layers watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax import _compat
from boostax.gradients._find import CUSTOM, INLINED, REMAT, Place, Site
from boostax.gradients._tag import Reading, watched

__all__ = ["Watch"]


class Watch:
    """An interpreter of one jaxpr.

    Args:
      sites: the layers to watch, by place.
      readings: what to read of each.
    """

    def __init__(self, sites: Mapping[Place, Site], readings: Mapping[Place, Reading]):
        self._sites = {at: site for at, site in sites.items() if at in readings}
        self._readings = readings
        # The equations on the way to a layer have to be opened, all others are taken as they are.
        self._open = {at[:n] for at in self._sites for n in range(1, len(at))}
        self._custom = {
            site.custom[0]: [
                s for s in self._sites.values() if s.custom and s.custom[0] == site.custom[0]
            ]
            for site in self._sites.values()
            if site.custom is not None
        }

    def zeros(self) -> dict[Place, tuple[jax.Array, ...]]:
        """Return what to pass for ``emitted``."""
        return {
            at: tuple(
                jnp.zeros((*self._sites[at].lengths, *shape), jnp.float32)
                for shape in reading.shapes()
            )
            for at, reading in self._readings.items()
        }

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Any],
        emitted: Mapping[Place, Any],
        active: Mapping[Place, Any] | None = None,
    ) -> list[Any]:
        """Return the results of the jaxpr.

        Args:
          jaxpr: the jaxpr that the sites were found in, with its constants.
          values: its inputs.
          emitted: zeros as :meth:`zeros` gives; the layers' readings are their cotangents.
          active: bool scalars, which of the layers to read; None: all.
        """
        consts = list(getattr(jaxpr, "consts", ()))
        return self._run(_compat.open_jaxpr(jaxpr), consts, values, (), emitted, active or {}, None)

    def _run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        values: Sequence[Any],
        place: Place,
        emitted: Mapping[Place, Any],
        active: Mapping[Place, Any],
        inputs: dict[Place, Any] | None,
    ) -> list[Any]:
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, values, strict=True))
        read = lambda atom: atom.val if hasattr(atom, "val") else known[atom]
        for index, eqn in enumerate(jaxpr.eqns):
            at = (*place, index)
            given = [read(atom) for atom in eqn.invars]
            if at in self._sites:
                outs = _compat.bind(eqn, given)
                data = given[1 - self._sites[at].call.kernel]
                if inputs is not None:
                    inputs[at] = data
                elif self._sites[at].custom is None:
                    outs = [self._watched(at, outs[0], data, emitted, active)]
            elif at in self._open:
                outs = self._opened(eqn, given, at, emitted, active, inputs)
            else:
                outs = _compat.bind(eqn, given)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _watched(self, at: Place, value: Any, data: Any, emitted: Any, active: Any) -> Any:
        still = lax.stop_gradient(data)
        return watched(self._readings[at], value, still, active.get(at), emitted[at])

    def _opened(
        self,
        eqn: Any,
        given: list[Any],
        at: Place,
        emitted: Mapping[Place, Any],
        active: Mapping[Place, Any],
        inputs: dict[Place, Any] | None,
    ) -> list[Any]:
        name = eqn.primitive.name
        body, consts = _compat.called(eqn)
        if name in CUSTOM:
            return self._beside(eqn, given, at, emitted, active, inputs)
        if name in INLINED or (name in REMAT and inputs is not None):
            return self._run(body, consts, given, at, emitted, active, inputs)
        if name in REMAT:

            def again(*values: Any) -> list[Any]:
                return self._run(body, consts, values, at, emitted, active, inputs)

            policy, prevent = eqn.params["policy"], eqn.params["prevent_cse"]
            return jax.checkpoint(again, policy=policy, prevent_cse=prevent)(*given)
        return self._scan(eqn, given, at, emitted, active)

    def _beside(
        self,
        eqn: Any,
        given: list[Any],
        at: Place,
        emitted: Mapping[Place, Any],
        active: Mapping[Place, Any],
        inputs: dict[Place, Any] | None,
    ) -> list[Any]:
        """Evaluate a function with a derivative of its own as it is, and watch its results.

        What goes into the layer is found by evaluating the function once more; where nothing is
        read, XLA drops that.
        """
        outs = _compat.bind(eqn, given)
        found: dict[Place, Any] = {} if inputs is None else inputs
        values = [lax.stop_gradient(value) for value in given]
        self._run(*_compat.called(eqn), values, at, emitted, active, found)
        if inputs is None:
            for site in self._custom.get(at, ()):
                assert site.custom is not None
                number = site.custom[1]
                outs[number] = self._watched(
                    site.place, outs[number], found[site.place], emitted, active
                )
        return outs

    def _scan(
        self,
        eqn: Any,
        given: list[Any],
        at: Place,
        emitted: Mapping[Place, Any],
        active: Mapping[Place, Any],
    ) -> list[Any]:
        body, consts = _compat.called(eqn)
        fixed, carried = _compat.scan_parts(eqn)
        first, over = given[fixed : fixed + carried], given[fixed + carried :]
        sliced = {
            p: e for p, e in emitted.items() if p in self._sites and at in self._sites[p].scans
        }
        whole = {p: e for p, e in emitted.items() if p not in sliced}

        def step(carry: list[Any], slices: tuple[list[Any], dict[Place, Any]]) -> Any:
            values, own = slices
            outs = self._run(
                body, consts, [*given[:fixed], *carry, *values], at, {**whole, **own}, active, None
            )
            return outs[:carried], outs[carried:]

        keys = list(sliced)
        last, stacked = lax.scan(
            lambda carry, x: step(carry, (x[0], dict(zip(keys, x[1], strict=True)))),
            first,
            (over, [sliced[key] for key in keys]),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*last, *stacked]
