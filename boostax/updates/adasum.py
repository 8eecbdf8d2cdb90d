"""AdaSum: combine the devices' gradients, or updates, by how much they agree.

Two vectors that point the same way are averaged, two that have nothing in common are added::

    pair(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

More than two go through a binary tree in rank order. On gradients it stands ahead of the
optimizer, on updates behind it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from boostax import _compat
from boostax._info import TransformInfo, with_info
from boostax._tree import leaf_paths
from boostax.errors import did_you_mean
from boostax.parallel._axes import axis_size, check_axis, check_varying
from boostax.parallel._layout import Buckets, Cut, pack, unpack
from boostax.parallel._pairs import Sums, combine, compute_dtype, sums_of
from boostax.parallel.exchange import ALGORITHMS
from boostax.parallel.reduce import Reduce

__all__ = ["Exchanging", "adasum", "adasum_pair"]

_GRANULARITIES = ("leaf", "tree")
_BUCKETS = (50, 100)


@dataclasses.dataclass(frozen=True)
class Exchanging:
    """The settings of :func:`adasum`; ``describe(params)`` says which leaves travel together.

    Attributes:
      axis_name: the axis that AdaSum goes over.
      granularity: ``"leaf"`` or ``"tree"``.
      algorithm: ``"halving"`` or ``"gather"``.
      inner_axis: the axis that the mean is taken over before, or None.
      buckets: the split points.
    """

    axis_name: str
    granularity: str
    algorithm: str
    inner_axis: str | None
    buckets: Buckets

    def describe(self, params: Any) -> Cut:
        """Return the buffers that the leaves of ``params`` travel in, and the points beyond."""
        paths = [
            path
            for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
            if _travels(leaf)
        ]
        return self.buckets.cut(paths)


def adasum(
    axis_name: str,
    *,
    granularity: Literal["leaf", "tree"] = "leaf",
    algorithm: Literal["halving", "gather"] = "halving",
    inner_axis: str | None = None,
    buckets: int | Sequence[int] = _BUCKETS,
    order: Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Combine what the devices of an axis hold by AdaSum.

    For two devices, with :math:`a` and :math:`b` the same leaf on each:

    .. math:: \left(1 - \frac{a \cdot b}{2 |a|^2}\right) a + \left(1 - \frac{a \cdot b}{2 |b|^2}\right) b

    More devices go through a binary tree in rank order: 0 with 1, 2 with 3, then those. Any number
    works. Of ``n`` devices, with ``p`` the largest power of two up to ``n``, the first ``2(n - p)``
    combine in pairs before the tree: 6 make ((01)(23))(45), 3 make (01)2. A zero vector gives the
    other one, equal vectors give themselves, a factor on all comes out as that factor.

    ``update`` runs inside ``jax.shard_map``, ``jax.pmap(axis_name=...)`` or
    ``jax.vmap(axis_name=...)``. All devices get the same bits. Dot products are taken in float32 or
    better, of vectors scaled by powers of two, so that squares neither overflow nor vanish; leaves
    keep their dtype. What is not finite on one device is not finite on all afterwards.

    Under ``shard_map`` with its checks on, the gradient of parameters that are the same on all
    devices arrives already summed. Make them differ ahead of the gradient::

        params = jax.lax.pcast(params, axis_name, to="varying")

    ``update`` takes ``weight``, a scalar: a device of weight 0 counts as zeros, whatever it holds.
    Between devices that count AdaSum knows no weights.

    Integer leaves and masked ones (``optax.MaskedNode``, frozen leaves) pass, and are not sent.

    Args:
      axis_name: the axis to combine over.
      granularity: ``"leaf"`` (default): each leaf has its own coefficients. ``"tree"``: one pair of
        coefficients for the whole tree.
      algorithm: ``"halving"`` (default): recursive vector halving with distance doubling; a device
        sends 2(p - 1)/p of its data. ``"gather"``: one all-gather, then each device goes through
        the tree alone; it sends n - 1 times its data, for small trees.
      inner_axis: an axis to take the mean over first, such as the devices of a host; weighted where
        ``update`` is given ``weight``. Default None.
      buckets: where the leaves are cut into buffers that travel apart: leaf counts in forward order,
        an int or a sequence of ascending ints >= 1. Default (50, 100), up to three buffers. It
        changes when leaves are sent, not the result. Points given beyond the last leaf bring a
        warning at init.
      order: the leaves' paths in forward order, as :func:`boostax.forward_order` returns them.
        Default None: natural order of the names.

    Returns:
      A transformation without state. Its update raises a NameError where an axis is not bound, and
      a ValueError for a leaf that is the same on all devices where ``shard_map`` tells so.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument is out of range; at init, ``order`` has a path that is no leaf's.

    Example:
      Two devices, simulated by ``vmap``. Leaf a agrees, leaf b is orthogonal.

      >>> import jax, jax.numpy as jnp
      >>> tx = adasum("devices")
      >>> grads = {"a": jnp.array([[1.0, 0], [1, 0]]), "b": jnp.array([[1.0, 0], [0, 1]])}
      >>> state = tx.init({"a": jnp.zeros(2), "b": jnp.zeros(2)})
      >>> combined, _ = jax.vmap(lambda g: tx.update(g, state), axis_name="devices")(grads)
      >>> combined["a"][0].tolist(), combined["b"][0].tolist()
      ([1.0, 0.0], [1.0, 1.0])

    Source:
      S. Maleki, M. Musuvathi, T. Mytkowicz, O. Saarikivi, T. Xu, V. Eksarevskiy, J. Ekanayake and
      E. Barsoum, "Scaling Distributed Training with Adaptive Summation", 2020 (MLSys 2021).

    When not to use:
      Where you can tune the learning rate for the mean: with tuned rates on both sides it does not
      beat the mean on small tasks. On one device it does nothing.
    """
    settings = Exchanging(
        axis_name=check_axis("adasum", "axis_name", axis_name),
        granularity=_choice("granularity", granularity, _GRANULARITIES),
        algorithm=_choice("algorithm", algorithm, tuple(ALGORITHMS)),
        inner_axis=None if inner_axis is None else check_axis("adasum", "inner_axis", inner_axis),
        buckets=Buckets(_points(buckets), _order(order)),
    )
    if inner_axis == axis_name:
        raise ValueError(
            f"adasum: inner_axis and axis_name are both {axis_name!r}; the mean goes over another "
            "axis than AdaSum. Leave inner_axis out, or name the axis of a host's devices"
        )
    asked = tuple(settings.buckets.points) != _BUCKETS

    def init(params: Any) -> optax.EmptyState:
        paths = leaf_paths(params)
        for path in settings.buckets.order or ():
            if path not in paths:
                raise ValueError(
                    f"adasum: order has {path!r}, which is no leaf of the parameters."
                    f"{did_you_mean(path, paths)} Leaves: {', '.join(paths)}"
                )
        cut = settings.describe(params)
        if asked and cut.beyond:
            warnings.warn(
                f"adasum: buckets has {', '.join(map(str, cut.beyond))}, but there are only "
                f"{len(paths)} leaves; these points cut nothing",
                UserWarning,
                stacklevel=2,
            )
        return optax.EmptyState()

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args
        leaves, treedef = jax.tree.flatten(updates)
        sent = [i for i, leaf in enumerate(leaves) if _travels(leaf)]
        paths = [leaf_paths(updates)[i] for i in sent]
        for name in (settings.inner_axis, settings.axis_name):
            if name is not None and axis_size("adasum", name) > 1:
                check_varying("adasum", paths, [leaves[i] for i in sent], name)
        if settings.inner_axis is not None:
            mean = Reduce((settings.inner_axis,))([leaves[i] for i in sent], weight)
            for i, leaf in zip(sent, mean, strict=True):
                leaves[i] = leaf
        elif weight is not None:
            for i in sent:
                leaves[i] = jnp.where(weight == 0, jnp.zeros_like(leaves[i]), leaves[i])
        size = axis_size("adasum", settings.axis_name)
        if size == 1 and _compat.tracks_varying(settings.axis_name):
            # Nothing is added; the type now says that all devices, the one, have the same.
            for i in sent:
                leaves[i] = lax.psum(leaves[i], settings.axis_name)
        if size > 1 and sent:
            cut, _ = settings.buckets.places(paths)
            buffers = [[sent[i] for i in buffer] for buffer in cut]
            specs = {i: _compat.explicit_spec(leaves[i]) for i in sent}
            for i in sent:
                leaves[i] = _compat.whole(leaves[i])
            for places, new in _exchanged(settings, leaves, buffers, size):
                for i, leaf in zip(places, new, strict=True):
                    leaves[i] = _compat.laid_out(leaf, specs[i])
        return treedef.unflatten(leaves), state

    shown = {
        "axis_name": axis_name,
        "granularity": granularity,
        "algorithm": algorithm,
        "inner_axis": inner_axis,
        "buckets": settings.buckets.points,
    }
    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo(
            "adasum",
            shown,
            static=settings,
            fates=lambda p: _fates(settings, p),
            axes=tuple(name for name in (axis_name, inner_axis) if name is not None),
        ),
    )


def adasum_pair(a: Any, b: Any) -> Any:
    r"""Combine two trees by AdaSum, leaf by leaf.

    .. math:: \left(1 - \frac{a \cdot b}{2 |a|^2}\right) a + \left(1 - \frac{a \cdot b}{2 |b|^2}\right) b

    Args:
      a: array or tree of floating (or complex) arrays of any shape; each leaf counts as one vector.
      b: the same structure, shapes and dtypes.

    Returns:
      The combination, in the structure and dtypes of ``a``. The order of the two does not matter.

    Raises:
      ValueError: the structures, shapes or dtypes differ.
      TypeError: a leaf is not floating or complex.

    Example:
      >>> import jax.numpy as jnp
      >>> adasum_pair(jnp.array([1.0, 0.0]), jnp.array([1.0, 1.0])).tolist()
      [1.25, 0.75]

    Source:
      As for :func:`adasum`.

    When not to use:
      Between devices, :func:`adasum` has the exchange too.
    """
    a, b = jax.tree.map(jnp.asarray, a), jax.tree.map(jnp.asarray, b)
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise ValueError(
            "adasum_pair: a and b must have the same structure, got "
            f"{jax.tree.structure(a)} and {jax.tree.structure(b)}"
        )
    for path, x, y in zip(leaf_paths(a), *map(jax.tree.leaves, (a, b)), strict=True):
        where = f"adasum_pair: leaf {path!r}" if path else "adasum_pair"
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"{where}: a and b must be alike, got {x.dtype}{x.shape} and {y.dtype}{y.shape}"
            )
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"{where} must be floating or complex, got {x.dtype}")

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.size == 0:
            return x
        runs, (left,) = pack([x])
        _, (right,) = pack([y])
        left, right = (v.astype(compute_dtype(v.dtype)) for v in (left, right))
        sums = sums_of(left, right)
        out = combine(left, right, Sums(*(s[:, None] for s in sums)))
        return unpack(runs, [out], [x])[0].astype(x.dtype)

    return jax.tree.map(one, a, b)


def _exchanged(
    settings: Exchanging, leaves: list[Any], buffers: list[list[int]], size: int
) -> list[tuple[list[int], list[jax.Array]]]:
    exchange = ALGORITHMS[settings.algorithm]
    joint = settings.granularity == "tree"
    if joint:
        # One coefficient needs all dot products of a round at once: nothing can travel apart.
        buffers = [[i for places in buffers for i in places]]
    out = []
    for places in buffers:
        chosen = [jnp.asarray(leaves[i]) for i in places]
        runs, stacks = pack(chosen)
        out.append(
            (places, unpack(runs, exchange(stacks, settings.axis_name, size, joint=joint), chosen))
        )
    return out


def _travels(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and math.prod(jnp.shape(leaf)) > 0


def _choice(argument: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(
            f"adasum: {argument} must be one of {', '.join(map(repr, known))}, got {value!r}."
            f"{did_you_mean(str(value), known)}"
        )
    return value


def _points(buckets: Any) -> tuple[int, ...]:
    single = isinstance(buckets, (int, np.integer)) and not isinstance(buckets, bool)
    values = (buckets,) if single else buckets
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"adasum: buckets must be an int or a sequence of ints, got {buckets!r}")
    for value in values:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"adasum: buckets must hold ints, got {value!r} in {buckets!r}")
    points = tuple(int(value) for value in values)
    if any(a >= b for a, b in zip((0, *points), points, strict=False)):
        raise ValueError(
            f"adasum: buckets must be ascending leaf counts >= 1, got {buckets!r}; for one buffer "
            "give ()"
        )
    return points


def _order(order: Any) -> tuple[str, ...] | None:
    if order is None:
        return None
    is_list = isinstance(order, Sequence) and not isinstance(order, str)
    if not is_list or not all(isinstance(path, str) for path in order):
        raise TypeError(
            f"adasum: order must be a sequence of paths, as forward_order gives them; got {order!r}"
        )
    return tuple(order)


def _fates(settings: Exchanging, params: Any) -> dict[str, str]:
    cut = settings.describe(params)
    over = f"combined by AdaSum over {settings.axis_name!r}"
    if settings.inner_axis is not None:
        over = f"mean over {settings.inner_axis!r}, then {over}"
    fates = dict.fromkeys(leaf_paths(params), "not exchanged (not floating, or empty)")
    for number, paths in enumerate(cut.buffers):
        of = f", buffer {number + 1} of {len(cut.buffers)}" if len(cut.buffers) > 1 else ""
        fates |= dict.fromkeys(paths, over + of)
    return fates
