"""Norm layers for Flax linen, with the checks and options that Flax's own lack."""

from boostax.models.batch_norm_linen import BatchNorm, GhostBatchNorm
from boostax.models.group_norm_linen import GroupNorm, InstanceNorm
from boostax.models.layer_norm_linen import LayerNorm
from boostax.models.norm_import_linen import from_mindspore, from_torch

__all__ = [
    "BatchNorm",
    "GhostBatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "from_mindspore",
    "from_torch",
]
