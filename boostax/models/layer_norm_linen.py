"""Layer norm for linen: Flax's, with two-pass variance, checks, and the axes as MindSpore has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from boostax.models import _norm_checks as checks
from boostax.models._norm_axes import axes_for_rank

__all__ = ["LayerNorm"]


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last axes of each example, with parameters over the same or fewer axes.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. As ``flax.linen.LayerNorm``, with
    two-pass variance and checks, and two arguments that say where the axes begin.

    Args:
      begin_norm_axis: the first axis that is normalised; it and all behind it are. Default None:
        ``reduction_axes``, by default the last axis.
      begin_params_axis: the first axis that has parameters. Default None: ``feature_axes``, by
        default the last axis.
      epsilon: above 0. Default 1e-6. (PyTorch's is 1e-5, MindSpore's 1e-7.)
      use_fast_variance: Flax's one-pass variance. Default False.
      others: those of ``flax.linen.LayerNorm``: ``dtype``, ``param_dtype``, ``use_scale``,
        ``use_bias``, ``scale_init``, ``bias_init``, ``axis_name``, ``axis_index_groups``.

    Raises:
      ValueError, TypeError: a setting is out of range, of a wrong type or contradicts another; at a
        call: the input has no such axis, or is not floating.

    Example:
      >>> import jax
      >>> x = jax.random.normal(jax.random.key(0), (2, 3, 5, 4))
      >>> full = LayerNorm(begin_norm_axis=1, begin_params_axis=1)
      >>> y, variables = full.init_with_output(jax.random.key(0), x)
      >>> variables["params"]["scale"].shape, bool(abs(y.mean((1, 2, 3))).max() < 1e-5)
      ((3, 5, 4), True)

    Source:
      J. Ba, J. Kiros and G. Hinton, "Layer Normalization", 2016.

    When not to use:
      Parameters over all axes tie the model to one image size.
    """

    use_fast_variance: bool = False
    begin_norm_axis: int | None = None
    begin_params_axis: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.check_affine(name, self.epsilon, self.use_scale, self.use_bias)
        for ours, theirs in (
            ("begin_norm_axis", "reduction_axes"),
            ("begin_params_axis", "feature_axes"),
        ):
            value = getattr(self, ours)
            if value is None:
                continue
            checks.check_int(name, ours, value)
            if getattr(self, theirs) != -1:
                raise ValueError(f"{name}: give {ours} or {theirs}, not both")
        super().__post_init__()

    def __call__(self, x: jax.Array, *, mask: Any = None) -> jax.Array:
        """Normalise ``x``; ``mask`` says which values count."""
        name = type(self).__name__
        checks.check_floating(name, x)
        axes = {}
        for ours, theirs in (
            ("begin_norm_axis", "reduction_axes"),
            ("begin_params_axis", "feature_axes"),
        ):
            if getattr(self, ours) is not None:
                axes[theirs] = axes_for_rank(name, ours, getattr(self, ours), x.ndim)
        if not axes or self.scope is None:
            return super().__call__(x, mask=mask)
        # Flax wants the axes when the module is made, where the rank is not known: a second module
        # in the same scope has them.
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(nn.LayerNorm)}
        fields |= {**axes, "parent": self.scope, "name": None}
        return nn.LayerNorm(**fields)(x, mask=mask)
