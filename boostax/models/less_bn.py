"""Fewer batch norms: each branch of a residual network keeps only its last one.

A residual block computes ``shortcut(x) + branch(x)``. What bounds the sum is the norm right before
the addition; the norms further up in the branch, and the shortcut's, go::

    conv - BN - relu - conv - BN - (+)        conv - bias - relu - conv - BN - (+)
    conv - BN -------------------'            conv - bias -------------------'

Blocks are found from the traced forward pass, so that names don't matter, and nothing that lies
between the layers hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
from flax import nnx

from boostax._tree import PathPattern, matches
from boostax.errors import did_you_mean
from boostax.models._branches import Fate, fates_of_norms, gain_place
from boostax.models._layer_graph import LayerGraph, layer_graph
from boostax.models._left_over import can_change
from boostax.models._less_bn_plan import Plan
from boostax.models._patterns import pattern_list
from boostax.models.report import ModelReport, nothing_matched

__all__ = ["less_bn"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "keep": ("last", "none"),
    "shortcut": (False, True),
    "bias": ("auto", True, False),
    "compensation": (None, "skip_init", "scaled_ws"),
}


def less_bn(
    model: Any,
    *example_inputs: Any,
    keep: Literal["last", "none"] = "last",
    shortcut: bool = False,
    bias: Literal["auto"] | bool = "auto",
    compensation: Literal["skip_init", "scaled_ws"] | None = None,
    patterns: PathPattern | Sequence[PathPattern] | None = None,
    rngs: Any = None,
    method: str | None = None,
    **kwargs: Any,
) -> tuple[Any, ModelReport]:
    r"""Take batch norms out of a network that is trained from scratch.

    For the addition of two values of which one, the branch, has more layers of its own:

    - of the branch's batch norms the last stays, the earlier ones go;
    - the shortcut's go;
    - norms in no block, such as the stem's, stay.

    In an inverted residual (expand, depthwise, project, each with a norm; with an addition or without)
    the depthwise convolution's norm goes, since it lies between two that stay. In a dense block
    (norm, layer, norm, layer, appended to its input) the first one goes. ResNet-18 keeps 9 of its 20
    batch norms, ResNet-50 17 of 53.

    Where a norm followed a layer without bias, its bias stays, under its own path, so that a
    checkpoint's still loads. Nothing is computed here; a linen model is rewritten before its
    ``init``, and no parameter of a norm that went is ever made.

    Args:
      model: a linen module (unbound) or an nnx module, which is not changed.
      *example_inputs: inputs for one call; ``ShapeDtypeStruct`` will do.
      keep: ``"last"`` (default) as above, ``"none"``: all batch norms go, the stem's too.
      shortcut: True keeps the norms of projection shortcuts: ResNet-50 keeps 21. Default False.
      bias: ``"auto"`` (default) as above, True: all biases of norms that go stay, False: none does.
      compensation: None (default); ``"skip_init"``: the last norm of a residual branch goes too, and
        a learnable scalar ``skip_gain`` that starts at 0 takes its place (where a layer follows that
        norm, at the branch's end); ``"scaled_ws"``: the norms that go leave scale and bias behind,
        and the kernels ahead of them are standardised over each unit's inputs,
        :math:`\gamma\,(w - \bar w) / \sqrt{n\,\mathrm{var}(w)}`, with the constant
        :math:`\gamma = 1/\mathrm{std}(f(z))`, :math:`z \sim N(0, 1)`, of the activation ahead.
      patterns: path patterns; exactly the batch norms that one matches go. A pattern is shell-style
        text (``"layer1/*/bn1"``), a compiled regular expression, or a function of the path.
        Default None: blocks are found as above.
      rngs: linen only, a key or a dict of them, for models that need more than ``params`` and
        ``dropout``. Default None.
      method: name of the method that is called. Default None: ``__call__``.
      **kwargs: keyword arguments of the call, such as ``train=True``.

    Returns:
      The model with fewer norms, of the same framework, and a
      :class:`~boostax.ModelReport`: each norm that went and why, each that stayed and why.

    Raises:
      ValueError: no batch norm is to go (the message lists the layers that were looked at), a
        pattern matches none, or an argument is out of range.
      TypeError: ``model`` is neither a linen nor an nnx module, or there are no example inputs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         norm = lambda: nn.BatchNorm(use_running_average=False)
      ...         y = nn.relu(norm()(nn.Conv(4, (3, 3), use_bias=False)(x)))
      ...         return x + norm()(nn.Conv(4, (3, 3), use_bias=False)(y))
      >>> x = jnp.ones((1, 8, 8, 4))
      >>> model, report = less_bn(Block(), x)
      >>> [(change.path, change.after) for change in report.changes]
      [('BatchNorm_0', 'bias')]
      >>> sorted(model.init(jax.random.key(0), x)["batch_stats"])
      ['BatchNorm_1']

    Source:
      The LessBN of MindSpore Boost (2021); S. De and S. L. Smith, "Batch Normalization Biases Residual
      Blocks Towards the Identity Function in Deep Networks", 2020; A. Brock, S. De and S. L. Smith,
      "Characterizing Signal Propagation to Close the Performance Gap in Unnormalized ResNets", 2021.

    When not to use:
      Twice on one model: blocks whose norms went are no longer seen as such. With a long branch
      around the whole network, whose last norm alone would stay: name what goes by ``patterns``.
      On a trained network: without its norms it is another function. For inference take
      :func:`boostax.fold_batch_norm`. For networks that the rules above don't fit, such as those with
      layer norms.
    """
    _check(keep=keep, shortcut=shortcut, bias=bias, compensation=compensation)
    if not isinstance(model, nn.Module | nnx.Module):
        raise TypeError(f"less_bn: model must be a linen or nnx module, got {type(model).__name__}")
    chosen = None if patterns is None else pattern_list("less_bn: patterns", patterns)
    if chosen is not None and (keep == "none" or compensation == "skip_init"):
        raise ValueError(
            "less_bn: patterns says which norms go, and needs keep='last' and no compensation by "
            f"'skip_init'; got keep={keep!r}, compensation={compensation!r}"
        )
    graph = layer_graph(model, example_inputs, kwargs, rngs=rngs, method=method)
    fates = fates_of_norms(graph, shortcut=shortcut)
    gains: dict[int, str] = {}
    notes = [f"{path}: inside a loop that is not followed, left as it was" for path in graph.opaque]
    if chosen is not None:
        fates = _by_pattern(graph, chosen)
    elif compensation == "skip_init":
        fates, gains, more = _skip_init(graph, fates)
        kept = "keeps it" if keep == "last" else "gets no scalar"
        notes += [f"the branch of {norm} {kept}: {_NO_PLACE}" for norm in more]
    if keep == "none":
        fates = {norm: _gone(fate) for norm, fate in fates.items()}
    plan = Plan(graph, fates, gains, bias, compensation)
    if not plan.changes:
        seen = [(call.path, call.type) for call in _calls(graph)]
        raise nothing_matched(
            "less_bn",
            "a batch norm ahead of an addition with an earlier one in its branch",
            list(dict.fromkeys(seen)),
            "Batch norms can be named by patterns=, or taken out altogether with keep='none'.",
        )
    report = ModelReport("less_bn", tuple(plan.changes), tuple(plan.left), (*notes, *plan.notes))
    return plan.apply(model), report


def _check(**given: Any) -> None:
    for name, value in given.items():
        allowed = _CHOICES[name]
        if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
            hint = did_you_mean(value, [a for a in allowed if isinstance(a, str)])
            raise ValueError(
                f"less_bn: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}"
            )


_NO_PLACE = "its end has no layer whose result could be scaled by 0 and still learn"


def _calls(graph: LayerGraph) -> list[Any]:
    return [node.call for node in graph.nodes if node.call is not None]


def _gone(fate: Fate) -> Fate:
    return Fate(True, "all of them go", fate.branch)


def _by_pattern(graph: LayerGraph, patterns: Sequence[PathPattern]) -> dict[int, Fate]:
    norms = {n: graph.call(n).path for n in graph.layers("batch_norm")}
    for pattern in patterns:
        if not any(matches(pattern, path) for path in norms.values()):
            hint = did_you_mean(pattern, norms.values()) if isinstance(pattern, str) else ""
            raise ValueError(
                f"less_bn: patterns: {pattern!r} matches no batch norm.{hint} Batch norms: "
                f"{', '.join(dict.fromkeys(norms.values())) or 'none'}"
            )
    hit = lambda path: any(matches(pattern, path) for pattern in patterns)
    why = {True: "matched by patterns", False: "matched by no pattern"}
    return {norm: Fate(hit(path), why[hit(path)]) for norm, path in norms.items()}


def _skip_init(
    graph: LayerGraph, fates: dict[int, Fate]
) -> tuple[dict[int, Fate], dict[int, str], list[str]]:
    """Let all norms of residual branches go; say at which layers the scalars stand, and why.

    Last come the norms whose branch has no place for a scalar.
    """
    gains, notes = {}, []
    for branch in dict.fromkeys(f.branch for f in fates.values()):
        if branch is None or branch.kind != "residual":
            continue
        place = gain_place(graph, branch)
        call = None if place is None else graph.call(place)
        if place is None or call is None or not (call.kind == "batch_norm" or can_change(call)):
            last = [graph.call(n).path for n, f in fates.items() if f.branch == branch]
            notes.append(last[-1])
            continue
        gains[place] = "the end of a residual branch"
        why = "in a branch that begins as zero"
        fates = fates | {n: Fate(True, why, branch) for n, f in fates.items() if f.branch == branch}
    return fates, gains, notes
