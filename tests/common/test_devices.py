"""Common suite: the same training on 1, 2, 3, 4 and 8 devices."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from boostax._compat import tracks_varying
from tests.common import harness
from tests.common.harness import for_rows_on_devices
from tests.common.settings import ROWS
from tests.models import data, plain


@for_rows_on_devices("devices", ROWS)
def test_devices(row, count):
    """Parameters and state on every device, the batch split over them, jit's own partitioning.

    On eight devices the mesh is Explicit: there every array's type says how it is laid out.
    """
    if row.talks_to_devices:
        _exchanging(row, count)
        return
    # Recorded out here: inside of the mesh every array would be laid out over it.
    run = harness.recorded(row)
    if count < max(harness.DEVICE_COUNTS):
        _train(row, run, harness.mesh_of(count))
        return
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        _train(row, run, mesh)


def _train(row, run, mesh):
    count = mesh.size
    carry = jax.device_put(run.program.init(), NamedSharding(mesh, PartitionSpec()))
    for t in range(row.cycle):
        batch = jax.device_put(run.batches[t], NamedSharding(mesh, PartitionSpec("data")))
        carry, out = run.step(carry, batch)
    harness.assert_close(carry, run.carries[row.cycle], "state", row.rtol)
    harness.assert_close(out, run.outs[row.cycle - 1], "output", row.rtol)
    for leaf in jax.tree.leaves(carry):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(copies) == count
        assert len(set(copies)) == 1, "the devices' copies of the state differ"


@for_rows_on_devices("shard_map", ROWS)
def test_shard_map(row, count):
    """The update inside ``shard_map``, after the mean over devices, with all of its checks on."""
    if row.talks_to_devices:
        _exchanging_updates(row, count)
        return
    params, grads, alone = harness.driven(row)
    tx, mesh = row.make(), harness.mesh_of(count)

    def update(grads, state, params):
        # Each device holds its own share; their mean is the gradient.
        mean = jax.tree.map(lambda g: jax.lax.pmean(g[0], "data"), grads)
        return tx.update(mean, state, params, **row.extra)

    spec = PartitionSpec
    step = jax.jit(
        jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(spec("data"), spec(), spec()),
            out_specs=(spec(), spec()),
        )
    )
    share = 2.0 * np.arange(1, count + 1, dtype=np.float32) / (count + 1)
    state = tx.init(params)
    for t in range(row.cycle):
        shares = jax.tree.map(
            lambda g, t=t: share.reshape(-1, *[1] * (g.ndim - 1)) * np.asarray(g[t])[None], grads
        )
        updates, state = step(shares, state, params)
        expected = jax.tree.map(lambda u, t=t: u[t], alone)
        harness.assert_close(updates, expected, f"updates of step {t}", row.rtol)


def _both_ways(function, count):
    """Return ``function(share, common)`` over real devices, and over the lanes of a vmap."""
    spec = PartitionSpec
    real = jax.shard_map(
        lambda share, common: function(jax.tree.map(lambda x: x[0], share), common),
        mesh=harness.mesh_of(count),
        in_specs=(spec("data"), spec()),
        out_specs=spec(),
    )
    lanes = jax.vmap(function, in_axes=(0, None), axis_name="data")
    return jax.jit(real), jax.jit(lanes)


def _assert_both_ways(function, count, shares, common, what, rtol):
    """Run both, compare, check that all devices hold the same bytes; return the result."""
    real, lanes = _both_ways(function, count)
    got = real(shares, common)
    expected = lanes(shares, common)
    harness.assert_close(got, jax.tree.map(lambda x: x[0], expected), what, rtol)
    for leaf in jax.tree.leaves(got):
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert len(copies) == count
        assert len(set(copies)) == 1, f"{what}: the devices' copies differ"
    return got


def _exchanging(row, count):
    """A technique that exchanges: each device takes the gradient of its part of the batch."""
    tx = optax.with_extra_args_support(row.transform(harness.LEARNING_RATE))

    def step(batch, carry):
        params, state = carry
        mine = jax.tree.map(_differing, params)
        grads = jax.grad(plain.loss)(mine, batch)
        updates, state = tx.update(grads, state, params, **row.extra)
        return optax.apply_updates(params, updates), state

    params = plain.init()
    carry = params, tx.init(params)
    for t in range(row.cycle):
        batch = harness.batch_at(row, t)
        shares = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        carry = _assert_both_ways(step, count, shares, carry, f"state after {t}", row.rtol)


def _exchanging_updates(row, count):
    """A technique that exchanges, on gradients that have nothing to do with each other."""
    tx = optax.with_extra_args_support(row.transform(harness.LEARNING_RATE))
    params = plain.init()
    grads = data.random_like(params, row.cycle * count)
    state = tx.init(params)
    for t in range(row.cycle):
        shares = jax.tree.map(lambda g, t=t: g[t * count : (t + 1) * count], grads)
        update = lambda share, state: tx.update(share, state, params, **row.extra)
        _, state = _assert_both_ways(update, count, shares, state, f"update {t}", row.rtol)


def _differing(leaf):
    # shard_map would sum the gradient of what is the same on all devices.
    if not tracks_varying("data"):
        return leaf
    return jax.lax.pcast(leaf, "data", to="varying")
