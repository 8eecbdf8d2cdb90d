"""Load the weights of one model into another, by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from boostax._tree import PathPattern, matches, path_string
from boostax.models._patterns import pattern_list
from boostax.training.describe import format_table

__all__ = ["LoadReport", "load_weights"]


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What :func:`load_weights` did with each leaf; ``print`` shows it.

    Attributes:
      loaded: paths that both sides have, and whose arrays were taken from the source.
      dropped: paths that only the source has.
      missing: paths that only the target has; it keeps its own arrays there.
      mismatched: path, the source's shape and the target's, where they differ; the target keeps its
        own.
    """

    loaded: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        rows = [(path, "dropped: the target has none") for path in self.dropped]
        rows += [(path, "missing: the target keeps its own") for path in self.missing]
        rows += [
            (path, f"shape {source} in the source, {target} in the target, which keeps its own")
            for path, source, target in self.mismatched
        ]
        head = f"load_weights: {len(self.loaded)} loaded, {len(rows)} not"
        return "\n".join([head, *(format_table(("path", "what happened"), rows) if rows else ())])


def load_weights(
    target: Any,
    source: Any,
    *,
    allow_missing: bool | PathPattern | Sequence[PathPattern] = False,
) -> tuple[Any, LoadReport]:
    """Copy the arrays of ``source`` into ``target`` wherever their paths agree.

    For a rewritten model and a checkpoint of the original: what belongs to layers that are gone is
    dropped and listed; what the rewritten model needs must be there.

    Args:
      target: an nnx module (its parameters and statistics, not its random state), linen variables or
        parameters, or any tree. It is not changed; its leaves may be abstract.
      source: an nnx module, an ``nnx.State``, linen variables, a tree of nested dicts as a checkpoint
        gives it back, or a :class:`boostax.TrainState`.
      allow_missing: what may be missing from the source, or have another shape there, and then stays
        as it is in the target: False (default) nothing, True anything, or path patterns such as
        ``"fc/*"``.

    Returns:
      The target with the source's arrays, copied, in the target's dtypes; and a :class:`LoadReport`.

    Raises:
      ValueError: the source lacks something, or has it in another shape, that ``allow_missing`` does
        not allow; or no path agrees.

    Example:
      >>> import jax.numpy as jnp
      >>> before = {"conv": {"kernel": jnp.ones(3)}, "bn": {"scale": jnp.ones(2), "bias": jnp.ones(2)}}
      >>> after = {"conv": {"kernel": jnp.zeros(3)}, "bn": {"bias": jnp.zeros(2)}}
      >>> loaded, report = load_weights(after, before)
      >>> loaded["bn"]["bias"].tolist(), report.dropped
      ([1.0, 1.0], ('bn/scale',))

    When not to use:
      Where the paths differ throughout, as between linen and nnx; rename them first.
    """
    allowed = _allowed(allow_missing)
    own, skipped = _own_tree(target)
    paths, treedef = jax.tree_util.tree_flatten_with_path(own)
    given = {path_string(p): leaf for p, leaf in _source_leaves(source)}
    wanted = {path_string(path): leaf for path, leaf in paths}
    if all(path.endswith("/value") for path in given):
        # A checkpoint of an older nnx state names the value of each variable.
        given = {path.removesuffix("/value"): leaf for path, leaf in given.items()}
    given = {path: leaf for path, leaf in given.items() if path not in skipped}
    same = [path for path in wanted if path in given]
    if wanted and not same:
        raise ValueError(
            "load_weights: no path of target is in source. "
            f"target: {_listed(wanted)}; source: {_listed(given) or 'nothing'}"
        )
    shapes = [(path, tuple(np.shape(given[path])), tuple(wanted[path].shape)) for path in same]
    mismatched = tuple(entry for entry in shapes if entry[1] != entry[2])
    missing = tuple(path for path in wanted if path not in given)
    _check(allowed, missing, mismatched)
    kept = {path for path, _, _ in mismatched} | set(missing)
    filled = [leaf if path in kept else _taken(given[path], leaf) for path, leaf in wanted.items()]
    report = LoadReport(
        loaded=tuple(path for path in same if path not in kept),
        dropped=tuple(path for path in given if path not in wanted),
        missing=missing,
        mismatched=mismatched,
    )
    new = treedef.unflatten(filled)
    if not isinstance(target, nnx.Module):
        return new, report
    copy = nnx.clone(target)
    nnx.update(copy, new)
    return copy, report


def _allowed(allow_missing: Any) -> tuple[PathPattern, ...]:
    if isinstance(allow_missing, bool):
        return ("*",) if allow_missing else ()
    return pattern_list("load_weights: allow_missing", allow_missing)


def _own_tree(target: Any) -> tuple[Any, set[str]]:
    """Return what is to be filled, and the paths of the random state, which never is."""
    if not isinstance(target, nnx.Module):
        return target, set()
    rest = nnx.state(target, nnx.Not(nnx.RngState))
    return rest, {path_string(p) for p, _ in _leaves(nnx.state(target, nnx.RngState))}


def _source_leaves(source: Any) -> list[tuple[Any, Any]]:
    if isinstance(source, nnx.Module):
        return _leaves(nnx.state(source, nnx.Not(nnx.RngState)))
    if hasattr(source, "params") and hasattr(source, "model_state"):
        states = (source.params, source.model_state)
        if isinstance(source.params, nnx.State):
            return [pair for state in states for pair in _leaves(state)]
        source = {"params": source.params, **(source.model_state or {})}
    if isinstance(source, nnx.State):
        source = nnx.filter_state(source, nnx.Not(nnx.RngState))
    if not isinstance(source, Mapping | nnx.State):
        raise TypeError(
            "load_weights: source must be an nnx module, an nnx.State, or nested dicts of arrays, got "
            f"{type(source).__name__}"
        )
    return _leaves(source)


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _taken(value: Any, like: Any) -> Any:
    """Return a copy in the dtype and, where there is one, the sharding of the target's leaf."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.copy(value)
    new = jnp.array(value, like.dtype)
    return jax.device_put(new, like.sharding) if isinstance(like, jax.Array) else new


def _check(allowed: Sequence[PathPattern], missing: Any, mismatched: Any) -> None:
    may = lambda path: any(matches(pattern, path) for pattern in allowed)
    faults = [f"{path} is missing from source" for path in missing if not may(path)]
    faults += [
        f"{path} has shape {source} in source, {target} in target"
        for path, source, target in mismatched
        if not may(path)
    ]
    if faults:
        raise ValueError(
            f"load_weights: {_listed(faults, '; ')}. Name what may stay as it is in target with "
            "allow_missing="
        )


def _listed(names: Any, between: str = ", ") -> str:
    names = list(names)
    return between.join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
