"""Inverses of damped Kronecker factors, by Cholesky, shared between devices, and their use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from boostax import _compat
from boostax.gradients._blocks import Block, Factors, Side, group_traces
from boostax.parallel.reduce import Reduce

__all__ = [
    "apply_inverses",
    "averaged",
    "damped",
    "finite",
    "identity",
    "inverted",
]


def identity(block: Block) -> Factors:
    """Return inverses that change nothing."""

    def one(side: Side) -> jax.Array:
        shape = side.shape(block.groups)
        if side.diagonal:
            return jnp.ones(shape, jnp.float32)
        return jnp.broadcast_to(jnp.eye(side.piece, dtype=jnp.float32), shape)

    return Factors(one(block.inputs), one(block.outputs))


def damped(block: Block, factors: Factors, damping: Any, *, pi_split: bool) -> Factors:
    """Return A and G with what is added to their diagonals.

    With the split A gets ``pi * sqrt(damping)`` and G gets ``sqrt(damping) / pi``, where ``pi**2``
    is the ratio of their mean eigenvalues; without it each gets ``damping``.
    """
    damping = jnp.asarray(damping, jnp.float32)
    if not pi_split:
        return Factors(
            add_diagonal(block.inputs, factors.inputs, damping),
            add_diagonal(block.outputs, factors.outputs, damping),
        )
    of_inputs, of_outputs = map(group_traces, factors)
    known = (of_inputs > 0) & (of_outputs > 0)
    mean_inputs = jnp.where(known, of_inputs, 1) / block.inputs.size
    mean_outputs = jnp.where(known, of_outputs, 1) / block.outputs.size
    # Two roots: the ratio itself leaves float32's range sooner.
    pi = jnp.where(known, jnp.sqrt(mean_inputs) / jnp.sqrt(mean_outputs), 1.0)
    root = jnp.sqrt(damping)
    return Factors(
        add_diagonal(block.inputs, factors.inputs, root * pi),
        add_diagonal(block.outputs, factors.outputs, root / pi),
    )


def add_diagonal(side: Side, factor: jax.Array, amount: jax.Array) -> jax.Array:
    """Add ``amount``, one number or one for each group, to the diagonal of a factor."""
    amount = jnp.broadcast_to(amount, factor.shape[:1])
    if side.diagonal:
        return factor + amount[:, None]
    unit = jnp.eye(side.piece, dtype=jnp.float32)
    return factor + amount[:, None, None, None] * unit[None, None]


def inverted(matrices: Sequence[Factors], axes: tuple[str, ...] = ()) -> list[Factors]:
    """Invert positive definite factors; what can't be inverted comes out not finite.

    Pieces of one size, from whatever layers, are one stack, except on a CPU, where that is no faster.
    With ``axes`` each device inverts its share of a stack and all get all of it.
    """
    # Measured on 2 CPU cores with OPENBLAS_NUM_THREADS=1, JAX 0.10.2, in ms, for two triangular
    # solves on one stack / in a loop / in lax.map: 8 pieces of 101 rows 1.4 / 1.6 / 1.0; 4 of 257
    # 5.7 / 7.7 / 6.6; 2 of 785 49 / 52 / 49; 2 of 1024 107 / 112 / 118. One solve and the product
    # of the triangular inverse with itself: 2.1, 7.9, 55 and 153 on one stack.
    flat = [factor for pair in matrices for factor in pair]
    done: list[Any] = [None] * len(flat)
    by_size: dict[int, list[int]] = {}
    for i, factor in enumerate(flat):
        if factor.ndim == 2:
            done[i] = 1 / factor
        else:
            by_size.setdefault(factor.shape[-1], []).append(i)
    for size, places in by_size.items():
        stack = jnp.concatenate([flat[i].reshape(-1, size, size) for i in places])
        start = 0
        inverse = _shared(stack, axes)
        for i in places:
            count = math.prod(flat[i].shape[:-2])
            done[i] = inverse[start : start + count].reshape(flat[i].shape)
            start += count
    return [Factors(*pair) for pair in zip(done[::2], done[1::2], strict=True)]


def _shared(stack: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    devices = lax.axis_size(axes) if axes else 1
    if devices == 1:
        return _cholesky_inverse(stack)
    count, size = stack.shape[:2]
    share = math.ceil(count / devices)
    filling = jnp.broadcast_to(
        jnp.eye(size, dtype=stack.dtype), (share * devices - count, size, size)
    )
    filled = jnp.concatenate([stack, filling])
    own = lax.dynamic_slice_in_dim(filled, lax.axis_index(axes) * share, share)
    gathered = _cholesky_inverse(own)
    for axis in reversed(axes):
        gathered = _compat.all_gather(gathered, axis)
    return gathered.reshape(-1, size, size)[:count]


def _cholesky_inverse(stack: jax.Array) -> jax.Array:
    if jax.default_backend() != "cpu":
        return _inverse(stack)
    # jaxlib's LAPACK kernels hand the matrices of a stack to the thread pool that they run on, and
    # wait: two stacks at once can wait for each other for ever (seen with JAX 0.10.2 on 2 cores). A
    # matrix by itself is done where it is.
    return jnp.stack([_inverse(matrix) for matrix in stack])


def _inverse(stack: jax.Array) -> jax.Array:
    # Only the lower half is read.
    lower = lax.linalg.cholesky(stack, symmetrize_input=False)
    unit = jnp.broadcast_to(jnp.eye(stack.shape[-1], dtype=stack.dtype), stack.shape)
    half = lax.linalg.triangular_solve(lower, unit, left_side=True, lower=True)
    return lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True)


def averaged(
    stats: Sequence[Factors], weight: Any, axes: tuple[str, ...], buckets: Sequence[Sequence[int]]
) -> list[Factors]:
    """Return the devices' mean of the factors by weight; each bucket of layers travels as one."""
    if not axes:
        return list(stats)
    combine = Reduce(axes)
    out: list[Any] = [None] * len(stats)
    for bucket in buckets:
        parts = [factor for i in bucket for factor in stats[i]]
        flat = combine(jnp.concatenate([part.ravel() for part in parts]), weight)
        ends = [sum(part.size for part in parts[: n + 1]) for n in range(len(parts))]
        cut = [
            flat[end - part.size : end].reshape(part.shape)
            for part, end in zip(parts, ends, strict=True)
        ]
        for n, i in enumerate(bucket):
            out[i] = Factors(cut[2 * n], cut[2 * n + 1])
    return out


def finite(*factors: Factors) -> jax.Array:
    """Say whether every number is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for pair in factors for x in pair]))


_HIGHEST = lax.Precision.HIGHEST
# Up to so many pieces a product for each, which a CPU does faster than one batched product
# (measured there: 512x512 in pieces of 128 2.5 ms against 4, 1024x1024 12 against 25).
_UNROLLED = 32


def apply_inverses(block: Block, inverses: Factors, gradient: jax.Array) -> jax.Array:
    """Return ``A^-1 gradient G^-1``, for ``(groups, inputs, outputs)``."""
    left, right = block.inputs, block.outputs
    if left.diagonal:
        out = gradient * inverses.inputs[:, :, None]
    elif block.groups * left.pieces <= _UNROLLED:
        products = lambda group, matrix: [
            _matmul(inverses.inputs[group, n, :size, :size], matrix[start : start + size])
            for n, (start, size) in enumerate(_places(left))
        ]
        out = jnp.stack([_joined(products(n, gradient[n]), 0) for n in range(block.groups)])
    else:
        out = jnp.matmul(inverses.inputs, _cut(gradient, left, 1), precision=_HIGHEST)
        out = out.reshape(block.groups, left.padded, right.size)[:, : left.size]
    if right.diagonal:
        return out * inverses.outputs[:, None, :]
    if block.groups * right.pieces <= _UNROLLED:
        products = lambda group, matrix: [
            _matmul(matrix[:, start : start + size], inverses.outputs[group, n, :size, :size])
            for n, (start, size) in enumerate(_places(right))
        ]
        return jnp.stack([_joined(products(n, out[n]), 1) for n in range(block.groups)])
    cut = jnp.moveaxis(_cut(out, right, 2), 2, 1)
    out = jnp.moveaxis(jnp.matmul(cut, inverses.outputs, precision=_HIGHEST), 1, 2)
    return out.reshape(block.groups, left.size, right.padded)[:, :, : right.size]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_HIGHEST)


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _places(side: Side) -> list[tuple[int, int]]:
    """Return first row and number of rows of each piece, without what fills the last one up."""
    starts = range(0, side.size, side.piece)
    return [(start, min(side.piece, side.size - start)) for start in starts]


def _cut(matrix: jax.Array, side: Side, axis: int) -> jax.Array:
    filling = [(0, 0)] * 3
    filling[axis] = (0, side.padded - side.size)
    shape = list(matrix.shape)
    shape[axis : axis + 1] = [side.pieces, side.piece]
    return jnp.pad(matrix, filling).reshape(shape)
