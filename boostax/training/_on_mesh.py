"""A train step's part for a mesh: where states and batches lie, and what maps over the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from boostax.training._arguments import accepted
from boostax.training._layout import (
    MadeShapes,
    change_leaves,
    check_leading,
    differing,
    flush_over_mesh,
    over_mesh,
)
from boostax.training._placement import (
    batch_specs,
    check_unsplit,
    filled_batch,
    place,
    place_batch,
    place_spread,
    sharding_on,
    spread,
)
from boostax.training._replicas import Replicas
from boostax.training._settings import Settings
from boostax.training.state import TrainState


class OnMesh:
    """What a train step does with its mesh."""

    def __init__(self, tx: optax.GradientTransformationExtraArgs, settings: Settings):
        assert settings.replicas is not None
        self.replicas: Replicas = settings.replicas
        self._tx = tx
        self._settings = settings
        self._differing: dict[Any, tuple[bool, ...]] = {}
        self._made = MadeShapes(tx)
        self._lies: list[Any] | None = None

    def marks(self, params: Any, extra: Mapping[str, Any]) -> tuple[bool, ...]:
        """Say for each leaf of the optimizer state whether it differs between devices."""
        structure = jax.tree.structure(params)
        if structure not in self._differing:
            accept = lambda given: accepted(self._tx, given)
            self._differing[structure] = differing(
                self._tx, params, self.replicas, accept, extra, self._settings.layers
            )
        return self._differing[structure]

    def checked_marks(self, state: TrainState, extra: Mapping[str, Any]) -> tuple[bool, ...]:
        """Return the marks, after a look at the state's shapes.

        Raises:
          StateMismatchError: it was made for another number of devices, or by another ``tx``.
        """
        marks = self.marks(state.params, extra)
        check_leading(state.opt_state, marks, self._made(state.params), self.replicas.size)
        return marks

    def placed_params(self, params: Any) -> Any:
        """Put parameters on the mesh; those that lie on it stay where they are."""
        params = place(params, self.replicas)
        if self.replicas.exchange == "tx":
            check_unsplit(params, self.replicas)
        return params

    def first_state(self, state: TrainState, extra: Mapping[str, Any]) -> TrainState:
        """Put a new state on the mesh, and give the devices what is their own."""
        state = place(state, self.replicas)
        own = lambda leaf: spread(leaf, self.replicas)
        return state.replace(
            opt_state=change_leaves(state.opt_state, self.marks(state.params, extra), own)
        )

    def moved(self, state: TrainState) -> bool:
        """Say whether an earlier first state lay elsewhere; what was compiled puts results there."""
        before, self._lies = (
            self._lies,
            [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)],
        )
        return before is not None and before != self._lies

    def placed_state(self, state: TrainState, extra: Mapping[str, Any]) -> TrainState:
        """Put a state on the mesh that may come from a checkpoint.

        Raises:
          StateMismatchError: it was made for another number of devices.
        """
        marks = self.checked_marks(state, extra)
        leaves, treedef = jax.tree.flatten(state)
        if self._lies is not None and len(self._lies) == len(leaves):
            # From the host, say: back to where the first state lay.
            return treedef.unflatten(
                [place(x, self.replicas, at) for x, at in zip(leaves, self._lies, strict=True)]
            )
        own = lambda leaf: place_spread(leaf, self.replicas)
        opt_state = change_leaves(state.opt_state, marks, own)
        return place(state.replace(opt_state=opt_state), self.replicas)

    def placed(self, batch: Any, extra: Any) -> tuple[Any, Any]:
        """Put a batch and extra arguments on the mesh."""
        return place_batch(batch, self.replicas), place(extra, self.replicas)

    def resharded(self, batch: Any) -> Any:
        """Split a batch that is being traced; over Explicit axes its type has to tell so."""
        mesh = self.replicas.mesh
        explicit = {
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        }
        if not explicit & set(self.replicas.axes):
            return batch
        specs = batch_specs(batch, self.replicas)
        put = lambda leaf, spec: jax.sharding.reshard(leaf, NamedSharding(mesh, spec))
        return jax.tree.map(put, batch, specs)

    def filled(self, batch: Any, gives_weight: Callable[[], bool]) -> Any:
        """Fill a batch up that the devices can't share evenly, where that is allowed.

        Raises:
          ValueError: it is not allowed, or the loss gives no weight.
        """
        settings = self._settings
        filled = filled_batch(
            batch,
            self.replicas,
            settings.example_weights,
            settings.microbatch,
            settings.batch_parts,
        )
        if filled is not batch and not gives_weight():
            raise ValueError(
                "example_weights: the batch was filled up with examples of weight 0, but loss_fn "
                "returns no LossAux.weight, so that they would count; return the sum of the weights"
            )
        return filled

    def abstract(self, opt_state: Any, params: Any, extra: Mapping[str, Any]) -> Any:
        """Return the shapes of an optimizer state, with the leading axes that it has here."""
        lies = NamedSharding(self.replicas.mesh, PartitionSpec(self.replicas.axes))
        own = lambda x: jax.ShapeDtypeStruct((self.replicas.size, *x.shape), x.dtype, sharding=lies)
        return change_leaves(opt_state, self.marks(params, extra), own)

    def mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``(state, batch, extra) -> (state, metrics)`` over all devices."""
        return over_mesh(function, self.replicas, self.checked_marks)

    def mapped_flush(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``(state, extra) -> state`` over all devices."""
        return flush_over_mesh(function, self.replicas, self.checked_marks)

    def jit(
        self,
        function: Callable[..., Any],
        state: TrainState,
        donated: tuple[int, ...],
        *,
        results: int,
    ) -> Any:
        """Compile a function whose first result is a state that lies as ``state`` does."""
        shardings = jax.tree.map(lambda leaf: sharding_on(leaf, self.replicas), state)
        return jax.jit(
            function,
            donate_argnums=donated,
            out_shardings=shardings if results == 1 else (shardings, None),
        )
