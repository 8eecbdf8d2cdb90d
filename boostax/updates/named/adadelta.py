"""Adadelta as PyTorch and MindSpore have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from boostax.updates.named import _parts as parts

__all__ = ["adadelta"]


def adadelta(
    learning_rate: float | Callable[[Any], Any],
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "torch",
) -> optax.GradientTransformationExtraArgs:
    r"""Scale each entry's step by the ratio of its past steps to its past gradients.

    .. math::
        g &\leftarrow g + \delta w \\
        v_t &= \rho\, v_{t-1} + (1 - \rho)\, g^2 \\
        d &= g\, \sqrt{u_{t-1} + \epsilon} \,/\, \sqrt{v_t + \epsilon} \\
        u_t &= \rho\, u_{t-1} + (1 - \rho)\, d^2, \qquad w \leftarrow w - \alpha d

    Averages are float32, or the parameters' dtype if wider.

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count. The
        paper, and PyTorch's default, have 1.
      rho: :math:`\rho` in [0, 1). Default 0.9.
      eps: :math:`\epsilon`, above 0, inside both roots. Default 1e-6.
      weight_decay: :math:`\delta`, at least 0, added to the gradient (L2). Default 0.
      mask: which leaves decay: a tree of bools, a function of the parameters, or a list of path
        patterns. Default None: all.
      convention: ``"torch"`` or ``"mindspore"``; they agree here. Default ``"torch"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> tx, w = adadelta(1.0), jnp.array([0.0])
      >>> step, _ = tx.update(jnp.array([1.0]), tx.init(w), w)
      >>> round(float(step[0]), 7)  # sqrt(1e-6 / (0.1 + 1e-6))
      -0.0031623

    Source:
      M. Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.

    When not to use:
      First steps have the size of the root of ``eps``, so that it starts slowly; Adam is the usual
      choice.
    """
    name = "adadelta"
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    rho = parts.check_number(name, "rho", rho, 0.0, high=1.0)
    eps = parts.check_eps(name, eps)
    parts.check_convention(name, convention)
    shown = {
        "learning_rate": learning_rate,
        "rho": rho,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    return parts.finished(
        name,
        shown,
        *parts.decay(name, weight_decay, mask),
        optax.scale_by_adadelta(rho, eps),
        optax.scale_by_learning_rate(learning_rate),
    )
