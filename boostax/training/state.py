"""The train state: the one memory of a run."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from boostax.updates._skip import find_state

__all__ = ["TrainState"]


class TrainState(flax.struct.PyTreeNode):
    """Everything that a training run remembers; a pytree that orbax and flax can save.

    Attributes:
      params: the trained parameters (a dict for linen and plain functions, an ``nnx.State`` of
        the ``nnx.Param`` leaves for nnx).
      opt_state: the optimizer state of the whole chain.
      model_state: the linen collections other than params, the non-Param ``nnx.State``, or None.
      rng: the key's raw data (uint32), so that every checkpoint format takes it, or None if no key
        was given.
      attempt: int32 scalar, the calls so far; it never rolls back.
      skipped: int32 scalar, the calls that changed nothing, or None where a step can't skip.
      window: partial batch statistics of an open accumulation window, or None.
      loss_scale: a :class:`boostax.LossScaleState`, or None where the step has no loss scale.
    """

    params: Any
    opt_state: Any
    model_state: Any
    rng: jax.Array | None
    attempt: jax.Array
    skipped: jax.Array | None = None
    window: Any = None
    loss_scale: Any = None

    @property
    def updates(self) -> jax.Array:
        """int32 scalar: how often the parameters were updated (windows, not micro-batches)."""
        from boostax.updates.accumulate import AccumulateState

        if (ours := find_state(self.opt_state, AccumulateState)) is not None:
            return ours.updates
        if (theirs := find_state(self.opt_state, optax.MultiStepsState)) is not None:
            return theirs.gradient_step
        return self.attempt if self.skipped is None else self.attempt - self.skipped

    def merge(self, model: Any) -> Any:
        """Return a copy of an nnx ``model`` that holds this state's parameters and statistics.

        Raises:
          TypeError: ``model`` is not an nnx module; linen and plain functions use ``params``.
        """
        from flax import nnx

        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"merge: model must be the nnx.Module that was given to init, got "
                f"{type(model).__name__}; for linen and plain functions use state.params and "
                "state.model_state"
            )
        from boostax.training._nnx import NnxModel, same_paths

        params, model_state = jax.tree.map(jnp.copy, (self.params, self.model_state))
        return NnxModel(model, same_paths(params)).merge(params, model_state)
