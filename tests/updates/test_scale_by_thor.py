"""scale_by_thor: values by hand, refreshes, running averages, failures, clips."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from boostax import _info, scale_by_thor
from boostax.errors import StateMismatchError
from boostax.gradients._blocks import Factors
from boostax.updates._thor_clip import kl_scale
from tests.models.captured import Captured, closed, dense, factors, spd

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


# Running averages


def test_running_average_by_hand():
    """The mean of all while they are few; then the newest counts one half."""
    block, tx = one_layer(1, 1, damping=1.0, clip=False, early=(0, 1, 2), factor_decay=0.5)
    state = tx.init({"w": jnp.ones((1, 1))})
    means = []
    for value in (1.0, 4.0, 7.0):
        stats = {"w": factors(block, [[value]], [[2 * value]])}
        _, state = tx.update({"w": jnp.ones((1, 1))}, state, stats=stats)
        means.append([float(factor.squeeze()) for factor in state.factors["w"]])
    assert means == [[1.0, 2.0], [2.5, 5.0], [4.75, 9.5]]


def test_damping_is_not_added_twice():
    block, tx = one_layer(3, 2, damping=0.3, clip=False, early=(0, 1, 2))
    state = tx.init({"w": jnp.ones((3, 2))})
    given = spd(5, 3), spd(6, 2)
    grads = {"w": jnp.arange(6.0).reshape(3, 2)}
    for _ in range(3):
        updates, state = tx.update(grads, state, stats={"w": factors(block, *given)})
        np.testing.assert_allclose(updates["w"], closed(grads["w"], *given, 0.3), rtol=1e-4)
        np.testing.assert_allclose(state.factors["w"].inputs[0, 0], given[0], rtol=1e-6)


def test_damping_follows_its_schedule():
    block, tx = one_layer(1, 1, damping=lambda n: 1.0 + n, frequency=1, early=(), **EXACT)
    state = tx.init({"w": jnp.ones((1, 1))})
    for n in range(3):
        stats = {"w": factors(block, [[1.0]], [[2.0]])}
        updates, state = tx.update({"w": jnp.ones((1, 1))}, state, stats=stats)
        np.testing.assert_allclose(updates["w"], [[1 / ((2.0 + n) * (3.0 + n))]], rtol=1e-6)


# Failures


def two_layers(**settings):
    layers = Captured((dense("u", 1, 1), dense("v", 1, 1)))
    settings = {"damping": 1.0, "early": (0, 1, 2, 3), **EXACT, **settings}
    return layers, scale_by_thor(layers=layers, **settings)


def test_failed_refreshes_keep_the_last_good_inverse():
    layers, tx = two_layers()
    params = {"u": jnp.ones((1, 1)), "v": jnp.ones((1, 1))}
    state, seen = tx.init(params), []
    for value in (jnp.nan, 1.0, -3.0, jnp.inf):
        u = factors(layers.blocks[0], [[value]], [[1.0]])
        v = factors(layers.blocks[1], [[1.0]], [[1.0]])
        updates, state = tx.update(params, state, stats={"u": u, "v": v})
        seen.append((round(float(updates["u"].squeeze()), 6), bool(state.failed[0])))
        np.testing.assert_allclose(updates["v"], [[0.25]], rtol=1e-6)
        assert not state.failed[1]
    # Nothing good yet: the plain gradient; then 1 / (2 * 2); then that again, twice.
    assert seen == [(1.0, True), (0.25, False), (0.25, True), (0.25, True)]
    assert state.refreshes.tolist() == [1, 4]
    assert float(state.factors["u"].inputs.squeeze()) == 1.0


def test_zero_factors_and_zero_gradients():
    _, tx = two_layers(pi_split=True, clip=True, learning_rate=0.1)
    params = {"u": jnp.zeros((1, 1)), "v": jnp.zeros((1, 1))}
    zero = Factors(jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, 1, 1)))
    updates, state = tx.update(params, tx.init(params), stats={"u": zero, "v": zero})
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert not state.failed.any()


def test_missing_and_misshapen_statistics():
    block, tx = one_layer(2, 1, damping=1.0, **EXACT)
    params = {"w": jnp.ones((2, 1))}
    state = tx.init(params)
    with pytest.raises(
        ValueError, match="train_step hands them over by itself where it finds the layers"
    ):
        tx.update(params, state)
    with pytest.raises(ValueError, match=r"layers\.value_and_grad"):
        jax.eval_shape(tx.update, params, state)
    good = factors(block, np.eye(2), np.eye(1))
    with pytest.raises(ValueError, match="lacks the layer 'w'; it has 'q'"):
        tx.update(params, state, stats={"q": good})
    with pytest.raises(ValueError, match=r"stats\['w'\] has the shapes"):
        tx.update(params, state, stats={"w": Factors(good.outputs, good.inputs)})
    _, state = tx.update(params, state, stats={"w": good})
    state = state._replace(due=jnp.array(False))
    tx.update(params, state)  # not due: none needed


def test_other_parameters_and_other_layers():
    _, tx = one_layer(2, 1, damping=1.0, **EXACT)
    with pytest.raises(StateMismatchError, match="'w' of shape"):
        tx.init({"w": jnp.ones((3, 1))})
    with pytest.raises(StateMismatchError, match="is not among these"):
        tx.init({"q": jnp.ones((2, 1))})
    _, other = one_layer(3, 1, damping=1.0, **EXACT)
    state = other.init({"w": jnp.ones((3, 1))})
    with pytest.raises(StateMismatchError, match="other captured layers"):
        tx.update({"w": jnp.ones((2, 1))}, state)
    check = _info.find(tx, "scale_by_thor").check
    with pytest.raises(StateMismatchError, match="other captured layers"):
        check((optax.EmptyState(), state))
    with pytest.raises(StateMismatchError, match="no ThorState"):
        check({"count": 1})


# Clips


def test_kl_clip_by_hand():
    layers = Captured((dense("w", 1, 1),), (("s", "norm scale"),))
    tx = scale_by_thor(
        layers=layers, damping=1.0, learning_rate=lambda n: 0.5, kl_clip=0.01, pi_split=False
    )
    grads = {"w": jnp.full((1, 1), 4.0), "s": jnp.full((1,), 3.0)}
    stats = {"w": factors(layers.blocks[0], [[1.0]], [[3.0]])}
    updates, _ = tx.update(grads, tx.init(grads), stats=stats)
    # u = 4 / 8; the sum is .25 (.5 * 4 + 3 * 3).
    nu = np.sqrt(0.01 / (0.25 * 11))
    np.testing.assert_allclose(updates["w"], [[0.5 * nu]], rtol=1e-6)
    np.testing.assert_allclose(updates["s"], [3 * nu], rtol=1e-6)


def test_kl_scale_never_lengthens():
    rate = lambda path, count: 0.1
    one = {"w": jnp.ones(1)}
    for update, expected in ((1e-6, 1.0), (0.0, 1.0), (-5.0, 1.0), (jnp.nan, 1.0)):
        scaled = kl_scale({"w": jnp.full(1, update)}, one, rate, 0, 1e-3)
        assert float(scaled) == expected


def test_tensors_are_shortened_to_one():
    tx = scale_by_thor(layers=Captured((), (("s", ""), ("t", ""))), damping=1.0, clip="tensor")
    grads = {"s": jnp.array([3.0, 4.0]), "t": jnp.array([0.3, 0.4])}
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["s"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(updates["t"], grads["t"])


def test_loss_scale_is_invisible():
    def run(scale):
        layers, tx = two_layers(clip=True, learning_rate=1.0, loss_scale=scale)
        params = {"u": jnp.full((1, 1), 3.0 * scale), "v": jnp.ones((1, 1)) * scale}
        state = tx.init(params)
        stats = {b.kernel: factors(b, [[2.0]], [[5.0 * scale * scale]]) for b in layers.blocks}
        return tx.update(params, state, stats=stats)[0]

    jax.tree.map(np.testing.assert_array_equal, run(1.0), run(1024.0))


def test_dtypes_stay():
    layers, tx = two_layers(clip=True, learning_rate=1.0)
    params = {"u": jnp.ones((1, 1), jnp.bfloat16), "v": jnp.ones((1, 1)), "n": jnp.arange(2)}
    state = tx.init(params)
    stats = {b.kernel: factors(b, [[2.0]], [[5.0]]) for b in layers.blocks}
    updates, new = tx.update(params, state, stats=stats, something="unknown")
    assert [leaf.dtype for leaf in jax.tree.leaves(updates)] == [
        leaf.dtype for leaf in jax.tree.leaves(params)
    ]
    assert updates["n"].tolist() == [0, 1]
    same = lambda a, b: (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
    assert jax.tree.all(jax.tree.map(same, state, new))
