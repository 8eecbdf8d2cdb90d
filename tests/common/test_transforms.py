"""Common suite: a technique at the update seam inside optax's wrappers, and its init."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from boostax._tree import map_params_like
from tests.common import harness
from tests.common.harness import for_rows
from tests.common.settings import ROWS
from tests.models import plain


def _layer(tree, name):
    return {layer: leaves for layer, leaves in tree.items() if layer == name}


@for_rows("chain", ROWS)
def test_chain(row):
    params, grads, alone = harness.driven(row)
    tx = optax.chain(optax.clip_by_global_norm(1e6), row.make(), optax.scale(0.5))
    got = harness.drive(tx, params, grads, **row.extra)
    harness.assert_close(got, jax.tree.map(lambda u: 0.5 * u, alone), "updates", row.rtol)


@for_rows("masked", ROWS)
def test_masked(row):
    params, grads, alone = harness.driven(row)
    mask = jax.tree.map(lambda _: True, params)
    mask["layers_1"]["bias"] = False
    got = harness.drive(optax.masked(row.make(), mask), params, grads, **row.extra)
    untouched = got["layers_1"].pop("bias")
    harness.assert_bitwise(untouched, grads["layers_1"]["bias"], "the masked leaf")
    harness.assert_finite(got, "updates")
    if row.leafwise:
        expected = {**alone, "layers_1": {"kernel": alone["layers_1"]["kernel"]}}
        harness.assert_close(got, expected, "updates of the other leaves", row.rtol)


@for_rows("multi_transform", ROWS)
def test_multi_transform(row):
    params, grads, alone = harness.driven(row)
    labels = {name: "theirs" if name == "layers_1" else "ours" for name in params}
    tx = optax.multi_transform({"ours": row.make(), "theirs": optax.sgd(0.5)}, labels)
    got = harness.drive(tx, params, grads, **row.extra)
    expected = jax.tree.map(lambda g: -0.5 * g, _layer(grads, "layers_1"))
    harness.assert_close(_layer(got, "layers_1"), expected, "updates of the other optimizer")
    harness.assert_finite(got, "updates")
    if row.leafwise:
        ours = [_layer(tree, name) for tree in (got, alone) for name in ("layers_0", "layers_2")]
        harness.assert_close(ours[:2], ours[2:], "updates of the technique", row.rtol)


@for_rows("inject_hyperparams", ROWS)
def test_inject_hyperparams(row):
    params, grads, alone = harness.driven(row)
    tx = optax.inject_hyperparams(row.build)(learning_rate=harness.LEARNING_RATE)

    def halve(state, t):
        if t != row.cycle:
            return state
        rate = jnp.float32(0.5 * harness.LEARNING_RATE)
        return state._replace(hyperparams={**state.hyperparams, "learning_rate": rate})

    got = harness.drive(tx, params, grads, between=halve, **row.extra)
    factor = np.where(np.arange(row.length) < row.cycle, 1.0, 0.5).astype(np.float32)
    expected = jax.tree.map(lambda u: u * factor.reshape(-1, *[1] * (u.ndim - 1)), alone)
    harness.assert_close(got, expected, "updates", row.rtol)


@for_rows("extra_args", ROWS)
def test_unknown_extra_args(row):
    params, grads, alone = harness.driven(row)
    tx = row.build(harness.LEARNING_RATE)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    got = harness.drive(
        tx, params, grads, **row.extra, nobody_knows_this=jnp.ones((2,)), nor_this={"a": None}
    )
    harness.assert_bitwise(got, alone, "updates")


@pytest.mark.quick
@for_rows("abstract_init", ROWS)
def test_abstract_init(row):
    if row.transform is None:
        program = harness.build(row)
        harness.assert_same_avals(jax.eval_shape(program.init), program.init(), "state")
        return
    tx, params = row.make(), plain.init()
    concrete = tx.init(params)
    harness.assert_same_avals(jax.eval_shape(tx.init, params), concrete, "from arrays")
    structs = harness.avals(params)
    harness.assert_same_avals(jax.eval_shape(tx.init, structs), concrete, "from structs")
    sharding = NamedSharding(harness.mesh_of(2), PartitionSpec())
    sharded = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params
    )
    harness.assert_same_avals(jax.eval_shape(tx.init, sharded), concrete, "from sharded structs")


@for_rows("sharding", ROWS)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharding(row, kind):
    mesh = jax.make_mesh((2,), ("model",), (getattr(AxisType, kind),), devices=jax.devices()[:2])

    def place(leaf):
        # Kernels are split over their output axis where it is even.
        even = leaf.ndim == 2 and leaf.shape[1] % 2 == 0
        spec = PartitionSpec(None, "model") if even else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        params = jax.tree.map(place, plain.init())
        _, stream, alone = harness.driven(row)
        tx = row.make()
        update = jax.jit(tx.update)
        state = tx.init(params)
        for t in range(3):
            grads = jax.tree.map(lambda g, t=t: place(g[t]), stream)
            updates, state = update(grads, state, params, **row.extra)
            if t == 1:
                size = update._cache_size()
        assert update._cache_size() == size, "shardings changed between the second and third step"
        expected = jax.tree.map(lambda u: u[2], alone)
        harness.assert_close(updates, expected, "updates", row.rtol)

        def same(leaf, param):
            assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim), (
                f"{leaf.sharding} where the parameter has {param.sharding}"
            )
            return leaf

        map_params_like(same, (updates, state), params, params)
