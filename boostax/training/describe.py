"""What a train step does to a model, and what that costs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from boostax import _info
from boostax._tree import path_string
from boostax.training._describe_scaling import (
    ScaleBoundary,
    ScaleGroup,
    group_fates,
    scale_boundaries,
    scale_groups,
    scaling_words,
)
from boostax.training.metrics import OF_DIM_REDUCE, OF_FREEZING, OF_SCALING

__all__ = [
    "Cost",
    "ParameterFate",
    "ScaleBoundary",
    "ScaleGroup",
    "StepDescription",
    "describe_step",
    "format_table",
]

_COMBINED_BY = {
    "step": "the step, as their mean, ahead of tx",
    "window": "the outermost part of tx, as their mean, once a window and for trained leaves only",
    "tx": "the exchange in tx",
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one compiled step costs, as the compiler counts it.

    Attributes:
      name: which step, such as ``"plain"`` or ``"freeze index 3"``.
      flops: floating-point operations of one call.
      bytes: bytes read and written by one call.
      temp_bytes: memory for intermediate values, beside arguments and results.
    """

    name: str
    flops: float
    bytes: float
    temp_bytes: float


@dataclasses.dataclass(frozen=True)
class ParameterFate:
    """One parameter leaf: its path, shape, dtype, and what each technique does to it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    fate: str


@dataclasses.dataclass(frozen=True)
class StepDescription:
    """The answer of ``step.describe(state, batch)``; ``print`` shows it as tables.

    Attributes:
      order: the transformations, outermost first, each with its settings.
      parameters: one :class:`ParameterFate` a leaf, in tree order.
      plain: the cost of the step without boostax's techniques.
      variants: the cost of each compiled variant.
      settings: the step's own settings.
      notes: anything else that is worth knowing.
      scale_groups: one :class:`ScaleGroup` a group of a :class:`boostax.GroupLossScale`.
      scale_boundaries: one :class:`ScaleBoundary` for each place between groups, in the order of
        the loss's program, while all leaves are trained.
    """

    order: tuple[str, ...]
    parameters: tuple[ParameterFate, ...]
    plain: Cost
    variants: tuple[Cost, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    scale_groups: tuple[ScaleGroup, ...] = ()
    scale_boundaries: tuple[ScaleBoundary, ...] = ()

    def __str__(self) -> str:
        lines = ["order (outermost first)"]
        lines += [f"  {i}. {text}" for i, text in enumerate(self.order, 1)]
        lines += ["", "parameters"]
        lines += format_table(
            ("path", "shape", "dtype", "what happens"),
            [
                (p.path, "x".join(map(str, p.shape)) or "-", p.dtype, p.fate)
                for p in self.parameters
            ],
        )
        lines += self._scale_lines()
        lines += ["", "compiled steps (ratios to the plain step)"]
        lines += format_table(
            ("step", "FLOPs", "ratio", "bytes", "ratio", "temp bytes", "ratio"),
            [self._cost_row(cost) for cost in (self.plain, *self.variants)],
        )
        lines += ["", "settings: " + ", ".join(f"{k}={v}" for k, v in self.settings.items())]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _scale_lines(self) -> list[str]:
        if not self.scale_groups:
            return []
        lines = ["", "groups of the loss scale"]
        lines += format_table(
            ("group", "first scale", "leaves"),
            [(str(g.number), f"{g.init:g}", ", ".join(g.leaves)) for g in self.scale_groups],
        )
        lines += ["", "boundaries between them (equations of the loss's jaxpr, forward)"]
        rows = [
            (b.equation, b.before, b.after, b.what, str(b.times)) for b in self.scale_boundaries
        ]
        return lines + format_table(("ahead of", "from", "to", "value", "times"), rows)

    def _cost_row(self, cost: Cost) -> tuple[str, ...]:
        row = [cost.name]
        for field in ("flops", "bytes", "temp_bytes"):
            value, base = getattr(cost, field), getattr(self.plain, field)
            row += [f"{value:.4g}", f"{value / base:.2f}" if base else "-"]
        return tuple(row)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table as plain text lines, columns aligned at the left."""
    cells = [tuple(headers), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    return [
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def describe_step(step: Any, state: Any, batch: Any, extra: Mapping[str, Any]) -> StepDescription:
    """Describe a :class:`boostax.TrainStep`; see its ``describe`` method."""
    abstract = jax.tree.map(_abstract, state)
    batch = jax.tree.map(_abstract, batch)
    freezing = step.settings.freezing
    infos = list(_info.walk(step.tx))
    indices: list[int | None] = [None] if freezing is None else list(range(freezing.num_indices))
    if freezing is not None and not step.dispatches_on_host:
        indices = [None]
    variants = []
    for index, due in itertools.product(indices, (False, True) if step.looks_for_due else (None,)):
        name = "boosted" if index is None else f"freeze index {index}"
        name += ", statistics due" if due else ""
        lowered = step.lower(abstract, batch, index=index, due=due, **extra)
        variants.append(compiled_cost(name, lowered.compile()))
    plain = plain_step(step)
    plain_state = abstract.replace(
        opt_state=plain.abstract_opt_state(abstract.params, extra), window=None, loss_scale=None
    )
    plain_cost = compiled_cost("plain", plain.lower(plain_state, batch, **extra).compile())
    notes = []
    if freezing is not None and indices == [None]:
        notes.append(
            "the freeze schedule is switched inside the compiled step: FLOPs and bytes count all "
            "variants, each call runs one"
        )
    if step.settings.layers is not None and not step.looks_for_due:
        notes.append(
            "the layers' statistics and inverses are computed only when they are due: FLOPs and "
            "bytes count the passes with and without them"
        )
    if freezing is not None:
        notes.append("after the end of the freeze schedule nothing is frozen")
    shown = {"microbatch": step.settings.microbatch, "skip_nonfinite": step.settings.skip_nonfinite}
    scaling = step.settings.loss_scale
    if scaling is not None:
        shown["loss_scale"] = scaling_words(scaling)
    replicas = step.settings.replicas
    if replicas is not None:
        over = " x ".join(f"{replicas.mesh.shape[axis]} {axis!r}" for axis in replicas.axes)
        shown["devices"] = f"{replicas.size} ({over})"
        notes.append("FLOPs, bytes and temp bytes are those of one device")
        notes.append(f"gradients are combined by {_COMBINED_BY[replicas.exchange]}")
    if step.settings.microbatch > 1 or step.settings.window_policy is not None:
        shown["stats"] = step.settings.stats
    return StepDescription(
        order=tuple(order_line(info) for info in infos),
        parameters=parameter_fates(infos, abstract.params, scaling),
        plain=plain_cost,
        variants=tuple(variants),
        settings=shown,
        notes=tuple(notes),
        scale_groups=scale_groups(scaling, abstract.params),
        scale_boundaries=scale_boundaries(step, abstract, batch),
    )


def parameter_fates(
    infos: Sequence[_info.TransformInfo], params: Any, scaling: Any = None
) -> tuple[ParameterFate, ...]:
    """Tell for every parameter what each of the transformations and the loss scale do to it."""
    groups = group_fates(scaling, params)
    told = [(info.name, info.fates(params)) for info in infos if info.fates is not None]
    fates = []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = path_string(key_path)
        parts = [f"{name}: {by_path[path]}" for name, by_path in told if path in by_path]
        parts = parts or ["trained as usual"]
        if path in groups:
            parts.append(f"loss scale: {groups[path]}")
        fates.append(ParameterFate(path, tuple(np.shape(leaf)), str(leaf.dtype), "; ".join(parts)))
    return tuple(fates)


def compiled_cost(name: str, compiled: Any) -> Cost:
    """Read FLOPs, bytes and temporary memory from a compiled function."""
    analysis = compiled.cost_analysis() or {}
    if isinstance(analysis, list):
        analysis = analysis[0]
    memory = compiled.memory_analysis()
    return Cost(
        name,
        float(analysis.get("flops", 0.0)),
        float(analysis.get("bytes accessed", 0.0)),
        float(getattr(memory, "temp_size_in_bytes", 0)),
    )


def plain_step(step: Any) -> Any:
    """Return the same step without boostax: the whole batch, nothing frozen, no loss scale."""
    tx = optax.with_extra_args_support(_info.plain_of(step.tx))
    replicas = step.settings.replicas
    if replicas is not None:
        exchange = "tx" if _info.exchanged_axes(tx) else "step"
        replicas = dataclasses.replace(replicas, exchange=exchange)
    searches = _info.find(tx, "dim_reduce") is not None
    boosted = (*OF_FREEZING, *OF_SCALING, *(() if searches else OF_DIM_REDUCE))
    settings = dataclasses.replace(
        step.settings,
        metrics=tuple(m for m in step.settings.metrics if m not in boosted),
        freezing=None,
        layers=None if _info.find(tx, "scale_by_thor") is None else step.settings.layers,
        microbatch=1,
        window_policy=None,
        window_every=None,
        replicas=replicas,
        loss_scale=None,
        # A loss scale sets it.
        skip_nonfinite=step.settings.skip_nonfinite and step.settings.loss_scale is None,
    )
    return step.with_settings(settings, tx)


def order_line(info: _info.TransformInfo) -> str:
    shown = {
        k: v for k, v in info.settings.items() if isinstance(v, (bool, int, float, str, tuple))
    }
    return info.name + (f"({', '.join(f'{k}={v}' for k, v in shown.items())})" if shown else "")


def _abstract(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)
        )
    return leaf
