"""The rewrites of a model that AutoBoost makes, for training and for inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from boostax.models._rewritten import rewrites_in
from boostax.models.fold_batch_norm import fold_batch_norm
from boostax.models.less_bn import less_bn
from boostax.models.norm_head import norm_head
from boostax.models.report import ModelReport, NothingToRewriteError
from boostax.training.state import TrainState

if TYPE_CHECKING:
    from boostax.config import BoostConfig

__all__ = ["evaluation_model", "rewritten"]

OFF = "less_bn is off, so the model stays as it is"


def rewritten(
    config: BoostConfig, model: Any, inputs: tuple[Any, ...], call: Mapping[str, Any], strict: bool
) -> tuple[Any, ModelReport]:
    """Return the model with fewer batch norms and a normalised head, and what was changed.

    Args:
      config: the config; its section says how.
      model: a linen or nnx module.
      inputs: inputs of one call.
      call: more keywords of the rewrites: those of the call, ``rngs`` and ``method``.
      strict: whether a rewrite that finds nothing raises; else that is noted.

    Raises:
      NothingToRewriteError: a rewrite finds nothing to change.
      TypeError: ``model`` is neither a linen nor an nnx module.
    """
    section = config.less_bn
    rewrites: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (
            less_bn,
            {
                "keep": section.keep,
                "shortcut": section.shortcut,
                "bias": section.bias,
                "compensation": section.compensation,
                "patterns": section.patterns,
            },
        )
    ]
    if section.fn_flag:
        settings = {"path": section.head, "multiplier_init": section.multiplier_init}
        rewrites.append((norm_head, settings))
    done, report = rewrites_in(model), ModelReport()
    for rewrite, settings in rewrites:
        name = rewrite.__name__
        if name in done:
            # A second time it would see other blocks, and make another model.
            report += ModelReport(
                name, notes=(f"{name} was done already: the model is left as it is",)
            )
            continue
        model, more = _tried(strict, rewrite, model, *inputs, **settings, **call)
        report += more
    return model, report


# What the rewrites' own arguments are called in a config.
_KEYS = (("path=", "less_bn.head"), ("patterns=", "less_bn.patterns"), ("keep=", "less_bn.keep"))


def _tried(
    strict: bool, rewrite: Callable[..., Any], model: Any, *inputs: Any, **settings: Any
) -> tuple[Any, ModelReport]:
    try:
        return rewrite(model, *inputs, **settings)
    except NothingToRewriteError as raised:
        text = str(raised)
        named = [f"{name} is {key}" for name, key in _KEYS if name in text]
        error = NothingToRewriteError(
            text + (f" (In a config {', '.join(named)}.)" if named else "")
        )
        if strict:
            raise error from None
        note = f"{rewrite.__name__} changed nothing: {error}"
        return model, ModelReport(rewrite.__name__, notes=(note,))


def evaluation_model(
    config: BoostConfig,
    model: Any,
    report: ModelReport,
    state: TrainState | None,
    inputs: tuple[Any, ...],
    call: Mapping[str, Any],
) -> tuple[Any, ModelReport]:
    """Return the rewritten model for evaluation, with the trained values in it.

    nnx: in evaluation mode; linen with a state: bound to the state's variables.

    Raises:
      TypeError: ``state`` is none, or ``model`` is no module.
    """
    folds = config.less_bn.fold
    if state is None:
        if folds:
            report += ModelReport(
                notes=("nothing is folded: that needs state=, the trained values",)
            )
        return (_evaluating(model), report) if isinstance(model, nnx.Module) else (model, report)
    if not isinstance(state, TrainState):
        raise TypeError(f"model: state must be a boostax.TrainState, got {type(state).__name__}")
    if isinstance(model, nnx.Module):
        model = _evaluating(state.merge(model))
        if folds:
            model, more = _tried(False, fold_batch_norm, model, *inputs, **call)
            report += more
        return model, report
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: state= is for linen and nnx modules, got {type(model).__name__}; call a function "
            "with state.params"
        )
    # A copy: the next step may be given the state's own arrays to write over.
    variables = jax.tree.map(jnp.copy, {"params": state.params, **(state.model_state or {})})
    if folds:
        try:
            model, variables, more = fold_batch_norm(model, *inputs, variables=variables, **call)
        except NothingToRewriteError as error:
            more = ModelReport("fold_batch_norm", notes=(f"nothing is folded: {error}",))
        report += more
    return model.bind(variables), report


def _evaluating(model: Any) -> Any:
    model = nnx.clone(model)
    model.eval()
    return model
