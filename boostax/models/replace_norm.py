"""One kind of norm layer into another, with scale and bias kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import flax.linen as nn
from flax import nnx

from boostax._tree import PathPattern
from boostax.errors import did_you_mean
from boostax.models import _norm_checks as checks
from boostax.models._norm_swap import KINDS, Target
from boostax.models._norm_swap_linen import replace_linen
from boostax.models._norm_swap_nnx import replace_nnx
from boostax.models.report import ModelReport

__all__ = ["replace_norm"]

# Which option is for which kinds; the defaults say "not given".
_OPTIONS = {
    "num_groups": ("group",),
    "group_size": ("group",),
    "ghost_batch_size": ("ghost_batch",),
    "begin_norm_axis": ("layer",),
    "track_running_stats": ("instance",),
    "momentum": ("batch", "ghost_batch", "instance"),
    "epsilon": tuple(KINDS),
}


def replace_norm(
    model: Any,
    to: Literal["batch", "layer", "group", "instance", "ghost_batch"],
    *example_inputs: Any,
    patterns: PathPattern | Sequence[PathPattern] | None = None,
    num_groups: int | None = None,
    group_size: int | None = None,
    ghost_batch_size: int | None = None,
    begin_norm_axis: int | None = None,
    track_running_stats: bool | None = None,
    momentum: float | None = None,
    epsilon: float | None = None,
    rngs: Any = None,
    method: str | None = None,
    **kwargs: Any,
) -> tuple[Any, ModelReport]:
    """Turn norm layers into norm layers of another kind, and keep scale and bias.

    All of these compute ``(x - mean) / sqrt(var + epsilon) * scale + bias`` with one scale and bias
    a channel, and differ in what mean and variance are taken over. So parameters keep their names,
    shapes and values, and a checkpoint's scale and bias load into the new model. Epsilon, dtypes
    and the channel axis are those of the old layer. The new layers are those of
    :mod:`boostax.nnx` and :mod:`boostax.linen`.

    Args:
      model: an nnx module, which is not changed, or a linen module (unbound).
      to: ``"batch"``, ``"layer"``, ``"group"``, ``"instance"`` or ``"ghost_batch"``.
      *example_inputs: inputs for one call; ``ShapeDtypeStruct`` will do. Needed for linen; with nnx
        they only check that the new model takes them.
      patterns: path patterns; only norm layers that one matches are changed. A pattern is
        shell-style text (``"layer1/*"``), a compiled regular expression, or a function of the
        path. Default None: all.
      num_groups: for ``"group"``: groups, which must divide the channels. Default 32.
      group_size: for ``"group"``, in place of ``num_groups``: channels of a group.
      ghost_batch_size: for ``"ghost_batch"``: examples of a chunk. Required there.
      begin_norm_axis: for ``"layer"``: the first axis that is normalised, 1 for all of an example.
        Default None: the channels alone, at each position.
      track_running_stats: for ``"instance"``: keep running statistics. Default False.
      momentum: for running statistics: share of the old value. Default: the old layer's, or 0.99.
      epsilon: above 0. Default: the old layer's.
      rngs: linen only, a key or a dict of them, for models that need more than ``params`` and
        ``dropout``. Default None.
      method: name of the method that is called. Default None: ``__call__``.
      **kwargs: keyword arguments of the call, such as ``train=True``.

    Returns:
      The new model, of the same framework, and a :class:`~boostax.ModelReport`. A linen layer
      whose old kind took no ``use_running_average`` takes the batch's statistics where the
      collection ``batch_stats`` is mutable, and running ones elsewhere.

    Raises:
      ValueError: there is no norm layer to change (the message lists what was looked at), a pattern
        matches none, groups don't divide a layer's channels, or an argument is out of range or
        for another kind.
      TypeError: ``model`` is neither a linen nor an nnx module.

    Example:
      >>> from flax import nnx
      >>> net = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
      >>> new, report = replace_norm(net, "group", num_groups=2)
      >>> print(report)
      replace_norm: 1 layer changed
        path      before     after      why
        layers/1  BatchNorm  GroupNorm  to="group", 2 groups
      >>> new.layers[1].num_groups, net.layers[1].num_features
      (2, 8)

    When not to use:
      On a trained network that is not trained on: another norm is another function. Where no norm
      is wanted, see :func:`boostax.less_bn`.
    """
    given = {
        "num_groups": num_groups,
        "group_size": group_size,
        "ghost_batch_size": ghost_batch_size,
        "begin_norm_axis": begin_norm_axis,
        "track_running_stats": track_running_stats,
        "momentum": momentum,
        "epsilon": epsilon,
    }
    target = _target(to, given)
    wanted = _patterns(patterns)
    if isinstance(model, nnx.Module):
        unused = [] if example_inputs else [*kwargs, *(["method"] if method else [])]
        unused += [] if rngs is None else ["rngs"]
        if unused:
            raise ValueError(
                f"replace_norm: {unused[0]} has no use with an nnx model"
                f"{'' if example_inputs else ' and without example inputs'}."
                f"{did_you_mean(unused[0], [*_OPTIONS, 'patterns'])}"
            )
        return replace_nnx(model, target, wanted, example_inputs, kwargs, method)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"replace_norm: model must be a linen or nnx module, got {type(model).__name__}"
        )
    if not example_inputs and not kwargs:
        raise ValueError(
            "replace_norm: the layers of a linen model are found by a call; give example inputs, "
            "as in replace_norm(model, 'group', x)"
        )
    return replace_linen(model, target, wanted, example_inputs, kwargs, method, rngs)


def _target(to: Any, given: Mapping[str, Any]) -> Target:
    if to not in KINDS:
        raise ValueError(
            f"replace_norm: to must be one of {', '.join(map(repr, KINDS))}, got {to!r}."
            f"{did_you_mean(to, KINDS)}"
        )
    for name, value in given.items():
        if value is not None and to not in _OPTIONS[name]:
            raise ValueError(
                f"replace_norm: {name} is for to={' or '.join(map(repr, _OPTIONS[name]))}, "
                f"got to={to!r}"
            )
    own = {name: value for name, value in given.items() if to in _OPTIONS[name]}
    name = f"replace_norm to={to!r}"
    if to == "group":
        if own["num_groups"] is None and own["group_size"] is None:
            own["num_groups"] = 32
        checks.group_settings(name, own["num_groups"], own["group_size"])
    if to == "ghost_batch":
        checks.count_of(name, "ghost_batch_size", own["ghost_batch_size"])
    if own.get("begin_norm_axis") is not None:
        checks.check_int(name, "begin_norm_axis", own["begin_norm_axis"])
    if own.get("track_running_stats") is not None:
        checks.check_flag(name, "track_running_stats", own["track_running_stats"])
    if own.get("momentum") is not None:
        checks.check_momentum(name, own["momentum"])
        if to == "instance" and not own["track_running_stats"]:
            raise ValueError(f"{name}: momentum needs track_running_stats=True")
    if own["epsilon"] is not None:
        checks.check_epsilon(name, own["epsilon"])
    return Target(to, tuple(own.items()))


def _patterns(patterns: Any) -> tuple[PathPattern, ...] | None:
    if patterns is None:
        return None
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        return (patterns,)
    return tuple(patterns)
