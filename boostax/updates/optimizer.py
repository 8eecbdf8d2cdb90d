"""An optimizer by name, with settings for groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax

from boostax._info import TransformInfo, info_of
from boostax.updates._optimizer_groups import build_groups, described

__all__ = ["optimizer"]


def optimizer(
    name: str,
    *,
    groups: Sequence[Mapping[str, Any]] = (),
    decay_bias_and_norm: bool = True,
    centralize: bool = False,
    **settings: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer by name, with settings of their own for groups of parameters.

    ``sgd``, ``momentum``, ``adagrad``, ``adadelta``, ``rmsprop``, ``adam``, ``adam_weight_decay`` and
    ``lars`` are PyTorch's and MindSpore's, step for step; ``docs/techniques/optimizers.md`` has their
    arguments. All others are those of optax and optax.contrib, with optax's own arguments; optax's
    versions of the names above are ``"optax.sgd"``, ``"optax.adam"`` and so on.

    A group is a mapping with

    - ``params``: a path pattern or several (text such as ``"encoder/*"``, a compiled regex, a function
      of the path). A leaf may be in one group only; leaves in none have the settings given here.
    - any argument of the optimizer (``learning_rate``, ``weight_decay``, ...), in the place of the one
      given here; or ``optimizer``, another one: its name, a mapping of name and settings, or an optax
      transformation. Of the settings given here that one takes over the learning rate alone.
    - ``centralize``: whether the leaves' gradients are centralized first.

    Args:
      name: see above.
      groups: a sequence of mappings. Default (): none.
      decay_bias_and_norm: False takes biases and the parameters of norms out of the weight decay, in
        all groups. They are told by Flax's names: ``bias``, ``scale``, anything but kernels in
        ``BatchNorm_0``, ``LayerNorm``, ``norm1``, ``bn1`` and the like. A ``mask`` takes out what it
        takes out as well. Default True: all decay, as there (``lars`` leaves these out unless it has
        a ``mask``).
      centralize: whether the gradients of all leaves outside of groups are centralized first, as by
        :func:`boostax.centralize`. Default False.
      **settings: the optimizer's own arguments.

    Returns:
      A ``GradientTransformationExtraArgs``. The train step's metric ``learning_rate`` is the one given
      here, not that of a group.

    Raises:
      TypeError: an argument that the optimizer does not have, or lacks, or of the wrong kind.
      ValueError: an unknown name, a value out of its range, ``decay_bias_and_norm=False`` where it
        can't be kept (a group with a ready transformation that decays); at ``init``, a pattern that
        matches no leaf or a leaf in two groups.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"body": {"kernel": jnp.ones(1)}, "head": {"kernel": jnp.ones(1)}}
      >>> tx = optimizer(
      ...     "sgd", learning_rate=0.1, groups=[{"params": "head/*", "learning_rate": 1.0}]
      ... )
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> round(float(updates["body"]["kernel"][0]), 4), float(updates["head"]["kernel"][0])
      (-0.1, -1.0)

    Source:
      PyTorch's ``torch.optim`` and MindSpore's ``mindspore.nn`` optimizers; see each one's own.

    When not to use:
      Where you write the optax function itself; a name is for configs, for groups, and for going on
      with a training from elsewhere.
    """
    built = build_groups("optimizer", name, settings, groups, decay_bias_and_norm, centralize)
    told = info_of(built.base)
    if built.labels is None and told is not None:
        return built.base
    shown = dict(settings if told is None else told.settings)
    if groups:
        shown["groups"] = len(groups)
    if centralize:
        shown["centralize"] = True
    info = TransformInfo(name, shown, inner=built.transform, fates=built.fates)
    return described(built.transform, info)
