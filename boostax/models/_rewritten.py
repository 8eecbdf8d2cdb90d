"""Which rewrites a model has been through already, told by what they leave in it."""

from __future__ import annotations

from typing import Any

from flax import nnx

from boostax.models._left_over import (
    BatchNormLeftOver,
    LeftOver,
    SkipGain,
    Standardized,
    StandardizedKernel,
)
from boostax.models._surgery_nnx import named_modules
from boostax.models.norm_head import HeadRule
from boostax.models.normalized_linear import NormalizedLinear

__all__ = ["rewrites_in"]


def rewrites_in(model: Any) -> frozenset[str]:
    """Return which of ``less_bn`` and ``norm_head`` have changed a model."""
    found = set()
    if isinstance(model, nnx.Module):
        for module in named_modules(model).values():
            kernel = isinstance(getattr(module, "promote_dtype", None), StandardizedKernel)
            if kernel or isinstance(module, BatchNormLeftOver) or hasattr(module, "skip_gain"):
                found.add("less_bn")
            if isinstance(module, NormalizedLinear):
                found.add("norm_head")
        return frozenset(found)
    _, stages = getattr(type(model), "_rewritten", (None, ()))
    for rule in (rule for stage in stages for rule in stage):
        if isinstance(rule.run, LeftOver | SkipGain | Standardized):
            found.add("less_bn")
        if isinstance(rule.run, HeadRule):
            found.add("norm_head")
    return frozenset(found)
