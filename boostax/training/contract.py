"""The loss contract: how a user's loss function is called and what it may return.

``loss`` is the mean over the (micro-)batch's examples or tokens. With ``has_aux=True`` the
function returns ``(loss, LossAux)``. The keywords ``model_state`` and ``rng`` are passed only
where the function declares them. Whatever the model library, the gradient seam works with the
canonical form ``(params, model_state, batch, rng) -> (loss, LossAux)``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

__all__ = [
    "CanonicalLoss",
    "LossAux",
    "batch_parts",
    "batch_size",
    "batch_sizes",
    "canonical_loss",
    "declared_keywords",
    "first_result",
    "weight_of",
    "with_parts",
]

_PARTS = "__boostax_batch_parts__"

CanonicalLoss = Callable[[Any, Any, Any, Any], tuple[jax.Array, "LossAux"]]


class LossAux(flax.struct.PyTreeNode):
    """What a loss function returns beside the loss.

    Attributes:
      model_state: the linen collections other than params after this forward pass (a dict of
        pytrees), or None if they did not change. An nnx model's own state is read from the model.
      metrics: scalar means under ``weight``, by name; windows and devices average them by weight.
      weight: float scalar >= 0, the denominator of the loss's mean (number of examples or
        tokens). Default None: the batch's leading size.
      predictive: the model's predictive distribution, for the true Fisher. Default None.
      aux: anything else, handed back unreduced (of the last micro-batch).

    Example:
      >>> import jax.numpy as jnp
      >>> aux = LossAux(metrics={"accuracy": jnp.float32(0.5)}, weight=jnp.float32(32))
      >>> float(aux.metrics["accuracy"])
      0.5
    """

    model_state: Any = None
    metrics: Mapping[str, chex.Array] = flax.struct.field(default_factory=dict)
    weight: chex.Numeric | None = None
    predictive: Any = None
    aux: Any = None


def declared_keywords(loss_fn: Callable[..., Any], argument: str = "loss_fn") -> frozenset[str]:
    """Return which of ``model_state`` and ``rng`` a loss function declares.

    Raises:
      TypeError: ``loss_fn`` is not callable, or has required parameters beyond the contract.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"{argument} must be a function (params, batch, ...) -> loss, got {type(loss_fn).__name__}"
        )
    parameters = list(inspect.signature(loss_fn).parameters.values())
    known = ("model_state", "rng")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    declared = frozenset(
        k
        for k in known
        if takes_any or any(p.name == k and p.kind is not p.POSITIONAL_ONLY for p in parameters)
    )
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.default is p.empty
        and p.name not in declared
    ]
    accepts_two = any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        sum(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in declared
            for p in parameters
        )
        >= 2
    )
    extra = positional[2:] + [
        p.name
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in declared
    ]
    if not accepts_two or extra:
        raise TypeError(
            f"{argument} must be called as (params, batch), with model_state and rng as optional "
            f"keywords; got the signature {inspect.signature(loss_fn)}. Close over other values, or "
            "put them into the batch."
        )
    return declared


def canonical_loss(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, argument: str = "loss_fn"
) -> CanonicalLoss:
    """Bring a linen or plain loss function into the form that the gradient seam works with.

    Args:
      loss_fn: ``loss_fn(params, batch, *, model_state, rng) -> loss | (loss, LossAux)``.
      has_aux: whether it returns ``(loss, LossAux)``. Default False.
      argument: the name used in error messages.

    Returns:
      ``loss(params, model_state, batch, rng) -> (loss, LossAux)``, with the loss a scalar.

    Raises:
      TypeError: the signature or, when traced, what is returned does not fit the contract.
    """
    declared = declared_keywords(loss_fn, argument)

    def loss(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, LossAux]:
        given = {"model_state": model_state, "rng": rng}
        return check_output(
            loss_fn(params, batch, **{k: given[k] for k in sorted(declared)}), has_aux, argument
        )

    return loss


def first_result(loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[bool]]:
    """Return a loss function without what it returns beside the loss, and a list.

    Each call appends whether there was something.
    """
    seen: list[bool] = []

    def alone(*args: Any, **keywords: Any) -> Any:
        output = loss_fn(*args, **keywords)
        seen.append(isinstance(output, tuple))
        return output[0] if seen[-1] else output

    return functools.update_wrapper(alone, loss_fn), seen


def check_output(
    output: Any, has_aux: bool, argument: str = "loss_fn"
) -> tuple[jax.Array, LossAux]:
    """Check what a loss function returned against the contract, and return ``(loss, LossAux)``."""
    if not has_aux:
        if isinstance(output, tuple):
            raise TypeError(
                f"{argument} returned a tuple, but has_aux is False; pass has_aux=True to return "
                "(loss, LossAux(...))"
            )
        output = (output, LossAux())
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], LossAux)):
        got = (
            f"({', '.join(type(o).__name__ for o in output)})"
            if isinstance(output, tuple)
            else type(output).__name__
        )
        raise TypeError(
            f"{argument} with has_aux=True must return (loss, boostax.LossAux(...)), got {got}; put "
            "what you return beside the loss into LossAux(aux=...)"
        )
    loss, aux = output
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"{argument} must return a real floating scalar, got shape {jnp.shape(loss)} and dtype "
            f"{jnp.result_type(loss)}; take the mean over the batch"
        )
    for name, value in aux.metrics.items():
        if jnp.shape(value) != ():
            raise TypeError(
                f"LossAux.metrics[{name!r}] must be a scalar mean, got shape {jnp.shape(value)}; "
                "arrays belong in LossAux.aux"
            )
    if aux.weight is not None and jnp.shape(aux.weight) != ():
        raise TypeError(f"LossAux.weight must be a scalar, got shape {jnp.shape(aux.weight)}")
    return jnp.asarray(loss), aux


def batch_size(batch: Any) -> int:
    """Return the leading size that all arrays of a batch share.

    Raises:
      ValueError: the batch has no arrays, a scalar, unequal leading sizes, or is empty.
    """
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        name = jax.tree_util.keystr(path) or "the batch"
        if not shape:
            raise ValueError(
                f"batch: {name} is a scalar and has no batch axis; close over it, or give the loss "
                "an explicit LossAux.weight"
            )
        sizes[name] = shape[0]
    if not sizes:
        raise ValueError(
            "batch: no arrays in it; a batch is a pytree of arrays with a leading axis"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(f"batch: the leading sizes differ: {sizes}")
    size = next(iter(sizes.values()))
    if size == 0:
        raise ValueError("batch: the leading size is 0; drop empty batches")
    return size


def with_parts(loss_fn: Callable[..., Any], parts: tuple[str, ...]) -> Callable[..., Any]:
    """Note that a loss takes a dict of parts, each with a leading size of its own, and return it.

    Such a loss gives its own weight.
    """
    setattr(loss_fn, _PARTS, parts)
    return loss_fn


def batch_parts(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parts that :func:`with_parts` noted, or none."""
    return getattr(loss_fn, _PARTS, ())


def batch_sizes(batch: Any, parts: tuple[str, ...] = ()) -> list[int]:
    """Return the leading size of each part of a batch; without parts, the one size of all.

    Raises:
      ValueError: as for :func:`batch_size`, for a part.
    """
    if not parts or not isinstance(batch, Mapping) or set(batch) != set(parts):
        return [batch_size(batch)]
    return [batch_size(batch[part]) for part in parts]


def weight_of(aux: LossAux, batch: Any) -> jax.Array:
    """Return the float32 weight of a (micro-)batch: the loss's own, or the leading size."""
    if aux.weight is not None:
        return jnp.asarray(aux.weight, jnp.float32)
    return jnp.float32(batch_size(batch))
