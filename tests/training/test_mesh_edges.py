"""The train step over a mesh where things are odd: explicit axes, integers, foreign states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax import LossAux

pytestmark = pytest.mark.slow

W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
X = np.cos(np.arange(32, dtype=np.float32)).reshape(8, 4)


def loss(params, x):
    return jnp.mean(jnp.square(x @ params["w"]))


def mesh_of(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("data",), (kind,), devices=jax.devices()[:count])


def adasum():
    return boostax.adasum("data", buckets=())


def two_steps(step, params=None, **options):
    state = step.init({"w": jnp.asarray(W)} if params is None else params, **options)
    for _ in range(2):
        state, _ = step(state, X)
    return state


EXCHANGES = {
    "gradients": lambda: optax.chain(adasum(), optax.sgd(0.1, 0.9)),
    "local steps": lambda: boostax.local_steps(optax.sgd(0.1), 2, adasum()),
}


class TestExplicitAxes:
    @pytest.mark.parametrize("name", EXCHANGES)
    def test_parameters_split_over_an_explicit_axis(self, name):
        tx = EXCHANGES[name]
        expected = two_steps(boostax.train_step(loss, tx(), mesh=mesh_of(2))).params
        mesh = jax.make_mesh(
            (2, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4]
        )
        split = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
        state = two_steps(boostax.train_step(loss, tx(), mesh=mesh), {"w": split})
        np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-5)
        assert state.params["w"].sharding.spec == P(None, "model")

    def test_a_loss_that_draws_and_has_an_aux(self):
        def noisy(params, x, *, rng):
            kept = jax.random.bernoulli(rng, 0.5, x.shape)
            return loss(params, jnp.where(kept, x, 0)), LossAux()

        states = [
            two_steps(
                boostax.train_step(noisy, optax.sgd(0.1), has_aux=True, mesh=mesh_of(2, kind)),
                rng=0,
            )
            for kind in (AxisType.Auto, AxisType.Explicit)
        ]
        np.testing.assert_array_equal(*(state.params["w"] for state in states))

    def test_inside_a_jit_of_ones_own(self):
        step = boostax.train_step(
            loss, optax.sgd(0.1), mesh=mesh_of(2, AxisType.Explicit), donate=False
        )
        state = step.init({"w": jnp.asarray(W)})
        expected, _ = step(state, X)
        got, _ = jax.jit(step)(state, X)
        np.testing.assert_allclose(got.params["w"], expected.params["w"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["adasum", "window"])
def test_integers_and_empty_leaves_pass(kind):
    tx = optax.chain(adasum(), optax.sgd(0.1))
    if kind == "window":
        tx = boostax.accumulate(optax.sgd(0.1), 2)
    params = {"w": jnp.asarray(W), "n": jnp.arange(3), "none": jnp.zeros((0, 3))}
    state = two_steps(boostax.train_step(loss, tx, mesh=mesh_of(2)), params)
    assert state.params["n"].tolist() == [0, 1, 2]
    assert state.params["none"].shape == (0, 3)
    assert not np.array_equal(state.params["w"], W)


def test_a_window_around_parameters_split_over_the_data_axis():
    tx = lambda: boostax.accumulate(optax.adam(0.1), 2)
    expected = two_steps(boostax.train_step(loss, tx(), mesh=mesh_of(4))).params
    mesh = mesh_of(4)
    split = jax.device_put(W, NamedSharding(mesh, P("data")))
    state = two_steps(boostax.train_step(loss, tx(), mesh=mesh), {"w": split})
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=1e-5)


def test_the_description_of_moments_of_ones_own():
    step = boostax.train_step(loss, optax.chain(optax.adam(0.1), adasum()), mesh=mesh_of(2))
    text = str(step.describe(step.init({"w": jnp.asarray(W)}), X))
    assert "gradients are combined by the exchange in tx" in text


def test_states_of_another_step_are_refused():
    own = optax.chain(optax.adam(0.1), adasum())
    common = optax.chain(optax.adam(0.1), optax.identity())
    on_mesh = two_steps(boostax.train_step(loss, own, mesh=mesh_of(2), donate=False))
    for step in (
        boostax.train_step(loss, common),
        boostax.train_step(loss, common, mesh=mesh_of(2)),
    ):
        with pytest.raises(boostax.StateMismatchError, match=r"has the shape \(2, 4, 8\)"):
            step(jax.device_get(on_mesh), X)
    # The first axis alone can look right.
    square = {"w": jnp.ones((4, 4))}
    alone = two_steps(boostax.train_step(loss, common, donate=False), square)
    with pytest.raises(boostax.StateMismatchError, match=r"makes \(4, 4, 4\)"):
        boostax.train_step(loss, own, mesh=mesh_of(4))(alone, X)


def test_freezing_around_local_steps_is_refused():
    freezing = boostax.Freezing([["a", "b"], ["b"]], [0, 1])
    inner = boostax.local_steps(optax.sgd(1.0), 2, boostax.all_reduce("data"))
    with pytest.raises(ValueError, match="freeze inside it"):
        boostax.freeze(inner, freezing)


def weighed(params, batch):
    return jnp.mean(batch["x"] @ params), LossAux(weight=batch["w"].sum())


@pytest.mark.parametrize("weights", [(1, -1), (np.inf, 1), (np.nan, 1), (3e38, 3e38)])
def test_weights_that_are_none_skip(weights):
    step = boostax.train_step(weighed, optax.sgd(1.0), has_aux=True, mesh=mesh_of(2))
    batch = {"x": np.eye(2, dtype=np.float32), "w": np.array(weights, np.float32)}
    state, _ = step(step.init(jnp.zeros(2)), batch)
    assert (state.params.tolist(), int(state.skipped)) == ([0, 0], 1)


def test_extra_arguments_of_ones_own():
    def update(updates, state, params=None, *, temperature, **extra):
        return jax.tree.map(lambda u: u * temperature, updates), state

    own = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(adasum(), own, optax.sgd(1.0))
    step = boostax.train_step(lambda p, x: jnp.mean(x @ p), tx, mesh=mesh_of(2))
    with pytest.raises(ValueError, match=r"step\.init\(\.\.\., extra="):
        step.init(jnp.zeros(2))
    state = step.init(jnp.zeros(2), extra={"temperature": 1.0})
    state, _ = step(state, np.eye(2, dtype=np.float32), temperature=3.0)
    assert state.params.tolist() == [-3, -3]
