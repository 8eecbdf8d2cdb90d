"""Adam with L2 decay and AMSGrad, as PyTorch and MindSpore have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax.updates.named import _parts as parts

__all__ = ["MomentsState", "adam", "adam_weight_decay"]


class MomentsState(NamedTuple):
    """State of the part of :func:`adam` that optax does not have.

    Attributes:
      count: int32 (), updates made so far.
      mu: averages of the gradient, like the parameters.
      nu: averages of its square, like the parameters.
      nu_max: the largest averages of the square so far, with ``amsgrad``; else ``()``.
    """

    count: jax.Array
    mu: Any
    nu: Any
    nu_max: Any


def adam(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    amsgrad: bool = False,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "torch",
) -> optax.GradientTransformationExtraArgs:
    r"""Divide the averaged gradient by the root of its averaged square, both corrected for their start.

    .. math::
        g &\leftarrow g + \delta w \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g^2 \\
        q &= v_t, \qquad \text{AMSGrad: } q_t = \max(q_{t-1}, v_t) \\
        \text{PyTorch: } \quad w &\leftarrow w -
        \alpha \frac{m_t / (1 - \beta_1^t)}{\sqrt{q} / \sqrt{1 - \beta_2^t} + \epsilon} \\
        \text{MindSpore: } \quad w &\leftarrow w -
        \alpha \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot \frac{m_t}{\sqrt{q} + \epsilon}

    with t = 1 at the first update. Averages are float32, or the parameters' dtype if wider.

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count.
      b1: :math:`\beta_1` in [0, 1). Default 0.9.
      b2: :math:`\beta_2` in [0, 1). Default 0.999.
      eps: :math:`\epsilon`, above 0. MindSpore's is not corrected for the start: at the first updates
        it weighs more. Default 1e-8.
      amsgrad: divide by the largest average so far; the maximum is taken before the correction.
        Default False.
      nesterov: MindSpore's ``use_nesterov``, with :math:`\beta_1 m_t + (1 - \beta_1) g` in the place of
        :math:`m_t`; PyTorch's Adam has no such form. Default False.
      weight_decay: :math:`\delta`, at least 0, added to the gradient (L2). Default 0.
      mask: which leaves decay: a tree of bools, a function of the parameters, or a list of path
        patterns. Default None: all.
      convention: ``"torch"`` or ``"mindspore"``, see the formula. Default ``"torch"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range, or ``nesterov`` in PyTorch's convention.

    Example:
      >>> import jax.numpy as jnp
      >>> w, gradient = jnp.array([0.0]), jnp.array([0.5])
      >>> def first(convention):
      ...     tx = adam(0.1, eps=0.5, convention=convention)
      ...     return round(float(tx.update(gradient, tx.init(w), w)[0][0]), 4)
      >>> first("torch")  # 0.1 * 0.5 / (0.5 + 0.5)
      -0.05
      >>> first("mindspore")  # 0.1 * 0.5 / (0.5 + 0.5 / sqrt(0.001))
      -0.0031

    Source:
      D. Kingma and J. Ba, "Adam: A Method for Stochastic Optimization", 2015; S. Reddi, S. Kale and S.
      Kumar, "On the Convergence of Adam and Beyond", 2018.

    When not to use:
      For decay take ``adamw``, which keeps it out of the averages. Without decay and AMSGrad it is
      ``optax.adam``.
    """
    name = "adam"
    theirs = parts.check_convention(name, convention) == "mindspore"
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    b1 = parts.check_number(name, "b1", b1, 0.0, high=1.0)
    b2 = parts.check_number(name, "b2", b2, 0.0, high=1.0)
    eps = parts.check_eps(name, eps)
    amsgrad = parts.check_bool(name, "amsgrad", amsgrad)
    nesterov = parts.check_bool(name, "nesterov", nesterov)
    if nesterov and not theirs:
        raise ValueError(
            f"{name}: nesterov=True is MindSpore's use_nesterov and needs convention='mindspore'; "
            "PyTorch's Adam has no such form. Take the optimizer 'nadam', or leave it out"
        )
    if theirs or amsgrad:
        scaled = _scale_by_moments(b1, b2, eps, amsgrad, nesterov, "late" if theirs else "early")
    else:
        scaled = optax.scale_by_adam(b1, b2, eps)
    shown = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "amsgrad": amsgrad,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "convention": convention,
    }
    return parts.finished(
        name,
        shown,
        *parts.decay(name, weight_decay, mask),
        scaled,
        optax.scale_by_learning_rate(learning_rate),
    )


def adam_weight_decay(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "mindspore",
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with decoupled decay and without correction: MindSpore's ``nn.AdamWeightDecay``.

    .. math::
        w \leftarrow w - \alpha \left( \frac{m_t}{\sqrt{v_t} + \epsilon} + \delta w \right)

    with :math:`m_t` and :math:`v_t` as in :func:`adam`.

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count.
      b1: in [0, 1). Default 0.9.
      b2: in [0, 1). Default 0.999.
      eps: :math:`\epsilon`, above 0. Default 1e-6.
      weight_decay: :math:`\delta`, at least 0, beside the step, not in the gradient. Default 0.
      mask: which leaves decay, as for :func:`adam`. Default None: all.
      convention: ``"mindspore"``; there is no other. Default ``"mindspore"``.

    Returns:
      A ``GradientTransformationExtraArgs``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> tx, w = adam_weight_decay(0.1, weight_decay=0.5), jnp.array([1.0])
      >>> step, _ = tx.update(jnp.array([2.0]), tx.init(w), w)
      >>> round(float(step[0]), 4)  # -0.1 * (0.2 / sqrt(0.004) + 0.5)
      -0.3662

    Source:
      J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
      Understanding", 2019, whose code left the correction out.

    When not to use:
      To go on with a run from there; for a new one take ``adamw``, whose first steps are not three
      times too long.
    """
    name = "adam_weight_decay"
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    b1 = parts.check_number(name, "b1", b1, 0.0, high=1.0)
    b2 = parts.check_number(name, "b2", b2, 0.0, high=1.0)
    eps = parts.check_eps(name, eps)
    parts.check_mindspores(name, convention)
    shown = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    return parts.finished(
        name,
        shown,
        _scale_by_moments(b1, b2, eps, False, False, "none"),
        *parts.decay(name, weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _scale_by_moments(
    b1: Any, b2: Any, eps: Any, amsgrad: bool, nesterov: bool, correction: str
) -> optax.GradientTransformation:
    """Adam's direction; the correction comes before epsilon ("early"), behind it ("late") or not."""

    def init(params: Any) -> MomentsState:
        zeros = lambda: optax.tree.zeros_like(params)
        return MomentsState(jnp.zeros((), jnp.int32), zeros(), zeros(), zeros() if amsgrad else ())

    def moment(grad: Any, old: Any, b: Any, order: int) -> Any:
        # MindSpore has b and 1 - b in float32; then what rounding adds is the correction's as well.
        b = b if correction == "early" else jnp.asarray(b, old.dtype)
        return (1 - b) * grad**order + b * old

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MomentsState]:
        del params
        mu = jax.tree.map(lambda g, m: moment(g, m, b1, 1), updates, state.mu)
        nu = jax.tree.map(lambda g, v: moment(g, v, b2, 2), updates, state.nu)
        count = parts.next_count(state.count)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else ()
        first, second = (_gathered(b, count, correction == "early") for b in (b1, b2))

        def direction(grad: Any, m: Any, q: Any) -> Any:
            top = b1 * m + (1 - b1) * grad if nesterov else m
            if correction == "early":
                return top / (
                    jnp.sqrt(q) * (first / jnp.sqrt(second)).astype(q.dtype) + eps * first
                )
            ratio = top / (jnp.sqrt(q) + eps)
            if correction == "none":
                return ratio
            return ratio * (jnp.sqrt(second) / first).astype(q.dtype)

        out = jax.tree.map(direction, updates, mu, nu_max if amsgrad else nu)
        return out, MomentsState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)


def _gathered(b: Any, count: jax.Array, exact: bool) -> Any:
    """Return 1 - b**count, the weight of what an average has seen."""
    # In float32 1 - 0.999 is off by 5e-5; expm1 is not.
    return -jnp.expm1(count * jnp.log(b)) if exact else 1 - b**count
