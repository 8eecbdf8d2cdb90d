"""Which layers of Flax are batch norms, other norms, convolutions and dense layers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from flax import nnx

__all__ = ["BATCH_NORMS", "DENSE", "NORMS", "REPARAMETRIZED", "WEIGHTS", "has_bias", "kind_of"]

BATCH_NORMS = (nn.BatchNorm, nnx.BatchNorm)
NORMS = (
    *BATCH_NORMS,
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm),
    *(nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm),
)
DENSE = (nn.Dense, nn.DenseGeneral, nn.Einsum, nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
# What makes the kernel of the layer that it holds anew at each call.
REPARAMETRIZED = (nn.WeightNorm, nn.SpectralNorm, nnx.WeightNorm, nnx.SpectralNorm)
WEIGHTS = (*DENSE, nn.Conv, nn.ConvLocal, nn.ConvTranspose, nnx.Conv, nnx.ConvTranspose)


def kind_of(layer: Any) -> str | None:
    """Return ``"batch_norm"``, ``"norm"``, ``"weight"`` or None for a module."""
    for kind, types in (("batch_norm", BATCH_NORMS), ("norm", NORMS), ("weight", WEIGHTS)):
        if isinstance(layer, types):
            return kind
    return None


def has_bias(layer: Any) -> bool:
    """Say whether a layer adds a bias."""
    if isinstance(layer, nnx.Module):
        return getattr(layer, "bias", None) is not None
    return bool(getattr(layer, "use_bias", False))
