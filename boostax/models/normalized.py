"""The normalised linear map: cosines between features and weights, times one trainable number.

For features ``x``, weights ``w_j`` of class ``j`` and a multiplier ``s``::

    logit_j = s * ((x / |x|) . (w_j / |w_j|) + b_j),      |v| = sqrt(max(v . v, epsilon))

Logits stay within ``[-s, s]`` (apart from the bias), whatever the scale of features and weights, so
that the multiplier alone decides how confident the classifier can be.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax.models import _norm_checks as checks

__all__ = ["default_multiplier", "multiplier_start", "normalized_linear"]


def default_multiplier(classes: int) -> float:
    """Return the multiplier that a normalised head of ``classes`` classes starts with.

    ``max(1, sqrt(2) ln(classes - 1))``. A feature at 45 degrees to its own class and at right
    angles to the others then gets a probability of one half. The formula gives 0 for two classes,
    with which nothing would be learned at first; so it never falls below 1.

    Args:
      classes: the number of outputs, at least 1.

    Returns:
      The multiplier.

    Example:
      >>> [round(default_multiplier(classes), 3) for classes in (1, 2, 3, 10, 1000)]
      [1.0, 1.0, 1.0, 3.107, 9.768]

    Source:
      X. Zhang, R. Zhao, Y. Qiao, X. Wang and H. Li, "AdaCos: Adaptively Scaling Cosine Logits for
      Effectively Learning Deep Face Representations", CVPR 2019, equation 12.
    """
    classes = checks.count_of("default_multiplier", "classes", classes)
    return max(1.0, math.sqrt(2) * math.log(max(classes - 1, 1)))


def multiplier_start(layer: str, value: Any, classes: int) -> float:
    """Return the value that a layer's multiplier starts with."""
    if value is None:
        return default_multiplier(classes)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{layer}: multiplier_init must be a number above 0, or None for "
            f"max(1, sqrt(2) ln(classes - 1)), got {value!r}"
        )
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{layer}: multiplier_init must be above 0 and finite, got {value}")
    return float(value)


def normalized_linear(
    x: jax.Array,
    kernel: jax.Array,
    multiplier: jax.Array | float,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-4,
    dtype: Any = None,
    precision: Any = None,
) -> jax.Array:
    """Return ``multiplier * (cos(x, kernel) + bias)``.

    Norms, the multiplier and the bias are applied in float32 or better; the product of the
    normalised factors is taken in ``dtype`` and accumulated in float32.

    Args:
      x: features, shape (..., inputs).
      kernel: weights, shape (inputs, outputs); a class is a column.
      multiplier: scalar, or shape (1,).
      bias: shape (outputs,), or None.
      epsilon: the least squared norm, above 0: shorter vectors are divided by its root, so that a
        zero row gives 0 and no derivative is larger than ``multiplier / sqrt(epsilon)``.
        Default 1e-4.
      dtype: dtype of the product and the result; default None: the common one of all arrays.
      precision: as in ``jax.lax.dot_general``.

    Returns:
      Shape (..., outputs).

    Raises:
      ValueError: shapes don't fit.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
      >>> normalized_linear(x, jnp.eye(2), 10.0).round(4).tolist()
      [[6.0, 8.0], [0.0, 0.0]]

    Source:
      F. Wang, X. Xiang, J. Cheng and A. Yuille, "NormFace: L2 Hypersphere Embedding for Face
      Verification", 2017.

    When not to use:
      Regression, or where the length of the features says something.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    if kernel.ndim != 2 or x.ndim < 1 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"normalized_linear: x must have shape (..., inputs) and kernel (inputs, outputs), got "
            f"{x.shape} and {kernel.shape}"
        )
    arrays = [x, kernel, *([] if bias is None else [bias])]
    dtype = jnp.result_type(*arrays) if dtype is None else jnp.dtype(dtype)
    wide = jnp.promote_types(jnp.result_type(dtype, *arrays), jnp.float32)
    y = lax.dot_general(
        _unit(x.astype(wide), -1, epsilon).astype(dtype),
        _unit(kernel.astype(wide), 0, epsilon).astype(dtype),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    if bias is not None:
        y = y + jnp.asarray(bias, y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
    return (y * jnp.asarray(multiplier, y.dtype).reshape(())).astype(dtype)


def _unit(x: jax.Array, axis: int, epsilon: float) -> jax.Array:
    # Clamped ahead of the root: its derivative at a zero row would be infinite.
    squared = jnp.sum(lax.square(x), axis, keepdims=True)
    return x * lax.rsqrt(jnp.maximum(squared, epsilon))
