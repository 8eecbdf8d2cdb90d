"""Which axes of a parameter are inputs of its layer, read from a tree's paths and shapes.

Flax's layers share one layout, whatever the library (linen, nnx):

==================  =========================  ==================  ==============
layer               kernel                     bias                input axes
==================  =========================  ==================  ==============
Dense, Linear       (in, out)                  (out,)              0
Conv, 1d to 3d      (space.., in/groups, out)  (out,)              all but the last
ConvTranspose       (space.., in, out)         (out,)              all but the last
.. transpose_kernel (space.., out, in)         (out,)              all but the last but one
DenseGeneral        (in.., out..)              (out..)             those before out..
query, key, value   (in, heads, size)          (heads, size)       0
attention's out     (heads, size, out)         (out,)              0, 1
stacked by scan     (layer, in, out)           (layer, out)        1: each layer for itself
==================  =========================  ==================  ==============

The bias beside a kernel tells the output axes; the module's name and what surrounds the layer
settle the rest. Every reading that fits is collected, and a leaf counts as read only when they
agree: a wrong guess would mix heads, or layers, without anyone noticing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from boostax.updates._layer_readings import (
    Option,
    Shape,
    layer_readings,
    likely,
    square_window,
)

__all__ = ["LayerAxes", "Shape", "read_layers"]

Kind = Literal["conv", "dense", "conv or dense", "none", "unreadable"]


class LayerAxes(NamedTuple):
    """What one leaf is.

    Attributes:
      kind: ``"conv"``, ``"dense"``, ``"conv or dense"`` (axes known, which of both is not),
        ``"none"`` (not a layer's weight) or ``"unreadable"``.
      axes: the input axes; empty for ``"none"`` and ``"unreadable"``.
      reason: how that was read, or why not.
    """

    kind: Kind
    axes: tuple[int, ...]
    reason: str


_VECTORS = {"bias", "b", "scale", "gamma", "beta", "offset"}
_ATTENTION = {"query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj"}
_ATTENTION_OUT = {"out", "o", "o_proj", "out_proj"}
_WEIGHT = re.compile(r"^(?P<before>.*?)(kernel|weights?|w)(?P<after>.*)$", re.IGNORECASE)
_BIAS = re.compile(r"^(?P<before>.*?)(bias|b)(?P<after>.*)$", re.IGNORECASE)


def read_layers(shapes: Mapping[str, Shape]) -> dict[str, LayerAxes]:
    """Read every leaf of a parameter tree.

    Args:
      shapes: path (``"Dense_0/kernel"``) to shape, of all the leaves of one tree.

    Returns:
      Path to :class:`LayerAxes`, in the same order.

    Example:
      >>> tree = {"Conv_0/bias": (8,), "Conv_0/kernel": (3, 3, 4, 8), "Embed_0/embedding": (9, 4)}
      >>> {path: read.axes for path, read in read_layers(tree).items()}
      {'Conv_0/bias': (), 'Conv_0/kernel': (0, 1, 2), 'Embed_0/embedding': ()}
    """
    return _Tree(shapes).read()


class _Tree:
    """The leaves of one tree, with look-ups by module."""

    def __init__(self, shapes: Mapping[str, Shape]):
        self.shapes = {path: tuple(shape) for path, shape in shapes.items()}
        self.modules: dict[tuple[str, ...], dict[str, Shape]] = {}
        for path, shape in self.shapes.items():
            module, leaf = _split(path)
            self.modules.setdefault(module, {})[leaf] = shape
        self.children: dict[tuple[str, ...], set[str]] = {}
        for module in self.modules:
            for depth in range(len(module)):
                self.children.setdefault(module[:depth], set()).add(module[depth])

    def read(self) -> dict[str, LayerAxes]:
        found: dict[str, LayerAxes] = {}
        stacks: dict[tuple[str, ...], set[tuple[int, ...]]] = dict(self._norm_stacks())
        kernels = {}
        for path, shape in self.shapes.items():
            module, leaf = _split(path)
            if (plain := _not_a_weight(leaf, shape)) is not None:
                found[path] = plain
            elif leaf == "kernel":
                kernels[path] = list(self._options(module, shape))
                if len(here := {option.stack for option in kernels[path]}) == 1:
                    stacks.setdefault(module, set()).update(here)
        for path, options in kernels.items():
            found[path] = self._decide(path, options, stacks)
        found.update(self._free_weights([path for path in self.shapes if path not in found]))
        return {path: found[path] for path in self.shapes}

    # What a kernel can be, by its own shape, its bias and its name.

    def _options(self, module: tuple[str, ...], shape: Shape) -> Iterator[Option]:
        bias = self.modules[module].get("bias")
        hint = self._hint(module)
        rank = len(shape)
        for stack in ((), (0,), (0, 1), (1,), (rank - 1,)):
            if len(set(stack)) < len(stack) or rank - len(stack) < 2:
                continue
            kept = tuple(axis for axis in range(rank) if axis not in stack)
            base = tuple(shape[axis] for axis in kept)
            rest = bias
            if bias is not None and stack:
                # A stack at the last axis of the kernel is at the last axis of the bias too.
                at = [len(bias) - 1 if axis == rank - 1 else axis for axis in stack]
                if max(at) >= len(bias) or any(
                    bias[i] != shape[j] for i, j in zip(at, stack, strict=True)
                ):
                    continue
                rest = tuple(size for axis, size in enumerate(bias) if axis not in at)
            for kind, axes in layer_readings(hint, base, rest):
                yield Option(stack, kind, tuple(kept[axis] for axis in axes))

    def _hint(self, module: tuple[str, ...]) -> str | None:
        """Return what the module's name says of the layer, or None."""
        if not module:
            return None
        name = re.sub(r"_?\d+$", "", module[-1]).lower()
        siblings = {sibling.lower() for sibling in self.children.get(module[:-1], ())}
        around = "".join(module[-2:-1]).lower()
        in_attention = len(_ATTENTION & siblings) >= 2 or "attention" in around or "attn" in around
        if name in _ATTENTION and in_attention:
            return "attention"
        if name in _ATTENTION_OUT and in_attention:
            return "attention out"
        if "convlocal" in name:
            return "local"
        if "conv" in name:
            return "transposed" if "transpose" in name or "deconv" in name else "conv"
        if name in {"dense", "linear", "fc"}:
            return "dense"
        if name in {"densegeneral", "dense_general", "lineargeneral", "linear_general", "einsum"}:
            return "general"
        return None

    # What the surroundings say of stacked layers.

    def _norm_stacks(self) -> Iterator[tuple[tuple[str, ...], set[tuple[int, ...]]]]:
        """Yield module and stack of normalisation layers and embeddings, whose rank is known."""
        for module, leaves in self.modules.items():
            if any(leaf not in _VECTORS | {"embedding"} for leaf in leaves):
                continue
            ranks = {len(shape) - (leaf == "embedding") for leaf, shape in leaves.items()}
            if ranks == {1}:
                yield module, {()}
            elif ranks == {2} and (axis := self._shared_axis(module[:-1])) is not None:
                yield module, {(axis,)}

    def _shared_axis(self, scope: tuple[str, ...]) -> int | None:
        """Return the axis (0, then 1) that has one size in all leaves below ``scope``."""
        below = [
            shape
            for module, leaves in self.modules.items()
            if module[: len(scope)] == scope
            for shape in leaves.values()
        ]
        for axis in (0, 1):
            if len({shape[axis] if axis < len(shape) else -1 for shape in below}) == 1:
                return axis
        return None

    @staticmethod
    def _stack_around(
        module: tuple[str, ...], stacks: Mapping[tuple[str, ...], set[tuple[int, ...]]]
    ) -> tuple[int, ...] | None:
        """Return the stack of the nearest scope whose other layers agree on one, or None."""
        for depth in range(len(module) - 1, -1, -1):
            near = [
                stack
                for other, seen in stacks.items()
                if other != module and other[:depth] == module[:depth]
                for stack in seen
            ]
            if near:
                return near[0] if len(set(near)) == 1 else None
        return None

    # The decision.

    def _decide(
        self,
        path: str,
        options: list[Option],
        stacks: Mapping[tuple[str, ...], set[tuple[int, ...]]],
    ) -> LayerAxes:
        module, _ = _split(path)
        shape, bias = self.shapes[path], self.modules[module].get("bias")
        hint = self._hint(module)
        shown = f"kernel {shape}" + (f", bias {bias}" if bias is not None else ", no bias")
        if not options:
            return LayerAxes("unreadable", (), f"{shown} fits no layer of Flax")
        around = self._stack_around(module, stacks)
        if len({option.axes for option in options}) > 1 and around is not None:
            options = [option for option in options if option.stack == around] or options
        if len({option.axes for option in options}) > 1:
            options = likely(options, hint, len(shape), bias, around)
        if around == () and len({option.axes for option in options}) > 1:
            options = square_window(options, shape) or options
        if len({option.axes for option in options}) > 1:
            ways = sorted({option.axes for option in options})
            return LayerAxes("unreadable", (), f"{shown}: input axes could be {_either(ways)}")
        kinds = {option.kind for option in options}
        kind: Any = kinds.pop() if len(kinds) == 1 else "conv or dense"
        stack = next(iter({option.stack for option in options})) if options[0].stack else ()
        reason = shown + (f", layers stacked at axis {', '.join(map(str, stack))}" if stack else "")
        if hint == "transposed" and (bias is None or shape[-1] == shape[-2]):
            reason += ", read with transpose_kernel=False"
        return LayerAxes(kind, options[0].axes, reason)

    def _free_weights(self, paths: list[str]) -> dict[str, LayerAxes]:
        """Read leaves of other names, whose layout only a bias beside them can tell."""
        found, open_, votes = {}, {}, {}
        for path in paths:
            shape = self.shapes[path]
            leaf = _split(path)[1]
            bias = self._bias_beside(path)
            if bias is None:
                found[path] = LayerAxes(
                    "unreadable", (), f"{leaf} {shape} is no kernel and has no bias beside it"
                )
                continue
            stack = (0,) if len(bias) == 2 and len(shape) > 2 and shape[0] == bias[0] else ()
            axes = range(len(stack), len(shape))
            ways = {}
            if bias[len(stack) :] == shape[-1:]:
                ways["last"] = tuple(axes[:-1])
            if bias[len(stack) :] == (shape[axes[0]],):
                ways["first"] = tuple(axes[1:])
            kind: Kind = "dense" if len(axes) == 2 else "conv"
            shown = f"{leaf} {shape}, bias {bias}"
            if len(ways) == 1:
                side, inputs = next(iter(ways.items()))
                votes.setdefault(_stem(leaf), set()).add(side)
                found[path] = LayerAxes(kind, inputs, f"{shown}, output axis is the {side}")
            else:
                open_[path] = (kind, ways, shown)
        for path, (kind, ways, shown) in open_.items():
            # A square weight is laid out as its namesakes are.
            sides = votes.get(_stem(_split(path)[1]), set()) & set(ways)
            if len(sides) == 1 and len(votes[_stem(_split(path)[1])]) == 1:
                side = next(iter(sides))
                found[path] = LayerAxes(
                    kind, ways[side], f"{shown}, output axis is the {side}, as in its namesakes"
                )
            else:
                why = f"input axes could be {_either(sorted(ways.values()))}" if ways else "no fit"
                found[path] = LayerAxes("unreadable", (), f"{shown}: {why}")
        return found

    def _bias_beside(self, path: str) -> Shape | None:
        module, leaf = _split(path)
        others = {name: shape for name, shape in self.modules[module].items() if name != leaf}
        if (weight := _WEIGHT.match(leaf)) is not None:
            for name, shape in others.items():
                bias = _BIAS.match(name)
                if bias is not None and bias.groupdict() == weight.groupdict():
                    return shape
        # A pair (w, b) in a tuple, the form of JAX's own tutorials.
        if leaf.isdigit() and len(others) == 1:
            shape = next(iter(others.values()))
            return shape if len(shape) < len(self.shapes[path]) else None
        return None


def _split(path: str) -> tuple[tuple[str, ...], str]:
    *module, leaf = path.split("/")
    return tuple(module), leaf


def _stem(leaf: str) -> str:
    return re.sub(r"\d+", "", leaf)


def _either(ways: list[tuple[int, ...]]) -> str:
    return " or ".join(str(way) for way in ways)


def _not_a_weight(leaf: str, shape: Shape) -> LayerAxes | None:
    if len(shape) < 2:
        return LayerAxes("none", (), "scalar" if not shape else "vector")
    if leaf in _VECTORS:
        return LayerAxes("none", (), f"{leaf}: a vector, stacked or of several axes")
    if leaf != "kernel" and "embed" in leaf.lower():
        return LayerAxes("none", (), "embedding")
    if leaf in {"lora_a", "lora_b"} and len(shape) == 2:
        return LayerAxes("dense", (0,), f"{leaf} {shape}")
    if leaf != "kernel" and sum(size != 1 for size in shape) < 2 and not _WEIGHT.fullmatch(leaf):
        return LayerAxes("none", (), f"a vector in the shape {shape}")
    return None
