"""The pure function inside a train step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax.errors import StateMismatchError
from boostax.gradients.value_and_grad import trained_leaves
from boostax.parallel.reduce import Devices
from boostax.training._arguments import accepted, declaring, merge_state
from boostax.training._passes import Passes
from boostax.training._replicas import Replicas
from boostax.training._scaling import Blame, blame, next_scale, seen_by_tx
from boostax.training._settings import Settings
from boostax.training._step_metrics import step_metrics
from boostax.training._windows import after_call, after_flush
from boostax.training.batch_stats import Window, collect_momenta, unknown_momenta
from boostax.training.contract import CanonicalLoss, LossAux, weight_of
from boostax.training.metrics import all_finite
from boostax.training.state import TrainState
from boostax.updates._skip import find_state, skip
from boostax.updates.accumulate import flush
from boostax.updates.local_steps import LocalStepsState, local_params
from boostax.updates.scale_by_thor import ThorState


class StepFunction:
    """``(state, batch, extra, index, due) -> (state, metrics)``, traced by jit, scan or vmap.

    ``index`` is a static freeze index, or None: then the schedule is read from the state, and all
    variants are compiled into one function. ``due`` is the same for the layers' statistics.

    With ``settings.replicas`` it runs inside ``shard_map``: the batch is this device's part, and the
    leaves of the optimizer state that differ between devices are its own.
    """

    def __init__(
        self,
        settings: Settings,
        tx: optax.GradientTransformationExtraArgs,
        loss: CanonicalLoss,
        *,
        takes_rng: bool,
        key_impl: str | None,
        momenta: dict[str, float],
        model: Any = None,
    ):
        self.settings = settings
        self.tx = tx
        self._takes_rng = takes_rng
        self._key_impl = key_impl
        self._momenta = momenta
        self._gives_weight = False
        self._model = model  # of nnx; it knows which leaves of its state are random keys
        # The second can be traced outside of shard_map as well.
        self._loss = self._prepared(loss, settings.replicas)
        self._loss_anywhere = self._prepared(loss, None)
        self._passes = Passes(settings, self._loss, momenta)

    def __call__(
        self,
        state: TrainState,
        batch: Any,
        extra: dict[str, Any],
        index: int | None,
        due: bool | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        settings = self.settings
        rng = self._rng(state)
        start = state.model_state
        here = state.params
        if find_state(state.opt_state, LocalStepsState) is not None:
            here = local_params(state.opt_state, state.params)
        index, traced_index = self._indices(state, index)
        pools = isinstance(state.window, Window) or settings.replicas is not None
        if pools and settings.batch_norm_momentum is None:
            self._look_up_momenta(state, batch)
        wanted = self._wanted(state, due)
        scales = None if state.loss_scale is None else state.loss_scale.scale
        loss, aux, grads, new_stats, factors, found = self._gradients(
            here, start, batch, rng, index, traced_index, wanted, scales
        )
        trained = self._trained(grads, state.params, index)
        needs_finite = (
            "finite" in settings.metrics or settings.skip_nonfinite or settings.window_decides
        )  # a loss scale sets skip_nonfinite
        finite = all_finite(loss, trained) if needs_finite else None
        weight = own_weight = weight_of(aux, batch)
        if settings.replicas is not None:
            finite, weight = self._agreed(finite, own_weight)

        value_fn = lambda params: self._value(as_in(here, params), start, batch, rng)
        given: dict[str, Any] = {
            "value": loss,
            "grad": grads,
            "grad_fn": lambda params, _: self._all_gradients(
                as_in(here, params), start, batch, rng, scales
            ),
            "obj_fn": lambda params: value_fn(params),  # optax's Sophia
            "weight": own_weight if self.settings.own_gradients else weight,
        }
        given |= self._exchange(own_weight)
        if wanted is not None:
            given |= {"stats": factors} if due is not False else {}
            given["boostax_due"] = wanted[0]
        if finite is not None:
            given["finite"] = finite
        if settings.freezing is not None:
            given["freeze_index"] = index if traced_index is None else traced_index

        given = {**accepted(self.tx, given), **extra}
        declared = declaring(lambda params, **_: value_fn(params), given)
        given = {**accepted(self.tx, {"value_fn": declared}), **given}

        def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
            seen = seen_by_tx(settings.loss_scale, params)
            updates, opt_state = self.tx.update(grads, opt_state, seen, **given)
            return optax.apply_updates(params, updates), opt_state

        positive = [weight > 0] if self._gives_weight else []
        # Inside a window accumulate decides; only a check of the step's own comes before that.
        skips = [finite] if settings.skip_nonfinite and not settings.window_decides else []
        skips += positive if settings.window_policy is None else []
        counts = [finite] if settings.window_decides and start is not None else []
        ok, counted = _all(skips), _all([*skips, *counts, *positive])
        if ok is True:
            params, opt_state = update(state.params, state.opt_state)
        else:
            params, opt_state = jax.lax.cond(
                ok,
                update,
                lambda params, opt_state: (params, skip(opt_state)),
                state.params,
                state.opt_state,
            )
        model_state, window = after_call(
            state.window,
            start,
            new_stats,
            weight=weight,
            ok=counted,
            old_opt_state=state.opt_state,
            opt_state=opt_state,
            momenta=self._momenta,
            momentum=settings.batch_norm_momentum,
        )
        skipped = state.skipped
        if skipped is not None and ok is not True:
            skipped = skipped + jnp.logical_not(ok).astype(jnp.int32)
        new_state = state.replace(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            attempt=state.attempt + 1,
            skipped=skipped,
            window=window,
            loss_scale=next_scale(
                settings.loss_scale,
                state.loss_scale,
                finite,
                found,
                _all(positive),
                settings.microbatch,
            ),
        )
        shown = step_metrics(
            settings,
            state,
            new_state,
            loss=loss,
            finite=finite,
            trained=trained,
            index=index if traced_index is None else traced_index,
        )
        clash = sorted(set(shown) & set(aux.metrics))
        if clash:
            raise ValueError(
                f"LossAux.metrics: the names {clash} are the step's own; rename yours or leave the "
                "step's out with metrics="
            )
        return new_state, {**shown, **aux.metrics}

    def _exchange(self, weight: Any) -> dict[str, Any]:
        """Return what lets parts of ``tx`` combine what the devices have, if they are to."""
        replicas, given = self.settings.replicas, {}
        if replicas is None:
            return given
        if replicas.exchange == "window":
            given["boostax_exchange"] = replicas.mean
        if self.settings.layers is not None:
            given["boostax_devices"] = Devices(replicas.axes, weight)
        return given

    def _wanted(self, state: TrainState, due: bool | None) -> tuple[Any, Any] | None:
        """Say whether the layers' statistics are due, and of which layers they are not wanted."""
        if self.settings.layers is None:
            return None
        thor = find_state(state.opt_state, ThorState)
        if thor is None:
            raise StateMismatchError(
                "state has no ThorState, but this step's tx holds thor; make it with step.init"
            )
        return thor.due if due is None else due, thor.rest

    def _agreed(self, finite: Any, weight: jax.Array) -> tuple[Any, jax.Array]:
        """Return the decision of all devices, and the weight of the whole batch."""
        replicas: Any = self.settings.replicas
        if finite is not None:
            # A device of weight 0 adds nothing, whatever it holds.
            finite = replicas.agree(finite | (weight == 0) if self._gives_weight else finite)
        if not self._gives_weight:
            return finite, replicas.total(weight)
        # A weight that is none, on one device, makes the batch's weight 0, which skips.
        sound = replicas.agree(jnp.isfinite(weight) & (weight >= 0))
        total = replicas.total(weight)
        return finite, jnp.where(sound & jnp.isfinite(total), total, 0.0)

    def _look_up_momenta(self, state: TrainState, batch: Any) -> None:
        """Note the momenta of the linen modules that the loss calls, where they aren't known yet."""
        if unknown_momenta(state.model_state, self._momenta):
            loss = lambda s, b: self._loss_anywhere(s.params, s.model_state, b, self._rng(s))[0]
            for path, momentum in collect_momenta(loss, state, batch).items():
                self._momenta.setdefault(path, momentum)

    def flush(self, state: TrainState, extra: dict[str, Any]) -> TrainState:
        """Close the open window: update with what was gathered, and pool its statistics."""
        given = {**extra, **self._exchange(jnp.float32(0))}
        seen = seen_by_tx(self.settings.loss_scale, state.params)
        updates, opt_state = flush(self.tx, state.opt_state, seen, **given)
        model_state, window = after_flush(
            state.window,
            state.model_state,
            old_opt_state=state.opt_state,
            opt_state=opt_state,
            momenta=self._momenta,
            momentum=self.settings.batch_norm_momentum,
        )
        return state.replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            model_state=model_state,
            window=window,
        )

    def gives_weight(self, state: TrainState, batch: Any) -> bool:
        """Trace the loss, and say whether it gives a weight, which may then be 0."""
        jax.eval_shape(
            lambda s, b: self._loss_anywhere(s.params, s.model_state, b, self._rng(s))[0],
            state,
            batch,
        )
        return self._gives_weight

    def _prepared(self, loss: CanonicalLoss, replicas: Replicas | None) -> CanonicalLoss:
        """Note whether the loss gives a weight, and complete the model state it returns.

        Each device draws from a key of its own. With statistics per micro-batch the devices pool
        them at every micro-batch, else once a call.
        """
        alone = replicas is None or replicas.size == 1
        pools = not alone and self.settings.stats == "per_micro"

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
            self._gives_weight = aux.weight is not None
            new = merge_state(model_state, aux.model_state)
            if not alone and self._model is not None:
                new = self._model.with_keys_of(start, new)
            if pools:
                new = self._pooled(start, new, weight_of(aux, batch))
            return value, aux.replace(model_state=new)

        return prepared

    def _rng(self, state: TrainState) -> Any:
        if not self._takes_rng or state.rng is None:
            return None
        key = jax.random.wrap_key_data(state.rng, impl=self._key_impl)
        return jax.random.fold_in(key, state.attempt)

    def _indices(self, state: TrainState, index: int | None) -> tuple[int | None, Any]:
        if self.settings.freezing is None or index is not None:
            return index, None
        from boostax.updates.freeze import FreezeState

        frozen = find_state(state.opt_state, FreezeState)
        if frozen is None:
            raise StateMismatchError(
                "state was made without freezing, but this step freezes; make it with step.init"
            )
        return None, self.settings.freezing.index_at(frozen.count)

    def _gradients(
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
        freezing = self.settings.freezing

        def variant(i: int | None) -> Callable[..., Any]:
            def run(params: Any, start: Any, batch: Any, rng: Any) -> Any:
                trainable = None if i is None else freezing.trainable(i)
                passes = self._passes.with_factors(trainable, wanted, scales)
                (loss, aux), grads, factors, amax = passes(params, start, batch, rng)
                stats = start if aux.model_state is None else aux.model_state
                if self.settings.replicas is not None:
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
        replicas = self.settings.replicas
        if replicas is not None and self._gives_weight:
            amax = jnp.where(weight == 0, 0, amax)
        return blame(
            self.settings.loss_scale,
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
        replicas: Any = self.settings.replicas
        weight = weight_of(aux, batch)
        if self.settings.stats != "per_micro":
            stats = self._pooled(start, stats, weight)
        leaves, treedef = jax.tree.flatten(grads)
        own = [leaf for leaf, flag in zip(leaves, trained, strict=True) if flag]
        # Without weights the devices' parts are of one size; other processes can have given more.
        shared = weight if self._gives_weight or jax.process_count() > 1 else None
        if replicas.exchange == "step":
            own = replicas.mean(own, shared)
        elif self._gives_weight:
            own = [jnp.where(weight == 0, jnp.zeros_like(leaf), leaf) for leaf in own]
        supply = iter(own)
        leaves = [
            next(supply) if flag else leaf for leaf, flag in zip(leaves, trained, strict=True)
        ]
        loss, metrics = replicas.mean((loss, _as_floats(aux.metrics)), shared)
        return loss, aux.replace(metrics=metrics), treedef.unflatten(leaves), stats

    def _pooled(self, start: Any, new: Any, weight: jax.Array) -> Any:
        replicas: Any = self.settings.replicas
        momentum = self.settings.batch_norm_momentum
        return replicas.pooled_state(start, new, weight, self._momenta, momentum)

    def _value(self, params: Any, start: Any, batch: Any, rng: Any) -> jax.Array:
        nothing = jax.tree.map(lambda _: False, params)
        (loss, aux), _ = self._passes.value_and_grad(nothing)(params, start, batch, rng)
        if self.settings.replicas is None:
            return loss
        return self.settings.replicas.mean(loss, weight_of(aux, batch))

    def _all_gradients(self, params: Any, start: Any, batch: Any, rng: Any, scales: Any) -> Any:
        (_, aux), grads = self._passes.value_and_grad(None, scales)(params, start, batch, rng)
        if self.settings.replicas is None or self.settings.own_gradients:
            return grads
        return self.settings.replicas.mean(grads, weight_of(aux, batch))

    def _trained(self, grads: Any, params: Any, index: int | None) -> list[Any]:
        trainable = None if index is None else self.settings.freezing.trainable(index)
        flags = trained_leaves(params, trainable)
        return [g for g, flag in zip(jax.tree.leaves(grads), flags, strict=True) if flag]


def as_in(params: Any, given: Any) -> Any:
    """Return parameters that ``tx`` asks for, in the dtypes that the loss takes."""
    return jax.tree.map(lambda p, like: jnp.asarray(p, like.dtype), given, params)


def _as_floats(metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {
        name: jnp.asarray(value, jnp.promote_types(jnp.result_type(value), jnp.float32))
        for name, value in metrics.items()
    }


def _all(conditions: list[Any]) -> Any:
    return functools.reduce(jnp.logical_and, conditions) if conditions else True
