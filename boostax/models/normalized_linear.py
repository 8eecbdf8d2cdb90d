"""The normalised classifier for nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from boostax.models import _norm_checks as checks
from boostax.models.normalized import multiplier_start, normalized_linear

__all__ = ["NormalizedLinear"]


class NormalizedLinear(nnx.Module):
    """A linear layer on L2-normalised features and weights, times a trainable multiplier.

    ``multiplier * ((x / |x|) @ (kernel / |kernel|) + bias)``, with the norm of each feature vector
    and of each class's weights. It takes the place of the last ``nnx.Linear`` of a classifier.

    Args:
      in_features: inputs, at least 1.
      out_features: outputs (classes), at least 1.
      multiplier_init: what the multiplier starts with, above 0; default None:
        ``max(1, sqrt(2) ln(out_features - 1))``. The reference, ``mindspore.boost``, starts with 1,
        with which the cross entropy of 10 classes can't fall below 1.38 until it has grown.
      use_bias: add a bias to the cosines, as in the reference. Default False.
      epsilon: the least squared norm; shorter vectors are divided by its root. Default 1e-4, as in
        the reference. No derivative is larger than ``multiplier / sqrt(epsilon)``.
      dtype: dtype of the product and the result; norms are float32 or better. Default None: the
        common one of input and parameters.
      param_dtype: dtype of the parameters. Default float32.
      precision: as in ``jax.lax.dot_general``. Default None.
      kernel_init: initialiser of the kernel. Default LeCun normal.
      bias_init: initialiser of the bias. Default zeros.
      rngs: random keys, as everywhere in nnx.

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type; at a call: the input has
        another number of features.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> head = NormalizedLinear(4, 10, rngs=nnx.Rngs(0))
      >>> head.kernel.shape, round(float(head.multiplier[...]), 3)
      ((4, 10), 3.107)
      >>> x = jnp.arange(8.0).reshape(2, 4)
      >>> bool(jnp.allclose(head(x), head(100 * x), atol=1e-5))
      True

    Source:
      F. Wang, X. Xiang, J. Cheng and A. Yuille, "NormFace: L2 Hypersphere Embedding for Face
      Verification", 2017. X. Zhang et al., "AdaCos: Adaptively Scaling Cosine Logits for
      Effectively Learning Deep Face Representations", 2019.

    When not to use:
      Regression, or where the length of the features says something.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        multiplier_init: float | None = None,
        use_bias: bool = False,
        epsilon: float = 1e-4,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = initializers.lecun_normal(),  # noqa: B008
        bias_init: Any = initializers.zeros,
        rngs: nnx.Rngs,
    ) -> None:
        name = type(self).__name__
        self.in_features = checks.count_of(name, "in_features", in_features)
        self.out_features = checks.count_of(name, "out_features", out_features)
        checks.check_flag(name, "use_bias", use_bias)
        checks.check_epsilon(name, epsilon)
        start = multiplier_start(name, multiplier_init, self.out_features)
        shape = (self.in_features, self.out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.multiplier = nnx.Param(jnp.asarray(start, param_dtype))
        self.bias: Any = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (self.out_features,), param_dtype))
        self.use_bias, self.epsilon, self.precision = use_bias, epsilon, precision
        self.dtype, self.param_dtype = dtype, param_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of features of shape (..., in_features)."""
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}(in_features={self.in_features}): the input must have shape "
                f"(..., {self.in_features}), got {x.shape}"
            )
        return normalized_linear(
            x,
            self.kernel[...],
            self.multiplier[...],
            None if self.bias is None else self.bias[...],
            epsilon=self.epsilon,
            dtype=self.dtype,
            precision=self.precision,
        )
