"""scale_by_thor: values by hand, theory, refreshes, failures, the trace rule, devices."""

import jax
import jax.numpy as jnp
import numpy as np

from boostax import scale_by_thor
from tests.models.captured import Captured, dense, factors

EXACT = {"pi_split": False, "clip": False, "factor_decay": 0.0}


def one_layer(inputs, outputs, **settings):
    layers = Captured((dense("w", inputs, outputs),))
    return layers.blocks[0], scale_by_thor(layers=layers, **settings)


def test_one_weight_by_hand():
    # Inputs 1 and 2, output gradients 3 and 1 of each example: A = 2.5, G = 5.
    block, tx = one_layer(1, 1, damping=0.5, **EXACT)
    params = {"w": jnp.ones((1, 1))}
    stats = {"w": factors(block, [[2.5]], [[5.0]])}
    updates, _ = tx.update({"w": jnp.full((1, 1), 2.5)}, tx.init(params), stats=stats)
    np.testing.assert_allclose(updates["w"], [[0.151515]], rtol=1e-5)


def test_a_dead_layer():
    block, tx = one_layer(3, 1, damping=0.01, **EXACT)
    state = tx.init({"w": jnp.ones((3, 1))})
    stats = {"w": factors(block, np.diag([1.0, 0, 0]), [[0.0]])}
    updates, state = tx.update({"w": jnp.array([[1.0], [0], [0]])}, state, stats=stats)
    np.testing.assert_allclose(updates["w"], [[99.0099], [0], [0]], rtol=1e-5)
    zero, _ = tx.update({"w": jnp.zeros((3, 1))}, state, stats=stats)
    assert not np.any(zero["w"])


def spd(seed, n):
    a = np.random.default_rng(seed).normal(size=(n, 2 * n)).astype(np.float32)
    return a @ a.T / (2 * n)


def closed(matrix, inputs, outputs, damping):
    """A^-1 M G^-1 with the split damping, float64."""
    a, g = (np.asarray(x, np.float64) for x in (inputs, outputs))
    pi = np.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
    a = a + pi * np.sqrt(damping) * np.eye(len(a))
    g = g + np.sqrt(damping) / pi * np.eye(len(g))
    return np.linalg.solve(a, np.asarray(matrix, np.float64)) @ np.linalg.inv(g)


def test_refreshes():
    """Step 0 uses its own data, 1 to 99 what step 0 made, 100 its own again."""
    block, tx = one_layer(3, 2, damping=0.1, frequency=100, early=(), clip=False, factor_decay=0.0)
    state = tx.init({"w": jnp.ones((3, 2))})
    update = jax.jit(lambda g, s, stats: tx.update(g, s, stats=stats))
    grads = {"w": jnp.arange(6.0).reshape(3, 2) - 2}
    first, second = (spd(1, 3), spd(2, 2)), (spd(3, 3), spd(4, 2))
    for step in range(102):
        assert bool(state.due) == (step in (0, 100))
        given = first if step == 0 else second
        updates, state = update(grads, state, {"w": factors(block, *given)})
        used = first if step < 100 else second
        np.testing.assert_allclose(
            updates["w"], closed(grads["w"], *used, 0.1), rtol=1e-4, atol=1e-5
        )
    assert (int(state.count), int(state.refreshes[0])) == (102, 2)
    assert update._cache_size() == 1
