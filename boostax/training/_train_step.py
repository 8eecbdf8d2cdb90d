"""The object that a train step is: start, call, flush, describe."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax.training._compute import StepFunction
from boostax.training._dispatch import (
    Position,
    called_every_window,
    check_parts,
    check_static_facts,
)
from boostax.training._layout import MadeShapes, check_shapes
from boostax.training._on_mesh import OnMesh
from boostax.training._scaling import check_scaling_state, first_scale, seen_by_tx
from boostax.training._settings import Settings
from boostax.training._start import (
    check_arrays,
    check_extra,
    check_state,
    needs_key,
    nnx_module,
    raw_key,
    strong_copy,
)
from boostax.training._windows import first_window
from boostax.training.contract import CanonicalLoss, canonical_loss, declared_keywords
from boostax.training.metrics import injected_learning_rate
from boostax.training.state import TrainState
from boostax.updates._skip import find_state
from boostax.updates._window import AccumulateState
from boostax.updates.freeze import FreezeState
from boostax.updates.scale_by_thor import ThorState


class TrainStep:
    """A compiled train step; made by :func:`train_step`.

    ``step(state, batch, **extra)`` returns ``(state, metrics)``; ``extra`` are arrays handed to the
    transformation's ``update``. The state passed in is donated unless ``donate=False``.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        settings: Settings,
        *,
        all_metrics_needed: bool,
        dispatch: str,
        wrt: Any,
        donate: bool,
    ):
        self.loss_fn = loss_fn
        self.tx = optax.with_extra_args_support(tx)
        self.settings = settings
        self._all_metrics_needed = all_metrics_needed
        self._mesh = None if settings.replicas is None else OnMesh(self.tx, settings)
        self._wrt = wrt
        self._donate = donate
        self._nnx: Any = None
        self._key_impl: str | None = None
        self._flush: Any = None
        # The shapes that an optimizer state must have, by those of the parameters.
        self._made = MadeShapes(self.tx)
        # Whether the loss gives a weight, by the structure of the batch.
        self._weighted: dict[Any, bool] = {}
        # By freeze index, and by whether statistics are due, where the host knows.
        self._compiled: dict[tuple[int | None, bool | None], Any] = {}
        self._host_wanted = (
            settings.freezing is not None and dispatch == "host" and settings.fixed_windows
        )
        self._on_host = self._host_wanted
        # Momentum of each normalisation layer, as far as a trace has told.
        self._momenta: dict[str, float] = {}
        # The state that was returned last, and where it stands: then the device needn't be asked.
        self._last: tuple[weakref.ref[TrainState], Position] | None = None

    def init(
        self,
        model_or_params: Any,
        *,
        model_state: Any = None,
        rng: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """Return the first train state; all arrays are copies, so that donation spares the model.

        Args:
          model_or_params: an ``nnx.Module``, or the parameters as a pytree of arrays (linen:
            ``variables["params"]``).
          model_state: linen's other collections as a dict, such as ``{"batch_stats": ...}``; default
            None. Not for nnx, whose model holds its own.
          rng: a key of ``jax.random.key`` or ``jax.random.PRNGKey``, or an int seed. Needed if the
            loss declares ``rng``; default None.
          extra: examples of the extra arguments that ``tx`` needs of you (only shapes are used), for
            a step over a mesh whose ``tx`` combines gradients. Default None.

        Raises:
          TypeError: a linen module was given instead of its parameters, or an argument has a wrong
            type.
          ValueError: ``rng`` is missing, a metric that was asked for can't be known, or the
            parameters hold no arrays.

        Example:
          >>> import jax.numpy as jnp, optax, boostax
          >>> step = boostax.train_step(lambda params, x: jnp.sum(params * x), optax.sgd(0.1))
          >>> int(step.init(jnp.ones(3)).attempt)
          0
        """
        nnx = nnx_module(model_or_params)
        if nnx is not None:
            from boostax.training._nnx import NnxModel

            if model_state is not None:
                raise TypeError("model_state is for linen; an nnx model holds its own state")
            adapted = NnxModel(model_or_params, nnx.Param if self._wrt is None else self._wrt)
            if self._nnx is not None and adapted.graphdef != self._nnx.graphdef:
                self._compiled.clear()
                self._flush = None
            self._nnx = adapted
            self._momenta = dict(adapted.momenta)
            params, model_state = adapted.params, adapted.model_state
        else:
            if self._wrt is not None:
                raise TypeError(
                    "wrt is an nnx filter, but init was given parameters, not an nnx model"
                )
            if hasattr(model_or_params, "apply") and hasattr(model_or_params, "init"):
                raise TypeError(
                    f"init needs parameters, got the linen module {type(model_or_params).__name__}; "
                    "pass model.init(key, inputs)['params']"
                )
            params = model_or_params
            check_arrays(params, "init")
            model_state = flax.core.unfreeze(model_state)
        if not jax.tree.leaves(params):
            raise ValueError("init: the parameters hold no arrays, so there is nothing to train")
        layers = self.settings.layers
        draws = layers is not None and layers.fisher == "true"
        if rng is None and (draws or needs_key(self.loss_fn)):
            why = 'thor draws labels (fisher="true")' if draws else "loss_fn declares rng"
            raise ValueError(f"init: {why}, so a key is needed; pass rng=jax.random.key(0)")
        raw, self._key_impl = (None, None) if rng is None else raw_key(rng)
        params, model_state, raw = strong_copy((params, model_state, raw))
        if self._mesh is not None:
            params = self._mesh.placed_params(params)
        scaling = self.settings.loss_scale
        opt_state = strong_copy(self.tx.init(seen_by_tx(scaling, params)))
        self._look_at_parts(opt_state)
        if self.settings.freezing is not None:
            bound = self.settings.freezing.bind(params)
            self.settings = dataclasses.replace(self.settings, freezing=bound)
        if self._all_metrics_needed and "learning_rate" in self.settings.metrics:
            self._require_learning_rate(opt_state)
        state = TrainState(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            rng=raw,
            attempt=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32) if self.settings.may_skip else None,
            window=first_window(self.settings.stats, self.settings.window_policy, model_state),
            loss_scale=None if scaling is None else first_scale(scaling, params),
        )
        if self._mesh is None:
            return state
        state = self._mesh.first_state(state, {} if extra is None else extra)
        if self._mesh.moved(state):
            self._compiled.clear()
            self._flush = None
        return state

    def __call__(
        self, state: TrainState, batch: Any, **extra: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        check_state(state)
        check_scaling_state(self.settings.loss_scale, state.loss_scale)
        check_extra(extra)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch, extra))):
            batch = self._filled(batch, state)
            batch = batch if self._mesh is None else self._mesh.resharded(batch)
            return self._mapped(None, None)(state, batch, extra)
        position = self._position(state)
        index = self.settings.freezing.index_at(position.windows) if self._on_host else None
        batch = self._filled(batch, state)
        if self._mesh is not None:
            known = self._last is not None and self._last[0]() is state
            state = state if known else self._mesh.placed_state(state, extra)
            batch, extra = self._mesh.placed(batch, extra)
        passed = self._without_idle_counter(state, batch)
        due = self._due(state)
        new_state, metrics = self._jitted(index, passed, due=due)(passed, batch, extra)
        if passed is not state:
            new_state = new_state.replace(skipped=state.skipped)
        self._last = weakref.ref(new_state), position.next(self.settings.window_every)
        return new_state, metrics

    def flush(self, state: TrainState, **extra: Any) -> TrainState:
        """Close the open accumulation window: update with what was gathered so far.

        At the end of an epoch, say. The window's mean is over the micro-batches that it has, and its
        batch statistics are pooled as those of a whole window. An empty window changes nothing.

        Args:
          state: a train state; its buffers are donated as in a step.
          **extra: the extra arguments that the transformation needs.

        Returns:
          The state with the window closed.

        Raises:
          ValueError: ``tx`` holds no ``accumulate``, or a normalisation layer's momentum is not known
            because no call was made in this process (then pass ``batch_norm_momentum``).

        Example:
          >>> import jax.numpy as jnp, optax, boostax
          >>> loss_fn = lambda params, x: jnp.mean(params * x)
          >>> step = boostax.train_step(loss_fn, boostax.accumulate(optax.sgd(1.0), 4))
          >>> state, _ = step(step.init(jnp.zeros(())), jnp.full(1, 2.0))
          >>> float(step.flush(state).params)
          -2.0
        """
        check_state(state)
        if self.settings.window_policy is None:
            raise ValueError(
                "flush: tx holds no boostax.accumulate, so there is no window to close"
            )
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, extra))):
            return self._mapped_flush()(state, extra)
        check_static_facts(self.tx, state.opt_state)
        if self._mesh is not None:
            state = self._mesh.placed_state(state, extra)
        if self._flush is None:
            self._flush = self._jit(self._mapped_flush(), state, results=1)
        return self._flush(state, extra)

    def describe(self, state: TrainState, batch: Any, **extra: Any) -> Any:
        """Say what the step does and costs: order, fate of each parameter, FLOPs, bytes, memory.

        Compiles each variant of the step and the plain step, without running them.

        Args:
          state: a train state (arrays or ``jax.ShapeDtypeStruct``).
          batch: a batch (the same).
          **extra: the extra arguments that the step is called with.

        Returns:
          A :class:`boostax.training.describe.StepDescription`, which prints as a table.
        """
        from boostax.training.describe import describe_step

        return describe_step(self, state, batch, extra)

    def lower(
        self,
        state: TrainState,
        batch: Any,
        *,
        index: int | None = None,
        due: bool | None = None,
        **extra: Any,
    ) -> Any:
        """Lower one variant of the step.

        ``index``: a freeze index; ``due``: whether statistics are computed; None for the variant that
        decides inside.
        """
        batch = self._filled(batch, state)
        if self._mesh is not None:
            batch, _ = self._mesh.placed(batch, {})
        passed = self._without_idle_counter(state, batch)
        return self._jitted(index, passed, due=due).lower(passed, batch, extra)

    def wrapped_key(self, raw: jax.Array) -> jax.Array:
        """Return the key that ``TrainState.rng`` holds the raw data of."""
        return jax.random.wrap_key_data(raw, impl=self._key_impl)

    def canonical(self) -> CanonicalLoss:
        """Return the loss as ``(params, model_state, batch, rng) -> (loss, LossAux)``."""
        if self._nnx is not None:
            return self._nnx.canonical_loss(self.loss_fn, self.settings.has_aux)
        return canonical_loss(self.loss_fn, has_aux=self.settings.has_aux)

    @property
    def dispatches_on_host(self) -> bool:
        """Whether each freeze index has a compiled variant of its own, chosen on the host."""
        return self._on_host

    @property
    def looks_for_due(self) -> bool:
        """Whether the host reads if statistics are due, and picks one of two compiled variants."""
        dispatch = self.settings.due_dispatch
        # A CPU runs convolutions inside a conditional several times slower, and has no queue of
        # calls that a look would empty.
        on_host = dispatch == "host" or (dispatch == "auto" and jax.default_backend() == "cpu")
        return self.settings.layers is not None and on_host

    def with_settings(self, settings: Settings, tx: Any) -> TrainStep:
        """Return a step for the same loss and model with other settings and transformation."""
        step = TrainStep(
            self.loss_fn,
            tx,
            settings,
            all_metrics_needed=False,
            dispatch="switch",
            wrt=self._wrt,
            donate=self._donate,
        )
        step._nnx, step._key_impl, step._momenta = self._nnx, self._key_impl, self._momenta
        return step

    def abstract_opt_state(self, params: Any, extra: Mapping[str, Any]) -> Any:
        """Return the optimizer state's shapes, with a leading axis where devices have their own."""
        seen = functools.partial(seen_by_tx, self.settings.loss_scale)
        state = jax.eval_shape(lambda params: self.tx.init(seen(params)), params)
        return state if self._mesh is None else self._mesh.abstract(state, params, extra)

    def _function(self) -> StepFunction:
        return StepFunction(
            self.settings,
            self.tx,
            self.canonical(),
            takes_rng="rng" in declared_keywords(self.loss_fn)
            or (self.settings.layers is not None and self.settings.layers.fisher == "true"),
            key_impl=self._key_impl,
            momenta=self._momenta,
            model=self._nnx,
        )

    def _due(self, state: TrainState) -> bool | None:
        if not self.looks_for_due:
            return None
        found: Any = find_state(state.opt_state, ThorState)  # check_parts saw to it
        return bool(np.asarray(found.due))

    def _jitted(self, index: int | None, state: TrainState, *, due: bool | None = None) -> Any:
        if (index, due) not in self._compiled:
            self._compiled[index, due] = self._jit(self._mapped(index, due), state, results=2)
        return self._compiled[index, due]

    def _jit(self, function: Callable[..., Any], state: TrainState, *, results: int) -> Any:
        donated = (0,) if self._donate else ()
        if self._mesh is None:
            return jax.jit(function, donate_argnums=donated)
        return self._mesh.jit(function, state, donated, results=results)

    def _mapped(self, index: int | None, due: bool | None) -> Callable[..., Any]:
        """Return ``(state, batch, extra) -> (state, metrics)``, over the mesh if there is one."""
        function = functools.partial(_call, self._function(), index, due)
        return function if self._mesh is None else self._mesh.mapped(function)

    def _mapped_flush(self) -> Callable[..., Any]:
        function = self._function().flush
        return function if self._mesh is None else self._mesh.mapped_flush(function)

    def _filled(self, batch: Any, state: TrainState) -> Any:
        if self._mesh is None:
            return batch
        return self._mesh.filled(batch, lambda: self._gives_weight(state, batch))

    def _without_idle_counter(self, state: TrainState, batch: Any) -> TrainState:
        """Leave ``skipped`` out of the compiled step where no call can be skipped.

        ``init`` can't tell that of a loss with a LossAux, which may give a weight or not; a counter
        that only passes through would still be read and written.
        """
        if state.skipped is None or self.settings.skip_nonfinite:
            return state
        return state if self._gives_weight(state, batch) else state.replace(skipped=None)

    def _gives_weight(self, state: TrainState, batch: Any) -> bool:
        structure = jax.tree.structure(batch)
        if structure not in self._weighted:
            self._weighted[structure] = self._function().gives_weight(state, batch)
        return self._weighted[structure]

    def _look_at_parts(self, opt_state: Any) -> None:
        check_parts(self.settings, opt_state)
        # The host can count windows only if nothing but accumulate decides when freeze is called.
        self._on_host = self._host_wanted and called_every_window(opt_state)

    def _position(self, state: TrainState) -> Position:
        if self._last is not None and self._last[0]() is state:
            return self._last[1]
        check_static_facts(self.tx, state.opt_state)
        self._look_at_parts(state.opt_state)
        if self._mesh is None:
            check_shapes(state.opt_state, self._made(state.params))
        if not self._on_host:
            return Position(0, 0)
        frozen: Any = find_state(state.opt_state, FreezeState)  # the check above found it
        window = find_state(state.opt_state, AccumulateState)
        return Position(int(frozen.count), 0 if window is None else int(window.position))

    def _require_learning_rate(self, opt_state: Any) -> None:
        if self.settings.learning_rate is None and injected_learning_rate(opt_state) is None:
            raise ValueError(
                "metrics: 'learning_rate' was asked for, but this tx doesn't tell it; pass "
                "learning_rate= to train_step, use optax.inject_hyperparams, or leave the name out"
            )


def _call(
    function: StepFunction, index: int | None, due: bool | None, state: Any, batch: Any, extra: Any
) -> Any:
    return function(state, batch, extra, index, due)
