"""Which norm layers are turned into another kind, the same for linen and nnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from boostax._tree import PathPattern, matches
from boostax.errors import did_you_mean
from boostax.models import _norm_checks as checks
from boostax.models._norm_swap import KINDS, Target, channel_axis, kind_of_norm
from boostax.models.report import Change, ModelReport, nothing_matched

__all__ = ["planned"]


def _chosen(
    norms: Mapping[str, str], wanted: tuple[PathPattern, ...] | None, others: Mapping[str, str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the paths of norms to change, and pairs of path and reason for those left."""
    if not norms:
        raise nothing_matched("replace_norm", "a norm layer", list(others.items()))
    for pattern in wanted or ():
        if not any(matches(pattern, path) for path in norms):
            hint = did_you_mean(pattern, norms) if isinstance(pattern, str) else ""
            raise ValueError(
                f"replace_norm: the pattern {pattern!r} matches no norm layer.{hint} "
                f"Norm layers: {', '.join(norms)}"
            )
    fits = lambda path: wanted is None or any(matches(pattern, path) for pattern in wanted)
    left = [(path, "no pattern matches it") for path in norms if not fits(path)]
    return [path for path in norms if fits(path)], left


def planned(
    target: Target, wanted: Any, layers: Mapping[str, tuple[Any, int]], others: Mapping[str, str]
) -> tuple[dict[str, Change], ModelReport]:
    """Return a change for each path, and the report."""
    paths, left = _chosen(
        {path: type(m).__name__ for path, (m, _) in layers.items()}, wanted, others
    )
    given = dict(target.settings)
    changes: dict[str, Change] = {}
    fresh = False
    for path in paths:
        layer, channels = layers[path]
        kind = kind_of_norm(layer) or ""
        where = f"replace_norm: {type(layer).__name__} {path or '(model)'}"
        try:
            channel_axis(layer, kind)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        why = f'to="{target.kind}"'
        if target.kind == "group":
            groups = checks.group_count(where, channels, given["num_groups"], given["group_size"])
            why += f", {groups} groups"
        elif target.kind == "ghost_batch":
            why += f", chunks of {given['ghost_batch_size']}"
        same = target.why_not(layer, kind, channels)
        if same is not None:
            left.append((path, same))
            continue
        fresh |= target.tracks and not target.passes_on(kind)
        changes[path] = Change(path, type(layer).__name__, KINDS[target.kind], why)
    if not changes:
        seen = {
            path: f"{type(layer).__name__}, {dict(left)[path]}"
            for path, (layer, _) in layers.items()
        }
        raise nothing_matched("replace_norm", "a norm layer to change", list(seen.items()))
    notes = ()
    if fresh:
        notes = (
            "the new running statistics start at mean 0 and variance 1: train, or take them by "
            "boostax.refresh_batch_statistics, ahead of an evaluation",
        )
    return changes, ModelReport("replace_norm", tuple(changes.values()), tuple(left), notes)
