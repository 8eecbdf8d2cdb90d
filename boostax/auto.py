"""AutoBoost, the front door: a level and a config become a model, an optimizer and a train step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optax
from flax import nnx
from jax.sharding import Mesh

from boostax import _info, rules
from boostax._auto_chain import base_optimizer, inner_chain, outer_chain
from boostax._auto_devices import check_mesh, exchange_part, mesh_of, needs_order
from boostax._auto_dim_reduce import dim_reduce_part
from boostax._auto_model import OFF, evaluation_model, rewritten
from boostax._auto_reports import BoostDescription, describe_boost
from boostax._auto_resolution import absent, base_parts, part_of, resolution_in, with_left_out
from boostax._auto_scaling import scaling_of
from boostax._auto_thor import Source, thor_part
from boostax.config import BoostConfig, load_config
from boostax.gradients.forward_order import forward_order
from boostax.gradients.group_loss_scale import GroupLossScale
from boostax.gradients.layers import CapturedLayers
from boostax.gradients.loss_scale import DynamicLossScale
from boostax.models.report import ModelReport
from boostax.training._start import typed_key
from boostax.training.state import TrainState
from boostax.training.step import TrainStep, train_step

__all__ = ["AutoBoost", "BoostDescription", "ModelReport"]


class AutoBoost:
    """Put the techniques of a level or a config into a training run.

    An ordinary object without state: as many as you like, each with its own config.

    Args:
      level: ``"O0"`` (nothing), ``"O1"`` (less_bn and grad_freeze, with gradient centralization)
        or ``"O2"`` (adasum too, over all devices). Decides in the config's mode ``auto``. Default
        ``"O0"``.
      config: what :func:`boostax.load_config` takes. Default None: the defaults.

    Attributes:
      level: the level.
      config: the checked :class:`boostax.BoostConfig`.
      resolution: every technique with its state and the reason; prints as a table.

    Raises:
      ConfigError: the level is unknown, the config has faults, or techniques exclude each other.

    Example:
      >>> import jax, jax.numpy as jnp, optax, boostax
      >>> boost = boostax.AutoBoost("O1", {"grad_freeze": {"param_groups": 2, "total_steps": 10}})
      >>> boost.enabled
      ('less_bn', 'grad_freeze', 'centralize')
      >>> params = {f"layer_{i}": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)} for i in range(2)}
      >>> def loss_fn(params, x):
      ...     for layer in params.values():
      ...         x = x @ layer["kernel"] + layer["bias"]
      ...     return jnp.mean(x**2)
      >>> tx = boost.optimizer(optax.sgd(0.1), params)
      >>> step = boost.train_step(loss_fn, tx)
      >>> state, metrics = step(step.init(params), jnp.ones((4, 2)))
      >>> int(metrics["updates"])
      1

    Source:
      ``mindspore.boost.AutoBoost``, which is a singleton that ignores its second use.

    When not to use:
      With one technique only, its own function in your ``optax.chain`` is shorter.
    """

    def __init__(self, level: str = "O0", config: Any = None) -> None:
        self.level = rules.check_level(level)
        self.config: BoostConfig = load_config(config)
        self.resolution = rules.resolve(self.config, level)

    def __repr__(self) -> str:
        return f"AutoBoost({self.level!r}, {self.config.to_dict(defaults=False)!r})"

    @property
    def enabled(self) -> tuple[str, ...]:
        """The techniques that are on, in the order of the chain."""
        return self.resolution.enabled

    @property
    def notes(self) -> tuple[str, ...]:
        """Flags that were overridden, sections without effect, and the like."""
        return self.resolution.notes

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh that the config means: all devices in groups of ``common.device_number``.

        The same as :func:`boostax.parallel.data_mesh`; made when first asked for, which starts JAX's
        backend. :meth:`train_step` runs on it where adasum is on.

        Raises:
          ConfigError: ``common.device_number`` does not divide the number of devices, or
            ``adasum.axis_name`` is set, so that you pass a mesh of your own.
        """
        return mesh_of(self.config)

    @functools.cached_property
    def loss_scale(self) -> DynamicLossScale | GroupLossScale | float | None:
        """The loss scale that the config means, which :meth:`train_step` takes by default.

        With groups it is also what places boundaries in a model (``x = boost.loss_scale(x, 1, 2)``) and
        changes one scale of a state (``update_group``). None where no loss scale is on.
        """
        return scaling_of(self.config, self.enabled)

    def model(
        self,
        model: Any,
        *example_inputs: Any,
        inference: bool = False,
        state: TrainState | None = None,
        rngs: Any = None,
        method: str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ModelReport]:
        """Rewrite a model by the techniques at the model seam: :func:`boostax.less_bn`, ``norm_head``.

        In mode ``manual`` a rewrite that finds nothing to change raises; elsewhere, where the level asks
        for it, the report says so. Where less_bn is off the model is returned as it is.

        Args:
          model: a linen module (before its ``init``) or an nnx module, which is not changed; where
            less_bn is off, anything.
          *example_inputs: inputs that the model can be called with; ``ShapeDtypeStruct`` will do.
          inference: True for the model to evaluate with: rewritten in the same way, where that was not
            done yet. An nnx model is put into evaluation mode. Default False.
          state: with ``inference``, the trained state, whose values the model gets; a linen module comes
            bound to them. With ``less_bn.fold`` the norms that are left are folded. Default None.
          rngs: linen only, a key or a dict of them, for models that need more than ``params`` and
            ``dropout``. Default None.
          method: name of the method that is called. Default None: ``__call__``.
          **kwargs: keyword arguments of the call, such as ``train=False``.

        Returns:
          The model and a :class:`boostax.ModelReport`, which :meth:`describe` takes too.

        Raises:
          ValueError: in mode ``manual``, a rewrite found nothing to change; the message lists what it
            looked at. Or ``state`` was given without ``inference``.
          TypeError: ``model`` is neither a linen nor an nnx module, or ``state`` is no train state.
        """
        if state is not None and not inference:
            raise ValueError("model: state goes with inference=True; step.init makes a new state")
        call = {"rngs": rngs, "method": method, **kwargs}
        report = ModelReport(notes=(OFF,))
        if "less_bn" in self.enabled:
            strict = self.resolution.mode == "manual" and not inference
            model, report = rewritten(self.config, model, example_inputs, call, strict)
        if not inference:
            return model, report
        return evaluation_model(self.config, model, report, state, example_inputs, call)

    def optimizer(
        self,
        tx: optax.GradientTransformation | None = None,
        params: Any = None,
        *,
        order: Sequence[str] | None = None,
        wrt: Any = None,
        layers: CapturedLayers | None = None,
        loss_fn: Callable[..., Any] | None = None,
        batch: Any = None,
        model_state: Any = None,
        rng: Any = None,
        has_aux: bool | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Compose the transformations that are on around a base optimizer.

        ``accumulate(freeze(chain(adasum, centralize, clip, thor, tx)))``, without what is off. With
        ``centralize.on = "update"`` centralize stands behind ``tx``, with ``adasum.on = "update"``
        adasum does, between the two. With dim_reduce on it is ``chain(centralize, dim_reduce)``, and
        ``tx``, which makes no update then, may be left out.

        Args:
          tx: the base optimizer. Default None: the one that the config's section ``optimizer``
            names.
          params: the parameters, or the nnx model, that will be trained; arrays or
            ``ShapeDtypeStruct`` leaves. Needed where grad_freeze, centralize or dim_reduce is on.
          order: every leaf's path in forward order, from :func:`boostax.forward_order`, for
            freezing and for the buffers that AdaSum sends. Default None: natural order, where the
            names tell it.
          wrt: nnx filter of the trained leaves, where ``params`` is a model. Default None:
            ``nnx.Param``.
          layers: the layers of the loss, where thor is on: what :func:`boostax.capture_layers`
            returned. Default None: they are captured from ``loss_fn``, ``params`` and ``batch``, with
            the config's ``block_size``, ``fisher``, ``exclude`` and ``mode``.
          loss_fn: the loss that will be trained, for capturing. Default None.
          batch: one batch, for capturing; abstract leaves do. Default None.
          model_state: as for :func:`boostax.capture_layers`. Default None.
          rng: as for :func:`boostax.capture_layers`. Default None.
          has_aux: as for :func:`boostax.capture_layers`. Default None.

        Returns:
          The transformation. ``tx`` itself where nothing is on and nothing is clipped.

        Raises:
          ConfigError: neither or both of ``tx`` and the section ``optimizer`` are given, or the
            optimizer does not go with what is on (in mode ``enable_all`` that is left out
            instead), or the config asks for more groups than there are layers, or
            ``common.device_number`` does not divide the number of devices, or thor is on and its
            layers or, for its KL clip, the learning rate are missing (in mode ``enable_all`` thor is
            left out instead), or dim_reduce is on and its files are not what they should be.
          TimeoutError: dim_reduce is on, and the file of its basis did not come in time.
          TypeError: ``tx`` is not a transformation.
          ValueError: ``params`` is missing, or the order of its layers can't be told.
        """
        replaced = "dim_reduce" in self.enabled
        given = tx is not None or self.config.optimizer is not None
        base = None if replaced and not given else base_optimizer(self.config, tx)
        parts = frozenset() if replaced else base_parts(self.config, base)
        enabled = rules.with_optimizer(self.config, self.resolution, parts).enabled
        needed = [n for n in ("grad_freeze", "centralize", "dim_reduce") if n in enabled]
        if needed and params is None:
            raise ValueError(
                f"optimizer: params is needed, because {' and '.join(needed)} is on; call "
                "boost.optimizer(tx, params)"
            )
        model = params if isinstance(params, nnx.Module) else None
        if model is not None:
            params = nnx.state(model, nnx.Param if wrt is None else wrt)
        exchange = None
        if "adasum" in enabled:
            exchange = exchange_part(self.config, self._own_mesh(), params, order)
        thor, left_out = None, {}
        if "thor" in enabled:
            options = {"model_state": model_state, "rng": rng, "has_aux": has_aux}
            if model is not None:
                options["wrt"] = wrt
            source = Source(layers, loss_fn, batch, params if model is None else model, options)
            try:
                thor = thor_part(self.config, source)
            except ValueError as error:
                if self.resolution.mode != "enable_all":
                    raise
                left_out["thor"] = str(error)
        last = dim_reduce_part(self.config, params) if replaced else base
        inner = inner_chain(self.config, enabled, last, params, model, exchange, thor)
        whole = outer_chain(
            self.config, enabled, inner, params, order, needs_value=bool(parts & rules.NEEDS_VALUE)
        )
        if base is None or whole is base:
            return whole
        return with_left_out(_info.with_plain(whole, base), left_out)

    def train_step(self, loss_fn: Callable[..., Any], tx: Any, **settings: Any) -> TrainStep:
        """Build the compiled train step: :func:`boostax.train_step` with the config's settings.

        Args:
          loss_fn: the loss, by the contract of :func:`boostax.train_step`.
          tx: what :meth:`optimizer` returned.
          **settings: any keyword of :func:`boostax.train_step`; each wins over the config's
            ``microbatch``, ``stats`` and ``batch_norm_momentum``, and ``loss_scale`` over
            :attr:`loss_scale`. Where adasum is on, ``mesh`` is by default :attr:`mesh`.

        Returns:
          The step, with ``init``, ``describe`` and ``step(state, batch)``.

        Raises:
          ValueError: ``tx`` lacks a technique that is on, or ``adasum.axis_name`` is set and
            ``mesh`` is missing.
        """
        enabled = self._resolution_of(tx).enabled
        for name in absent(self.config, tx, enabled):
            raise ValueError(
                f"train_step: {name} is on, but tx holds no {part_of(self.config, name)}; pass what "
                "boost.optimizer(tx, params) returned"
            )
        if "grad_accumulation" in enabled:
            section = self.config.grad_accumulation
            settings = {
                "microbatch": section.microbatch,
                "stats": section.stats,
                "batch_norm_momentum": section.batch_norm_momentum,
            } | settings
        if self.loss_scale is not None:
            settings = {"loss_scale": self.loss_scale} | settings
        if "adasum" in enabled:
            mesh = settings.get("mesh")
            settings["mesh"] = self._own_mesh() if mesh is None else mesh
            check_mesh(self.config, tx, settings["mesh"])
        return train_step(loss_fn, tx, **settings)

    def start(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation | None,
        model_or_params: Any,
        batch: Any,
        *,
        model_state: Any = None,
        rng: Any = None,
        **settings: Any,
    ) -> tuple[TrainStep, TrainState]:
        """Compose the optimizer, build the train step and make its first state, in one call.

        The same as ``optimizer``, ``train_step`` and ``step.init`` one after the other, with the
        layers' forward order read from the loss where freezing needs it, and its layers captured where
        thor does.

        Args:
          loss_fn: the loss, by the contract of :func:`boostax.train_step`.
          tx: the base optimizer, or None for the one that the config names.
          model_or_params: the nnx model, or the parameters.
          batch: one batch (only its shapes are used).
          model_state: linen's other collections. Default None.
          rng: a key or an int seed, where the loss declares ``rng``. Default None.
          **settings: any keyword of :func:`boostax.train_step`.

        Returns:
          The step and its first state.

        Raises:
          ConfigError: as for :meth:`optimizer`.
          ValueError: as for :func:`boostax.train_step`.

        Example:
          >>> import jax.numpy as jnp, optax, boostax
          >>> params = {"stem": {"kernel": jnp.eye(2)}, "head": {"kernel": jnp.ones((2, 1))}}
          >>> loss_fn = lambda p, x: jnp.mean((x @ p["stem"]["kernel"] @ p["head"]["kernel"]) ** 2)
          >>> boost = boostax.AutoBoost("O1", {"grad_freeze": {"param_groups": 2}})
          >>> step, state = boost.start(loss_fn, optax.sgd(0.1), params, jnp.ones((4, 2)))
          >>> state, metrics = step(state, jnp.ones((4, 2)))
          >>> float(metrics["loss"])
          4.0
        """
        order = None
        if needs_order(self.config, self.enabled, model_or_params, settings.get("wrt")):
            order = forward_order(
                loss_fn,
                model_or_params,
                batch,
                model_state=model_state,
                rng=None if rng is None else typed_key(rng),
                has_aux=settings.get("has_aux"),
                wrt=settings.get("wrt"),
            )
        tx = self.optimizer(
            tx,
            model_or_params,
            order=order,
            wrt=settings.get("wrt"),
            layers=settings.get("layers"),
            loss_fn=loss_fn,
            batch=batch,
            model_state=model_state,
            rng=None if rng is None else typed_key(rng),
            has_aux=settings.get("has_aux"),
        )
        step = self.train_step(loss_fn, tx, **settings)
        return step, step.init(model_or_params, model_state=model_state, rng=rng)

    def describe(
        self,
        params: Any = None,
        tx: Any = None,
        *,
        step: TrainStep | None = None,
        state: Any = None,
        batch: Any = None,
        order: Sequence[str] | None = None,
        report: ModelReport | None = None,
        **extra: Any,
    ) -> BoostDescription:
        """Say what is on and why, the order of the chain, and what happens to each parameter.

        Args:
          params: the parameters or the nnx model. Default None: no table of parameters.
          tx: what :meth:`optimizer` returned. Default None: it is made from ``params`` where they
            are given.
          step: what :meth:`train_step` returned; with ``state`` and ``batch`` its costs are told
            as well, which compiles every variant. Default None.
          state: a train state of that step. Default None.
          batch: a batch of that step. Default None.
          order: as for :meth:`optimizer`, where ``tx`` is left out. Default None.
          report: what :meth:`model` told of its changes, which becomes a part. Default None.
          **extra: the step's extra arguments.

        Returns:
          A :class:`BoostDescription`; ``print`` it.

        Raises:
          ValueError: only some of ``step``, ``state`` and ``batch`` are given.
        """
        told = describe_boost(
            self, self._resolution_of, params, tx, (step, state, batch), order, extra
        )
        return dataclasses.replace(told, model=report)

    def _own_mesh(self) -> Mesh | None:
        """Return the mesh that the config means, or None where the user brings one."""
        return self.mesh if self.config.adasum.axis_name is None else None

    def _resolution_of(self, tx: Any) -> rules.Resolution:
        return resolution_in(self.config, self.resolution, tx)
