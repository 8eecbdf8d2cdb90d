"""What a call of a train step computes from the loss: value, gradients, statistics, over all devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from boostax.gradients.value_and_grad import trained_leaves
from boostax.training._arguments import merge_state
from boostax.training._passes import Passes
from boostax.training._replicas import Replicas
from boostax.training._scaling import Blame, blame
from boostax.training._settings import Settings
from boostax.training.contract import CanonicalLoss, LossAux, weight_of

__all__ = ["Evaluation"]


class Evaluation:
    """The gradient seam of a train step.

    Args:
      settings: the step's static facts.
      loss: the loss, in canonical form.
      momenta: batch-norm momentum by module path, as far as a trace has told.
      model: what knows an nnx model, or None.

    Attributes:
      gives_weight: whether the loss gives a weight, as the latest trace told.
      anywhere: the loss as it can be traced outside of ``shard_map`` as well.
    """

    def __init__(
        self, settings: Settings, loss: CanonicalLoss, momenta: Mapping[str, float], model: Any
    ):
        self._settings, self._momenta, self._model = settings, momenta, model
        self.gives_weight = False
        self.anywhere = self._prepared(loss, None)
        self._passes = Passes(settings, self._prepared(loss, settings.replicas), momenta)

    def gradients(
        self,
        params: Any,
        start: Any,
        batch: Any,
        rng: Any,
        index: int | None,
        traced_index: Any,
        wanted: tuple[Any, Any] | None,
        scales: Any,
    ) -> tuple[jax.Array, LossAux, Any, Any, Any, Blame | None]:
        """Return loss, aux, gradients, model state, the layers' statistics, and whom to blame.

        Args:
          params: the parameters.
          start: the model state.
          batch: the batch.
          rng: the call's key, or None.
          index: the static freeze index, or None.
          traced_index: the traced one, or None.
          wanted: see :meth:`Passes.with_factors`.
          scales: the loss scale or scales, or None.
        """
        freezing = self._settings.freezing

        def variant(i: int | None) -> Callable[..., Any]:
            def run(params: Any, start: Any, batch: Any, rng: Any) -> Any:
                trainable = None if i is None else freezing.trainable(i)
                passes = self._passes.with_factors(trainable, wanted, scales)
                (loss, aux), grads, factors, amax = passes(params, start, batch, rng)
                stats = start if aux.model_state is None else aux.model_state
                if self._settings.replicas is not None:
                    loss, aux, grads, stats = self._combined(
                        loss, aux, grads, stats, start, batch, trained_leaves(params, trainable)
                    )
                if i is not None:
                    stats = freezing.hold_statistics(i, start, stats)
                found = self._blame(params, trainable, grads, amax, weight_of(aux, batch))
                aux = aux.replace(model_state=None, predictive=None)
                return loss, aux, grads, stats, factors, found

            return run

        if traced_index is None:
            return variant(index)(params, start, batch, rng)
        branches = [variant(i) for i in range(freezing.num_indices)]
        return jax.lax.switch(traced_index, branches, params, start, batch, rng)

    def _blame(
        self, params: Any, trainable: Any, grads: Any, amax: jax.Array, weight: Any
    ) -> Blame | None:
        replicas = self._settings.replicas
        if replicas is not None and self.gives_weight:
            amax = jnp.where(weight == 0, 0, amax)
        return blame(
            self._settings.loss_scale,
            self._passes.labels,
            params,
            trainable,
            grads,
            amax,
            None if replicas is None else replicas.axes,
        )

    def _combined(
        self,
        loss: jax.Array,
        aux: LossAux,
        grads: Any,
        stats: Any,
        start: Any,
        batch: Any,
        trained: list[bool],
    ) -> tuple[jax.Array, LossAux, Any, Any]:
        """Combine what the devices computed; gradients only where ``tx`` does not do it."""
        replicas: Any = self._settings.replicas
        weight = weight_of(aux, batch)
        if self._settings.stats != "per_micro":
            stats = self._pooled(start, stats, weight)
        leaves, treedef = jax.tree.flatten(grads)
        own = [leaf for leaf, flag in zip(leaves, trained, strict=True) if flag]
        # Without weights the devices' parts are of one size; other processes can have given more.
        shared = weight if self.gives_weight or jax.process_count() > 1 else None
        if replicas.exchange == "step":
            own = replicas.mean(own, shared)
        elif self.gives_weight:
            own = [jnp.where(weight == 0, jnp.zeros_like(leaf), leaf) for leaf in own]
        supply = iter(own)
        leaves = [
            next(supply) if flag else leaf for leaf, flag in zip(leaves, trained, strict=True)
        ]
        loss, metrics = replicas.mean((loss, _as_floats(aux.metrics)), shared)
        return loss, aux.replace(metrics=metrics), treedef.unflatten(leaves), stats

    def _pooled(self, start: Any, new: Any, weight: jax.Array) -> Any:
        replicas: Any = self._settings.replicas
        momentum = self._settings.batch_norm_momentum
        return replicas.pooled_state(start, new, weight, self._momenta, momentum)

    def value(self, params: Any, start: Any, batch: Any, rng: Any) -> jax.Array:
        """Return the loss alone, the mean over devices."""
        nothing = jax.tree.map(lambda _: False, params)
        (loss, aux), _ = self._passes.value_and_grad(nothing)(params, start, batch, rng)
        if self._settings.replicas is None:
            return loss
        return self._settings.replicas.mean(loss, weight_of(aux, batch))

    def all_gradients(self, params: Any, start: Any, batch: Any, rng: Any, scales: Any) -> Any:
        """Return the gradients of all leaves, as ``tx`` gets them."""
        (_, aux), grads = self._passes.value_and_grad(None, scales)(params, start, batch, rng)
        if self._settings.replicas is None or self._settings.own_gradients:
            return grads
        return self._settings.replicas.mean(grads, weight_of(aux, batch))

    def trained(self, grads: Any, params: Any, index: int | None) -> list[Any]:
        """Return the gradients of the leaves that are trained at a freeze index."""
        trainable = None if index is None else self._settings.freezing.trainable(index)
        flags = trained_leaves(params, trainable)
        return [g for g, flag in zip(jax.tree.leaves(grads), flags, strict=True) if flag]

    def _prepared(self, loss: CanonicalLoss, replicas: Replicas | None) -> CanonicalLoss:
        """Note whether the loss gives a weight, and complete the model state it returns.

        Each device draws from a key of its own. With statistics per micro-batch the devices pool
        them at every micro-batch, else once a call.
        """
        alone = replicas is None or replicas.size == 1
        pools = not alone and self._settings.stats == "per_micro"

        def prepared(
            params: Any, model_state: Any, batch: Any, rng: Any
        ) -> tuple[jax.Array, LossAux]:
            start = model_state
            if replicas is not None and not alone:
                index = replicas.index()
                rng = None if rng is None else jax.random.fold_in(rng, index)
                if self._model is not None:
                    model_state = self._model.fold_keys(model_state, index)
            value, aux = loss(params, model_state, batch, rng)
            self.gives_weight = aux.weight is not None
            new = merge_state(model_state, aux.model_state)
            if not alone and self._model is not None:
                new = self._model.with_keys_of(start, new)
            if pools:
                new = self._pooled(start, new, weight_of(aux, batch))
            return value, aux.replace(model_state=new)

        return prepared


def _as_floats(metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {
        name: jnp.asarray(value, jnp.promote_types(jnp.result_type(value), jnp.float32))
        for name, value in metrics.items()
    }
