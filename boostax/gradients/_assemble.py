"""From the calls found in a loss to the layers that get Kronecker factors, and from sums to factors."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from boostax.gradients._blocks import Block, Factors, Side, group_traces
from boostax.gradients._find import Found, Place, Site
from boostax.gradients._tag import Reading
from boostax.gradients._views import View

__all__ = ["Part", "assemble", "to_factors"]

REFERENCE_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Part:
    """One call's part in a layer.

    Attributes:
      place: where the call is.
      layer: the layer's kernel.
      reading: what to read of the call.
      flipped: whether the kernel is used transposed, as that of an embedding in a tied output layer:
        then what the call has as inputs are the layer's outputs.
      rows: rows of one slice in one forward pass.
    """

    place: Place
    layer: str
    reading: Reading
    flipped: bool
    rows: int


def assemble(
    found: Found,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    *,
    block_size: int,
    mode: Literal["default", "reference"],
    weighted: bool = False,
) -> tuple[tuple[Block, ...], tuple[Part, ...], dict[str, str]]:
    """Return the layers in the order of their first call, the calls' parts, and the other leaves.

    Args:
      found: the calls.
      paths: path of each leaf.
      shapes: shape of each leaf.
      block_size: largest number of rows of a piece of a factor.
      mode: ``"reference"``: no column of ones, and pieces of 128.
      weighted: whether rows without any derivative are left out of A.
    """
    of_leaf: dict[int, list[Site]] = collections.defaultdict(list)
    for place in sorted(found.sites):
        of_leaf[found.sites[place].leaf].append(found.sites[place])
    reasons = {leaf: _how(kinds) for leaf, kinds in found.others.items()}
    biases: dict[int, set[int]] = collections.defaultdict(set)
    for site in found.sites.values():
        if site.bias is not None:
            biases[site.bias[0]].add(site.leaf)
    blocks: list[Block] = []
    parts: list[Part] = []
    for leaf, sites in of_leaf.items():
        if leaf in reasons:
            reasons[leaf] = f"used as a {sites[0].call.kind} layer and {reasons[leaf]}"
            continue
        if math.prod(shapes[leaf]) == 1:
            reasons[leaf] = "a single number"
            continue
        base = next((site for site in sites if site.call.kind == "embedding"), sites[0])
        flips = [_orientation(base.view, site.view) for site in sites]
        if None in flips:
            reasons[leaf] = "used by several layers, in layouts that don't fit together"
            continue
        bias = None
        if mode == "default":
            bias = _common_bias(sites, flips, biases, reasons)
        block = _block(base, sites, bias, paths, block_size, mode)
        blocks.append(block)
        for site, flip in zip(sites, flips, strict=True):
            sides = (block.inputs, block.outputs)
            reading = Reading(
                site.call,
                *(sides[::-1] if flip else sides),
                what="factors" if mode == "default" else "reference",
                weighted=weighted and mode == "default",
            )
            parts.append(Part(site.place, block.kernel, reading, bool(flip), site.rows))
    covered = {path for block in blocks for path in block.leaves}
    first = {}
    for index, path in enumerate(paths):
        if path in covered:
            continue
        lone = "the bias of a layer that has no block, or of several layers"
        default = lone if index in biases else "not used in the loss"
        if index in biases and mode == "reference":
            default = "a bias"
        first[path] = reasons.get(index, default)
    return tuple(blocks), tuple(parts), first


def _how(kinds: Sequence[str]) -> str:
    words = {
        "mul": "scales data, as a norm's scale does",
        "add": "added to data, as a bias or shift without a layer of its own",
        "broadcast_in_dim": "broadcast over data",
    }
    return "; ".join(
        words.get(kind, f"used by {kind}" if " " not in kind else kind) for kind in kinds
    )


@functools.lru_cache(maxsize=256)
def _orientation(base: View, view: View) -> bool | None:
    """Say whether a kernel is seen transposed to ``base``; None where the two don't fit together."""
    if base == view:
        return False
    groups, inputs, outputs = base.out_shape
    same, flipped = view.out_shape == base.out_shape, view.out_shape == (groups, outputs, inputs)
    if not same and not flipped:
        return None
    numbers = np.arange(math.prod(base.shape), dtype=np.int64).reshape(base.shape)
    ours, theirs = (seen.apply(numbers, np) for seen in (base, view))
    if same and np.array_equal(ours, theirs):
        return False
    if flipped and np.array_equal(ours, np.swapaxes(theirs, 1, 2)):
        return True
    return None


def _common_bias(
    sites: Sequence[Site],
    flips: Sequence[bool | None],
    biases: Mapping[int, set[int]],
    reasons: Mapping[int, str],
) -> tuple[int, View] | None:
    first = sites[0].bias
    if first is None or any(flips) or any(site.bias != first for site in sites):
        return None
    return first if len(biases[first[0]]) == 1 and first[0] not in reasons else None


def _block(
    base: Site,
    sites: Sequence[Site],
    bias: tuple[int, View] | None,
    paths: Sequence[str],
    block_size: int,
    mode: str,
) -> Block:
    _, inputs, outputs = base.view.out_shape
    inputs += bias is not None
    if mode == "reference":
        cut = lambda size: Side.of(size, REFERENCE_BLOCK, even=False)
    else:
        cut = lambda size: Side.of(size, block_size)
    kind: Any = base.call.kind
    side = Side(inputs, 1, inputs, diagonal=True) if kind == "embedding" else cut(inputs)
    return Block(
        kernel=paths[base.leaf],
        kind=kind,
        view=base.view,
        bias=None if bias is None else paths[bias[0]],
        bias_view=None if bias is None else bias[1],
        inputs=side,
        outputs=cut(outputs),
        uses=sum(site.repeats for site in sites),
        positions=getattr(base.call, "positions", 1),
    )


def to_factors(
    blocks: Sequence[Block],
    parts: Sequence[Part],
    read: Mapping[Place, tuple[jax.Array, ...]],
    weight: jax.Array,
    mode: str = "default",
) -> dict[str, Factors]:
    """Return each layer's factors from the sums that its calls emitted.

    A is the mean over the rows of all calls; G the sum over the rows of an example, averaged over
    examples, with the 1/N of the mean loss undone. Where a call has the kernel transposed, the
    pairs are added as Kronecker products, by the closest one that keeps the traces.

    Args:
      blocks: the layers.
      parts: the calls.
      read: what each call emitted; a call that is absent was not watched.
      weight: N, the loss's weight.
      mode: ``"reference"``: scaled as ``mindspore.nn.thor`` has them on a GPU.
    """
    result = {}
    for block in blocks:
        pairs: list[tuple[Any, Any]] = []
        for flipped in (False, True):
            own = [
                part
                for part in parts
                if part.layer == block.kernel and part.flipped == flipped and part.place in read
            ]
            if not own:
                continue
            rows: Any = sum(part.rows for part in own)
            if own[0].reading.weighted:
                rows = sum(read[part.place][2].reshape(block.groups) for part in own)
            shapes = [shape.shape for shape in block.shapes()]
            inputs, outputs = (
                sum(read[part.place][side].reshape(shape) for part in own)
                for side, shape in enumerate(reversed(shapes) if flipped else shapes)
            )
            if mode == "reference":
                inputs, outputs = _as_reference(block, inputs, outputs, rows)
            else:
                inputs, outputs = _mean(inputs, rows), outputs * weight
            pairs.append((outputs, inputs) if flipped else (inputs, outputs))
        if not pairs:
            result[block.kernel] = jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), block.shapes()
            )
        else:
            result[block.kernel] = Factors(*(pairs[0] if len(pairs) == 1 else _added(*pairs)))
    return result


def _mean(sums: Any, rows: Any) -> jax.Array:
    if isinstance(rows, int):
        return sums / rows
    return _by(1 / jnp.maximum(rows, 1), sums)


def _as_reference(block: Block, inputs: Any, outputs: Any, rows: int) -> tuple[Any, Any]:
    """Divide the sums by what the reference divides by: A of a dense layer by its width."""
    if block.kind == "conv":
        return inputs / block.positions, outputs / block.positions
    if block.kind == "embedding":
        return inputs, outputs / rows
    return inputs / block.inputs.size, outputs / rows


def _added(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Return one pair for the sum of two Kronecker products; each factor has groups first."""
    traces = [[group_traces(factor) for factor in pair] for pair in (first, second)]
    whole = [a * g for a, g in traces]
    total = whole[0] + whole[1]
    shares = [_over(part, total) for part in whole]

    def mixed(side: int) -> tuple[jax.Array, jax.Array]:
        scaled = [
            _by(share, _by(_over(jnp.ones_like(sizes[side]), sizes[side]), pair[side]))
            for share, sizes, pair in zip(shares, traces, (first, second), strict=True)
        ]
        mean = shares[0] * traces[0][side] + shares[1] * traces[1][side]
        return scaled[0] + scaled[1], mean

    inputs, size = mixed(0)
    outputs, _ = mixed(1)
    return _by(size, inputs), _by(_over(total, size), outputs)


def _over(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))


def _by(scale: jax.Array, factor: jax.Array) -> jax.Array:
    return scale.reshape(-1, *[1] * (factor.ndim - 1)) * factor
