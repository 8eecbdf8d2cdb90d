"""Layer norm for nnx: Flax's, with two-pass variance, checks, and parameters over several axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from boostax.models import _norm_checks as checks
from boostax.models import _norm_math as maths
from boostax.models._norm_axes import axes_from_end
from boostax.models._norm_math import value_of

__all__ = ["LayerNorm"]

_ZEROS, _ONES = initializers.zeros, initializers.ones


class LayerNorm(nnx.LayerNorm):
    """Layer norm over the last axes of each example, with parameters over the same or fewer axes.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. As ``flax.nnx.LayerNorm``, with
    two-pass variance and checks; and parameters may have several axes, which Flax's can't.

    Args:
      num_features: channels, at least 1, or the shape of scale and bias, such as ``(H, W, C)``.
      begin_norm_axis: the first axis that is normalised; it and all behind it are. Default None: the
        axes of ``num_features``.
      begin_params_axis: the first axis that has parameters. Default None: counted from the end by
        ``num_features``. A number from 0 fixes the rank of the input.
      epsilon: above 0. Default 1e-6. (PyTorch's is 1e-5, MindSpore's 1e-7.)
      use_scale: multiply by a scale. Default True.
      use_bias: add a bias. Default True.
      scale_init: initialiser. Default ones.
      bias_init: initialiser. Default zeros.
      use_fast_variance: Flax's one-pass variance. Default False.
      rngs: random keys, as everywhere in nnx.
      **flax_arguments: further arguments of ``flax.nnx.LayerNorm``: ``dtype``, ``param_dtype``,
        ``reduction_axes``, ``feature_axes`` (for other axes than the last), ``axis_name``, ...

    Raises:
      ValueError, TypeError: a setting is out of range, of a wrong type or contradicts another; at a
        call: the input has another rank or shape, or is not floating.

    Example:
      Over height, width and channels: one parameter for each value, or one for each channel.

      >>> import jax
      >>> from flax import nnx
      >>> x = jax.random.normal(jax.random.key(0), (2, 3, 5, 4))
      >>> full = LayerNorm((3, 5, 4), rngs=nnx.Rngs(0))
      >>> full.scale.shape, full(x).shape
      ((3, 5, 4), (2, 3, 5, 4))
      >>> by_channel = LayerNorm(4, begin_norm_axis=1, rngs=nnx.Rngs(0))
      >>> by_channel.scale.shape, bool(abs(by_channel(x) - full(x)).max() < 1e-5)
      ((4,), True)

    Source:
      J. Ba, J. Kiros and G. Hinton, "Layer Normalization", 2016.

    When not to use:
      Parameters over all axes tie the model to one image size.
    """

    def __init__(
        self,
        num_features: int | Sequence[int],
        *,
        begin_norm_axis: int | None = None,
        begin_params_axis: int | None = None,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        scale_init: Any = _ONES,
        bias_init: Any = _ZEROS,
        use_fast_variance: bool = False,
        rngs: nnx.Rngs,
        **flax_arguments: Any,
    ) -> None:
        name = type(self).__name__
        several = isinstance(num_features, (tuple, list))
        shape = tuple(
            checks.count_of(name, "num_features", size)
            for size in (num_features if several else (num_features,))
        )
        if not shape:
            raise ValueError(f"{name}: num_features must name at least one axis, got ()")
        checks.check_affine(name, epsilon, use_scale, use_bias)
        for ours, theirs, value in (
            ("begin_norm_axis", "reduction_axes", begin_norm_axis),
            ("begin_params_axis", "feature_axes", begin_params_axis),
        ):
            if value is not None and theirs in flax_arguments:
                raise ValueError(f"{name}: give {ours} or {theirs}, not both")
        if begin_norm_axis is not None and "feature_axes" in flax_arguments:
            raise ValueError(f"{name}: give reduction_axes with feature_axes, not begin_norm_axis")
        axes = axes_from_end(name, len(shape), begin_norm_axis, begin_params_axis)
        arguments: dict[str, Any] = {
            "reduction_axes": axes.reduction,
            "feature_axes": axes.features,
        }
        arguments |= {"promote_dtype": maths.at_least_float32, **flax_arguments}
        # Flax makes vectors; only these initialisers know the shape.
        whole = lambda init: lambda key, _, dtype: init(key, shape, dtype)
        super().__init__(
            math.prod(shape),
            epsilon=epsilon,
            use_scale=use_scale,
            use_bias=use_bias,
            scale_init=whole(scale_init),
            bias_init=whole(bias_init),
            use_fast_variance=use_fast_variance,
            rngs=rngs,
            **arguments,
        )
        self.shape, self.rank, self.merge = shape, axes.rank, axes.merge

    def __call__(self, x: jax.Array, *, mask: Any = None) -> jax.Array:
        """Normalise ``x``; ``mask`` says which values count."""
        name, last = type(self).__name__, len(self.shape)
        checks.check_floating(name, x)
        if x.ndim < last or self.rank not in (None, x.ndim):
            wanted = f"{last} or more" if self.rank is None else self.rank
            raise ValueError(f"{name}: the input must have rank {wanted}, got shape {x.shape}")
        checks.check_channels(name, x, maths.canonical(self.feature_axes, x.ndim), self.shape)
        y = x
        if self.merge is not None:
            if self.merge > x.ndim - last:
                raise ValueError(
                    f"{name}: begin_norm_axis {self.merge} lies behind the first axis with "
                    f"parameters in shape {x.shape}; count it from the end, as a negative number"
                )
            join = lambda v: v.reshape(*x.shape[: self.merge], -1, *self.shape)
            y = join(x)
            mask = None if mask is None else join(jnp.broadcast_to(mask, x.shape))
        y = super().__call__(y, mask=mask).reshape(x.shape)
        return y.astype(
            maths.result_dtype(self.dtype, x, value_of(self.scale), value_of(self.bias))
        )
