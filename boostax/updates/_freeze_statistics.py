"""Which running statistics are on hold while parameters are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from boostax._tree import path_string

# Linen: a collection of the model state; nnx: a Variable type.
_COLLECTION = "batch_stats"


def hold_statistics(trainable: Mapping[str, bool], old: Any, new: Any) -> Any:
    """Return ``new`` with the old statistics of the modules whose parameters are all frozen."""
    if new is None or old is None or all(trainable.values()):
        return new
    if isinstance(new, Mapping) and not _is_nnx_state(new):
        if _COLLECTION not in new or _COLLECTION not in old:
            return new
        held = _choose(trainable, old[_COLLECTION], new[_COLLECTION], lambda leaf: True)
        kind: Any = type(new)  # a FrozenDict stays one
        return kind({**new, _COLLECTION: held})
    from flax import nnx

    return _choose(
        trainable, old, new, lambda part: isinstance(part, nnx.BatchStat), (nnx.Variable,)
    )


def _choose(
    trainable: Mapping[str, bool],
    old: Any,
    new: Any,
    is_statistic: Any,
    nodes: tuple[type, ...] = (),
) -> Any:
    def choose(path: Any, old_part: Any, new_part: Any) -> Any:
        held = is_statistic(new_part) and _is_frozen(path_string(path), trainable)
        return old_part if held else new_part

    return jax.tree_util.tree_map_with_path(
        choose, old, new, is_leaf=lambda part: isinstance(part, nodes)
    )


def _is_frozen(path: str, trainable: Mapping[str, bool]) -> bool:
    module = path.rpartition("/")[0]
    while True:
        prefix = f"{module}/" if module else ""
        own = [
            on
            for name, on in trainable.items()
            if name.startswith(prefix) or name.startswith(f"params/{prefix}")
        ]
        if own or not module:
            return bool(own) and not any(own)
        module = module.rpartition("/")[0]


def _is_nnx_state(value: Any) -> bool:
    from flax import nnx

    return isinstance(value, nnx.State)
