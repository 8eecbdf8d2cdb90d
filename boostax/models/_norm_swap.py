"""From one norm layer's settings to those of another kind, the same for linen and nnx."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
from flax import nnx

import boostax.linen
import boostax.nnx
from boostax.models import _norm_checks as checks

__all__ = ["KINDS", "Target", "keeps_running", "kind_of_norm"]

KINDS = {
    "batch": "BatchNorm",
    "layer": "LayerNorm",
    "group": "GroupNorm",
    "instance": "InstanceNorm",
    "ghost_batch": "GhostBatchNorm",
}
_TYPES = {
    "ghost_batch": (boostax.linen.GhostBatchNorm, boostax.nnx.GhostBatchNorm),
    "batch": (nn.BatchNorm, nnx.BatchNorm),
    "layer": (nn.LayerNorm, nnx.LayerNorm),
    "group": (nn.GroupNorm, nnx.GroupNorm),
    "instance": (nn.InstanceNorm, nnx.InstanceNorm),
}
_WORDS = {kind: f"a {kind.replace('_', ' ')} norm" for kind in KINDS}
_WORDS["instance"] = "an instance norm"
_COMMON = ("epsilon", "dtype", "param_dtype", "use_scale", "use_bias", "scale_init", "bias_init")


def kind_of_norm(layer: Any) -> str | None:
    """Return a norm layer's kind, as in ``to=``, or None for any other module."""
    return next((kind for kind, types in _TYPES.items() if isinstance(layer, types)), None)


def keeps_running(layer: Any, kind: str) -> bool:
    """Say whether a norm layer has running statistics."""
    return kind in ("batch", "ghost_batch") or bool(getattr(layer, "track_running_stats", False))


@dataclasses.dataclass(frozen=True)
class Target:
    """What norms are turned into; hashable.

    Attributes:
      kind: one of ``KINDS``.
      settings: pairs of name and value that the user gave.
    """

    kind: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def tracks(self) -> bool:
        """Whether the new layers have running statistics."""
        given = dict(self.settings)
        return self.kind in ("batch", "ghost_batch") or bool(given.get("track_running_stats"))

    def passes_on(self, kind: str) -> bool:
        """Say whether a layer of this kind hands its running statistics on to the new one."""
        return {kind, self.kind} <= {"batch", "ghost_batch"}

    def why_not(self, layer: Any, kind: str, channels: int) -> str | None:
        """Return why a layer needs no change, or None."""
        given = dict(self.settings)
        if kind != self.kind:
            return None
        if kind == "group" and _groups(layer, channels) != checks.group_count(
            "GroupNorm", channels, given["num_groups"], given["group_size"]
        ):
            return None
        if kind == "ghost_batch" and layer.ghost_batch_size != given["ghost_batch_size"]:
            return None
        if kind == "layer" and given.get("begin_norm_axis") is not None:
            return None
        if kind == "instance" and keeps_running(layer, kind) != self.tracks:
            return None
        return f"is {_WORDS[kind]} already"

    def arguments(self, layer: Any, kind: str) -> dict[str, Any]:
        """Return the new layer's keyword arguments, those of the old one where they mean the same."""
        given = {name: value for name, value in self.settings if value is not None}
        if self.kind == "group":
            given["num_groups"] = given.get("num_groups")
        made = {name: getattr(layer, name) for name in _COMMON if hasattr(layer, name)}
        axis = channel_axis(layer, kind)
        place = "axis" if self.kind in ("batch", "ghost_batch", "group") else "feature_axes"
        if self.kind != "layer" or axis != -1:
            made[place] = axis
        if self.kind == "layer" and axis != -1 and "begin_norm_axis" not in given:
            made["reduction_axes"] = axis
        if self.tracks:
            old = keeps_running(layer, kind)
            made["momentum"] = layer.momentum if old else 0.99
            made["unbiased"] = old and bool(getattr(layer, "unbiased", False))
        if self.passes_on(kind):
            # The devices that share a batch; to the other norms the names mean something else.
            made["axis_name"] = layer.axis_name
            made["axis_index_groups"] = layer.axis_index_groups
        return made | given


def channel_axis(layer: Any, kind: str) -> int:
    """Return the axis of a norm layer's channels.

    Raises:
      ValueError: its parameters have several axes.
    """
    if kind in ("batch", "ghost_batch", "group"):
        return getattr(layer, "axis", -1)
    axes = layer.feature_axes
    begin = getattr(layer, "begin_params_axis", None)
    if begin is not None and isinstance(layer, nn.Module):
        axes = -1 if begin == -1 else (begin, -1)
    several = (axes,) if isinstance(axes, int) else tuple(axes)
    if len(several) != 1:
        raise ValueError(
            "its scale and bias have several axes, and only one value a channel can be kept; leave "
            "it out by patterns="
        )
    return several[0]


def _groups(layer: Any, channels: int) -> int:
    # nnx has both numbers, linen the one that was given.
    if isinstance(layer, nnx.Module) or layer.group_size is None:
        return layer.num_groups  # pyright: ignore[reportAttributeAccessIssue]
    return channels // layer.group_size
