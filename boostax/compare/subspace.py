"""An arm whose first steps make a basis of their own, in which ``dim_reduce`` takes the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from boostax._auto_dim_reduce import steps_of
from boostax.training.describe import compiled_cost

__all__ = ["SubspaceStep", "subspace_step"]

_SNAPSHOTS = 60


def subspace_step(
    arm: Any, boost: Any, task: Any, step: Any, steps: int, *, alone: bool
) -> tuple[SubspaceStep, int, list[str]]:
    """Return an arm's step with the change to ``dim_reduce``, its number of updates, and notes.

    Args:
      arm: the :class:`~boostax.compare.arms.Arm`.
      boost: its ``AutoBoost``, whose section ``dim_reduce`` has the settings.
      task: the task.
      step: the train step of its first part.
      steps: the budget, in batches.
      alone: whether there is one process.

    Raises:
      ValueError: there are too few steps, or several processes, or windows that span steps.
    """
    from boostax.training.step import train_step
    from boostax.updates.dim_reduce import dim_reduce
    from boostax.updates.trajectory_basis import trajectory_basis

    section = boost.config.dim_reduce
    if not alone or step.settings.replicas is not None:
        raise ValueError("compare.dim_reduce_after: such an arm runs in one process, on one device")
    if "grad_accumulation" in boost.enabled and boost.config.has_window:
        raise ValueError(
            "compare.dim_reduce_after: such an arm has no window over several steps; leave "
            "grad_accumulation.every out"
        )
    if section.has_source:
        raise ValueError(
            "compare.dim_reduce_after: the basis is made of the arm's own snapshots; leave "
            "dim_reduce.pca_mat_path and weight_load_dir out"
        )
    k, merged = section.n_components, arm.dim_reduce_batches
    before, after = _phases(steps, arm.dim_reduce_after, merged, k)

    def basis(snapshots: list[Any], params: Any) -> Any:
        return trajectory_basis(
            snapshots,
            k,
            center=section.center,
            exclude=section.exclude,
            dtype=section.dtype or "float32",
            params=params,
        )

    def make(found: Any) -> Any:
        return train_step(task.loss, dim_reduce(found, **steps_of(section)), has_aux=task.has_aux)

    told = [
        f"after {before} of {steps} steps it goes on with dim_reduce in {k} directions of its own "
        f"snapshots: {after} steps, each on {merged} batches at once; finding the basis counts as "
        "compiling, and of the trial losses of a step its FLOPs have one"
    ]
    left = steps - before - after * merged
    if left:
        told.append(f"the last {left} batches are too few for another step")
    wrapped = SubspaceStep(
        step, make, basis, before=before, snapshots=max(_SNAPSHOTS, k + 1), merged=merged
    )
    return wrapped, before + after, told


def _phases(steps: int, share: float, merged: int, k: int) -> tuple[int, int]:
    """Return the steps before the basis is made, and the number of ``dim_reduce``'s steps after it.

    Args:
      steps: the budget, in batches.
      share: of the budget, before the basis is made.
      merged: batches that one step of ``dim_reduce`` takes.
      k: directions of the basis.

    Raises:
      ValueError: there are too few steps for either.
    """
    before = round(steps * share)
    after = (steps - before) // merged
    if before < k + 1:
        raise ValueError(
            f"compare.dim_reduce_after = {share:g} leaves {before} of {steps} steps for snapshots, and "
            f"{k} directions (dim_reduce.n_components) need {k + 1}; give more --steps or fewer"
        )
    if after < 1:
        raise ValueError(
            f"compare.dim_reduce_after = {share:g} leaves {steps - before} of {steps} batches, and one "
            f"step of dim_reduce takes {merged} (compare.dim_reduce_batches); give more --steps or fewer"
        )
    return before, after


class SubspaceStep:
    """A train step that goes on as another one, on bigger batches, after so many calls.

    It counts its calls, so that a run must use it from ``init`` on, alone.

    Args:
      step: the train step of the first calls.
      make: from a basis to the train step that goes on.
      basis: from the snapshots to the basis.
      before: calls of the first step; the last of them makes the basis.
      snapshots: how many snapshots those are thinned out to, at most.
      merged: batches that the second step takes at a time.
    """

    dispatches_on_host = False

    def __init__(
        self,
        step: Any,
        make: Callable[[Any], Any],
        basis: Callable[[list[Any], Any], Any],
        *,
        before: int,
        snapshots: int,
        merged: int,
    ):
        self.step, self.settings, self.tx = step, step.settings, step.tx
        self._make, self._basis = make, basis
        self._before, self._merged = before, merged
        self._every = max(1, before // snapshots)
        self._second: Any = None

    def init(self, model_or_params: Any, *, model_state: Any = None, rng: Any = None) -> Any:
        """Return the first step's first state, and forget the last run."""
        self._model, self._rng = model_or_params, rng
        self._calls, self._held, self._waiting, self._updates = 0, [], [], 0
        self._second, self._costed = None, None
        return self.step.init(model_or_params, model_state=model_state, rng=rng)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        self._calls += 1
        if self._calls <= self._before:
            return self._first(state, batch)
        self._waiting.append(batch)
        if len(self._waiting) < self._merged:
            return state, self._metrics
        merged = jax.tree.map(lambda *parts: np.concatenate(parts), *self._waiting)
        self._waiting = []
        state, metrics = self._second(state, merged)
        updates = self._updates + metrics["updates"]
        self._metrics, self._costed = {**metrics, "updates": updates}, (state, merged)
        return state, self._metrics

    def _first(self, state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        state, self._metrics = self.step(state, batch)
        left = self._before - self._calls
        if left % self._every == 0:
            self._held.append(jax.tree.map(np.array, state.params))
        if left == 0:
            self._costed_first = (state, batch)
            self._updates = self._metrics["updates"]
            self._second = self._make(self._basis(self._held, state.params))
            self._held = []
            state = self._go_on(state)
        return state, self._metrics

    def _go_on(self, state: Any) -> Any:
        if isinstance(self._model, nnx.Module):
            return self._second.init(state.merge(self._model), rng=self._rng)
        return self._second.init(state.params, model_state=state.model_state, rng=self._rng)

    def costs(self, calls: int) -> dict[str, float | None]:
        """Return the FLOPs of a call, averaged over the run, and the largest temp memory.

        Of the trial losses of a line search one is counted, as XLA counts a loop.
        """
        first = compiled_cost("before", self.step.lower(*self._costed_first).compile())
        told = [(first, self._before)]
        if self._costed is not None:
            second = compiled_cost("after", self._second.lower(*self._costed).compile())
            told.append((second, (calls - self._before) // self._merged))
        known = all(cost.flops for cost, _ in told)
        return {
            "flops_per_step": sum(c.flops * n for c, n in told) / calls if known else None,
            "temp_bytes": max(c.temp_bytes for c, _ in told) or None,
        }
