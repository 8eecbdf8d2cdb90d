"""Sums and means over the devices of some mesh axes, inside ``shard_map``, ``pmap`` or ``vmap``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Devices", "Reduce", "all_devices", "any_device"]


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Combine trees over the devices of ``axes``: ``Reduce(axes, op)(tree, weight)``.

    Attributes:
      axes: names of mesh axes.
      op: ``"mean"``, weighted by each device's ``weight`` where one is given, or ``"sum"``.
    """

    axes: tuple[str, ...]
    op: str = "mean"

    def __call__(self, tree: Any, weight: Any = None) -> Any:
        """Return the tree combined; leaves that are not of an inexact dtype pass.

        A device of weight 0 adds nothing, whatever it holds. Half precision is summed in float32.
        """
        leaves, treedef = jax.tree.flatten(tree)
        taken = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]
        terms = [_wide(leaves[i]) for i in taken]
        if weight is not None:
            total = lax.psum(jnp.asarray(weight, jnp.float32), self.axes)
            terms = [
                # w / sum(w) first: w * x could overflow where the mean does not.
                _part(term, weight, total if self.op == "mean" else None)
                for term in terms
            ]
        sums = lax.psum(terms, self.axes)
        if self.op == "mean" and weight is None:
            # Afterwards, where it is fused with what the optimizer does.
            sums = [new * (1 / lax.axis_size(self.axes)) for new in sums]
        for i, new in zip(taken, sums, strict=True):
            leaves[i] = new.astype(leaves[i].dtype)
        return treedef.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Tells an update that the statistics it is given are those of this device alone.

    Attributes:
      axes: names of the mesh axes over which devices have others.
      weight: this device's weight, a float32 scalar.
    """

    axes: tuple[str, ...]
    weight: Any


def all_devices(flag: Any, axes: tuple[str, ...]) -> jax.Array:
    """Say on every device of the axes whether ``flag`` holds on all of them."""
    return lax.pmin(jnp.asarray(flag, jnp.int32), axes) > 0


def any_device(flag: Any, axes: tuple[str, ...]) -> jax.Array:
    """Say on every device of the axes whether ``flag`` holds on one of them."""
    return lax.pmax(jnp.asarray(flag, jnp.int32), axes) > 0


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _part(leaf: jax.Array, weight: Any, total: jax.Array | None) -> jax.Array:
    """Return what a device adds: nothing where its weight is 0, whatever the leaf holds."""
    weight = jnp.asarray(weight, jnp.float32).astype(leaf.real.dtype)
    if total is not None:
        leaf = leaf * (weight / jnp.where(total == 0, 1, total).astype(leaf.real.dtype))
    return jnp.where(weight == 0, jnp.zeros_like(leaf), leaf)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
