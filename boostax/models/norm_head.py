"""A model's classifier, and nothing else, made a normalised one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx

from boostax._tree import PathPattern, matches
from boostax.errors import did_you_mean
from boostax.models import _norm_checks as checks
from boostax.models._calls import called_layers
from boostax.models._kinds import DENSE
from boostax.models._layer_graph import TRANSPARENT, LayerGraph, layer_graph
from boostax.models._surgery_linen import Rule, rewrite
from boostax.models._surgery_nnx import named_modules, replace_modules
from boostax.models.normalized import multiplier_start
from boostax.models.normalized_dense import NormalizedDense
from boostax.models.normalized_linear import NormalizedLinear
from boostax.models.report import Change, ModelReport, NothingToRewriteError, nothing_matched

__all__ = ["norm_head"]


def norm_head(
    model: Any,
    *example_inputs: Any,
    path: PathPattern | None = None,
    multiplier_init: float | None = None,
    use_bias: bool = False,
    epsilon: float = 1e-4,
    rngs: Any = None,
    method: str | None = None,
    **kwargs: Any,
) -> tuple[Any, ModelReport]:
    """Make the classifier of a model a normalised one.

    The classifier is the dense layer whose output is the model's output, found from the traced
    forward pass; dense layers further inside stay. It becomes a :class:`~boostax.NormalizedLinear`
    (nnx) or :class:`~boostax.NormalizedDense` (linen) with the same kernel, under the same path.

    Args:
      model: an nnx module, which is not changed, or a linen module (unbound).
      *example_inputs: inputs for one call; ``ShapeDtypeStruct`` will do. With nnx and ``path`` they
        may be left out.
      path: which dense layer, by path: shell-style text (``"fc"``), a compiled regular expression,
        or a function of the path, that matches one dense layer. Default None: found as above.
      multiplier_init: what the multiplier starts with, above 0; default None:
        ``max(1, sqrt(2) ln(classes - 1))``. The reference, ``mindspore.boost``, starts with 1.
      use_bias: keep a bias. Default False: the reference has none.
      epsilon: the least squared norm. Default 1e-4.
      rngs: linen only, a key or a dict of them, for models that need more than ``params`` and
        ``dropout``. Default None.
      method: name of the method that is called. Default None: ``__call__``.
      **kwargs: keyword arguments of the call, such as ``train=True``.

    Returns:
      The new model, of the same framework, and a :class:`~boostax.ModelReport`: the layer that was
      changed, and the dense layers that were not.

    Raises:
      ValueError: no dense layer's output is the model's output, or several are; ``path`` matches no
        dense layer or several; or an argument is out of range.
      TypeError: ``model`` is neither a linen nor an nnx module.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> net = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 10, rngs=rngs))
      >>> new, report = norm_head(net, jnp.ones((2, 4)))
      >>> [(change.path, change.after) for change in report.changes], report.left
      ([('layers/2', 'NormalizedLinear')], (('layers/0', "is not the model's output"),))

    When not to use:
      Regression; and on a trained classifier that is not trained on: logits are cosines then.
    """
    name = "norm_head"
    checks.check_flag(name, "use_bias", use_bias)
    checks.check_epsilon(name, epsilon)
    multiplier_start(name, multiplier_init, 2)
    if not isinstance(model, nn.Module | nnx.Module):
        raise TypeError(
            f"norm_head: model must be a linen or nnx module, got {type(model).__name__}"
        )
    given = bool(example_inputs or kwargs)
    if not given and (path is None or isinstance(model, nn.Module)):
        raise ValueError(
            "norm_head: the classifier is found by a call; give example inputs, as in "
            "norm_head(model, x)" + (", or path" if isinstance(model, nnx.Module) else "")
        )
    settings = HeadRule(multiplier_init, use_bias, epsilon)
    if path is None:
        graph = layer_graph(model, example_inputs, kwargs, rngs=rngs, method=method)
        layers = {
            call.path: call.layer
            for call in (graph.nodes[i].call for i in graph.layers("weight"))
            if call is not None and isinstance(call.layer, DENSE)
        }
        head = _head_of(graph, layers)
        why = "its output is the model's"
    else:
        layers = _dense_layers(model, example_inputs, kwargs, rngs, method)
        head = _named(path, layers)
        why = f"path={path!r}" if isinstance(path, str) else "path"
    return _replaced(model, layers, head, settings, why)


@dataclasses.dataclass(frozen=True)
class HeadRule:
    """How the head is normalised; also the rule of a linen layer."""

    multiplier_init: float | None
    use_bias: bool
    epsilon: float

    def __call__(self, layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the normalised layer in a linen layer's place, in its scope."""
        del call
        given = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs).arguments
        head = NormalizedDense(
            layer.features,
            dtype=layer.dtype,
            param_dtype=layer.param_dtype,
            precision=layer.precision,
            kernel_init=layer.kernel_init,
            bias_init=layer.bias_init,
            parent=layer.scope,
            **dataclasses.asdict(self),
        )
        return head(list(given.values())[1])

    def made(self, layer: Any) -> NormalizedLinear:
        """Return the normalised layer in an nnx layer's place, with its variables."""
        head = NormalizedLinear(
            layer.in_features,
            layer.out_features,
            dtype=layer.dtype,
            param_dtype=layer.param_dtype,
            precision=layer.precision,
            rngs=nnx.Rngs(0),
            **dataclasses.asdict(self),
        )
        head.kernel = layer.kernel
        if self.use_bias and layer.bias is not None:
            head.bias = layer.bias
        return head


def _head_of(graph: LayerGraph, layers: Mapping[str, Any]) -> str:
    """Return the path of the dense layer that gives the model's output."""
    found: dict[str, None] = {}
    for output in graph.outputs:
        # Casts and reshapes may follow; anything else (a softmax) would see other logits.
        follows = graph.nodes[output].op in TRANSPARENT
        for node in graph.ahead(output) if follows else [output]:
            call = graph.nodes[node].call
            if call is not None and call.path in layers:
                found[call.path] = None
    if len(found) > 1:
        raise NothingToRewriteError(
            f"norm_head: several dense layers give an output of the model: {', '.join(found)}; "
            "choose one by path="
        )
    if not found:
        raise nothing_matched(
            "norm_head",
            "a dense layer whose output is the model's output",
            [(path, type(layer).__name__) for path, layer in layers.items()],
            "If something follows the classifier, name it by path=.",
        )
    return next(iter(found))


def _dense_layers(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rngs: Any, method: str | None
) -> dict[str, Any]:
    if isinstance(model, nnx.Module):
        return {
            p: module for p, module in named_modules(model).items() if isinstance(module, DENSE)
        }
    calls = called_layers(model, args, kwargs, rngs=rngs, method=method)
    return {call.path: call.layer for call in calls if isinstance(call.layer, DENSE)}


def _named(pattern: PathPattern, layers: Mapping[str, Any]) -> str:
    found = [path for path in layers if matches(pattern, path)]
    if len(found) == 1:
        return found[0]
    hint = did_you_mean(pattern, layers) if isinstance(pattern, str) and not found else ""
    raise ValueError(
        f"norm_head: path {pattern!r} must match one dense layer, and matches "
        f"{', '.join(found) or 'none'}.{hint} Dense layers: {', '.join(layers) or 'none'}"
    )


def _replaced(
    model: Any, layers: Mapping[str, Any], head: str, settings: HeadRule, why: str
) -> tuple[Any, ModelReport]:
    layer = layers[head]
    if not isinstance(layer, nn.Dense | nnx.Linear):
        raise ValueError(
            f"norm_head: {head} is a {type(layer).__name__}; only Dense (linen) and Linear (nnx) "
            "can be made normalised"
        )
    classes = layer.features if isinstance(layer, nn.Dense) else layer.out_features
    start = multiplier_start("norm_head", settings.multiplier_init, classes)
    if isinstance(layer, nn.Dense):
        new = rewrite(model, [Rule(head, type(layer), settings)])
        after, had_bias = "NormalizedDense", layer.use_bias
    else:
        new = replace_modules(model, {head: settings.made})
        after, had_bias = "NormalizedLinear", layer.bias is not None
    change = Change(head, type(layer).__name__, after, f"{why}; multiplier {start:.4g}")
    left = [(path, "is not the model's output") for path in layers if path != head]
    if not why.startswith("its"):
        left = [(path, "path does not match it") for path, _ in left]
    notes = ["the head's bias is dropped"] if had_bias and not settings.use_bias else []
    plain: Any = nn.Dense(1) if isinstance(layer, nn.Dense) else nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    notes += [
        f"the head's own {name} is not used"
        for name in ("dot_general", "dot_general_cls", "promote_dtype")
        if getattr(layer, name, None) != getattr(plain, name, None)
    ]
    return new, ModelReport("norm_head", (change,), tuple(left), tuple(notes))
