"""RMSProp as PyTorch and MindSpore have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax.updates.named import _parts as parts

__all__ = ["CentredState", "rmsprop"]


class CentredState(NamedTuple):
    """State of the centred part of :func:`rmsprop`.

    Attributes:
      mu: averages of the gradient, like the parameters.
      nu: averages of its square, like the parameters.
    """

    mu: Any
    nu: Any


def rmsprop(
    learning_rate: float | Callable[[Any], Any],
    decay: float | None = None,
    eps: float | None = None,
    centered: bool = False,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "torch",
) -> optax.GradientTransformationExtraArgs:
    r"""Divide each entry's gradient by the root of the average of its square.

    .. math::
        g &\leftarrow g + \delta w \\
        v_t &= \gamma\, v_{t-1} + (1 - \gamma)\, g^2, \qquad
        m_t = \gamma\, m_{t-1} + (1 - \gamma)\, g \\
        q &= v_t, \qquad \text{centred: } q = \max(v_t - m_t^2,\ 0) \\
        \text{PyTorch: } \quad b_t &= \mu\, b_{t-1} + g / (\sqrt{q} + \epsilon), \qquad
        w \leftarrow w - \alpha b_t, \qquad v_{-1} = 0 \\
        \text{MindSpore: } \quad b_t &= \mu\, b_{t-1} + \alpha\, g / \sqrt{q + \epsilon}, \qquad
        w \leftarrow w - b_t, \qquad v_{-1} = 1

    Averages are float32, or the parameters' dtype if wider.

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count.
      decay: :math:`\gamma` in [0, 1), PyTorch's ``alpha``. Default 0.99, in MindSpore's convention 0.9.
      eps: :math:`\epsilon`, above 0. Default 1e-8, in MindSpore's convention 1e-10.
      centered: whether the squared mean is taken off. Default False.
      momentum: :math:`\mu` in [0, 1). Default 0: no buffer is kept.
      weight_decay: :math:`\delta`, at least 0, added to the gradient (L2). Default 0.
      mask: which leaves decay: a tree of bools, a function of the parameters, or a list of path
        patterns. Default None: all.
      convention: ``"torch"`` or ``"mindspore"``, see the formula. Default ``"torch"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> w, gradient = jnp.array([0.0]), jnp.array([2.0])
      >>> def first(**settings):
      ...     tx = rmsprop(0.1, decay=0.75, **settings)
      ...     return round(float(tx.update(gradient, tx.init(w), w)[0][0]), 4)
      >>> first(), first(convention="mindspore")  # 0.1 * 2 / sqrt(1), 0.1 * 2 / sqrt(0.75 + 1)
      (-0.2, -0.1512)

    Source:
      T. Tieleman and G. Hinton, "Lecture 6.5, RMSProp: Divide the gradient by a running average of its
      recent magnitude", 2012.

    When not to use:
      Where Adam's correction of the first averages is wanted: with decay 0.99 the first step of
      PyTorch's form is ten times the learning rate.
    """
    name = "rmsprop"
    theirs = parts.check_convention(name, convention) == "mindspore"
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    kept = (0.9 if theirs else 0.99) if decay is None else decay
    kept = parts.check_number(name, "decay", kept, 0.0, high=1.0)
    added = parts.check_eps(name, (1e-10 if theirs else 1e-8) if eps is None else eps)
    centered = parts.check_bool(name, "centered", centered)
    momentum = parts.check_number(name, "momentum", momentum, 0.0, high=1.0)
    start = 1.0 if theirs else 0.0
    if centered:
        scaled = _scale_by_centred(kept, added, start, eps_in_sqrt=theirs)
    else:
        scaled = optax.scale_by_rms(kept, added, start, eps_in_sqrt=theirs)
    chain = [*parts.decay(name, weight_decay, mask), scaled]
    last = [optax.scale_by_learning_rate(learning_rate)]
    if not parts.is_zero(momentum):
        # MindSpore's buffer holds steps, so that a lower rate works on later gradients alone.
        last.insert(len(last) if theirs else 0, optax.trace(momentum))
    shown = {
        "learning_rate": learning_rate,
        "decay": kept,
        "eps": added,
        "centered": centered,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "convention": convention,
    }
    return parts.finished(name, shown, *chain, *last)


def _scale_by_centred(
    decay: Any, eps: Any, start: float, *, eps_in_sqrt: bool
) -> optax.GradientTransformation:
    """Divide by the standard deviation; unlike optax's, one that rounding would make imaginary is 0."""

    def init(params: Any) -> CentredState:
        mu = optax.tree.zeros_like(params)
        return CentredState(mu, optax.tree.full_like(params, start))

    def scaled(grad: Any, mu: Any, nu: Any) -> Any:
        variance = jnp.maximum(nu - mu * mu, 0.0)
        if eps_in_sqrt:
            return grad * jax.lax.rsqrt(variance + eps)
        return grad / (jnp.sqrt(variance) + eps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CentredState]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, decay, 1)
        nu = optax.tree.update_moment(updates, state.nu, decay, 2)
        return jax.tree.map(scaled, updates, mu, nu), CentredState(mu, nu)

    return optax.GradientTransformation(init, update)
