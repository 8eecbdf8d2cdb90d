"""Batch statistics of a window of micro-batches: as if the window had been one batch.

A batch norm layer with momentum m (on the old value) turns its statistics ``s`` into
``m * s + (1 - m) * batch statistics``. Run micro-batch after micro-batch, that happens once a
micro-batch, so that its time constant depends on how a batch is split. Here every micro-batch i
starts from the SAME statistics, and the results are pooled with the weights w::

    ra_mean = wmean(ra_mean_i)
    ra_var  = wmean(ra_var_i) + wvar(ra_mean_i) / (1 - m)

which is what one batch of all the examples gives. Pooled are pairs: siblings ``mean`` and ``var``
in linen's ``batch_stats`` collection, or of type ``nnx.BatchStat``. Every other leaf of the model
state is threaded through: each micro-batch starts from what the last one left.

The streaming form, the same in a scan over micro-batches and across steps::

    window = init_window(model_state)                          # at the window's start
    _, new_state = forward(model_state, micro_batch)
    window = add_micro(window, model_state, new_state, weight, ok)
    model_state = thread(model_state, new_state, ok)           # pairs stay, the rest moves on
    ...                                                        # after the last micro-batch
    model_state = close_window(window, model_state, momenta_for(model_state, momenta))
    window = reset(window)                                     # also what drops a window

``momenta`` comes from ``collect_momenta(nnx_model)`` or ``collect_momenta(function, *args)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import path_string

__all__ = [
    "Window",
    "add_micro",
    "close_window",
    "collect_momenta",
    "init_window",
    "momenta_for",
    "pair_paths",
    "pool",
    "recording_momenta",
    "reset",
    "thread",
    "unknown_momenta",
]

Momenta = Mapping[str, float]


class Window(NamedTuple):
    """Partial sums of a window, one entry a (mean, var) pair, in tree order.

    Attributes:
      weight: float32 scalar, the sum of the micro-batches' weights.
      mean: weighted mean of the running means that the micro-batches led to (float32, or float64 for
        float64 statistics, as the two others).
      var: weighted mean of their running variances.
      spread: weighted sum of squared deviations of the running means from ``mean``;
        updated by West's recurrence, because a difference of sums of squares would lose a small
        spread of large means.
    """

    weight: jax.Array
    mean: tuple[jax.Array, ...]
    var: tuple[jax.Array, ...]
    spread: tuple[jax.Array, ...]


class Flat(NamedTuple):
    leaves: list[Any]
    treedef: Any
    pairs: tuple[tuple[str, int, int], ...]  # (module path, index of mean, index of var)


def flatten_statistics(model_state: Any) -> Flat:
    # Leaves are arrays; whether one is a statistic is told by its collection or its variable.
    is_variable = lambda node: _variable_type(node) is not None
    parts, _ = jax.tree_util.tree_flatten_with_path(model_state, is_leaf=is_variable)
    found: dict[str, dict[str, int]] = {}
    position = 0
    for key_path, part in parts:
        size = len(jax.tree.leaves(part))
        kind = _variable_type(part)
        path = path_string(key_path).split("/")
        is_stat = path[0] == "batch_stats" if kind is None else kind == "BatchStat"
        if is_stat and size == 1 and path[-1] in ("mean", "var"):
            module = path[:-1] if kind is not None else path[1:-1]
            found.setdefault("/".join(module), {})[path[-1]] = position
        position += size
    leaves, treedef = jax.tree.flatten(model_state)
    pairs = tuple(
        (module, names["mean"], names["var"])
        for module, names in found.items()
        if len(names) == 2
        and jnp.shape(leaves[names["mean"]]) == jnp.shape(leaves[names["var"]])
        and jnp.issubdtype(jnp.result_type(leaves[names["mean"]]), jnp.floating)
    )
    return Flat(leaves, treedef, pairs)


def _variable_type(node: Any) -> str | None:
    """Return ``"BatchStat"`` or another name for an nnx variable, else None; never imports nnx."""
    names = [cls.__name__ for cls in type(node).__mro__ if cls.__module__.startswith("flax.nnx")]
    if "Variable" not in names:
        return None
    return "BatchStat" if "BatchStat" in names else names[0]


def pair_paths(model_state: Any) -> tuple[str, ...]:
    """Return the module path of each (mean, var) pair of a model state, in tree order.

    Example:
      >>> pair_paths({"batch_stats": {"bn": {"mean": np.zeros(2), "var": np.ones(2)}}})
      ('bn',)
    """
    return tuple(module for module, _, _ in flatten_statistics(model_state).pairs)


def init_window(model_state: Any) -> Window:
    """Return the empty window for a model state (arrays or ``ShapeDtypeStruct``)."""
    flat = flatten_statistics(model_state)
    zeros = lambda: tuple(
        jnp.zeros(
            jnp.shape(flat.leaves[mean]),
            jnp.promote_types(jnp.result_type(flat.leaves[mean]), jnp.float32),
        )
        for _, mean, _ in flat.pairs
    )
    return Window(jnp.zeros((), jnp.float32), zeros(), zeros(), zeros())


def reset(window: Window) -> Window:
    """Return an empty window of the same shapes; what had been gathered is dropped."""
    return jax.tree.map(jnp.zeros_like, window)


def add_micro(window: Window, start: Any, new: Any, weight: Any = 1.0, ok: Any = True) -> Window:
    """Add the statistics that one micro-batch led to.

    Args:
      window: the window so far.
      start: the model state that the micro-batch started from.
      new: the model state after it, or None if the forward pass changed nothing.
      weight: scalar >= 0, the micro-batch's weight. Default 1. A weight of 0 adds nothing.
      ok: bool scalar; False leaves the window as it is, whatever ``new`` holds. Default True.

    Returns:
      The new window.
    """
    flat = flatten_statistics(start if new is None else new)
    _check_pairs(window, flat)
    weight = jnp.asarray(weight, jnp.float32)
    used = jnp.asarray(ok) & (weight != 0)
    total = jnp.where(used, window.weight + weight, window.weight)
    means, variances, spreads = [], [], []
    for (_, at_mean, at_var), mean, var, spread in zip(
        flat.pairs, window.mean, window.var, window.spread, strict=True
    ):
        # A dropped micro-batch may hold NaN: it is replaced before it meets the sums.
        x = jnp.where(used, jnp.asarray(flat.leaves[at_mean], mean.dtype), mean)
        v = jnp.where(used, jnp.asarray(flat.leaves[at_var], var.dtype), var)
        own = jnp.where(used, weight, 0.0).astype(mean.dtype)
        share = own / jnp.where(total == 0, 1.0, total).astype(mean.dtype)
        new_mean = mean + share * (x - mean)
        means.append(new_mean)
        variances.append(var + share * (v - var))
        spreads.append(spread + own * (x - mean) * (x - new_mean))
    return Window(total, tuple(means), tuple(variances), tuple(spreads))


def thread(start: Any, new: Any, ok: Any = True) -> Any:
    """Return the state that the next micro-batch of the window starts from.

    The (mean, var) pairs stay as in ``start``; the other leaves are those of ``new`` where ``ok``.
    """
    if new is None:
        return start
    old, flat = flatten_statistics(start), flatten_statistics(new)
    _check_same(old, flat)
    held = {index for _, mean, var in old.pairs for index in (mean, var)}
    leaves = [
        before if i in held else _select(ok, after, before)
        for i, (before, after) in enumerate(zip(old.leaves, flat.leaves, strict=True))
    ]
    return old.treedef.unflatten(leaves)


def close_window(window: Window, start: Any, momenta: tuple[float, ...]) -> Any:
    """Return the model state after the window: the pairs pooled, the other leaves as in ``start``.

    Args:
      window: what was gathered. If its weight is 0, ``start`` is returned unchanged.
      start: the model state whose pairs the window's micro-batches started from.
      momenta: one momentum a pair, in the order of :func:`pair_paths`; see :func:`momenta_for`.

    Returns:
      A model state of the same structure and dtypes.
    """
    flat = flatten_statistics(start)
    _check_pairs(window, flat)
    leaves = list(flat.leaves)
    some = window.weight != 0
    weight = jnp.where(some, window.weight, 1.0)
    for (_, at_mean, at_var), mean, var, spread, momentum in zip(
        flat.pairs, window.mean, window.var, window.spread, momenta, strict=True
    ):
        # With m = 1 the layer never moves, so the means don't spread either.
        between = jnp.zeros_like(spread)
        if momentum < 1:
            between = spread / (weight.astype(spread.dtype) * (1.0 - momentum))
        for index, value in ((at_mean, mean), (at_var, var + between)):
            old = jnp.asarray(leaves[index])
            leaves[index] = jnp.where(some, value.astype(old.dtype), old)
    return flat.treedef.unflatten(leaves)


def pool(
    start: Any, micro_states: list[Any], weights: list[Any], momenta: tuple[float, ...]
) -> Any:
    """Pool the model states that micro-batches led to, each from ``start``.

    Example:
      >>> def bn(mean, var):
      ...     return {"batch_stats": {"bn": {"mean": np.array([mean]), "var": np.array([var])}}}
      >>> after = [bn(0.1 * mean, 0.9 + 0.1 * 1.0) for mean in (0.0, 2.0, 4.0, 6.0)]
      >>> pooled = pool(bn(0.0, 1.0), after, [1, 1, 1, 1], (0.9,))["batch_stats"]["bn"]
      >>> round(float(pooled["mean"][0]), 4), round(float(pooled["var"][0]), 4)
      (0.3, 1.5)
    """
    window, state = init_window(start), start
    for new, weight in zip(micro_states, weights, strict=True):
        window = add_micro(window, state, new, weight)
        state = thread(state, new)
    return close_window(window, state, momenta)


def collect_momenta(source: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Read each normalisation layer's momentum, by module path.

    Args:
      source: an ``nnx.Module``, whose graph is searched; or a function, which is traced with
        ``args`` (never run) while linen's calls are watched. Functions under ``jax.jit`` in it are
        traced again even if JAX holds a trace of them.
      *args: arguments of the function (arrays or ``ShapeDtypeStruct``).
      **kwargs: keyword arguments of the function.

    Returns:
      ``{"block/bn": 0.99, ...}``
    """
    if hasattr(source, "__call__") and not _is_nnx_module(source):  # noqa: B004
        with recording_momenta() as found:
            # A new function each time: a trace that comes from JAX's cache calls no module.
            jax.eval_shape(lambda *a, **k: _without_jit(source, *a, **k), *args, **kwargs)
        return found
    from flax import nnx

    found = {}
    for path, node in nnx.iter_graph(source):
        momentum: Any = getattr(node, "momentum", None)
        if isinstance(node, nnx.Module) and _is_number(momentum):
            found["/".join(str(key) for key in path)] = float(momentum)
    return found


def _without_jit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # An inner jit that was traced before would answer from JAX's cache too.
    with jax.disable_jit():
        return function(*args, **kwargs)


@contextlib.contextmanager
def recording_momenta() -> Iterator[dict[str, float]]:
    """Record the momenta of the linen modules that are called inside the ``with`` block."""
    import flax.linen as nn

    found: dict[str, float] = {}

    def watch(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        momentum: Any = getattr(module, "momentum", None)
        if context.method_name == "__call__" and _is_number(momentum):
            found["/".join(module.path)] = float(momentum)
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(watch):
        yield found


def momenta_for(
    model_state: Any, collected: Momenta, override: float | None = None
) -> tuple[float, ...]:
    """Return the momentum of each (mean, var) pair, in tree order.

    Args:
      model_state: the model state that holds the pairs.
      collected: momentum by module path, from :func:`collect_momenta`.
      override: one momentum for all pairs; default None: what was collected.

    Raises:
      ValueError: a pair's momentum is not known; the message names the layer.
    """
    paths = pair_paths(model_state)
    if override is not None:
        if not _is_number(override) or not 0 <= override <= 1:
            raise ValueError(
                f"batch_norm_momentum is the share of the old value and must be a number in "
                f"[0, 1], got {override!r}"
            )
        return (float(override),) * len(paths)
    return tuple(_lookup(path, collected) for path in paths)


def unknown_momenta(model_state: Any, collected: Momenta) -> tuple[str, ...]:
    """Return the paths of the pairs for which :func:`momenta_for` would raise, in tree order."""
    return tuple(p for p in pair_paths(model_state) if len(_candidates(p, collected)) != 1)


def _candidates(path: str, collected: Momenta) -> set[float]:
    if path in collected:
        return {collected[path]}
    # A submodule applied on its own has a shorter path than its statistics have.
    return {m for known, m in collected.items() if known == "" or path.endswith("/" + known)}


def _lookup(path: str, collected: Momenta) -> float:
    found = _candidates(path, collected)
    if len(found) == 1:
        return found.pop()
    raise ValueError(
        f"the momentum of the normalisation layer {path!r} is not known "
        f"(known: {dict(collected)}); pass batch_norm_momentum=, the share of the old value "
        "(flax's default is 0.99), or stats='per_micro'"
    )


def _select(ok: Any, after: Any, before: Any) -> Any:
    if ok is True or after is before:
        return after
    return jnp.where(ok, after, before)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_nnx_module(value: Any) -> bool:
    return any(
        cls.__name__ == "Module" and cls.__module__.startswith("flax.nnx")
        for cls in type(value).__mro__
    )


def _check_pairs(window: Window, flat: Flat) -> None:
    if len(window.mean) != len(flat.pairs):
        raise ValueError(
            f"window: it was made for {len(window.mean)} pairs of statistics, the model state has "
            f"{len(flat.pairs)}; make it with init_window of the same model's state"
        )


def _check_same(old: Flat, new: Flat) -> None:
    if old.treedef != new.treedef:
        raise ValueError(
            "LossAux.model_state has another structure than the model state that went in: "
            f"{new.treedef} instead of {old.treedef}; return all collections but params, changed "
            "or not"
        )
