"""What watches a layer: the identity, whose derivative also emits the layer's factors.

A layer's output goes through :func:`watched`. The backward pass hands the cotangent on unchanged, and
gives out what a :class:`Reading` makes of the layer's inputs and that cotangent, as the cotangents of
arguments that are not used otherwise. So nothing but these results outlives the layer's own
backward step, and what is read in several places of one argument adds up.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from boostax import _compat
from boostax.gradients._blocks import Side
from boostax.gradients._sites import Call, ConvCall, GatherCall

__all__ = ["Reading", "watched"]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is read of one call of a layer.

    Attributes:
      call: the operation.
      inputs: how the second moments of its inputs are kept, with a column of ones if that is one
        larger than the kernel.
      outputs: how those of its outputs' derivatives are kept.
      what: ``"factors"``: both sums over all rows. ``"gradient"``: inputs times derivatives, which is
        the kernel's gradient. ``"reference"``: the sums as the reference takes them.
      weighted: whether rows of which no derivative is different from zero are left out of the
        inputs' sum, as padding is that has weight 0 in the loss. The number of rows comes with it.
    """

    call: Call
    inputs: Side
    outputs: Side
    what: Literal["factors", "gradient", "reference"] = "factors"
    weighted: bool = False

    @property
    def ones(self) -> bool:
        """Whether the inputs have a column of ones."""
        return self.inputs.size > self.call.matrix.out_shape[1]

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the results."""
        groups, inputs, outputs = self.call.matrix.out_shape
        if self.what == "gradient":
            return ((groups, inputs + self.ones, outputs),)
        sums = self.inputs.shape(groups), self.outputs.shape(groups)
        return (*sums, (groups,)) if self.weighted else sums

    def read(self, data: Any, cotangent: Any) -> tuple[jax.Array, ...]:
        """Return the results, float32."""
        return _compat.laid_out_by_xla(self._read, data, cotangent)

    def _read(self, data: Any, cotangent: Any) -> tuple[jax.Array, ...]:
        if self.what == "gradient":
            return (self._gradient(data, cotangent),)
        if self.what == "reference" and isinstance(self.call, ConvCall):
            return self._reference_conv(self.call, data, cotangent)
        outputs = self.call.outputs(cotangent).astype(jnp.float32)
        used = jnp.any(outputs != 0, axis=2) if self.weighted else None
        if isinstance(self.call, GatherCall):
            counts = self.call.counts(data, used)
            sums = counts if self.inputs.diagonal else _diagonal(counts, self.inputs)
        else:
            rows = self.call.inputs(data).astype(jnp.float32)
            sums = _second_moments(rows, self.inputs, ones=self.ones, used=used)
        sides = sums, _second_moments(outputs, self.outputs)
        return sides if used is None else (*sides, jnp.sum(used, axis=1, dtype=jnp.float32))

    def _gradient(self, data: Any, cotangent: Any) -> jax.Array:
        if isinstance(self.call, GatherCall):
            return self.call.gradient(data, cotangent.astype(jnp.float32))
        outputs = self.call.outputs(cotangent).astype(jnp.float32)
        rows = self.call.inputs(data).astype(jnp.float32)
        if self.ones:
            rows = jnp.concatenate([rows, jnp.ones((*rows.shape[:2], 1), rows.dtype)], axis=2)
        return jnp.einsum("gri,gro->gio", rows, outputs, precision="highest")

    def _reference_conv(self, call: ConvCall, data: Any, cotangent: Any) -> tuple[jax.Array, ...]:
        examples = call.rows // call.positions
        shape = (call.groups, examples, call.positions, -1)
        rows = call.inputs(data).astype(jnp.float32).reshape(shape)
        outputs = call.outputs(cotangent).astype(jnp.float32).reshape(shape)
        return (
            _second_moments(jnp.mean(rows, axis=1), self.inputs),
            _second_moments(jnp.mean(outputs, axis=1), self.outputs),
        )


def _second_moments(
    rows: jax.Array, side: Side, *, ones: bool = False, used: jax.Array | None = None
) -> jax.Array:
    """Return the sum over rows of their outer products with themselves, cut as ``side`` says."""
    groups, count, _ = rows.shape
    if used is None:
        number, one = jnp.full(groups, float(count)), jnp.ones((groups, count, 1), rows.dtype)
    else:
        rows = jnp.where(used[:, :, None], rows, 0)
        one = used[:, :, None].astype(rows.dtype)
        number = jnp.sum(one, axis=(1, 2))
    if side.diagonal:
        squares = jnp.sum(jnp.square(rows), axis=1)
        return jnp.concatenate([squares, number[:, None]], axis=1) if ones else squares
    if side.pieces == 1:
        products = jnp.einsum("gri,grj->gij", rows, rows, precision="highest")
        if ones:
            # Put around the products, the column of ones needs no copy of the rows.
            sums = jnp.sum(rows, axis=1)[:, None, :]
            last = number[:, None, None]
            products = jnp.concatenate(
                [
                    jnp.concatenate([products, jnp.swapaxes(sums, 1, 2)], axis=2),
                    jnp.concatenate([sums, last], axis=2),
                ],
                axis=1,
            )
        return products[:, None]
    if ones:
        rows = jnp.concatenate([rows, one], axis=2)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, side.padded - rows.shape[2])))
    cut = rows.reshape(groups, count, side.pieces, side.piece)
    return jnp.einsum("grpi,grpj->gpij", cut, cut, precision="highest")


def _diagonal(counts: jax.Array, side: Side) -> jax.Array:
    """Return the pieces of a diagonal matrix."""
    padded = jnp.pad(counts, ((0, 0), (0, side.padded - side.size)))
    cut = padded.reshape(counts.shape[0], side.pieces, side.piece)
    return cut[..., None] * jnp.eye(side.piece, dtype=counts.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def watched(
    reading: Reading, value: Any, data: Any, active: Any, emitted: tuple[jax.Array, ...]
) -> Any:
    """Return ``value``, a layer's output.

    Args:
      reading: what to read.
      value: the output, which is returned.
      data: the layer's inputs.
      active: bool scalar, whether to read anything; None: yes.
      emitted: float32 zeros of the shapes of ``reading``; their cotangents are the results.
    """
    del reading, data, active, emitted
    return value


def _forward(reading: Reading, value: Any, data: Any, active: Any, emitted: Any) -> Any:
    del reading, emitted
    return value, (data, active)


def _backward(reading: Reading, kept: Any, cotangent: Any) -> Any:
    data, active = kept
    if active is None:
        results = reading.read(data, cotangent)
    else:
        zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in reading.shapes())
        results = lax.cond(active, lambda: reading.read(data, cotangent), lambda: zeros)
    return cotangent, None, None, results


watched.defvjp(_forward, _backward)
