"""Arrays onto a mesh: parameters where the user placed them, the batch over the data axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from boostax._tree import leaf_paths
from boostax.training._replicas import Replicas


def sharding_on(leaf: Any, replicas: Replicas, default: Any = None) -> NamedSharding:
    """Return where a leaf of a train state lies: where it is if on this mesh, else on all devices."""
    own = getattr(leaf, "sharding", None)
    if isinstance(own, NamedSharding) and own.mesh == replicas.mesh:
        return own
    return NamedSharding(replicas.mesh, PartitionSpec()) if default is None else default


def place(tree: Any, replicas: Replicas, default: Any = None) -> Any:
    """Put every array of a state on the mesh; those that lie on it stay where they are.

    The others go to all devices, or where ``default`` says.
    """
    return jax.tree.map(lambda leaf: _put(leaf, sharding_on(leaf, replicas, default)), tree)


def spread(leaf: Any, replicas: Replicas) -> jax.Array:
    """Return one entry a device of a leaf, split over the data axes ahead of its own sharding."""
    spec = PartitionSpec(replicas.axes, *_other_axes(sharding_on(leaf, replicas).spec, replicas))
    copy = jax.jit(
        lambda x: jnp.broadcast_to(x[None], (replicas.size, *x.shape)),
        out_shardings=NamedSharding(replicas.mesh, spec),
    )
    return copy(leaf)


def _other_axes(spec: PartitionSpec, replicas: Replicas) -> list[Any]:
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    kept = [tuple(name for name in part if name not in (None, *replicas.axes)) for part in parts]
    return [part or None for part in kept]


def place_spread(leaf: Any, replicas: Replicas) -> jax.Array:
    """Put a leaf that has one entry a device on the mesh, after a restore, say."""
    own = getattr(leaf, "sharding", None)
    if isinstance(own, NamedSharding) and own.mesh == replicas.mesh:
        return leaf
    return _put(leaf, NamedSharding(replicas.mesh, PartitionSpec(replicas.axes)))


def check_unsplit(params: Any, replicas: Replicas) -> None:
    """Raise where a parameter is split over a data axis, and each device would combine its own.

    Raises:
      ValueError: a parameter is split so.
    """
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        spec = getattr(getattr(leaf, "sharding", None), "spec", ())
        names = {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
        if split := sorted(names & set(replicas.axes)):
            raise ValueError(
                f"init: the parameter {path!r} is split over the data axis {split[0]!r}, and tx "
                "exchanges whole gradients over it; split it over another axis of the mesh, or copy "
                "it to all devices"
            )


def batch_specs(batch: Any, replicas: Replicas) -> Any:
    """Return the specs of a batch: arrays are split along their first axis, scalars are not."""
    return jax.tree.map(
        lambda leaf: PartitionSpec(replicas.axes) if np.ndim(leaf) else PartitionSpec(), batch
    )


def place_batch(batch: Any, replicas: Replicas) -> Any:
    """Put a batch on the mesh. With several processes, each gives its own part of it."""

    def put(leaf: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(replicas.mesh, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return _put(leaf, sharding, part=True)

    return jax.tree.map(put, batch, batch_specs(batch, replicas))


_FILL = (
    " Where the loss weighs its examples and returns LossAux(weight=...), name the leaf of the "
    "batch that holds the weights, train_step(..., example_weights='mask'), and copies with "
    "weight 0 are added"
)


def filled_batch(
    batch: Any,
    replicas: Replicas,
    weights: str | None,
    parts: int,
    batch_parts: tuple[str, ...] = (),
) -> Any:
    """Return the batch with a leading size that the devices can share.

    Args:
      batch: this process's part of the batch, or arrays over all processes.
      replicas: the devices.
      weights: path of the leaf with the examples' weights, or None. With it, copies of the last
        example that weigh 0 fill the batch up.
      parts: how many micro-batches each device's part is cut into; what is filled up suits them.
      batch_parts: parts of the batch that may have leading sizes of their own; the devices share each.

    Raises:
      ValueError: the batch can't be split and there are no weights, or sizes differ.
    """
    leaves, treedef = jax.tree.flatten(batch)
    paths = leaf_paths(batch)
    sizes = {
        path: np.shape(leaf)[0] for path, leaf in zip(paths, leaves, strict=True) if np.ndim(leaf)
    }
    apart = isinstance(batch, Mapping) and set(batch) == set(batch_parts)
    groups = [batch[part] for part in batch_parts] if apart else [batch]
    each = [{np.shape(leaf)[0] for leaf in jax.tree.leaves(g) if np.ndim(leaf)} for g in groups]
    if any(len(found) > 1 for found in each):
        raise ValueError(f"batch: the leading sizes differ: {sizes}")
    if not all(each) or 0 in sizes.values():
        raise ValueError(
            "batch: there is nothing in it to split over the devices; give arrays with a leading "
            "axis, and drop empty batches"
        )
    devices = _sharing(leaves, replicas)
    size = max((next(iter(found)) for found in each), key=lambda size: size % devices)
    if weights is None:
        if size % devices:
            raise ValueError(
                f"batch: {size} examples can't be split over {devices} devices (mesh axes "
                f"{list(replicas.axes)}); drop {size % devices} or add {-size % devices}."
                + ("" if apart else _FILL)
            )
        return batch
    if weights not in sizes:
        raise ValueError(
            f"example_weights: the batch has no array {weights!r}; it has {sorted(sizes)}"
        )
    missing = -size % (devices * parts)
    if not missing:
        return batch
    return treedef.unflatten(
        [
            _extended(leaf, missing, zero=path == weights) if np.ndim(leaf) else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
    )


def _sharing(leaves: list[Any], replicas: Replicas) -> int:
    """Return how many devices share these leaves: all, or this process's where it gives its part."""
    if jax.process_count() > 1 and all(_is_local(leaf) for leaf in leaves):
        return max(replicas.size * jax.local_device_count() // jax.device_count(), 1)
    return replicas.size


def _is_local(leaf: Any) -> bool:
    return not isinstance(leaf, (jax.Array, Tracer)) or (
        not isinstance(leaf, Tracer) and leaf.is_fully_addressable
    )


def _put(leaf: Any, sharding: NamedSharding, *, part: bool = False) -> Any:
    """Put an array on the mesh; of several processes, each has all of it, or its own part."""
    if isinstance(leaf, jax.Array) and getattr(leaf, "sharding", None) == sharding:
        return leaf
    if jax.process_count() > 1 and _is_local(leaf):
        leaf = np.asarray(leaf)
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if part and not sharding.is_fully_replicated:
            return jax.make_array_from_process_local_data(sharding, leaf)
        return jax.make_array_from_callback(np.shape(leaf), sharding, lambda index: leaf[index])
    return jax.device_put(leaf, sharding)


def _extended(leaf: Any, missing: int, *, zero: bool) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((leaf.shape[0] + missing, *leaf.shape[1:]), leaf.dtype)
    xp = jnp if isinstance(leaf, jax.Array) else np
    last = xp.asarray(leaf)[-1:]
    filling = xp.repeat(xp.zeros_like(last) if zero else last, missing, axis=0)
    return xp.concatenate([xp.asarray(leaf), filling])
