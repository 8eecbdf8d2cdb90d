"""Gradient centralization where freezing leaves it a part of the tree only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax._tree import leaf_paths


def _zeros(**shapes):
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def _with_freeze(params, frozen, **settings):
    trained = [path for path in leaf_paths(params) if path not in frozen]
    freezing = boostax.Freezing([list(leaf_paths(params)), trained], [0, 1])
    return boostax.freeze(optax.chain(boostax.centralize(**settings), optax.sgd(1.0)), freezing)


@pytest.mark.parametrize("by_state", [False, True])
@pytest.mark.parametrize(
    ("params", "frozen", "path", "axes"),
    [
        # W2 is square; that W1's output axis is the last one tells how it is laid out.
        (_zeros(W1=(3, 4), b1=(4,), W2=(4, 4), b2=(4,)), {"W1", "b1"}, ("W2",), (0,)),
        # Only the bias tells that the heads are outputs.
        ({"q": _zeros(kernel=(8, 2, 4), bias=(2, 4))}, {"q/bias"}, ("q", "kernel"), (0,)),
        ({"q": _zeros(kernel=(8, 2, 4), bias=(4,))}, {"q/bias"}, ("q", "kernel"), (0, 1)),
    ],
)
def test_inside_freeze_the_axes_are_those_of_the_whole_tree(params, frozen, path, axes, by_state):
    tx = _with_freeze(params, frozen)
    grads = jax.tree.map(
        lambda p: jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params
    )
    state, seen = tx.init(params), []
    update = jax.jit(tx.update) if by_state else tx.update
    for _ in range(2):
        updates, state = update(grads, state, params)
        for name in path:
            updates = updates[name]
        seen.append(np.asarray(updates))
    leaf = grads
    for name in path:
        leaf = leaf[name]
    np.testing.assert_allclose(seen[0], leaf.mean(axes, keepdims=True) - leaf, atol=1e-6)
    np.testing.assert_allclose(seen[1], seen[0], atol=1e-6)


def test_inside_freeze_a_restored_state_needs_no_init():
    params = _zeros(W1=(3, 4), b1=(4,), W2=(4, 4), b2=(4,))
    ones = jax.tree.map(jnp.ones_like, params)
    tx = _with_freeze(params, {"W1", "b1"})
    state = jax.tree.map(jnp.copy, tx.init(params))._replace(count=jnp.int32(1))
    # A transformation that was never initialised; and one that optax makes anew at each update.
    fresh = _with_freeze(params, {"W1", "b1"})
    anew = optax.inject_hyperparams(lambda rate: _with_freeze(params, {"W1", "b1"}))(rate=1.0)
    for other, start in ((fresh, state), (anew, anew.init(params)._replace(inner_state=state))):
        updates, _ = jax.jit(other.update)(ones, start, params)
        assert not np.asarray(updates["W2"]).any()
        np.testing.assert_array_equal(updates["b2"], -np.ones(4))


def test_one_object_for_two_models_does_not_mix_them():
    # The same names and the same trained shape; the frozen biases say different things.
    tx = optax.chain(boostax.centralize(), optax.sgd(1.0))
    kernel = jnp.cos(jnp.arange(64.0)).reshape(8, 2, 4)
    for bias, axes in (((2, 4), (0,)), ((4,), (0, 1)), ((2, 4), (0,))):
        params = {"q": {"kernel": kernel, "bias": jnp.zeros(bias)}}
        frozen = boostax.freeze(tx, boostax.Freezing([["q/kernel", "q/bias"], ["q/kernel"]], [1]))
        updates, _ = jax.jit(frozen.update)(params, frozen.init(params), params)
        expected = kernel.mean(axes, keepdims=True) - kernel
        np.testing.assert_allclose(updates["q"]["kernel"], expected, atol=1e-6)


def test_a_leaf_masked_out_inside_freeze_need_not_be_readable():
    params = _zeros(W1=(3, 4), b1=(4,), odd=(4, 5, 6))
    inner = optax.masked(boostax.centralize(), {"W1": True, "b1": True, "odd": False})
    tx = boostax.freeze(inner, boostax.Freezing([["W1", "b1", "odd"], ["W1", "odd"]], [1]))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert not np.asarray(updates["W1"]).any()


def test_auto_boost_centralizes_what_freezing_leaves():
    params = _zeros(W1=(3, 4), b1=(4,), W2=(4, 4), b2=(4,))
    boost = boostax.AutoBoost(
        "O1",
        {
            "boost": {"mode": "manual", "grad_freeze": True, "centralize": True},
            "grad_freeze": {"param_groups": 2, "total_steps": 10},
        },
    )
    tx = boost.optimizer(optax.sgd(1.0), params, order=["W1", "b1", "W2", "b2"])
    updates, _ = tx.update(
        jax.tree.map(jnp.ones_like, params), tx.init(params), params, freeze_index=1
    )
    assert not np.asarray(updates["W2"]).any()
    np.testing.assert_array_equal(updates["b2"], -np.ones(4))
