"""Norm layers for Flax nnx, with the checks and options that Flax's own lack."""

from boostax.models.batch_norm_nnx import BatchNorm, GhostBatchNorm
from boostax.models.group_norm_nnx import GroupNorm, InstanceNorm
from boostax.models.layer_norm_nnx import LayerNorm
from boostax.models.norm_import_nnx import from_mindspore, from_torch

__all__ = [
    "BatchNorm",
    "GhostBatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "from_mindspore",
    "from_torch",
]
