"""The forward and backward passes of a step: whole or in micro-batches, with statistics or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from boostax import _compat
from boostax.gradients._statistics import value_grad_and_factors
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
    """

    def __init__(self, settings: Settings, loss: CanonicalLoss, momenta: Mapping[str, float]):
        self._settings, self._loss, self._momenta = settings, loss, momenta

    def value_and_grad(self, trainable: Any) -> Callable[..., Any]:
        """Return what gives ``((loss, LossAux), grads)``, for the leaves that are trained."""
        if self._settings.microbatch == 1:
            return value_and_grad(self._loss, trainable=trainable)
        passes = self._microbatched(trainable)
        return lambda *given: passes(*given)[:2]

    def with_factors(self, trainable: Any, wanted: tuple[Any, Any] | None) -> Callable[..., Any]:
        """Return what gives ``((loss, LossAux), grads, statistics)``.

        Args:
          trainable: pytree of Python bools, or None for all.
          wanted: whether the layers' statistics are due, and flags of layers that need none; None
            where nothing asks for statistics.
        """
        plain = self.value_and_grad(trainable)
        if wanted is None:
            return lambda *given: (*plain(*given), {})
        (due, rest), layers = wanted, self._settings.layers
        watched = value_grad_and_factors(self._loss, layers, trainable=trainable)
        of_part = lambda *given: watched(*given, rest)
        both = of_part if self._settings.microbatch == 1 else self._microbatched(trainable, of_part)

        def passes(*given: Any) -> Any:
            # The whole passes stand in the conditional: one inside the backward pass alone would
            # keep what the statistics need at every call.
            zeros = {} if due is False else layers.zeros()
            return _compat.cond(due, lambda: both(*given), lambda: (*plain(*given), zeros))

        return passes

    def _microbatched(self, trainable: Any, of_part: Any = None) -> Callable[..., Any]:
        return microbatched(
            self._loss,
            self._settings.microbatch,
            trainable=trainable,
            stats=self._settings.stats,
            momentum=self._settings.batch_norm_momentum,
            momenta=self._momenta,
            of_part=of_part,
        )
