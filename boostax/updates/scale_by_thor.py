"""THOR's preconditioner: a layer's gradient between the inverses of its two Kronecker factors.

The factors come from the gradient seam (``capture_layers``) through the extra argument ``stats``,
at the updates that the state says: ``state.due`` speaks of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax import _compat
from boostax._info import TransformInfo, with_info
from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError
from boostax.gradients._blocks import Factors
from boostax.updates import _thor_reference as reference
from boostax.updates._skip import find_state
from boostax.updates._thor_clip import clip_tensors, kl_scale
from boostax.updates._thor_fits import check_params, checked_stats, shown
from boostax.updates._thor_inverses import apply_inverses, identity
from boostax.updates._thor_refresh import refresh
from boostax.updates._thor_settings import Settings, make_settings

__all__ = ["ThorState", "scale_by_thor"]


class ThorState(NamedTuple):
    """The state of :func:`scale_by_thor`; "layers" are ``layers.blocks``, in that order.

    Attributes:
      count: int32 scalar, the updates so far.
      due: bool scalar, whether the NEXT update wants statistics.
      fingerprint: uint32 scalar, stands for the captured layers.
      refreshes: int32 ``(layers,)``, how often a layer's inverses were made anew; 0: its gradient
        passes as it is.
      failed: bool ``(layers,)``, whether a layer's last refresh failed (statistics that were not
        finite, or a matrix without inverse), so that it goes on with its last good inverses.
      factors: kernel path to the running averages of A and G, without damping; empty in
        ``mode="reference"``.
      inverses: kernel path to the inverses in use, of the same shapes.
      trace: float32 ``(layers,)``, the trace of A (x) G at the last refresh; None without the
        trace rule.
      rest: bool ``(layers,)``, whether a layer is left alone from now on, its statistics too; None
        without the trace rule.
    """

    count: jax.Array
    due: jax.Array
    fingerprint: jax.Array
    refreshes: jax.Array
    failed: jax.Array
    factors: dict[str, Factors]
    inverses: dict[str, Factors]
    trace: Any
    rest: Any


def scale_by_thor(
    *,
    layers: Any,
    damping: Any,
    learning_rate: Any = None,
    frequency: int = 100,
    early: Sequence[int] = (0, 1, 3, 6),
    factor_decay: float = 0.9,
    pi_split: bool = True,
    clip: bool | Literal["kl", "tensor"] = True,
    kl_clip: float = 1e-3,
    trace_rule: float | None = None,
    loss_scale: float = 1.0,
    split_indices: Sequence[int] | None = None,
    layer_norms: Any = (),
    mode: Literal["default", "reference"] = "default",
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale each layer's gradient by the inverses of its two Kronecker factors.

    For a layer ``y = a @ W``, with A the second moments of its inputs ``a``, G those of the loss's
    derivatives by its outputs, both as running averages, and ``W``'s gradient :math:`D`:

    .. math::
        U = \nu\, \Big(A + \pi \sqrt{\lambda}\, I\Big)^{-1} D
            \Big(G + \tfrac{\sqrt{\lambda}}{\pi} I\Big)^{-1}, \qquad
        \pi^2 = \frac{\operatorname{tr} A / \dim A}{\operatorname{tr} G / \dim G},

    .. math::
        \nu = \min\Big(1, \sqrt{\kappa / \textstyle\sum \alpha^2 \langle U, D \rangle}\Big).

    ======================  =====================  ==========================================
    symbol                  shape                  what it is
    ======================  =====================  ==========================================
    :math:`D`               (inputs, outputs)      gradient of kernel and, as last row, bias
    :math:`A`               (inputs, inputs)       mean of :math:`a a^T`
    :math:`G`               (outputs, outputs)     mean of :math:`g g^T`, each g an example's own
    :math:`\lambda`         scalar                 ``damping``
    :math:`\pi`             one for each matrix    how the damping is split between A and G
    :math:`\alpha`          scalar                 ``learning_rate``
    :math:`\kappa`          scalar                 ``kl_clip``
    :math:`\nu`             one for all leaves     the KL clip, over first-order leaves too
    ======================  =====================  ==========================================

    Factors larger than the ``block_size`` of ``capture_layers`` are cut into pieces along their
    diagonal, embeddings keep the diagonal of A alone. Leaves without factors (norm scales, lone
    biases) pass as they are, up to :math:`\nu`. So does a layer of which a leaf is frozen or masked:
    its factors, inverses and flags rest, and what is left of it counts as first order.

    Statistics come as the extra argument ``stats``, where ``state.due`` of the state before says so;
    at other updates they are ignored. With the state at ``count`` they are due where ``count`` is
    in ``early`` or a multiple of ``frequency``. Step 0 always is.

    Statistics that are not finite, or a matrix that can't be inverted, leave a layer with its last
    good factors and inverses, or with its plain gradient where there are none yet, and set its flag
    in ``state.failed``. A zero gradient gives exactly zero.

    Args:
      layers: what :func:`boostax.capture_layers` returned.
      damping: :math:`\lambda`, a number > 0 or a schedule of the update count. It has the unit of
        the loss's curvature: scale it with the loss.
      learning_rate: :math:`\alpha`, the number or schedule that the updates are multiplied by
        afterwards. Only the KL clip asks for it. Default None.
      frequency: updates between two refreshes, an int >= 1, in ``mode="reference"`` >= 2.
        Default 100.
      early: increasing counts >= 0 of further refreshes, for the time in which factors change
        fast. Default (0, 1, 3, 6).
      factor_decay: the most that the running average keeps of its old value, in [0, 1): refresh k
        keeps ``min(1 - 1/k, factor_decay)``. Default 0.9.
      pi_split: True (default) splits the damping as above; False adds :math:`\lambda` itself to
        both factors, as in THOR's formula.
      clip: True (default) or ``"kl"``: the factor :math:`\nu`. ``"tensor"``: each tensor is
        shortened to the length 1. False: neither. In ``mode="reference"`` True is ``"tensor"``.
      kl_clip: :math:`\kappa` > 0: about twice the KL divergence that one step may cause.
        Default 1e-3.
      trace_rule: a share > 0. Where the trace of :math:`A \otimes G + \lambda I` changes by less
        than this between two refreshes after the early ones, the layer is left alone from then on:
        neither inverse nor statistics. Default None: never.
      loss_scale: what the loss was multiplied by, > 0: gradients are divided by it, G by its
        square. Default 1.0. Not for a scale that is undone before this.
      split_indices: increasing indices of layers, the last of each bucket of statistics that
        devices exchange at a time. Default None: one bucket.
      layer_norms: path patterns of leaves that get the reference's rule for layer norms,
        ``g / (g**2 / batch + sqrt(damping))``. Only in ``mode="reference"``. Default ().
      mode: ``"default"``; or ``"reference"`` for the numbers of MindSpore's GPU class, which has no
        running average, no early refreshes, no split damping and no KL clip, adds the root of the
        damping to A and G, and takes the batch size from the extra argument ``weight``.
      axis_name: axes of a ``shard_map``, ``pmap`` or ``vmap`` of your own, over which statistics
        are averaged by ``weight``, and inverses are shared out: each device inverts its part. The
        gradients are yours to average, ahead of it (:func:`boostax.all_reduce`, ``lax.pmean``).
        Default None; ``train_step`` with a mesh needs none.

    Returns:
      A transformation with the state :class:`ThorState`. Its update takes the extra arguments
      ``stats`` and ``weight``, and raises a ValueError where statistics may be due and none are
      given.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument is out of range, or ``mode`` is not that of the layers.
      StateMismatchError: parameters or state don't belong to these layers.

    Example:
      >>> import jax.numpy as jnp, boostax
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> params = {"w": jnp.ones((2, 1))}
      >>> batch = {"x": jnp.array([[1.0, 0.0], [0.0, 2.0]]), "y": jnp.zeros((2, 1))}
      >>> layers = boostax.capture_layers(loss_fn, params, batch)
      >>> tx = boostax.scale_by_thor(layers=layers, damping=0.1, clip=False)
      >>> state = tx.init(params)
      >>> _, grads, stats = layers.value_and_grad(params, batch, due=state.due)
      >>> updates, state = tx.update(grads, state, stats=stats)
      >>> bool(state.due), state.refreshes.tolist()
      (True, [1])

    Source:
      M. Chen et al., "THOR, Trace-Based Hardware-Driven Layer-Oriented Natural Gradient Descent
      Computation", AAAI 2021. J. Martens and R. Grosse, "Optimizing Neural Networks with
      Kronecker-Factored Approximate Curvature", ICML 2015. R. Grosse and J. Martens, "A
      Kronecker-Factored Approximate Fisher Matrix for Convolution Layers", ICML 2016.

    When not to use:
      Where most parameters lie in layers without factors, and where layers are wide and batches
      small. Every update multiplies each gradient by both inverses, which for a batch of B rows is
      about (inputs + outputs) / 3B of the layer's own forward and backward pass; a smaller
      ``block_size`` makes it less.
    """
    settings = make_settings(
        "scale_by_thor",
        layers=layers,
        damping=damping,
        learning_rate=learning_rate,
        frequency=frequency,
        early=early,
        factor_decay=factor_decay,
        pi_split=pi_split,
        clip=clip,
        kl_clip=kl_clip,
        trace_rule=trace_rule,
        loss_scale=loss_scale,
        split_indices=split_indices,
        layer_norms=layer_norms,
        mode=mode,
        axis_name=axis_name,
        groups=None,
    )
    return build(settings)


def build(settings: Settings) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with these settings."""
    blocks, caller = settings.blocks, settings.caller
    by_leaf = {path: block for block in blocks for path in block.leaves}

    def init(params: Any) -> ThorState:
        check_params(settings, params)
        flags = jnp.zeros(len(blocks), bool)
        watched = settings.trace_rule is not None
        return ThorState(
            count=jnp.zeros((), jnp.int32),
            due=jnp.array(True),
            fingerprint=jnp.asarray(np.uint32(settings.layers.fingerprint)),
            refreshes=jnp.zeros(len(blocks), jnp.int32),
            failed=flags,
            factors={b.kernel: jax.tree.map(_compat.zeros_of, b.shapes()) for b in blocks}
            if settings.mode == "default"
            else {},
            # The identity: a layer's gradient passes as it is until there is something better.
            inverses={b.kernel: identity(b) for b in blocks},
            trace=jnp.zeros(len(blocks), jnp.float32) if watched else None,
            rest=jnp.zeros(len(blocks), bool) if watched else None,
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        stats: Mapping[str, Factors] | None = None,
        weight: Any = None,
        boostax_devices: Any = None,
        boostax_due: bool | None = None,
        **extra_args: Any,
    ) -> tuple[Any, ThorState]:
        del params, extra_args
        _check_fingerprint(settings, state)
        leaves, treedef = jax.tree.flatten(updates)
        paths = leaf_paths(updates)
        grads = {
            path: _unscaled(settings, path, leaf, by_leaf.get(path))
            for path, leaf in zip(paths, leaves, strict=True)
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        }
        live = [i for i, b in enumerate(blocks) if all(path in grads for path in b.leaves)]
        axes, own_weight = settings.axes, weight
        if boostax_devices is not None:
            axes = tuple(dict.fromkeys((*axes, *boostax_devices.axes)))
            if boostax_devices.weight is not None:
                own_weight = boostax_devices.weight

        def refreshed() -> ThorState:
            given = checked_stats(settings, stats, live)
            return refresh(settings, state, live, given, own_weight, axes).replace(state)

        if live:
            # A step that knows is compiled without what it does not need.
            due = state.due if boostax_due is None else boostax_due
            state = _compat.cond(due, refreshed, lambda: state)
        moved: dict[str, Any] = dict(grads)
        for i in live:
            block = blocks[i]
            matrix = block.join(*(grads[path] for path in block.leaves))
            kernel, bias = block.split(apply_inverses(block, state.inverses[block.kernel], matrix))
            moved[block.kernel] = kernel
            if block.bias is not None:
                moved[block.bias] = bias
        if settings.layer_norms:
            damping = settings.damping_at(state.count)
            batch = reference.batch_size(caller, own_weight, axes)
            for path in sorted(settings.layer_norms & grads.keys()):
                moved[path] = reference.layer_norm(grads[path], damping, batch)
        if settings.clip == "kl":
            assert settings.rates is not None  # make_settings saw to it
            scale = kl_scale(moved, grads, settings.rates, state.count, settings.kl_clip)
            moved = {path: leaf * scale.astype(leaf.real.dtype) for path, leaf in moved.items()}
        elif settings.clip == "tensor":
            moved = clip_tensors(moved)
        out = [
            _compat.laid_out(moved[path].astype(leaf.dtype), _compat.explicit_spec(leaf))
            if path in moved
            else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        count = jnp.asarray(optax.safe_increment(state.count))
        state = state._replace(count=count, due=jnp.asarray(settings.due(count)))
        return treedef.unflatten(out), state

    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo(
            "scale_by_thor",
            shown(settings),
            static=settings.layers,
            fates=lambda params: settings.layers.fates(),
            check=lambda state: _check(settings, state),
            axes=settings.axes,
            averaged={"stats": settings.layers.shapes()},
        ),
    )


def _unscaled(settings: Settings, path: str, leaf: Any, block: Any) -> jax.Array:
    """Return a gradient in float32 or better, without the loss scale."""
    # Whole: the layers' views reshape, and sums go over all axes.
    leaf = _compat.whole(jnp.asarray(leaf))
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    if not settings.unscaled:
        wide = wide * (1 / settings.loss_scale)
    if path in settings.centralized:
        matrix = block.view.apply(wide)
        if matrix.shape[1] > 1:
            wide = block.view.undo(matrix - jnp.mean(matrix, axis=1, keepdims=True))
    return wide


def _check_fingerprint(settings: Settings, state: ThorState) -> None:
    if isinstance(state.fingerprint, (Tracer, jax.ShapeDtypeStruct)):
        return
    if int(state.fingerprint) != int(settings.layers.fingerprint):
        raise StateMismatchError(
            f"{settings.caller}: the state was made with other captured layers (fingerprint "
            f"{int(state.fingerprint)}, here {int(settings.layers.fingerprint)}: "
            f"{len(settings.blocks)} layers); go on with the layers that it was made with, or "
            "start with tx.init(params)"
        )


def _check(settings: Settings, state: Any) -> None:
    found = find_state(state, ThorState)
    if found is None:
        raise StateMismatchError(
            f"{settings.caller}: there is no ThorState in this optimizer state; it was made by "
            "another transformation, or restored without a target and came back as dicts and "
            "lists: restore it with the target tx.init(params)"
        )
    _check_fingerprint(settings, found)
