"""What is known of each value in a loss's jaxpr while its layers are looked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from boostax.gradients._views import View

__all__ = ["Axes", "Fact", "Leaf", "Made", "Out", "Spread", "regrouped"]

# A dimension as a product of parts, each with its size: rows of a layer ("r"), or one of the axes that
# its groups ("g0", "g1", ...) or outputs ("o0", ...) have.
Part = tuple[str, int]
Axes = tuple[tuple[Part, ...], ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter leaf in another layout; inside a scan over it, one slice of it.

    Attributes:
      index: the leaf's number.
      view: the layout; inside a scan, of the slice.
      outside: for each scan over its slices, outermost first, the layout that it goes over, and
        where the scan is.
    """

    index: int
    view: View
    outside: tuple[tuple[View, tuple[int, ...]], ...] = ()

    @property
    def scans(self) -> tuple[tuple[int, ...], ...]:
        """Where the scans are that go over its slices."""
        return tuple(place for _, place in self.outside)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many slices each of these scans goes over."""
        return tuple(view.out_shape[0] for view, _ in self.outside)

    def seen(self, view: View) -> Leaf:
        """Return the leaf in another layout."""
        return dataclasses.replace(self, view=view)

    def sliced(self, place: tuple[int, ...]) -> Leaf:
        """Return what a scan over the first axis sees of it."""
        inner = View(self.view.out_shape[1:])
        return Leaf(self.index, inner, (*self.outside, (self.view, place)))

    def whole(self, view: View) -> View:
        """Return the layout of the whole leaf, all slices, where the innermost one is ``view``."""
        for before, _ in reversed(self.outside):
            stacked = view.stacked(before.out_shape[0])
            view = View(before.shape, (*before.steps, *stacked.steps))
        return view


@dataclasses.dataclass(frozen=True)
class Spread:
    """A leaf that is broadcast to a larger shape: each axis of its layout has a place in that."""

    leaf: Leaf
    places: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Out:
    """The output of a layer and of nothing else.

    Attributes:
      site: where the layer is.
      axes: what the dimensions are.
      exact: whether shape and order are still those that the layer gave.
    """

    site: tuple[int, ...]
    axes: Axes
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class Made:
    """Anything else.

    Attributes:
      leaves: the parameter leaves that it is made of, while it is made of parameters alone.
      data: whether it depends on the batch.
    """

    leaves: frozenset[int] = frozenset()
    data: bool = False


Fact = Leaf | Spread | Out | Made


def regrouped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the dimensions after a reshape, or None where it cuts through groups or outputs."""
    parts = [part for dim in axes for part in dim if part[1] != 1]
    result: list[tuple[Part, ...]] = []
    for size in shape:
        dim: list[Part] = []
        while size != 1:
            if not parts:
                return None
            kind, length = parts.pop(0)
            if size % length == 0:
                dim.append((kind, length))
                size //= length
            elif kind == "r" and length % size == 0:
                # Rows are all alike, so that their axes may be cut.
                parts.insert(0, (kind, length // size))
                dim.append((kind, size))
                size = 1
            else:
                return None
        result.append(tuple(dim))
    return tuple(result) if not parts else None
