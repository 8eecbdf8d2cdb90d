"""Train steps at work on the tiny models, for rows whose technique is not a transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import boostax
from tests.common.harness import Program, fresh, host, mesh_of
from tests.models import linen_net, nnx_net, plain


def momentum() -> optax.GradientTransformationExtraArgs:
    """Return the optimizer that most rows train with."""
    return optax.sgd(0.1, 0.9)


@functools.cache
def _linen_variables(init: Callable[[Any], Any], dtype: str) -> Any:
    return host(init(jnp.dtype(dtype)))


def plain_step(
    tx: Callable[[], optax.GradientTransformation] = momentum, **settings: Any
) -> Callable[[str, bool], Program]:
    """Return a row's ``program``: a train step of the plain perceptron."""

    def program(dtype: str, donate: bool) -> Program:
        step = boostax.train_step(plain.loss, tx(), donate=donate, **settings)
        return _program(step, lambda: step.init(plain.init(dtype)))

    return program


def linen_step(
    tx: Callable[[], optax.GradientTransformation] = momentum,
    loss: Callable[..., Any] = linen_net.loss,
    variables_of: Callable[[Any], Any] = linen_net.init,
    **settings: Any,
) -> Callable[[str, bool], Program]:
    """Return a row's ``program``: a train step of a linen network with batch norm."""

    def program(dtype: str, donate: bool) -> Program:
        step = boostax.train_step(loss, tx(), has_aux=True, donate=donate, **settings)
        held = _linen_variables(variables_of, dtype)  # here, since init may be traced

        def init() -> Any:
            variables = fresh(held)
            return step.init(
                variables["params"], model_state={"batch_stats": variables["batch_stats"]}
            )

        return _program(step, init)

    return program


def mesh_step(
    tx: Callable[[], optax.GradientTransformation], count: int = 2, **settings: Any
) -> Callable[[str, bool], Program]:
    """Return a row's ``program``: the linen network's train step over a mesh."""

    def program(dtype: str, donate: bool) -> Program:
        return linen_step(tx, mesh=mesh_of(count), **settings)(dtype, donate)

    return program


def nnx_step(
    tx: Callable[[], optax.GradientTransformation] = momentum,
    loss: Callable[..., Any] = nnx_net.loss,
    model_of: Callable[[Any], Any] = nnx_net.init,
    **settings: Any,
) -> Callable[[str, bool], Program]:
    """Return a row's ``program``: a train step of an nnx network."""

    def program(dtype: str, donate: bool) -> Program:
        step = boostax.train_step(loss, tx(), donate=donate, **settings)
        model = model_of(jnp.dtype(dtype))
        return _program(step, lambda: step.init(model))

    return program


def auto_step(level: str, config: dict[str, Any]) -> Callable[[str, bool], Program]:
    """Return a row's ``program``: the train step that ``AutoBoost`` builds from a config."""

    def program(dtype: str, donate: bool) -> Program:
        boost = boostax.AutoBoost(level, config)
        params = plain.init(dtype)
        model, _ = boost.model(plain.apply, jnp.zeros((2, 4), dtype))
        assert model is plain.apply
        tx = boost.optimizer(momentum(), params)
        step = boost.train_step(plain.loss, tx, donate=donate)
        return _program(step, lambda: step.init(plain.init(dtype)))

    return program


def microbatched(pieces: int) -> Callable[[str, bool], Program]:
    """Return a row's ``program``: ``microbatch`` in a training loop of one's own."""

    def program(dtype: str, donate: bool) -> Program:
        del donate  # harness.compiled donates
        tx = momentum()
        value_and_grad = boostax.microbatch(plain.loss, pieces)

        def init() -> Any:
            params = plain.init(dtype)
            return params, tx.init(params)

        def step(carry: Any, batch: Any) -> tuple[Any, Any]:
            params, state = carry
            (loss, _), grads = value_and_grad(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return Program(init, step, lambda carry: carry[0])

    return program


def _program(step: Any, init: Callable[[], Any]) -> Program:
    return Program(init, step, lambda state: state.params, compiled=True)


def freezing(schedule: Any) -> boostax.Freezing:
    """Return three groups, one a layer of the plain perceptron, with this schedule."""
    return boostax.Freezing(boostax.parameter_groups(jax.eval_shape(plain.init), 3), schedule)


# At index 1 the first layer of the linen network and its batch norm are frozen.
LINEN_FREEZING = boostax.Freezing(
    [
        ["Dense_0/*", "BatchNorm_0/*", "Dense_1/*"],
        ["Dense_1/*"],
    ],
    (0, 1, 0, 1),
    params=jax.eval_shape(linen_net.init)["params"],
)
