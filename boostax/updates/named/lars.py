"""LARS as MindSpore has it, with the momentum behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax.updates.named import _parts as parts
from boostax.updates.named._leaf_names import no_bias_or_norm

__all__ = ["LarsState", "lars"]


class LarsState(NamedTuple):
    """State of the layer-wise part of :func:`lars`.

    Attributes:
      count: int32 (), updates made so far.
    """

    count: jax.Array


def lars(
    learning_rate: float | Callable[[Any], Any],
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 1e-5,
    clip: bool = False,
    mask: Any = None,
    convention: str = "mindspore",
) -> optax.GradientTransformationExtraArgs:
    r"""Scale each leaf's gradient by the ratio of the leaf's norm to the gradient's, then descend.

    .. math::
        r &= \frac{\eta\, \lVert w \rVert}{\lVert g \rVert + \delta \lVert w \rVert + \epsilon},
        \qquad \text{with clip: } r \leftarrow \min(r / \alpha,\ 1) \\
        b_t &= \mu\, b_{t-1} + r\, (g + \delta w), \qquad w \leftarrow w - \alpha b_t

    :math:`r` is 1 where one of the norms is 0. Leaves outside of ``mask`` get momentum alone, without
    decay.

    Args:
      learning_rate: :math:`\alpha`, above 0 with ``clip``; a number, or a schedule of the update count.
      momentum: :math:`\mu` in [0, 1). Default 0.9.
      nesterov: whether Nesterov's form of the momentum is taken. Default False.
      weight_decay: :math:`\delta`, at least 0. Default 0.
      trust_coefficient: :math:`\eta`, above 0, MindSpore's ``coefficient``. Default 0.001.
      eps: :math:`\epsilon`, at least 0. Default 1e-5.
      clip: bound the rate so that :math:`\alpha r` is at most :math:`\alpha`. Default False.
      mask: which leaves are scaled and decay: a tree of bools, a function of the parameters, or a list
        of path patterns. Default None: all but biases and the parameters of norms, by their names, so
        that ``decay_bias_and_norm`` changes nothing; ``["*"]`` takes all.
      convention: ``"mindspore"``; there is no other. Default ``"mindspore"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range; at update, ``params`` are missing.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = lars(1.0, momentum=0.0, trust_coefficient=0.5, eps=0.0)
      >>> w = {"kernel": jnp.array([3.0, 4.0])}
      >>> step, _ = tx.update({"kernel": jnp.array([0.0, 2.0])}, tx.init(w), w)
      >>> step["kernel"].tolist()  # 0.5 * 5 / 2 times the gradient
      [-0.0, -2.5]

    Source:
      Y. You, I. Gitman and B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017.

    When not to use:
      For batches that plain momentum trains well. ``optax.lars`` takes the norm of gradient and decay
      together, and puts the learning rate ahead of the momentum.
    """
    name = "lars"
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    momentum = parts.check_number(name, "momentum", momentum, 0.0, high=1.0)
    nesterov = parts.check_bool(name, "nesterov", nesterov)
    weight_decay = parts.check_number(name, "weight_decay", weight_decay, 0.0)
    trust = parts.check_number(name, "trust_coefficient", trust_coefficient, 0.0, open_=True)
    eps = parts.check_number(name, "eps", eps, 0.0)
    clip = parts.check_bool(name, "clip", clip)
    mask = parts.read_mask(name, "mask", mask)
    parts.check_mindspores(name, convention)
    if clip and parts.is_zero(learning_rate):
        raise ValueError(f"{name}: clip=True divides by the learning rate, which must be above 0")
    if nesterov and parts.is_zero(momentum):
        raise ValueError(f"{name}: nesterov=True needs a momentum above 0, got {momentum}")
    scaled = _scale_by_layer(learning_rate, trust, weight_decay, eps, clip)
    chain: list[Any] = [optax.masked(scaled, no_bias_or_norm if mask is None else mask)]
    if not parts.is_zero(momentum):
        chain.append(optax.trace(momentum, nesterov))
    shown = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "trust_coefficient": trust,
        "eps": eps,
        "clip": clip,
    }
    return parts.finished(name, shown, *chain, optax.scale_by_learning_rate(learning_rate))


def _scale_by_layer(
    learning_rate: Any, trust: Any, weight_decay: Any, eps: Any, clip: bool
) -> optax.GradientTransformation:
    def init(params: Any) -> LarsState:
        del params
        return LarsState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, LarsState]:
        if params is None:
            raise ValueError("lars: the norms of the parameters are needed; pass params to update")
        rate: Any = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def one(grad: Any, param: Any) -> Any:
            size, slope = (jnp.sqrt(jnp.sum(leaf * leaf)) for leaf in (param, grad))
            sound = (size > 0) & (slope > 0)
            below = jnp.where(sound, slope + weight_decay * size + eps, 1.0)
            ratio = jnp.where(sound, trust * size / below, 1.0)
            if clip:
                # At a rate of 0, where a schedule starts, nothing moves in any case.
                positive = jnp.asarray(rate) > 0
                ratio = jnp.minimum(ratio / jnp.where(positive, rate, 1.0), 1.0)
            decayed = grad if parts.is_zero(weight_decay) else grad + weight_decay * param
            return ratio.astype(grad.dtype) * decayed

        out = jax.tree.map(one, updates, params)
        return out, LarsState(parts.next_count(state.count))

    return optax.GradientTransformation(init, update)
