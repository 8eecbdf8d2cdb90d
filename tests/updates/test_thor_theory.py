"""scale_by_thor against what theory says: exact natural gradients, Newton's step, exact blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from boostax import capture_layers, scale_by_thor
from boostax.gradients._blocks import Block, Factors, Side
from boostax.gradients._views import View
from boostax.updates import _thor_inverses
from tests.models import data, plain
from tests.models.captured import Captured, closed, dense, factors, spd

EXACT = {"pi_split": False, "clip": False, "factor_decay": 0.0}


def linear_network():
    """Two linear layers with a bias each, their statistics under the model's own noise, and F."""
    rng = np.random.default_rng(0)
    w1, b1, w2, b2 = (rng.normal(size=s) for s in ((3, 3), (3,), (3, 4), (4,)))
    x, y = rng.normal(size=(50, 3)), rng.normal(size=(50, 4))
    ones = np.ones((50, 1))
    a1 = np.concatenate([x, ones], 1)
    a2 = np.concatenate([x @ w1 + b1, ones], 1)
    wrong = a2 @ np.concatenate([w2, b2[None]]) - y
    # Log-likelihood of a unit Gaussian: the noise's outer products average to the identity.
    factors_of = ((a1.T @ a1 / 50, w2 @ w2.T), (a2.T @ a2 / 50, np.eye(4)))
    grads = (a1.T @ (wrong @ w2.T) / 50, a2.T @ wrong / 50)
    jacobians = (
        np.einsum("ni,oj->noij", a1, w2.T).reshape(50, 4, -1),
        np.einsum("ni,oj->noij", a2, np.eye(4)).reshape(50, 4, -1),
    )
    fishers = [np.einsum("noi,noj->ij", j, j) / 50 for j in jacobians]
    return (w1, b1, w2, b2), factors_of, grads, fishers


def test_natural_gradient_of_a_linear_network():
    """With exact factors it is the exact Fisher matrix's block that is inverted."""
    (w1, b1, w2, b2), factors_of, grads, fishers = linear_network()
    layers = Captured((dense("k1", 3, 3, "b1"), dense("k2", 3, 4, "b2")))
    tx = scale_by_thor(layers=layers, damping=1e-13, clip=False)
    params = {"k1": w1, "b1": b1, "k2": w2, "b2": b2}
    params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in params.items()}
    stats = {b.kernel: factors(b, *f) for b, f in zip(layers.blocks, factors_of, strict=True)}
    given = {"k1": grads[0][:-1], "b1": grads[0][-1], "k2": grads[1][:-1], "b2": grads[1][-1]}
    given = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in given.items()}
    updates, _ = tx.update(given, tx.init(params), stats=stats)
    for n, (gradient, fisher) in enumerate(zip(grads, fishers, strict=True), 1):
        exact = np.linalg.solve(fisher, gradient.ravel()).reshape(gradient.shape)
        got = np.concatenate([updates[f"k{n}"], updates[f"b{n}"][None]])
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


def test_one_layer_is_newtons_step():
    rng = np.random.default_rng(1)
    x, y, w = rng.normal(size=(40, 3)), rng.normal(size=(40, 2)), rng.normal(size=(3, 2))
    block = dense("w", 3, 2)
    tx = scale_by_thor(layers=Captured((block,)), damping=1e-13, clip=False)
    gradient = {"w": jnp.asarray(x.T @ (x @ w - y) / 40, jnp.float32)}
    stats = {"w": factors(block, x.T @ x / 40, np.eye(2))}
    updates, _ = tx.update(gradient, tx.init(gradient), stats=stats)
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(w - updates["w"], best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unrolled", [32, 0])
def test_pieces_are_the_diagonal_blocks(unrolled, monkeypatch):
    monkeypatch.setattr(_thor_inverses, "_UNROLLED", unrolled)
    layers = Captured((dense("w", 7, 5, "b", block_size=3),))
    block = layers.blocks[0]
    assert (block.inputs.pieces, block.outputs.pieces) == (3, 2)
    a, g = spd(7, 8), spd(8, 5)
    tx = scale_by_thor(layers=layers, damping=0.2, **EXACT)
    grads = {"w": jnp.arange(35.0).reshape(7, 5) / 9, "b": jnp.arange(5.0)}
    updates, _ = tx.update(grads, tx.init(grads), stats={"w": factors(block, a, g)})

    def blocks(matrix, piece):
        at = np.arange(len(matrix)) // piece
        return np.where(at[:, None] == at[None], matrix, 0) + 0.2 * np.eye(len(matrix))

    joined = np.concatenate([grads["w"], grads["b"][None]])
    exact = np.linalg.solve(blocks(a, 3), joined) @ np.linalg.inv(blocks(g, 3))
    got = np.concatenate([updates["w"], updates["b"][None]])
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)


def stacked_layer():
    view = View((2, 3, 2))
    return Block("w", "dense", view, None, None, Side.of(3, 8), Side.of(2, 8))


@pytest.mark.parametrize("unrolled", [32, 0])
def test_layers_in_one_leaf_share_nothing(unrolled, monkeypatch):
    monkeypatch.setattr(_thor_inverses, "_UNROLLED", unrolled)
    tx = scale_by_thor(layers=Captured((stacked_layer(),)), damping=0.1, clip=False)
    a, g = (np.stack([spd(n, s), 9 * spd(n + 1, s)]) for n, s in ((11, 3), (13, 2)))
    stats = {"w": Factors(jnp.asarray(a)[:, None], jnp.asarray(g)[:, None])}
    grads = {"w": jnp.arange(12.0).reshape(2, 3, 2) - 3}
    updates, _ = tx.update(grads, tx.init(grads), stats=stats)
    for n in range(2):
        np.testing.assert_allclose(
            updates["w"][n], closed(grads["w"][n], a[n], g[n], 0.1), rtol=1e-4, atol=1e-5
        )


def embedding(rows, width):
    diagonal = Side(rows, 1, rows, diagonal=True)
    view = View((rows, width)).reshape(1, rows, width)
    return Block("w", "embedding", view, None, None, diagonal, Side.of(width, 1024))


def test_embedding_keeps_a_diagonal():
    tx = scale_by_thor(layers=Captured((embedding(3, 2),)), damping=0.5, **EXACT)
    stats = {"w": Factors(jnp.array([[0.5, 0.0, 1.5]]), jnp.eye(2)[None, None])}
    grads = {"w": jnp.ones((3, 2))}
    updates, _ = tx.update(grads, tx.init(grads), stats=stats)
    by_row = 1 / (np.array([1.0, 0.5, 2.0]) * 1.5)
    np.testing.assert_allclose(updates["w"], np.stack([by_row, by_row], 1), rtol=1e-6)


def test_a_large_table_makes_no_square():
    tx = scale_by_thor(layers=Captured((embedding(50_000, 8),)), damping=0.5, clip=False)
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((50_000, 8), jnp.float32)})
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 200_000


def test_repeating_the_batch_changes_nothing():
    params, batch = plain.init(), jax.tree.map(lambda leaf: leaf[0], data.batches(1))
    layers = capture_layers(plain.loss, params, batch)
    tx = scale_by_thor(layers=layers, damping=0.1, learning_rate=0.1)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), batch)

    def updates(given):
        _, grads, stats = layers.value_and_grad(params, given)
        return tx.update(grads, tx.init(params), stats=stats)[0]

    once, again = (jax.jit(updates)(given) for given in (batch, twice))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), once, again)
