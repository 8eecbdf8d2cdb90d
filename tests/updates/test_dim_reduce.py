"""dim_reduce: steps by hand, line search, BFGS, failures, states."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax import StateMismatchError, TrajectoryBasis, dim_reduce
from tests.common.harness import assert_bitwise


def assert_same_bits(got, expected):
    assert_bitwise(got, expected, "values")


def basis_of(rows):
    rows = np.asarray(rows, np.float32)
    return TrajectoryBasis.from_array(rows, {"w": jnp.zeros(rows.shape[1])})


def stepper(tx, loss):
    """A compiled step that also takes the loss and gradient that it is to believe in."""

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=loss)
        return optax.apply_updates(params, updates), state

    return step


# By hand.


def test_one_step_by_hand():
    tx = dim_reduce(basis_of([[1.0, 0.0]]), gamma=0.9, alpha=0.001)
    params = {"w": jnp.array([0.0, 0.0])}
    grads = {"w": jnp.array([3.0, 4.0])}
    loss = lambda p: 3 * p["w"][0] + 4 * p["w"][1]
    updates, state = tx.update(grads, tx.init(params), params, value=0.0, value_fn=loss)
    # The reference's delta is what an optimizer of rate 1 subtracts.
    np.testing.assert_allclose(-updates["w"], [3.0, 0.004], rtol=1e-6)
    assert state.gradient.tolist() == [3.0]
    assert state.step.tolist() == [-3.0]
    assert state.momentum["w"].tolist() == [0.0, 4.0]
    assert (state.status_name, int(state.trials), float(state.factor)) == ("accepted", 1, 1.0)
    np.testing.assert_allclose(state.delta, -9.016, rtol=1e-6)


def test_second_step_by_hand():
    tx = dim_reduce(basis_of([[1.0, 0.0]]), rho=0.5, gamma=0.5, alpha=0.0, sigma=0.4)
    step = stepper(tx, lambda p: 2 * p["w"][0] ** 2 + 0.5 * p["w"][1] ** 2)
    params = {"w": jnp.array([1.0, 1.0])}
    state = tx.init(params)
    assert state.momentum is None
    params, state = step(params, state)
    # d = -4: f(-3) = 18 and f(-1) = 2 are not below; f(0) = 0 is below 2 - 0.4 * 4.
    assert params["w"].tolist() == [0.0, 1.0]
    assert (int(state.trials), float(state.factor)) == (3, 0.25)
    assert (float(state.value), float(state.new_value)) == (2.5, 0.5)
    # There the gradient is 0: y = -4, s = -1, so B = 1/4, but nothing is accepted.
    params, state = step(params, state)
    assert (state.status_name, int(state.trials), int(state.failures)) == ("flat", 0, 0)
    assert state.metric.tolist() == [[1.0]]
    params = {"w": jnp.array([1.0, 1.0])}
    params, state = step(params, state._replace(gradient=jnp.array([0.0]), step=jnp.array([1.0])))
    np.testing.assert_allclose(params["w"], [0.0, 1.0], atol=1e-7)
    assert state.metric.tolist() == [[0.25]]


# The line search.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_not_lower(bad):
    tx = dim_reduce(basis_of([[1.0]]), alpha=0.0)
    loss = lambda p: jnp.where(p["w"][0] > 0.5, p["w"][0], bad)
    params, state = stepper(tx, loss)({"w": jnp.array([1.0])}, tx.init({"w": jnp.zeros(1)}))
    # The direction is -1: 1 - 1 and 1 - 0.55 lie in the bad part, 1 - 0.55^2 does not.
    np.testing.assert_allclose(params["w"], [1 - 0.55**2], rtol=1e-6)
    assert int(state.trials) == 3
    assert state.new_value < 1


@pytest.mark.parametrize(("value", "slope"), [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan)])
def test_a_start_that_is_not_finite_changes_nothing(value, slope):
    tx = dim_reduce(basis_of([[1.0, 0.0]]))
    params = {"w": jnp.array([-0.0, 2.0])}
    state = tx.init(params)
    update = jax.jit(
        lambda g: tx.update(
            g, state, params, value=jnp.float32(value), value_fn=lambda p: p["w"][0]
        )
    )
    updates, new = update({"w": jnp.array([slope, 1.0])})
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert (new.status_name, int(new.trials), int(new.failures)) == ("nonfinite", 0, 0)
    assert_same_bits(new.momentum, state.momentum)


def test_failure_changes_nothing_and_resets():
    tx = dim_reduce(basis_of(np.eye(2)), max_backtracks=2, reset_after=2)
    params = {"w": jnp.array([1.0, -0.0])}
    state = tx.init(params)._replace(
        metric=jnp.array([[2.0, 1.0], [1.0, 3.0]]),
        gradient=jnp.array([1.0, 2.0]),
        step=jnp.array([0.1, 0.2]),
        has_pair=jnp.array(True),
        momentum={"w": jnp.array([5.0, -0.0])},
    )

    @jax.jit
    def step(state):
        given = {"value": 1.0, "value_fn": lambda p: 1.0 + 0 * p["w"][0]}
        return tx.update({"w": jnp.array([3.0, 4.0])}, state, params, **given)

    updates, failed = step(state)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert (failed.status_name, int(failed.trials), int(failed.failures)) == ("failed", 3, 1)
    assert (float(failed.factor), float(failed.delta)) == (0.0, 0.0)
    for name in ("metric", "gradient", "step", "has_pair", "momentum", "curvature_skips"):
        assert_same_bits(getattr(failed, name), getattr(state, name))
    updates, again = step(failed)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert int(again.failures) == 2
    assert again.metric.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert not again.has_pair
    assert_same_bits(again.momentum, state.momentum)
    # The identity failed as well: from now on shorter steps are tried.
    _, shorter = step(again)
    np.testing.assert_allclose(shorter.metric, 0.55**3 * np.eye(2), rtol=1e-6)
    _, shorter = step(shorter)
    np.testing.assert_allclose(shorter.metric, 0.55**6 * np.eye(2), rtol=1e-6)


def test_a_sum_over_many_examples_gets_there():
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(256, 4)).astype(np.float32), np.array([1.0, -2.0, 3.0, 0.5])
    y = jnp.asarray(x @ w, jnp.float32)
    loss = lambda p: 256.0 * jnp.sum((x @ p["w"] - y) ** 2)
    tx = dim_reduce(basis_of(np.eye(4)), alpha=0.0)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=loss)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.zeros(4)}
    state = tx.init(params)
    for _ in range(20):
        params, state = step(params, state)
    np.testing.assert_allclose(params["w"], w, rtol=1e-3)


def test_a_direction_against_the_loss_is_not_tried():
    tx = dim_reduce(basis_of([[1.0]]), alpha=0.0)
    params = {"w": jnp.ones(1)}
    turned = {"value": 1.0, "grad": {"w": -jnp.ones(1)}, "value_fn": lambda p: -p["w"][0]}
    _, state = tx.update({"w": jnp.ones(1)}, tx.init(params), params, **turned)
    assert (state.status_name, int(state.trials), int(state.failures)) == ("uphill", 0, 1)


@pytest.mark.parametrize(("y", "used"), [((-1.0, 0.0), 0), ((1e-6, 1.0), 0), ((0.02, 0.1), 1)])
def test_curvature_pairs_are_relatively_positive(y, used):
    tx = dim_reduce(basis_of(np.eye(2)), alpha=0.0, curvature_tol=1e-4)
    params, s, y = {"w": jnp.zeros(2)}, np.array([1.0, 0.0]), np.array(y)
    state = tx.init(params)._replace(
        gradient=jnp.array(1 - y, jnp.float32), step=jnp.array([1.0, 0.0]), has_pair=jnp.array(True)
    )
    given = {"value": 0.0, "value_fn": lambda p: p["w"].sum()}
    _, new = tx.update({"w": jnp.ones(2)}, state, params, **given)
    left = np.eye(2) - np.outer(s, y) / (s @ y)
    expected = left @ left.T + np.outer(s, s) / (s @ y) if used else np.eye(2)
    np.testing.assert_allclose(new.metric, expected, rtol=1e-4)
    assert int(new.curvature_skips) == 1 - used


quadratics = st.lists(st.floats(0.05, 20.0), min_size=3, max_size=3)


@functools.cache
def _searching():
    tx = dim_reduce(basis_of(np.eye(3)[:2]), alpha=0.01, sigma=0.4)

    @jax.jit
    def step(params, state, scales):
        loss = lambda p: jnp.sum(scales * jnp.log(jnp.cosh(p["w"])))
        value, grads = jax.value_and_grad(loss)(params)
        updates, new = tx.update(grads, state, params, value=value, value_fn=loss)
        params = optax.apply_updates(params, updates)
        return params, new, loss(params), grads["w"][:2]

    return tx, step


@hypothesis.given(quadratics, st.lists(st.floats(-2.0, 2.0), min_size=3, max_size=3))
def test_an_accepted_loss_is_never_above_the_bound(scales, start):
    tx, step = _searching()
    params = {"w": jnp.asarray(start, jnp.float32)}
    state = tx.init(params)
    for _ in range(4):
        before = params
        params, state, after, gradient = step(params, state, jnp.asarray(scales, jnp.float32))
        if state.status_name != "accepted":
            assert_same_bits(params, before)
            continue
        bound = float(state.value + 0.4 * (gradient @ state.step))
        # The search and the loss here are two programs.
        assert float(after) <= bound + 1e-5 * (1 + abs(float(state.value)))
        assert np.linalg.eigvalsh(np.asarray(state.metric)).min() > 0


def _numpy_bfgs(matrix, x, steps, rho, sigma):
    metric, pair, path = np.eye(len(x)), None, []
    f = lambda x: 0.5 * x @ matrix @ x
    for _ in range(steps):
        g = matrix @ x
        if pair is not None:
            s, y = pair[0], g - pair[1]
            left = np.eye(len(x)) - np.outer(s, y) / (s @ y)
            metric = left @ metric @ left.T + np.outer(s, s) / (s @ y)
        d, t = -metric @ g, 1.0
        while not f(x + t * d) < f(x) + sigma * t * (g @ d):
            t *= rho
        pair, x = (t * d, g), x + t * d
        path.append(x)
    return np.array(path)


def test_a_quadratic_in_its_whole_space_as_numpy_does_it():
    rng = np.random.default_rng(3)
    axes = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    matrix = axes @ np.diag([1.0, 2.0, 4.0, 8.0]) @ axes.T
    start = rng.normal(size=4)
    tx = dim_reduce(basis_of(np.eye(4)), alpha=0.0)
    loss = lambda p: 0.5 * p["w"] @ jnp.asarray(matrix, jnp.float32) @ p["w"]
    step = stepper(tx, loss)
    params = {"w": jnp.asarray(start, jnp.float32)}
    state, path = tx.init(params), []
    for _ in range(12):
        params, state = step(params, state)
        path.append(np.asarray(params["w"]))
    expected = _numpy_bfgs(matrix, start, 12, 0.55, 0.4)
    np.testing.assert_allclose(np.array(path)[:9], expected[:9], rtol=2e-3, atol=2e-4)
    sizes = np.linalg.norm(np.array([start, *path]), axis=1)
    rates = sizes[1:] / sizes[:-1]
    # Superlinear: the error falls by a growing factor.
    assert sizes[-1] < 1e-4 * sizes[0]
    assert rates[8:11].min() < 0.1 * np.median(rates[:4])
    assert step._cache_size() == 1


# What it costs, and what it leaves alone.


def test_two_passes_over_the_basis_with_alpha_and_without():
    params = {"w": jnp.zeros(16384)}
    basis = basis_of(np.eye(32, 16384))
    size = 32 * 16384

    def cost(alpha):
        tx = dim_reduce(basis, alpha=alpha)
        update = lambda g, s: tx.update(
            g, s, params, value=1.0, value_fn=lambda p: jnp.sum(p["w"][:2])
        )
        jitted = jax.jit(update, donate_argnums=1)
        return jitted.lower(params, tx.init(params)).compile().cost_analysis()

    with_momentum, without = cost(0.1), cost(0.0)
    # Without alpha the part inside is not taken back.
    assert with_momentum["flops"] - without["flops"] > 0.9 * 2 * size
    assert without["flops"] < 2.5 * 2 * size
    # With it, that part and the direction come from the same pass.
    assert without["bytes accessed"] < 2.5 * 4 * size
    assert with_momentum["bytes accessed"] - without["bytes accessed"] < 0.75 * 4 * size


def test_the_transformation_keeps_its_basis_on_the_host():
    info = boostax._info.find(dim_reduce(basis_of(np.eye(3)[:2])), "dim_reduce")
    assert isinstance(info.static.components[0], np.ndarray)
    assert info.static.mean is None


def test_other_leaves_are_not_touched():
    params = {"a": jnp.ones(2), "count": jnp.array([3, 4]), "still": jnp.array([-0.0, 1.0])}
    basis = TrajectoryBasis.from_array(np.eye(2), params, exclude=["still"])
    tx = dim_reduce(basis)
    loss = lambda p: jnp.sum(p["a"] ** 2) + jnp.sum(p["still"]) + 0.0 * jnp.sum(p["count"])

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss, allow_int=True)(params)
        updates, state = tx.update(grads, state, params, value=value, value_fn=loss)
        assert updates["count"] is grads["count"]  # a float0, which optax can't add
        del updates["count"]
        rest = {name: params[name] for name in updates}
        return optax.apply_updates(rest, updates), state

    new, state = step(params, tx.init(params))
    assert_same_bits(new["still"], params["still"])
    assert new["a"].tolist() != [1.0, 1.0]
    assert state.momentum["still"] == optax.MaskedNode()
    fates = boostax._info.find(tx, "dim_reduce").fates(params)
    assert fates["a"] == "moves in a subspace of 2 directions"
    assert fates["still"].startswith("not moved")


def test_value_fn_with_arguments_and_with_aux():
    tx = dim_reduce(basis_of([[1.0]]), alpha=0.0)
    params = {"w": jnp.ones(1)}
    value_fn = lambda p, batch: (jnp.sum(p["w"] * batch), {"any": batch})
    given = {"value": 2.0, "batch": jnp.array([2.0])}
    updates, state = tx.update(
        {"w": jnp.full(1, 2.0)}, tx.init(params), params, value_fn=value_fn, other=1, **given
    )
    assert updates["w"].tolist() == [-2.0]
    with pytest.raises(ValueError, match="value_fn takes batch, which update did not get"):
        tx.update({"w": jnp.ones(1)}, state, params, value=2.0, value_fn=value_fn)


# States.


def test_a_state_of_another_basis_is_refused():
    params = {"w": jnp.ones(2)}
    one, other = dim_reduce(basis_of([[1.0, 0.0]])), dim_reduce(basis_of([[0.0, 1.0]]))
    state = one.init(params)
    given = {"value": 1.0, "value_fn": lambda p: p["w"].sum()}
    with pytest.raises(StateMismatchError, match="another basis"):
        other.update(params, state, params, **given)
    with pytest.raises(StateMismatchError, match="a momentum, and alpha is 0"):
        dim_reduce(basis_of([[1.0, 0.0]]), alpha=0).update(params, state, params, **given)
    step = boostax.train_step(lambda p, x: jnp.sum(p["w"] * x), other)
    first = step.init(params)
    with pytest.raises(StateMismatchError, match="another basis"):
        step(first.replace(opt_state=state), jnp.ones(2))
    with pytest.raises(StateMismatchError, match="no DimReduceState"):
        step(first.replace(opt_state={"metric": 1}), jnp.ones(2))


def test_init_on_shapes_and_no_shared_buffers():
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    tx = dim_reduce(TrajectoryBasis.from_array([[1.0, 0.0]], params))
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = tx.init(params)
    told = jax.eval_shape(tx.init, shapes)
    assert jax.tree.structure(told) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(told)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(state)
    ]
    assert state.momentum["w"].dtype == jnp.float32
    jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(state)
    tx.init(params)  # the basis is still there


# Arguments.


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"rho": 1.0}, ValueError, "rho must be between 0 and 1, got 1.0"),
        ({"gamma": -0.1}, ValueError, "gamma must be >= 0 and < 1"),
        ({"alpha": float("nan")}, ValueError, "alpha must be >= 0"),
        ({"sigma": True}, TypeError, "sigma must be a number between 0 and 1, got True"),
        ({"max_backtracks": 2.0}, TypeError, "max_backtracks must be a whole number"),
        ({"max_backtracks": -1}, ValueError, "max_backtracks must be >= 0, got -1"),
        ({"max_backtracks": True}, TypeError, "max_backtracks must be a whole number"),
        ({"reset_after": 0}, ValueError, "reset_after must be >= 1"),
        ({"mode": "refrence"}, ValueError, "Did you mean 'reference'"),
        ({"mode": "reference", "max_backtracks": 5}, ValueError, "always tries twice"),
        ({"loss_scale": 2.0}, ValueError, "only mode='reference'"),
        ({"basis": np.eye(2)}, TypeError, "TrajectoryBasis.from_array"),
    ],
)
def test_bad_arguments(settings, error, words):
    settings = {"basis": basis_of([[1.0, 0.0]]), **settings}
    with pytest.raises(error, match=words):
        dim_reduce(settings.pop("basis"), **settings)


def test_numpy_numbers_are_taken():
    info = boostax._info.find(
        dim_reduce(basis_of([[1.0]]), rho=np.float32(0.5), max_backtracks=np.int64(3)), "dim_reduce"
    )
    assert info.settings["rho"] == 0.5
    assert info.settings["max_backtracks"] == 3


def test_bad_calls():
    tx, params = dim_reduce(basis_of([[1.0, 0.0]])), {"w": jnp.ones(2)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="need the parameters"):
        tx.update(params, state, value=1.0, value_fn=lambda p: 1.0)
    with pytest.raises(ValueError, match="no value and no value_fn"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="must return a scalar loss"):
        tx.update(params, state, params, value=1.0, value_fn=lambda p: p["w"])
    with pytest.raises(ValueError, match="lacks the leaves w"):
        tx.init({"v": jnp.ones(2)})
    with pytest.raises(ValueError, match="has shape"):
        tx.init({"w": jnp.ones(3)})


def test_windows_and_freezing_around_it_are_refused():
    tx = dim_reduce(basis_of([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="the loss of the whole window"):
        boostax.accumulate(tx, 2)
    with pytest.raises(ValueError, match="freeze: inner holds dim_reduce"):
        boostax.freeze(tx, boostax.Freezing([["w"]], (0,)))
    assert boostax.accumulate(tx, 1) is not None
