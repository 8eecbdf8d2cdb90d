"""Norm layers of PyTorch and MindSpore, made for linen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from boostax.models import norm_settings
from boostax.models.batch_norm_linen import BatchNorm
from boostax.models.group_norm_linen import GroupNorm, InstanceNorm
from boostax.models.layer_norm_linen import LayerNorm

__all__ = ["from_mindspore", "from_torch"]

_LAYERS = {layer.__name__: layer for layer in (BatchNorm, GroupNorm, InstanceNorm, LayerNorm)}


def from_torch(
    kind: str,
    *,
    state: Mapping[str, Any] | None = None,
    channels: str = "last",
    name: str | None = None,
    axis_name: str | None = None,
    **settings: Any,
) -> tuple[Any, dict[str, Any]]:
    """Make the norm layer that computes what one of ``torch.nn`` does, and its variables.

    PyTorch's momentum weighs the new value (``momentum=0.1`` is 0.9 here) and its running variance
    is the unbiased one.

    Args:
      kind: ``"BatchNorm1d"``, ``"BatchNorm2d"``, ``"BatchNorm3d"``, ``"SyncBatchNorm"``,
        ``"LayerNorm"``, ``"GroupNorm"``, or ``"InstanceNorm1d"`` to ``"InstanceNorm3d"``.
      state: the layer's ``state_dict()`` as arrays (``weight``, ``bias``, ``running_mean``,
        ``running_var``); default None: no variables.
      channels: where the channels are in this layer's input: ``"last"`` (default), or ``"first"``
        for axis 1, as in PyTorch. With ``"last"``, a layer norm over several axes is one over
        (C, ...) there and (..., C) here; where no axis moves, pass ``"first"``.
      name: the submodule's name. Default None.
      axis_name: for batch norms under ``shard_map``: the axis of devices. Default None.
      **settings: PyTorch's own arguments by name; defaults are PyTorch's.

    Returns:
      A layer of :mod:`boostax.linen`, and its variables (``params``, ``batch_stats``), empty where
      ``state`` is None.

    Raises:
      ValueError: an unknown layer or setting, a setting that has no counterpart, or arrays that are
        missing, too many, or of another shape.

    Example:
      >>> import numpy as np
      >>> state = {"weight": np.ones(8), "bias": np.zeros(8)}
      >>> norm, variables = from_torch("GroupNorm", num_groups=2, num_channels=8, state=state)
      >>> norm.num_groups, norm.epsilon, variables["params"]["scale"].shape
      (2, 1e-05, (8,))

    When not to use:
      A layer that starts fresh and need not match: the classes of this module say what they do.
    """
    translated = norm_settings.from_torch(kind, state, channels, settings)
    return _made("from_torch", translated, name, axis_name)


def from_mindspore(
    kind: str,
    *,
    state: Mapping[str, Any] | None = None,
    channels: str = "last",
    name: str | None = None,
    axis_name: str | None = None,
    **settings: Any,
) -> tuple[Any, dict[str, Any]]:
    """Make the norm layer that computes what one of ``mindspore.nn`` does, and its variables.

    MindSpore's momentum weighs the old value, as here; its running variance is the unbiased one;
    its layer norm's epsilon is 1e-7. Its instance norm never uses running statistics.

    Args:
      kind: ``"BatchNorm1d"`` to ``"BatchNorm3d"``, ``"SyncBatchNorm"``, ``"LayerNorm"``,
        ``"GroupNorm"``, or ``"InstanceNorm1d"`` to ``"InstanceNorm3d"``.
      state: arrays by MindSpore's names (``gamma``, ``beta``, ``moving_mean``,
        ``moving_variance``); default None: no variables.
      channels: as for :func:`from_torch`.
      name: as for :func:`from_torch`.
      axis_name: as for :func:`from_torch`.
      **settings: MindSpore's own arguments by name; defaults are MindSpore's.

    Returns:
      As for :func:`from_torch`.

    Raises:
      ValueError: as for :func:`from_torch`.

    Example:
      >>> norm, variables = from_mindspore("LayerNorm", normalized_shape=(8,))
      >>> norm.epsilon, variables
      (1e-07, {})

    When not to use:
      A layer that starts fresh and need not match: the classes of this module say what they do.
    """
    translated = norm_settings.from_mindspore(kind, state, channels, settings)
    return _made("from_mindspore", translated, name, axis_name)


def _made(
    function: str, made: norm_settings.Translated, name: str | None, axis_name: str | None
) -> tuple[Any, dict[str, Any]]:
    settings = dict(made.settings)
    if axis_name is not None:
        settings["axis_name"] = norm_settings.shared(function, made, axis_name)
    layer: Any = _LAYERS[made.layer](name=name, **settings)
    variables: dict[str, Any] = {}
    for collection, arrays in (("params", made.params), ("batch_stats", made.stats)):
        if arrays:
            variables[collection] = {
                key: jnp.asarray(value, jnp.float32) for key, value in arrays.items()
            }
    return layer, variables
