"""The train step: loss, gradients, update and metrics as one compiled function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from boostax import _info
from boostax._exclusions import LINE_SEARCHES
from boostax.errors import StateMismatchError
from boostax.gradients.layers import CapturedLayers
from boostax.training._replicas import Replicas
from boostax.training._replicas import data_axes as find_data_axes
from boostax.training._scaling import check_scaling
from boostax.training._settings import Settings
from boostax.training._terminal import check_terminal
from boostax.training._train_step import TrainStep
from boostax.training.contract import batch_parts, declared_keywords
from boostax.training.metrics import check_metrics

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
    layers: Any | None = None,
    due_dispatch: str = "auto",
    loss_scale: Any | None = None,
    skip_nonfinite: bool = False,
    learning_rate: float | Callable[[Any], Any] | None = None,
    wrt: Any = None,
    donate: bool = True,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    example_weights: str | None = None,
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
      metrics: which of ``loss``, ``grad_norm`` (trainable leaves; inside an accumulation window, of
        what it has gathered, which at its last call is what the optimizer gets), ``finite``,
        ``updates``, ``micro_steps``, ``freeze_index``, ``learning_rate``, ``loss_scale`` (what this call
        was computed with), ``overflow``, ``delta`` (of ``dim_reduce``: how far this call's step changed
        the loss of its batch) to report. Default None: all that can be known. The loss's own
        metrics always come with them.
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
      layers: the ``boostax.CapturedLayers`` that ``tx`` was built with, of this loss: their statistics
        are computed in the calls at which ``tx`` wants them. Default None: those found in ``tx``.
      due_dispatch: ``"host"`` compiles the step with and without the layers' statistics, and reads
        from the state which one to call; ``"cond"`` compiles both into one function. Inside a trace
        it is always ``"cond"``. Default ``"auto"``: ``"host"`` on a CPU, which is slow at
        convolutions inside a conditional, and ``"cond"`` elsewhere.
      loss_scale: a :class:`boostax.DynamicLossScale`, a :class:`boostax.GroupLossScale`, or a number or
        array of shape () or (1,) for a scale that only :func:`boostax.set_loss_scale` changes. The
        backward pass starts from it, gradients are unscaled in float32 (``tx`` then sees half-precision
        parameters as float32), and a call whose gradients overflow is skipped as with
        ``skip_nonfinite``, or as the policy of ``accumulate`` says. Default None: no scale.
      skip_nonfinite: leave everything but ``attempt`` (and the freeze schedule) as it was when the
        loss or a trainable gradient is not finite. Default False.
      learning_rate: what ``tx`` uses, for the metric: a number or a schedule of ``updates``. Default
        None: read from ``optax.inject_hyperparams`` or from a config-built optimizer if there is one.
      wrt: nnx filter of the trained leaves. Default None: ``nnx.Param``.
      donate: give the old state's buffers to the new one. Default True: the state passed in
        can't be used again.
      mesh: a ``jax.sharding.Mesh`` (axes of type Auto or Explicit) to run on, data-parallel. Each
        batch is split along its first axis over ``data_axes``; scalars in it go to all devices (then the
        loss has to return ``LossAux(weight=...)``).
        Parameters lie on all devices, or over other axes of the mesh as they were placed. Gradients,
        loss and metrics are averaged by weight, batch statistics pooled, decisions taken together,
        and each device draws from a key of its own. Where ``tx`` holds an exchange
        (:func:`boostax.adasum`), that combines the gradients, and what of the optimizer state differs
        between devices has a leading axis of their number. Default None: no mesh.
      data_axes: the mesh axes that the batch is split over. Default None: those that ``tx`` exchanges
        over; else the only axis, or the one called ``"data"``.
      example_weights: path of the leaf of the batch that holds a weight for each example, such as
        ``"mask"``. A batch that does not divide by the devices is then filled up with copies of its
        last example that weigh 0. The loss must weigh its examples by it and return
        ``LossAux(weight=...)``. Default None: such a batch is an error.

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
    if due_dispatch not in ("auto", "host", "cond"):
        raise ValueError(f"due_dispatch must be 'auto', 'host' or 'cond', got {due_dispatch!r}")
    for name, value in (
        ("has_aux", has_aux),
        ("skip_nonfinite", skip_nonfinite),
        ("donate", donate),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")
    check_terminal(tx)
    freezing = _check_freezing(tx, freezing)
    layers = _check_layers(tx, layers)
    scaling = check_scaling(loss_scale)
    names, asked = check_metrics(
        metrics,
        freezes=freezing is not None,
        scales=scaling is not None,
        reduces=_info.find(tx, "dim_reduce") is not None,
    )
    if learning_rate is None:
        learning_rate = next(
            (i.settings["learning_rate"] for i in _info.walk(tx) if "learning_rate" in i.settings),
            None,
        )
    replicas = _replicas(tx, mesh, data_axes)
    parts = batch_parts(loss_fn)
    if example_weights is not None and parts:
        raise ValueError(
            f"example_weights: this loss takes a batch in the parts {', '.join(parts)}, each with "
            "weights of its own, and one leaf can't fill them up; give parts that the devices can share"
        )
    if example_weights is not None:
        if not isinstance(example_weights, str):
            raise TypeError(
                f"example_weights must be the path of a leaf of the batch, got {example_weights!r}"
            )
        if replicas is None or not has_aux:
            raise ValueError(
                "example_weights is for a step with mesh= and has_aux=True, whose loss returns "
                "LossAux(weight=...)"
            )
    accumulating = _info.find(tx, "accumulate")
    settings = Settings(
        metrics=names,
        has_aux=has_aux,
        microbatch=int(microbatch),
        stats=stats,
        batch_norm_momentum=batch_norm_momentum,
        freezing=freezing,
        skip_nonfinite=skip_nonfinite or scaling is not None,
        learning_rate=learning_rate,
        window_policy=None if accumulating is None else accumulating.settings["nonfinite"],
        window_every=_window_length(accumulating),
        replicas=replicas,
        example_weights=example_weights,
        layers=layers,
        due_dispatch=due_dispatch,
        loss_scale=scaling,
        batch_parts=parts,
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
    if found is None:
        # Some wrappers hide what is in them; then init looks for the state.
        return freezing
    if freezing is not None and freezing.fingerprint != found.static.fingerprint:
        raise StateMismatchError(
            "freezing is not the one that tx was built with; give the same boostax.Freezing to "
            "freeze(...) and to train_step(...)"
        )
    return found.static


def _check_layers(tx: Any, layers: Any | None) -> Any | None:
    if layers is not None and not isinstance(layers, CapturedLayers):
        raise TypeError(
            f"layers must be what boostax.capture_layers returned, got {type(layers).__name__}"
        )
    found = [i.static for i in _info.walk(tx) if isinstance(i.static, CapturedLayers)]
    if not found:
        return layers
    if any(other != found[0] for other in found) or layers not in (None, found[0]):
        raise StateMismatchError(
            "layers are not those that tx was built with; give the same boostax.CapturedLayers to "
            "thor(..., layers=layers) and to train_step(..., layers=layers)"
        )
    return found[0]


def _replicas(tx: Any, mesh: Any, wanted: Any) -> Replicas | None:
    """Return the devices that share the batch, and who combines their gradients."""
    exchanged = _info.exchanged_axes(tx)
    if mesh is None:
        if wanted is not None:
            raise ValueError(f"data_axes={wanted!r} names axes of a mesh; pass mesh=")
        return None
    axes = find_data_axes(mesh, wanted, exchanged)
    if math.prod(mesh.shape[axis] for axis in axes) == 1 < mesh.size:
        # XLA aborts where groups of one device exchange beside an axis that it splits by itself.
        raise ValueError(
            f"mesh: its data axes {axes} have one device, and the others {mesh.size}; leave mesh= out, "
            "and place the parameters on the mesh yourself: jit keeps their shardings"
        )
    outermost = _info.info_of(tx)
    # A part that refuses arguments it does not know would refuse the exchange too, and a line search
    # asks for the loss where the gradient is that of all devices.
    alone = any(i.keywords is not None or i.name in LINE_SEARCHES for i in _info.walk(tx))
    if exchanged:
        exchange = "tx"
    elif outermost is not None and outermost is _info.find(tx, "accumulate") and not alone:
        exchange = "window"
    else:
        exchange = "step"
    return Replicas(mesh, axes, exchange)


def _window_length(accumulating: _info.TransformInfo | None) -> Any:
    """Return how many calls a window takes: an int or a schedule, None where that can't be known."""
    if accumulating is None or accumulating.settings["skips_by_function"]:
        return None
    return accumulating.settings["every"]
