"""Which leaves a basis covers: names, shapes, and what is left out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import PathPattern, check_matched, leaf_paths, matches
from boostax.errors import did_you_mean

__all__ = ["Layout", "layout_of", "match", "nested"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of the parameters, in tree order, and those that a basis covers.

    Attributes:
      paths: the name of every leaf.
      shapes: its shape.
      dtypes: its dtype's name.
      covered: whether the basis covers it.
      treedef: the parameters' structure.
    """

    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    covered: tuple[bool, ...]
    treedef: Any

    @property
    def covered_paths(self) -> tuple[str, ...]:
        """The names of the covered leaves, in tree order."""
        return self.only(self.paths)

    @property
    def covered_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the covered leaves, in tree order."""
        return self.only(self.shapes)

    @property
    def size(self) -> int:
        """The number of weights that the basis covers."""
        return sum(int(np.prod(shape)) for shape in self.covered_shapes)

    def only(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the covered leaves' part of something that has one value for every leaf."""
        return tuple(v for v, taken in zip(values, self.covered, strict=True) if taken)

    def fill(self, values: Sequence[Any], others: Sequence[Any]) -> Any:
        """Return a tree with ``values`` at the covered leaves, and ``others`` at the rest."""
        left = iter(values)
        merged = [
            next(left) if taken else other
            for taken, other in zip(self.covered, others, strict=True)
        ]
        return self.treedef.unflatten(merged)


def layout_of(caller: str, tree: Any, exclude: Iterable[PathPattern]) -> Layout:
    """Read a layout from parameters: arrays, or anything with a shape and a dtype.

    Raises:
      ValueError: a pattern matches nothing, two leaves have one name, a leaf is complex, or
        nothing is left to cover.
    """
    paths, leaves = leaf_paths(tree), jax.tree.leaves(tree)
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(
            f"{caller}: two leaves have the name {twice!r}; give them names of their own"
        )
    single = isinstance(exclude, (str, re.Pattern)) or callable(exclude)
    patterns: tuple[Any, ...] = (exclude,) if single else tuple(exclude)
    for pattern in patterns:
        check_matched(f"{caller}: exclude", pattern, paths)
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, "dtype"):
            raise ValueError(f"{caller}: the leaf {path} is a {type(leaf).__name__}, no array")
    left_out = [any(matches(pattern, path) for pattern in patterns) for path in paths]
    for path, leaf, out in zip(paths, leaves, left_out, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating) and not out:
            raise ValueError(
                f"{caller}: the leaf {path} is complex, which a basis can't cover; exclude it, or "
                "split it into its real and imaginary part"
            )
    covered = tuple(
        not out and jnp.issubdtype(leaf.dtype, jnp.floating)
        for leaf, out in zip(leaves, left_out, strict=True)
    )
    layout = Layout(
        paths=paths,
        shapes=tuple(tuple(leaf.shape) for leaf in leaves),
        dtypes=tuple(str(leaf.dtype) for leaf in leaves),
        covered=covered,
        treedef=jax.tree.structure(tree),
    )
    if not layout.size:
        raise ValueError(
            f"{caller}: no floating-point leaf is left to cover. Leaves: "
            + ", ".join(f"{p} {d}" for p, d in zip(paths, layout.dtypes, strict=True))
        )
    return layout


def match(
    where: str, named: Mapping[str, Any], layout: Layout, *, extra_ok: bool = False
) -> list[Any]:
    """Return the covered leaves of ``named`` in the layout's order.

    Args:
      where: what the leaves belong to, for the message.
      named: leaves by name.
      layout: the names and shapes that are wanted.
      extra_ok: whether leaves that the layout lacks are passed over. Default False.

    Raises:
      ValueError: a leaf is missing, is one too many, or has another shape.
    """
    wanted = layout.covered_paths if extra_ok else layout.paths
    missing = [path for path in wanted if path not in named]
    extra = [] if extra_ok else [path for path in named if path not in set(layout.paths)]
    if missing or extra:
        hint = did_you_mean(missing[0], extra or named) if missing else ""
        parts = [f"lacks the leaves {', '.join(missing)}"] if missing else []
        parts += [f"has leaves that the others lack: {', '.join(extra)}"] if extra else []
        raise ValueError(f"{where} {' and '.join(parts)}.{hint}")
    for path, shape in zip(layout.covered_paths, layout.covered_shapes, strict=True):
        got = tuple(np.shape(named[path]))
        if got != shape:
            raise ValueError(f"{where}: the leaf {path} has shape {got}, expected {shape}")
    return [named[path] for path in layout.covered_paths]


def nested(named: Mapping[str, Any]) -> Any:
    """Return nested dicts from leaves named like ``"Dense_0/kernel"``; one nameless leaf is bare.

    Example:
      >>> nested({"a/b": 1, "a/c": 2})
      {'a': {'b': 1, 'c': 2}}
    """
    if list(named) == [""]:
        return named[""]
    tree: dict[str, Any] = {}
    for path, leaf in named.items():
        *folders, last = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                raise ValueError(f"the leaf {path!r} lies below another leaf")
        if last in inner:
            raise ValueError(f"the leaf {path!r} has the name of another leaf, or of their folder")
        inner[last] = leaf
    return tree
