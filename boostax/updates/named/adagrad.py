"""Adagrad as PyTorch and MindSpore have it, for dense and for row-sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from boostax._compat import explicit_spec
from boostax._info import TransformInfo, with_info
from boostax.updates.named import _parts as parts
from boostax.updates.row_sparse import RowSparse, coalesced, is_row_sparse

__all__ = ["AdagradState", "adagrad"]


class AdagradState(NamedTuple):
    """State of :func:`adagrad`.

    Attributes:
      count: int32 (), updates made so far.
      sum_of_squares: like the parameters, float32 or wider.
    """

    count: jax.Array
    sum_of_squares: Any


def adagrad(
    learning_rate: float | Callable[[Any], Any],
    lr_decay: float = 0.0,
    initial_accumulator_value: float | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    mask: Any = None,
    convention: str = "torch",
) -> optax.GradientTransformationExtraArgs:
    r"""Divide each entry's step by the root of the sum of its squared gradients.

    .. math::
        g &\leftarrow g + \delta w \\
        s_t &= s_{t-1} + g^2 \\
        w &\leftarrow w - \frac{\alpha}{1 + t \eta} \, \frac{g}{\sqrt{s_t} + \epsilon}

    with t = 0 at the first update. A leaf of the gradients may be a :class:`boostax.RowSparse`, or a
    ``BCOO`` with one sparse axis, the rows. Its update then is a ``RowSparse``, which
    ``optax.apply_updates`` takes: values of a row that is named twice are added up first, and rows that
    are not named keep parameters and sums, bit for bit.

    Args:
      learning_rate: :math:`\alpha`, at least 0; a number, or a schedule of the update count.
      lr_decay: :math:`\eta`, at least 0. Default 0.
      initial_accumulator_value: :math:`s_{-1}`, at least 0. Default 0, in MindSpore's convention 0.1.
      eps: :math:`\epsilon`, at least 0, outside the root. Default 1e-10, in MindSpore's convention 0;
        an entry whose sum is 0 does not move then.
      weight_decay: :math:`\delta`, at least 0, added to the gradient (L2). Not with sparse gradients.
        Default 0.
      mask: which leaves decay: a tree of bools, a function of the parameters, or a list of path
        patterns. Default None: all.
      convention: ``"torch"`` or ``"mindspore"``: which defaults are taken. Default ``"torch"``.

    Returns:
      A ``GradientTransformationExtraArgs`` with an :class:`AdagradState`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: an argument is out of its range; at update, a sparse gradient where leaves decay.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx, table = adagrad(0.5), jnp.ones((3, 1))
      >>> rows = RowSparse(jnp.array([2, 2]), jnp.array([[1.0], [2.0]]), (3, 1))
      >>> step, state = tx.update(rows, tx.init(table), table)
      >>> optax.apply_updates(table, step)[:, 0].tolist(), state.sum_of_squares[:, 0].tolist()
      ([1.0, 1.0, 0.5], [0.0, 0.0, 9.0])

    Source:
      J. Duchi, E. Hazan and Y. Singer, "Adaptive Subgradient Methods for Online Learning and
      Stochastic Optimization", 2011.

    When not to use:
      Steps only get shorter; for long runs of dense networks take RMSProp or Adam. Sparse gradients
      save nothing where a loss's ``jax.grad`` has already made them dense.
    """
    name = "adagrad"
    theirs = parts.check_convention(name, convention) == "mindspore"
    if initial_accumulator_value is None:
        initial_accumulator_value = 0.1 if theirs else 0.0
    learning_rate = parts.check_rate(name, "learning_rate", learning_rate)
    lr_decay = parts.check_number(name, "lr_decay", lr_decay, 0.0)
    start = parts.check_number(name, "initial_accumulator_value", initial_accumulator_value, 0.0)
    aside = (0.0 if theirs else 1e-10) if eps is None else eps
    aside = parts.check_number(name, "eps", aside, 0.0)
    added = parts.decay(name, weight_decay, mask)
    # Sums never fall, so that one of both keeps the root above 0.
    guarded = not any(isinstance(value, float) and value > 0 for value in (aside, start))

    def init(params: Any) -> AdagradState:
        parts.refuse_complex(name, params)
        sums = jax.tree.map(lambda p: jnp.full_like(p, start, dtype=parts.wide_dtype(p)), params)
        return AdagradState(jnp.zeros((), jnp.int32), sums)

    def dense(grad: Any, old: Any, rate: Any) -> tuple[Any, Any]:
        wide = jnp.asarray(grad).astype(old.dtype)
        new = old + wide * wide
        return (_step(wide, new, rate)).astype(jnp.result_type(grad)), new

    def sparse(grad: Any, old: Any, rate: Any) -> tuple[Any, Any]:
        if added:
            raise ValueError(
                f"{name}: weight_decay={weight_decay} does not go with row-sparse gradients: it "
                "would move every row. Set it to 0, for these leaves with groups=, or give the dense "
                "gradient"
            )
        if tuple(grad.shape) != old.shape:
            raise ValueError(f"{name}: a gradient of shape {grad.shape} for a leaf of {old.shape}")
        if explicit_spec(old) is not None:
            raise ValueError(
                f"{name}: row-sparse gradients don't go with a table that is sharded over explicit mesh "
                "axes; make the mesh with AxisType.Auto, replicate the table, or give the dense gradient"
            )
        rows = coalesced(grad, old.dtype)
        if 0 in old.shape:
            step = RowSparse(rows.indices, rows.values.astype(grad.dtype), rows.shape)
            return step, old
        # Indices that name no row read what they like; the scatters drop them.
        new = old.at[rows.indices].get(mode="clip") + rows.values * rows.values
        step = _step(rows.values, new, rate).astype(grad.dtype)
        sums = old.at[rows.indices].set(new, mode="drop")
        return RowSparse(rows.indices, step, rows.shape), sums

    def _step(grad: Any, new: Any, rate: Any) -> Any:
        root = jnp.sqrt(new) + aside
        if not guarded:
            return -rate * (grad / root)
        moves = root > 0
        return -rate * jnp.where(moves, grad / jnp.where(moves, root, 1.0), 0.0)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AdagradState]:
        del extra_args
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        if not parts.is_zero(lr_decay):
            rate = rate / (1.0 + state.count * lr_decay)
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_row_sparse)
        sums = treedef.flatten_up_to(state.sum_of_squares)
        if added and not any(map(is_row_sparse, leaves)):
            leaves = treedef.flatten_up_to(_decayed(added[0], updates, params))
        pairs = [
            (sparse if is_row_sparse(grad) else dense)(grad, old, _of(rate, old))
            for grad, old in zip(leaves, sums, strict=True)
        ]
        # A decayed gradient is wider; what is emitted has the dtype that came in.
        given = jax.tree.leaves(updates, is_leaf=is_row_sparse)
        out = [
            step if is_row_sparse(step) else step.astype(jnp.result_type(grad))
            for (step, _), grad in zip(pairs, given, strict=True)
        ]
        new = treedef.unflatten([new for _, new in pairs])
        state = AdagradState(parts.next_count(state.count), new)
        return treedef.unflatten(out), state

    shown = {
        "learning_rate": learning_rate,
        "lr_decay": lr_decay,
        "initial_accumulator_value": start,
        "eps": aside,
        "weight_decay": weight_decay,
    }
    return with_info(
        optax.GradientTransformationExtraArgs(init, update), TransformInfo(name, shown)
    )


def _of(rate: Any, leaf: Any) -> Any:
    return rate if isinstance(rate, float) else jnp.asarray(rate).astype(leaf.dtype)


def _decayed(part: Any, updates: Any, params: Any) -> Any:
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x).astype(parts.wide_dtype(x)), tree)
    seen = None if params is None else wide(params)
    return part.update(wide(updates), part.init(params), seen)[0]
