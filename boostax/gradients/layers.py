"""The layers of a loss, and the statistics of them that a second-order optimizer needs."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from boostax import _compat
from boostax.gradients._blocks import Block, Factors
from boostax.gradients._statistics import gradient_errors, watched_value_and_grad
from boostax.gradients.value_and_grad import value_and_grad
from boostax.training.contract import CanonicalLoss, LossAux

__all__ = ["CapturedLayers"]


@dataclasses.dataclass(frozen=True)
class CapturedLayers:
    """The layers of a loss: static, hashable, made by :func:`boostax.capture_layers`.

    Attributes:
      blocks: the layers that get Kronecker factors, in the order of their first call.
      first_order: for every other leaf, by path, why it has none.
      paths: the paths of all leaves, in tree order.
      leaf_shapes: the leaves' shapes, in tree order.
      block_size: the largest number of rows of a piece of a factor.
      fisher: ``"empirical"`` or ``"true"``.
      mode: ``"default"`` or ``"reference"``.
      loss: what brings the captured loss and parameters into the form of the gradient seam.
    """

    blocks: tuple[Block, ...]
    first_order: Mapping[str, str]
    paths: tuple[str, ...]
    leaf_shapes: tuple[tuple[int, ...], ...]
    block_size: int
    fisher: str
    mode: str
    loss: Callable[[Any], tuple[CanonicalLoss, Any, Any]] = dataclasses.field(
        compare=False, repr=False
    )

    @functools.cached_property
    def fingerprint(self) -> int:
        """An unsigned 32-bit number that stands for the layers in a saved state."""
        facts = [
            [b.kernel, b.kind, b.bias, b.groups, list(dataclasses.astuple(b.inputs)),
             list(dataclasses.astuple(b.outputs))]
            for b in self.blocks
        ]  # fmt: skip
        return zlib.crc32(json.dumps([facts, list(self.paths), self.mode]).encode())

    def shapes(self) -> dict[str, Factors]:
        """Return the shapes of the statistics, by the kernel's path."""
        return {block.kernel: block.shapes() for block in self.blocks}

    def zeros(self) -> dict[str, Factors]:
        """Return statistics of zeros."""
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes())

    def fates(self) -> dict[str, str]:
        """Return for every leaf, by path, which layer it is in, or why it is in none."""
        fates = {}
        for block in self.blocks:
            for path in block.leaves:
                fates[path] = _fate(block, path)
        return {
            path: fates.get(path) or f"first order: {self.first_order[path]}" for path in self.paths
        }

    def describe(self) -> str:
        """Return a table: for every leaf the layer that it became, or why it stays first order."""
        from boostax.training.describe import format_table

        shapes = dict(zip(self.paths, self.leaf_shapes, strict=True))
        rows = [(path, str(shapes[path]), fate) for path, fate in self.fates().items()]
        return "\n".join(format_table(("leaf", "shape", "block"), rows))

    def value_and_grad(
        self,
        params: Any,
        batch: Any,
        *,
        due: Any = True,
        model_state: Any = None,
        rng: Any = None,
    ) -> tuple[tuple[jax.Array, LossAux], Any, dict[str, Factors]]:
        """Return loss, gradients and, where they are due, the layers' statistics.

        Args:
          params: the parameters, or the nnx model.
          batch: the batch.
          due: bool, or bool scalar array: whether the statistics are computed. A traced one compiles
            both ways into one conditional, in which a CPU is slow at convolutions; a bool there
            picks one of two compiled functions. Default True.
          model_state: linen's other collections, for a loss that declares ``model_state``.
          rng: a key, for a loss that declares ``rng``, and for ``fisher="true"``.

        Returns:
          ``((loss, LossAux), grads, stats)``; ``stats`` by the kernel's path, zeros where not due. An
          nnx model is not changed: its batch statistics and random counters after the pass are
          ``aux.model_state``, for ``nnx.update(model, aux.model_state)``.
        """
        loss, values, state = self.loss(params)
        state = model_state if state is None else state
        both = watched_value_and_grad(loss, layers=self)
        plain = lambda: (
            *value_and_grad(loss)(values, state, batch, rng),
            self.zeros(),
        )
        watched = lambda: both(values, state, batch, rng)[:3]
        if isinstance(due, (bool, int)):
            return watched() if due else plain()
        return _compat.cond(jnp.asarray(due), watched, plain)

    def check(
        self,
        params: Any,
        batch: Any,
        *,
        model_state: Any = None,
        rng: Any = None,
        rtol: float | None = None,
    ) -> dict[str, float]:
        """Compare, for each layer, inputs times output derivatives with the loss's gradient.

        For a captured layer ``sum_rows a^T g`` is the gradient of its kernel and bias. Leaves that the
        loss penalises (weight decay inside the loss) have a gradient beside it and are left out.

        Args:
          params: the parameters, or the nnx model.
          batch: the batch.
          model_state: as for :meth:`value_and_grad`.
          rng: as for :meth:`value_and_grad`.
          rtol: largest allowed error, relative to the gradient's norm. Default None: 1e-5, or, where
            that is more, 8 machine epsilons of the coarsest dtype of the layer and its leaves.

        Returns:
          The relative error by the kernel's path.

        Raises:
          ValueError: an error is larger.
        """
        loss, values, state = self.loss(params)
        state = model_state if state is None else state
        errors, eps = gradient_errors(loss, self, values, state, batch, rng)
        limits = {path: max(1e-5, 8 * eps[path]) if rtol is None else rtol for path in errors}
        wrong = {path: error for path, error in errors.items() if not error <= limits[path]}
        if wrong:
            allowed = max(limits[path] for path in wrong)
            raise ValueError(
                f"capture_layers: for {wrong} the layer's inputs times its output derivatives are not "
                f"the loss's gradient (allowed relative error {allowed:.1e}); leave these leaves to "
                "first order with exclude="
            )
        return errors

    def __str__(self) -> str:
        return self.describe()

    def __hash__(self) -> int:
        return self.fingerprint


def _fate(block: Block, path: str) -> str:
    groups = "" if block.groups == 1 else f"{block.groups} x "
    if path == block.bias:
        return f"the last row of {block.kernel}"
    uses = "" if block.uses == 1 else f", called {block.uses} times"
    cut = lambda side: (
        f"diagonal of {side.size}"
        if side.diagonal
        else f"{side.size} x {side.size}"
        if side.pieces == 1
        else f"{side.pieces} pieces of {side.piece} x {side.piece}"
    )
    return f"{block.kind}: {groups}A {cut(block.inputs)}, G {cut(block.outputs)}{uses}"
