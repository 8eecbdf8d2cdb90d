"""Captured layers made by hand, for tests of what uses them."""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np

from boostax.gradients._blocks import Block, Factors, Side
from boostax.gradients._views import View


@dataclasses.dataclass(frozen=True)
class Captured:
    """What THOR's update asks of captured layers."""

    blocks: tuple
    first: tuple = ()
    mode: str = "default"

    @property
    def first_order(self):
        return dict(self.first)

    @property
    def paths(self):
        return (*(path for b in self.blocks for path in b.leaves), *self.first_order)

    @property
    def fingerprint(self):
        return zlib.crc32(repr(self).encode())

    def fates(self):
        return dict.fromkeys(self.paths, "a layer") | self.first_order

    def shapes(self):
        return {b.kernel: b.shapes() for b in self.blocks}


def dense(kernel, inputs, outputs, bias=None, block_size=1024):
    """Describe a kernel of shape ``(inputs, outputs)`` and perhaps its bias."""
    rows = inputs + (bias is not None)
    return Block(
        kernel,
        "dense",
        View((inputs, outputs)).reshape(1, inputs, outputs),
        bias,
        None if bias is None else View((outputs,)).reshape(1, 1, outputs),
        Side.of(rows, block_size),
        Side.of(outputs, block_size),
    )


def cut(matrix, side):
    """Return a whole matrix as the factor of one group that the side describes."""
    matrix = jnp.asarray(matrix, jnp.float32)
    if side.diagonal:
        return jnp.diagonal(matrix)[None]
    more = side.padded - side.size
    matrix = jnp.pad(matrix, ((0, more), (0, more)))
    n, s = side.pieces, side.piece
    return jnp.stack([matrix[i * s : (i + 1) * s, i * s : (i + 1) * s] for i in range(n)])[None]


def factors(block, inputs, outputs):
    """Return the two factors of a layer with one group from whole matrices."""
    return Factors(cut(inputs, block.inputs), cut(outputs, block.outputs))


def perceptron(sizes):
    """Describe the layers of ``tests.models.plain``."""
    return Captured(
        tuple(
            dense(f"layers_{i}/kernel", a, b, f"layers_{i}/bias")
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
    )


def statistics(layers, seed=0):
    """Return random factors of the layers: symmetric, positive definite, on the host."""
    rng = np.random.default_rng(seed)

    def one(shape):
        rows = rng.normal(size=(*shape[:-1], 2 * shape[-1])) / np.sqrt(2 * shape[-1])
        return (rows @ np.swapaxes(rows, -1, -2)).astype(np.float32)

    return {b.kernel: Factors(*(one(factor.shape) for factor in b.shapes())) for b in layers.blocks}


def spd(seed, n):
    """Return a random positive definite matrix."""
    a = np.random.default_rng(seed).normal(size=(n, 2 * n)).astype(np.float32)
    return a @ a.T / (2 * n)


def closed(matrix, inputs, outputs, damping):
    """A^-1 M G^-1 with the split damping, float64."""
    a, g = (np.asarray(x, np.float64) for x in (inputs, outputs))
    pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
    a = a + pi * np.sqrt(damping) * np.eye(len(a))
    g = g + np.sqrt(damping) / pi * np.eye(len(g))
    return np.linalg.solve(a, np.asarray(matrix, np.float64)) @ np.linalg.inv(g)
