"""capture_layers: which layers it finds, and that inputs times derivatives is the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import boostax
from boostax import capture_layers


@pytest.fixture(autouse=True)
def ranks_as_users_have_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def squares(y):
    return jnp.mean(jnp.sum(jnp.square(y), axis=tuple(range(1, y.ndim))))


@jax.custom_vjp
def own_vjp(x, w, b):
    return x @ w + b


own_vjp.defvjp(
    lambda x, w, b: (x @ w + b, (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g, g.sum(0)),
)


@jax.custom_jvp
def own_jvp(x, w):
    return jax.checkpoint(lambda x, w: jnp.sin(x) @ w)(x, w)


@own_jvp.defjvp
def _own_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return own_jvp(x, w), (jnp.cos(x) * dx) @ w + jnp.sin(x) @ dw


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


def conv(x, w, strides=(1, 1), padding="SAME", spec=("NHWC", "HWIO", "NHWC"), **more):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=spec, **more)


def case(name, loss, params, batch, fates, checked=None):
    return pytest.param(loss, params, batch, fates, checked, id=name)


CASES = [
    case(
        "jit_views",
        lambda p, x: squares(
            jnp.tanh(
                jax.jit(lambda w, x: x.astype(jnp.float32) @ w.reshape(3, 4))(p["w"].T, x)
                + p["b"][None]
            )
        ),
        {"w": normal(2, 6).T.reshape(4, 3), "b": normal(4)},
        normal(5, 3, seed=1),
        {"w": "dense: A 4 x 4, G 4 x 4", "b": "the last row of w"},
    ),
    case(
        "conv_oihw_groups",
        lambda p, x: squares(
            jnp.tanh(
                conv(
                    x,
                    p["w"],
                    (2, 1),
                    [(1, 0), (2, 1)],
                    ("NCHW", "OIHW", "NCHW"),
                    rhs_dilation=(1, 2),
                    feature_group_count=2,
                )
                + p["b"][None, :, None, None]
            )
        ),
        {"w": normal(6, 2, 3, 2), "b": normal(6)},
        normal(3, 4, 6, 7, seed=1),
        {"w": "conv: 2 x A 13 x 13, G 3 x 3", "b": "the last row of w"},
    ),
    case(
        "conv_transpose",
        lambda p, x: squares(
            jnp.tanh(lax.conv_transpose(x, p["w"], (2,), "SAME", transpose_kernel=True))
        ),
        {"w": normal(3, 6, 4)},
        normal(3, 5, 4, seed=1),
        {"w": "conv: A 12 x 12, G 6 x 6"},
    ),
    case(
        "scan_over_layers",
        lambda p, x: squares(
            lax.scan(
                jax.checkpoint(lambda h, q: (jnp.tanh(h @ q["w"] + q["b"]), None)), x, p["layers"]
            )[0]
            @ p["out"]
        ),
        {"layers": {"w": normal(3, 4, 4), "b": normal(3, 4)}, "out": normal(4, 2)},
        normal(5, 4, seed=1),
        {
            "layers/w": "dense: 3 x A 5 x 5, G 4 x 4",
            "layers/b": "the last row of layers/w",
            "out": "dense: A 4 x 4, G 2 x 2",
        },
    ),
    case(
        "recurrent",
        lambda p, x: squares(
            lax.scan(
                lambda h, now: (jnp.tanh(now @ p["in"] + (h @ p["h"] + p["b"])), None),
                jnp.zeros((5, 4)),
                x,
            )[0]
        ),
        {"in": normal(3, 4), "h": normal(4, 4), "b": normal(4)},
        normal(6, 5, 3, seed=1),
        {
            "in": "dense: A 3 x 3, G 4 x 4, called 6 times",
            "h": "dense: A 5 x 5, G 4 x 4, called 6 times",
            "b": "the last row of h",
        },
    ),
    case(
        "tied_embedding",
        lambda p, t: optax.softmax_cross_entropy_with_integer_labels(
            jnp.tanh(p["table"][t] @ p["w"]) @ p["table"].T, t
        ).mean(),
        {"table": normal(11, 4), "w": normal(4, 4)},
        jnp.array([[1, 2, 3], [4, 5, 1]]),
        {
            "table": "embedding: A diagonal of 11, G 4 x 4, called 2 times",
            "w": "dense: A 4 x 4, G 4 x 4",
        },
    ),
    case(
        "mapped_convolution",
        lambda p, x: squares(
            jnp.tanh(jax.vmap(lambda w, b: conv(x, w) + b, (0, 0), 1)(p["w"], p["b"]))
        ),
        {"w": normal(3, 2, 2, 2, 4), "b": normal(3, 4)},
        normal(2, 4, 4, 2, seed=1),
        {
            "w": "conv: A 8 x 8, G 12 x 12",
            "b": "first order: added to data, as a bias or shift without a layer of its own",
        },
    ),
    case(
        "transposing_reshapes",
        lambda p, x: squares(
            lax.reshape(jnp.tanh(x @ lax.reshape(p["w"], (5, 4), (1, 0))) @ p["v"], (6, 6), (1, 0))
            + p["b"]
        ),
        {"w": normal(4, 5), "v": normal(4, 6), "b": normal(6)},
        normal(6, 5, seed=1),
        {
            "w": "dense: A 5 x 5, G 4 x 4",
            "v": "dense: A 4 x 4, G 6 x 6",
            "b": "first order: added to data, as a bias or shift without a layer of its own",
        },
    ),
    case(
        "penalty_from_a_scan",
        lambda p, x: (lambda out: squares(out[0] @ p["v"]) + 0.1 * jnp.sum(out[1]))(
            lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.sum(w**2)), x, p["w"])
        ),
        {"w": normal(2, 3, 3), "v": normal(3, 2)},
        normal(5, 3, seed=1),
        {"w": "dense: 2 x A 3 x 3, G 3 x 3", "v": "dense: A 3 x 3, G 2 x 2"},
        ["v"],
    ),
    case(
        "integers_and_rounding",
        lambda p, x: squares(
            x @ p["w"] * p["n"][1] + x @ p["i"].astype(jnp.int32).astype(jnp.float32)
        ),
        {"w": normal(3, 2), "i": 5 * normal(3, 2), "n": jnp.arange(3)},
        normal(5, 3, seed=1),
        {
            "w": "dense: A 3 x 3, G 2 x 2",
            "i": "first order: used by convert_element_type",
            "n": "first order: of dtype int32",
        },
    ),
    case(
        "mapped_look_up",
        lambda p, t: squares(
            jax.vmap(lambda i: lax.dynamic_slice(p["table"], (i, 0), (1, 3))[0])(t)
        ),
        {"table": normal(7, 3)},
        jnp.array([1, 5, 1]),
        {"table": "embedding: A diagonal of 7, G 3 x 3"},
    ),
    case(
        "several_axes",
        lambda p, x: squares(
            jnp.einsum(
                "nhk,hkd->nd",
                jnp.tanh(jnp.einsum("nd,dhk->nhk", x, p["in"]) + p["b"]),
                p["out"],
            )
        ),
        {"in": normal(3, 2, 5), "b": normal(2, 5), "out": normal(2, 5, 4)},
        normal(6, 3, seed=1),
        {
            "in": "dense: A 4 x 4, G 10 x 10",
            "b": "the last row of in",
            "out": "dense: A 10 x 10, G 4 x 4",
        },
    ),
    case(
        "experts_and_a_penalty",
        lambda p, x: (
            squares(jnp.einsum("enf,efk->enk", jnp.tanh(x), p["e"]).sum(0) + p["b"][0] + p["b"][1])
            + 1e-3 * jnp.sum(p["b"] ** 2)
        ),
        {"e": normal(2, 3, 4), "b": normal(2, 4)},
        normal(2, 5, 3, seed=1),
        {"e": "dense: 2 x A 3 x 3, G 4 x 4", "b": "first order: used by slice"},
    ),
    case(
        "custom_derivatives",
        lambda p, x: squares(
            jnp.tanh(own_jvp(own_vjp(x, p["w"], p["b"]), p["v"]) @ straight_through(p["u"]))
        ),
        {"w": normal(3, 4), "b": normal(4), "v": normal(4, 5), "u": normal(5, 2)},
        normal(6, 3, seed=1),
        {
            "w": "dense: A 4 x 4, G 4 x 4",
            "b": "the last row of w",
            "v": "dense: A 4 x 4, G 5 x 5",
            "u": "first order: used by round",
        },
    ),
    case(
        "first_order_leaves",
        lambda p, x: squares(
            p["scale"]
            * (lax.cond(x[0, 0] > 0, lambda: x @ p["c"], lambda: -x @ p["c"]) @ p["w"] + p["s"])
            + p["shift"]
        ),
        {
            "c": normal(3, 4),
            "w": normal(4, 2),
            "s": normal(1),
            "scale": normal(2),
            "shift": normal(2),
        },
        normal(6, 3, seed=1),
        {
            "c": "first order: in cond",
            "w": "dense: A 4 x 4, G 2 x 2",
            "s": "first order: added to data, as a bias or shift without a layer of its own",
            "scale": "first order: scales data, as a norm's scale does",
            "shift": "first order: added to data, as a bias or shift without a layer of its own",
        },
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("loss", "params", "batch", "fates", "checked"), CASES)
def test_finds_the_layers_of(loss, params, batch, fates, checked):
    layers = capture_layers(loss, params, batch)
    assert layers.fates() == {path: fates[path] for path in layers.paths}
    # A kernel that the loss penalises has a gradient beside its layer's.
    expected = {block.kernel for block in layers.blocks} if checked is None else set(checked)
    assert set(layers.check(params, batch)) == expected


class Everything(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(4, (3, 3), strides=2, padding="VALID")(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        x = linen.remat(linen.Conv)(4, (3, 3), feature_group_count=4, kernel_dilation=2)(x)
        x = linen.LayerNorm()(linen.gelu(x)).reshape(x.shape[0], -1, 4)
        x = linen.MultiHeadDotProductAttention(num_heads=2)(x)
        return linen.Dense(3)(x.mean(axis=1))


def test_a_linen_model_with_attention_remat_and_statistics():
    net, x = Everything(), normal(2, 9, 9, 3)
    variables = net.init(jax.random.key(1), x)
    params, model_state = variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(params, batch, *, model_state):
        out, new = net.apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
        return squares(out), boostax.LossAux(model_state=new)

    layers = capture_layers(loss, params, x, model_state=model_state)
    fates = layers.fates()
    attention = "MultiHeadDotProductAttention_0"
    assert fates["CheckpointConv_0/kernel"] == "conv: 4 x A 10 x 10, G 1 x 1"
    assert fates[f"{attention}/query/kernel"] == "dense: A 5 x 5, G 4 x 4"
    assert fates[f"{attention}/out/bias"] == f"the last row of {attention}/out/kernel"
    assert fates["BatchNorm_0/scale"] == fates["LayerNorm_0/scale"]
    assert fates["LayerNorm_0/scale"] == "first order: scales data, as a norm's scale does"
    layers.check(params, x, model_state=model_state)
    assert str(fates["Conv_0/kernel"]) in layers.describe()


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.linear = nnx.Linear(4, 6, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        return self.drop(self.norm(self.linear(self.embed(tokens)))).astype(jnp.float32)


def test_an_nnx_model_gives_float32_factors_from_bfloat16_activations():
    model, tokens = Tower(nnx.Rngs(0)), jnp.array([[1, 2, 3], [4, 5, 1]])
    layers = capture_layers(lambda model, t: squares(model(t)), model, tokens)
    assert layers.fates()["linear/kernel"] == "dense: A 5 x 5, G 6 x 6"
    assert layers.fates()["embed/embedding"] == "embedding: A diagonal of 7, G 4 x 4"
    (_, aux), grads, stats = layers.value_and_grad(model, tokens)
    assert {x.dtype for x in jax.tree.leaves(stats)} == {jnp.dtype("float32")}
    assert aux.model_state is not None
    assert jax.tree.leaves(grads)
    rounded = model.embed(tokens).astype(jnp.bfloat16).astype(jnp.float32).reshape(6, 4)
    np.testing.assert_allclose(
        stats["linear/kernel"].inputs[0, 0, :4, :4], rounded.T @ rounded / 6, rtol=1e-5
    )
    np.testing.assert_allclose(
        stats["embed/embedding"].inputs[0],
        np.bincount([1, 2, 3, 4, 5, 1], minlength=7) / 6,
        rtol=1e-6,
    )


def test_an_embedding_of_50_000_rows_has_a_diagonal():
    params = {"table": jax.ShapeDtypeStruct((50_000, 8), jnp.float32)}
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    layers = capture_layers(lambda p, t: squares(p["table"][t]), params, tokens)
    shapes = layers.shapes()["table"]
    assert shapes.inputs.shape == (1, 50_000)
    assert shapes.outputs.shape == (1, 1, 8, 8)


def test_large_sides_are_cut_into_even_pieces():
    params = {
        "w": jax.ShapeDtypeStruct((25, 9), jnp.float32),
        "b": jax.ShapeDtypeStruct((9,), jnp.float32),
    }
    loss = lambda p, x: squares(x @ p["w"] + p["b"])
    layers = capture_layers(loss, params, jax.ShapeDtypeStruct((4, 25), jnp.float32), block_size=10)
    assert layers.shapes()["w"].inputs.shape == (1, 3, 9, 9)
    assert layers.shapes()["w"].outputs.shape == (1, 1, 9, 9)


def test_excluded_leaves_stay_first_order():
    params = {"a": normal(3, 3), "b": normal(3, 2)}
    loss = lambda p, x: squares(jnp.tanh(x @ p["a"]) @ p["b"])
    layers = capture_layers(loss, params, normal(4, 3), exclude="a")
    assert layers.fates() == {"a": "first order: excluded", "b": "dense: A 3 x 3, G 2 x 2"}
    layers.check(params, normal(4, 3))


def plain(p, x):
    return squares(jnp.tanh(x @ p["w"]))


W = {"w": normal(3, 2)}
X = normal(4, 3, seed=1)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"block_size": 0}, ValueError, "block_size must be an int >= 1, got 0"),
        ({"block_size": True}, TypeError, "block_size must be an int >= 1, got True"),
        ({"fisher": "exact"}, ValueError, "fisher must be one of 'empirical', 'true', got 'exact'"),
        ({"mode": "Reference"}, ValueError, "mode must be one of 'default', 'reference'"),
        ({"has_aux": 1}, TypeError, "has_aux must be a bool or None, got 1"),
        ({"exclude": ["kernel"]}, ValueError, "the pattern 'kernel' matches no leaf"),
        ({"exclude": 3}, TypeError, "exclude must be path patterns.*got 3"),
        ({"fisher": "true"}, ValueError, "returns LossAux\\(predictive=None\\)"),
    ],
)
def test_refuses(keywords, error, words):
    with pytest.raises(error, match=words):
        capture_layers(plain, W, X, **keywords)


def test_losses_that_it_can_not_use_are_told():
    with pytest.raises(ValueError, match=r"no dense layer.*scales data"):
        capture_layers(lambda p, x: squares(x * p["w"]), {"w": normal(3)}, X)
    with pytest.raises(ValueError, match="asks for the value of an array"):
        capture_layers(lambda p, x: plain(p, x) if p["w"][0, 0] > 0 else 0.0, W, X)
    with pytest.raises(ValueError, match="asks for the value of an array"):
        capture_layers(lambda p, x: squares(x @ np.asarray(p["w"])), W, X)
    with pytest.raises(TypeError, match="linen module Dense"):
        capture_layers(plain, linen.Dense(3), X)
    collide = {"a/b": {"w": normal(3, 2)}, "a": {"b/w": normal(3, 2)}}
    with pytest.raises(ValueError, match="several parameters have the path 'a/b/w'"):
        capture_layers(lambda p, x: squares(x @ p["a/b"]["w"] + x @ p["a"]["b/w"]), collide, X)
    with pytest.raises(ValueError, match="hold no arrays"):
        capture_layers(plain, {}, X)


def test_another_loss_than_the_captured_one_is_told():
    layers = capture_layers(plain, W, X)
    with pytest.raises(boostax.StateMismatchError, match="other layers than those captured"):
        layers.value_and_grad({"w": normal(3, 3)}, X)


def test_the_check_finds_a_derivative_that_is_not_the_layer_s():
    @jax.custom_vjp
    def doubled(x, w):
        return x @ w

    doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g))
    loss = lambda p, x: squares(doubled(x, p["w"]))
    layers = capture_layers(loss, W, X)
    with pytest.raises(ValueError, match=r"'w': 0.5.*exclude="):
        layers.check(W, X)


def test_is_hashable_and_equal_to_a_second_capture():
    one, two = (capture_layers(plain, W, X) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != capture_layers(plain, W, X, block_size=2)


@functools.partial(jax.jit, static_argnums=0)
def both(layers, params, batch, due):
    return layers.value_and_grad(params, batch, due=due)


def test_statistics_are_zeros_where_they_are_not_due_and_gradients_the_same():
    layers = capture_layers(plain, W, X)
    (value, _), grads, stats = both(layers, W, X, True)
    (value_off, _), grads_off, stats_off = both(layers, W, X, False)
    expected, gradient = jax.value_and_grad(plain)(W, X)
    for got in (value, value_off):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for got in (grads, grads_off):
        np.testing.assert_allclose(got["w"], gradient["w"], rtol=1e-5)
    assert float(jnp.abs(stats["w"].outputs).sum()) > 0
    assert all(not np.any(x) for x in jax.tree.leaves(stats_off))
