"""Value and gradients of a loss, for the leaves that are trained.

Frozen leaves are never differentiated, so that XLA drops the backward work that only they need; a
traced mask would save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from boostax.gradients._scaled_pass import pulled, wide_zeros
from boostax.training.contract import CanonicalLoss, LossAux

__all__ = ["trained_leaves", "value_and_grad"]

ValueAndGrad = Callable[..., tuple[tuple[jax.Array, LossAux], Any]]


def trained_leaves(params: Any, trainable: Any | None) -> list[bool]:
    """Say for each leaf, in tree order, whether it is differentiated.

    Args:
      params: the parameters.
      trainable: pytree of Python bools with the structure of ``params``; None means all.

    Returns:
      One bool a leaf; leaves that are not of an inexact dtype are never differentiated.
    """
    leaves, treedef = jax.tree.flatten(params)
    flags = [True] * len(leaves) if trainable is None else treedef.flatten_up_to(trainable)
    return [
        bool(flag) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        for flag, leaf in zip(flags, leaves, strict=True)
    ]


def value_and_grad(loss: CanonicalLoss, *, trainable: Any | None = None) -> ValueAndGrad:
    """Return a function that gives the loss, its aux, and gradients for the trained leaves.

    Args:
      loss: ``(params, model_state, batch, rng) -> (loss, LossAux)``.
      trainable: pytree of Python bools with the structure of the parameters; the gradients of the
        other leaves are zeros, and their backward work is not compiled. Default None: all.

    Returns:
      ``fn(params, model_state, batch, rng, scale=None) -> ((loss, LossAux), grads)`` with gradients in
      the parameters' dtypes. With a ``scale`` the backward pass starts from that, and the gradients are
      divided by it, in float32 or better.
    """

    def fn(
        params: Any, model_state: Any, batch: Any, rng: Any, scale: Any = None
    ) -> tuple[tuple[jax.Array, LossAux], Any]:
        leaves, treedef = jax.tree.flatten(params)
        flags = trained_leaves(params, trainable)

        def of_trained(trained: list[Any]) -> tuple[jax.Array, LossAux]:
            supply = iter(trained)
            merged = [
                next(supply) if flag else leaf for flag, leaf in zip(flags, leaves, strict=True)
            ]
            return loss(treedef.unflatten(merged), model_state, batch, rng)

        trained = [leaf for flag, leaf in zip(flags, leaves, strict=True) if flag]
        if not trained:
            (value, aux), grads = of_trained([]), []
        elif scale is None:
            (value, aux), grads = jax.value_and_grad(of_trained, has_aux=True)(trained)
        else:
            value, (grads,), aux = pulled(of_trained, [trained], scale)
        supply = iter(grads)
        zeros = jnp.zeros_like if scale is None else wide_zeros
        filled = [
            next(supply) if flag else zeros(leaf) for flag, leaf in zip(flags, leaves, strict=True)
        ]
        return (value, aux), treedef.unflatten(filled)

    return fn
