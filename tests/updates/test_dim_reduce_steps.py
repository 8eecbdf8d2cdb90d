"""dim_reduce inside train steps: meshes, resumed runs, statistics, loss scales."""

import functools
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import boostax
from boostax import DimReduceState, TrajectoryBasis, dim_reduce
from boostax.updates._skip import find_state
from tests.common.harness import assert_bitwise, mesh_of
from tests.models import data, linen_net, nnx_net, plain


def assert_same_bits(got, expected):
    assert_bitwise(got, expected, "values")


def random_basis(params, k=4):
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(size, k)))[0].T
    return TrajectoryBasis.from_array(rows.astype(np.float32), params)


BATCH = jax.tree.map(lambda leaf: leaf[0], data.batches(1))


def run(step, state, steps=3):
    states = [state]
    losses = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        states.append(state)
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(metrics["delta"], inside(state).delta, rtol=1e-4, atol=1e-6)
    return states, losses


def inside(state):
    found = find_state(state.opt_state, DimReduceState)
    assert found is not None
    return found


@functools.cache
def _plain():
    tx = dim_reduce(random_basis(plain.init()), alpha=0.01)
    step = boostax.train_step(plain.loss, tx, donate=False)
    return tx, step, *run(step, step.init(plain.init()))


def test_train_step_lowers_the_loss_that_it_saw():
    _, _, states, losses = _plain()
    for before, after, loss in zip(states[:-1], states[1:], losses, strict=True):
        told = inside(after)
        assert told.status_name == "accepted"
        np.testing.assert_allclose(told.value, loss, rtol=1e-6)
        np.testing.assert_allclose(told.new_value, plain.loss(after.params, BATCH), rtol=1e-5)
        np.testing.assert_allclose(told.value, plain.loss(before.params, BATCH), rtol=1e-5)
    assert losses == sorted(losses, reverse=True)


def test_a_call_that_is_skipped_has_no_delta():
    tx = dim_reduce(random_basis(plain.init()))
    step = boostax.train_step(plain.loss, tx, skip_nonfinite=True)
    state, metrics = step(step.init(plain.init()), BATCH)
    assert float(metrics["delta"]) < 0
    bad = jax.tree.map(lambda leaf: leaf * np.nan if leaf.dtype == jnp.float32 else leaf, BATCH)
    state, metrics = step(state, bad)
    assert (int(state.skipped), float(metrics["delta"])) == (1, 0.0)
    with pytest.raises(ValueError, match=r"'delta' needs boostax.dim_reduce in tx"):
        boostax.train_step(plain.loss, optax.sgd(0.1), metrics=["delta"])


def test_a_resumed_run_is_the_same_and_nothing_compiles_twice():
    _, step, states, _ = _plain()
    assert step._jitted(None, states[0])._cache_size() == 1
    target = jax.tree.map(jnp.zeros_like, states[2])
    saved = flax.serialization.to_bytes(states[2])
    again, _ = step(flax.serialization.from_bytes(target, saved), BATCH)
    assert_same_bits(again, states[3])


@pytest.mark.parametrize(("count", "kind", "micro"), [(2, "Explicit", 3), (8, "Auto", 1)])
def test_devices_and_micro_batches_change_nothing(count, kind, micro):
    tx, _, alone, losses = _plain()
    mesh = jax.make_mesh((count,), ("data",), (AxisType[kind],), devices=jax.devices()[:count])
    step = boostax.train_step(plain.loss, tx, mesh=mesh, microbatch=micro)
    states, told = run(step, step.init(plain.init()), 2)
    np.testing.assert_allclose(told, losses[:2], rtol=1e-5)
    for got, expected in zip(
        jax.tree.leaves(states[-1].params), jax.tree.leaves(alone[2].params), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert int(inside(states[-1]).trials) == int(inside(alone[2]).trials)


def test_an_exchange_inside_tx_is_refused():
    tx, *_ = _plain()
    step = boostax.train_step(
        plain.loss, optax.chain(boostax.all_reduce("data"), tx), mesh=mesh_of(2)
    )
    with pytest.raises(ValueError, match="leave the exchange out of tx"):
        step.init(plain.init())


@functools.cache
def _split():
    """A train step on two axes with one kernel split, its states, and its compiled program."""
    tx, *_ = _plain()
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    params = plain.init()
    for name in ("layers_0", "layers_1"):
        params[name]["kernel"] = jax.device_put(params[name]["kernel"], split)
    step = boostax.train_step(plain.loss, tx, mesh=mesh, donate=False)
    return step, run(step, step.init(params), 2)[0]


def test_parameters_split_over_a_model_axis():
    _, _, alone, _ = _plain()
    _, states = _split()
    for leaf, expected in zip(
        jax.tree.leaves(states[1].params), jax.tree.leaves(alone[1].params), strict=True
    ):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
    # Alphabetical: the first layer's bias, then its kernel, as (k, *shape).
    assert inside(states[1]).components[1].sharding.spec[2] == "model"


def test_projections_on_split_leaves_are_one_exchange_of_k_numbers_each():
    step, states = _split()
    text = step._jitted(None, states[0]).lower(states[0], BATCH, {}).compile().as_text()
    exchanges = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    shapes = [re.findall(r"f32\[[\d,]*\]", exchange) for exchange in exchanges]
    # k is 4; gradients, of which some have 4 numbers too, go with leaves of other shapes.
    small = [found for found in shapes if found and set(found) <= {"f32[4]", "f32[]"}]
    assert len([found for found in small if "f32[4]" in found]) == 1


def test_a_run_on_a_mesh_goes_on_from_orbax_bit_for_bit(tmp_path):
    step, states = _split()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", states[1])
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, states[1])
        restored = checkpointer.restore(tmp_path / "state", target)
    assert inside(restored).components[1].sharding == inside(states[1]).components[1].sharding
    assert_same_bits(restored, states[1])
    again, _ = step(restored, BATCH)
    assert_same_bits(again, states[2])


def test_loss_scale_gives_the_same_steps():
    tx, _, alone, _ = _plain()
    scale = boostax.DynamicLossScale(init=2.0**8)
    step = boostax.train_step(plain.loss, tx, loss_scale=scale)
    states, _ = run(step, step.init(plain.init()), 2)
    for got, expected in zip(
        jax.tree.leaves(states[-1].params), jax.tree.leaves(alone[2].params), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_trials_move_no_batch_statistics():
    variables = linen_net.init()
    basis = random_basis(variables["params"])
    # A direction that is far too long: several trials.
    tx = optax.chain(optax.scale(100.0), dim_reduce(basis, alpha=0.0))
    step = boostax.train_step(linen_net.loss, tx, has_aux=True, donate=False)
    stats = {"batch_stats": variables["batch_stats"]}
    state, metrics = step(step.init(variables["params"], model_state=stats), BATCH)
    assert int(inside(state).trials) > 2
    once = linen_net.loss(variables["params"], BATCH, model_state=stats)[1].model_state
    for got, expected in zip(
        jax.tree.leaves(state.model_state), jax.tree.leaves(once), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert inside(state).new_value < metrics["loss"]


def test_nnx_with_batch_norm_and_dropout():
    model = nnx_net.init()
    plain_step = boostax.train_step(nnx_net.loss, optax.sgd(0.1), donate=False)
    start = plain_step.init(model)
    once, _ = plain_step(start, BATCH)
    # A direction that is far too long: several trials.
    tx = optax.chain(optax.scale(100.0), dim_reduce(random_basis(start.params), alpha=0.0))
    step = boostax.train_step(nnx_net.loss, tx, donate=False)
    first = step.init(model)
    state, _ = step(first, BATCH)
    told = inside(state)
    assert told.status_name == "accepted"
    assert int(told.trials) > 2
    # Trials have the step's own dropout: the first state's, at the parameters behind.
    _, behind = step(first.replace(params=state.params), BATCH)
    np.testing.assert_allclose(behind["loss"], told.new_value, rtol=1e-5)
    # One forward pass's worth of statistics and of dropout keys.
    for got, expected in zip(
        jax.tree.leaves(state.model_state), jax.tree.leaves(once.model_state), strict=True
    ):
        if jnp.issubdtype(got.dtype, jnp.floating):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        else:
            assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("around", "message"),
    [
        (lambda tx: optax.chain(tx, optax.scale(3.0)), "scale stands behind dim_reduce"),
        (lambda tx: optax.chain(optax.chain(tx), optax.ema(0.9)), "ema stands behind"),
        (lambda tx: optax.MultiSteps(tx, 2), "MultiSteps around dim_reduce: a window"),
        (lambda tx: optax.masked(tx, True), "masked around dim_reduce gives it some of the leaves"),
        (lambda tx: optax.contrib.schedule_free(tx, 0.1), "schedule_free around dim_reduce moves"),
    ],
)
def test_what_would_move_the_accepted_point_is_refused(around, message):
    tx = boostax.dim_reduce(random_basis(plain.init()))
    with pytest.raises(ValueError, match=message):
        boostax.train_step(plain.loss, around(tx))
    boostax.train_step(plain.loss, optax.chain(optax.clip(1.0), tx, optax.identity()))
    boostax.train_step(plain.loss, boostax.accumulate(tx, 1))
