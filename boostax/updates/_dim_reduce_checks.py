"""What ``dim_reduce`` looks at before it runs: its arguments, its state, the loss function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import numbers
import operator
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax.errors import StateMismatchError, did_you_mean
from boostax.updates.basis import TrajectoryBasis

__all__ = ["Settings", "bound_loss", "check_matches", "make_settings"]

_MODES = ("default", "reference")
_SAMPLES = 4096  # numbers of each leaf that the fingerprint looks at


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The static facts of one ``dim_reduce``; its arguments, checked."""

    basis: TrajectoryBasis
    rho: float
    gamma: float
    alpha: float
    sigma: float
    max_backtracks: int
    mode: str
    curvature_tol: float
    reset_after: int
    loss_scale: float

    @functools.cached_property
    def fingerprint(self) -> int:
        """An unsigned 32-bit number that stands for the basis in a saved state."""
        return _fingerprint(self.basis)

    @property
    def wide(self) -> Any:
        """The dtype that is computed in."""
        return jnp.promote_types(jnp.float32, self.basis.dtype)


def make_settings(basis: Any, max_backtracks: Any, mode: Any, **given: Any) -> Settings:
    """Check the arguments of ``dim_reduce``."""
    if not isinstance(basis, TrajectoryBasis):
        raise TypeError(
            f"dim_reduce: basis must be a boostax.TrajectoryBasis, got {type(basis).__name__}; make "
            "one with boostax.trajectory_basis, or from an array with TrajectoryBasis.from_array"
        )
    if mode not in _MODES:
        raise ValueError(
            f"dim_reduce: mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}."
            + did_you_mean(mode, _MODES)
        )
    reference = mode == "reference"
    backtracks = _integer("max_backtracks", max_backtracks, 0)
    if reference and backtracks not in (1, 10):
        raise ValueError(
            f"dim_reduce: max_backtracks is {backtracks}, but mode='reference' always tries twice; "
            "leave it out"
        )
    loss_scale = _number("loss_scale", given["loss_scale"], "> 0", lambda x: x > 0)
    if loss_scale != 1 and not reference:
        raise ValueError(
            f"dim_reduce: loss_scale is {loss_scale:g}, but only mode='reference' takes gradients "
            "with a scale; give boostax.train_step the loss scale, which takes it out"
        )
    within = lambda x: 0 < x < 1
    return Settings(
        basis=dataclasses.replace(
            basis.without_points(), components=tuple(map(_on_host, basis.components))
        ),
        rho=_number("rho", given["rho"], "between 0 and 1", within),
        gamma=_number("gamma", given["gamma"], ">= 0 and < 1", lambda x: 0 <= x < 1),
        alpha=_number("alpha", given["alpha"], ">= 0", lambda x: x >= 0),
        sigma=_number("sigma", given["sigma"], "between 0 and 1", within),
        max_backtracks=1 if reference else backtracks,
        mode=mode,
        curvature_tol=_number(
            "curvature_tol", given["curvature_tol"], ">= 0 and < 1", lambda x: 0 <= x < 1
        ),
        reset_after=_integer("reset_after", given["reset_after"], 1),
        loss_scale=loss_scale,
    )


def check_matches(settings: Settings, state: Any) -> None:
    """Raise a StateMismatchError where a state was made with another basis or another alpha."""
    if (state.momentum is None) != (settings.alpha == 0):
        has = "no momentum" if state.momentum is None else "a momentum"
        raise StateMismatchError(
            f"dim_reduce: the state has {has}, and alpha is {settings.alpha:g} here; go on with the "
            "alpha that it was made with (0 keeps none), or start with tx.init(params)"
        )
    if isinstance(state.fingerprint, (Tracer, jax.ShapeDtypeStruct)):
        return
    if int(state.fingerprint) != settings.fingerprint:
        k = np.shape(state.metric)[0]
        raise StateMismatchError(
            f"dim_reduce: the state was made with another basis (fingerprint "
            f"{int(state.fingerprint)}, k = {k}; here {settings.fingerprint}, k = "
            f"{settings.basis.k}); go on with the basis that it was made with, as basis.save wrote "
            "it, or start with tx.init(params)"
        )


def bound_loss(value_fn: Callable[..., Any], extra: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return ``value_fn`` as a function of the parameters alone, its first result if it has two.

    What else it declares is taken from the extra arguments of ``update``, as optax's line searches
    do.
    """
    try:
        declared = list(inspect.signature(value_fn).parameters.values())[1:]
    except (TypeError, ValueError):
        declared = []
    named = [p for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in extra]
    if missing:
        raise ValueError(
            f"dim_reduce: value_fn takes {', '.join(missing)}, which update did not get; pass them "
            "to update by name, or close over them"
        )
    passed = {p.name: extra[p.name] for p in named if p.name in extra}

    def loss(params: Any) -> Any:
        out = value_fn(params, **passed)
        out = jnp.asarray(out[0] if isinstance(out, (tuple, list)) else out)
        if out.shape != ():
            raise ValueError(
                f"dim_reduce: value_fn must return a scalar loss, or (loss, aux), got shape {out.shape}"
            )
        return out

    return loss


def _on_host(rows: Any) -> Any:
    """Fetch a part of the basis, so that on a device it lies in the state alone."""
    traced = isinstance(rows, Tracer)
    if traced or not isinstance(rows, jax.Array) or not rows.is_fully_addressable:
        return rows
    return np.asarray(rows)


def _fingerprint(basis: TrajectoryBasis) -> int:
    named = dict(zip(basis.paths, basis.components, strict=True))
    facts = [[path, list(np.shape(named[path]))] for path in sorted(named)]
    digest = zlib.crc32(json.dumps([basis.k, basis.dtype.name, facts]).encode())
    for path in sorted(named):
        leaf = named[path]
        traced = isinstance(leaf, Tracer)
        if traced or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            continue  # no process has it whole
        flat = np.asarray(leaf).reshape(-1)
        some = flat[:: max(1, flat.size // _SAMPLES)].astype(np.float32)
        digest = zlib.crc32(np.ascontiguousarray(some).tobytes(), digest)
    return digest


def _number(name: str, value: Any, allowed: str, fits: Callable[[float], bool]) -> float:
    ok = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    if not ok:
        raise TypeError(f"dim_reduce: {name} must be a number {allowed}, got {value!r}")
    if not (math.isfinite(value) and fits(float(value))):
        raise ValueError(f"dim_reduce: {name} must be {allowed}, got {value!r}")
    return float(value)


def _integer(name: str, value: Any, least: int) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"dim_reduce: {name} must be a whole number >= {least}, got {value!r}"
        ) from None
    if number < least:
        raise ValueError(f"dim_reduce: {name} must be >= {least}, got {number}")
    return number
