r"""DimReduce: a quasi-Newton step in the few directions in which training moves.

| symbol | shape | meaning |
|---|---|---|
| V | (k, n) | orthonormal rows; the basis |
| g, g_k | (n,), (k,) | the gradient, and V g |
| B | (k, k) | estimate of the inverse Hessian in the subspace, the identity at first |
| d, s | (k,) | direction, and the accepted step |
| m | (n,) | momentum of the gradient outside of the subspace |
| f | | the loss of this step's batch, with this step's random key |

A step is::

    B <- (I - s y^T / c) B (I - y s^T / c) + s s^T / c    with y = g_k - (g_k before), c = y^T s
    d = -B g_k
    m <- gamma m + (g - V^T g_k)
    x <- x + rho^j V^T d - alpha m                        with the first j = 0, 1, ... that gives
    f(new x) < f(x) + sigma rho^j g_k^T d
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._info import TransformInfo, with_info
from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError
from boostax.updates._basis_products import times_coefficients
from boostax.updates._dim_reduce_checks import (
    Settings,
    bound_loss,
    check_matches,
    make_settings,
)
from boostax.updates._dim_reduce_steps import Problem, default, reference
from boostax.updates._skip import find_state

__all__ = ["DimReduceState", "dim_reduce"]

_STATUS = ("fresh", "accepted", "failed", "nonfinite", "flat", "uphill")


class DimReduceState(NamedTuple):
    """The state of :func:`dim_reduce`.

    Attributes:
      components: the basis, for each covered leaf in tree order its part ``(k, *shape)``.
      fingerprint: uint32 scalar, stands for the basis.
      metric: (k, k) float32, B; the next step updates it by the pair below first.
      gradient: (k,) float32, the projected gradient of the last accepted step.
      step: (k,) float32, the last accepted step.
      has_pair: bool scalar, whether the two above are to be used.
      momentum: m, a tree like the parameters in float32, ``optax.MaskedNode()`` at leaves that the
        basis does not cover; None with alpha = 0.
      status: int32 scalar, how the last step ended: 0 there was none, 1 accepted, 2 no trial was low
        enough, 3 the loss or the gradient was not finite, 4 the projected gradient was zero, 5 the
        direction did not go down. :attr:`status_name` is the word for it.
      trials: int32 scalar, the trial losses of the last step.
      factor: float32 scalar, its accepted ``rho^j``; 0 where there was none.
      curvature_skips: int32 scalar, how many pairs were left out for their curvature.
      failures: int32 scalar, steps in a row that ended with status 2 or 5.
      value: float32 scalar, the loss before the last step.
      new_value: float32 scalar, the loss behind it, on the same batch with the same key.
    """

    components: tuple[Any, ...]
    fingerprint: jax.Array
    metric: jax.Array
    gradient: jax.Array
    step: jax.Array
    has_pair: jax.Array
    momentum: Any
    status: jax.Array
    trials: jax.Array
    factor: jax.Array
    curvature_skips: jax.Array
    failures: jax.Array
    value: jax.Array
    new_value: jax.Array

    @property
    def delta(self) -> jax.Array:
        """The change of the loss by the last step, float32; 0 where none was accepted."""
        return jnp.where(self.factor > 0, self.new_value - self.value, 0)

    @property
    def status_name(self) -> str:
        """The status in a word, for a state on the host."""
        return _STATUS[int(self.status)]


def dim_reduce(
    basis: Any,
    *,
    rho: float = 0.55,
    gamma: float = 0.9,
    alpha: float = 0.001,
    sigma: float = 0.4,
    max_backtracks: int = 10,
    mode: str = "default",
    curvature_tol: float = 1e-4,
    reset_after: int = 2,
    loss_scale: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Train by quasi-Newton steps with a line search in the subspace of a trajectory.

    .. math::
        g_k &= V g, \qquad d = -B g_k, \qquad s = \rho^j d \\
        m &\leftarrow \gamma m + g - V^T g_k \\
        \Delta x &= V^T s - \alpha m

    with the smallest :math:`j` for which the loss of the same batch, with the same random key, is
    below :math:`f(x) + \sigma g_k^T s`. A trial loss that is a NaN or infinite is not lower. Where no
    trial is low enough, parameters, momentum and :math:`B` stay as they are, bit for bit, and the
    state says so. :math:`B` is updated (BFGS) by pairs from accepted steps alone.

    It is a whole optimizer and takes the place of one: nothing may follow it in a chain, since that
    would change the point that was accepted. The state holds a copy of the basis, so that a compiled
    step gets it as an argument; as a constant, its n k numbers would be written into the program. The
    transformation keeps its own in host memory.

    Args:
      basis: a :class:`boostax.TrajectoryBasis`. Leaves that it does not cover are not moved.
      rho: what a step is shortened by after a trial that failed, between 0 and 1. Default 0.55.
      gamma: the momentum's decay, >= 0 and < 1. Default 0.9.
      alpha: the rate outside of the subspace, >= 0. With 0 there is no momentum, and the gradient's
        part inside is not taken back. Default 0.001.
      sigma: the part of the decrease by the slope that a step must reach, between 0 and 1. Default
        0.4.
      max_backtracks: how often a step is shortened at most, >= 0; there are up to
        ``max_backtracks + 1`` trials. Default 10.
      mode: ``"default"``, or ``"reference"`` for the numbers of ``mindspore.boost``: two trials, which
        leave :math:`\alpha m` out; it is taken off afterwards, also where both failed. Default
        ``"default"``.
      curvature_tol: a pair is used where :math:`y^T s` is above this times :math:`|y| |s|`, >= 0 and
        < 1. Default 1e-4.
      reset_after: after so many failed steps in a row, >= 1, :math:`B` is the identity again; where it
        was a multiple of the identity already, :math:`\rho^{b + 1}` times that with b =
        ``max_backtracks``, so that the search goes on with shorter steps. Default 2.
      loss_scale: in ``mode="reference"``, what the gradients that arrive are multiplied by; its
        momentum keeps that. Default 1.0.

    Returns:
      A transformation whose ``update`` takes ``value``, the loss at the parameters, and ``value_fn``,
      the loss as a function of the parameters, which may return ``(loss, aux)``; what else
      ``value_fn`` declares is taken from the extra arguments by name. With ``grad``, the loss's own
      gradient, the slope is taken from that, and the direction from what arrives. Its state is a
      :class:`DimReduceState`. :func:`boostax.train_step` passes all of this.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument is out of range; the parameters lack a leaf of the basis; ``update`` got
        no ``params``, ``value`` or ``value_fn``.
      StateMismatchError: a state was made with another basis.

    Example:
      >>> import jax, jax.numpy as jnp, optax, boostax
      >>> loss = lambda params: 0.5 * jnp.sum(params["w"] ** 2)
      >>> params = {"w": jnp.array([3.0, 4.0])}
      >>> basis = boostax.TrajectoryBasis.from_array([[1.0, 0.0]], params)
      >>> tx = boostax.dim_reduce(basis, alpha=0.0)
      >>> value, grads = jax.value_and_grad(loss)(params)
      >>> updates, state = tx.update(grads, tx.init(params), params, value=value, value_fn=loss)
      >>> print(optax.apply_updates(params, updates)["w"], state.status_name, state.delta)
      [0. 4.] accepted -4.5

    Source:
      ``mindspore.boost.DimReduce``. T. Li et al., "Low Dimensional Trajectory Hypothesis is True: DNNs
      Can Be Trained in Tiny Subspaces", 2021.

    When not to use:
      With a loss that is a sum over a large batch, or scaled: :math:`B` starts as the identity, so
      that the first step is the gradient itself. With small batches: the line search fits the batch
      that it sees. To save compute: it takes fewer steps one after another, each with several losses
      of a large batch. Inside ``accumulate`` or ``freeze``; use ``microbatch`` for batches that don't
      fit into memory.
    """
    settings = make_settings(
        basis,
        max_backtracks,
        mode,
        rho=rho,
        gamma=gamma,
        alpha=alpha,
        sigma=sigma,
        curvature_tol=curvature_tol,
        reset_after=reset_after,
        loss_scale=loss_scale,
    )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, DimReduceState]:
        _check_call(params, extra_args)
        check_matches(settings, state)
        return _update(settings, updates, state, params, extra_args)

    shown = {
        "k": settings.basis.k,
        **{name: getattr(settings, name) for name in ("rho", "gamma", "alpha", "sigma")},
        "max_backtracks": settings.max_backtracks,
        "mode": mode,
    }
    return with_info(
        optax.GradientTransformationExtraArgs(lambda params: _init(settings, params), update),
        TransformInfo(
            "dim_reduce",
            shown,
            static=settings.basis,
            fates=lambda params: _fates(settings, params),
            check=lambda state: _check(settings, state),
        ),
    )


def _init(settings: Settings, params: Any) -> DimReduceState:
    placed = settings.basis.place(params)
    own, k, wide = placed.layout, placed.k, settings.wide
    momentum = None
    if settings.alpha > 0:
        leaves = own.only(jax.tree.leaves(params))
        zeros = [jnp.zeros_like(p, jnp.promote_types(wide, p.dtype)) for p in leaves]
        momentum = own.fill(zeros, [optax.MaskedNode()] * len(own.paths))
    count = lambda: jnp.zeros((), jnp.int32)
    number = lambda: jnp.zeros((), jnp.float32)
    return DimReduceState(
        components=tuple(jnp.array(rows, copy=True) for rows in placed.components),
        fingerprint=jnp.asarray(np.uint32(settings.fingerprint)),
        metric=jnp.eye(k, dtype=wide),
        gradient=jnp.zeros(k, wide),
        step=jnp.zeros(k, wide),
        has_pair=jnp.zeros((), bool),
        momentum=momentum,
        status=count(),
        trials=count(),
        factor=number(),
        curvature_skips=count(),
        failures=count(),
        value=number(),
        new_value=number(),
    )


def _update(
    settings: Settings, updates: Any, state: DimReduceState, params: Any, extra: dict[str, Any]
) -> tuple[Any, DimReduceState]:
    own = settings.basis.place_layout(params)
    basis = dataclasses.replace(settings.basis, components=state.components, layout=own)
    wide = settings.wide
    incoming = jax.tree.leaves(updates)
    gradients = own.only(incoming)

    def cast(leaves: Any) -> list[Any]:
        return [u.astype(g.dtype) for u, g in zip(leaves, gradients, strict=True)]

    def behind(leaves: Any) -> Any:
        """Return the parameters after an update of the covered leaves, as ``tx``'s user adds it."""
        held = jax.tree.leaves(params)
        moved: Any = optax.apply_updates(list(own.only(held)), cast(leaves))
        return own.fill(moved, held)

    def back(coefficients: jax.Array) -> list[list[jax.Array]]:
        many = [times_coefficients(rows, coefficients) for rows in basis.components]
        return [[leaves[i] for leaves in many] for i in range(len(coefficients))]

    loss = bound_loss(extra["value_fn"], extra)
    gradient = basis.project(updates).astype(wide)
    raw = extra.get("grad")
    # The same arrays in most cases: the basis is then read once for both.
    same = raw is None or all(a is b for a, b in zip(jax.tree.leaves(raw), incoming, strict=False))
    value = jnp.asarray(extra["value"])
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    problem = Problem(
        gradient=gradient,
        raw=gradient if same else basis.project(raw).astype(wide),
        leaves=[g.astype(jnp.promote_types(wide, g.dtype)) for g in gradients],
        momentum=[] if state.momentum is None else jax.tree.leaves(state.momentum),
        value=value,
        back=back,
        loss_at=lambda leaves: loss(behind(leaves)),
    )
    rule: Callable[..., Any] = reference if settings.mode == "reference" else default
    leaves, momentum, new = rule(settings, state, problem)
    if state.momentum is not None:
        # A leaf wider than the basis would widen its momentum.
        old = jax.tree.leaves(state.momentum)
        kept = [leaf.astype(o.dtype) for leaf, o in zip(momentum, old, strict=True)]
        new = new._replace(momentum=jax.tree.unflatten(jax.tree.structure(state.momentum), kept))
    full = jax.tree.leaves(own.fill(cast(leaves), [_still(leaf) for leaf in incoming]))
    return jax.tree.unflatten(jax.tree.structure(updates), full), new


def _still(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.number):
        return leaf  # a float0: the gradient of an integer
    return jnp.full_like(leaf, -0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0)


def _check_call(params: Any, extra: dict[str, Any]) -> None:
    if params is None:
        raise ValueError("dim_reduce: its trials need the parameters; call update(..., params)")
    missing = [name for name in ("value", "value_fn") if extra.get(name) is None]
    if missing:
        raise ValueError(
            f"dim_reduce: update got no {' and no '.join(missing)}; call update(grads, state, params, "
            "value=loss, value_fn=loss_of_params), or train with boostax.train_step"
        )


def _check(settings: Settings, state: Any) -> None:
    found = find_state(state, DimReduceState)
    if found is None:
        raise StateMismatchError(
            "dim_reduce: there is no DimReduceState in this optimizer state; it was made by another "
            "transformation, or restored without a target and came back as dicts and lists: restore "
            "it with the target tx.init(params)"
        )
    check_matches(settings, found)


def _fates(settings: Settings, params: Any) -> dict[str, str]:
    covered = set(settings.basis.paths)
    return {
        path: f"moves in a subspace of {settings.basis.k} directions"
        if path in covered
        else "not moved (the basis does not cover it)"
        for path in leaf_paths(params)
    }
