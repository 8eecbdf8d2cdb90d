"""all_reduce: weighted means and sums by hand, the ways to run, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from boostax import Freezing, accumulate, all_reduce, freeze, parameter_groups

SPEC = PartitionSpec


def lanes(grads, weights=None, axis="d", **settings):
    tx = all_reduce(axis, **settings)
    one = lambda g, w: tx.update(g, optax.EmptyState(), weight=w)[0]
    if weights is None:
        return jax.vmap(lambda g: one(g, None), axis_name=axis)(grads)
    return jax.vmap(one, axis_name=axis)(grads, weights)


def mesh_of(n, names=("d",), shape=None):
    return Mesh(np.array(jax.devices()[:n]).reshape(shape or (n,)), names)


@pytest.mark.parametrize(
    ("settings", "weights", "expected"),
    [
        ({}, None, 3.0),
        ({"op": "sum"}, None, 9.0),
        ({}, [1.0, 1.0, 2.0], 3.75),
        ({"op": "sum"}, [1.0, 1.0, 2.0], 9.0),
        ({}, [0.0, 2.0, 0.0], 2.0),
        ({}, [0.0, 0.0, 0.0], 0.0),
    ],
)
def test_values(settings, weights, expected):
    grads = jnp.array([1.0, 2.0, 6.0])
    got = lanes(grads, None if weights is None else jnp.array(weights), **settings)
    np.testing.assert_allclose(got, [expected] * 3, rtol=1e-6)


def test_a_device_without_weight_adds_nothing_whatever_it_holds():
    got = lanes(jnp.array([[jnp.nan, jnp.inf], [1.0, 2.0]]), jnp.array([0.0, 3.0]))
    np.testing.assert_array_equal(got, [[1, 2], [1, 2]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_in_float32(dtype):
    # 1 + 8 * 2^-9 would stay 1 in bfloat16, added one by one, and 8 * 40000 is beyond float16.
    grads = jnp.full((8, 2), 40000.0, dtype)
    got = lanes(grads)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got, grads)
    small = jnp.array([1.0] + [2.0**-9] * 8, dtype)
    np.testing.assert_array_equal(lanes(small, op="sum"), jnp.full(9, 1 + 2.0**-6, dtype))


def test_other_leaves_pass():
    grads = {"w": jnp.array([1.0, 3.0]), "n": jnp.array([1, 2]), "masked": optax.MaskedNode()}
    got = lanes(grads)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    np.testing.assert_array_equal(got["w"], [2, 2])
    np.testing.assert_array_equal(got["n"], [1, 2])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_devices(n, check_vma):
    grads = np.random.default_rng(n).standard_normal((n, 5)).astype(np.float32)
    weights = np.arange(1, n + 1, dtype=np.float32)
    tx = all_reduce("d")
    step = jax.shard_map(
        lambda g, w: tx.update(g[0], (), weight=w[0])[0],
        mesh=mesh_of(n),
        in_specs=SPEC("d"),
        out_specs=SPEC(),
        check_vma=check_vma,
    )
    got = jax.jit(step)(grads, weights)
    expected = np.average(grads.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert len({np.asarray(s.data).tobytes() for s in got.addressable_shards}) == 1


def test_two_axes():
    tx = all_reduce(("hosts", "local"))
    step = jax.shard_map(
        lambda g: tx.update(g[0, 0], ())[0],
        mesh=mesh_of(4, ("hosts", "local"), (2, 2)),
        in_specs=SPEC("hosts", "local"),
        out_specs=SPEC(),
    )
    np.testing.assert_allclose(step(jnp.array([[1.0, 2], [3, 6]])), 3.0)


def test_a_window_is_weighted_over_calls_and_devices():
    # Weights 1, 3 on device 0 and 4, 0 on device 1: (1*1 + 3*2 + 4*5) / 8.
    tx = accumulate(optax.chain(all_reduce("d"), optax.sgd(1.0)), 2)

    def steps(grads, weights):
        state = tx.init(jnp.zeros(()))
        for g, w in zip(grads, weights, strict=True):
            updates, state = tx.update(g, state, jnp.zeros(()), weight=w)
        return updates

    grads, weights = jnp.array([[1.0, 2.0], [5.0, 9.0]]), jnp.array([[1.0, 3.0], [4.0, 0.0]])
    np.testing.assert_allclose(jax.vmap(steps, axis_name="d")(grads, weights), [-27 / 8] * 2)


def test_frozen_leaves_are_not_sent():
    params = {f"layer_{i}": jnp.zeros((64, 64)) for i in range(2)}
    tx = freeze(all_reduce("d"), Freezing(parameter_groups(params, 2), (0, 1)))
    state, grads = tx.init(params), {k: jnp.ones((4, 64, 64)) for k in params}

    def text(index):
        update = lambda g: tx.update(
            jax.tree.map(lambda x: x[0], g), state, params, freeze_index=index
        )[0]
        step = jax.shard_map(update, mesh=mesh_of(4), in_specs=SPEC("d"), out_specs=SPEC())
        lines = jax.jit(step).lower(grads).compile().as_text().splitlines()
        return "\n".join(line for line in lines if " all-reduce(" in line)

    assert text(0).split(" all-reduce(")[0].count("f32[64,64]") == 2
    assert text(1).split(" all-reduce(")[0].count("f32[64,64]") == 1


def test_what_is_summed_already_is_refused():
    tx = all_reduce("d")
    step = jax.shard_map(
        lambda x: tx.update({"w": jax.lax.psum(x, "d")}, ())[0],
        mesh=mesh_of(2),
        in_specs=SPEC("d"),
        out_specs=SPEC(),
    )
    with pytest.raises(ValueError, match=r"all_reduce: 'w' is the same on all devices.*pcast"):
        step(jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "axis_name must be the name of one axis"),
        (("",), ValueError, "axis_name is empty"),
        (((),), ValueError, "at least one axis"),
        ((("d", "d"),), ValueError, "each once"),
        (("d", "avg"), ValueError, "op must be one of 'mean', 'sum'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        all_reduce(arguments[0], **({"op": arguments[1]} if len(arguments) > 1 else {}))


def test_an_unbound_axis_is_named():
    with pytest.raises(NameError, match=r"all_reduce: the axis 'hosts' is not bound here"):
        all_reduce("hosts").update(jnp.ones(2), optax.EmptyState())


def test_description():
    info = all_reduce(("a", "b")).update.__boostax_info__
    assert info.axes == ("a", "b")
    assert info.fates({"w": jnp.ones(2), "n": jnp.ones(2, jnp.int32)}) == {
        "n": "not exchanged (not floating)",
        "w": "mean over 'a' and 'b'",
    }
