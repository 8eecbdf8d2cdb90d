"""Run a transformation on some of the leaves, and leave everything else exactly as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from boostax._tree import map_params_like


def run_trainable(
    tx: optax.GradientTransformationExtraArgs,
    flags: Sequence[bool],
    updates: Any,
    inner_state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """Return the updates and the new inner state when only the flagged leaves are trained.

    The other leaves are taken out of updates, parameters, state and extra arguments
    (``optax.MaskedNode`` in their place), and put back afterwards: zero updates, old state.
    """
    if all(flags):
        return tx.update(updates, inner_state, params, **extra_args)
    treedef = jax.tree.structure(updates)

    def cut(tree: Any) -> Any:
        leaves = treedef.flatten_up_to(tree)
        return treedef.unflatten(
            [leaf if on else optax.MaskedNode() for leaf, on in zip(leaves, flags, strict=True)]
        )

    flag_tree = treedef.unflatten(flags)
    # What the whole update would give out: the frozen leaves' zeros need its dtypes, so that an
    # update has the same type at every freeze index.
    whole, _ = jax.eval_shape(
        lambda u, s, p: tx.update(u, s, p, **extra_args), updates, inner_state, params
    )
    cut_state = map_params_like(
        lambda leaf, on: leaf if on else optax.MaskedNode(), inner_state, updates, flag_tree
    )
    cut_updates, new_state = tx.update(
        cut(updates),
        cut_state,
        None if params is None else cut(params),
        **{
            name: _cut_extra(name, value, treedef, cut, params)
            for name, value in extra_args.items()
        },
    )
    new_updates = treedef.unflatten(
        [
            new if on else jnp.zeros_like(old, dtype=like.dtype)
            for new, old, like, on in zip(
                treedef.flatten_up_to(cut_updates),
                treedef.flatten_up_to(updates),
                treedef.flatten_up_to(whole),
                flags,
                strict=True,
            )
        ]
    )
    return new_updates, _put_back(inner_state, new_state, updates, flag_tree)


def _put_back(old_state: Any, new_state: Any, params_like: Any, flag_tree: Any) -> Any:
    """Take the frozen leaves' state from ``old_state`` and everything else from ``new_state``."""
    takes_new = map_params_like(
        lambda leaf, on: on, old_state, params_like, flag_tree, others=lambda leaf: True
    )
    old_leaves, treedef = jax.tree.flatten(old_state)
    return treedef.unflatten(
        [
            new if on else old
            for old, new, on in zip(
                old_leaves,
                treedef.flatten_up_to(new_state),
                treedef.flatten_up_to(takes_new),
                strict=True,
            )
        ]
    )


def _cut_extra(name: str, value: Any, treedef: Any, cut: Callable[[Any], Any], params: Any) -> Any:
    if name in ("value_fn", "grad_fn") and callable(value):
        return _cut_function(name, value, treedef, cut, params)
    if not jax.tree_util.treedef_is_leaf(treedef) and jax.tree.structure(value) == treedef:
        return cut(value)
    return value


def _cut_function(
    name: str, function: Callable[..., Any], treedef: Any, cut: Callable[[Any], Any], params: Any
) -> Callable[..., Any]:
    """Let a function of all parameters be called with the trained ones alone."""
    if params is None:
        raise ValueError(f"freeze: {name} is a function of the parameters; pass params to update")

    @functools.wraps(function)  # line searches look at the keywords that it declares
    def of_trained(trained: Any, *args: Any, **kwargs: Any) -> Any:
        full = treedef.unflatten(
            [
                old if isinstance(new, optax.MaskedNode) else new
                for old, new in zip(
                    treedef.flatten_up_to(params), treedef.flatten_up_to(trained), strict=True
                )
            ]
        )
        result = function(full, *args, **kwargs)
        return cut(result) if name == "grad_fn" else result

    return of_trained
