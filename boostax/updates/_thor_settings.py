"""The arguments of ``scale_by_thor``, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from boostax.gradients._blocks import Block
from boostax.updates import _thor_checks as checks
from boostax.updates import _thor_reference as reference
from boostax.updates._thor_groups import Groups, read_groups

__all__ = ["Settings", "make_settings"]


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The checked arguments of :func:`~boostax.updates.scale_by_thor.scale_by_thor`.

    Attributes:
      caller: the public function that errors name.
      layers: the captured layers.
      damping: a number, or a schedule of the update count.
      rates: the learning rate of each leaf at a count, for the KL clip; None without one.
      frequency: updates between refreshes.
      early: counts of further refreshes.
      factor_decay: the most that a running average keeps of its old value.
      pi_split: whether damping is split by the factors' size.
      clip: ``"kl"``, ``"tensor"`` or None.
      kl_clip: the bound of the KL clip.
      trace_rule: the share below which a layer comes to rest, or None.
      loss_scale: what the loss was multiplied by.
      buckets: indices of layers whose statistics travel together.
      axes: the axes that statistics are averaged over.
      centralized: paths of the kernels whose gradients are centralized.
      layer_norms: paths of leaves that get the reference's rule for layer norms.
      mode: ``"default"`` or ``"reference"``.
    """

    caller: str
    layers: Any
    damping: Any
    rates: Callable[[str, Any], Any] | None
    frequency: int
    early: tuple[int, ...]
    factor_decay: float
    pi_split: bool
    clip: str | None
    kl_clip: float
    trace_rule: float | None
    loss_scale: float
    buckets: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    centralized: frozenset[str]
    layer_norms: frozenset[str]
    mode: str

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.layers.blocks

    @property
    def unscaled(self) -> bool:
        """Whether the loss scale is known to be 1; injected while traced, it is not known."""
        return isinstance(self.loss_scale, float) and self.loss_scale == 1

    def due(self, count: Any) -> Any:
        """Say whether the update with this count refreshes."""
        due = count % self.frequency == 0
        for early in self.early:
            due = due | (count == early)
        return due

    def damping_at(self, count: Any) -> Any:
        return self.damping(count) if callable(self.damping) else self.damping


def make_settings(
    caller: str,
    *,
    layers: Any,
    damping: Any,
    learning_rate: Any,
    frequency: Any,
    early: Any,
    factor_decay: Any,
    pi_split: Any,
    clip: Any,
    kl_clip: Any,
    trace_rule: Any,
    loss_scale: Any,
    split_indices: Any,
    layer_norms: Any,
    mode: Any,
    axis_name: Any,
    groups: Groups | None,
) -> Settings:
    """Return the checked arguments of ``scale_by_thor`` or, by ``caller``, of ``thor``."""
    checks.check_layers(caller, layers, mode)
    groups = read_groups(caller, None, layers) if groups is None else groups
    clip = checks.check_clip(caller, clip, mode)
    if clip == "kl" and learning_rate is None:
        raise ValueError(
            f"{caller}: the KL clip needs learning_rate, the number or schedule that the updates "
            "are multiplied by afterwards; give it, or clip=False"
        )
    rates = None
    if learning_rate is not None:
        rates = groups.rates(checks.check_rate(caller, "learning_rate", learning_rate))
    if trace_rule is not None:
        trace_rule = checks.check_number(caller, "trace_rule", trace_rule, 0.0, open_=True)
        if mode == "reference":
            raise ValueError(f'{caller}: mode="reference" has no trace_rule; leave it None')
    ends = checks.check_split_indices(caller, split_indices, len(layers.blocks))
    return Settings(
        caller=caller,
        layers=layers,
        damping=checks.check_damping(caller, damping),
        rates=rates,
        frequency=checks.check_frequency(caller, frequency, mode),
        early=checks.check_early(caller, early) if mode == "default" else (),
        factor_decay=checks.check_number(caller, "factor_decay", factor_decay, 0.0, high=1.0),
        pi_split=checks.check_bool(caller, "pi_split", pi_split),
        clip=clip,
        kl_clip=checks.check_number(caller, "kl_clip", kl_clip, 0.0, open_=True),
        trace_rule=trace_rule,
        loss_scale=checks.check_number(caller, "loss_scale", loss_scale, 0.0, open_=True),
        buckets=groups.buckets(ends),
        axes=checks.check_axes(caller, axis_name),
        centralized=groups.centralized,
        layer_norms=reference.layer_norm_paths(caller, layer_norms, layers, mode),
        mode=mode,
    )
