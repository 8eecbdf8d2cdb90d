"""microbatch: the whole batch's gradient, weights, statistics, keys, memory, errors."""

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from boostax import LossAux, microbatch
from boostax.gradients.microbatch import microbatched
from boostax.training.contract import canonical_loss

X = jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0], [1.0, 1.0], [2.0, 0.0]])


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def params(dtype=jnp.float32):
    return {"w": jnp.array([0.5, -0.3], dtype), "b": jnp.array(0.1, dtype)}


def token_loss(w, batch):
    """Mean over real tokens; 0/0 where there are none."""
    x, mask = batch
    weight = mask.sum()
    return jnp.sum(mask * w * x) / weight, LossAux(
        weight=weight, metrics={"x": jnp.sum(mask * x) / weight}, aux=x
    )


def test_unequal_weights_by_hand():
    # Every second example: mean gradient 6 over 1 token, then 2 over 3 tokens.
    x = jnp.array([6.0, 1.0, 0.0, 2.0, 0.0, 3.0])
    mask = jnp.array([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    (loss, aux), grad = microbatch(token_loss, 2, has_aux=True)(jnp.float32(2.0), (x, mask))
    assert (float(grad), float(loss), float(aux.weight)) == (3.0, 6.0, 4.0)
    assert float(aux.metrics["x"]) == 3.0
    np.testing.assert_array_equal(aux.aux, [1.0, 2.0, 3.0])


def test_parts_without_weight_add_nothing_even_if_their_loss_is_nan():
    x = jnp.array([jnp.nan, 5.0, 1.0, 7.0])
    fn = jax.jit(microbatch(token_loss, 2, has_aux=True))
    (loss, aux), grad = fn(jnp.float32(1.0), (x, jnp.array([0.0, 1.0, 0.0, 1.0])))
    assert (float(loss), float(grad), float(aux.weight)) == (6.0, 6.0, 2.0)
    (loss, aux), grad = fn(jnp.float32(1.0), (x, jnp.zeros(4)))
    assert (float(loss), float(grad), float(aux.weight)) == (0.0, 0.0, 0.0)
    # A NaN that has a weight shows.
    (loss, _), grad = fn(jnp.float32(1.0), (x, jnp.ones(4)))
    assert np.isnan(loss)
    assert np.isnan(grad)


@hypothesis.given(
    st.sampled_from([1, 2, 3, 6]), st.lists(st.integers(0, 3), min_size=6, max_size=6)
)
def test_any_number_of_parts_gives_the_whole_batch(n, weights):
    hypothesis.assume(sum(weights) > 0)
    weights = jnp.array(weights, jnp.float32)

    def weighted(params, batch):
        x, w = batch
        total = w.sum()
        each = jnp.tanh(x @ params["w"] + params["b"]) ** 2
        return jnp.sum(w * each) / jnp.where(total == 0, 1, total), LossAux(weight=total)

    (whole, _), expected = jax.value_and_grad(weighted, has_aux=True)(params(), (X, weights))
    (loss, aux), grads = microbatch(weighted, n, has_aux=True)(params(), (X, weights))
    np.testing.assert_allclose(loss, whole, rtol=1e-5)
    assert float(aux.weight) == float(weights.sum())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads, expected
    )


def test_one_part_is_the_plain_value_and_grad():
    (loss, aux), grads = microbatch(loss_fn, 1)(params(), X)
    expected, expected_grads = jax.value_and_grad(loss_fn)(params(), X)
    assert (float(loss), float(aux.weight)) == (float(expected), 6.0)
    jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)


def test_gradients_have_the_parameters_dtype_and_sums_do_not():
    # 1, then 255 times 2**-9: a bfloat16 sum would stay at 1.
    x = jnp.concatenate([jnp.ones(1), jnp.full(255, 2.0**-9)]).astype(jnp.bfloat16)
    loss = lambda w, x: jnp.mean(w * x)
    w = jnp.ones((), jnp.bfloat16)
    exact = (1 + 255 * 2.0**-9) / 256
    _, grad = microbatch(loss, 256)(w, x)
    assert grad.dtype == jnp.bfloat16
    assert float(grad) == float(jnp.bfloat16(exact))
    _, grad = microbatch(loss, 256, gradient_dtype=jnp.float32)(w, x)
    assert (grad.dtype, float(grad)) == (jnp.float32, np.float32(exact))
    _, grad = microbatch(loss, 1, gradient_dtype=jnp.float32)(w, x)
    assert grad.dtype == jnp.float32


def test_each_part_has_its_own_key():
    def noisy(w, x, *, rng):
        return jnp.mean(x) * w + jax.random.uniform(rng) * w

    rng = jax.random.key(3)
    (_, _), grad = microbatch(noisy, 3)(jnp.float32(1.0), jnp.zeros(6), rng=rng)
    draws = [jax.random.uniform(jax.random.fold_in(rng, i)) for i in range(3)]
    np.testing.assert_allclose(grad, np.mean(draws), rtol=1e-6)


def test_frozen_leaves_have_zero_gradients_and_no_sum():
    trainable = {"w": False, "b": True}
    loss = canonical_loss(loss_fn)
    fn = microbatched(loss, 2, trainable=trainable)
    _, grads, _ = fn(params(), None, X, None)
    expected = jax.grad(loss_fn)(params(), X)
    np.testing.assert_array_equal(grads["w"], [0.0, 0.0])
    np.testing.assert_allclose(grads["b"], expected["b"], rtol=1e-5)
    jaxpr = jax.make_jaxpr(lambda p: fn(p, None, X, None))(params())
    scan = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    # Carried: weight, loss, and the sum of the only trained leaf.
    assert [out.aval.shape for out in scan.outvars] == [(), (), ()]


def test_temp_memory_does_not_depend_on_the_number_of_parts():
    wide = {"w": jnp.ones((32, 64)), "b": jnp.ones(64)}
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)

    def temp(n):
        compiled = jax.jit(microbatch(loss, n)).lower(wide, jnp.ones((8 * n, 32))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(2) == temp(4) == temp(8) == temp(16)


def mesh_of(axis_type, size=8):
    kinds = (getattr(jax.sharding.AxisType, axis_type),)
    return jax.make_mesh((size,), ("data",), axis_types=kinds, devices=jax.devices()[:size])


def row_loss(params, x):
    y = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(y**2), LossAux(metrics={"y": jnp.mean(y)}, aux={"x": x, "largest": y.max()})


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_batch_that_is_split_over_devices_stays_where_it_is(axis_type):
    x = jax.random.normal(jax.random.key(0), (64, 2))
    fn = jax.jit(microbatch(row_loss, 4, has_aux=True))
    (expected, one), expected_grads = fn(params(), x)
    np.testing.assert_array_equal(one.aux["x"], x[3::4])
    mesh = mesh_of(axis_type)
    split = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    with jax.set_mesh(mesh):
        placed = jax.device_put(params(), split()), jax.device_put(x, split("data"))
        (loss, aux), grads = fn(*placed)
        compiled = fn.lower(*placed).compile().as_text()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(aux.metrics["y"], one.metrics["y"], rtol=1e-4)
    np.testing.assert_array_equal(aux.aux["x"], one.aux["x"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), grads, expected_grads)
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in compiled


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_inside_shard_map_each_device_visits_its_share(axis_type):
    x = jax.random.normal(jax.random.key(1), (12, 2))
    mesh = mesh_of(axis_type, 2)
    spec, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def mapped(n):
        def local(params, x):
            (loss, aux), grads = microbatch(row_loss, n, has_aux=True)(params, x)
            mean = lambda value: jax.lax.pmean(value, "data")
            # The transpose of using a shared parameter on all devices is a sum over them.
            return mean(loss), mean(aux.metrics["y"]), jax.tree.map(lambda g: g / 2, grads)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(whole, spec), out_specs=whole))

    place = lambda tree, spec: jax.device_put(tree, jax.sharding.NamedSharding(mesh, spec))
    expected, got = (mapped(n)(place(params(), whole), place(x, spec)) for n in (1, 3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
    np.testing.assert_allclose(got[0], loss_fn(params(), x), rtol=1e-5)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        self.variable("counter", "calls", lambda: jnp.int32(0)).value += 1
        return nn.BatchNorm(use_running_average=True, momentum=0.6)(nn.Dense(1)(x))


def net_loss(params, x, *, model_state):
    variables = {"params": params, **model_state}
    y, new = Net().apply(variables, x, mutable=["batch_stats", "counter"])
    return jnp.mean(y**2), LossAux(model_state=new)


@pytest.fixture(scope="module")
def net():
    variables = dict(Net().init(jax.random.key(0), X))
    return variables.pop("params"), variables


def test_statistics_per_window_are_those_of_the_whole_batch(net):
    weights, state = net
    run = lambda n, **kw: microbatch(net_loss, n, has_aux=True, **kw)(weights, X, model_state=state)
    (_, whole), _ = run(1)
    (_, parts), _ = run(3)
    for name in ("mean", "var"):
        np.testing.assert_allclose(
            parts.model_state["batch_stats"]["BatchNorm_0"][name],
            whole.model_state["batch_stats"]["BatchNorm_0"][name],
            rtol=1e-5,
        )
    # A layer that only reads its statistics keeps them; what is no statistic goes on from part to part.
    jax.tree.map(
        np.testing.assert_array_equal,
        parts.model_state["batch_stats"]["BatchNorm_1"],
        state["batch_stats"]["BatchNorm_1"],
    )
    assert int(parts.model_state["counter"]["calls"]) == int(state["counter"]["calls"]) + 3
    (_, given), _ = run(3, batch_norm_momentum=0.9)
    jax.tree.map(np.testing.assert_array_equal, given.model_state, parts.model_state)


def test_statistics_per_micro_go_from_part_to_part(net):
    weights, state = net
    fn = microbatch(net_loss, 4, has_aux=True, stats="per_micro")
    x = jnp.repeat(jnp.array([[1.0, 2.0], [3.0, 2.0]]), 4, axis=0)
    (_, aux), _ = fn(weights, x, model_state=state)
    # Four micro-batches of mean 2 from 0: 2 * (1 - 0.9**4).
    mean = aux.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, [0.6878, 0.6878], rtol=1e-5)


def test_a_forward_pass_under_jit_that_was_traced_before_still_tells_its_momenta(net):
    weights, state = net
    forward = jax.jit(
        lambda variables, x: Net().apply(variables, x, mutable=["batch_stats", "counter"])
    )
    forward({"params": weights, **state}, X[:2])

    def loss(params, x, *, model_state):
        y, new = forward({"params": params, **model_state}, x)
        return jnp.mean(y**2), LossAux(model_state=new)

    (_, expected), _ = microbatch(net_loss, 3, has_aux=True)(weights, X, model_state=state)
    for run in (lambda f: f, jax.jit):
        fn = run(microbatch(loss, 3, has_aux=True))
        (_, aux), _ = fn(weights, X, model_state=state)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            aux.model_state,
            expected.model_state,
        )


def test_float64_stays_float64(net):
    with jax.enable_x64(True):
        weights, state = jax.tree.map(
            lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, net
        )
        x = X.astype(jnp.float64)
        run = lambda n: microbatch(net_loss, n, has_aux=True)(weights, x, model_state=state)
        one, parts = run(1), run(3)
        ((loss, aux), grads) = parts
        assert loss.dtype == jnp.float64
        assert aux.model_state["batch_stats"]["BatchNorm_0"]["var"].dtype == jnp.float64
        stats = lambda result: result[0][1].model_state["batch_stats"]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), stats(parts), stats(one)
        )
        wide = jax.tree.map(lambda p: p.astype(jnp.float64), params())
        (loss, _), grads = microbatch(loss_fn, 3)(wide, x)
        expected, expected_grads = jax.value_and_grad(loss_fn)(wide, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-14)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), grads, expected_grads
        )


def test_statistics_of_unknown_momentum_are_refused():
    state = {"batch_stats": {"own": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}}

    def own(params, x, *, model_state):
        return jnp.mean(x * params), LossAux(model_state=model_state)

    with pytest.raises(ValueError, match=r"'own' is not known.*batch_norm_momentum"):
        microbatch(own, 2, has_aux=True)(jnp.ones(()), X, model_state=state)
    microbatch(own, 2, has_aux=True, batch_norm_momentum=0.9)(jnp.ones(()), X, model_state=state)
    other = lambda p, x, *, model_state: (jnp.mean(x * p), LossAux(model_state={"new": p}))
    with pytest.raises(ValueError, match="another structure"):
        microbatch(other, 2, has_aux=True)(jnp.ones(()), X, model_state={"old": jnp.ones(())})


def test_a_batch_that_does_not_divide_is_refused_with_its_size():
    with pytest.raises(ValueError, match=r"leading size 6 .* n=4"):
        microbatch(loss_fn, 4)(params(), X)
    with pytest.raises(ValueError, match="leading sizes differ"):
        microbatch(lambda p, b: jnp.mean(b[0]), 2)(params(), (X, X[:4]))


def test_wrong_arguments_are_named():
    for bad in (True, 2.0, "2"):
        with pytest.raises(TypeError, match="n must be an int"):
            microbatch(loss_fn, bad)  # type: ignore[arg-type]
    for bad in (0, -2):
        with pytest.raises(ValueError, match="n must be an int"):
            microbatch(loss_fn, bad)
    with pytest.raises(ValueError, match="stats must be"):
        microbatch(loss_fn, 2, stats="window")
    with pytest.raises(TypeError, match="accumulator_dtype"):
        microbatch(loss_fn, 2, accumulator_dtype=jnp.int32)
    with pytest.raises(TypeError, match="has_aux"):
        microbatch(loss_fn, 2, has_aux=1)  # type: ignore[arg-type]
    assert float(microbatch(loss_fn, np.int64(2))(params(), X)[0][1].weight) == 6.0
