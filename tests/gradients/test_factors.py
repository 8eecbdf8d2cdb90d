"""The values of the layers' statistics: by hand, against per-example derivatives, true Fisher."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import boostax
from boostax import capture_layers
from boostax.gradients._blocks import Block, Side
from boostax.gradients._statistics import watched_value_and_grad
from boostax.gradients._views import View
from boostax.training.contract import canonical_loss


@pytest.fixture(autouse=True)
def ranks_as_users_have_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def statistics(loss, params, batch, **keywords):
    rng = keywords.pop("rng", None)
    layers = capture_layers(loss, params, batch, **keywords)
    return layers.value_and_grad(params, batch, rng=rng)[2]


@pytest.mark.quick
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_one_weight_two_examples(repeats):
    """Inputs 1 and 2, derivatives 3 and 1: A = 2.5 and G = 5, however often the batch is repeated."""
    batch = jnp.tile(jnp.array([[1.0, 3.0], [2.0, 1.0]]), (repeats, 1))
    params = {"w": jnp.ones((1, 2))}
    loss = lambda p, x: jnp.mean(x[:, 1] * (x[:, :1] @ p["w"])[:, 0])
    stats = statistics(loss, params, batch)["w"]
    np.testing.assert_allclose(stats.inputs, [[[[2.5]]]], rtol=1e-6)
    np.testing.assert_allclose(stats.outputs[0, 0], [[5.0, 0.0], [0.0, 0.0]], rtol=1e-6)
    summed = lambda p, x: len(x) * loss(p, x)
    of_sum = statistics(summed, params, batch)["w"]
    np.testing.assert_allclose(of_sum.outputs / len(batch) ** 2, stats.outputs, rtol=1e-6)


@pytest.mark.parametrize(
    ("padding", "stride", "dilation", "positions", "total"),
    [("VALID", 1, 1, 1, 9), ("SAME", 1, 1, 9, 49), ("SAME", 2, 1, 4, 16), ("SAME", 1, 2, 9, 25)],
)
def test_positions_of_a_convolution(padding, stride, dilation, positions, total):
    """Ones of 3 x 3 under a kernel of 3 x 3: A is the mean over the real output positions."""

    def loss(p, x):
        y = lax.conv_general_dilated(
            x,
            p["w"],
            (stride, stride),
            padding,
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.mean(jnp.sum(y, axis=(1, 2, 3)))

    params, x = {"w": jnp.ones((3, 3, 1, 2))}, jnp.ones((1, 3, 3, 1))
    layers = capture_layers(loss, params, x)
    assert layers.blocks[0].positions == positions
    stats = layers.value_and_grad(params, x)[2]["w"]
    np.testing.assert_allclose(jnp.trace(stats.inputs[0, 0]) * positions, total, rtol=1e-6)
    np.testing.assert_allclose(stats.outputs[0, 0], positions * np.ones((2, 2)), rtol=1e-6)


def test_patches_stand_in_the_kernel_s_own_order():
    x, w = normal(2, 5, 4, 3), normal(2, 3, 3, 4, seed=1)

    def loss(p, x):
        y = lax.conv_general_dilated(
            x, p["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jnp.sum(y, axis=(1, 2, 3)))

    got = statistics(loss, {"w": w}, x)["w"].inputs[0, 0]
    rows = [
        np.asarray(x[n, i : i + 2, j : j + 3, :]).ravel()
        for n, i, j in itertools.product(range(2), range(4), range(2))
    ]
    np.testing.assert_allclose(got, np.mean([np.outer(r, r) for r in rows], axis=0), rtol=1e-5)


def test_a_layer_called_twice_uses_both_calls():
    """Inputs 1 and 3, one example each: A = 5."""
    params = {"w": jnp.ones((1, 2))}
    loss = lambda p, x: jnp.mean(jnp.sum(x[:, :1] @ p["w"] + 2 * (x[:, 1:] @ p["w"]), axis=1))
    stats = statistics(loss, params, jnp.array([[1.0, 3.0]]))["w"]
    np.testing.assert_allclose(stats.inputs, [[[[5.0]]]], rtol=1e-6)
    np.testing.assert_allclose(stats.outputs[0, 0], np.full((2, 2), 1.0 + 4.0), rtol=1e-6)


def test_factors_are_means_over_examples_of_their_own_derivatives():
    params = {"a": normal(3, 4), "b": normal(4), "c": normal(4, 2)}
    x = normal(6, 3, seed=1)

    def outputs(p, taps, x):
        h = x @ p["a"] + p["b"] + taps[0]
        return jnp.tanh(h) @ p["c"] + taps[1], jnp.tanh(h)

    loss = lambda p, x: jnp.mean(jnp.sum(jnp.sin(outputs(p, (0.0, 0.0), x)[0]), axis=1))
    stats = statistics(loss, params, x)
    single = lambda taps, x: jnp.sum(jnp.sin(outputs(params, taps, x)[0]))
    g = jax.vmap(jax.grad(single), in_axes=(None, 0))((jnp.zeros(4), jnp.zeros(2)), x)
    ones = jnp.concatenate([x, jnp.ones((6, 1))], axis=1)
    hidden = outputs(params, (0.0, 0.0), x)[1]
    np.testing.assert_allclose(stats["a"].inputs[0, 0], ones.T @ ones / 6, rtol=1e-5)
    np.testing.assert_allclose(stats["a"].outputs[0, 0], g[0].T @ g[0] / 6, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats["c"].inputs[0, 0], hidden.T @ hidden / 6, rtol=1e-5)
    np.testing.assert_allclose(stats["c"].outputs[0, 0], g[1].T @ g[1] / 6, rtol=1e-4, atol=1e-6)


def test_pieces_are_the_diagonal_blocks_of_the_whole():
    params = {"w": normal(7, 5), "b": normal(5)}
    loss = lambda p, x: jnp.mean(jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2, axis=1))
    x = normal(6, 7, seed=1)
    whole, cut = (statistics(loss, params, x, block_size=size)["w"] for size in (100, 3))
    for full, pieces, size in ((whole.inputs, cut.inputs, 3), (whole.outputs, cut.outputs, 3)):
        rows = full.shape[-1]
        for n, piece in enumerate(pieces[0]):
            stop = min(rows, (n + 1) * size)
            own = slice(n * size, stop)
            np.testing.assert_allclose(
                piece[: stop - n * size, : stop - n * size],
                full[0, 0, own, own],
                rtol=1e-5,
                atol=1e-7,
            )
            assert not np.any(piece[stop - n * size :])


@pytest.mark.parametrize("block_size", [100, 2])
def test_weights_are_the_loss_s_own(block_size):
    """A padded example of weight 0 in the loss leaves the factors as they are."""
    params = {"w": normal(3, 2), "b": normal(2), "table": normal(5, 3)}

    def loss(p, batch):
        inputs = batch["x"] * p["table"][batch["t"]]
        each = jnp.sum(jnp.tanh(inputs @ p["w"] + p["b"]) ** 2, axis=1)
        total = jnp.sum(batch["m"])
        return jnp.sum(each * batch["m"]) / total, boostax.LossAux(weight=total)

    x = normal(4, 3, seed=1)
    t = jnp.array([0, 2, 2, 4])
    all_three = {"x": x[:3], "t": t[:3], "m": jnp.ones(3)}
    padded = {"x": x, "t": t, "m": jnp.array([1.0, 1.0, 1.0, 0.0])}
    one, two = (
        statistics(loss, params, batch, block_size=block_size) for batch in (all_three, padded)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), one, two)
    np.testing.assert_allclose(one["table"].inputs, [[1 / 3, 0, 2 / 3, 0, 0]], rtol=1e-6)


def test_the_tied_pair_keeps_the_trace_of_the_sum():
    params = {"t": normal(5, 3)}
    tokens = jnp.array([0, 1, 1, 4])

    def loss(p, t, scale=1.0):
        return jnp.mean(jnp.sum(jnp.tanh(p["t"][t] @ p["t"].T), axis=1)) * scale

    stats = statistics(loss, params, tokens)["t"]
    emb = params["t"][tokens]
    g_out = 1 - jnp.tanh(emb @ params["t"].T) ** 2
    g_in = g_out @ params["t"]
    first = 1.0 * jnp.trace(g_in.T @ g_in / 4)
    second = jnp.trace(emb.T @ emb / 4) * jnp.sum(jnp.mean(g_out**2, axis=0))
    got = jnp.sum(stats.inputs) * jnp.trace(stats.outputs[0, 0])
    np.testing.assert_allclose(got, first + second, rtol=1e-5)


def test_labels_are_drawn_from_the_model():
    """The true Fisher's G of the logits is diag(p) - p p^T on average, whatever the labels."""
    logits = jnp.array([1.0, 0.0, -1.0])
    p = jax.nn.softmax(logits)
    params = {"w": logits[None]}

    def loss(q, x):
        out = x @ q["w"]
        return -jnp.mean(jax.nn.log_softmax(out)[:, 0]), boostax.LossAux(
            predictive=boostax.Categorical(out)
        )

    x = jnp.ones((20_000, 1))
    stats = statistics(loss, params, x, fisher="true", rng=jax.random.key(3))["w"]
    np.testing.assert_allclose(stats.outputs[0, 0], jnp.diag(p) - jnp.outer(p, p), atol=0.01)
    empirical = statistics(loss, params, x)["w"].outputs[0, 0]
    residual = p - jnp.array([1.0, 0.0, 0.0])
    np.testing.assert_allclose(empirical, jnp.outer(residual, residual), rtol=1e-3)


def test_gaussian_predictions_have_the_inverse_variance():
    params = {"w": jnp.ones((1, 2))}

    def loss(q, x):
        out = x @ q["w"]
        return jnp.mean(jnp.sum(out**2, axis=1)), boostax.LossAux(
            predictive=boostax.Gaussian(out, scale=0.5)
        )

    x = jnp.ones((20_000, 1))
    stats = statistics(loss, params, x, fisher="true", rng=jax.random.key(4))["w"]
    np.testing.assert_allclose(stats.outputs[0, 0], 4 * np.eye(2), atol=0.1)


def test_drawing_labels_leaves_loss_and_gradients_as_they_are_and_needs_a_key():
    def loss(q, x):
        out = x @ q["w"]
        return jnp.mean(jnp.sum(out**2, axis=1)), boostax.LossAux(predictive=boostax.Gaussian(out))

    params, x = {"w": normal(3, 2)}, normal(4, 3, seed=1)
    layers = capture_layers(loss, params, x, fisher="true")
    (value, _), grads, _ = layers.value_and_grad(params, x, rng=jax.random.key(0))
    expected, gradient = jax.value_and_grad(lambda q: loss(q, x)[0])(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], gradient["w"], rtol=1e-6)
    with pytest.raises(ValueError, match="needs a random key; pass rng="):
        layers.value_and_grad(params, x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_check_allows_for_the_rounding_of_half_precision_leaves(dtype):
    params = {"w": normal(8, 4).astype(dtype)}
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"].astype(jnp.float32)) - 1) ** 2)
    x = normal(16, 8, seed=1)
    layers = capture_layers(loss, params, x)
    assert 1e-5 < layers.check(params, x)["w"] < 8 * float(jnp.finfo(dtype).eps)
    assert str(layers) == layers.describe()


def test_functions_among_the_parameters_are_named():
    params = {"w": normal(2, 2), "act": jnp.tanh}
    loss = lambda p, x: jnp.mean(p["act"](x @ p["w"]))
    wanted = r"the parameter 'act' must be an array, got .*eqx\.partition"
    with pytest.raises(TypeError, match=f"capture_layers: {wanted}"):
        capture_layers(loss, params, normal(3, 2))
    with pytest.raises(TypeError, match=f"init: {wanted}"):
        boostax.train_step(loss, optax.sgd(0.1)).init(params)


def test_resting_and_frozen_layers_have_zeros_and_cost_nothing():
    params = {"a": normal(3, 40), "b": normal(40, 2)}
    loss = lambda p, x: jnp.mean(jnp.sum(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2, axis=1))
    x = normal(6, 3, seed=1)
    layers = capture_layers(loss, params, x)
    run = watched_value_and_grad(canonical_loss(loss), layers=layers)
    _, grads, stats, _ = run(params, None, x, None)
    _, same, rested, _ = run(params, None, x, None, jnp.array([True, False]))
    assert not np.any(rested["a"].inputs)
    assert not np.any(rested["a"].outputs)
    for got, expected in zip(
        jax.tree.leaves(rested["b"]), jax.tree.leaves(stats["b"]), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(same["a"], grads["a"])
    frozen = watched_value_and_grad(
        canonical_loss(loss), layers=layers, trainable={"a": False, "b": True}
    )
    _, grads, stats, _ = frozen(params, None, x, None)
    assert not np.any(grads["a"])
    assert not np.any(stats["a"].inputs)
    flops = [
        jax.jit(lambda p, f=f: f(p, None, x, None)).lower(params).compile().cost_analysis()["flops"]
        for f in (run, frozen)
    ]
    assert flops[1] < 0.8 * flops[0]


@pytest.mark.quick
def test_views_come_back():
    leaf = np.arange(24.0).reshape(2, 3, 4)
    view = View((2, 3, 4)).transpose((2, 0, 1)).reshape(4, 6).rev((0,)).reshape(1, 4, 6)
    np.testing.assert_array_equal(view.undo(view.apply(leaf)), leaf)
    stacked = View((3, 4)).transpose((1, 0)).reshape(1, 4, 3).stacked(2)
    np.testing.assert_array_equal(stacked.apply(leaf)[1, 0], leaf[1].T)
    block = Block(
        "w", "dense", View((3, 2)).reshape(1, 3, 2), "b", View((2,)).reshape(1, 1, 2),
        Side.of(4, 3), Side.of(2, 3),
    )  # fmt: skip
    w, b = jnp.arange(6.0).reshape(3, 2), jnp.array([7.0, 8.0])
    matrix = block.join(w, b)
    np.testing.assert_array_equal(matrix[0], [[0, 1], [2, 3], [4, 5], [7, 8]])
    for got, expected in zip(block.split(matrix), (w, b), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (block.inputs.pieces, block.inputs.piece) == (2, 2)
