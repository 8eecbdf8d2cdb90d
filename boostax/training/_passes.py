"""The forward and backward passes of a step: whole or in micro-batches, with statistics or without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from boostax import _compat
from boostax.gradients._labels import Labels
from boostax.gradients._statistics import watched_value_and_grad
from boostax.gradients.group_loss_scale import GroupLossScale
from boostax.gradients.microbatch import microbatched
from boostax.gradients.value_and_grad import value_and_grad
from boostax.training._settings import Settings
from boostax.training.contract import CanonicalLoss


class Passes:
    """Makes functions of ``(params, model_state, batch, rng)``.

    Args:
      settings: the step's static facts.
      loss: the loss, in canonical form.
      momenta: batch-norm momentum by module path, as far as a trace has told.

    Attributes:
      labels: where the boundaries between groups of a loss scale are, as the latest trace told.
    """

    def __init__(self, settings: Settings, loss: CanonicalLoss, momenta: Mapping[str, float]):
        self._settings, self._loss, self._momenta = settings, loss, momenta
        self.labels: Labels | None = None

    def value_and_grad(self, trainable: Any, scales: Any = None) -> Callable[..., Any]:
        """Return what gives ``((loss, LossAux), grads)``, for the leaves that are trained."""
        passes = self.scaled(trainable, scales)
        return lambda *given: passes(*given)[:2]

    def scaled(self, trainable: Any, scales: Any) -> Callable[..., Any]:
        """Return what gives ``((loss, LossAux), grads, amax)``.

        Args:
          trainable: pytree of Python bools, or None for all.
          scales: None, the loss scale, or those of the groups; gradients are then unscaled. ``amax``
            is what the boundaries between groups emitted.
        """
        if scales is not None and isinstance(self._settings.loss_scale, GroupLossScale):
            watched = self._watched(trainable)
            of_part = lambda *given: _without_factors(watched(*given, scales=scales))
        else:
            alone = value_and_grad(self._loss, trainable=trainable)
            of_part = lambda *given: (*alone(*given, scales), jnp.zeros(0))
        if self._settings.microbatch == 1:
            return of_part
        return self._microbatched(trainable, of_part, scales)

    def with_factors(
        self, trainable: Any, wanted: tuple[Any, Any] | None, scales: Any = None
    ) -> Callable[..., Any]:
        """Return what gives ``((loss, LossAux), grads, statistics, amax)``.

        Args:
          trainable: pytree of Python bools, or None for all.
          wanted: whether the layers' statistics are due, and flags of layers that need none; None
            where nothing asks for statistics.
          scales: as for :meth:`scaled`.
        """
        plain = self.scaled(trainable, scales)

        def without(*given: Any, zeros: Any) -> Any:
            result, grads, amax = plain(*given)
            return result, grads, zeros, amax

        if wanted is None:
            return functools.partial(without, zeros={})
        (due, rest), layers = wanted, self._settings.layers
        watched = self._watched(trainable, layers)

        def of_part(*given: Any) -> Any:
            result, grads, *more = watched(*given, rest, scales)
            return result, grads, tuple(more)

        both = of_part
        if self._settings.microbatch > 1:
            both = self._microbatched(trainable, of_part, scales)

        def passes(*given: Any) -> Any:
            def with_statistics() -> Any:
                result, grads, (factors, amax) = both(*given)
                return result, grads, factors, amax

            # The whole passes stand in the conditional: one inside the backward pass alone would
            # keep what the statistics need at every call.
            zeros = {} if due is False else layers.zeros()
            return _compat.cond(due, with_statistics, lambda: without(*given, zeros=zeros))

        return passes

    def _watched(self, trainable: Any, layers: Any = None) -> Callable[..., Any]:
        scaling = self._settings.loss_scale
        return watched_value_and_grad(
            self._loss,
            layers=layers,
            groups=scaling if isinstance(scaling, GroupLossScale) else None,
            trainable=trainable,
            note=self._note,
        )

    def _note(self, labels: Labels) -> None:
        self.labels = labels

    def _microbatched(self, trainable: Any, of_part: Any, scales: Any) -> Callable[..., Any]:
        return microbatched(
            self._loss,
            self._settings.microbatch,
            trainable=trainable,
            stats=self._settings.stats,
            momentum=self._settings.batch_norm_momentum,
            momenta=self._momenta,
            of_part=of_part,
            gradient_dtype=None if scales is None else jnp.float32,
            batch_parts=self._settings.batch_parts,
        )


def _without_factors(given: Any) -> Any:
    result, grads, _, amax = given
    return result, grads, amax
