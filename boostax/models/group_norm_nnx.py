"""Group and instance norm for nnx: Flax's, with two-pass variance, checks and more.

They look at one example at a time. Channels are last by default, inputs have any number of spatial
axes, statistics are float32 or better. The names are Flax's: parameters ``scale`` and ``bias``,
statistics ``mean`` and ``var`` (``nnx.BatchStat``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from boostax.models import _norm_checks as checks
from boostax.models import _norm_math as maths
from boostax.models._norm_math import value_of

__all__ = ["GroupNorm", "InstanceNorm"]

_ZEROS, _ONES = initializers.zeros, initializers.ones


class GroupNorm(nnx.GroupNorm):
    """Group norm: mean and variance of each example's groups of channels.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. As ``flax.nnx.GroupNorm``, with
    two-pass variance, checks, and a choice of the channel axis.

    Args:
      num_features: channels, at least 1.
      num_groups: groups, which must divide the channels. Default 32; None with ``group_size``.
      group_size: channels of a group, in place of ``num_groups``. Default None.
      epsilon: above 0. Default 1e-6. (PyTorch's and MindSpore's is 1e-5.)
      axis: the channel axis, not 0. Default -1.
      use_scale: multiply by a scale. Default True.
      use_bias: add a bias. Default True.
      scale_init: initialiser. Default ones.
      bias_init: initialiser. Default zeros.
      use_fast_variance: Flax's one-pass variance. Default False.
      rngs: random keys, as everywhere in nnx.
      **flax_arguments: further arguments of ``flax.nnx.GroupNorm``: ``dtype``, ``param_dtype``,
        ``reduction_axes``, ``axis_name``, ...

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type, groups don't divide the
        channels; at a call: the input has another rank or channel count, or is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[0.0, 2, 100, 102]])).round(2).tolist()
      [[-1.0, 1.0, -1.0, 1.0]]

    Source:
      Y. Wu and K. He, "Group Normalization", ECCV 2018.

    When not to use:
      Large batches of images where batch norm trains well: it is usually the more accurate there.
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        axis: int = -1,
        use_scale: bool = True,
        use_bias: bool = True,
        scale_init: Any = _ONES,
        bias_init: Any = _ZEROS,
        use_fast_variance: bool = False,
        rngs: nnx.Rngs,
        **flax_arguments: Any,
    ) -> None:
        name = type(self).__name__
        num_features = checks.count_of(name, "num_features", num_features)
        groups = checks.group_count(name, num_features, num_groups, group_size)
        checks.check_affine(name, epsilon, use_scale, use_bias)
        super().__init__(
            num_features,
            groups,
            epsilon=epsilon,
            use_scale=use_scale,
            use_bias=use_bias,
            scale_init=scale_init,
            bias_init=bias_init,
            use_fast_variance=use_fast_variance,
            rngs=rngs,
            **{"promote_dtype": maths.at_least_float32, **flax_arguments},
        )
        self.num_features, self.axis = num_features, checks.channel_axis(name, "axis", axis)

    def __call__(self, x: jax.Array, *, mask: Any = None) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        name = type(self).__name__
        checks.check_floating(name, x)
        checks.check_rank(name, x, 2)
        axis = checks.axis_in(name, "axis", self.axis, x.ndim)
        checks.check_channels(name, x, (axis,), (self.num_features,))
        last = lambda value: jnp.moveaxis(value, axis, -1)
        masked = None if mask is None else last(jnp.broadcast_to(mask, x.shape))
        y = jnp.moveaxis(super().__call__(last(x), mask=masked), -1, axis)
        return y.astype(
            maths.result_dtype(self.dtype, x, value_of(self.scale), value_of(self.bias))
        )


class InstanceNorm(nnx.InstanceNorm):
    """Instance norm: mean and variance of each channel of each example, over its spatial axes.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. As ``flax.nnx.InstanceNorm``, with
    two-pass variance and checks; and it can keep running statistics, which Flax's can't: averages
    over examples, used in evaluation as a batch norm uses them.

    Args:
      num_features: channels, at least 1.
      track_running_stats: keep running statistics, and use them in evaluation. Default False: each
        example's own, always.
      momentum: share of the old running value, in [0, 1]. Default 0.99.
      unbiased: keep the running variance with the divisor n - 1, as PyTorch does. Default False.
      use_running_average: start in evaluation mode; ``model.train()`` and ``model.eval()`` set it.
        Default False.
      epsilon: above 0. Default 1e-6. (PyTorch's and MindSpore's is 1e-5.)
      feature_axes: the channel axis, not 0. Default -1.
      spatial_dims: allowed number of spatial axes, an int or several; default None: 1 or more.
      use_scale: multiply by a scale. Default True.
      use_bias: add a bias. Default True.
      scale_init: initialiser. Default ones.
      bias_init: initialiser. Default zeros.
      use_fast_variance: Flax's one-pass variance, without running statistics. Default False.
      rngs: random keys, as everywhere in nnx.
      **flax_arguments: further arguments of ``flax.nnx.InstanceNorm``: ``dtype``, ``param_dtype``,
        ``axis_name`` (devices that share each example's pixels), ...

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type; at a call: the input has
        no spatial axis, another channel count, or is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = InstanceNorm(1, track_running_stats=True, momentum=0.5, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[[0.0], [2]], [[10], [12]]])).round(2)[..., 0].tolist()
      [[-1.0, 1.0], [-1.0, 1.0]]
      >>> norm.mean[...].tolist(), norm.var[...].tolist()
      ([3.0], [1.0])

    Source:
      D. Ulyanov, A. Vedaldi and V. Lempitsky, "Instance Normalization: The Missing Ingredient for
      Fast Stylization", 2016.

    When not to use:
      Classification, where a channel's mean over the image says what is in it.
    """

    def __init__(
        self,
        num_features: int,
        *,
        track_running_stats: bool = False,
        momentum: float = 0.99,
        unbiased: bool = False,
        use_running_average: bool = False,
        epsilon: float = 1e-6,
        feature_axes: int = -1,
        spatial_dims: int | Sequence[int] | None = None,
        use_scale: bool = True,
        use_bias: bool = True,
        scale_init: Any = _ONES,
        bias_init: Any = _ZEROS,
        use_fast_variance: bool = False,
        rngs: nnx.Rngs,
        **flax_arguments: Any,
    ) -> None:
        name = type(self).__name__
        num_features = checks.count_of(name, "num_features", num_features)
        checks.check_affine(name, epsilon, use_scale, use_bias)
        checks.check_tracking(name, track_running_stats, momentum, unbiased, use_fast_variance)
        super().__init__(
            num_features,
            epsilon=epsilon,
            feature_axes=checks.channel_axis(name, "feature_axes", feature_axes),
            use_scale=use_scale,
            use_bias=use_bias,
            scale_init=scale_init,
            bias_init=bias_init,
            use_fast_variance=use_fast_variance,
            rngs=rngs,
            **{"promote_dtype": maths.at_least_float32, **flax_arguments},
        )
        self.spatial_dims = checks.dims_of(name, spatial_dims)
        self.track_running_stats = track_running_stats
        if track_running_stats:
            self.momentum, self.unbiased = momentum, unbiased
            self.use_running_average = use_running_average
            self.mean = nnx.BatchStat(jnp.zeros((num_features,), jnp.float32))
            self.var = nnx.BatchStat(jnp.ones((num_features,), jnp.float32))

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        name = type(self).__name__
        checks.check_floating(name, x)
        checks.check_rank(name, x, 3, self.spatial_dims)
        features = (checks.axis_in(name, "feature_axes", self.feature_axes, x.ndim),)
        checks.check_channels(name, x, features, (self.num_features,))
        scale, bias = value_of(self.scale), value_of(self.bias)
        if not self.track_running_stats:
            y = super().__call__(x, mask=mask)
        else:
            use = self.use_running_average if use_running_average is None else use_running_average
            y, new = maths.instance_normalized(
                x,
                features,
                scale,
                bias,
                (self.mean[...], self.var[...]),
                use,
                self,
                mask,
            )
            if not use:
                self.mean[...], self.var[...] = new
        return y.astype(maths.result_dtype(self.dtype, x, scale, bias))

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Class method used by ``nnx.view``.

        Args:
          use_running_average: evaluate by the running statistics.
        """
        if use_running_average is not None and self.track_running_stats:
            self.use_running_average = use_running_average
