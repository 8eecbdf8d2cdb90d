"""What happens at a refresh: average statistics over devices and time, and invert them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax import _compat
from boostax.gradients._blocks import Factors, group_traces
from boostax.updates import _thor_reference as reference
from boostax.updates._thor_inverses import averaged, damped, finite, inverted
from boostax.updates._thor_settings import Settings

__all__ = ["Refresh", "refresh"]


@dataclasses.dataclass
class Refresh:
    """What a refresh changes: the fields of the state of the same names, layers in block order."""

    factors: dict[str, Factors]
    inverses: dict[str, Factors]
    refreshes: jax.Array
    failed: jax.Array
    trace: Any
    rest: Any

    def replace(self, state: Any) -> Any:
        return state._replace(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})


def refresh(
    settings: Settings,
    state: Any,
    live: Sequence[int],
    stats: Mapping[str, Factors],
    weight: Any,
    axes: tuple[str, ...],
) -> Refresh:
    """Return what the state becomes with these statistics of the layers ``live``."""
    names = [settings.blocks[i].kernel for i in live]
    fresh = _averaged(settings, live, [stats[name] for name in names], weight, axes)
    if settings.mode == "reference":
        tried = _invert_reference(settings, state.count, live, fresh, weight, axes)
    else:
        tried = _invert(settings, state, live, fresh, axes)
    at = jnp.asarray(live, jnp.int32)
    kept = settings.mode == "default"
    factors, inverses = dict(state.factors), dict(state.inverses)
    good = jnp.stack([one.good for one in tried])
    for name, one in zip(names, tried, strict=True):
        inverses[name] = _where(one.good, one.inverses, inverses[name])
        if kept:
            factors[name] = _where(one.good, one.factors, factors[name])
    moving = jnp.stack([one.moving for one in tried])
    refreshes = state.refreshes.at[at].add(good.astype(jnp.int32))
    failed = state.failed.at[at].set(jnp.where(moving, ~good, state.failed[at]))
    trace, rest = state.trace, state.rest
    if settings.trace_rule is not None:
        new = jnp.stack([one.trace for one in tried])
        change = jnp.stack([one.change for one in tried])
        late = state.count > (settings.early[-1] if settings.early else 0)
        # The first refresh of a layer has nothing to be compared with.
        stop = good & late & (change < settings.trace_rule) & (state.refreshes[at] > 0)
        trace = trace.at[at].set(jnp.where(good, new, trace[at]))
        rest = rest.at[at].set(rest[at] | stop)
    return Refresh(factors, inverses, refreshes, failed, trace, rest)


@dataclasses.dataclass
class _Tried:
    factors: Factors
    inverses: Factors
    good: Any
    moving: Any
    trace: Any = None
    change: Any = None


def _averaged(
    settings: Settings,
    live: Sequence[int],
    stats: Sequence[Factors],
    weight: Any,
    axes: tuple[str, ...],
) -> list[Factors]:
    place = {layer: n for n, layer in enumerate(live)}
    buckets = [[place[i] for i in bucket if i in place] for bucket in settings.buckets]
    mean = averaged(stats, weight, axes, [bucket for bucket in buckets if bucket])
    if settings.mode == "reference" or settings.unscaled:
        return mean
    scale = 1 / settings.loss_scale
    return [Factors(pair.inputs, pair.outputs * scale * scale) for pair in mean]


def _invert(
    settings: Settings, state: Any, live: Sequence[int], fresh: list[Factors], axes: tuple[str, ...]
) -> list[_Tried]:
    damping = settings.damping_at(state.count)
    joined, hot = [], []
    for i, new in zip(live, fresh, strict=True):
        block = settings.blocks[i]
        times = state.refreshes[i].astype(jnp.float32)
        # The mean of all while they are few, and an average that forgets afterwards.
        keep = jnp.minimum(times / (times + 1), settings.factor_decay)
        mean = jax.tree.map(
            lambda old, now, keep=keep: keep * old + (1 - keep) * now,
            state.factors[block.kernel],
            new,
        )
        joined.append(mean)
        hot.append(damped(block, mean, damping, pi_split=settings.pi_split))
    if settings.trace_rule is None:
        inverses = inverted(hot, axes)
        return [
            _Tried(mean, inverse, finite(mean, inverse), jnp.array(True))
            for mean, inverse in zip(joined, inverses, strict=True)
        ]
    out = []
    for i, mean, matrix in zip(live, joined, hot, strict=True):
        block, resting = settings.blocks[i], state.rest[i]
        # Each layer by itself: one stack for all would cost its inverse whether it rests or not.
        inverse = _compat.cond(
            resting,
            lambda block=block: state.inverses[block.kernel],
            lambda matrix=matrix: inverted([matrix], axes)[0],
        )
        of_inputs, of_outputs = map(group_traces, mean)
        trace = jnp.sum(of_inputs * of_outputs)
        added = damping * block.groups * block.inputs.size * block.outputs.size
        change = jnp.abs(trace - state.trace[i]) / (state.trace[i] + added)
        good = finite(mean, inverse) & ~resting
        out.append(_Tried(mean, inverse, good, ~resting, trace, change))
    return out


def _invert_reference(
    settings: Settings,
    count: Any,
    live: Sequence[int],
    fresh: list[Factors],
    weight: Any,
    axes: tuple[str, ...],
) -> list[_Tried]:
    blocks = [settings.blocks[i] for i in live]
    damping, batch = settings.damping_at(count), reference.batch_size(settings.caller, weight, axes)
    matrices = [
        reference.damped(block, pair, damping, batch, settings.loss_scale)
        for block, pair in zip(blocks, fresh, strict=True)
    ]
    inverses = [
        reference.finished(block, matrix, inverse)
        for block, matrix, inverse in zip(blocks, matrices, inverted(matrices, axes), strict=True)
    ]
    return [
        _Tried(pair, inverse, finite(pair, inverse), jnp.array(True))
        for pair, inverse in zip(fresh, inverses, strict=True)
    ]


def _where(take: Any, new: Factors, old: Factors) -> Factors:
    return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)
