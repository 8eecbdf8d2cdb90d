"""The metrics that a train step reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from boostax.errors import did_you_mean

__all__ = [
    "METRICS",
    "OF_DIM_REDUCE",
    "OF_FREEZING",
    "OF_SCALING",
    "all_finite",
    "check_metrics",
    "global_norm",
    "injected_learning_rate",
]

METRICS = (
    "loss",
    "grad_norm",
    "finite",
    "updates",
    "micro_steps",
    "freeze_index",
    "learning_rate",
    "loss_scale",
    "overflow",
    "delta",
)
# Those that a step without freezing, without a loss scale or without dim_reduce can't report.
OF_FREEZING, OF_SCALING, OF_DIM_REDUCE = ("freeze_index",), ("loss_scale", "overflow"), ("delta",)


def check_metrics(
    metrics: Sequence[str] | None, *, freezes: bool, scales: bool, reduces: bool
) -> tuple[tuple[str, ...], bool]:
    """Check the names asked for.

    Returns:
      The names to report, and whether they were asked for by name (then all must be available).
    """
    lacking = (() if freezes else OF_FREEZING) + (() if scales else OF_SCALING)
    lacking += () if reduces else OF_DIM_REDUCE
    if metrics is None:
        return tuple(m for m in METRICS if m not in lacking), False
    if isinstance(metrics, str):
        raise TypeError(
            f"metrics must be a sequence of names, got the text {metrics!r}; write ({metrics!r},)"
        )
    names = tuple(metrics)
    for name in names:
        if name not in METRICS:
            raise ValueError(
                f"metrics: {name!r} is not known.{did_you_mean(name, METRICS)} Allowed: "
                f"{', '.join(METRICS)}; your own go into LossAux.metrics"
            )
    for name in names:
        if name in lacking:
            needed = "freezing=; pass it" if name in OF_FREEZING else "loss_scale=; pass it"
            if name in OF_DIM_REDUCE:
                needed = "boostax.dim_reduce in tx; train with it"
            raise ValueError(f"metrics: {name!r} needs {needed}, or leave the name out")
    return names, True


def global_norm(leaves: Sequence[Any]) -> jax.Array:
    """Return the 2-norm of all leaves together, accumulated in float32 or better."""
    squares = [jnp.sum(jnp.square(jnp.abs(_wide(leaf)))) for leaf in leaves]
    return jnp.sqrt(sum(squares)) if squares else jnp.float32(0)


def all_finite(loss: Any, leaves: Sequence[Any]) -> jax.Array:
    """Say whether the loss and every leaf are free of NaN and infinity."""
    finite = jnp.isfinite(loss)
    for leaf in leaves:
        finite &= jnp.all(jnp.isfinite(leaf))
    return finite


def injected_learning_rate(opt_state: Any) -> Any | None:
    """Return the learning rate that ``optax.inject_hyperparams`` keeps in a state, or None."""
    parts = jax.tree.leaves(opt_state, is_leaf=_has_rate)
    return next((part.hyperparams["learning_rate"] for part in parts if _has_rate(part)), None)


def _has_rate(part: Any) -> bool:
    hyperparams = getattr(part, "hyperparams", None)
    return isinstance(hyperparams, dict) and "learning_rate" in hyperparams


def _wide(leaf: Any) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
