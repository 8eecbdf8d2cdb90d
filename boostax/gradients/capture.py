"""Capture: find the layers of any loss from its trace, without a change to the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.core
import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import PathPattern, check_matched, leaf_paths, matches
from boostax.errors import did_you_mean
from boostax.gradients._plan import Plan, make_plan
from boostax.gradients.layers import CapturedLayers
from boostax.training.contract import (
    CanonicalLoss,
    canonical_loss,
    declared_keywords,
    first_result,
)

__all__ = ["capture_layers"]


def capture_layers(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    model_state: Any = None,
    rng: Any = None,
    has_aux: bool | None = None,
    wrt: Any = None,
    block_size: int = 256,
    fisher: Literal["empirical", "true"] = "empirical",
    exclude: PathPattern | Sequence[PathPattern] = (),
    mode: Literal["default", "reference"] = "default",
) -> CapturedLayers:
    r"""Find the layers of a loss, for a second-order optimizer such as :func:`boostax.thor`.

    The loss is traced (nothing is computed or compiled), and each parameter leaf followed, through
    casts, reshapes, transposes, jit, remat, scan and functions with custom derivatives, to the
    dense layers, convolutions and embeddings that it feeds. For each of them, with rows of inputs
    :math:`a` (a last 1 where it has a bias) and derivatives :math:`g` of the loss by its outputs,

    .. math::
        A = \frac1R \sum_{\text{rows}} a\,a^\top, \qquad
        G = N \sum_{\text{rows}} g\,g^\top,

    with :math:`R` rows (examples, positions and calls) and the loss's weight :math:`N`, so that
    :math:`A \otimes G` approximates the Fisher matrix of the kernel. Where the loss returns a
    ``LossAux.weight``, rows without any derivative, such as padding, are not among them.
    ``train_step`` reads them in the backward pass, when the optimizer says that they are due.

    Args:
      loss_fn: the loss, as for :func:`boostax.train_step`.
      params: the parameters, or the ``nnx.Module``. Abstract leaves (``ShapeDtypeStruct``) do.
      batch: one batch; abstract leaves do. Its size is free.
      model_state: the linen collections other than params, for a loss that declares
        ``model_state``. Default None.
      rng: a key, for a loss that declares ``rng``. Default None: ``jax.random.key(0)``.
      has_aux: whether the loss returns ``(loss, LossAux)``. Default None: read from what it returns.
      wrt: nnx only, the filter for the trained variables. Default None: ``nnx.Param``.
      block_size: int >= 1; a factor with more rows is cut into the fewest even pieces along its
        diagonal that have at most as many. Default 256.
      fisher: ``"empirical"`` (default): G from the loss's own derivatives. ``"true"``: from those of
        labels drawn from the model's ``LossAux.predictive``, at the cost of a second backward pass.
      exclude: path patterns of leaves that stay first order. Default none.
      mode: ``"reference"``: the statistics as ``mindspore.nn.thor`` takes them. Default
        ``"default"``.

    Returns:
      :class:`~boostax.gradients.layers.CapturedLayers`; ``print(layers.describe())`` tells for every
      leaf which block it became, or why it stays first order.

    Raises:
      TypeError: an argument has a wrong type, or the loss does not fit the contract.
      ValueError: an argument is out of range, the loss can't be traced or has no layer, or
        ``fisher="true"`` and the loss gives no ``predictive``.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2), "scale": jnp.ones(2)}
      >>> def loss_fn(p, x):
      ...     return jnp.mean(jnp.sum((p["scale"] * (x @ p["w"] + p["b"])) ** 2, axis=-1))
      >>> layers = capture_layers(loss_fn, params, jnp.ones((4, 3)))
      >>> for path, fate in layers.fates().items():
      ...     print(path, "->", fate)
      b -> the last row of w
      scale -> first order: scales data, as a norm's scale does
      w -> dense: A 4 x 4, G 2 x 2

    Source:
      J. Martens and R. Grosse, Optimizing Neural Networks with Kronecker-factored Approximate
      Curvature, 2015; R. Grosse and J. Martens, A Kronecker-factored Approximate Fisher Matrix for
      Convolution Layers, 2016.

    When not to use:
      For a loss with layers inside ``cond``, ``while_loop`` or ``shard_map``, or whose forward pass
      needs Python values of the parameters: their leaves stay first order, or the trace fails.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)):
        raise TypeError(f"capture_layers: block_size must be an int >= 1, got {block_size!r}")
    if block_size < 1:
        raise ValueError(f"capture_layers: block_size must be an int >= 1, got {block_size}")
    for name, value, allowed in (
        ("fisher", fisher, ("empirical", "true")),
        ("mode", mode, ("default", "reference")),
    ):
        if value not in allowed:
            raise ValueError(
                f"capture_layers: {name} must be one of {', '.join(map(repr, allowed))}, got "
                f"{value!r}.{did_you_mean(value, allowed)}"
            )
    if has_aux is not None and not isinstance(has_aux, bool):
        raise TypeError(f"capture_layers: has_aux must be a bool or None, got {has_aux!r}")
    if isinstance(exclude, (str, re.Pattern)) or callable(exclude):
        exclude = (exclude,)
    if not isinstance(exclude, Sequence) or not all(
        isinstance(p, (str, re.Pattern)) or callable(p) for p in exclude
    ):
        raise TypeError(
            "capture_layers: exclude must be path patterns (text, a compiled regex, or a test of a "
            f"path), got {exclude!r}"
        )
    declared_keywords(loss_fn)
    if rng is None:
        rng = jax.random.key(0)
    model_state = flax.core.unfreeze(model_state)
    forms = _Forms(loss_fn, has_aux, wrt)
    values = forms(params)[1]
    if not jax.tree.leaves(values):
        raise ValueError("capture_layers: the parameters hold no arrays")
    paths = leaf_paths(values)
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(
            f"capture_layers: several parameters have the path {', '.join(map(repr, twice))}; rename "
            "them, since layers go by their path"
        )
    for pattern in exclude:
        check_matched("capture_layers: exclude", pattern, paths)
    left_out = lambda path: any(matches(pattern, path) for pattern in exclude)
    try:
        if has_aux is None:
            forms.has_aux = forms.look(params, batch, model_state, rng)
        loss, values, state = forms(params)
        state = model_state if state is None else state
        plan = make_plan(
            loss,
            values,
            state,
            batch,
            rng,
            block_size=int(block_size),
            mode=mode,
            exclude=left_out,
        )
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise ValueError(
            "capture_layers: the loss can't be traced, because it asks for the value of an array: "
            f"{str(error).splitlines()[0]} Write it with jnp.where, jax.lax.cond or static arguments."
        ) from error
    if not plan.blocks:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in plan.first_order.items())
        raise ValueError(
            f"capture_layers: the loss has no dense layer, convolution or embedding that could be "
            f"captured ({reasons}); a first-order optimizer does as well"
        )
    if fisher == "true":
        _check_predictive(plan)
    return CapturedLayers(
        blocks=plan.blocks,
        first_order=plan.first_order,
        paths=paths,
        leaf_shapes=tuple(tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(values)),
        block_size=int(block_size),
        fisher=fisher,
        mode=mode,
        loss=forms,
    )


class _Forms:
    """Brings parameters or an nnx model, and the loss, into the form of the gradient seam."""

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool | None, wrt: Any):
        self.loss_fn, self.has_aux, self.wrt = loss_fn, has_aux, wrt

    def __call__(self, params: Any) -> tuple[CanonicalLoss, Any, Any]:
        """Return the loss, the parameters, and the model's own state (None for linen and plain)."""
        from boostax.training._start import check_arrays, nnx_module

        if nnx_module(params) is None:
            if hasattr(params, "apply") and hasattr(params, "init"):
                raise TypeError(
                    f"capture_layers needs parameters, got the linen module {type(params).__name__}; "
                    "pass model.init(key, inputs)['params']"
                )
            check_arrays(params, "capture_layers")
            return canonical_loss(self.loss_fn, has_aux=bool(self.has_aux)), params, None
        from flax import nnx

        from boostax.training._nnx import NnxModel

        model = NnxModel(params, nnx.Param if self.wrt is None else self.wrt)
        loss = model.canonical_loss(self.loss_fn, bool(self.has_aux))
        return loss, model.params, model.model_state

    def look(self, params: Any, batch: Any, model_state: Any, rng: Any) -> bool:
        """Say whether the loss returns something beside its value."""
        loss_fn, seen = first_result(self.loss_fn)
        loss, values, state = _Forms(loss_fn, False, self.wrt)(params)
        jax.eval_shape(loss, values, model_state if state is None else state, batch, rng)
        return seen[-1]


def _check_predictive(plan: Plan) -> None:
    _, aux = plan.out_tree.unflatten(plan.jaxpr.out_avals)
    if not hasattr(aux.predictive, "sampled_loss"):
        raise ValueError(
            'capture_layers: fisher="true" draws labels from the model, and the loss returns '
            f"LossAux(predictive={aux.predictive!r}); return boostax.Categorical(logits) or "
            'boostax.Gaussian(mean, scale) there, or use fisher="empirical"'
        )
