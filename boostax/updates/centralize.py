"""Gradient centralization: what every unit receives has mean zero over its inputs.

For the weight ``w`` of a layer, with ``I`` the axes that are inputs of one output unit::

    centralized(g) = g - mean(g, axes=I)

The mean is taken per output unit: over axis 0 of a Dense kernel ``(in, out)``, over the window and
the input channels of a convolution ``(height, width, in, out)``. Biases, scales, embeddings and
scalars have no such axes and pass unchanged.

It works on whatever passes through it. Ahead of the optimizer that is the gradient; behind it, the
final update, which its authors advise for Adam-like optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._info import TransformInfo, find, with_info
from boostax._tree import PathPattern, check_matched, matches, path_string
from boostax.errors import did_you_mean
from boostax.updates._layer_axes_nnx import read_model
from boostax.updates._surroundings import Shapes, around, shapes_of
from boostax.updates.layer_axes import LayerAxes, read_layers

__all__ = ["CentralizedAxes", "Centralizing", "centralize", "centralized_axes"]

_LAYERS = ("conv_and_dense", "conv")
_UNREADABLE = ("error", "skip")


class CentralizedAxes(NamedTuple):
    """Which leaves are centralized.

    Attributes:
      axes: path to the axes averaged over, for the leaves that are centralized.
      untouched: path to the reason, for the leaves that pass unchanged.
    """

    axes: dict[str, tuple[int, ...]]
    untouched: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Centralizing:
    """The settings of :func:`centralize`; ``describe(params)`` says what happens to each leaf.

    Attributes:
      layers: which layers are centralized.
      axes: pairs of path pattern and axes, the first that fits is taken.
      unreadable: what happens to a leaf that can't be read.
      known: pairs of path and reading, from the model's module types.
    """

    layers: str
    axes: tuple[tuple[PathPattern, tuple[int, ...]], ...]
    unreadable: str
    known: tuple[tuple[str, LayerAxes], ...]

    def describe(self, params: Any) -> CentralizedAxes:
        """Return the axes of the centralized leaves of ``params``, and why the others are not."""
        shapes = shapes_of(params)
        for pattern, _ in self.axes:
            check_matched("centralize: axes", pattern, (path for path, _ in shapes))
        if self.known and not {path for path, _ in self.known} & {path for path, _ in shapes}:
            raise ValueError(
                "centralize: model has none of these parameters; give the nnx model that they were "
                f"taken from. Leaves: {', '.join(path for path, _ in shapes)}"
            )
        return self.plan(shapes)

    def plan(self, shapes: Shapes, whole: Shapes = ()) -> CentralizedAxes:
        """Return the same for the paths and shapes of leaves, which may be part of a whole tree."""
        return _plan(self, shapes, whole or shapes)


def centralize(
    *,
    layers: str = "conv_and_dense",
    axes: Mapping[PathPattern, int | Sequence[int]] | None = None,
    model: Any = None,
    unreadable: str = "error",
) -> optax.GradientTransformationExtraArgs:
    """Centralize gradients, or updates: subtract each unit's mean over its inputs.

    ``g - mean(g, axes=inputs)`` for the weights of convolutions and dense layers. The place in the
    chain is the choice between the two forms::

        optax.chain(boostax.centralize(), optax.sgd(0.1, 0.9))      # on the gradient
        optax.chain(optax.adamw(1e-3), boostax.centralize())        # on the final update

    The first is the common form, and right for SGD and momentum. The second is what its authors
    advise for Adam-like optimizers, whose division by the second moment undoes a centralization
    that came before it. Before or after the learning rate is the same.

    The input axes are read from the paths and shapes of the parameters, for the layers of linen
    and nnx: Dense, convolutions (grouped, depthwise, transposed), DenseGeneral, attention, and
    all of them stacked by ``nn.scan`` or ``nnx.vmap`` (each layer for itself).
    :func:`centralized_axes` shows what was read.

    The mean is taken in float32 or better; a leaf keeps its dtype. A NaN stays within its own
    unit. A unit with one input has no mean to remove, its leaf passes unchanged.

    Args:
      layers: ``"conv_and_dense"`` (default) or ``"conv"`` for convolutions only.
      axes: path pattern to the input axes of the leaves it matches, an int or a sequence of ints;
        ``()`` leaves them unchanged. A pattern is shell-style text (``"*/mixer/kernel"``), a
        compiled regular expression, or a function of the path; the first that fits is taken, ahead
        of what is read and of ``layers``. Default None.
      model: an ``nnx.Module`` whose module types then tell the axes exactly. Default None.
      unreadable: ``"error"`` (default) refuses a tree with a weight whose axes can't be read, and
        lists those leaves; ``"skip"`` leaves them unchanged.

    Returns:
      A stateless transformation.

    Raises:
      ValueError: an argument is out of range; when it is initialised, a pattern matches no leaf,
        an axis is not one of its leaf's, or a leaf can't be read.

    Example:
      The mean over the two inputs of each of the three units is taken away.

      >>> import jax.numpy as jnp
      >>> params = {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}
      >>> grads = {"kernel": jnp.array([[1.0, 2, 3], [4, 5, 6]]), "bias": jnp.ones(3)}
      >>> tx = centralize()
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["kernel"].tolist()
      [[-1.5, -1.5, -1.5], [1.5, 1.5, 1.5]]
      >>> updates["bias"].tolist()
      [1.0, 1.0, 1.0]

    Source:
      H. Yong, J. Huang, X. Hua and L. Zhang, "Gradient Centralization: A New Optimization
      Technique for Deep Neural Networks", ECCV 2020.

    When not to use:
      Where the mean of a unit's weights has to be learned: it keeps the value that it was
      initialised with (inputs that are not centred around zero, no normalisation and no bias).
    """
    settings = Centralizing(
        layers=_choice("layers", layers, _LAYERS),
        axes=_axes_by_pattern(axes),
        unreadable=_choice("unreadable", unreadable, _UNREADABLE),
        known=() if model is None else tuple(read_model(model).items()),
    )

    def init(params: Any) -> optax.EmptyState:
        settings.describe(params)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        shapes = shapes_of(updates)
        # The parameters say more: a bias may be masked out of the updates, but not of them.
        own = () if params is None else shapes_of(params)
        plan = settings.plan(shapes, around(own if set(shapes) <= set(own) else shapes))

        def one(path: Any, leaf: Any) -> Any:
            mean_over = plan.axes.get(path_string(path))
            return leaf if mean_over is None else _without_mean(leaf, mean_over)

        return jax.tree_util.tree_map_with_path(one, updates), state

    shown = {"layers": layers, "axes": dict(axes or {}), "unreadable": unreadable}
    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo("centralize", shown, static=settings, fates=lambda p: _fates(settings, p)),
    )


def _fates(settings: Centralizing, params: Any) -> dict[str, str]:
    read = settings.describe(params)
    fates = {path: f"mean over axes {axes} removed" for path, axes in read.axes.items()}
    return fates | {path: f"unchanged ({why})" for path, why in read.untouched.items()}


def centralized_axes(
    params: Any,
    *,
    layers: str = "conv_and_dense",
    axes: Mapping[PathPattern, int | Sequence[int]] | None = None,
    model: Any = None,
    unreadable: str = "error",
) -> CentralizedAxes:
    """Say which leaves :func:`centralize` touches, over which axes, and why not the others.

    Args:
      params: the parameters, arrays or ``ShapeDtypeStruct`` leaves.
      layers: as for :func:`centralize`.
      axes: as for :func:`centralize`.
      model: as for :func:`centralize`.
      unreadable: as for :func:`centralize`.

    Returns:
      :class:`CentralizedAxes`: ``axes`` by path, and ``untouched`` with a reason by path.

    Raises:
      ValueError: as for :func:`centralize`.

    Example:
      >>> import jax
      >>> from flax import linen as nn
      >>> key, image = jax.random.key(0), jax.numpy.zeros((1, 8, 8, 3))
      >>> params = nn.Sequential([nn.Conv(4, (3, 3)), nn.Dense(2)]).init(key, image)["params"]
      >>> read = centralized_axes(params)
      >>> read.axes
      {'layers_0/kernel': (0, 1, 2), 'layers_1/kernel': (0,)}
      >>> read.untouched
      {'layers_0/bias': 'vector', 'layers_1/bias': 'vector'}

    When not to use:
      It is for looking and for tests; ``centralize`` reads the tree by itself.
    """
    tx = centralize(layers=layers, axes=axes, model=model, unreadable=unreadable)
    info = find(tx, "centralize")
    assert info is not None  # centralize attached it
    return info.static.describe(params)


def _without_mean(leaf: Any, axes: tuple[int, ...]) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return (wide - jnp.mean(wide, axis=axes, keepdims=True)).astype(leaf.dtype)


@functools.lru_cache(maxsize=256)
def _plan(settings: Centralizing, shapes: Shapes, whole: Shapes) -> CentralizedAxes:
    """Decide for every leaf; cached, so that an update outside jit costs no more reading."""
    read = {**read_layers(dict(whole)), **dict(settings.known)}
    touched: dict[str, tuple[int, ...]] = {}
    untouched: dict[str, str] = {}
    faults = []
    for path, shape in shapes:
        pattern = next((item for item in settings.axes if matches(item[0], path)), None)
        leaf = read[path]
        if max(leaf.axes, default=0) >= len(shape) > 0:
            leaf = LayerAxes("unreadable", (), f"shape {shape}, but the model has {leaf.reason}")
        if pattern is not None:
            axes = _in_range(pattern[0], path, pattern[1], len(shape))
            leaf = LayerAxes("dense", axes, f"axes[{pattern[0]!r}]")
            if not axes:
                untouched[path] = f"axes[{pattern[0]!r}] is ()"
                continue
        elif leaf.kind == "conv or dense" and settings.layers == "conv":
            leaf = LayerAxes("unreadable", (), f"{leaf.reason}: a convolution or a dense layer")
        if leaf.kind == "unreadable":
            untouched[path] = f"can't be read: {leaf.reason}"
            faults.append(f"{path} ({leaf.reason})")
        elif leaf.kind == "none":
            untouched[path] = leaf.reason
        elif settings.layers == "conv" and leaf.kind == "dense" and pattern is None:
            untouched[path] = 'a dense layer, and layers is "conv"'
        elif math.prod(shape[axis] for axis in leaf.axes) < 2:
            untouched[path] = "units with one input: nothing would be left of it"
        else:
            touched[path] = leaf.axes
    if faults and settings.unreadable == "error":
        raise ValueError(
            f"centralize: can't tell the input axes of {len(faults)} of {len(shapes)} leaves: "
            f"{'; '.join(faults)}. Give them with axes={{path pattern: (axis, ...)}}, () for a leaf "
            "that is no layer's weight; or pass model=, if it is an nnx model; or "
            'unreadable="skip" to leave them as they are.'
        )
    return CentralizedAxes(touched, untouched)


def _choice(argument: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(
            f"centralize: {argument} must be one of {', '.join(map(repr, allowed))}, got "
            f"{value!r}.{did_you_mean(value, allowed)}"
        )
    return value


def _axes_by_pattern(axes: Any) -> tuple[tuple[PathPattern, tuple[int, ...]], ...]:
    if not isinstance(axes, Mapping | None):
        raise ValueError(
            f"centralize: axes must be a mapping from path pattern to input axes, got {axes!r}"
        )
    return tuple((pattern, _axes(pattern, value)) for pattern, value in (axes or {}).items())


def _axes(pattern: PathPattern, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    try:
        if any(isinstance(axis, (bool, np.bool_)) for axis in values):
            raise TypeError
        return tuple(operator.index(axis) for axis in values)
    except TypeError:
        raise ValueError(
            f"centralize: axes[{pattern!r}] must be an int or a sequence of ints, the input axes "
            f"to average over, got {value!r}"
        ) from None


def _in_range(pattern: PathPattern, path: str, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    inside = tuple(sorted({axis % rank for axis in axes if -rank <= axis < rank}))
    if len(inside) != len(axes):
        raise ValueError(
            f"centralize: axes[{pattern!r}] is {axes}, but {path} has the axes 0 to {rank - 1}, "
            "each of which may be named once"
        )
    return inside
