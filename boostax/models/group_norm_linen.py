"""Group and instance norm for linen: Flax's, with two-pass variance, checks and more.

They look at one example at a time. Channels are last by default, inputs have any number of spatial
axes, statistics are float32 or better. The names are Flax's: parameters ``scale`` and ``bias``,
statistics ``mean`` and ``var`` in the collection ``batch_stats``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from boostax.models import _norm_checks as checks
from boostax.models import _norm_math as maths
from boostax.models.batch_norm_linen import affine

__all__ = ["GroupNorm", "InstanceNorm"]


class GroupNorm(nn.GroupNorm):
    """Group norm: mean and variance of each example's groups of channels.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. As ``flax.linen.GroupNorm``, with
    two-pass variance, checks, and a choice of the channel axis.

    Args:
      num_groups: groups, which must divide the channels. Default 32; None with ``group_size``.
      group_size: channels of a group, in place of ``num_groups``. Default None.
      epsilon: above 0. Default 1e-6. (PyTorch's and MindSpore's is 1e-5.)
      axis: the channel axis, not 0. Default -1.
      use_fast_variance: Flax's one-pass variance. Default False.
      others: those of ``flax.linen.GroupNorm``: ``dtype``, ``param_dtype``, ``use_scale``,
        ``use_bias``, ``scale_init``, ``bias_init``, ``reduction_axes``, ``axis_name``,
        ``axis_index_groups``.

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type; at a call: groups don't
        divide the channels, the input has another rank, or is not floating.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> norm = GroupNorm(num_groups=2)
      >>> y, _ = norm.init_with_output(jax.random.key(0), jnp.array([[0.0, 2, 100, 102]]))
      >>> y.round(2).tolist()
      [[-1.0, 1.0, -1.0, 1.0]]

    Source:
      Y. Wu and K. He, "Group Normalization", ECCV 2018.

    When not to use:
      Large batches of images where batch norm trains well: it is usually the more accurate there.
    """

    use_fast_variance: bool = False
    axis: int = -1

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.group_settings(name, self.num_groups, self.group_size)
        checks.channel_axis(name, "axis", self.axis)
        checks.check_affine(name, self.epsilon, self.use_scale, self.use_bias)
        super().__post_init__()

    def __call__(self, x: jax.Array, *, mask: Any = None) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        name = type(self).__name__
        checks.check_floating(name, x)
        checks.check_rank(name, x, 2)
        axis = checks.axis_in(name, "axis", self.axis, x.ndim)
        where = f"{name} {'/'.join(self.path)}" if self.scope is not None else name
        checks.group_count(where, x.shape[axis], self.num_groups, self.group_size)
        last = lambda value: jnp.moveaxis(value, axis, -1)
        masked = None if mask is None else last(jnp.broadcast_to(mask, x.shape))
        return jnp.moveaxis(super().__call__(last(x), mask=masked), -1, axis)


class InstanceNorm(nn.InstanceNorm):
    """Instance norm: mean and variance of each channel of each example, over its spatial axes.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``. As ``flax.linen.InstanceNorm``, with
    two-pass variance and checks; and it can keep running statistics, which Flax's can't: averages
    over examples, used in evaluation as a batch norm uses them.

    Args:
      track_running_stats: keep running statistics, and use them in evaluation. Default False: each
        example's own, always.
      use_running_average: evaluate by the running statistics; here or at the call. Ignored where
        there are none.
      momentum: share of the old running value, in [0, 1]. Default 0.99.
      unbiased: keep the running variance with the divisor n - 1, as PyTorch does. Default False.
      epsilon: above 0. Default 1e-6. (PyTorch's and MindSpore's is 1e-5.)
      feature_axes: the channel axis, not 0. Default -1.
      spatial_dims: allowed number of spatial axes, an int or several; default None: 1 or more.
      use_fast_variance: Flax's one-pass variance, without running statistics. Default False.
      others: those of ``flax.linen.InstanceNorm``: ``dtype``, ``param_dtype``, ``use_scale``,
        ``use_bias``, ``scale_init``, ``bias_init``, ``axis_name``, ``axis_index_groups``.

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type; at a call: the input has
        no spatial axis or is not floating, ``use_running_average`` is missing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> norm = InstanceNorm(track_running_stats=True, momentum=0.5, use_running_average=False)
      >>> x = jnp.array([[[0.0], [2]], [[10], [12]]])
      >>> y, new = norm.apply(norm.init(jax.random.key(0), x), x, mutable=["batch_stats"])
      >>> y.round(2)[..., 0].tolist()
      [[-1.0, 1.0], [-1.0, 1.0]]
      >>> new["batch_stats"]["mean"].tolist(), new["batch_stats"]["var"].tolist()
      ([3.0], [1.0])

    Source:
      D. Ulyanov, A. Vedaldi and V. Lempitsky, "Instance Normalization: The Missing Ingredient for
      Fast Stylization", 2016.

    When not to use:
      Classification, where a channel's mean over the image says what is in it.
    """

    use_fast_variance: bool = False
    track_running_stats: bool = False
    use_running_average: bool | None = None
    momentum: float = 0.99
    unbiased: bool = False
    spatial_dims: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.channel_axis(name, "feature_axes", self.feature_axes)
        checks.check_affine(name, self.epsilon, self.use_scale, self.use_bias)
        checks.check_tracking(
            name, self.track_running_stats, self.momentum, self.unbiased, self.use_fast_variance
        )
        checks.dims_of(name, self.spatial_dims)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        name = type(self).__name__
        checks.check_floating(name, x)
        checks.check_rank(name, x, 3, checks.dims_of(name, self.spatial_dims))
        features = (checks.axis_in(name, "feature_axes", self.feature_axes, x.ndim),)
        if not self.track_running_stats:
            return super().__call__(x, mask=mask)
        use = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        shape = (x.shape[features[0]],)
        mean = self.variable("batch_stats", "mean", maths.stats_init, 0.0, shape)
        var = self.variable("batch_stats", "var", maths.stats_init, 1.0, shape)
        scale, bias = affine(self, shape)
        y, new = maths.instance_normalized(
            x, features, scale, bias, (mean.value, var.value), use, self, mask
        )
        if not use and not self.is_initializing():
            mean.value, var.value = new
        return y.astype(maths.result_dtype(self.dtype, x, scale, bias))
