"""The train step: loss, gradients, update and metrics as one compiled function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax import _info
from boostax.errors import StateMismatchError
from boostax.training._compute import Settings, StepFunction
from boostax.training._windows import first_window
from boostax.training.contract import CanonicalLoss, canonical_loss, declared_keywords
from boostax.training.metrics import check_metrics, injected_learning_rate
from boostax.training.state import TrainState
from boostax.updates._skip import find_state, find_states
from boostax.updates._window import AccumulateState
from boostax.updates.freeze import FreezeState

__all__ = ["TrainStep", "train_step"]


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    metrics: Sequence[str] | None = None,
    microbatch: int = 1,
    stats: str = "per_window",
    batch_norm_momentum: float | None = None,
    freezing: Any | None = None,
    freeze_dispatch: str = "host",
    skip_nonfinite: bool = False,
    learning_rate: float | Callable[[Any], Any] | None = None,
    wrt: Any = None,
    donate: bool = True,
) -> TrainStep:
    """Build a compiled train step for a linen, nnx or plain model.

    One call computes ``loss, grads = value_and_grad(loss_fn)(params, batch)``, passes the gradients
    through ``tx`` and applies the updates: ``params + updates``.

    Args:
      loss_fn: ``loss_fn(params, batch, *, model_state, rng)`` for linen and plain functions,
        ``loss_fn(model, batch, *, rng)`` for nnx; returns the mean loss over the batch, or
        ``(loss, boostax.LossAux(...))`` with ``has_aux=True``. ``model_state`` and ``rng`` are passed
        only if the function declares them.
      tx: any optax transformation; its ``update`` is given ``value``, ``grad``, ``value_fn``,
        ``grad_fn``, ``obj_fn``, ``weight``, ``freeze_index`` and the step's own extra arguments.
      has_aux: whether ``loss_fn`` returns a ``LossAux``. Default False.
      metrics: which of ``loss``, ``grad_norm`` (trainable leaves), ``finite``, ``updates``,
        ``micro_steps``, ``freeze_index``, ``learning_rate`` to report. Default None: all that can be
        known. The loss's own metrics always come with them.
      microbatch: int >= 1, into how many micro-batches one batch is cut inside the step, to save
        memory. Default 1. See :func:`boostax.microbatch`.
      stats: ``"per_window"`` pools batch statistics over a window of micro-batches, ``"per_micro"``
        lets them move at every micro-batch. Default ``"per_window"``.
      batch_norm_momentum: the share of the OLD running value, in [0, 1). Default None: read from the
        model's batch-norm modules.
      freezing: the ``boostax.Freezing`` that ``tx`` was built with. Default None: the one found in
        ``tx``.
      freeze_dispatch: ``"host"`` compiles one variant for each freeze index, when first needed;
        ``"switch"`` compiles all into one function. Inside a trace (a scan over steps) it is
        always ``"switch"``. Default ``"host"``.
      skip_nonfinite: leave everything but ``attempt`` (and the freeze schedule) as it was when the
        loss or a trainable gradient is not finite. Default False.
      learning_rate: what ``tx`` uses, for the metric: a number or a schedule of ``updates``. Default
        None: read from ``optax.inject_hyperparams`` or from a config-built optimizer if there is one.
      wrt: nnx filter of the trained leaves. Default None: ``nnx.Param``.
      donate: give the old state's buffers to the new one. Default True: the state passed in
        can't be used again.

    Returns:
      A :class:`TrainStep`: ``step.init(...)``, ``step(state, batch)``, ``step.describe(state, batch)``.

    Raises:
      TypeError: an argument has a wrong type, or ``loss_fn`` does not fit the contract.
      ValueError: an argument is out of range, or ``tx`` and ``freezing`` don't belong together.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> step = train_step(lambda params, x: jnp.mean((x @ params) ** 2), optax.sgd(0.5))
      >>> state = step.init(jnp.ones(2))
      >>> state, metrics = step(state, jnp.eye(2))
      >>> float(metrics["loss"]), state.params.tolist()
      (1.0, [0.5, 0.5])

    When not to use:
      A loop that needs the gradients themselves, or several losses with optimizers of their own, is
      better written with ``jax.value_and_grad``; boostax's transformations work there as well.
    """
    declared_keywords(loss_fn)
    if not isinstance(tx, optax.GradientTransformation):
        # Some of optax's own (MultiSteps) are classes with init and update.
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise TypeError(
                f"tx must be an optax transformation with init and update, got {type(tx).__name__}"
            )
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    if (
        isinstance(microbatch, bool)
        or not isinstance(microbatch, (int, np.integer))
        or microbatch < 1
    ):
        raise ValueError(f"microbatch must be an int >= 1, got {microbatch!r}")
    if stats not in ("per_window", "per_micro"):
        raise ValueError(f"stats must be 'per_window' or 'per_micro', got {stats!r}")
    if batch_norm_momentum is not None and not (
        isinstance(batch_norm_momentum, (int, float, np.integer, np.floating))
        and not isinstance(batch_norm_momentum, bool)
        and 0 <= batch_norm_momentum < 1
    ):
        raise ValueError(
            f"batch_norm_momentum is the share of the old value and must lie in [0, 1), got "
            f"{batch_norm_momentum!r}"
        )
    if freeze_dispatch not in ("host", "switch"):
        raise ValueError(f"freeze_dispatch must be 'host' or 'switch', got {freeze_dispatch!r}")
    for name, value in (
        ("has_aux", has_aux),
        ("skip_nonfinite", skip_nonfinite),
        ("donate", donate),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")
    freezing = _check_freezing(tx, freezing)
    names, asked = check_metrics(metrics, freezes=freezing is not None)
    if learning_rate is None:
        learning_rate = next(
            (i.settings["learning_rate"] for i in _info.walk(tx) if "learning_rate" in i.settings),
            None,
        )
    accumulating = _info.find(tx, "accumulate")
    settings = Settings(
        metrics=names,
        has_aux=has_aux,
        microbatch=int(microbatch),
        stats=stats,
        batch_norm_momentum=batch_norm_momentum,
        freezing=freezing,
        skip_nonfinite=skip_nonfinite,
        learning_rate=learning_rate,
        window_policy=None if accumulating is None else accumulating.settings["nonfinite"],
        window_every=_window_length(accumulating),
    )
    return TrainStep(
        loss_fn,
        tx,
        settings,
        all_metrics_needed=asked,
        dispatch=freeze_dispatch,
        wrt=wrt,
        donate=donate,
    )


def _check_freezing(tx: Any, freezing: Any | None) -> Any | None:
    found = _info.find(tx, "freeze")
    if None not in (found, freezing) and freezing.fingerprint != found.static.fingerprint:
        raise StateMismatchError(
            "freezing is not the one that tx was built with; give the same boostax.Freezing to "
            "freeze(...) and to train_step(...)"
        )
    # Some wrappers hide what is in them; then init looks for the state.
    return freezing if found is None else found.static


def _window_length(accumulating: _info.TransformInfo | None) -> Any:
    """Return how many calls a window takes: an int or a schedule, None where that can't be known."""
    if accumulating is None or accumulating.settings["skips_by_function"]:
        return None
    return accumulating.settings["every"]


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
        self._wrt = wrt
        self._donate = donate
        self._nnx: Any = None
        self._key_impl: str | None = None
        self._flush: Any = None
        # Whether the loss gives a weight, by the structure of the batch.
        self._weighted: dict[Any, bool] = {}
        self._compiled: dict[int | None, Any] = {}
        self._host_wanted = (
            settings.freezing is not None and dispatch == "host" and settings.fixed_windows
        )
        self._on_host = self._host_wanted
        # Momentum of each normalisation layer, as far as a trace has told.
        self._momenta: dict[str, float] = {}
        # The state that was returned last, and where it stands: then the device needn't be asked.
        self._last: tuple[weakref.ref[TrainState], _Position] | None = None

    def init(self, model_or_params: Any, *, model_state: Any = None, rng: Any = None) -> TrainState:
        """Return the first train state; all arrays are copies, so that donation spares the model.

        Args:
          model_or_params: an ``nnx.Module``, or the parameters as a pytree of arrays (linen:
            ``variables["params"]``).
          model_state: linen's other collections as a dict, such as ``{"batch_stats": ...}``; default
            None. Not for nnx, whose model holds its own.
          rng: a key of ``jax.random.key`` or ``jax.random.PRNGKey``, or an int seed. Needed if the
            loss declares ``rng``; default None.

        Raises:
          TypeError: a linen module was given instead of its parameters, or an argument has a wrong
            type.
          ValueError: ``rng`` is missing, a metric that was asked for can't be known, or the
            parameters hold no arrays.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> step = train_step(lambda params, x: jnp.sum(params * x), optax.sgd(0.1))
          >>> int(step.init(jnp.ones(3)).attempt)
          0
        """
        nnx = _nnx_module(model_or_params)
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
            model_state = flax.core.unfreeze(model_state)
        if not jax.tree.leaves(params):
            raise ValueError("init: the parameters hold no arrays, so there is nothing to train")
        if rng is None and _needs_key(self.loss_fn):
            raise ValueError(
                "init: loss_fn declares rng, so a key is needed; pass rng=jax.random.key(0)"
            )
        raw, self._key_impl = (None, None) if rng is None else _raw_key(rng)
        params, model_state, raw = _strong_copy((params, model_state, raw))
        opt_state = _strong_copy(self.tx.init(params))
        self._check_parts(opt_state)
        if self.settings.freezing is not None:
            bound = self.settings.freezing.bind(params)
            self.settings = dataclasses.replace(self.settings, freezing=bound)
        if self._all_metrics_needed and "learning_rate" in self.settings.metrics:
            self._require_learning_rate(opt_state)
        return TrainState(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            rng=raw,
            attempt=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32) if self.settings.may_skip else None,
            window=first_window(self.settings.stats, self.settings.window_policy, model_state),
        )

    def __call__(
        self, state: TrainState, batch: Any, **extra: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(state)
        _check_extra(extra)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch, extra))):
            return self._function()(state, batch, extra, None)
        position = self._position(state)
        index = self.settings.freezing.index_at(position.windows) if self._on_host else None
        passed = self._without_idle_counter(state, batch)
        new_state, metrics = self._jitted(index)(passed, batch, extra)
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
          >>> step = train_step(lambda p, x: jnp.mean(p * x), boostax.accumulate(optax.sgd(1.0), 4))
          >>> state, _ = step(step.init(jnp.zeros(())), jnp.full(1, 2.0))
          >>> float(step.flush(state).params)
          -2.0
        """
        _check_state(state)
        if self.settings.window_policy is None:
            raise ValueError(
                "flush: tx holds no boostax.accumulate, so there is no window to close"
            )
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, extra))):
            return self._function().flush(state, extra)
        _check_static_facts(self.tx, state.opt_state)
        if self._flush is None:
            function = functools.partial(_flush, self._function())
            self._flush = jax.jit(function, donate_argnums=(0,) if self._donate else ())
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
        self, state: TrainState, batch: Any, *, index: int | None = None, **extra: Any
    ) -> Any:
        """Lower one variant (``index``: a freeze index, or None for the one that switches inside)."""
        return self._jitted(index).lower(self._without_idle_counter(state, batch), batch, extra)

    def canonical(self) -> CanonicalLoss:
        """Return the loss as ``(params, model_state, batch, rng) -> (loss, LossAux)``."""
        if self._nnx is not None:
            return self._nnx.canonical_loss(self.loss_fn, self.settings.has_aux)
        return canonical_loss(self.loss_fn, has_aux=self.settings.has_aux)

    @property
    def dispatches_on_host(self) -> bool:
        """Whether each freeze index has a compiled variant of its own, chosen on the host."""
        return self._on_host

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

    def _function(self) -> StepFunction:
        return StepFunction(
            self.settings,
            self.tx,
            self.canonical(),
            takes_rng="rng" in declared_keywords(self.loss_fn),
            key_impl=self._key_impl,
            momenta=self._momenta,
        )

    def _jitted(self, index: int | None) -> Any:
        if index not in self._compiled:
            function = functools.partial(_call, self._function(), index)
            self._compiled[index] = jax.jit(function, donate_argnums=(0,) if self._donate else ())
        return self._compiled[index]

    def _without_idle_counter(self, state: TrainState, batch: Any) -> TrainState:
        """Leave ``skipped`` out of the compiled step where no call can be skipped.

        ``init`` can't tell that of a loss with a LossAux, which may give a weight or not; a counter
        that only passes through would still be read and written.
        """
        if state.skipped is None or self.settings.skip_nonfinite:
            return state
        structure = jax.tree.structure(batch)
        if structure not in self._weighted:
            self._weighted[structure] = self._function().gives_weight(state, batch)
        return state if self._weighted[structure] else state.replace(skipped=None)

    def _check_parts(self, opt_state: Any) -> None:
        """Hold what the optimizer state has against what was found in ``tx``."""
        frozen, windows = (
            find_states(opt_state, FreezeState),
            find_state(opt_state, AccumulateState),
        )
        if len(frozen) > 1:
            raise ValueError(
                f"tx holds {len(frozen)} boostax.freeze, but a step follows one schedule; use one "
                "Freezing with groups that cover all parameters"
            )
        if frozen and self.settings.freezing is None:
            raise ValueError(
                "tx holds a boostax.freeze that can't be seen from outside; pass freezing= to train_step"
            )
        if self.settings.freezing is not None and not frozen:
            raise ValueError(
                "freezing was given, but tx holds no boostax.freeze; wrap the optimizer: "
                "freeze(optimizer, freezing)"
            )
        if windows is not None and self.settings.window_policy is None:
            raise ValueError(
                "tx holds a boostax.accumulate that can't be seen from outside, so the step can't "
                "tell its policy; put accumulate around the wrapper instead of into it"
            )
        # The host can count windows only if nothing but accumulate decides when freeze is called.
        self._on_host = self._host_wanted and _called_every_window(opt_state)

    def _position(self, state: TrainState) -> _Position:
        if self._last is not None and self._last[0]() is state:
            return self._last[1]
        _check_static_facts(self.tx, state.opt_state)
        self._check_parts(state.opt_state)
        if not self._on_host:
            return _Position(0, 0)
        frozen: Any = find_state(state.opt_state, FreezeState)  # the check above found it
        window = find_state(state.opt_state, AccumulateState)
        return _Position(int(frozen.count), 0 if window is None else int(window.position))

    def _require_learning_rate(self, opt_state: Any) -> None:
        if self.settings.learning_rate is None and injected_learning_rate(opt_state) is None:
            raise ValueError(
                "metrics: 'learning_rate' was asked for, but this tx doesn't tell it; pass "
                "learning_rate= to train_step, use optax.inject_hyperparams, or leave the name out"
            )


@dataclasses.dataclass(frozen=True)
class _Position:
    """Where a state stands: attempted windows so far, and calls into the open one."""

    windows: int
    calls: int

    def next(self, every: Any) -> _Position:
        if not isinstance(every, (int, np.integer)) or self.calls + 1 >= every:
            return _Position(self.windows + 1, 0)
        return _Position(self.windows, self.calls + 1)


def _call(function: StepFunction, index: int | None, state: Any, batch: Any, extra: Any) -> Any:
    return function(state, batch, extra, index)


def _flush(function: StepFunction, state: Any, extra: Any) -> Any:
    return function.flush(state, extra)


def _check_static_facts(tx: Any, opt_state: Any) -> None:
    """Raise where a part of ``tx`` finds no state in ``opt_state`` that was made for it."""
    parts = [
        opt_state,
        *find_states(opt_state, AccumulateState),
        *find_states(opt_state, FreezeState),
    ]
    for info in _info.walk(tx):
        if info.check is None:
            continue
        faults = []
        for part in parts:
            try:
                info.check(part)
                break
            except StateMismatchError as fault:
                faults.append(fault)
        else:
            raise faults[0]


def _called_every_window(opt_state: Any) -> bool:
    """Say whether freeze is called at every step, or at every end of one window of accumulate."""
    transparent = (optax.MaskedState, optax.PartitionState)
    part = opt_state
    windows = 0
    while not isinstance(part, FreezeState):
        if isinstance(part, AccumulateState):
            windows, part = windows + 1, part.inner_state
        elif isinstance(part, transparent) or hasattr(part, "hyperparams"):
            values = getattr(part, "inner_states", None)
            part = part.inner_state if values is None else tuple(values.values())
        elif type(part) is tuple:
            holders = [child for child in part if find_state(child, FreezeState) is not None]
            if not holders:
                return False
            part = holders[0]
        else:
            return False
    return windows <= 1


def _nnx_module(model: Any) -> Any | None:
    """Return flax.nnx if ``model`` is an nnx module; importing it only where it can matter."""
    import sys

    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx is not None and isinstance(model, nnx.Module) else None


def _needs_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether the loss declares ``rng`` without a default (``**kwargs`` alone doesn't need it)."""
    parameter = inspect.signature(loss_fn).parameters.get("rng")
    return parameter is not None and parameter.default is parameter.empty


def _raw_key(rng: Any) -> tuple[jax.Array, str]:
    key: Any = rng
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        key = jax.random.key(int(rng))
    if not hasattr(key, "dtype"):
        raise TypeError(
            f"rng must be a key of jax.random.key, or an int seed; got {type(rng).__name__}"
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"rng must be one key, got an array of keys of shape {key.shape}")
    return jax.random.key_data(key), str(jax.random.key_impl(key))


def _strong_copy(tree: Any) -> Any:
    """Copy every array, strongly typed, so that the second call does not compile anew."""

    def copy(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.copy(leaf)
        return jnp.array(leaf, dtype=jax.dtypes.canonicalize_dtype(leaf.dtype), copy=True)

    return jax.tree.map(copy, tree)


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a boostax.TrainState, got {type(state).__name__}; make it with step.init, "
            "or restore it with that as the target"
        )


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if any(callable(leaf) or isinstance(leaf, str) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"the extra argument {name!r} must hold arrays or numbers, because the step is "
                f"compiled; got {value!r}"
            )
