"""Run a transformation on some of the leaves, and leave everything else exactly as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from boostax import _compat
from boostax._tree import map_params_like
from boostax.updates._surroundings import within


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
        lambda leaf, on: leaf if on else optax.MaskedNode(),
        _cut_lists(inner_state, treedef, flags),
        updates,
        flag_tree,
    )
    cut_extra = {
        name: _cut_extra(name, value, treedef, cut, params) for name, value in extra_args.items()
    }
    with within(updates):
        cut_updates, new_state = tx.update(
            cut(updates), cut_state, None if params is None else cut(params), **cut_extra
        )
    new_updates = treedef.unflatten(
        [
            new if on else _compat.zeros_like(old).astype(like.dtype)
            for new, old, like, on in zip(
                treedef.flatten_up_to(cut_updates),
                treedef.flatten_up_to(updates),
                treedef.flatten_up_to(whole),
                flags,
                strict=True,
            )
        ]
    )
    merged_state = jax.tree.map(
        lambda part, old, new: old if _is_masked(part) else new,
        cut_state,
        inner_state,
        new_state,
        is_leaf=_is_masked,
    )
    return new_updates, merged_state


def exchanging(
    tx: optax.GradientTransformationExtraArgs, exchange: Callable[[Any], Any]
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` behind ``exchange``, which combines the gradients over devices."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return tx.update(exchange(updates), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _is_masked(part: Any) -> bool:
    return isinstance(part, optax.MaskedNode)


def _cut_lists(state: Any, treedef: Any, flags: Sequence[bool]) -> Any:
    """Cut the parts of a state that keep a list of arrays for each parameter, as SM3's do."""
    if jax.tree_util.treedef_is_leaf(treedef):
        return state

    def children(part: Any) -> list[Any]:
        try:
            found = treedef.flatten_up_to(part)
        except (ValueError, TypeError, KeyError):
            return []
        lists = all(type(c) is list and c and jax.tree_util.all_leaves(c) for c in found)
        return found if lists else []

    def visit(part: Any) -> Any:
        found = children(part)
        if not found:
            return part
        return treedef.unflatten(
            [c if on else optax.MaskedNode() for c, on in zip(found, flags, strict=True)]
        )

    return jax.tree.map(visit, state, is_leaf=lambda part: bool(children(part)))


def _cut_extra(name: str, value: Any, treedef: Any, cut: Callable[[Any], Any], params: Any) -> Any:
    if name in ("value_fn", "obj_fn", "grad_fn") and callable(value):
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
