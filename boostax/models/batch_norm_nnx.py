"""Batch norm and ghost batch norm for nnx: Flax's, with two-pass variance, checks and more.

Channels are last by default, inputs have any number of spatial axes, statistics are float32 or
better. The names are Flax's: parameters ``scale`` and ``bias``, statistics ``mean`` and ``var``
(``nnx.BatchStat``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.nn import initializers

from boostax.models import _norm_checks as checks
from boostax.models import _norm_math as maths
from boostax.models._norm_math import value_of

__all__ = ["BatchNorm", "GhostBatchNorm"]

_ZEROS, _ONES = initializers.zeros, initializers.ones


class BatchNorm(nnx.BatchNorm):
    """Batch norm over all axes but the channels', as ``flax.nnx.BatchNorm`` and more.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias``, with the batch's mean and biased
    variance in training, and running ones in evaluation (``model.train()``, ``model.eval()``)::

        running = momentum * running + (1 - momentum) * of_the_batch

    More than Flax's: the variance takes two passes (Flax's default loses it at means far from 0),
    bfloat16 inputs meet float32 running statistics uncast, settings and inputs are checked, and the
    running variance can be PyTorch's.

    Args:
      num_features: channels, at least 1.
      momentum: share of the old running value, in [0, 1]. Default 0.99. (PyTorch's is the share of
        the new one.)
      epsilon: above 0. Default 1e-5.
      axis: the channel axis. Default -1.
      unbiased: keep the running variance with the divisor n - 1, as PyTorch and MindSpore do.
        Default False.
      spatial_dims: allowed number of axes besides batch and channels, an int or several, 2 for
        images; default None: any.
      use_scale: multiply by a scale. Default True.
      use_bias: add a bias. Default True.
      scale_init: initialiser. Default ones.
      bias_init: initialiser. Default zeros.
      use_fast_variance: Flax's one-pass variance. Default False.
      rngs: random keys, as everywhere in nnx.
      **flax_arguments: further arguments of ``flax.nnx.BatchNorm``: ``dtype``, ``param_dtype``,
        ``axis_name``, ``axis_index_groups``, ``use_running_average``, ``scale_metadata``, ...

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type; at a call: the input has
        another rank, channel count or a dtype that is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = BatchNorm(2, momentum=0.9, unbiased=True, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[0.0, 10], [2, 10]])).round(3).tolist()
      [[-1.0, 0.0], [1.0, 0.0]]
      >>> print(norm.mean[...], norm.var[...])
      [0.1 1. ] [1.1 0.9]

    Source:
      S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing
      Internal Covariate Shift", ICML 2015.

    When not to use:
      Batches of a few examples, or examples that depend on each other. ``GroupNorm`` doesn't look
      at the batch.
    """

    def __init__(
        self,
        num_features: int,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        axis: int = -1,
        unbiased: bool = False,
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
        checks.check_momentum(name, momentum)
        checks.check_flag(name, "unbiased", unbiased)
        checks.check_affine(name, epsilon, use_scale, use_bias)
        super().__init__(
            num_features,
            momentum=momentum,
            epsilon=epsilon,
            axis=axis,
            use_scale=use_scale,
            use_bias=use_bias,
            scale_init=scale_init,
            bias_init=bias_init,
            use_fast_variance=use_fast_variance,
            rngs=rngs,
            **{"promote_dtype": maths.at_least_float32, **flax_arguments},
        )
        self.unbiased = unbiased
        self.spatial_dims = checks.dims_of(name, spatial_dims)

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        axes = self._check(x)
        old = self.mean[...], self.var[...]
        y = super().__call__(x, use_running_average, mask=mask)
        use = self.use_running_average if use_running_average is None else use_running_average
        if not use:
            var = self.var[...]
            if self.unbiased:
                count = maths.values_per_channel(
                    x.shape,
                    axes,
                    mask=mask,
                    axis_name=self.axis_name,
                    axis_index_groups=self.axis_index_groups,
                )
                checks.check_unbiased(type(self).__name__, count)
                var = maths.unbiased_running_var(old[1], var, self.momentum, count)
            self.mean[...] = self.mean[...].astype(old[0].dtype)
            self.var[...] = var.astype(old[1].dtype)
        return y.astype(
            maths.result_dtype(self.dtype, x, value_of(self.scale), value_of(self.bias))
        )

    def _check(self, x: Any) -> tuple[int, ...]:
        name = type(self).__name__
        checks.check_floating(name, x)
        checks.check_rank(name, x, 2, self.spatial_dims)
        axes = (checks.axis_in(name, "axis", self.axis, x.ndim, batch=True),)
        checks.check_channels(name, x, axes, (self.num_features,))
        return axes


class GhostBatchNorm(BatchNorm):
    """Batch norm whose statistics come from chunks of the batch.

    The batch is cut into chunks of ``ghost_batch_size`` consecutive examples; each is normalised by
    its own mean and variance. A large batch then regularises as a small one does. The running
    statistics take in the chunks' averages; evaluation is that of :class:`BatchNorm`.

    Args:
      num_features: channels, at least 1.
      ghost_batch_size: examples of a chunk, at least 1; must divide the batch.
      **arguments: those of :class:`BatchNorm`. With ``axis_name`` the devices share running
        statistics; the chunks stay on their device. The channel axis must not be 0.

    Raises:
      ValueError, TypeError: as :class:`BatchNorm`; at a call: the batch is not a multiple of
        ``ghost_batch_size``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = GhostBatchNorm(1, ghost_batch_size=2, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[0.0], [2], [100], [102]])).round(2).tolist()
      [[-1.0], [1.0], [-1.0], [1.0]]

    Source:
      E. Hoffer, I. Hubara and D. Soudry, "Train Longer, Generalize Better: Closing the
      Generalization Gap in Large Batch Training of Neural Networks", NeurIPS 2017.

    When not to use:
      Where the batch is small already.
    """

    def __init__(self, num_features: int, *, ghost_batch_size: int, **arguments: Any) -> None:
        self.ghost_batch_size = checks.count_of(
            type(self).__name__, "ghost_batch_size", ghost_batch_size
        )
        super().__init__(num_features, **arguments)

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise ``x`` (batch, spatial axes, channels); ``mask`` says which values count."""
        use = self.use_running_average if use_running_average is None else use_running_average
        if use is None or use:
            return super().__call__(x, use)
        axes = self._check(x)
        scale, bias = value_of(self.scale), value_of(self.bias)
        y, stats = maths.ghost_normalized(
            x, axes, self.ghost_batch_size, scale, bias, self.epsilon, mask, type(self).__name__
        )
        if self.unbiased:
            checks.check_unbiased(type(self).__name__, stats.count)
        self.mean[...], self.var[...] = maths.running(
            (self.mean[...], self.var[...]),
            stats,
            tuple(axis + 1 for axis in axes),
            momentum=self.momentum,
            unbiased=self.unbiased,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
        )
        return y.astype(maths.result_dtype(self.dtype, x, scale, bias))
