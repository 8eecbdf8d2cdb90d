"""What a step hands to ``tx.update``, and takes from the loss: only what fits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp

from boostax import _info


def accepted(tx: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a part of ``tx`` neither declares nor swallows, as optax's SAM does not."""
    for info in _info.walk(tx):
        if info.keywords is not None:
            given = {name: value for name, value in given.items() if name in info.keywords}
    return given


def declaring(value_fn: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Let ``value_fn`` declare these keywords; optax's line searches refuse all that it doesn't."""
    kinds = inspect.Parameter
    value_fn.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            kinds("params", kinds.POSITIONAL_OR_KEYWORD),
            *(kinds(name, kinds.KEYWORD_ONLY) for name in names if name not in ("value", "grad")),
        ]
    )
    return value_fn


def merge_state(start: Any, new: Any) -> Any:
    """Put the collections that the loss returned over those that it started from."""
    if new is None:
        return start
    if start is None:
        raise ValueError(
            "loss_fn returned LossAux.model_state, but the train state has none; pass "
            "model_state= to step.init"
        )
    if isinstance(start, dict) and isinstance(new, Mapping):
        new = {**start, **flax.core.unfreeze(dict(new))}
    given, wanted = jax.tree.structure(new), jax.tree.structure(start)
    if given != wanted:
        raise ValueError(
            f"LossAux.model_state has another structure than the train state's: got {given}, "
            f"expected {wanted}"
        )

    def same(new_leaf: Any, old_leaf: Any) -> Any:
        if jnp.shape(new_leaf) != jnp.shape(old_leaf):
            raise ValueError(
                f"LossAux.model_state: a leaf of shape {jnp.shape(old_leaf)} came back with shape "
                f"{jnp.shape(new_leaf)}"
            )
        return jnp.asarray(new_leaf, old_leaf.dtype)

    return jax.tree.map(same, new, start)
