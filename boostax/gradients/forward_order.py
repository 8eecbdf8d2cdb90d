"""Forward order: in which order a network uses its parameters."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax

from boostax._tree import leaf_paths
from boostax.gradients._first_use import Fact, first_uses
from boostax.training.contract import check_output, declared_keywords

__all__ = ["forward_order"]


def forward_order(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    model_state: Any = None,
    rng: Any = None,
    has_aux: bool | None = None,
    wrt: Any = None,
) -> tuple[str, ...]:
    """Return the path of every parameter leaf, in the order in which the forward pass uses them.

    JAX walks parameters alphabetically: ``layer_10`` before ``layer_2``, the head before the stem.
    This traces the loss (nothing is computed or compiled) and takes each leaf's first use: the first
    operation in which something that depends on that leaf alone meets something that depends on the
    batch. Casts, transposes and penalties on the parameters don't count. The trace is followed
    into jit, remat, custom derivatives, scan, cond and while.

    Args:
      loss_fn: the loss, as for :func:`boostax.train_step`: ``loss_fn(params, batch, ...)``, or
        ``loss_fn(model, batch, ...)`` for nnx.
      params: the parameters, or the ``nnx.Module``. Abstract leaves (``ShapeDtypeStruct``) do.
      batch: one batch; abstract leaves do.
      model_state: the linen collections other than params, for a loss that declares
        ``model_state``. Default None.
      rng: a key, for a loss that declares ``rng``. Default None: ``jax.random.key(0)``.
      has_aux: whether the loss returns ``(loss, LossAux)``; checked when given. Default None:
        either.
      wrt: nnx only, the filter for the trained variables. Default None: ``nnx.Param``.

    Returns:
      Paths such as ``"Dense_0/kernel"``, each leaf once. Leaves that the loss does not use come
      last, with a warning that names them. Layers stacked by ``scan`` are one leaf each.

    Raises:
      TypeError: the loss does not fit the contract.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"head": jnp.ones((3, 1)), "stem": jnp.ones((2, 3))}
      >>> def loss_fn(params, batch):
      ...     return jnp.mean(jnp.tanh(batch @ params["stem"]) @ params["head"])
      >>> forward_order(loss_fn, params, jnp.ones((4, 2)))
      ('stem', 'head')

    When not to use:
      When the names already are one numbered series, :func:`boostax.parameter_groups` needs no order.
      With several towers side by side there is no one order; this gives that of the trace.
    """
    declared = declared_keywords(loss_fn)
    if "rng" in declared and rng is None:
        rng = jax.random.key(0)
    values, state, rebuild = _split_nnx(params, wrt)
    state = model_state if state is None else state

    def traced(values: Any, batch: Any, state: Any, rng: Any) -> Any:
        keywords = {"rng": rng} if "rng" in declared else {}
        if "model_state" in declared and rebuild is None:
            keywords["model_state"] = state
        model = values if rebuild is None else rebuild(values, state)
        output = loss_fn(model, batch, **keywords)
        if has_aux is not None:
            output = check_output(output, has_aux)
        return [leaf for leaf in jax.tree.leaves(output) if hasattr(leaf, "dtype")]

    jaxpr = jax.make_jaxpr(traced)(values, batch, state, rng)
    paths = leaf_paths(values)
    inputs = len(paths), len(jax.tree.leaves(batch))
    others = len(jax.tree.leaves((state, rng)))
    facts = [Fact(leaves=(i,)) for i in range(inputs[0])]
    facts += [Fact(data=True)] * inputs[1] + [Fact()] * others
    met, touched = first_uses(jaxpr, facts)
    when = {i: met.get(i, touched.get(i)) for i in range(len(paths))}
    unused = [paths[i] for i, time in when.items() if time is None]
    if unused:
        warnings.warn(
            f"forward_order: the loss does not use {', '.join(unused)}; they come last in the order",
            UserWarning,
            stacklevel=2,
        )
    used = sorted((time, i) for i, time in when.items() if time is not None)
    return (*(paths[i] for _, i in used), *unused)


def _split_nnx(params: Any, wrt: Any) -> tuple[Any, Any, Callable[[Any, Any], Any] | None]:
    # A user with an nnx model has imported nnx; others are spared the import.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.Module):
        return params, None, None
    graphdef, values, rest = nnx.split(params, nnx.Param if wrt is None else wrt, ...)
    return values, rest, lambda values, rest: nnx.merge(graphdef, values, rest, copy=True)
