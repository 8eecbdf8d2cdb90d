"""Stochastic gradient descent with momentum, as PyTorch and MindSpore have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from boostax.updates.named import _parts as parts

__all__ = ["momentum", "sgd"]


def sgd(
    learning_rate: float | Callable[[Any], Any],
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "torch",
) -> optax.GradientTransformationExtraArgs:
    r"""Descend along the gradient, with momentum, dampening or Nesterov's form.

    .. math::
        g &\leftarrow g + \delta w \\
        b_0 &= g, \qquad b_t = \mu\, b_{t-1} + (1 - \tau)\, g \\
        w &\leftarrow w - \alpha\, b_t, \qquad \text{Nesterov: } w \leftarrow w - \alpha (g + \mu b_t)

    The very first update is not dampened. Buffers are float32, or the parameters' dtype if wider.

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count.
      momentum: :math:`\mu` in [0, 1). Default 0: no buffer is kept.
      dampening: :math:`\tau`, a number of at least 0 that the new gradient is lowered by. Default 0.
      nesterov: whether Nesterov's form is taken; it needs momentum, and no dampening. Default False.
      weight_decay: :math:`\delta`, at least 0, added to the gradient (L2). Default 0.
      mask: which leaves decay: a tree of bools, a function of the parameters, or a list of path
        patterns. Default None: all.
      convention: ``"torch"`` or ``"mindspore"``; they agree here, and ``"mindspore"`` can go through
        all optimizers. Default ``"torch"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range, or ``nesterov`` without momentum or with dampening.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = sgd(1.0, momentum=0.5, dampening=0.5)
      >>> w = jnp.array([0.0])
      >>> state = tx.init(w)
      >>> for gradient in (1.0, 1.0, 1.0):
      ...     step, state = tx.update(jnp.array([gradient]), state, w)
      ...     w = optax.apply_updates(w, step)
      >>> float(w[0])  # 1, then 0.5 * 1 + 0.5 * 1, then the same
      -3.0

    Source:
      I. Sutskever, J. Martens, G. Dahl and G. Hinton, "On the importance of initialization and
      momentum in deep learning", 2013.

    When not to use:
      Without dampening it is ``optax.sgd`` behind ``optax.add_decayed_weights``; take those where you
      have them already.
    """
    name = "sgd"
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    momentum = parts.check_number(name, "momentum", momentum, 0.0, high=1.0)
    dampening = parts.check_number(name, "dampening", dampening, 0.0)
    nesterov = parts.check_bool(name, "nesterov", nesterov)
    parts.check_convention(name, convention)
    if nesterov and (parts.is_zero(momentum) or not parts.is_zero(dampening)):
        raise ValueError(
            f"{name}: nesterov=True needs a momentum above 0 and a dampening of 0, got "
            f"momentum={momentum} and dampening={dampening}"
        )
    chain = parts.decay(name, weight_decay, mask)
    if not parts.is_zero(momentum):
        if not parts.is_zero(dampening):
            chain.append(optax.scale_by_schedule(_but_the_first(1.0 - dampening)))
        chain.append(optax.trace(momentum, nesterov))
    shown = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
    }
    return parts.finished(name, shown, *chain, optax.scale_by_learning_rate(learning_rate))


def _but_the_first(factor: Any) -> Callable[[Any], Any]:
    return lambda count: jnp.where(count == 0, 1.0, factor)


def momentum(
    learning_rate: float | Callable[[Any], Any],
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "torch",
) -> optax.GradientTransformationExtraArgs:
    r"""Descend with momentum: :func:`sgd` under the name of MindSpore's ``nn.Momentum``.

    .. math::
        b_t = \mu\, b_{t-1} + g + \delta w, \qquad w \leftarrow w - \alpha\, b_t

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count.
      momentum: :math:`\mu`, above 0 and below 1. Default 0.9.
      nesterov: whether Nesterov's form is taken. Default False.
      weight_decay: :math:`\delta`, at least 0, added to the gradient (L2). Default 0.
      mask: which leaves decay, as for :func:`sgd`. Default None: all.
      convention: as for :func:`sgd`. Default ``"torch"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> tx, w = momentum(1.0, 0.5), jnp.array([0.0])
      >>> first, state = tx.update(jnp.array([1.0]), tx.init(w), w)
      >>> second, state = tx.update(jnp.array([1.0]), state, w)
      >>> float(first[0]), float(second[0])
      (-1.0, -1.5)

    Source:
      B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964.

    When not to use:
      It adds nothing to :func:`sgd` but the name.
    """
    parts.check_number("momentum", "momentum", momentum, 0.0, open_=True, high=1.0)
    return sgd(
        learning_rate,
        momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        mask=mask,
        convention=convention,
    )
