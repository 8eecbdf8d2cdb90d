"""Freezing: hold the first layers still for a while, and save their part of the backward pass.

``Freezing`` is the static half that both seams share; ``freeze`` is the update seam. At freeze
index ``i`` only group ``i`` is trained. The parameters of the other leaves and their part of the
optimizer state stay bitwise as they are, and they enter no norm, clip or ratio.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from boostax._info import TransformInfo, with_info
from boostax._tree import leaf_paths
from boostax.errors import StateMismatchError, did_you_mean
from boostax.updates._freeze_checks import (
    check_no_window,
    check_schedule,
    explicit_groups,
    has_masked,
)
from boostax.updates._freeze_mask import exchanging, run_trainable
from boostax.updates._freeze_statistics import hold_statistics
from boostax.updates._skip import find_state, skip
from boostax.updates.parameter_groups import ParameterGroups, check_index

__all__ = ["FreezeState", "Freezing", "freeze"]


@dataclasses.dataclass(frozen=True, eq=False)
class Freezing:
    """Groups and schedule of a freezing run: static, hashable, given by name to both seams.

    The freeze index of window ``t`` is ``schedule[t]``. After the end of the schedule the index is
    0: nothing is frozen. A leaf that is in no group is never trained.

    Args:
      groups: what :func:`boostax.parameter_groups` returned; or a tuple or list with one entry for
        each freeze index, each a collection of the paths of the trained leaves, or a tree of bools
        with the structure of the parameters (True: trained).
      schedule: one freeze index per window, each in ``[0, len(groups) - 1]``: what
        :func:`boostax.freeze_schedule` returned, or any tuple, list, range or 1-D integer array.
      params: the parameters, only for groups given as path lists: then the entries may be path
        patterns (``"encoder/*"``), and leaves in no group are known. Default None.

    Attributes:
      groups: the :class:`~boostax.updates.parameter_groups.ParameterGroups`.
      schedule: read-only int32 array of shape ``(windows,)``.

    Raises:
      ValueError: empty groups or schedule, an index outside the groups, one without the other.
      TypeError: an argument has the wrong type.

    Example:
      >>> freezing = Freezing([["a", "b"], ["b"]], schedule=[0, 1, 1])
      >>> [freezing.index_at(t) for t in range(5)]
      [0, 1, 1, 0, 0]
      >>> freezing.trainable_by_path(1)
      {'a': False, 'b': True}
    """

    groups: ParameterGroups
    schedule: np.ndarray
    params: dataclasses.InitVar[Any] = None

    def __post_init__(self, params: Any) -> None:
        groups = explicit_groups(self.groups, params)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "schedule", check_schedule(self.schedule, len(groups)))

    @property
    def num_indices(self) -> int:
        """The number of freeze indices, one for each group."""
        return len(self.groups)

    @functools.cached_property  # read at every update outside of jit
    def fingerprint(self) -> int:
        """An unsigned 32-bit number that stands for groups and schedule in a saved state."""
        facts = [[sorted(group) for group in self.groups.trained], self.schedule.tolist()]
        return zlib.crc32(json.dumps(facts).encode())

    def index_at(self, count: Any) -> Any:
        """Return the freeze index of window ``count``: an int, or a traced int32 for a traced count."""
        if isinstance(count, Tracer):
            table = jnp.asarray(np.append(self.schedule, np.int32(0)))
            return table[jnp.clip(count, 0, len(self.schedule))]
        count = int(count)
        return int(self.schedule[count]) if 0 <= count < len(self.schedule) else 0

    def trainable(self, index: int) -> Any:
        """Return the parameters' tree with a Python bool for each leaf: trained at this index.

        Raises:
          ValueError: the index is out of range, or the groups are path lists and the parameters'
            structure is not known yet (see :meth:`bind`).
        """
        if self.groups.treedef is None:
            raise ValueError(
                "Freezing: the parameters' structure is not known, because groups are path lists; "
                "pass Freezing(groups, schedule, params=params), or call freezing.bind(params)"
            )
        return self.groups.trainable(index)

    def trainable_by_path(self, index: int) -> dict[str, bool]:
        """Return ``path -> trained at this index``."""
        return self.groups.trainable_by_path(index)

    def bind(self, params: Any) -> Freezing:
        """Return an equal ``Freezing`` with the structure of ``params``, checked leaf by leaf.

        Raises:
          StateMismatchError: the groups name leaves that ``params`` does not have, or, unless they
            are path lists, ``params`` has leaves that the groups don't know.
        """
        treedef = jax.tree.structure(params)
        if self.groups.treedef is not None and treedef == self.groups.treedef:
            return self
        paths = leaf_paths(params)
        self._check_paths(paths, complete=True)
        groups = dataclasses.replace(self.groups, paths=paths, treedef=treedef)
        return Freezing(groups, self.schedule)

    def flags(self, index: int, tree: Any) -> list[bool]:
        """Return, leaf by leaf of a tree like the parameters, whether it is trained at this index.

        Inside ``optax.masked`` and the like leaves may be missing (``optax.MaskedNode``).
        """
        paths = leaf_paths(tree)
        self._check_paths(paths, complete=not has_masked(tree))
        on = frozenset(self.groups.trained[check_index(index, self.num_indices)])
        return [path in on for path in paths]

    def hold_statistics(self, index: int, old_model_state: Any, new_model_state: Any) -> Any:
        """Return ``new_model_state``, with the old statistics of modules that are wholly frozen.

        Held are the leaves of linen's ``batch_stats`` collection and of ``nnx.BatchStat`` in every
        module whose parameters are all frozen at ``index`` (a module without parameters of its own
        goes with the nearest module around it that has some). Other state, such as the counters of
        random streams, moves on.
        """
        return hold_statistics(self.trainable_by_path(index), old_model_state, new_model_state)

    def check(self, state: Any) -> None:
        """Raise where an optimizer state was made with other groups or another schedule.

        Args:
          state: an optimizer state with a :class:`FreezeState` in it, on the host.

        Raises:
          StateMismatchError: the fingerprints differ, or there is no ``FreezeState`` (a state that
            came back as dicts and lists was restored without a target).
        """
        found = find_state(state, FreezeState)
        if found is None:
            raise StateMismatchError(
                "Freezing: there is no FreezeState in this optimizer state. Either the "
                "transformation has no boostax.freeze(inner, freezing), or the state was restored "
                "without a target and came back as dicts and lists: restore it with the target "
                "tx.init(params)"
            )
        self._check_fingerprint(found)

    def _check_fingerprint(self, state: FreezeState) -> None:
        if isinstance(state.fingerprint, (Tracer, jax.ShapeDtypeStruct)):
            return
        if int(state.fingerprint) != self.fingerprint:
            raise StateMismatchError(
                f"Freezing: the state was made with other groups or another schedule (fingerprint "
                f"{int(state.fingerprint)}, here {self.fingerprint}: {self.num_indices} groups, "
                f"{len(self.schedule)} windows); go on with the Freezing that it was made with, or "
                "start with tx.init(params)"
            )

    def _check_paths(self, paths: tuple[str, ...], *, complete: bool) -> None:
        known, given = set(self.groups.paths), set(paths)
        # Groups from path lists alone don't know the leaves that they leave out.
        closed = self.groups.treedef is not None
        faults = [
            f"the parameters have {path!r}, which the groups don't.{did_you_mean(path, known)}"
            for path in sorted(given - known)
            if closed
        ]
        faults += [
            f"the groups have {path!r}, which the parameters don't.{did_you_mean(path, given)}"
            for path in sorted(known - given)
            if complete
        ]
        if faults:
            more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
            raise StateMismatchError(
                f"Freezing: groups and parameters don't fit together: {'; '.join(faults[:5])}{more}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Freezing) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def __repr__(self) -> str:
        return f"Freezing({self.num_indices} groups, {len(self.schedule)} windows)"

    def _facts(self) -> tuple[Any, ...]:
        return tuple(frozenset(group) for group in self.groups.trained), self.schedule.tobytes()


class FreezeState(NamedTuple):
    """The state of :func:`freeze`.

    Attributes:
      count: int32 scalar, the windows tried so far, skipped ones included; the freeze index of the
        next window is ``freezing.index_at(count)``.
      fingerprint: uint32 scalar, stands for groups and schedule.
      inner_state: the state of the wrapped transformation, one for all groups.
    """

    count: jax.Array
    fingerprint: jax.Array
    inner_state: Any

    def on_skip(self) -> FreezeState:
        """Return the state after a skipped window: only counters of attempts have moved."""
        count = jnp.asarray(optax.safe_increment(self.count))
        return self._replace(count=count, inner_state=skip(self.inner_state))


def freeze(
    inner: optax.GradientTransformation, freezing: Freezing
) -> optax.GradientTransformationExtraArgs:
    r"""Run a transformation on the trainable leaves of each window only.

    With the set :math:`T_i` of the leaves trained at the window's freeze index ``i``,

    .. math::
        u_T, s_T \leftarrow \mathrm{inner}(g_T, s_T, p_T), \qquad
        u_{\bar T} = 0, \quad s_{\bar T} \text{ unchanged}.

    The inner transformation does not see the other leaves at all, so that frozen leaves and their
    moments stay bitwise the same, weight decay does not move them, they count in no norm, and their
    update costs nothing. State that does not belong to a leaf (counts, schedules, hyperparameters)
    moves on at each window: learning-rate schedules follow the global step, and so does Adam's bias
    correction, which for leaves that were frozen early is therefore weaker than their own moments
    would ask for. There is one optimizer state, not one for each group.

    Args:
      inner: any optax transformation or chain without a window of its own: ``accumulate`` goes
        around the freeze, ``accumulate(freeze(inner, freezing), every)``, so that the index changes
        between windows only. What it is given besides the gradients
        (parameters, ``grad=``, ``value_fn=``, any extra argument with the structure of the
        parameters) is cut down to the trained leaves as well.
      freezing: groups and schedule.

    Returns:
      A transformation with the state :class:`FreezeState`. Its update takes the extra argument
      ``freeze_index``: a Python int builds that one variant; a traced one, or none, means a
      ``lax.switch`` over all variants, by default at the index that the state says. The window
      count moves by one with each update.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: ``inner`` holds ``accumulate`` or ``optax.MultiSteps``.
      StateMismatchError: the parameters or the state don't belong to this ``freezing``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"a": jnp.ones(2), "b": jnp.ones(2)}
      >>> tx = freeze(optax.adamw(0.1, weight_decay=0.1), Freezing([["a", "b"], ["b"]], [1, 0]))
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates["a"].tolist(), int(state.count)
      ([0.0, 0.0], 1)

    Source:
      ``mindspore.boost.FreezeOpt``, which keeps a whole optimizer for each group instead. Progressive
      freezing: A. Brock et al., "FreezeOut", 2017.

    When not to use:
      With an inner transformation that flattens all parameters into one vector
      (``optax.flatten``): its state can't be cut. To train some leaves only, for the whole run,
      ``optax.masked`` is enough. Freezing trades quality for time; measure both.
    """
    if not isinstance(freezing, Freezing):
        raise TypeError(
            f"freeze: freezing must be a boostax.Freezing(groups, schedule), got "
            f"{type(freezing).__name__}"
        )
    transform = getattr(inner, "gradient_transformation", None)
    if transform is not None:  # optax has classes with methods, such as MultiSteps
        inner = transform()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"freeze: inner must be an optax.GradientTransformation, got {type(inner).__name__}"
        )
    check_no_window(inner)
    tx = optax.with_extra_args_support(inner)

    def init(params: Any) -> FreezeState:
        freezing.flags(0, params)
        return FreezeState(
            count=jnp.zeros((), jnp.int32),
            fingerprint=jnp.asarray(np.uint32(freezing.fingerprint)),
            inner_state=tx.init(params),
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        freeze_index: Any = None,
        boostax_exchange: Callable[[Any], Any] | None = None,
        **extra_args: Any,
    ) -> tuple[Any, FreezeState]:
        freezing._check_fingerprint(state)
        index = freezing.index_at(state.count) if freeze_index is None else freeze_index
        if isinstance(index, jax.Array) and not isinstance(index, Tracer):
            index = int(index)

        def branch(static_index: int) -> Any:
            flags = freezing.flags(static_index, updates)
            inner = tx if boostax_exchange is None else exchanging(tx, boostax_exchange)
            return lambda: run_trainable(
                inner, flags, updates, state.inner_state, params, extra_args
            )

        if isinstance(index, Tracer):
            branches = [branch(i) for i in range(freezing.num_indices)]
            new_updates, inner_state = jax.lax.switch(index, branches)
        else:
            new_updates, inner_state = branch(check_index(index, freezing.num_indices))()
        count = jnp.asarray(optax.safe_increment(state.count))
        return new_updates, FreezeState(count, state.fingerprint, inner_state)

    settings = {"groups": freezing.num_indices, "windows": len(freezing.schedule)}
    return with_info(
        optax.GradientTransformationExtraArgs(init, update),
        TransformInfo(
            "freeze",
            settings,
            inner,
            freezing,
            fates=lambda params: _fates(freezing),
            check=freezing.check,
            exchanges=True,
        ),
    )


def _fates(freezing: Freezing) -> dict[str, str]:
    """Tell for every parameter at which indices, and in how many windows, it is frozen."""
    trained = [freezing.trainable_by_path(index) for index in range(freezing.num_indices)]
    windows = np.bincount(freezing.schedule, minlength=freezing.num_indices)
    fates = {}
    for path in trained[0]:
        frozen = [index for index, by_path in enumerate(trained) if not by_path[path]]
        share = windows[frozen].sum() / len(freezing.schedule)
        at = ", ".join(map(str, frozen))
        fates[path] = (
            f"frozen at index {at} ({share:.0%} of the windows)" if frozen else "never frozen"
        )
    return fates
