"""Which leaves form one layer, and in which order layers come when nobody says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from boostax._tree import natural_key

# Vectors under these names rescale or shift what the layer before them gave out: a norm, a bias.
_NORM_NAMES = frozenset({"scale", "bias", "b", "gamma", "beta", "offset"})
_NUMBERED = re.compile(r"(.*?)_?(\d+)\Z")


@dataclasses.dataclass(frozen=True)
class Layer:
    """Leaves that are trained or frozen together.

    Attributes:
      name: the module path, or the leaf's own name at the root.
      paths: its leaves, in forward order.
    """

    name: str
    paths: tuple[str, ...]


def split_layers(paths: Sequence[str], ranks: Mapping[str, int]) -> tuple[Layer, ...]:
    """Gather leaves, given in forward order, into layers.

    A layer is a module with its direct leaves. A module that holds nothing but vectors called scale,
    bias, gamma or the like is a norm and joins the layer before it; one that comes first joins the
    layer after it. At the root, leaves ``w1`` and ``b1`` belong together by their number, and a
    vector joins the matrix before it, unless it is numbered in the same series.
    """
    keys = {path: _layer_key(path, paths) for path in paths}
    members: dict[str, list[str]] = {}
    for path in paths:
        members.setdefault(keys[path], []).append(path)
    layers: list[Layer] = []
    leading: list[str] = []
    for key, own in members.items():
        before = layers[-1].paths if layers else ()
        if not _is_appendage(own, before, ranks):
            layers.append(Layer(key, tuple(leading + own)))
            leading = []
        elif layers:
            layers[-1] = Layer(layers[-1].name, (*before, *own))
        else:
            leading += own
    if leading:  # nothing but norms: each stands alone
        layers = [Layer(key, tuple(own)) for key, own in members.items()]
    return tuple(layers)


def natural_order(paths: Sequence[str]) -> tuple[str, ...]:
    """Sort leaves by number where that is surely the forward order, or raise a ValueError."""
    children: dict[str, set[str]] = {}
    leaves = set(paths)
    for path in paths:
        parts = path.split("/")
        for depth in range(len(parts)):
            parent, child = "/".join(parts[:depth]), "/".join(parts[: depth + 1])
            # The leaves within one module are one layer; their order does not matter.
            if child not in leaves or not parent:
                children.setdefault(parent, set()).add(parts[depth])
    for parent, names in children.items():
        if len(names) < 2 or _one_series(names):
            continue
        where = f"in {parent!r}" if parent else "at the top"
        raise ValueError(
            f"parameter_groups: the forward order can't be told from the names {where}: "
            f"{', '.join(sorted(names, key=natural_key))}. JAX walks them alphabetically, which is "
            "not the order in which the network uses them. Pass "
            "order=boostax.forward_order(loss_fn, params, batch), or a sequence of leaf paths"
        )
    return tuple(sorted(paths, key=natural_key))


def _one_series(names: set[str]) -> bool:
    found = [_NUMBERED.match(name) for name in names]
    return all(found) and len({m.group(1) for m in found if m}) == 1


def _layer_key(path: str, paths: Sequence[str]) -> str:
    module, _, name = path.rpartition("/")
    if module:
        return module
    match = _NUMBERED.match(name)
    if match is None:
        return name
    same_number = [
        other
        for p in paths
        if "/" not in p and (other := _NUMBERED.match(p)) and other[2] == match[2]
    ]
    return match[2] if len(same_number) > 1 else name


def _is_appendage(own: Sequence[str], before: Sequence[str], ranks: Mapping[str, int]) -> bool:
    if any(ranks[path] > 1 for path in own):
        return False
    names = {path.rpartition("/")[2] for path in own}
    if "/" in own[0] or names & _NORM_NAMES:
        return names <= _NORM_NAMES
    # A list [W1, b1, W2, b2] at the root.
    return (
        all(name.isdigit() for name in names)
        and any(ranks[path] > 1 for path in before)
        and not any("/" in path for path in before)
    )
