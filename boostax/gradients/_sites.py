"""Where a layer is called: which operation it is, and its rows of inputs and of derivatives."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from boostax.gradients._facts import Axes
from boostax.gradients._views import View

__all__ = ["Call", "ConvCall", "DenseCall", "GatherCall", "conv_call", "dense_call", "gather_call"]


class Call(Protocol):
    """One operation that multiplies rows of data by a kernel.

    Attributes:
      kind: ``"dense"``, ``"conv"`` or ``"embedding"``.
      kernel: which operand the kernel is, 0 or 1; the other one is the data.
      matrix: how the kernel becomes ``(groups, inputs, outputs)``.
      rows: how many rows the data has.
      axes: what the result's dimensions are.
    """

    @property
    def kind(self) -> str: ...
    @property
    def kernel(self) -> int: ...
    @property
    def matrix(self) -> View: ...
    @property
    def rows(self) -> int: ...
    @property
    def axes(self) -> Axes: ...

    def inputs(self, data: Any) -> jax.Array:
        """Return the rows ``(groups, rows, inputs)``; for an embedding ``(1, inputs)`` counts."""
        ...

    def outputs(self, cotangent: Any) -> jax.Array:
        """Return the derivatives by the outputs, ``(groups, rows, outputs)``."""
        ...


@dataclasses.dataclass(frozen=True)
class DenseCall:
    """A ``dot_general``; see :class:`Call`."""

    kernel: int
    matrix: View
    rows: int
    axes: Axes
    permutation: tuple[int, ...]
    order: tuple[int, ...]
    kind: str = "dense"

    def inputs(self, data: Any) -> jax.Array:
        groups, inputs, _ = self.matrix.out_shape
        return jnp.transpose(data, self.permutation).reshape(groups, self.rows, inputs)

    def outputs(self, cotangent: Any) -> jax.Array:
        groups, _, outputs = self.matrix.out_shape
        return jnp.transpose(cotangent, self.order).reshape(groups, self.rows, outputs)


def dense_call(
    dimension_numbers: Any, kernel: int, kernel_shape: Any, data_shape: Any
) -> DenseCall:
    """Describe a ``dot_general`` whose operand number ``kernel`` is the kernel."""
    contract, batch = dimension_numbers
    own, other = (0, 1) if kernel == 0 else (1, 0)
    k_contract, x_contract = tuple(contract[own]), tuple(contract[other])
    k_batch, x_batch = tuple(batch[own]), tuple(batch[other])
    k_free = _rest(len(kernel_shape), k_contract + k_batch)
    x_free = _rest(len(data_shape), x_contract + x_batch)
    size = lambda shape, axes: math.prod(shape[a] for a in axes)
    groups, inputs = size(kernel_shape, k_batch), size(kernel_shape, k_contract)
    view = View(tuple(kernel_shape)).transpose(k_batch + k_contract + k_free)
    batches = [((f"g{i}", kernel_shape[a]),) for i, a in enumerate(k_batch)]
    outs = [((f"o{i}", kernel_shape[a]),) for i, a in enumerate(k_free)]
    rows = [(("r", data_shape[a]),) for a in x_free]
    dims = batches + (outs + rows if kernel == 0 else rows + outs)
    # Groups first, then rows, then outputs.
    order = sorted(range(len(dims)), key=lambda i: "gro".index(dims[i][0][0][0]))
    return DenseCall(
        kernel=kernel,
        matrix=view.reshape(groups, inputs, size(kernel_shape, k_free)),
        rows=size(data_shape, x_free),
        axes=tuple(dims),
        permutation=x_batch + x_free + x_contract,
        order=tuple(order),
    )


@dataclasses.dataclass(frozen=True)
class ConvCall:
    """A convolution; see :class:`Call`.

    The columns of the rows stand in the kernel's own order of its axes, its output axis aside.
    """

    matrix: View
    rows: int
    axes: Axes
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    groups: int
    kernel: int = 1
    kind: str = "conv"

    @property
    def positions(self) -> int:
        """Output positions of one example."""
        return math.prod(self.out_shape[a] for a in self.out_spec[2:])

    def patches(self, data: Any) -> jax.Array:
        """Return ``(examples, *out positions, groups, inputs)``."""
        x = jnp.transpose(data, (self.lhs_spec[0], *self.lhs_spec[2:], self.lhs_spec[1]))
        low_high = zip(self.padding, self.lhs_dilation, strict=True)
        pads = [(0, 0, 0), *((lo, hi, d - 1) for (lo, hi), d in low_high), (0, 0, 0)]
        x = lax.pad(x, jnp.zeros((), x.dtype), pads)
        window = [self.kernel_shape[a] for a in self.rhs_spec[2:]]
        out = [self.out_shape[a] for a in self.out_spec[2:]]

        def shifted(offset: tuple[int, ...]) -> jax.Array:
            # A slice for each place in the kernel: the built-in patches are a convolution, and slow.
            start = [o * d for o, d in zip(offset, self.rhs_dilation, strict=True)]
            stop = [
                s + (n - 1) * stride + 1
                for s, n, stride in zip(start, out, self.strides, strict=True)
            ]
            return lax.slice(
                x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *self.strides, 1)
            )

        offsets = [()]
        for size in window:
            offsets = [(*done, i) for done in offsets for i in range(size)]
        each = x.shape[-1] // self.groups
        places = jnp.stack([shifted(offset) for offset in offsets], axis=1 + len(out))
        shape = (x.shape[0], *out, *window, self.groups, each)
        rank = 1 + len(out)
        # Behind the positions: the kernel's axes in its own order, its output axis aside.
        at = {self.rhs_spec[1]: rank + len(window) + 1}
        at |= {axis: rank + i for i, axis in enumerate(self.rhs_spec[2:])}
        own = [at[axis] for axis in sorted(at)]
        order = (*range(rank), rank + len(window), *own)
        whole = jnp.transpose(places.reshape(shape), order)
        return whole.reshape(x.shape[0], *out, self.groups, -1)

    def inputs(self, data: Any) -> jax.Array:
        patches = self.patches(data)
        return jnp.moveaxis(patches.reshape(self.rows, self.groups, -1), 1, 0)

    def outputs(self, cotangent: Any) -> jax.Array:
        g = jnp.transpose(cotangent, (self.out_spec[0], *self.out_spec[2:], self.out_spec[1]))
        return jnp.moveaxis(g.reshape(self.rows, self.groups, -1), 1, 0)


def conv_call(params: Any, kernel_shape: Any, out_shape: Any) -> ConvCall | str:
    """Describe a ``conv_general_dilated``, or say why it can't be a layer."""
    if params["batch_group_count"] != 1:
        return "a convolution with batch_group_count"
    numbers = params["dimension_numbers"]
    lhs, rhs, out = tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)
    groups = params["feature_group_count"]
    channels = kernel_shape[rhs[0]]
    split = list(kernel_shape)
    split[rhs[0] : rhs[0] + 1] = [groups, channels // groups]
    rest = [a if a < rhs[0] else a + 1 for a in range(len(kernel_shape)) if a != rhs[0]]
    view = View(tuple(kernel_shape)).reshape(*split).transpose((rhs[0], *rest, rhs[0] + 1))
    rows = math.prod(out_shape[a] for a in (out[0], *out[2:]))
    dims: list[Any] = [(("r", size),) for size in out_shape]
    dims[out[1]] = (("g0", groups), ("o0", channels // groups))
    return ConvCall(
        matrix=view.reshape(groups, -(-math.prod(kernel_shape) // channels), channels // groups),
        rows=rows,
        axes=tuple(dims),
        strides=tuple(params["window_strides"]),
        padding=tuple((int(lo), int(hi)) for lo, hi in params["padding"]),
        lhs_dilation=tuple(params["lhs_dilation"]),
        rhs_dilation=tuple(params["rhs_dilation"]),
        lhs_spec=lhs,
        rhs_spec=rhs,
        out_spec=out,
        kernel_shape=tuple(kernel_shape),
        out_shape=tuple(out_shape),
        groups=groups,
    )


@dataclasses.dataclass(frozen=True)
class GatherCall:
    """A look-up of whole rows of a table; see :class:`Call`."""

    matrix: View
    rows: int
    axes: Axes
    order: tuple[int, ...]
    axis: int
    table_shape: tuple[int, ...]
    dimension_numbers: Any
    mode: Any
    kernel: int = 0
    kind: str = "embedding"

    def inputs(self, data: Any) -> jax.Array:
        return self.counts(data, None)

    def counts(self, data: Any, used: jax.Array | None) -> jax.Array:
        """Return how often each row of the table is looked up, ``(1, inputs)``.

        ``used`` ``(1, rows)`` tells which of the look-ups count; None: all.
        """
        shape = [1] * len(self.table_shape)
        shape[self.axis] = self.table_shape[self.axis]
        # The transpose of a look-up counts, with the look-up's own rule for indices out of range.
        found, count = jax.vjp(lambda table: self._look_up(table, data), jnp.zeros(shape))
        ones = jnp.ones_like(found) if used is None else used.reshape(found.shape)
        return count(ones.astype(found.dtype))[0].reshape(1, -1).astype(jnp.float32)

    def gradient(self, data: Any, cotangent: Any) -> jax.Array:
        """Return the table's gradient, ``(1, inputs, outputs)``."""
        table = jnp.zeros(self.table_shape, cotangent.dtype)
        _, pull = jax.vjp(lambda table: self._look_up(table, data), table)
        return self.matrix.apply(pull(cotangent)[0])

    def _look_up(self, table: jax.Array, data: Any) -> jax.Array:
        sizes = list(table.shape)
        sizes[self.axis] = 1
        return lax.gather(
            table,
            data,
            self.dimension_numbers,
            slice_sizes=tuple(sizes),
            mode=self.mode,
            fill_value=0,
        )

    def outputs(self, cotangent: Any) -> jax.Array:
        _, _, outputs = self.matrix.out_shape
        return jnp.transpose(cotangent, self.order).reshape(1, self.rows, outputs)


def gather_call(params: Any, table_shape: Any, out_shape: Any) -> GatherCall | str:
    """Describe a ``gather`` from a table, or say why it can't be an embedding."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    start, collapsed = tuple(numbers.start_index_map), tuple(numbers.collapsed_slice_dims)
    # Along axes that are taken whole, a start can only be 0.
    cut = [a for a in range(len(table_shape)) if sizes[a] != table_shape[a]]
    axis = cut[0] if cut else start[0]
    rest = _rest(len(table_shape), (axis,))
    whole_rows = len(cut) <= 1 and sizes[axis] == 1 and axis in start and set(collapsed) <= {axis}
    if not whole_rows or tuple(numbers.operand_batching_dims):
        return "in a gather of something else than whole rows"
    kept = [a for a in range(len(table_shape)) if a not in collapsed]
    offsets = tuple(place for a, place in zip(kept, numbers.offset_dims, strict=True) if a != axis)
    rows = _rest(len(out_shape), offsets)
    dims: list[Any] = [(("r", size),) for size in out_shape]
    for i, place in enumerate(offsets):
        dims[place] = ((f"o{i}", out_shape[place]),)
    view = View(tuple(table_shape)).transpose((axis, *rest))
    width = math.prod(table_shape[a] for a in rest)
    return GatherCall(
        matrix=view.reshape(1, table_shape[axis], width),
        rows=math.prod(out_shape[a] for a in rows),
        axes=tuple(dims),
        order=(*rows, *offsets),
        axis=axis,
        table_shape=tuple(table_shape),
        dimension_numbers=numbers,
        mode=params["mode"],
    )


def _rest(rank: int, taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a for a in range(rank) if a not in taken)
