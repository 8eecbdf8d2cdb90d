"""Loss scaling with one scale a group of parameters.

The backward pass runs, in each group's part of the network, at that group's scale s_g. Between the
parts of groups a and b stands a boundary, which multiplies the cotangent by s_a / s_b, in float32; the
gradients of group g are divided by s_g. So each product of the chain rule is the true one times a
scale that suits the numbers there. Each scale follows its own group's overflows::

    all gradients finite:  after `window` such calls of the group   s_g <- min(s_g * factor, max_scale)
    an overflow:           the call is skipped; in the groups where it arose
                                                                    s_g <- max(s_g / factor, min_scale)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import PathPattern, check_matched, leaf_paths, matches
from boostax.errors import did_you_mean
from boostax.gradients._boundary import mark
from boostax.gradients._scale_checks import (
    check_bounds,
    check_factor,
    check_number,
    check_scale,
    check_window,
)
from boostax.gradients.loss_scale import (
    LossScaleState,
    after_good,
    after_overflow,
    check_own_state,
    first_state,
)
from boostax.updates.parameter_groups import ParameterGroups

__all__ = ["GroupLossScale"]

# Between normal float32 numbers: the largest ratio of two scales whose inverse is one too.
_WIDEST = 2.0**126
# The reference's rule: every good step, and every overflow.
_REFERENCE_GROWTH, _REFERENCE_BACKOFF = 2.0 ** (1 / 1000), 2.0**-0.5


@dataclasses.dataclass(frozen=True)
class GroupLossScale:
    r"""One loss scale for each group of parameters.

    In the part of the network that belongs to group :math:`g` the backward pass computes
    :math:`s_g \, \partial L / \partial x`; at the boundary to the part of group :math:`h` that follows
    in the forward pass the cotangent is multiplied by :math:`s_g / s_h`, in float32. The gradient of a
    leaf is divided by its own group's scale, the one that it was computed under.

    Give it to :func:`boostax.train_step` as ``loss_scale=``. The boundaries are found in the loss's
    program. To place them yourself, call this object in the model, ``x = scaling(x, 1, 2)``: from there
    on values belong to group 2.

    Args:
      groups: one entry a group: a path pattern, or a sequence of them (shell-style text such as
        ``"encoder/*"``, where ``*`` crosses ``/``; a compiled regex; or a function of the path). Each
        leaf must be in exactly one group. Or what :func:`boostax.parameter_groups` returned, whose
        segments are then the groups.
      init: the first scale, or one a group, within the bounds. Default 2**15.
      factor: what scales grow and shrink by, > 1. Default 2.
      window: finite micro-batches before a scale grows, an int >= 1. Default 2000.
      min_scale: the smallest scale, or one a group, > 0. Default 2**-24: a group with a
        large weight in the loss can need one below 1.
      max_scale: the largest scale, or one a group, finite. Default 2**24.
      rule: ``"window"`` (default), as above: a call that overflows leaves the groups in which nothing
        arose as they were, their count of good steps too. ``"reference"``: a scale grows by
        2**(1/1000) at every call that is good in its group, and shrinks by 2**-0.5; ``factor`` and
        ``window`` do not count.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an argument is out of its range, or has another number of entries than there are
        groups. When the parameters are known: a leaf is in no group or in several, or a group is
        empty.

    Example:
      >>> import jax.numpy as jnp, optax, boostax
      >>> params = {"body": jnp.ones((2, 2), jnp.float16), "head": jnp.ones(2, jnp.float16)}
      >>> scaling = boostax.GroupLossScale(["body", "head"], init=[256, 4096])
      >>> def loss_fn(params, x):
      ...     y = x.astype(jnp.float16) @ params["body"] @ params["head"]
      ...     return jnp.mean(y.astype(jnp.float32))
      >>> step = boostax.train_step(loss_fn, optax.sgd(0.5), loss_scale=scaling)
      >>> state, metrics = step(step.init(params), jnp.eye(2))
      >>> metrics["loss_scale"].tolist(), state.params["head"].tolist()
      ([256.0, 4096.0], [0.5, 0.5])

    Source:
      ``mindspore.boost.GroupLossScaleManager``. Scales that differ between layers: R. Zhao et al.,
      Adaptive Loss Scaling for Mixed Precision Training, 2019.

    When not to use:
      Where one scale fits all, which is nearly always: look at the share of gradients that are zero
      (docs/techniques/loss_scale.md says how); :class:`boostax.DynamicLossScale` is cheaper then.
    """

    groups: Any
    _: dataclasses.KW_ONLY
    init: Any = 2.0**15
    factor: float = 2.0
    window: int = 2000
    min_scale: Any = 2.0**-24
    max_scale: Any = 2.0**24
    rule: Literal["window", "reference"] = "window"

    def __post_init__(self) -> None:
        caller = "GroupLossScale"
        set_ = lambda name, value: object.__setattr__(self, name, value)
        set_("groups", _check_groups(self.groups))
        n = len(self)
        low = _one_a_group("min_scale", self.min_scale, n)
        high = _one_a_group("max_scale", self.max_scale, n)
        first = _one_a_group("init", self.init, n)
        bounds = [check_bounds(caller, a, b) for a, b in zip(low, high, strict=True)]
        set_("min_scale", tuple(a for a, _ in bounds))
        set_("max_scale", tuple(b for _, b in bounds))
        most, least = max(self.max_scale), min(self.min_scale)
        if most / least > _WIDEST:
            raise ValueError(
                f"{caller}: the largest max_scale, {most:g}, must be at most 2**126 times the smallest "
                f"min_scale, {least:g}, or float32 can't hold what a boundary multiplies by; move the "
                "bounds closer"
            )
        scales = [check_scale(caller, "init", s, *b) for s, b in zip(first, bounds, strict=True)]
        set_("init", tuple(scales))
        set_("factor", check_factor(caller, self.factor))
        set_("window", check_window(caller, self.window))
        rules = ("window", "reference")
        if self.rule not in rules:
            raise ValueError(
                f"{caller}: rule must be 'window' or 'reference', got {self.rule!r}."
                f"{did_you_mean(str(self.rule), rules)}"
            )

    def __len__(self) -> int:
        groups = self.groups
        return len(groups.segments if isinstance(groups, ParameterGroups) else groups)

    def __call__(self, x: Any, before: int, after: int) -> Any:
        """Return ``x``, and note that a boundary between two groups stands here.

        Outside of a step with this loss scale nothing happens.

        Args:
          x: arrays on their way through the model, a pytree.
          before: the group, 1 to n, whose layers ``x`` comes from; 0 ahead of the first.
          after: the group whose layers it goes into; n + 1 behind the last. 0 and n + 1 are the ends,
            where the scale is 1.

        Raises:
          TypeError: a group is no int.
          ValueError: a group is out of range.
        """
        for name, value in (("before", before), ("after", after)):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"GroupLossScale: {name} must be an int, got {value!r}")
            if not 0 <= value <= len(self) + 1:
                raise ValueError(
                    f"GroupLossScale: {name} must be from 0 to {len(self) + 1} ({len(self)} groups and "
                    f"the ends 0 and {len(self) + 1}), got {value}"
                )
        return mark(x, int(before), int(after))

    def assign(self, params: Any) -> dict[str, int]:
        """Return the group of every leaf, 1 to n, by path.

        Args:
          params: the parameters; only their paths are used.

        Raises:
          ValueError: a leaf is in no group or in several, or a group is empty; the leaves are listed.
        """
        return assigned(self, leaf_paths(params))

    def init_state(self) -> LossScaleState:
        """Return the first state; ``scale`` holds all scales."""
        return first_state(np.asarray(self.init, np.float32))

    def update_group(
        self, state: LossScaleState, group: int, ratio: Any
    ) -> tuple[LossScaleState, jax.Array]:
        """Multiply one group's scale by ``ratio``, and return the state and the new scale.

        Args:
          state: a state of this loss scale.
          group: 1 to n. The ends 0 and n + 1 always have the scale 1.
          ratio: a number > 0. The result is kept within the group's bounds.

        Raises:
          TypeError: an argument has a wrong type.
          ValueError: ``group`` or ``ratio`` is out of range, or the state has other groups.
        """
        if isinstance(group, (bool, np.bool_)) or not isinstance(group, (int, np.integer)):
            raise TypeError(f"update_group: group must be an int, got {group!r}")
        check_own_state(state, (len(self),), "update_group")
        if not 1 <= group <= len(self):
            raise ValueError(
                f"update_group: group must be from 1 to {len(self)} (the ends 0 and {len(self) + 1} "
                f"have the scale 1), got {group}"
            )
        ratio = check_number("update_group", "ratio", ratio)
        if not (0 < ratio < float("inf")):
            raise ValueError(f"update_group: ratio must be finite and above 0, got {ratio}")
        at = int(group) - 1
        new = jnp.clip(
            state.scale[at] * jnp.float32(ratio), self.min_scale[at], self.max_scale[at]
        ).astype(jnp.float32)
        return state._replace(
            scale=state.scale.at[at].set(new), good_steps=state.good_steps.at[at].set(0)
        ), new

    def update(
        self,
        state: LossScaleState,
        finite: Any,
        *,
        micro_batches: int = 1,
        blamed: Any = True,
        active: Any = True,
    ) -> LossScaleState:
        """Return the state after a call.

        Args:
          state: the state before it.
          finite: bool scalar: whether all gradients were finite, the same on all devices.
          micro_batches: how many micro-batches the call counts for. Default 1.
          blamed: bool, one a group: where an overflow arose. Default: everywhere.
          active: bool, one a group: which groups had gradients; the others' scales rest. Default: all.
        """
        low, high = (jnp.asarray(b, jnp.float32) for b in (self.min_scale, self.max_scale))
        reference = self.rule == "reference"
        growth, window = (_REFERENCE_GROWTH, 1) if reference else (self.factor, self.window)
        backoff = _REFERENCE_BACKOFF if reference else 1 / self.factor
        good = after_good(state, micro_batches, growth, window, high)
        bad = after_overflow(state, backoff, low)
        innocent = good if reference else state
        blamed, active = jnp.asarray(blamed), jnp.asarray(active)

        def choose(old: Any, good: Any, bad: Any, innocent: Any) -> Any:
            new = jnp.where(finite, good, jnp.where(blamed, bad, innocent))
            return jnp.where(active, new, old)

        return jax.tree.map(choose, state, good, bad, innocent)

    def value_and_grad(
        self, fun: Callable[..., Any], has_aux: bool = False, *, axis_name: Any = None
    ) -> Callable[..., Any]:
        """Return a ``value_and_grad`` with these scales, for a loop of your own.

        Args:
          fun: ``fun(params, *args) -> loss`` or ``(loss, aux)``; ``aux`` holds arrays.
          has_aux: as for ``jax.value_and_grad``. Default False.
          axis_name: name(s) of the mapped axis over which devices decide together. Default None.

        Returns:
          ``fn(state, params, *args, **kwargs) -> (value, grads, finite, state)``, as for
          :meth:`boostax.DynamicLossScale.value_and_grad`.
        """
        from boostax.gradients._grouped import own_group_loop

        return own_group_loop(self, fun, has_aux, axis_name)


def assigned(scaling: GroupLossScale, paths: Sequence[str]) -> dict[str, int]:
    """Return the group of every path; see :meth:`GroupLossScale.assign`."""
    groups = scaling.groups
    if isinstance(groups, ParameterGroups):
        if tuple(sorted(groups.paths)) != tuple(sorted(paths)):
            missing = sorted(set(paths) - set(groups.paths))
            unknown = sorted(set(groups.paths) - set(paths))
            raise ValueError(
                "GroupLossScale: the groups were made for other parameters (in no group: "
                f"{_listed(missing)}; no such leaf: {_listed(unknown)})"
            )
        return {path: i for i, part in enumerate(groups.segments, 1) for path in part}
    for i, patterns in enumerate(groups, 1):
        for pattern in patterns:
            check_matched(f"GroupLossScale: group {i}", pattern, paths)
    owners = {
        path: [i for i, group in enumerate(groups, 1) if any(matches(p, path) for p in group)]
        for path in paths
    }
    faults = []
    if uncovered := [path for path, own in owners.items() if not own]:
        faults.append(
            f"in no group: {_listed(uncovered)} (add a pattern, such as '*' for the rest)"
        )
    if twice := {path: own for path, own in owners.items() if len(own) > 1}:
        several = [f"{path} (groups {', '.join(map(str, own))})" for path, own in twice.items()]
        faults.append(f"in several groups: {_listed(several)}")
    if faults:
        raise ValueError("GroupLossScale: " + "; ".join(faults))
    return {path: own[0] for path, own in owners.items()}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return shown or "none"


def _check_groups(groups: Any) -> Any:
    if isinstance(groups, ParameterGroups):
        if not groups.segments:
            raise ValueError(
                "GroupLossScale: these groups were given one by one and overlap; give path patterns, "
                "or groups that boostax.parameter_groups made"
            )
        return groups
    if isinstance(groups, (str, re.Pattern)) or not isinstance(groups, Sequence) or not groups:
        raise TypeError(
            "GroupLossScale: groups must be a non-empty sequence with a path pattern or a sequence of "
            f"them for each group, or a boostax ParameterGroups, got {groups!r}"
        )
    return tuple(_check_patterns(i, group) for i, group in enumerate(groups, 1))


def _check_patterns(number: int, group: Any) -> tuple[PathPattern, ...]:
    one = isinstance(group, (str, re.Pattern)) or callable(group)
    patterns = (group,) if one else group
    if not isinstance(patterns, Sequence) or not all(
        isinstance(p, (str, re.Pattern)) or callable(p) for p in patterns
    ):
        raise TypeError(
            f"GroupLossScale: group {number} must be a path pattern (text, a compiled regex, or a test "
            f"of a path) or a sequence of them, got {group!r}"
        )
    if not patterns:
        raise ValueError(f"GroupLossScale: group {number} is empty; leave it out")
    return tuple(patterns)


def _one_a_group(name: str, value: Any, n: int) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray) or hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return (value,) * n
    if len(value) != n:
        raise ValueError(
            f"GroupLossScale: {name} must be one number or one a group, got {len(value)} for {n} groups"
        )
    return tuple(value)
