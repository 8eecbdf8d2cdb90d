"""Common suite: the same training on 1, 2, 3, 4 and 8 devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.common import harness
from tests.common.harness import for_rows_on_devices
from tests.common.settings import ROWS


@for_rows_on_devices("devices", ROWS)
def test_devices(row, count):
    """Parameters and state on every device, the batch split over them, jit's own partitioning.

    On eight devices the mesh is Explicit: there every array's type says how it is laid out.
    """
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
