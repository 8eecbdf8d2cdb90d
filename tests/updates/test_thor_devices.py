"""scale_by_thor between devices: statistics averaged by weight, inverses shared out."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from boostax import scale_by_thor
from boostax.gradients._blocks import Factors
from tests.models.captured import Captured, dense

SPEC = PartitionSpec
# Three sizes: 4 rows (three pieces), 2 rows (two pieces), 3 rows.
LAYERS = Captured((dense("a", 3, 2, "b"), dense("c", 2, 8, block_size=4), dense("d", 3, 3)))
SHAPES = {"a": (3, 2), "b": (2,), "c": (2, 8), "d": (3, 3)}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in SHAPES.items()}


def random_stats(seed):
    rng = np.random.default_rng(seed)

    def one(shape):
        rows = rng.normal(size=(*shape[:-1], 2 * shape[-1]))
        return jnp.asarray(rows @ np.swapaxes(rows, -1, -2), jnp.float32)

    return {b.kernel: Factors(*(one(s.shape) for s in b.shapes())) for b in LAYERS.blocks}


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def weighted(trees, weights):
    weights = np.asarray(weights, np.float64) / np.sum(weights)
    return jax.tree.map(
        lambda *leaves: jnp.asarray(sum(w * x for w, x in zip(weights, leaves, strict=True))),
        *trees,
    )


def on_one(weights, **settings):
    tx = scale_by_thor(layers=LAYERS, damping=0.1, clip=False, **settings)
    grads = random_tree(0)
    stats = weighted([random_stats(n + 1) for n in range(len(weights))], weights)
    return tx.update(grads, tx.init(grads), stats=stats)


def on_devices(weights, mesh, axes, given, check_vma=True, **settings):
    """Run one update in a manual region; ``given(weight)`` makes the extra arguments."""
    tx = scale_by_thor(layers=LAYERS, damping=0.1, clip=False, **settings)
    grads = random_tree(0)
    stats = stacked([random_stats(n + 1) for n in range(len(weights))])

    def inside(grads, state, stats, weight):
        own = jax.tree.map(lambda leaf: leaf[0], stats)
        return tx.update(grads, state, stats=own, **given(weight[0]))

    mapped = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=(SPEC(), SPEC(), SPEC(axes), SPEC(axes)),
        out_specs=SPEC(),
        check_vma=check_vma,
    )
    return jax.jit(mapped)(grads, tx.init(grads), stats, jnp.asarray(weights, jnp.float32))


def mesh_of(shape, names):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names)


def alike(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), a, b)


@pytest.mark.parametrize(
    ("count", "check_vma", "split_indices"), [(2, True, None), (3, False, (0,)), (8, True, (0, 1))]
)
def test_devices_equal_one(count, check_vma, split_indices):
    weights = np.arange(count) + 1.0
    got = on_devices(
        weights,
        mesh_of((count,), ("d",)),
        "d",
        lambda weight: {"weight": weight},
        check_vma,
        axis_name="d",
        split_indices=split_indices,
    )
    alike(got, on_one(weights))


def test_axes_of_the_train_step():
    """Two mesh axes, named at the call; a device of weight 0 counts for nothing."""
    weights = [1.0, 0.0, 2.0, 5.0]
    given = lambda weight: {
        "boostax_devices": types.SimpleNamespace(axes=("x", "y"), weight=weight),
        "weight": 7.0,
    }
    got = on_devices(weights, mesh_of((2, 2), ("x", "y")), ("x", "y"), given, trace_rule=0.1)
    alike(got, on_one(weights, trace_rule=0.1))


def test_lanes_of_vmap():
    tx = scale_by_thor(layers=LAYERS, damping=0.1, clip=False, axis_name="lane")
    grads = random_tree(0)
    stats = stacked([random_stats(1), random_stats(2)])
    run = jax.vmap(lambda own: tx.update(grads, tx.init(grads), stats=own), axis_name="lane")
    got = jax.jit(run)(stats)
    for lane in range(2):
        alike(jax.tree.map(lambda leaf, lane=lane: leaf[lane], got), on_one([1.0, 1.0]))


def test_parameters_split_over_explicit_axes():
    """Updates lie as the parameters do, and are those of one device."""
    mesh = jax.make_mesh((2,), ("m",), (AxisType.Explicit,), devices=jax.devices()[:2])
    specs = {"a": SPEC(None, "m"), "b": SPEC("m"), "c": SPEC("m", None), "d": SPEC()}
    tx = scale_by_thor(layers=LAYERS, damping=0.1, learning_rate=1.0)
    grads, stats = random_tree(0), random_stats(1)
    expected, _ = tx.update(grads, tx.init(grads), stats=stats)
    with jax.set_mesh(mesh):
        split = {
            name: jax.device_put(leaf, NamedSharding(mesh, specs[name]))
            for name, leaf in grads.items()
        }
        updates, _ = jax.jit(tx.update)(split, tx.init(split), stats=stats)
    alike(updates, expected)
    for name, leaf in updates.items():
        assert leaf.sharding.is_equivalent_to(split[name].sharding, leaf.ndim)


def test_a_device_inverts_its_share():
    """Of 8 pieces of one size each of 8 devices inverts one."""
    layers = Captured((dense("w", 16, 16, block_size=4),))
    tx = scale_by_thor(layers=layers, damping=0.1, clip=False, axis_name="d")
    grads = {"w": jnp.ones((16, 16))}
    shapes = layers.shapes()
    stats = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    mapped = jax.shard_map(
        lambda g, s, t: tx.update(g, s, stats=t),
        mesh=mesh_of((8,), ("d",)),
        in_specs=SPEC(),
        out_specs=SPEC(),
    )
    text = str(jax.make_jaxpr(mapped)(grads, tx.init(grads), stats))
    lines = [line for line in text.splitlines() if "= cholesky " in line]
    assert len(lines) == 1
    assert "f32[4,4]" in lines[0]


def test_reference_mode_on_devices():
    """Statistics by weight; the batch size that the reference is told is the devices' mean."""
    layers = Captured(LAYERS.blocks, mode="reference")
    tx = scale_by_thor(
        layers=layers, damping=0.1, clip=False, mode="reference", axis_name="d", frequency=2
    )
    alone = scale_by_thor(layers=layers, damping=0.1, clip=False, mode="reference", frequency=2)
    grads, weights = random_tree(0), [4.0, 12.0]
    each = [random_stats(1), random_stats(2)]
    mapped = jax.shard_map(
        lambda g, s, t, w: tx.update(g, s, stats=jax.tree.map(lambda x: x[0], t), weight=w[0]),
        mesh=mesh_of((2,), ("d",)),
        in_specs=(SPEC(), SPEC(), SPEC("d"), SPEC("d")),
        out_specs=SPEC(),
    )
    got = jax.jit(mapped)(grads, tx.init(grads), stacked(each), jnp.asarray(weights))
    given = weighted(each, weights)
    alike(got, alone.update(grads, alone.init(grads), stats=given, weight=8.0))
