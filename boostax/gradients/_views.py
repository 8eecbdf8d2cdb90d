"""A parameter leaf seen in another layout, and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp

__all__ = ["View"]

Step = tuple[Literal["reshape", "transpose", "rev"], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class View:
    """A rearrangement of a leaf's elements that loses none and repeats none.

    Attributes:
      shape: the leaf's shape.
      steps: what is done to it, first to last: ``("reshape", new shape)``, ``("transpose",
        permutation)`` or ``("rev", axes)``.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape before the first step, and after each."""
        shapes = [self.shape]
        for kind, argument in self.steps:
            last = shapes[-1]
            if kind == "reshape":
                shapes.append(argument)
            elif kind == "transpose":
                shapes.append(tuple(last[axis] for axis in argument))
            else:
                shapes.append(last)
        return tuple(shapes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape that the leaf is seen in."""
        return self.shapes[-1]

    def reshape(self, *shape: int) -> View:
        """Return this view with a reshape behind it."""
        if math.prod(shape) != math.prod(self.out_shape):
            raise ValueError(f"can't see {self.out_shape} as {shape}")
        return self if shape == self.out_shape else self._then("reshape", shape)

    def transpose(self, permutation: tuple[int, ...]) -> View:
        """Return this view with a transposition behind it."""
        same = permutation == tuple(range(len(permutation)))
        return self if same else self._then("transpose", permutation)

    def rev(self, axes: tuple[int, ...]) -> View:
        """Return this view with axes reversed behind it."""
        return self._then("rev", axes) if axes else self

    def stacked(self, length: int) -> View:
        """Return the view of ``length`` such leaves, stacked along a new first axis."""
        steps: list[Step] = []
        for kind, argument in self.steps:
            if kind == "reshape":
                steps.append((kind, (length, *argument)))
            else:
                moved = tuple(axis + 1 for axis in argument)
                steps.append((kind, (0, *moved) if kind == "transpose" else moved))
        return View((length, *self.shape), tuple(steps))

    def apply(self, leaf: Any, numpy: Any = jnp) -> Any:
        """Return the leaf as it is seen; ``numpy`` is the library that rearranges it."""
        for kind, argument in self.steps:
            change = {"reshape": numpy.reshape, "transpose": numpy.transpose, "rev": numpy.flip}
            leaf = change[kind](leaf, argument)
        return leaf

    def undo(self, seen: Any) -> Any:
        """Return the leaf that is seen so."""
        for (kind, argument), shape in zip(
            reversed(self.steps), reversed(self.shapes[:-1]), strict=True
        ):
            if kind == "reshape":
                seen = jnp.reshape(seen, shape)
            elif kind == "transpose":
                inverse = sorted(range(len(argument)), key=argument.__getitem__)
                seen = jnp.transpose(seen, inverse)
            else:
                seen = jnp.flip(seen, argument)
        return seen

    def _then(self, kind: Literal["reshape", "transpose", "rev"], argument: Any) -> View:
        return View(self.shape, (*self.steps, (kind, tuple(argument))))
