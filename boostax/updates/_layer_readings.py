"""The ways to read one kernel of Flax: which layer fits its name, shape and bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Option", "Shape", "layer_readings", "likely", "square_window"]

Shape = tuple[int, ...]


class Option(NamedTuple):
    """One way to read a kernel: the axes of stacked layers, and what remains."""

    stack: tuple[int, ...]
    kind: str
    axes: tuple[int, ...]


def layer_readings(
    hint: str | None, base: Shape, bias: Shape | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield kind and input axes of every unstacked layer that fits name, shape and bias."""
    rank = len(base)
    inputs = tuple(range(rank))
    if bias is not None and not bias:
        return
    ends_with_bias = bias is None or bias == base[-len(bias) :]
    if hint == "local":
        # Unshared convolution: every position has its own units. (position.., in, out).
        if rank > 2 and (bias is None or bias == base[:-2] + base[-1:]):
            yield "conv", (rank - 2,)
        return
    if rank == 2:
        if hint not in {"conv", "transposed"} and (bias is None or len(bias) == 1):
            if ends_with_bias:
                yield "dense", (0,)
            elif bias == base[:1]:
                yield "dense", (1,)
        return
    if hint in {"conv", "transposed", None} and rank <= 5 and (bias is None or len(bias) == 1):
        if ends_with_bias:
            yield "conv", inputs[:-1]
        elif bias == base[-2:-1]:
            yield "conv", (*inputs[:-2], rank - 1)
    if hint in {"general", "attention", "attention out", None}:
        if bias is not None:
            if ends_with_bias and len(bias) < rank:
                yield "dense", inputs[: rank - len(bias)]
        elif hint == "attention":
            yield "dense", (0,)
        elif hint == "attention out":
            yield "dense", inputs[:-1]
        else:
            yield from (("dense", inputs[:split]) for split in range(1, rank))


def likely(
    options: list[Option],
    hint: str | None,
    rank: int,
    bias: Shape | None,
    around: tuple[int, ...] | None,
) -> list[Option]:
    """Drop the readings that need something unusual that nothing speaks for."""
    leading = [option for option in options if option.stack in {(), (0,), (0, 1)}]
    options = leading or options
    unstacked = [option for option in options if not option.stack]
    if hint in {"attention", "attention out"}:
        # Three axes are (in, heads, size): one layer. A fourth is the stack.
        return [o for o in options if rank - len(o.stack) == 3] or options
    if hint == "dense":
        return [o for o in options if rank - len(o.stack) == 2] or options
    if hint in {"conv", "transposed"} and bias is None and (rank < 5 or around == ()):
        return unstacked or options
    if bias is None and around == () and unstacked:
        return unstacked
    return options


def square_window(options: list[Option], shape: Shape) -> list[Option]:
    """Take a small square window, as of 3x3, for a convolution where no layer around is stacked."""
    window = shape[:-2]
    if len(window) >= 2 and len(set(window)) == 1 and window[0] <= 11:
        return [option for option in options if option.kind == "conv"]
    return []
