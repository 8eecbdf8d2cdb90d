"""The boundary between two scales: the identity, whose derivative is multiplied.

Forward nothing happens. Backward the cotangent, which comes in at the scale of what follows, goes out at
the scale of what came before: times the ratio of the two, in float32 or better. The largest
magnitude of what came in is emitted, as the cotangent of an argument that is not used otherwise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from boostax import _compat

__all__ = ["boundary", "mark", "marked"]

_NAME = "boostax_scale_boundary"


def mark(value: Any, before: int, after: int) -> Any:
    """Note in the program that values of group ``before`` become such of group ``after`` here."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, f"{_NAME}:{before}:{after}"), value)


def marked(eqn: Any) -> tuple[int, int] | None:
    """Return the two groups that :func:`mark` noted, or None for any other equation."""
    if eqn.primitive.name != "name":
        return None
    parts = str(eqn.params.get("name", "")).split(":")
    return (int(parts[1]), int(parts[2])) if parts[0] == _NAME else None


@jax.custom_vjp
def boundary(value: Any, ratio: Any, emitted: Any) -> Any:
    """Return ``value``.

    Args:
      value: a floating array, which is returned.
      ratio: float32 scalar, what its cotangent is multiplied by.
      emitted: float32 zero; its cotangent is the largest magnitude of the cotangent that comes in,
        NaN where that holds one.
    """
    del ratio, emitted
    return value


def _forward(value: Any, ratio: Any, emitted: Any) -> Any:
    del emitted
    return value, ratio


def _backward(ratio: Any, cotangent: Any) -> Any:
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    amax = jnp.max(jnp.abs(wide), initial=0).astype(jnp.float32)
    # Where types tell what differs between devices, the emitted zero does not.
    axes = tuple(sorted(_compat.varying_axes(amax)))
    amax = lax.pmax(amax, axes) if axes else amax
    return (wide * ratio.astype(wide.real.dtype)).astype(cotangent.dtype), None, amax


boundary.defvjp(_forward, _backward)
