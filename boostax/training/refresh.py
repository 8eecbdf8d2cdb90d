"""Batch statistics anew, for parameters that were moved without them: one pass over some data.

With b_i the statistics of batch i and w_i its weight::

    mean = sum_i w_i mean(b_i) / sum_i w_i
    var  = sum_i w_i (var(b_i) + (mean(b_i) - mean)^2) / sum_i w_i

A layer with the momentum m on the old value, which starts from statistics of zero, leaves
``(1 - m) b_i`` behind, so that b_i can be told from it. Which layers take statistics, and that each does
so once in a forward pass, is seen by starting the first batch from other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax.training._arguments import merge_state
from boostax.training._start import nnx_module, typed_key
from boostax.training.batch_stats import (
    add_micro,
    close_window,
    collect_momenta,
    flatten_statistics,
    init_window,
    momenta_for,
    pair_paths,
    thread,
    unknown_momenta,
)
from boostax.training.contract import canonical_loss, declared_keywords, first_result, weight_of
from boostax.training.state import TrainState

__all__ = ["refresh_batch_statistics"]

_NAME = "refresh_batch_statistics"


def refresh_batch_statistics(
    loss_fn: Callable[..., Any],
    target: Any,
    batches: Iterable[Any],
    *,
    model: Any = None,
    model_state: Any = None,
    has_aux: bool | None = None,
    rng: Any = None,
    batch_norm_momentum: float | None = None,
) -> Any:
    r"""Take the statistics of batch norm anew, by a pass over data with the parameters as they are.

    .. math::
        \mu = \frac{\sum_i w_i \mu_i}{\sum_i w_i}, \qquad
        \sigma^2 = \frac{\sum_i w_i \left(\sigma_i^2 + (\mu_i - \mu)^2\right)}{\sum_i w_i}

    over the batches i with their weights: not a running average, but what one batch of all the data
    would give. (Behind another batch norm that is so but for the normalisation ahead, which is each
    batch's own, as in training.) Needed where parameters were moved without their statistics: a mean
    of several parameters, a start point of a :class:`boostax.TrajectoryBasis`, another model's
    parameters.

    Args:
      loss_fn: the loss, by the contract of :func:`boostax.train_step`; it must run the model as in
        training, so that batch norm uses the batch. Only the forward pass is computed.
      target: what to refresh: a :class:`boostax.TrainState`, an nnx model, or parameters (linen).
      batches: batches of data, at least one; as ``loss_fn`` takes them. Each shape compiles once.
      model: the nnx model of a train state. Default None.
      model_state: linen's other collections, where ``target`` is parameters. Default None.
      has_aux: as for :func:`boostax.train_step`. Default None: read from what ``loss_fn`` returns.
      rng: a key or an int seed, where the loss declares ``rng``. Default None: the train state's.
      batch_norm_momentum: the layers' momentum on the old value, >= 0 and < 1, where it can't be read
        from the model. Default None: read.

    Returns:
      The same kind of thing: a train state, a copy of the nnx model, or, for parameters, the model
      state. Leaves that are no batch statistics stay as they were, but for what each forward pass
      changes (counters, random keys).

    Raises:
      TypeError: an argument has a wrong type, or the nnx model is missing.
      ValueError: there is no batch, or no weight in all of them; the model has no batch statistics, or
        ``loss_fn`` leaves them as they are; a layer takes them more than once in a forward pass; its
        momentum is not known; the new statistics are not finite.

    Example:
      >>> import jax.numpy as jnp, boostax
      >>> from flax import nnx
      >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
      >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])]
      >>> new = boostax.refresh_batch_statistics(loss_fn, model, batches)
      >>> print(new.mean.get_value(), new.var.get_value(), model.mean.get_value())
      [4.] [5.] [0.]

    Source:
      P. Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018,
      section 3.2.

    When not to use:
      After ordinary training, whose running statistics have followed the parameters.
    """
    forward = _Forward(loss_fn, target, model, model_state, has_aux, rng)
    start = forward.start
    if not flatten_statistics(start).pairs:
        raise ValueError(
            f"{_NAME}: there are no batch statistics (pairs of mean and var) to take anew; pass what "
            "holds them: the train state, the nnx model, or model_state="
        )
    window, moving, momenta, state = init_window(start), (), None, start

    @jax.jit
    def add(params: Any, window: Any, state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        weight, after = forward(params, state, batch, rng)
        return add_micro(window, state, after, weight), thread(state, after)

    count = -1
    for count, batch in enumerate(_checked(batches)):
        key = forward.key(count)
        if momenta is None:
            if not float(forward.compiled(forward.params, start, batch, key)[0]) > 0:
                continue  # nothing can be learned from it, and it may hold anything
            moving = _moving(forward, start, batch, key)
            momenta = _momenta(forward, start, moving, batch, key, batch_norm_momentum)
            _check_once(forward, start, moving, momenta, batch, key)
            # Layers that use what they have, frozen ones, must find it.
            state = _filled(start, moving, 0.0)
        window, state = add(forward.params, window, state, batch, key)
    if momenta is None:
        raise ValueError(
            f"{_NAME}: batches is empty; give at least one batch"
            if count < 0
            else f"{_NAME}: the weight of all batches together is 0"
        )
    pooled = close_window(window, state, momenta)
    # A layer that holds its statistics has spread none, so that they came back as they were.
    new = _changed(pooled, moving, lambda leaf, i: (leaf / (1 - momenta[i])).astype(leaf.dtype))
    _check_finite(new)
    return forward.result(new)


class _Forward:
    """The forward pass of a target, from its loss: ``(params, state, batch, rng) -> weight, state``."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        target: Any,
        model: Any,
        model_state: Any,
        has_aux: bool | None,
        rng: Any,
    ):
        declared = declared_keywords(loss_fn, f"{_NAME}: loss_fn")
        self.target, self.model = target, model
        self._nnx: Any = None
        is_state = isinstance(target, TrainState)
        if model is not None and not is_state:
            raise TypeError(f"{_NAME}: model= goes with a train state; give the model alone")
        if model_state is not None and (is_state or nnx_module(target)):
            raise TypeError(f"{_NAME}: model_state= goes with parameters; the target holds its own")
        if is_state and rng is None and target.rng is not None:
            rng = target.rng
        if "rng" in declared and rng is None:
            raise ValueError(f"{_NAME}: loss_fn declares rng; pass rng=jax.random.key(0)")
        self._key = None if rng is None else typed_key(rng)
        params = target
        if is_state:
            params, model_state = target.params, target.model_state
        owner = model if is_state else target
        if nnx_module(owner):
            from flax import nnx

            from boostax.training._nnx import NnxModel, same_paths

            assert owner is not None
            self._nnx = NnxModel(owner, same_paths(params) if is_state else nnx.Param)
            if not is_state:
                params, model_state = self._nnx.params, self._nnx.model_state
        elif is_state and type(params).__module__.startswith("flax.nnx"):
            raise TypeError(
                f"{_NAME}: this train state is of an nnx model; pass model=, the one that was given to "
                "step.init"
            )
        elif hasattr(params, "apply") and hasattr(params, "init"):
            raise TypeError(
                f"{_NAME}: target is the linen module {type(params).__name__}; pass its parameters, and "
                "model_state={'batch_stats': ...}"
            )
        self.params, self.start = params, model_state
        self.compiled = jax.jit(self.__call__)
        self._loss_fn, self._has_aux = loss_fn, has_aux

    def __call__(self, params: Any, state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        loss = self._canonical(params, state, batch, rng)
        _, aux = loss(params, state, batch, rng)
        return weight_of(aux, batch), merge_state(state, aux.model_state)

    def momenta(self, state: Any, batch: Any, rng: Any) -> dict[str, float]:
        if self._nnx is not None:
            return self._nnx.momenta
        return collect_momenta(self, self.params, state, batch, rng)

    def key(self, number: int) -> Any:
        return None if self._key is None else jax.random.fold_in(self._key, number)

    def result(self, model_state: Any) -> Any:
        if isinstance(self.target, TrainState):
            return self.target.replace(model_state=model_state)
        if self._nnx is not None:
            return self._nnx.merge(jax.tree.map(jnp.copy, self.params), model_state)
        return model_state

    def _canonical(self, params: Any, state: Any, batch: Any, rng: Any) -> Callable[..., Any]:
        if self._has_aux is None:
            self._has_aux = self._returns_aux(params, state, batch, rng)
        return self._form(self._loss_fn, self._has_aux)

    def _form(self, loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        if self._nnx is not None:
            return self._nnx.canonical_loss(loss_fn, has_aux)
        return canonical_loss(loss_fn, has_aux=has_aux, argument=f"{_NAME}: loss_fn")

    def _returns_aux(self, params: Any, state: Any, batch: Any, rng: Any) -> bool:
        loss_fn, seen = first_result(self._loss_fn)
        jax.eval_shape(self._form(loss_fn, False), params, state, batch, rng)
        return seen[-1]


def _moving(forward: _Forward, start: Any, batch: Any, rng: Any) -> tuple[int, ...]:
    """Return which pairs of statistics the forward pass changes, by their places.

    Raises:
      ValueError: none, or the new ones are not finite.
    """
    places = tuple(range(len(flatten_statistics(start).pairs)))
    held = set(places)
    # One start alone may be what a layer would come to anyway.
    for value in (0.0, 1.0):
        filled = _filled(start, places, value)
        old = flatten_statistics(filled)
        new = flatten_statistics(_after(forward, filled, batch, rng))
        for place in places:
            pairs = [(old.leaves[i], new.leaves[i]) for i in old.pairs[place][1:]]
            if not all(np.array_equal(a, b) for a, b in pairs):
                held.discard(place)
    if len(held) == len(places):
        raise ValueError(
            f"{_NAME}: loss_fn leaves the batch statistics as they are; run the model as in training "
            "(use_running_average=False; linen: mutable=['batch_stats'], and return "
            "LossAux(model_state=...)), with layers whose momentum is below 1"
        )
    return tuple(place for place in places if place not in held)


def _check_once(
    forward: _Forward,
    start: Any,
    moving: tuple[int, ...],
    momenta: tuple[float, ...],
    batch: Any,
    rng: Any,
) -> None:
    """Raise where a layer keeps another part of its old statistics than its momentum says."""
    ends = [
        flatten_statistics(_after(forward, _filled(start, moving, value), batch, rng))
        for value in (0.0, 1.0)
    ]
    for place in moving:
        path, at, _ = ends[0].pairs[place]
        low, high = (np.asarray(end.leaves[at], np.float64) for end in ends)
        if not np.all(np.isfinite(low)):
            raise ValueError(_not_finite(path, "mean"))
        kept, momentum = float(np.max(high - low)), momenta[place]
        # The mean itself is lost in what rounding leaves of a difference.
        noise = 1e-6 * float(np.max(np.abs(low))) + 1e-2 * (1 - momentum)
        if abs(kept - momentum) > noise:
            raise ValueError(
                f"{_NAME}: a forward pass keeps {kept:.4g} of the old statistics of {path!r}, whose "
                f"momentum is {momentum:g}: it runs more than once in a pass, so that its uses can't be "
                "told apart, or the momentum is another (batch_norm_momentum=)"
            )


def _after(forward: _Forward, state: Any, batch: Any, rng: Any) -> Any:
    return forward.compiled(forward.params, state, batch, rng)[1]


def _filled(model_state: Any, places: tuple[int, ...], value: float) -> Any:
    """Return the model state with the statistics of some pairs all of one value."""
    return _changed(model_state, places, lambda leaf, _: jnp.full_like(leaf, value))


def _checked(batches: Iterable[Any]) -> Iterable[Any]:
    if isinstance(batches, dict) or hasattr(batches, "shape") or not hasattr(batches, "__iter__"):
        raise TypeError(
            f"{_NAME}: batches must be an iterable of batches, got {type(batches).__name__}; write "
            "[batch] for a single one"
        )
    return batches


def _momenta(
    forward: _Forward,
    state: Any,
    moving: tuple[int, ...],
    batch: Any,
    rng: Any,
    override: float | None,
) -> tuple[float, ...]:
    """Return a momentum for each pair; 0 for those that don't move."""
    paths = pair_paths(state)
    collected = {} if override is not None else forward.momenta(state, batch, rng)
    if override is None:
        unknown = list(unknown_momenta(state, collected))
        for path in (paths[i] for i in moving if paths[i] in unknown):
            raise ValueError(
                f"{_NAME}: the momentum of {path!r} is not known; pass batch_norm_momentum=, the share "
                "of the old value"
            )
        collected = {**dict.fromkeys(unknown, 0.0), **collected}
    momenta = momenta_for(state, collected, override)
    for path in (paths[i] for i in moving if momenta[i] == 1):
        raise ValueError(
            f"{_NAME}: the momentum of {path!r} is 1, with which a layer takes no statistics; pass "
            "batch_norm_momentum=, or give the layer another one"
        )
    return tuple(m if i in moving else 0.0 for i, m in enumerate(momenta))


def _changed(model_state: Any, places: tuple[int, ...], change: Callable[[Any, int], Any]) -> Any:
    """Return the model state with the statistics of some pairs changed by ``change(leaf, place)``."""
    flat = flatten_statistics(model_state)
    leaves = list(flat.leaves)
    for place in places:
        for index in flat.pairs[place][1:]:
            leaves[index] = change(jnp.asarray(leaves[index]), place)
    return flat.treedef.unflatten(leaves)


def _check_finite(model_state: Any) -> None:
    flat = flatten_statistics(model_state)
    for path, mean, var in flat.pairs:
        for name, index in (("mean", mean), ("var", var)):
            if not np.all(np.isfinite(np.asarray(flat.leaves[index], np.float64))):
                raise ValueError(_not_finite(path, name))


def _not_finite(path: str, name: str) -> str:
    return f"{_NAME}: the new {name} of {path!r} is not finite; look at batches and parameters"
