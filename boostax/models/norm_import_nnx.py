"""Norm layers of PyTorch and MindSpore, made for nnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from boostax.models import norm_settings
from boostax.models.batch_norm_nnx import BatchNorm
from boostax.models.group_norm_nnx import GroupNorm, InstanceNorm
from boostax.models.layer_norm_nnx import LayerNorm

__all__ = ["from_mindspore", "from_torch"]

_LAYERS = {layer.__name__: layer for layer in (BatchNorm, GroupNorm, InstanceNorm, LayerNorm)}


def from_torch(
    kind: str,
    *,
    state: Mapping[str, Any] | None = None,
    channels: str = "last",
    rngs: nnx.Rngs | None = None,
    axis_name: str | None = None,
    **settings: Any,
) -> Any:
    """Make the norm layer that computes what one of ``torch.nn`` does.

    PyTorch's momentum weighs the new value (``momentum=0.1`` is 0.9 here) and its running variance
    is the unbiased one.

    Args:
      kind: ``"BatchNorm1d"``, ``"BatchNorm2d"``, ``"BatchNorm3d"``, ``"SyncBatchNorm"``,
        ``"LayerNorm"``, ``"GroupNorm"``, or ``"InstanceNorm1d"`` to ``"InstanceNorm3d"``.
      state: the layer's ``state_dict()`` as arrays (``weight``, ``bias``, ``running_mean``,
        ``running_var``); default None: fresh values.
      channels: where the channels are in this layer's input: ``"last"`` (default), or ``"first"``
        for axis 1, as in PyTorch. With ``"last"``, a layer norm over several axes is one over
        (C, ...) there and (..., C) here; where no axis moves, pass ``"first"``.
      rngs: random keys. Default ``nnx.Rngs(0)``; no initial value is random.
      axis_name: for batch norms under ``shard_map``: the axis of devices. Default None.
      **settings: PyTorch's own arguments by name; defaults are PyTorch's.

    Returns:
      A layer of :mod:`boostax.nnx`.

    Raises:
      ValueError: an unknown layer or setting, a setting that has no counterpart, or arrays that are
        missing, too many, or of another shape.

    Example:
      >>> norm = from_torch("BatchNorm2d", num_features=8, momentum=0.2)
      >>> type(norm).__name__, norm.momentum, norm.unbiased, norm.epsilon
      ('BatchNorm', 0.8, True, 1e-05)

    When not to use:
      A layer that starts fresh and need not match: the classes of this module say what they do.
    """
    translated = norm_settings.from_torch(kind, state, channels, settings)
    return _made("from_torch", translated, rngs, axis_name)


def from_mindspore(
    kind: str,
    *,
    state: Mapping[str, Any] | None = None,
    channels: str = "last",
    rngs: nnx.Rngs | None = None,
    axis_name: str | None = None,
    **settings: Any,
) -> Any:
    """Make the norm layer that computes what one of ``mindspore.nn`` does.

    MindSpore's momentum weighs the old value, as here; its running variance is the unbiased one;
    its layer norm's epsilon is 1e-7. Its instance norm never uses running statistics.

    Args:
      kind: ``"BatchNorm1d"`` to ``"BatchNorm3d"``, ``"SyncBatchNorm"``, ``"LayerNorm"``,
        ``"GroupNorm"``, or ``"InstanceNorm1d"`` to ``"InstanceNorm3d"``.
      state: arrays by MindSpore's names (``gamma``, ``beta``, ``moving_mean``,
        ``moving_variance``); default None: fresh values.
      channels: as for :func:`from_torch`.
      rngs: as for :func:`from_torch`.
      axis_name: as for :func:`from_torch`.
      **settings: MindSpore's own arguments by name; defaults are MindSpore's.

    Returns:
      A layer of :mod:`boostax.nnx`.

    Raises:
      ValueError: as for :func:`from_torch`.

    Example:
      >>> norm = from_mindspore("LayerNorm", normalized_shape=(8,))
      >>> type(norm).__name__, norm.epsilon
      ('LayerNorm', 1e-07)

    When not to use:
      A layer that starts fresh and need not match: the classes of this module say what they do.
    """
    translated = norm_settings.from_mindspore(kind, state, channels, settings)
    return _made("from_mindspore", translated, rngs, axis_name)


def _made(
    function: str, made: norm_settings.Translated, rngs: nnx.Rngs | None, axis_name: str | None
) -> Any:
    settings = dict(made.settings)
    if axis_name is not None:
        settings["axis_name"] = norm_settings.shared(function, made, axis_name)
    rngs = nnx.Rngs(0) if rngs is None else rngs
    layer: Any = _LAYERS[made.layer](made.features, rngs=rngs, **settings)  # pyright: ignore
    for name, value in {**made.params, **made.stats}.items():
        variable = getattr(layer, name)
        variable[...] = jnp.asarray(value, variable[...].dtype)
    return layer
