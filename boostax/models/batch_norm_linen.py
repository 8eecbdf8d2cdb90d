"""Batch norm and ghost batch norm for linen: Flax's, with two-pass variance, checks and more.

Channels are last by default, inputs have any number of spatial axes, statistics are float32 or
better. The names are Flax's: parameters ``scale`` and ``bias``, statistics ``mean`` and ``var`` in
the collection ``batch_stats``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from boostax.models import _norm_checks as checks
from boostax.models import _norm_math as maths

__all__ = ["BatchNorm", "GhostBatchNorm"]


class BatchNorm(nn.BatchNorm):
    """Batch norm over all axes but the channels', as ``flax.linen.BatchNorm`` and more.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, with the batch's mean and biased
    variance in training, and running ones where ``use_running_average``::

        running = momentum * running + (1 - momentum) * of_the_batch

    More than Flax's: the variance takes two passes (Flax's default loses it at means far from 0),
    settings and inputs are checked, and the running variance can be PyTorch's.

    Args:
      use_running_average: evaluate; here or at the call.
      axis: the channel axis. Default -1.
      momentum: share of the old running value, in [0, 1]. Default 0.99. (PyTorch's is the share of
        the new one.)
      epsilon: above 0. Default 1e-5.
      unbiased: keep the running variance with the divisor n - 1, as PyTorch and MindSpore do.
        Default False.
      spatial_dims: allowed number of axes besides batch and channels, an int or several, 2 for
        images; default None: any.
      use_fast_variance: Flax's one-pass variance. Default False.
      others: those of ``flax.linen.BatchNorm``: ``dtype``, ``param_dtype``, ``use_scale``,
        ``use_bias``, ``scale_init``, ``bias_init``, ``axis_name``, ``axis_index_groups``.

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type; at a call: the input has
        another rank, or is not floating.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> norm = BatchNorm(momentum=0.9, unbiased=True)
      >>> x = jnp.array([[0.0, 10], [2, 10]])
      >>> variables = norm.init(jax.random.key(0), x, use_running_average=True)
      >>> y, new = norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
      >>> print(y.round(3).tolist(), new["batch_stats"]["mean"], new["batch_stats"]["var"])
      [[-1.0, 0.0], [1.0, 0.0]] [0.1 1. ] [1.1 0.9]

    Source:
      S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing
      Internal Covariate Shift", ICML 2015.

    When not to use:
      Batches of a few examples, or examples that depend on each other. ``GroupNorm`` doesn't look
      at the batch.
    """

    use_fast_variance: bool = False
    unbiased: bool = False
    spatial_dims: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.check_momentum(name, self.momentum)
        checks.check_flag(name, "unbiased", self.unbiased)
        checks.check_affine(name, self.epsilon, self.use_scale, self.use_bias)
        checks.dims_of(name, self.spatial_dims)
        super().__post_init__()

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        axes = self._check(x)
        use = self.use_running_average if use_running_average is None else use_running_average
        moves = use is not None and not use and not self.is_initializing()
        old = self.get_variable("batch_stats", "var") if moves else None
        y = super().__call__(x, use_running_average, mask=mask)
        if old is None:
            return y
        var = self.get_variable("batch_stats", "var")
        if self.unbiased:
            count = maths.values_per_channel(
                x.shape,
                axes,
                mask=mask,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
            )
            checks.check_unbiased(type(self).__name__, count)
            var = maths.unbiased_running_var(old, var, self.momentum, count)
        mean = self.get_variable("batch_stats", "mean")
        self.put_variable("batch_stats", "mean", mean.astype(old.dtype))
        self.put_variable("batch_stats", "var", var.astype(old.dtype))
        return y

    def _check(self, x: Any) -> tuple[int, ...]:
        name = type(self).__name__
        checks.check_floating(name, x)
        checks.check_rank(name, x, 2, checks.dims_of(name, self.spatial_dims))
        return (checks.axis_in(name, "axis", self.axis, x.ndim, batch=True),)


class GhostBatchNorm(BatchNorm):
    """Batch norm whose statistics come from chunks of the batch.

    The batch is cut into chunks of ``ghost_batch_size`` consecutive examples; each is normalised by
    its own mean and variance. A large batch then regularises as a small one does. The running
    statistics take in the chunks' averages; evaluation is that of :class:`BatchNorm`.

    Args:
      ghost_batch_size: examples of a chunk, at least 1; must divide the batch. Required. ``init``
        takes a batch of any size.
      others: those of :class:`BatchNorm`. With ``axis_name`` the devices share running
        statistics; the chunks stay on their device. The channel axis must not be 0.

    Raises:
      ValueError, TypeError: as :class:`BatchNorm`; at a call: the batch is not a multiple of
        ``ghost_batch_size``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> norm = GhostBatchNorm(ghost_batch_size=2, use_running_average=False)
      >>> x = jnp.array([[0.0], [2], [100], [102]])
      >>> y, _ = norm.init_with_output(jax.random.key(0), x)
      >>> y.round(2).tolist()
      [[-1.0], [1.0], [-1.0], [1.0]]

    Source:
      E. Hoffer, I. Hubara and D. Soudry, "Train Longer, Generalize Better: Closing the
      Generalization Gap in Large Batch Training of Neural Networks", NeurIPS 2017.

    When not to use:
      Where the batch is small already.
    """

    ghost_batch_size: int | None = None

    def __post_init__(self) -> None:
        checks.count_of(type(self).__name__, "ghost_batch_size", self.ghost_batch_size)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        use = self.use_running_average if use_running_average is None else use_running_average
        size = checks.count_of(type(self).__name__, "ghost_batch_size", self.ghost_batch_size)
        if use is None or use or (self.is_initializing() and x.shape[0] % size):
            return super().__call__(x, use_running_average, mask=mask)
        name, axes = type(self).__name__, self._check(x)
        shape = tuple(x.shape[axis] for axis in axes)
        mean = self.variable("batch_stats", "mean", maths.stats_init, 0.0, shape)
        var = self.variable("batch_stats", "var", maths.stats_init, 1.0, shape)
        scale, bias = affine(self, shape)
        y, stats = maths.ghost_normalized(x, axes, size, scale, bias, self.epsilon, mask, name)
        if not self.is_initializing():
            if self.unbiased:
                checks.check_unbiased(name, stats.count)
            mean.value, var.value = maths.running(
                (mean.value, var.value),
                stats,
                tuple(axis + 1 for axis in axes),
                momentum=self.momentum,
                unbiased=self.unbiased,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
            )
        return y.astype(maths.result_dtype(self.dtype, x, scale, bias))


def affine(module: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a compact module's parameters ``scale`` and ``bias``, None where it has none."""
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if module.use_bias:
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    return scale, bias
