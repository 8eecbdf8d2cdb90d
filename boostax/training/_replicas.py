"""The devices that share a batch: which mesh axes, what they agree on, how their results combine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from boostax.parallel.reduce import Reduce, all_devices
from boostax.training import batch_stats


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The static facts of data parallelism over a mesh.

    Attributes:
      mesh: the mesh.
      axes: the axes that the batch is split over; ``shard_map`` is manual over these alone.
      exchange: who combines the gradients. ``"step"``: the step, ahead of ``tx``. ``"window"``:
        the outermost part of ``tx``, which is handed a :class:`~boostax.parallel.reduce.Reduce`, so
        that it is done once a window and for trained leaves only. ``"tx"``: an exchange that the
        user put into ``tx``.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    exchange: str

    @property
    def size(self) -> int:
        """How many devices share the batch."""
        size = 1
        for axis in self.axes:
            size *= self.mesh.shape[axis]
        return size

    @property
    def mean(self) -> Reduce:
        """The mean over the devices, weighted where a weight is given."""
        return Reduce(self.axes)

    def index(self) -> jax.Array:
        """Return the device's number along the data axes."""
        return lax.axis_index(self.axes)

    def agree(self, flag: Any) -> jax.Array:
        """Say whether ``flag`` holds on all devices."""
        return all_devices(flag, self.axes)

    def total(self, weight: Any) -> jax.Array:
        """Return the sum of the devices' weights."""
        return lax.psum(jnp.asarray(weight, jnp.float32), self.axes)

    def root_mean_square(self, norm: jax.Array) -> jax.Array:
        """Return the root of the mean of the devices' squared norms."""
        return jnp.sqrt(lax.pmean(jnp.square(norm), self.axes))

    def pooled_state(
        self,
        start: Any,
        new: Any,
        weight: Any,
        momenta: Mapping[str, float],
        momentum: float | None,
    ) -> Any:
        """Return one model state from those that the devices' parts of a batch led to.

        Batch statistics are pooled as those of a window's micro-batches are, see
        :mod:`boostax.training.batch_stats`. Other floating leaves are averaged by weight; of
        integers and bools, which counters and flags are, the largest is taken.
        """
        if new is None or self.size == 1:
            return new
        flat = batch_stats.flatten_statistics(new)
        if not flat.leaves:
            return new
        pairs = {index for _, mean, var in flat.pairs for index in (mean, var)}
        total = self.total(weight)
        rest = [i for i in range(len(flat.leaves)) if i not in pairs]
        leaves = list(flat.leaves)
        for i, leaf in zip(rest, self.mean([leaves[i] for i in rest], weight), strict=True):
            counts = not jnp.issubdtype(leaf.dtype, jnp.inexact)
            leaves[i] = self._largest(leaf) if counts else jnp.where(total == 0, leaves[i], leaf)
        if not flat.pairs:
            return flat.treedef.unflatten(leaves)
        window = batch_stats.add_micro(batch_stats.init_window(start), start, new, weight)
        means, variances = self.mean((window.mean, window.var), weight)
        spread = [
            lax.psum(window.weight * jnp.square(own - mean), self.axes)
            for own, mean in zip(window.mean, means, strict=True)
        ]
        merged = batch_stats.Window(total, means, variances, tuple(spread))
        old = batch_stats.flatten_statistics(start).leaves
        state = flat.treedef.unflatten(
            [old[i] if i in pairs else leaf for i, leaf in enumerate(leaves)]
        )
        return batch_stats.close_window(
            merged, state, batch_stats.momenta_for(start, momenta, momentum)
        )

    def _largest(self, leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            return lax.pmax(leaf.astype(jnp.int32), self.axes) > 0
        return lax.pmax(leaf, self.axes)


def data_axes(mesh: Any, wanted: Any, exchanged: Sequence[str]) -> tuple[str, ...]:
    """Return the axes that the batch is split over.

    Args:
      mesh: the mesh that was given to ``train_step``.
      wanted: its argument ``data_axes``.
      exchanged: the axes that ``tx`` exchanges over.

    Raises:
      TypeError: ``mesh`` or ``data_axes`` has a wrong type.
      ValueError: an axis is not in the mesh, or which axes are meant can't be told.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}; make one with "
            "jax.make_mesh((jax.device_count(),), ('data',))"
        )
    names = tuple(str(name) for name in mesh.axis_names)
    axes = (wanted,) if isinstance(wanted, str) else wanted
    if axes is not None and not (
        isinstance(axes, (tuple, list)) and axes and all(isinstance(a, str) for a in axes)
    ):
        raise TypeError(
            f"data_axes must be the name of a mesh axis or a tuple of names, got {wanted!r}"
        )
    for argument, given in (("data_axes", axes or ()), ("tx exchanges over", exchanged)):
        unknown = [axis for axis in given if axis not in names]
        if unknown:
            raise ValueError(f"{argument} {unknown}: the mesh has the axes {list(names)}")
    if axes is None:
        if exchanged:
            axes = [name for name in names if name in exchanged]
        elif len(names) == 1 or "data" in names:
            axes = names if len(names) == 1 else ("data",)
        else:
            raise ValueError(
                f"mesh has the axes {list(names)}, and none is called 'data'; say which the batch is "
                "split over with data_axes="
            )
    if len(set(axes)) < len(axes):
        raise ValueError(f"data_axes names an axis twice: {tuple(axes)}")
    missing = [axis for axis in exchanged if axis not in axes]
    if missing:
        raise ValueError(
            f"tx exchanges over {missing}, but the batch is split over {list(axes)} alone; add "
            "the axes to data_axes="
        )
    return tuple(name for name in names if name in axes)
