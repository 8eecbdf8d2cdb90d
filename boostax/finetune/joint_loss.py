"""One loss of two: source and target data, each with its own head, through a common backbone."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax.errors import did_you_mean
from boostax.training._arguments import merge_state
from boostax.training._start import nnx_module
from boostax.training.contract import (
    LossAux,
    check_output,
    declared_keywords,
    weight_of,
    with_parts,
)

__all__ = ["joint_loss"]

Statistics = Literal["target", "source", "both"]
Inputs = str | Callable[[Any], Any]
_NAME = "joint_loss"
_SIDES = ("source", "target")


def joint_loss(
    source_loss: Callable[..., Any],
    target_loss: Callable[..., Any],
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    statistics: Statistics | None = None,
    forward: Callable[..., Any] | None = None,
    inputs: Inputs = "x",
) -> Callable[..., Any]:
    r"""Build the loss of training on source and target data at once, for :func:`boostax.train_step`.

    .. math::
        L(\theta) = w_s\, \frac{1}{n_s} \sum_{i \in \text{source}} \ell_s(\theta; x_i, y_i)
                  + w_t\, \frac{1}{n_t} \sum_{j \in \text{target}} \ell_t(\theta; x_j, y_j)

    over a batch ``{"source": ..., "target": ...}``, whose two parts may have different sizes. Each loss
    is a mean of its own, so that a part's share does not depend on its size.

    What batch norm sees is a choice. **Two passes**, without ``forward``: first the source, then the
    target, each normalised by its own statistics; ``statistics`` says whose running statistics are
    kept for evaluation. **One pass**, with ``forward``: both parts as one batch, normalised by their
    common statistics, which are also the ones that are kept.

    Args:
      source_loss: ``source_loss(params, batch["source"], *, model_state, rng)`` by the contract of
        :func:`boostax.train_step` (nnx: the model in place of params, no ``model_state``), returning a
        loss or ``(loss, LossAux)``. With ``forward``: ``source_loss(outputs, batch["source"])``, where
        the outputs are the rows of the source.
      target_loss: the same for the target.
      weights: w_s and w_t, finite numbers >= 0, not both 0; numpy's and JAX's scalars too. Default
        (1.0, 1.0).
      statistics: whose batch statistics are kept in two passes: ``"target"``, ``"source"``, or
        ``"both"``: the target's update on top of the source's. Default None: ``"target"``, by which the
        target was normalised in training. Not beside ``forward``.
      forward: ``forward(params, inputs, *, model_state, rng) -> outputs`` (nnx: the model in place of
        params) runs the network once, with both heads; outputs is any pytree of arrays with the
        inputs' leading axis. A forward that declares ``model_state`` may return ``(outputs,
        model_state)``, with linen's changed collections as a dict. Default None: two passes.
      inputs: with ``forward``, the key of the inputs in both parts, or a function from a part to its
        inputs; their leaves are joined along the leading axis. Default ``"x"``.

    Returns:
      ``loss(params, batch, *, model_state, rng) -> (loss, LossAux)``; declares the keywords that its
      parts declare. Use it with ``has_aux=True``. The metrics hold ``"source/loss"``,
      ``"target/loss"`` and the parts' own under such names; the weight is the sum of both parts'
      weights; ``aux`` is a dict of the parts' own. Each part gets a random key of its own.

    Raises:
      TypeError: an argument has a wrong type, or a part does not fit the contract.
      ValueError: weights or an option out of range; when it runs: a batch without the two parts or
        without the inputs, outputs of another leading size, or a part's own metric ``"loss"``.

    Example:
      >>> import jax.numpy as jnp, optax, boostax
      >>> mean_square = lambda head: lambda p, b: jnp.mean((b["x"] * p["w"] * p[head] - b["y"]) ** 2)
      >>> loss_fn = boostax.joint_loss(mean_square("a"), mean_square("b"), weights=(0.5, 1.0))
      >>> params = {"w": jnp.float32(1), "a": jnp.float32(1), "b": jnp.float32(2)}
      >>> part = lambda n: {"x": jnp.ones(n), "y": jnp.zeros(n)}
      >>> loss, aux = loss_fn(params, {"source": part(6), "target": part(2)})
      >>> float(loss), float(aux.metrics["target/loss"]), float(aux.weight)
      (4.5, 4.0, 8.0)

    Source:
      W. Ge and Y. Yu, "Borrowing Treasures from the Wealthy: Deep Transfer Learning through Selective
      Joint Fine-tuning", 2017.

    When not to use:
      With THOR's true Fisher: there is no one predictive distribution.
    """
    share = _weights(weights)
    parts = {"source": source_loss, "target": target_loss}
    if forward is None:
        if inputs != "x":
            raise ValueError(f"{_NAME}: inputs= goes with forward=")
        kept = _statistics("target" if statistics is None else statistics)
        declared = {k: declared_keywords(f, f"{_NAME}: {k}_loss") for k, f in parts.items()}
        run = _two_passes(parts, declared, kept)
        keywords = declared["source"] | declared["target"]
    else:
        if statistics is not None:
            raise ValueError(
                f"{_NAME}: statistics= goes with two passes; with forward= both parts are one batch, "
                "and its statistics are kept"
            )
        if not (isinstance(inputs, str) or callable(inputs)):
            raise TypeError(
                f"{_NAME}: inputs must be a key or a function of a part, got {inputs!r}"
            )
        keywords = declared_keywords(forward, f"{_NAME}: forward")
        for name, function in parts.items():
            extra = declared_keywords(function, f"{_NAME}: {name}_loss") & _required(function)
            if extra:
                raise TypeError(
                    f"{_NAME}: with forward=, {name}_loss is called as (outputs, part); it can't have "
                    f"{', '.join(sorted(extra))}, which forward gets"
                )
        run = _one_pass(parts, forward, keywords, inputs)

    def loss(params: Any, batch: Any, *, model_state: Any = None, rng: Any = None) -> Any:
        _check_batch(batch)
        losses, auxes, changed = run(params, batch, model_state, rng)
        # A part without weight is left out: 0 times infinity is no 0.
        terms = [share[name] * losses[name] for name in _SIDES if share[name]]
        metrics = {f"{name}/loss": losses[name] for name in _SIDES}
        for name in _SIDES:
            if "loss" in auxes[name].metrics:
                raise ValueError(
                    f"{_NAME}: {name}_loss returned a metric 'loss', but '{name}/loss' is the loss "
                    "itself; give it another name"
                )
            metrics |= {f"{name}/{key}": value for key, value in auxes[name].metrics.items()}
        own = {name: auxes[name].aux for name in _SIDES}
        return sum(terms[1:], terms[0]), LossAux(
            model_state=changed,
            metrics=metrics,
            weight=sum(weight_of(auxes[name], batch[name]) for name in _SIDES),
            aux=None if all(value is None for value in own.values()) else own,
        )

    _declare(loss, keywords)
    return with_parts(loss, _SIDES)


def _two_passes(
    parts: Mapping[str, Any], declared: Mapping[str, frozenset[str]], kept: Statistics
) -> Callable[..., Any]:
    def run(params: Any, batch: Any, model_state: Any, rng: Any) -> Any:
        nnx = nnx_module(params)
        losses: dict[str, jax.Array] = {}
        auxes: dict[str, LossAux] = {}
        changed: dict[str, Any] = {}
        for number, name in enumerate(_SIDES):
            given = {"model_state": merge_state(model_state, changed or None), "rng": None}
            if rng is not None:
                given["rng"] = jax.random.fold_in(rng, number)
            before = None if nnx is None else nnx.state(params, nnx.BatchStat)
            values = None if before is None else jax.tree.map(lambda leaf: leaf, before)
            output = parts[name](params, batch[name], **{k: given[k] for k in declared[name]})
            losses[name], auxes[name] = check_output(
                output, isinstance(output, tuple), f"{_NAME}: {name}_loss"
            )
            keep = kept in (name, "both")
            if nnx is not None and not keep:
                nnx.update(params, values)
            new = auxes[name].model_state or {}
            changed |= {k: v for k, v in new.items() if keep or k != "batch_stats"}
        return losses, auxes, changed or None

    return run


def _one_pass(
    parts: Mapping[str, Any], forward: Any, keywords: frozenset[str], inputs: Inputs
) -> Callable[..., Any]:
    def take(name: str, part: Any) -> Any:
        if callable(inputs):
            return inputs(part)
        if not isinstance(part, Mapping) or inputs not in part:
            got = sorted(map(str, part)) if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f"{_NAME}: the {name}'s part has no key {inputs!r}, got {got}; inputs= names the key of "
                "the inputs, or is a function from a part to them"
            )
        return part[inputs]

    def run(params: Any, batch: Any, model_state: Any, rng: Any) -> Any:
        both = [take(name, batch[name]) for name in _SIDES]
        size, more = (jax.tree.leaves(part)[0].shape[0] for part in both)
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *both)
        given = {"model_state": model_state, "rng": rng}
        outputs, changed = forward(params, joined, **{k: given[k] for k in keywords}), None
        if "model_state" in keywords and _has_state(outputs, model_state):
            outputs, changed = outputs
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            if jnp.shape(leaf)[:1] != (size + more,):
                raise ValueError(
                    f"{_NAME}: forward must return outputs with the inputs' leading axis of "
                    f"{size + more}, got the shape {jnp.shape(leaf)} at outputs"
                    f"{jax.tree_util.keystr(path)}; a changed model_state is returned as (outputs, "
                    "model_state), by a forward that declares model_state"
                )
        rows = {
            "source": jax.tree.map(lambda leaf: leaf[:size], outputs),
            "target": jax.tree.map(lambda leaf: leaf[size:], outputs),
        }
        losses, auxes = {}, {}
        for name in _SIDES:
            output = parts[name](rows[name], batch[name])
            losses[name], auxes[name] = check_output(
                output, isinstance(output, tuple), f"{_NAME}: {name}_loss"
            )
            if auxes[name].model_state is not None:
                raise TypeError(
                    f"{_NAME}: {name}_loss returned LossAux.model_state; with forward= the model's "
                    "state is what forward returns beside the outputs"
                )
        return losses, auxes, changed

    return run


def _has_state(outputs: Any, model_state: Any) -> bool:
    """Tell whether forward returned ``(outputs, collections)``, and not a pair of outputs."""
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[1], Mapping)):
        return False
    new = set(outputs[1])
    return not new or not model_state or bool(new & set(model_state))


def _declare(loss: Any, keywords: frozenset[str]) -> None:
    """Let the signature tell which keywords are needed; the step passes what it declares."""
    kind = inspect.Parameter
    loss.__signature__ = inspect.Signature(
        [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in ("params", "batch")]
        + [kind(name, kind.KEYWORD_ONLY) for name in sorted(keywords)]
    )


def _required(function: Any) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.default is p.empty)


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping) or set(batch) != set(_SIDES):
        got = f"the keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch)
        raise ValueError(
            f"{_NAME}: a batch must be {{'source': ..., 'target': ...}}, as boostax.joint_batches "
            f"gives it, got {got}"
        )


def _weights(weights: Any) -> dict[str, float]:
    if isinstance(weights, (np.ndarray, jax.Array)) and not isinstance(weights, Tracer):
        weights = np.asarray(weights).tolist()
    if not isinstance(weights, (tuple, list)) or len(weights) != 2:
        raise TypeError(f"{_NAME}: weights must be two numbers (source, target), got {weights!r}")
    share = {}
    for name, value in zip(_SIDES, weights, strict=True):
        known = value
        if isinstance(value, (np.generic, np.ndarray, jax.Array)) and not isinstance(value, Tracer):
            known = np.asarray(value).tolist()
        if isinstance(known, bool) or not isinstance(known, numbers.Real):
            raise TypeError(
                f"{_NAME}: the {name}'s weight must be a number that does not change, got {value!r}"
            )
        if not 0 <= float(known) < math.inf:
            raise ValueError(f"{_NAME}: the {name}'s weight must be finite and >= 0, got {value}")
        share[name] = float(known)
    if not any(share.values()):
        raise ValueError(f"{_NAME}: both weights are 0; give at least one above 0")
    return share


def _statistics(value: Any) -> Statistics:
    if value not in get_args(Statistics):
        raise ValueError(
            f"{_NAME}: statistics must be one of {', '.join(map(repr, get_args(Statistics)))}, got "
            f"{value!r}.{did_you_mean(str(value), get_args(Statistics))}"
        )
    return value
