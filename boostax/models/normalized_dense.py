"""The normalised classifier for linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers

from boostax.models import _norm_checks as checks
from boostax.models.normalized import multiplier_start, normalized_linear

__all__ = ["NormalizedDense"]


class NormalizedDense(nn.Module):
    """A dense layer on L2-normalised features and weights, times a trainable multiplier.

    ``multiplier * ((x / |x|) @ (kernel / |kernel|) + bias)``, with the norm of each feature vector
    and of each class's weights. It takes the place of the last ``nn.Dense`` of a classifier.

    Args:
      features: outputs (classes), at least 1.
      multiplier_init: what the multiplier starts with, above 0; default None:
        ``max(1, sqrt(2) ln(features - 1))``. The reference, ``mindspore.boost``, starts with 1,
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

    Raises:
      ValueError, TypeError: a setting is out of range or of a wrong type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> head, x = NormalizedDense(10), jnp.arange(8.0).reshape(2, 4)
      >>> variables = head.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'kernel': (4, 10), 'multiplier': ()}
      >>> bool(jnp.allclose(head.apply(variables, x), head.apply(variables, 100 * x), atol=1e-5))
      True

    Source:
      F. Wang, X. Xiang, J. Cheng and A. Yuille, "NormFace: L2 Hypersphere Embedding for Face
      Verification", 2017. X. Zhang et al., "AdaCos: Adaptively Scaling Cosine Logits for
      Effectively Learning Deep Face Representations", 2019.

    When not to use:
      Regression, or where the length of the features says something.
    """

    features: int
    multiplier_init: float | None = None
    use_bias: bool = False
    epsilon: float = 1e-4
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = initializers.lecun_normal()
    bias_init: Any = initializers.zeros

    def __post_init__(self) -> None:
        name = type(self).__name__
        checks.count_of(name, "features", self.features)
        checks.check_flag(name, "use_bias", self.use_bias)
        checks.check_epsilon(name, self.epsilon)
        multiplier_start(name, self.multiplier_init, self.features)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of features of shape (..., inputs)."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        start = multiplier_start(type(self).__name__, self.multiplier_init, self.features)
        multiplier = self.param("multiplier", initializers.constant(start), (), self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return normalized_linear(
            x,
            kernel,
            multiplier,
            bias,
            epsilon=self.epsilon,
            dtype=self.dtype,
            precision=self.precision,
        )
