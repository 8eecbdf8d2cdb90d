"""What the optimizers by name share: their checks, float32 accumulators, decay and learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax._info import TransformInfo, with_info
from boostax.errors import did_you_mean
from boostax.updates._thor_checks import check_bool, check_number, check_rate
from boostax.updates.named._masks import read_mask
from boostax.updates.row_sparse import is_row_sparse

__all__ = [
    "CONVENTIONS",
    "check_bool",
    "check_convention",
    "check_eps",
    "check_mindspores",
    "check_number",
    "check_rate",
    "decay",
    "finished",
    "in_float32",
    "is_zero",
    "next_count",
    "read_mask",
    "refuse_complex",
    "wide_dtype",
]

CONVENTIONS = ("torch", "mindspore")


def check_convention(caller: str, convention: Any) -> str:
    """Return the convention, one of :data:`CONVENTIONS`."""
    if convention not in CONVENTIONS:
        raise ValueError(
            f"{caller}: convention must be 'torch' or 'mindspore', got {convention!r}."
            f"{did_you_mean(str(convention), CONVENTIONS)}"
        )
    return convention


def check_mindspores(caller: str, convention: Any) -> None:
    """Refuse PyTorch's convention for an optimizer that PyTorch does not have."""
    if check_convention(caller, convention) != "mindspore":
        raise ValueError(
            f"{caller}: convention must be 'mindspore', got {convention!r}; PyTorch has no such "
            "optimizer"
        )


def check_eps(caller: str, eps: Any) -> Any:
    """Return an epsilon; it must be above 0, because entries that never had a gradient are 0 / eps."""
    return check_number(caller, "eps", eps, 0.0, open_=True)


def next_count(count: Any) -> Any:
    """Return an update count and one more, without running over."""
    return optax.safe_increment(count)


def is_zero(value: Any) -> bool:
    """Say whether this is a number that is 0; an injected hyperparameter never counts as one."""
    return isinstance(value, (int, float)) and value == 0


def wide_dtype(leaf: Any) -> Any:
    """Return the dtype that a leaf is computed and accumulated in: float32, or its own if wider."""
    dtype = jnp.result_type(leaf)
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _wide(leaf: Any) -> Any:
    dtype = wide_dtype(leaf)
    if dtype == jnp.result_type(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    return jnp.asarray(leaf).astype(dtype)


def _as(value: Any, like: Any) -> Any:
    dtype = jnp.result_type(like)
    return value if jnp.result_type(value) == dtype else value.astype(dtype)


def in_float32(caller: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Let ``tx`` see half-precision leaves as float32; updates have their gradient's dtype."""

    def init(params: Any) -> Any:
        refuse_complex(caller, params)
        return tx.init(jax.tree.map(_wide, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        del extra_args
        if any(map(is_row_sparse, jax.tree.leaves(updates, is_leaf=is_row_sparse))):
            raise TypeError(
                f"{caller}: got a row-sparse gradient; only adagrad takes them. Give the dense "
                "gradient (its todense()), or adagrad to those leaves, with groups="
            )
        seen = None if params is None else jax.tree.map(_wide, params)
        out, state = tx.update(jax.tree.map(_wide, updates), state, seen)
        return jax.tree.map(_as, out, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def refuse_complex(caller: str, params: Any) -> None:
    """Raise a TypeError where a parameter is complex: the formulas here are for real numbers."""
    if any(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating) for leaf in _leaves(params)):
        raise TypeError(
            f"{caller}: got complex parameters, and its averages of squares are those of real numbers; "
            "train real and imaginary parts as two leaves (optax.contrib.split_real_and_imaginary)"
        )


def _leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def decay(caller: str, weight_decay: Any, mask: Any) -> list[Any]:
    """Return what adds the decay to the gradient, as a list of one part or none."""
    weight_decay = check_number(caller, "weight_decay", weight_decay, 0.0)
    mask = read_mask(caller, "mask", mask)
    if is_zero(weight_decay):
        return []
    return [optax.add_decayed_weights(weight_decay, mask)]


def finished(
    caller: str, settings: Mapping[str, Any], *parts: Any
) -> optax.GradientTransformationExtraArgs:
    """Return the chain of ``parts`` in float32 or better, described by its name and settings."""
    tx = in_float32(caller, optax.chain(*parts))
    return with_info(tx, TransformInfo(caller, settings))
