"""Runs of the loss-scale benchmark: training under several scales, and what rounding sets to zero."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from _half import batches, cross_entropy, mlp, zero_shares

import boostax


class Problem(NamedTuple):
    """What to train.

    Attributes:
      init: a key to parameters, a dict whose keys are what is reported.
      loss: a dtype to ``loss(params, batch)``.
      stream: ``(steps, seed)`` to batches.
      accuracy: parameters to the accuracy of each part.
    """

    init: Callable[[jax.Array], dict[str, Any]]
    loss: Callable[[Any], Callable[..., jax.Array]]
    stream: Callable[[int, int], Any]
    accuracy: Callable[[Any], dict[str, float]]


class Found(NamedTuple):
    """What became of an arm, over its seeds.

    Attributes:
      zeros: share of elements that are zero and should not be, by part, a value for each look.
      accuracy: by part, a value a seed.
      skipped: share of calls that changed nothing, a value a seed.
      scale: the last loss scale of the first seed.
    """

    zeros: dict[str, list[float]]
    accuracy: dict[str, list[float]]
    skipped: list[float]
    scale: list[float]


class Arm:
    """One way to train a problem; it compiles once for all scales and seeds.

    Args:
      problem: what to train.
      dtype: of activations and of the backward pass.
      scaling: what ``train_step`` takes as ``loss_scale``.
      rate: learning rate of Adam, which does not see how large gradients are.
    """

    def __init__(self, problem: Problem, dtype: Any, scaling: Any = None, rate: float = 2e-3):
        self._problem, self._scaling = problem, scaling
        # 1e-24: nothing beside the root of the smallest second moment here.
        tx = optax.adam(rate, eps=1e-24)
        self._step = boostax.train_step(
            problem.loss(dtype), tx, loss_scale=scaling, metrics=("loss", "finite")
        )
        self._exact = jax.jit(jax.grad(problem.loss(jnp.float32)))
        # A look takes the gradient at the state's scale; the rule plays no part in it.
        looking = scaling if isinstance(scaling, boostax.GroupLossScale) else None
        looking = looking or boostax.DynamicLossScale()
        own = looking.value_and_grad(problem.loss(dtype))
        self._own = jax.jit(lambda state, params, batch: own(state, params, batch)[1])

    def run(self, seeds: int, steps: int, looks: Sequence[int], scale: Any = None) -> Found:
        """Train from each seed, and look at the gradients before some of the steps.

        Args:
          seeds: how many.
          steps: calls of the step.
          looks: before which of them.
          scale: the first scale, where it is not the one that the arm was built with.
        """
        found = Found({}, {}, [], [])
        for seed in range(seeds):
            params = self._problem.init(jax.random.key(seed))
            state, bad = self._step.init(params), 0
            if scale is not None:
                state = boostax.set_loss_scale(state, scale)
            for number, batch in enumerate(self._problem.stream(steps, seed)):
                if number in looks and self._scaling is not None:
                    grads = self._own(state.loss_scale, state.params, batch)
                    exact = self._exact(state.params, batch)
                    for name, share in zero_shares(grads, exact).items():
                        found.zeros.setdefault(name, []).append(share)
                state, metrics = self._step(state, batch)
                bad += not bool(metrics["finite"])
            found.skipped.append(bad / steps)
            for name, value in self._problem.accuracy(state.params).items():
                found.accuracy.setdefault(name, []).append(value)
            if seed == 0 and state.loss_scale is not None:
                found.scale.extend(np.ravel(state.loss_scale.scale).tolist())
        return found


def log2(scales: Sequence[float]) -> str:
    """Return scales as powers of two."""
    return ", ".join(f"2^{np.log2(scale):.0f}" for scale in scales)


def mean(values: Sequence[float]) -> str:
    """Return a mean share in percent."""
    return f"{100 * statistics.mean(values):.1f}"


# --- what rounding to a format sets to zero -------------------------------------------------------

FORMATS: Mapping[str, Any] = {
    "float16": (np.float16, np.float16),
    "bfloat16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "float8: e4m3 forward, e5m2 backward": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
}


class Rounding(NamedTuple):
    """Shares of elements that a format made zero.

    Attributes:
      forward: of weights and layer inputs.
      backward: of cotangents, over all layers.
      worst: of cotangents, in the layer where it is largest.
      overflows: whether a cotangent became infinite.
    """

    forward: float
    backward: float
    worst: float
    overflows: bool


def _rounded(values: np.ndarray, kind: Any, per_tensor: bool) -> np.ndarray:
    """Return values rounded to a format; with a scale a tensor the largest one fills its range."""
    most = float(ml_dtypes.finfo(kind).max)
    amax = float(np.max(np.abs(values)))
    factor = np.float32(most / amax if per_tensor and amax > 0 else 1)
    with np.errstate(over="ignore"):
        return (values * factor).astype(kind).astype(np.float32) / factor


def rounding(
    layers: Sequence[Mapping[str, Any]],
    x: np.ndarray,
    labels: np.ndarray,
    kinds: tuple[Any, Any],
    scale: float,
    per_tensor: bool = False,
) -> Rounding:
    """Run an MLP forward and backward by hand, each operand of a product rounded to a format.

    Products are summed in float32, and the results rounded when they enter the next one.
    A share counts the elements that are not zero before.
    """
    forward, backward = kinds
    entered: list[
        tuple[int, int]
    ] = []  # of each tensor how many elements are lost, and of how many
    lost: list[tuple[int, int]] = []

    def enter(values: np.ndarray) -> np.ndarray:
        out = _rounded(values, forward, per_tensor)
        entered.append((int(np.sum((out == 0) & (values != 0))), int(np.sum(values != 0))))
        return out

    weights = [np.asarray(layer["kernel"], np.float32) for layer in layers]
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    inputs, before = [], []
    value = np.asarray(x, np.float32)
    kernels = [enter(w) for w in weights]
    for number, (layer, kernel) in enumerate(zip(layers, kernels, strict=True)):
        inputs.append(enter(value))
        z = inputs[-1] @ kernel + np.asarray(layer["bias"], np.float32)
        before.append(z)
        value = z if number == len(layers) - 1 else z * sigmoid(z)
    shifted = value - value.max(1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    cotangent = p.astype(np.float32) * np.float32(scale / len(labels))
    overflows = False
    for number in range(len(layers) - 1, -1, -1):
        out = _rounded(cotangent, backward, per_tensor)
        overflows |= not np.all(np.isfinite(out))
        out = np.nan_to_num(out, posinf=0, neginf=0)
        there = int(np.sum(cotangent != 0))
        # A layer at which nothing arrives any more has lost all.
        zero = int(np.sum((out == 0) & (cotangent != 0))) if there else out.size
        lost.append((zero, there or out.size))
        if number:
            s = sigmoid(before[number - 1])
            slope = s * (1 + before[number - 1] * (1 - s))
            cotangent = (out @ kernels[number].T) * slope
    shares = (_share(entered), _share(lost), max(zero / there for zero, there in lost))
    return Rounding(*shares, overflows)


def _share(counts: Sequence[tuple[int, int]]) -> float:
    return sum(zero for zero, _ in counts) / sum(there for _, there in counts)


def trained(data: Any, params: Any, steps: int, size: int) -> Any:
    """Return the parameters after some steps of Adam in float32."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(mlp(params, batch["x"], jnp.float32), batch["y"])

    step = boostax.train_step(loss, optax.adam(2e-3), metrics=("loss",))
    state = step.init(params)
    for batch in batches(data, steps, size, 0):
        state, _ = step(state, batch)
    return state.params
