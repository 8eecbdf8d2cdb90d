"""What goes into a step: keys, copies of arrays, and checks of the arguments of a call."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import path_string
from boostax.training.state import TrainState


def nnx_module(model: Any) -> Any | None:
    """Return flax.nnx if ``model`` is an nnx module; importing it only where it can matter."""
    import sys

    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx is not None and isinstance(model, nnx.Module) else None


def needs_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether the loss declares ``rng`` without a default (``**kwargs`` alone doesn't need it)."""
    parameter = inspect.signature(loss_fn).parameters.get("rng")
    return parameter is not None and parameter.default is parameter.empty


def typed_key(rng: Any) -> jax.Array:
    """Return one typed key from a key, a raw key or an int seed."""
    key: Any = rng
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        key = jax.random.key(int(rng))
    if not hasattr(key, "dtype"):
        raise TypeError(
            f"rng must be a key of jax.random.key, or an int seed; got {type(rng).__name__}"
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.shape != ():
        raise ValueError(f"rng must be one key, got an array of keys of shape {key.shape}")
    return key


def raw_key(rng: Any) -> tuple[jax.Array, str]:
    """Return the raw data of a key, and its kind."""
    key = typed_key(rng)
    return jax.random.key_data(key), str(jax.random.key_impl(key))


def check_arrays(params: Any, caller: str) -> None:
    """Raise where a leaf is no array or number, as a model's functions and texts are."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, numbers.Number):
            raise TypeError(
                f"{caller}: the parameter {path_string(key_path)!r} must be an array, got "
                f"{type(leaf).__name__}; train the arrays alone (of an Equinox model: "
                "eqx.partition(model, eqx.is_inexact_array), and eqx.combine inside the loss)"
            )


def strong_copy(tree: Any) -> Any:
    """Copy every array, strongly typed, so that the second call does not compile anew."""

    def copy(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.copy(leaf)
        return jnp.array(leaf, dtype=jax.dtypes.canonicalize_dtype(leaf.dtype), copy=True)

    return jax.tree.map(copy, tree)


def check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a boostax.TrainState, got {type(state).__name__}; make it with step.init, "
            "or restore it with that as the target"
        )


def check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if any(callable(leaf) or isinstance(leaf, str) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"the extra argument {name!r} must hold arrays or numbers, because the step is "
                f"compiled; got {value!r}"
            )
