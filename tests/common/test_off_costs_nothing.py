"""A train step with everything off costs what the same step written by hand costs, exactly.

The hand-written step keeps a state like ``flax.training.train_state.TrainState``, with a step
counter, and reports the same metrics. Costs are the compiler's own count.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax._tree import leaf_paths
from tests.common import harness, programs
from tests.models import data, linen_net, nnx_net, plain

METRICS = [("loss",), None]


class HandState(flax.struct.PyTreeNode):
    """What a loop written by hand remembers."""

    step: Any
    params: Any
    opt_state: Any
    model_state: Any = None


def _hand_metrics(names, loss, grads, step):
    if names == ("loss",):
        return {"loss": loss}
    leaves = jax.tree.leaves(grads)
    finite = jnp.isfinite(loss)
    for leaf in leaves:
        finite &= jnp.all(jnp.isfinite(leaf))
    return {
        "loss": loss,
        "grad_norm": jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves)),
        "finite": finite,
        "updates": step,
        "micro_steps": step,
    }


def _hand_step(loss, tx, names):
    def step(state, batch):
        (value, model_state), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.model_state, batch
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = HandState(state.step + 1, params, opt_state, model_state)
        return new, _hand_metrics(names, value, grads, new.step)

    return jax.jit(step, donate_argnums=0)


def _plain(tx, names):
    step = boostax.train_step(plain.loss, tx, metrics=names)
    params = plain.init()
    by_hand = _hand_step(lambda p, _, b: (plain.loss(p, b), None), tx, names)
    return step, step.init(params), by_hand, HandState(jnp.int32(0), params, tx.init(params))


def _linen(tx, names):
    variables = linen_net.init()
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    step = boostax.train_step(linen_net.loss, tx, has_aux=True, metrics=names)

    def loss(params, model_state, batch):
        value, aux = linen_net.loss(params, batch, model_state=model_state)
        return value, aux.model_state

    state = HandState(jnp.int32(0), params, tx.init(params), stats)
    return step, step.init(params, model_state=stats), _hand_step(loss, tx, names), state


def _nnx(tx, names):
    model = nnx_net.init()
    step = boostax.train_step(nnx_net.loss, tx, metrics=names)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, batch):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        value = nnx_net.loss(merged, batch)
        return value, nnx.split(merged, nnx.Param, ...)[2]

    state = HandState(jnp.int32(0), params, tx.init(params), rest)
    return step, step.init(model), _hand_step(loss, tx, names), state


def _cost(compiled):
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "transcendentals": cost.get("transcendentals", 0.0),
    }


@pytest.mark.quick
@pytest.mark.parametrize("names", METRICS, ids=["loss_only", "all_metrics"])
@pytest.mark.parametrize("kind", [_plain, _linen, _nnx], ids=["plain", "linen", "nnx"])
def test_everything_off(kind, names):
    tx = programs.momentum()
    step, state, by_hand, hand_state = kind(tx, names)
    batch = {k: jnp.asarray(v[0]) for k, v in data.batches(1).items()}
    ours = _cost(step.lower(state, batch).compile())
    theirs = _cost(by_hand.lower(hand_state, batch).compile())
    assert ours == theirs
    new, metrics = step(state, batch)
    hand_new, hand_metrics = by_hand(hand_state, batch)
    harness.assert_close(
        jax.tree.leaves(new.params), jax.tree.leaves(hand_new.params), "parameters"
    )
    assert set(metrics) == set(hand_metrics)
    np.testing.assert_allclose(metrics["loss"], hand_metrics["loss"], rtol=1e-6)
    assert leaf_paths(new.params) == leaf_paths(hand_new.params)


@pytest.mark.quick
def test_a_window_of_one_without_checks_costs_nothing():
    params = plain.init()
    batch = {k: jnp.asarray(v[0]) for k, v in data.batches(1).items()}

    def cost(tx):
        step = boostax.train_step(plain.loss, tx, metrics=("loss",))
        state = step.init(params)
        sized = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        return _cost(step.lower(state, batch).compile())["flops"], len(sized)

    flops, leaves = cost(programs.momentum())
    window_flops, window_leaves = cost(boostax.accumulate(programs.momentum(), 1, nonfinite="off"))
    assert window_leaves == leaves
    # Three integer counters of the window move as well.
    assert 0 <= window_flops - flops <= 3
