"""PyTorch's and MindSpore's norm layers, translated: what a setting of theirs is here.

| | here and in Flax | PyTorch | MindSpore |
|---|---|---|---|
| momentum weighs | the old value | the new value | the old value |
| running variance | biased | unbiased | unbiased |
| channels | last | axis 1 | axis 1 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from boostax.errors import did_you_mean

__all__ = ["Translated", "from_mindspore", "from_torch", "shared"]

_REQUIRED = object()

_TORCH_BATCH = {
    "num_features": _REQUIRED,
    "eps": 1e-5,
    "momentum": 0.1,
    "affine": True,
    "track_running_stats": True,
}
_TORCH = {
    "BatchNorm1d": _TORCH_BATCH,
    "BatchNorm2d": _TORCH_BATCH,
    "BatchNorm3d": _TORCH_BATCH,
    "SyncBatchNorm": _TORCH_BATCH,
    "LayerNorm": {
        "normalized_shape": _REQUIRED,
        "eps": 1e-5,
        "elementwise_affine": True,
        "bias": True,
    },
    "GroupNorm": {"num_groups": _REQUIRED, "num_channels": _REQUIRED, "eps": 1e-5, "affine": True},
} | {
    f"InstanceNorm{n}d": _TORCH_BATCH | {"affine": False, "track_running_stats": False}
    for n in (1, 2, 3)
}
_TORCH_STATE = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}

_MINDSPORE_BATCH = {
    "num_features": _REQUIRED,
    "eps": 1e-5,
    "momentum": 0.9,
    "affine": True,
    "use_batch_statistics": None,
}
_MINDSPORE = {
    "BatchNorm1d": _MINDSPORE_BATCH,
    "BatchNorm2d": _MINDSPORE_BATCH,
    "BatchNorm3d": _MINDSPORE_BATCH,
    "SyncBatchNorm": _MINDSPORE_BATCH,
    "LayerNorm": {
        "normalized_shape": _REQUIRED,
        "begin_norm_axis": -1,
        "begin_params_axis": -1,
        "epsilon": 1e-7,
    },
    "GroupNorm": {"num_groups": _REQUIRED, "num_channels": _REQUIRED, "eps": 1e-5, "affine": True},
} | {
    f"InstanceNorm{n}d": {"num_features": _REQUIRED, "eps": 1e-5, "momentum": 0.1, "affine": True}
    for n in (1, 2, 3)
}
_MINDSPORE_STATE = {
    "gamma": "scale",
    "beta": "bias",
    "moving_mean": "mean",
    "moving_variance": "var",
    "mean": "mean",
    "variance": "var",
}


class Translated(NamedTuple):
    """A norm layer in our terms.

    Attributes:
      layer: the class's name here.
      features: channels, or the shape of a layer norm's parameters.
      settings: keyword arguments that linen and nnx share.
      params: ``scale`` and ``bias``, where they were given.
      stats: ``mean`` and ``var``, where they were given.
    """

    layer: str
    features: int | tuple[int, ...]
    settings: dict[str, Any]
    params: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]


def from_torch(
    kind: str, state: Mapping[str, Any] | None, channels: str, settings: Mapping[str, Any]
) -> Translated:
    """Translate a layer of ``torch.nn``; see ``boostax.nnx.from_torch``."""
    own = _filled("from_torch", kind, _TORCH, settings)
    where = f"from_torch({kind!r})"
    axis = _channel_axis(where, channels)
    if kind == "LayerNorm":
        affine = bool(own["elementwise_affine"])
        shape = _shape(where, own["normalized_shape"])
        made = _layer_norm(shape, -len(shape), -len(shape), own["eps"], axis)
        made["use_scale"], made["use_bias"] = affine, affine and bool(own["bias"])
        layer, features = "LayerNorm", _turned_shape(shape, axis)
    else:
        layer, features, made = _with_channels(kind, own, axis)
        if kind != "GroupNorm":
            tracked = bool(own["track_running_stats"])
            if layer == "BatchNorm" and not tracked:
                raise ValueError(
                    f"{where}: track_running_stats=False uses the batch's statistics in evaluation "
                    "too; make a BatchNorm and call it with use_running_average=False"
                )
            if tracked:
                made |= {"momentum": _old_share(where, own["momentum"]), "unbiased": True}
            if layer == "InstanceNorm":
                made["track_running_stats"] = tracked
    if state is not None:
        state = {name: value for name, value in state.items() if name != "num_batches_tracked"}
    return _with_state(where, Translated(layer, features, made, {}, {}), state, _TORCH_STATE, axis)


def from_mindspore(
    kind: str, state: Mapping[str, Any] | None, channels: str, settings: Mapping[str, Any]
) -> Translated:
    """Translate a layer of ``mindspore.nn``; see ``boostax.nnx.from_mindspore``."""
    own = _filled("from_mindspore", kind, _MINDSPORE, settings)
    where = f"from_mindspore({kind!r})"
    axis = _channel_axis(where, channels)
    if kind == "LayerNorm":
        shape = _shape(where, own["normalized_shape"])
        begin, params = own["begin_norm_axis"], own["begin_params_axis"]
        if axis == -1 and not (begin == params == 1 or (begin == params == -1 == -len(shape))):
            raise ValueError(
                f"{where}: with channels last, begin_norm_axis {begin} and begin_params_axis "
                f"{params} are other axes than with MindSpore's channels on axis 1. For inputs "
                "whose axes stay where they are, pass channels='first'"
            )
        made = _layer_norm(shape, begin, params, own["epsilon"], axis)
        layer, features = "LayerNorm", _turned_shape(shape, axis)
    else:
        layer, features, made = _with_channels(kind, own, axis)
        if layer == "BatchNorm":
            if own["use_batch_statistics"] is not None:
                raise ValueError(
                    f"{where}: use_batch_statistics={own['use_batch_statistics']!r} fixes the mode; "
                    "make the layer without it and set use_running_average"
                )
            made |= {"momentum": own["momentum"], "unbiased": True}
    return _with_state(
        where, Translated(layer, features, made, {}, {}), state, _MINDSPORE_STATE, axis
    )


def _old_share(where: str, momentum: float | None) -> float:
    if momentum is None:
        raise ValueError(
            f"{where}: momentum=None is a cumulative average, which no layer here keeps; give the "
            "number to go on with"
        )
    return 1.0 - momentum


def shared(function: str, layer: Translated, axis_name: str) -> str:
    """Return ``axis_name`` for a batch norm; another norm doesn't look at other devices' examples."""
    if layer.layer != "BatchNorm":
        raise ValueError(f"{function}: axis_name is for batch norms, got a {layer.layer}")
    return axis_name


def _filled(
    function: str, kind: Any, known: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
) -> dict[str, Any]:
    if kind not in known:
        raise ValueError(
            f"{function}: unknown layer {kind!r}.{did_you_mean(str(kind), known)} Known: "
            f"{', '.join(known)}"
        )
    defaults = known[kind]
    for name in given:
        if name not in defaults:
            raise ValueError(
                f"{function}({kind!r}): unknown setting {name!r}.{did_you_mean(name, defaults)} "
                f"Known: {', '.join(defaults)}"
            )
    own = {**defaults, **given}
    missing = [name for name, value in own.items() if value is _REQUIRED]
    if missing:
        raise ValueError(f"{function}({kind!r}): the setting {missing[0]} is missing")
    return own


def _channel_axis(where: str, channels: Any) -> int:
    if channels not in ("last", "first"):
        raise ValueError(f"{where}: channels must be 'last' or 'first', got {channels!r}")
    return -1 if channels == "last" else 1


def _shape(where: str, value: Any) -> tuple[int, ...]:
    shape = (value,) if np.ndim(value) == 0 else tuple(value)
    if not shape:
        raise ValueError(f"{where}: normalized_shape must name at least one axis, got {value!r}")
    return shape


def _turned_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape if axis == 1 else (*shape[1:], shape[0])


def _layer_norm(
    shape: tuple[int, ...], begin: int, params: int, epsilon: float, axis: int
) -> dict[str, Any]:
    if axis == -1:
        begin = params = -len(shape)
    return {"begin_norm_axis": begin, "begin_params_axis": params, "epsilon": epsilon}


def _with_channels(kind: str, own: Mapping[str, Any], axis: int) -> tuple[str, int, dict[str, Any]]:
    made: dict[str, Any] = {
        "epsilon": own["eps"],
        "use_scale": bool(own["affine"]),
        "use_bias": bool(own["affine"]),
    }
    if kind == "GroupNorm":
        return (
            "GroupNorm",
            own["num_channels"],
            made | {"num_groups": own["num_groups"], "axis": axis},
        )
    digits = [int(letter) for letter in kind if letter.isdigit()]
    if digits:
        made["spatial_dims"] = (0, 1) if kind == "BatchNorm1d" else digits[0]
    if kind.startswith("Instance"):
        return "InstanceNorm", own["num_features"], made | {"feature_axes": axis}
    return "BatchNorm", own["num_features"], made | {"axis": axis}


def _with_state(
    where: str,
    layer: Translated,
    state: Mapping[str, Any] | None,
    names: Mapping[str, str],
    axis: int,
) -> Translated:
    """Add the arrays of ``state``, all that the layer has and no others."""
    if state is None:
        return layer
    use_scale, use_bias = (layer.settings.get(key, True) for key in ("use_scale", "use_bias"))
    has_stats = layer.layer == "BatchNorm" or layer.settings.get("track_running_stats", False)
    wanted = {
        ours
        for ours, has in (
            ("scale", use_scale),
            ("bias", use_bias),
            ("mean", has_stats),
            ("var", has_stats),
        )
        if has
    }
    got: dict[str, np.ndarray] = {}
    for name, value in state.items():
        ours = names.get(name)
        if ours not in wanted:
            raise ValueError(
                f"{where}: state has {name!r}, which this layer has no place for. "
                f"It takes {sorted(n for n, o in names.items() if o in wanted)}"
            )
        got[ours] = _turned(where, name, np.asarray(value), layer, axis)
    missing = sorted(wanted - set(got))
    if missing:
        lacking = [next(n for n, o in names.items() if o == ours) for ours in missing]
        raise ValueError(f"{where}: state lacks {lacking}")
    return layer._replace(
        params={name: got[name] for name in ("scale", "bias") if name in got},
        stats={name: got[name] for name in ("mean", "var") if name in got},
    )


def _turned(where: str, name: str, value: np.ndarray, layer: Translated, axis: int) -> np.ndarray:
    shape = layer.features if isinstance(layer.features, tuple) else (layer.features,)
    if axis == -1 and value.ndim > 1:
        value = np.moveaxis(value, 0, -1)
    if value.shape != shape:
        raise ValueError(
            f"{where}: state[{name!r}] has shape {np.shape(value)}, the settings say {shape} "
            f"(channels {'last' if axis == -1 else 'first'})"
        )
    return value
