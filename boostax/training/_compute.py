"""The pure function inside a train step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax.errors import StateMismatchError
from boostax.parallel.reduce import Devices
from boostax.training._arguments import accepted, declaring
from boostax.training._evaluate import Evaluation
from boostax.training._scaling import next_scale, seen_by_tx, with_gradient
from boostax.training._settings import Settings
from boostax.training._step_metrics import step_metrics
from boostax.training._windows import after_call, after_flush
from boostax.training.batch_stats import Window, collect_momenta, unknown_momenta
from boostax.training.contract import CanonicalLoss, weight_of
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
        self._loss = Evaluation(settings, loss, momenta, model)

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
        loss, aux, grads, new_stats, factors, found = self._loss.gradients(
            here, start, batch, rng, index, traced_index, wanted, scales
        )
        trained = self._loss.trained(grads, state.params, index)
        needs_finite = (
            "finite" in settings.metrics or settings.skip_nonfinite or settings.window_decides
        )  # a loss scale sets skip_nonfinite
        finite = all_finite(loss, trained) if needs_finite else None
        weight = own_weight = weight_of(aux, batch)
        if settings.replicas is not None:
            finite, weight = self._agreed(finite, own_weight)

        value_fn = lambda params: self._loss.value(as_in(here, params), start, batch, rng)
        grad_fn = lambda params: self._loss.all_gradients(
            as_in(here, params), start, batch, rng, scales
        )
        if scales is not None:
            value_fn = with_gradient(value_fn, grad_fn)
        given: dict[str, Any] = {
            "value": loss,
            "grad": grads,
            "grad_fn": lambda params, _: grad_fn(params),
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

        positive = [weight > 0] if self._loss.gives_weight else []
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
            counts=_all(positive),
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
            finite = replicas.agree(finite | (weight == 0) if self._loss.gives_weight else finite)
        if not self._loss.gives_weight:
            return finite, replicas.total(weight)
        # A weight that is none, on one device, makes the batch's weight 0, which skips.
        sound = replicas.agree(jnp.isfinite(weight) & (weight >= 0))
        total = replicas.total(weight)
        return finite, jnp.where(sound & jnp.isfinite(total), total, 0.0)

    def _look_up_momenta(self, state: TrainState, batch: Any) -> None:
        """Note the momenta of the linen modules that the loss calls, where they aren't known yet."""
        if unknown_momenta(state.model_state, self._momenta):
            loss = lambda s, b: self._loss.anywhere(s.params, s.model_state, b, self._rng(s))[0]
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
        # Inside the step no type tells a sharding over the mesh either.
        jax.eval_shape(
            lambda s, b: self._loss.anywhere(s.params, s.model_state, b, self._rng(s))[0],
            state,
            jax.tree.map(_bare, batch),
        )
        return self._loss.gives_weight

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


def as_in(params: Any, given: Any) -> Any:
    """Return parameters that ``tx`` asks for, in the dtypes that the loss takes."""
    return jax.tree.map(lambda p, like: jnp.asarray(p, like.dtype), given, params)


def _bare(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), getattr(leaf, "dtype", jnp.result_type(leaf)))


def _all(conditions: list[Any]) -> Any:
    return functools.reduce(jnp.logical_and, conditions) if conditions else True
