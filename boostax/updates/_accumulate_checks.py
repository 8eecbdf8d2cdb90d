"""What ``accumulate`` accepts: its arguments, and what ``update`` is called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from boostax._info import find
from boostax._tree import path_string
from boostax.errors import did_you_mean


def check_inner(inner: Any) -> optax.GradientTransformationExtraArgs:
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"accumulate: inner must be an optax transformation with init and update, got "
            f"{type(inner).__name__}; for example accumulate(optax.adam(1e-3), 4)"
        )
    if not isinstance(inner, optax.GradientTransformation):
        # optax.MultiSteps and its like are classes of their own.
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    return optax.with_extra_args_support(inner)


def check_no_trials(inner: Any, every: Any) -> None:
    """Refuse dim_reduce in a window of several calls."""
    if every != 1 and find(inner, "dim_reduce") is not None:
        raise ValueError(
            "accumulate: inner holds dim_reduce, whose trials need the loss of the whole window, and a "
            "window across calls keeps only the last micro-batch; use boostax.microbatch, or "
            "train_step(microbatch=n)"
        )


def takes(update: Any, name: str) -> bool:
    """Say whether an update function takes this extra argument, by name or with all others."""
    known = inspect.signature(update).parameters
    return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())


def one_name(name: str, value: Any, other: str, other_value: Any) -> Any:
    if (value is None) == (other_value is None):
        what = "is missing" if value is None else f"and {other} mean the same; give one of them"
        raise TypeError(f"accumulate: {name} {what}; for example accumulate(inner, 4)")
    return other_value if value is None else value


def check_every(every: Any) -> Any:
    allowed = "an int >= 1, or a function of the update count that returns one"
    if callable(every):
        return every
    if isinstance(every, (int, np.integer)) and not isinstance(every, (bool, np.bool_)):
        if every < 1:
            raise ValueError(f"accumulate: every must be {allowed}, got {every}")
        return int(every)
    if (
        isinstance(every, jax.Array)
        and every.shape == ()
        and jnp.issubdtype(every.dtype, jnp.integer)
    ):
        # An injected hyperparameter: a traced number.
        return lambda updates: every
    raise TypeError(f"accumulate: every must be {allowed}, got {every!r}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(
            f"accumulate: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}."
            f"{did_you_mean(value, allowed)}"
        )


def extra_templates(average_extra: Any, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of the extra arguments to average: those asked for, and those declared."""
    if isinstance(average_extra, str):
        raise TypeError(
            f"accumulate: average_extra must be names or a mapping, got the text {average_extra!r}; "
            f"write ({average_extra!r},)"
        )
    if not isinstance(average_extra, Mapping):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        average_extra = {name: declared.get(name, scalar) for name in average_extra}
    average_extra = {**declared, **average_extra}
    templates = {name: jax.tree.map(abstract, tree) for name, tree in average_extra.items()}
    for name, tree in templates.items():
        if not isinstance(name, str) or name in ("weight", "finite"):
            raise ValueError(f"accumulate: average_extra can't hold the name {name!r}")
        for leaf in jax.tree.leaves(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"accumulate: average_extra[{name!r}] must hold floating arrays, got {leaf.dtype}"
                )
    return templates


def averaged_values(templates: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, template in templates.items():
        if name not in extra:
            raise ValueError(
                f"accumulate: average_extra names {name!r}, but update was called without it; pass "
                f"{name}=..."
            )
        value = jax.tree.map(jnp.asarray, extra[name])
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (template, value)]
        if jax.tree.structure(template) != jax.tree.structure(value) or shapes[0] != shapes[1]:
            raise ValueError(
                f"accumulate: the extra argument {name!r} has the shapes {shapes[1]}, but "
                f"average_extra expects {shapes[0]}; give average_extra as a mapping from name to an "
                "example"
            )
        values[name] = value
    return values


def check_sums(updates: Any, sums: list[Any]) -> None:
    for (path, g), total in zip(jax.tree_util.tree_leaves_with_path(updates), sums, strict=True):
        if is_inexact(g) and jnp.shape(g) != getattr(total, "shape", None):
            raise ValueError(
                f"accumulate: the gradient of {path_string(path)!r} has shape {jnp.shape(g)} and dtype "
                f"{g.dtype}, but the state was made for {getattr(total, 'shape', 'no gradient')}; "
                "make the state with init of the same parameters"
            )


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def is_float0(value: Any) -> bool:
    return getattr(value, "dtype", None) == jax.dtypes.float0


def is_inexact(value: Any) -> bool:
    return not is_float0(value) and jnp.issubdtype(jnp.result_type(value), jnp.inexact)
