"""The pure function inside a train step."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax import _info
from boostax.errors import StateMismatchError
from boostax.gradients.microbatch import microbatched
from boostax.gradients.value_and_grad import trained_leaves, value_and_grad
from boostax.training._windows import after_call, after_flush
from boostax.training.batch_stats import Window, collect_momenta, unknown_momenta
from boostax.training.contract import CanonicalLoss, LossAux, weight_of
from boostax.training.metrics import all_finite, global_norm, injected_learning_rate
from boostax.training.state import TrainState
from boostax.updates._skip import find_state, find_states, skip
from boostax.updates.accumulate import AccumulateState, flush


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static facts of a train step; ``train_step`` documents each."""

    metrics: tuple[str, ...]
    has_aux: bool
    microbatch: int
    stats: str
    batch_norm_momentum: float | None
    freezing: Any
    skip_nonfinite: bool
    learning_rate: Any
    window_policy: str | None
    window_every: Any

    @property
    def may_skip(self) -> bool:
        """Whether a call can leave the state as it was (only a LossAux can give a weight of 0)."""
        return self.skip_nonfinite or self.has_aux

    @property
    def window_decides(self) -> bool:
        """Whether ``accumulate`` decides what is skipped, by a policy of its own."""
        return self.window_policy in ("skip_micro", "skip_window")

    @property
    def fixed_windows(self) -> bool:
        """Whether the number of calls a window takes is known without looking at the device."""
        if self.window_policy is None:
            return True
        if not isinstance(self.window_every, (int, np.integer)):
            return False
        return self.window_policy == "skip_window" or (
            self.window_policy == "off" and not self.skip_nonfinite
        )


class StepFunction:
    """``(state, batch, extra, index) -> (state, metrics)``, traced by jit, scan or vmap.

    ``index`` is a static freeze index, or None: then the schedule is read from the state, and all
    variants are compiled into one function.
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
    ):
        self.settings = settings
        self.tx = tx
        self._takes_rng = takes_rng
        self._key_impl = key_impl
        self._momenta = momenta
        self._gives_weight = False
        self._loss = self._prepared(loss)

    def __call__(
        self, state: TrainState, batch: Any, extra: dict[str, Any], index: int | None
    ) -> tuple[TrainState, dict[str, Any]]:
        settings = self.settings
        rng = self._rng(state)
        start = state.model_state
        index, traced_index = self._indices(state, index)
        if isinstance(state.window, Window) and settings.batch_norm_momentum is None:
            self._look_up_momenta(state, batch)
        loss, aux, grads, new_stats = self._gradients(
            state.params, start, batch, rng, index, traced_index
        )
        trained = self._trained(grads, state.params, index)
        needs_finite = (
            "finite" in settings.metrics or settings.skip_nonfinite or settings.window_decides
        )
        finite = all_finite(loss, trained) if needs_finite else None
        weight = weight_of(aux, batch)

        given: dict[str, Any] = {
            "value": loss,
            "grad": grads,
            "grad_fn": lambda params, _: self._all_gradients(params, start, batch, rng),
            "obj_fn": lambda params: self._value(params, start, batch, rng),  # optax's Sophia
            "weight": weight,
        }
        if finite is not None:
            given["finite"] = finite
        if settings.freezing is not None:
            given["freeze_index"] = index if traced_index is None else traced_index

        given = {**_accepted(self.tx, given), **extra}
        value_fn = lambda params, **_: self._value(params, start, batch, rng)
        value_fn = _declaring(value_fn, given)
        given = {**_accepted(self.tx, {"value_fn": value_fn}), **given}

        def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = self.tx.update(grads, opt_state, params, **given)
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
        )
        shown = self._metrics(state, new_state, loss, finite, trained, index, traced_index)
        clash = sorted(set(shown) & set(aux.metrics))
        if clash:
            raise ValueError(
                f"LossAux.metrics: the names {clash} are the step's own; rename yours or leave the "
                "step's out with metrics="
            )
        return new_state, {**shown, **aux.metrics}

    def _look_up_momenta(self, state: TrainState, batch: Any) -> None:
        """Note the momenta of the linen modules that the loss calls, where they aren't known yet."""
        if unknown_momenta(state.model_state, self._momenta):
            loss = lambda s, b: self._loss(s.params, s.model_state, b, self._rng(s))[0]
            for path, momentum in collect_momenta(loss, state, batch).items():
                self._momenta.setdefault(path, momentum)

    def flush(self, state: TrainState, extra: dict[str, Any]) -> TrainState:
        """Close the open window: update with what was gathered, and pool its statistics."""
        updates, opt_state = flush(self.tx, state.opt_state, state.params, **extra)
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
            lambda s, b: self._loss(s.params, s.model_state, b, self._rng(s))[0], state, batch
        )
        return self._gives_weight

    def _prepared(self, loss: CanonicalLoss) -> CanonicalLoss:
        """Note whether the loss gives a weight, and complete the model state it returns."""

        def prepared(
            params: Any, model_state: Any, batch: Any, rng: Any
        ) -> tuple[jax.Array, LossAux]:
            value, aux = loss(params, model_state, batch, rng)
            self._gives_weight = aux.weight is not None
            return value, aux.replace(model_state=_merge_state(model_state, aux.model_state))

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
        self, params: Any, start: Any, batch: Any, rng: Any, index: int | None, traced_index: Any
    ) -> tuple[jax.Array, LossAux, Any, Any]:
        freezing = self.settings.freezing

        def variant(i: int | None) -> Callable[..., Any]:
            def run(params: Any, start: Any, batch: Any, rng: Any) -> Any:
                trainable = None if i is None else freezing.trainable(i)
                (loss, aux), grads = self._value_and_grad(trainable)(params, start, batch, rng)
                stats = start if aux.model_state is None else aux.model_state
                if i is not None:
                    stats = freezing.hold_statistics(i, start, stats)
                return loss, aux.replace(model_state=None), grads, stats

            return run

        if traced_index is None:
            return variant(index)(params, start, batch, rng)
        branches = [variant(i) for i in range(freezing.num_indices)]
        return jax.lax.switch(traced_index, branches, params, start, batch, rng)

    def _value_and_grad(self, trainable: Any) -> Callable[..., Any]:
        if self.settings.microbatch == 1:
            return value_and_grad(self._loss, trainable=trainable)
        return microbatched(
            self._loss,
            self.settings.microbatch,
            trainable=trainable,
            stats=self.settings.stats,
            momentum=self.settings.batch_norm_momentum,
            momenta=self._momenta,
        )

    def _value(self, params: Any, start: Any, batch: Any, rng: Any) -> jax.Array:
        nothing = jax.tree.map(lambda _: False, params)
        return self._value_and_grad(nothing)(params, start, batch, rng)[0][0]

    def _all_gradients(self, params: Any, start: Any, batch: Any, rng: Any) -> Any:
        return self._value_and_grad(None)(params, start, batch, rng)[1]

    def _trained(self, grads: Any, params: Any, index: int | None) -> list[Any]:
        trainable = None if index is None else self.settings.freezing.trainable(index)
        flags = trained_leaves(params, trainable)
        return [g for g, flag in zip(jax.tree.leaves(grads), flags, strict=True) if flag]

    def _metrics(
        self,
        old: TrainState,
        new: TrainState,
        loss: jax.Array,
        finite: jax.Array | None,
        trained: list[Any],
        index: int | None,
        traced_index: Any,
    ) -> dict[str, jax.Array]:
        shown: dict[str, Any] = {}
        for name in self.settings.metrics:
            if name == "loss":
                shown[name] = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
            elif name == "grad_norm":
                shown[name] = global_norm(self._gathered(new, trained))
            elif name == "finite":
                shown[name] = finite
            elif name == "updates":
                shown[name] = new.updates
            elif name == "micro_steps":
                shown[name] = self._micro_steps(new)
            elif name == "freeze_index":
                shown[name] = jnp.asarray(
                    index if traced_index is None else traced_index, jnp.int32
                )
            elif (rate := self._learning_rate(old, new)) is not None:
                shown[name] = jnp.asarray(rate, jnp.float32)
        return shown

    def _gathered(self, state: TrainState, trained: list[Any]) -> list[Any]:
        """Return this call's gradients, or inside a window those that it has gathered so far.

        At a window's last call that is what the optimizer gets, and a clip in it measures.
        """
        windows = find_states(state.opt_state, AccumulateState)
        if len(windows) != 1 or windows[0].grads is None:
            return trained
        return jax.tree.leaves(windows[0].grads)

    def _micro_steps(self, state: TrainState) -> jax.Array:
        window = find_state(state.opt_state, AccumulateState)
        if window is not None:
            calls = window.micro_steps
        else:
            calls = state.attempt if state.skipped is None else state.attempt - state.skipped
        return calls if self.settings.microbatch == 1 else calls * self.settings.microbatch

    def _learning_rate(self, old: TrainState, new: TrainState) -> Any:
        rate = self.settings.learning_rate
        if callable(rate):
            return rate(old.updates)
        return injected_learning_rate(new.opt_state) if rate is None else rate


def _accepted(tx: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a part of ``tx`` neither declares nor swallows, as optax's SAM does not."""
    for info in _info.walk(tx):
        if info.keywords is not None:
            given = {name: value for name, value in given.items() if name in info.keywords}
    return given


def _declaring(value_fn: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Let ``value_fn`` declare these keywords; optax's line searches refuse all that it doesn't."""
    kinds = inspect.Parameter
    value_fn.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            kinds("params", kinds.POSITIONAL_OR_KEYWORD),
            *(kinds(name, kinds.KEYWORD_ONLY) for name in names if name not in ("value", "grad")),
        ]
    )
    return value_fn


def _all(conditions: list[Any]) -> Any:
    return functools.reduce(jnp.logical_and, conditions) if conditions else True


def _merge_state(start: Any, new: Any) -> Any:
    """Put the collections that the loss returned over those that it started from."""
    if new is None:
        return start
    if start is None:
        raise ValueError(
            "loss_fn returned LossAux.model_state, but the train state has none; pass "
            "model_state= to step.init"
        )
    if isinstance(start, dict) and isinstance(new, Mapping):
        new = {**start, **flax.core.unfreeze(dict(new))}
    given, wanted = jax.tree.structure(new), jax.tree.structure(start)
    if given != wanted:
        raise ValueError(
            f"LossAux.model_state has another structure than the train state's: got {given}, "
            f"expected {wanted}"
        )

    def same(new_leaf: Any, old_leaf: Any) -> Any:
        if jnp.shape(new_leaf) != jnp.shape(old_leaf):
            raise ValueError(
                f"LossAux.model_state: a leaf of shape {jnp.shape(old_leaf)} came back with shape "
                f"{jnp.shape(new_leaf)}"
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree.map(same, new, start)
