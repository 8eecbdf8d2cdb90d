"""Put a basis where the parameters are: the same devices, the same split, k whole everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

__all__ = ["place_rows", "put_like"]


def place_rows(rows: Any, leaf: Any) -> Any:
    """Return rows (k, *shape) as an array split like ``leaf``, of shape ``shape``."""
    return _put(rows, leaf, extra_axes=1)


def put_like(value: Any, leaf: Any) -> Any:
    """Return a value of a leaf's shape in the leaf's dtype, placed as it is."""
    if isinstance(value, Tracer) or isinstance(leaf, Tracer):
        return jnp.asarray(value).astype(leaf.dtype)
    if not isinstance(leaf, jax.Array):
        return np.asarray(value).astype(leaf.dtype)
    return _put(value.astype(leaf.dtype), leaf, extra_axes=0)


def _put(value: Any, leaf: Any, extra_axes: int) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if value.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        return np.asarray(value)  # JAX would make it float32
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*[None] * extra_axes, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        if not sharding.is_fully_addressable:
            # Every process has the whole value and keeps its own pieces.
            whole = np.asarray(value)
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
        return jax.device_put(value, sharding)
    # What is bound to no device goes with arrays on a mesh, and stays so.
    if isinstance(sharding, SingleDeviceSharding) and getattr(leaf, "committed", False):
        return jax.device_put(value, sharding)
    return jnp.asarray(value)
