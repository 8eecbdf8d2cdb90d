"""THOR as a whole optimizer: ``scale_by_thor``, decay, momentum and the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._info import TransformInfo, with_info, with_plain
from boostax._tree import leaf_paths
from boostax.updates import _thor_checks as checks
from boostax.updates._thor_clip import clip_tensors
from boostax.updates._thor_groups import decay_rule, read_groups
from boostax.updates._thor_settings import make_settings
from boostax.updates.scale_by_thor import build

__all__ = ["thor"]


class _RateState(NamedTuple):
    """Counts updates, for learning rates of groups: int32 scalar."""

    count: jax.Array


def thor(
    learning_rate: Any,
    damping: Any,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    *,
    layers: Any,
    decay_mask: Any = None,
    use_nesterov: bool = False,
    clip: bool | Literal["kl", "tensor"] = True,
    frequency: int = 100,
    loss_scale: float = 1.0,
    split_indices: Sequence[int] | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    mode: Literal["default", "reference"] = "default",
    axis_name: str | Sequence[str] | None = None,
    early: Sequence[int] = (0, 1, 3, 6),
    factor_decay: float = 0.9,
    pi_split: bool = True,
    kl_clip: float = 1e-3,
    trace_rule: float | None = None,
    layer_norms: Any = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Optimize with THOR: natural gradient by layers, decay, momentum and learning rate.

    .. math::
        m &\leftarrow \beta m + U + \delta w \\
        w &\leftarrow w - \alpha m

    with :math:`U` as :func:`boostax.scale_by_thor` makes it, :math:`\beta` the momentum,
    :math:`\delta` the weight decay (added after preconditioning and KL clip) and :math:`\alpha` the
    learning rate. With Nesterov's form the step is :math:`\beta m + U + \delta w` with the new
    :math:`m`.

    Args:
      learning_rate: a number, or a schedule of the update count.
      damping: a number > 0, or a schedule of the update count.
      momentum: :math:`\beta` >= 0; 0 keeps no momentum. Default 0.9.
      weight_decay: :math:`\delta` >= 0. Default 0.0.
      layers: what :func:`boostax.capture_layers` returned.
      decay_mask: which leaves decay: a tree of bools like the parameters, a function of the
        parameters that returns one, or path patterns (text such as ``"*/kernel"``, compiled
        regexes). Default None: the captured kernels and other leaves of two axes or more, no
        biases and no norm scales.
      use_nesterov: Nesterov's momentum. Default False.
      clip: True (default) or ``"kl"``: the KL clip of ``scale_by_thor``. ``"tensor"``: each tensor
        is shortened to the length 1, after the decay. False: neither. In ``mode="reference"`` True
        is ``"tensor"``, and the reference's own default is False.
      frequency: as for :func:`boostax.scale_by_thor`. Default 100.
      loss_scale: as for :func:`boostax.scale_by_thor`. Default 1.0.
      split_indices: as for :func:`boostax.scale_by_thor`. Default None.
      groups: settings for some leaves: a sequence of mappings with ``"params"`` (a path pattern or
        several; a pattern may also be a function of the path) and any of ``"learning_rate"`` (or
        ``"lr"``), ``"weight_decay"`` (for all leaves of the group, whatever ``decay_mask`` says)
        and ``"centralize"`` (or ``"grad_centralization"``): True takes each output's mean out of
        the gradients of the group's convolution kernels. A leaf can be in one group only; one in
        none has the settings above. One more mapping, ``{"order": patterns}`` (or
        ``"order_params"``), puts the layers into the order that ``split_indices`` counts in.
        Default None.
      mode: as for :func:`boostax.scale_by_thor`. Default ``"default"``.
      axis_name: as for :func:`boostax.scale_by_thor`. Default None.
      early: as for :func:`boostax.scale_by_thor`. Default (0, 1, 3, 6).
      factor_decay: as for :func:`boostax.scale_by_thor`. Default 0.9.
      pi_split: as for :func:`boostax.scale_by_thor`. Default True.
      kl_clip: as for :func:`boostax.scale_by_thor`. Default 1e-3.
      trace_rule: as for :func:`boostax.scale_by_thor`. Default None.
      layer_norms: as for :func:`boostax.scale_by_thor`. Default ().

    Returns:
      A chain whose first state is a :class:`boostax.ThorState`. Its update takes the extra
      arguments ``stats`` and ``weight``.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument is out of range, a pattern matches no leaf, a leaf is in two groups,
        or a group without a convolution asks for centralization.

    Example:
      >>> import jax.numpy as jnp, optax, boostax
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> params = {"w": jnp.ones((2, 1))}
      >>> batch = {"x": jnp.array([[1.0, 9.0], [2.0, 5.0]]), "y": jnp.array([[0.0], [1.0]])}
      >>> layers = boostax.capture_layers(loss_fn, params, batch)
      >>> tx = boostax.thor(0.1, 1e-3, layers=layers)
      >>> state = tx.init(params)
      >>> _, grads, stats = layers.value_and_grad(params, batch, due=state[0].due)
      >>> updates, state = tx.update(grads, state, params, stats=stats)
      >>> params = optax.apply_updates(params, updates)

      :func:`boostax.train_step` does this by itself: ``train_step(loss_fn, tx)``.

    Source:
      ``mindspore.nn.thor``, and as for :func:`boostax.scale_by_thor`.

    When not to use:
      As for :func:`boostax.scale_by_thor`.
    """
    checks.check_layers("thor", layers, mode)
    chosen = read_groups("thor", groups, layers)
    learning_rate = checks.check_rate("thor", "learning_rate", learning_rate)
    momentum = checks.check_number("thor", "momentum", momentum, 0.0)
    weight_decay = checks.check_number("thor", "weight_decay", weight_decay, 0.0)
    nesterov = checks.check_bool("thor", "use_nesterov", use_nesterov)
    kind = checks.check_clip("thor", clip, mode)
    settings = make_settings(
        "thor",
        layers=layers,
        damping=damping,
        learning_rate=learning_rate,
        frequency=frequency,
        early=early,
        factor_decay=factor_decay,
        pi_split=pi_split,
        clip=kind == "kl",
        kl_clip=kl_clip,
        trace_rule=trace_rule,
        loss_scale=loss_scale,
        split_indices=split_indices,
        layer_norms=layer_norms,
        mode=mode,
        axis_name=axis_name,
        groups=chosen,
    )
    decays = decay_rule("thor", weight_decay, decay_mask, chosen, layers)
    parts: list[Any] = [build(settings), _decay(decays)]
    if kind == "tensor":
        # Behind the decay, as the reference does it.
        parts.append(_clip())
    moves = not isinstance(momentum, float) or momentum > 0  # an injected one is traced
    if moves:
        parts.append(optax.trace(momentum, nesterov))
    if chosen.rate:
        parts.append(_scale_by_rates(chosen.rates(learning_rate)))
    else:
        parts.append(optax.scale_by_learning_rate(learning_rate))
    chain = optax.chain(*parts)
    shown = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "use_nesterov": nesterov,
        "clip": kind or False,
    }
    told = with_info(
        optax.GradientTransformationExtraArgs(chain.init, lambda *a, **k: chain.update(*a, **k)),
        TransformInfo("thor", shown, chain, fates=lambda params: _fates(decays, params)),
    )
    return with_plain(told, optax.sgd(learning_rate, momentum if moves else None, nesterov))


def _by_path(change: Callable[[str, Any], Any], updates: Any) -> Any:
    leaves, treedef = jax.tree.flatten(updates)
    new = [change(path, leaf) for path, leaf in zip(leaf_paths(updates), leaves, strict=True)]
    return treedef.unflatten(new)


def _decay(rule: Callable[[Any], dict[str, Any]]) -> optax.GradientTransformationExtraArgs:
    """Add each leaf's decay times the leaf."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        rates = rule(updates if params is None else params)
        if not rates:
            return updates, state
        if params is None:
            raise ValueError("thor: weight decay needs the parameters; call update(..., params)")
        own = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))

        def one(path: str, leaf: Any) -> Any:
            rate = rates.get(path)
            if rate is None:
                return leaf
            dtype = jnp.promote_types(leaf.dtype, jnp.float32)
            return (leaf.astype(dtype) + rate * own[path].astype(dtype)).astype(leaf.dtype)

        return _by_path(one, updates), state

    return with_info(
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update),
        TransformInfo("weight decay"),
    )


def _clip() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del params, extra_args
        named = zip(leaf_paths(updates), jax.tree.leaves(updates), strict=True)
        clipped = clip_tensors(
            {path: leaf for path, leaf in named if jnp.issubdtype(leaf.dtype, jnp.inexact)}
        )
        return _by_path(lambda path, leaf: clipped.get(path, leaf), updates), state

    return with_info(
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update),
        TransformInfo("clip by tensor"),
    )


def _scale_by_rates(
    rate: Callable[[str, Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Multiply each leaf by minus its own learning rate."""

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, _RateState]:
        del params, extra_args
        new = _by_path(
            lambda path, leaf: leaf * jnp.asarray(-rate(path, state.count), leaf.dtype), updates
        )
        return new, _RateState(jnp.asarray(optax.safe_increment(state.count)))

    init = lambda params: _RateState(jnp.zeros((), jnp.int32))
    return with_info(
        optax.GradientTransformationExtraArgs(init, update), TransformInfo("learning rates")
    )


def _fates(rule: Callable[[Any], dict[str, Any]], params: Any) -> dict[str, str]:
    rates = rule(params)
    if not rates:
        return {}
    return {
        path: f"weight decay {rates[path]:g}" if path in rates else "no weight decay"
        for path in leaf_paths(params)
    }
