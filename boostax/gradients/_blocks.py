"""What layers and their Kronecker factors look like: the language that capture and THOR share.

A layer multiplies rows of inputs ``a`` by a matrix: ``y = a @ W``, ``W`` of shape
``(groups, inputs, outputs)``. ``groups`` counts matrices that lie in one leaf and share nothing:
the groups of a convolution, the layers that a scan stacks, the batch axes of a ``dot_general``.
With a bias the rows get a last column of ones, and ``W`` the bias as its last row.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from boostax.gradients._views import View

__all__ = ["Block", "Factors", "Side", "group_traces"]


class Factors(NamedTuple):
    """The two Kronecker factors of one layer, float32.

    Attributes:
      inputs: A, the second moments of the layer's inputs.
      outputs: G, those of the loss's derivatives by its outputs.

    Each has the shape ``(groups, pieces, size, size)``: pieces along the diagonal of each group's
    matrix, the last one filled up with zeros; or ``(groups, size)``, a diagonal alone.
    """

    inputs: Any
    outputs: Any


def group_traces(factor: jax.Array) -> jax.Array:
    """Return the trace of each group's matrix, ``(groups,)``."""
    if factor.ndim == 2:
        return jnp.sum(factor, axis=1)
    return jnp.sum(jnp.trace(factor, axis1=2, axis2=3), axis=1)


@dataclasses.dataclass(frozen=True)
class Side:
    """How one of the two factors of a layer is stored.

    Attributes:
      size: rows of the whole matrix, the column of ones included.
      pieces: into how many diagonal pieces it is cut.
      piece: rows of a piece.
      diagonal: whether only its diagonal is kept.
    """

    size: int
    pieces: int
    piece: int
    diagonal: bool = False

    @classmethod
    def of(cls, size: int, block_size: int, *, even: bool = True) -> Side:
        """Cut a side of ``size`` rows into the fewest pieces of at most ``block_size``.

        They are as even as can be, or else all but the last have ``block_size`` rows.
        """
        pieces = max(1, math.ceil(size / block_size))
        piece = math.ceil(size / pieces) if even or pieces == 1 else block_size
        return cls(size, pieces, piece)

    @property
    def padded(self) -> int:
        """Rows of all pieces together."""
        return self.piece * self.pieces

    def shape(self, groups: int) -> tuple[int, ...]:
        """The shape of the factor."""
        if self.diagonal:
            return (groups, self.size)
        return (groups, self.pieces, self.piece, self.piece)


@dataclasses.dataclass(frozen=True)
class Block:
    """One captured layer: a kernel, perhaps its bias, and the shape of their factors.

    Attributes:
      kernel: path of the kernel's leaf; the layer's name.
      kind: ``"dense"``, ``"conv"`` or ``"embedding"``.
      view: how the kernel's leaf becomes ``(groups, inputs, outputs)``.
      bias: path of the bias's leaf, None without one.
      bias_view: how that becomes ``(groups, 1, outputs)``.
      inputs: the side of A, with the column of ones where there is a bias.
      outputs: the side of G.
      uses: how often the layer is called in one forward pass.
      positions: rows that one example gives, all calls together (positions of an image or tokens).
    """

    kernel: str
    kind: Literal["dense", "conv", "embedding"]
    view: View
    bias: str | None
    bias_view: View | None
    inputs: Side
    outputs: Side
    uses: int = 1
    positions: float = 1.0

    @property
    def groups(self) -> int:
        """How many matrices the leaf holds."""
        return self.view.out_shape[0]

    @property
    def leaves(self) -> tuple[str, ...]:
        """The paths of the layer's leaves."""
        return (self.kernel,) if self.bias is None else (self.kernel, self.bias)

    def join(self, kernel: Any, bias: Any | None = None) -> jax.Array:
        """Return ``(groups, inputs, outputs)`` from leaves (parameters, gradients, ...)."""
        matrix = self.view.apply(jnp.asarray(kernel))
        if self.bias_view is None:
            return matrix
        row = self.bias_view.apply(jnp.asarray(bias))
        return jnp.concatenate([matrix, row.astype(matrix.dtype)], axis=1)

    def split(self, matrix: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the leaves that :meth:`join` makes this of."""
        if self.bias_view is None:
            return self.view.undo(matrix), None
        return self.view.undo(matrix[:, :-1]), self.bias_view.undo(matrix[:, -1:])

    def shapes(self) -> Factors:
        """Return the shapes of the factors, as ``ShapeDtypeStruct``s."""
        return Factors(
            *(
                jax.ShapeDtypeStruct(side.shape(self.groups), jnp.float32)
                for side in (self.inputs, self.outputs)
            )
        )
