"""Mean and AdaSum of gradients taken inside, in every way that JAX maps over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import boostax

pytestmark = pytest.mark.slow

X = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
EXCHANGES = {
    "mean": (lambda: boostax.all_reduce("data"), [0.5, 0.5]),
    "adasum": (lambda: boostax.adasum("data", buckets=()), [1.0, 1.0]),
}


def loss(params, x):
    return jnp.mean(x @ params)


def combined(tx, params, x):
    grads = jax.grad(loss)(params, x)
    return tx.update(grads, tx.init(params), params)[0]


def by_vmap(tx):
    run = jax.vmap(lambda p, x: combined(tx, p, x), (None, 0), axis_name="data")
    return run(jnp.zeros(2), X[:, None])


def by_pmap(tx):
    run = jax.pmap(lambda p, x: combined(tx, p, x), "data", in_axes=(None, 0))
    return run(jnp.zeros(2), X[:, None])


def by_shard_map(tx, check_vma):
    def body(params, x):
        if check_vma:
            # The gradient of what is the same on all devices would arrive summed.
            params = jax.lax.pcast(params, "data", to="varying")
        return combined(tx, params, x)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(run)(jnp.zeros(2), X)[None]


def by_train_step(tx, kind):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    step = boostax.train_step(loss, optax.chain(tx, optax.sgd(1.0)), mesh=mesh)
    state, _ = step(step.init(jnp.zeros(2)), X)
    return -state.params[None]


MODES = {
    "vmap": by_vmap,
    "pmap": by_pmap,
    "shard_map": lambda tx: by_shard_map(tx, True),
    "shard_map, no check": lambda tx: by_shard_map(tx, False),
    "train_step, Auto": lambda tx: by_train_step(tx, AxisType.Auto),
    "train_step, Explicit": lambda tx: by_train_step(tx, AxisType.Explicit),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_every_mode(name, mode):
    make, expected = EXCHANGES[name]
    for row in np.asarray(MODES[mode](make())):
        assert row.tolist() == expected


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_gradient_that_was_summed_already_is_refused(name):
    tx = EXCHANGES[name][0]()
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    run = jax.shard_map(
        lambda p, x: combined(tx, p, x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    with pytest.raises(ValueError, match="summed the gradient already"):
        jax.jit(run)(jnp.zeros(2), X)
