"""Sums and means over the devices of some mesh axes, inside ``shard_map``, ``pmap`` or ``vmap``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Reduce", "all_devices", "any_device", "shares"]


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
        share = None
        if self.op == "mean":
            # w / sum(w) first: w * x could overflow where the mean does not.
            share = 1 / self._size() if weight is None else shares(weight, self.axes)[0]
        terms = [_scaled(leaves[i], share) for i in taken]
        for i, total in zip(taken, lax.psum(terms, self.axes), strict=True):
            leaves[i] = total.astype(leaves[i].dtype)
        return treedef.unflatten(leaves)

    def _size(self) -> int:
        return lax.axis_size(self.axes)


def shares(weight: Any, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return this device's share of the devices' total weight, and the total, in float32.

    The share is 0 where the total is.
    """
    weight = jnp.asarray(weight, jnp.float32)
    total = lax.psum(weight, axes)
    return jnp.where(total == 0, 0.0, weight / jnp.where(total == 0, 1.0, total)), total


def all_devices(flag: Any, axes: tuple[str, ...]) -> jax.Array:
    """Say on every device of the axes whether ``flag`` holds on all of them."""
    return lax.pmin(jnp.asarray(flag, jnp.int32), axes) > 0


def any_device(flag: Any, axes: tuple[str, ...]) -> jax.Array:
    """Say on every device of the axes whether ``flag`` holds on one of them."""
    return lax.pmax(jnp.asarray(flag, jnp.int32), axes) > 0


def _scaled(leaf: jax.Array, share: Any) -> jax.Array:
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    if share is None:
        return wide
    if isinstance(share, float):
        return wide * share
    return jnp.where(share == 0, jnp.zeros_like(wide), wide * share.astype(wide.real.dtype))


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
