"""What the user already has in their chain works in our train step: optax and optax.contrib."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import boostax
from tests.common import harness
from tests.models import data, plain

pytestmark = pytest.mark.slow

STEPS = 4
# What a loop written by hand passes to update; these two optimizers want something else.
USUAL = ("value", "grad", "value_fn")
PASSES = {"sam": ("grad_fn",), "sophia": ("obj_fn",)}


def _run(tx, steps=STEPS, **settings):
    step = boostax.train_step(plain.loss, tx, **settings)
    state, losses = step.init(plain.init()), []
    for batch in _batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses, metrics


def _batches(steps):
    stacked = data.batches(steps)
    return [{k: v[t] for k, v in stacked.items()} for t in range(steps)]


def _by_hand(tx, steps=STEPS, passes=USUAL):
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state, batch):
        def value_fn(p):
            return plain.loss(p, batch)

        loss, grads = jax.value_and_grad(value_fn)(params)
        known = {
            "value": loss,
            "grad": grads,
            "value_fn": value_fn,
            "grad_fn": lambda p, _: jax.grad(value_fn)(p),
            "obj_fn": value_fn,
        }
        updates, state = tx.update(grads, state, params, **{name: known[name] for name in passes})
        return optax.apply_updates(params, updates), state, loss

    params, losses = plain.init(), []
    state = tx.init(params)
    for batch in _batches(steps):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, losses


@pytest.mark.quick
def test_multi_steps():
    tx = optax.MultiSteps(optax.sgd(0.1, 0.9), 2)
    state, _, metrics = _run(tx)
    expected, _ = _by_hand(tx.gradient_transformation())
    harness.assert_close(state.params, expected, "parameters")
    assert int(metrics["updates"]) == int(state.updates) == 2
    assert int(metrics["micro_steps"]) == 4


def test_multi_steps_inside_a_chain():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    )
    state, _, metrics = _run(tx)
    expected, _ = _by_hand(tx)
    harness.assert_close(state.params, expected, "parameters")
    assert int(metrics["updates"]) == 2


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(
            optax.chain(
                optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
            ),
            id="backtracking",
        ),
        pytest.param(
            optax.chain(
                optax.scale_by_lbfgs(memory_size=3),
                optax.scale(-1.0),
                optax.scale_by_zoom_linesearch(max_linesearch_steps=10),
            ),
            id="zoom",
        ),
        pytest.param(optax.lbfgs(memory_size=3), id="lbfgs"),
    ],
)
def test_line_searches(tx):
    state, losses, _ = _run(tx)
    expected, by_hand = _by_hand(tx)
    np.testing.assert_allclose(losses, by_hand, rtol=1e-3)
    harness.assert_close(state.params, expected, "parameters", rtol=1e-2, atol=1e-3)


def test_a_line_search_lowers_the_loss_of_the_batch_it_saw():
    tx = optax.chain(optax.sgd(10.0), optax.scale_by_backtracking_linesearch(20))
    step = boostax.train_step(plain.loss, tx)
    state, batch = step.init(plain.init()), _batches(1)[0]
    state, metrics = step(state, batch)
    assert plain.loss(state.params, batch) < metrics["loss"]


CONTRIB = {
    "acprop": lambda: optax.contrib.acprop(0.01),
    "ademamix": lambda: optax.contrib.ademamix(0.01),
    "adopt": lambda: optax.contrib.adopt(0.01),
    "cocob": lambda: optax.contrib.cocob(),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(1.0),
    "dog": lambda: optax.contrib.dog(1.0),
    "dowg": lambda: optax.contrib.dowg(1.0),
    "galore": lambda: optax.contrib.galore(0.01, rank=2),
    "madgrad": lambda: optax.contrib.madgrad(0.01),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "momo": lambda: optax.contrib.momo(0.1),
    "momo_adam": lambda: optax.contrib.momo_adam(0.01),
    "muon": lambda: optax.contrib.muon(0.05),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "sam": lambda: optax.contrib.sam(
        optax.sgd(0.1), optax.contrib.normalize(), sync_period=2, opaque_mode=True
    ),
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(0.1),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(0.01),
    "simplified_ademamix": lambda: optax.contrib.simplified_ademamix(0.01),
    "sophia": lambda: optax.contrib.sophia(0.01, update_interval=1),
}
QUICK = ("muon", "reduce_on_plateau")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.quick] if n in QUICK else []) for n in CONTRIB]
)
def test_contrib(name):
    tx = CONTRIB[name]()
    state, losses, metrics = _run(tx)
    assert np.isfinite(losses).all()
    assert int(metrics["updates"]) == STEPS
    expected, by_hand = _by_hand(tx, passes=PASSES.get(name, USUAL))
    np.testing.assert_allclose(losses, by_hand, rtol=1e-4)
    harness.assert_close(state.params, expected, "parameters", rtol=1e-3, atol=1e-4)


def test_extra_arguments_reach_the_transformation():
    seen = {}

    def update(updates, state, params=None, *, temperature, weight, **extra):
        seen.update(extra)
        scale = -0.1 * temperature * weight / data.EXAMPLES
        return jax.tree.map(lambda g: scale * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = boostax.train_step(plain.loss, optax.chain(tx))
    state, batch = step.init(plain.init()), _batches(1)[0]
    grads = jax.grad(plain.loss)(plain.init(), batch)
    state, _ = step(state, batch, temperature=jnp.float32(2.0))
    expected = jax.tree.map(lambda p, g: p - 0.2 * g, plain.init(), grads)
    harness.assert_close(state.params, expected, "parameters")
    assert {"value", "grad", "value_fn", "grad_fn"} <= set(seen)
