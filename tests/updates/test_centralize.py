"""Gradient centralization: values, layers, what can't be read, and behaviour as a transformation."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from boostax import _info
from boostax.updates.centralize import Centralizing, centralize, centralized_axes


def apply(tree, **settings):
    tx = centralize(**settings)
    return tx.update(tree, tx.init(tree), tree)[0]


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(1.0, 2.0, shape), dtype)


# By hand.


def test_dense_takes_the_mean_over_the_inputs_of_each_unit():
    got = apply({"kernel": jnp.array([[1.0, 2, 3], [4, 5, 6]])})["kernel"]
    np.testing.assert_array_equal(got, [[-1.5, -1.5, -1.5], [1.5, 1.5, 1.5]])


def test_convolution_takes_the_mean_over_window_and_input_channels():
    kernel = jnp.arange(2 * 2 * 1 * 2, dtype=jnp.float32).reshape(2, 2, 1, 2)
    got = apply({"Conv_0": {"kernel": kernel, "bias": jnp.ones(2)}})["Conv_0"]["kernel"]
    np.testing.assert_array_equal(got[..., 0].ravel(), [-3, -1, 1, 3])
    np.testing.assert_array_equal(got[..., 1].ravel(), [-3, -1, 1, 3])


def test_vectors_scalars_embeddings_pass_bit_for_bit():
    tree = {
        "Embed_0": {"embedding": normal(0, 5, 3)},
        "LayerNorm_0": {"scale": normal(1, 3), "bias": normal(2, 3)},
        "cls_token": normal(3, 1, 1, 3),
        "pos_embedding": normal(4, 1, 7, 3),
        "temperature": jnp.float32(np.nan),
        "count": jnp.array([[1, 2], [3, 4]]),
    }
    got = apply(tree, axes={"count": ()})
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True):
        assert before is after


def test_nan_stays_in_its_own_unit():
    kernel = normal(0, 4, 3).at[1, 2].set(jnp.nan)
    got = np.asarray(apply({"kernel": kernel})["kernel"])
    assert np.isnan(got).all(axis=0).tolist() == [False, False, True]
    np.testing.assert_allclose(
        got[:, :2], kernel[:, :2] - kernel[:, :2].mean(0, keepdims=True), rtol=1e-6
    )


def test_a_unit_with_one_input_is_left_alone():
    tree = {"Dense_0": {"kernel": normal(0, 1, 4), "bias": normal(1, 4)}}
    assert apply(tree)["Dense_0"]["kernel"] is tree["Dense_0"]["kernel"]
    assert "one input" in centralized_axes(tree).untouched["Dense_0/kernel"]


# Reference values: weights are laid out (out, in, height, width) and (out, in) there.


@pytest.mark.parametrize(
    ("name", "to_ours"), [("gc0", (0, 3, 4, 2, 1)), ("gc1", (0, 2, 1))], ids=["conv", "dense"]
)
def test_reference_trajectory(reference, name, to_ours):
    values = reference("d_gradient_centralization")
    grads = values[f"{name}_grads"].transpose(to_ours)
    expected = values[f"{name}_params"].transpose(to_ours)
    start = values[f"{name}_w0"].transpose([axis - 1 for axis in to_ours[1:]])
    params = {"conv1" if name == "gc0" else "fc1": {"kernel": jnp.asarray(start, jnp.float32)}}
    tx = optax.chain(centralize(), optax.sgd(0.1, 0.9))
    state = tx.init(params)
    for grad, after in zip(grads, expected, strict=True):
        tree = jax.tree.map(lambda _, g=grad: jnp.asarray(g, jnp.float32), params)
        updates, state = tx.update(tree, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(jax.tree.leaves(params)[0], after, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "axes"), [("noop0", (1, 2, 3)), ("noop1", (1,)), ("noop2", ())])
def test_no_leaf_is_left_out_for_its_size(reference, name, axes):
    # The reference passes these by without a word where the input size is no multiple of 16.
    values = reference("d_gradient_centralization")
    grad = values[f"{name}_grads"][0]
    got = apply({"w": jnp.asarray(grad)}, axes={"w": axes} if axes else None)["w"]
    expected = grad - grad.mean(axes, keepdims=True) if axes else grad
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    unchanged = values[f"{name}_w0"] - 0.1 * grad
    assert np.allclose(unchanged, values[f"{name}_params"][0], rtol=1e-6)


# Properties.


@hypothesis.given(
    rank=st.integers(2, 5),
    sizes=st.lists(st.integers(2, 4), min_size=5, max_size=5),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 10),
)
def test_means_vanish_and_a_second_pass_changes_nothing(rank, sizes, dtype, seed):
    name = "Dense_0" if rank == 2 else "Conv_0"
    shape = tuple(sizes[:rank])
    tree = {name: {"kernel": normal(seed, *shape, dtype=dtype), "bias": normal(1, shape[-1])}}
    once = apply(tree)
    wide = np.asarray(tree[name]["kernel"], np.float64)
    expected = wide - wide.mean(tuple(range(rank - 1)), keepdims=True)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype] * np.abs(wide).max()
    got = np.asarray(once[name]["kernel"], np.float64)
    np.testing.assert_allclose(got, expected, atol=tolerance)
    assert once[name]["kernel"].dtype == dtype
    twice = np.asarray(apply(once)[name]["kernel"], np.float64)
    np.testing.assert_allclose(twice, got, atol=tolerance)
    assert once[name]["bias"] is tree[name]["bias"]


def test_half_precision_takes_its_mean_in_float32():
    # In float16 the sum of 4096 ones and 4096 * 0.0 would already stop at 2048.
    kernel = jnp.concatenate([jnp.ones((4096, 1)), jnp.zeros((4096, 1))]).astype(jnp.float16)
    np.testing.assert_array_equal(
        apply({"kernel": kernel})["kernel"], kernel - jnp.full((1, 1), 0.5, jnp.float16)
    )


# As a transformation.


PARAMS = {"Dense_0": {"kernel": normal(0, 3, 4), "bias": normal(1, 4)}}


def test_on_the_update_it_commutes_with_the_rate():
    grads = jax.tree.map(lambda x: x * 0.3 - 1, PARAMS)
    before = optax.chain(optax.scale_by_adam(), centralize(), optax.scale(-0.1))
    after = optax.chain(optax.adam(0.1), centralize())
    first = before.update(grads, before.init(PARAMS), PARAMS)[0]
    second = after.update(grads, after.init(PARAMS), PARAMS)[0]
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(second["Dense_0"]["kernel"].mean(0), np.zeros(4), atol=1e-8)


def test_on_the_gradient_adam_does_not_keep_it():
    grads = jax.tree.map(lambda x: x * 0.3 - 1, PARAMS)
    tx = optax.chain(centralize(), optax.adam(0.1))
    updates = tx.update(grads, tx.init(PARAMS), PARAMS)[0]
    assert np.abs(updates["Dense_0"]["kernel"].mean(0)).max() > 0.01


def test_abstract_init_extra_arguments_no_params_no_recompile():
    tx = centralize()
    abstract = jax.eval_shape(lambda: PARAMS)
    state = jax.eval_shape(tx.init, abstract)
    assert jax.tree.leaves(state) == []
    traces = []

    @jax.jit
    def update(grads, state):
        traces.append(1)
        return tx.update(grads, state, loss=1.0, unknown="x")

    once, state = update(PARAMS, tx.init(PARAMS))
    twice, _ = update(once, state)
    assert len(traces) == 1
    np.testing.assert_allclose(twice["Dense_0"]["kernel"], once["Dense_0"]["kernel"], atol=1e-6)


def test_under_vmap_each_member_is_read_alone():
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    tx = centralize()
    got = jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0])(stacked)
    alone = apply(PARAMS)
    np.testing.assert_allclose(
        got["Dense_0"]["kernel"][1], 2 * alone["Dense_0"]["kernel"], rtol=1e-6, atol=1e-6
    )


def test_masked_leaves_are_skipped():
    tx = centralize()
    params = {**PARAMS, "Conv_0": {"kernel": normal(2, 3, 3, 2, 4), "bias": normal(3, 4)}}
    masked = {**params, "Dense_0": {"kernel": optax.MaskedNode(), "bias": optax.MaskedNode()}}
    got, _ = tx.update(masked, tx.init(params), params)
    assert got["Dense_0"]["kernel"] == optax.MaskedNode()
    np.testing.assert_allclose(got["Conv_0"]["kernel"].mean((0, 1, 2)), np.zeros(4), atol=1e-6)
    # Attention's kernel is read by its bias, which only the parameters still show.
    params = {"mixer": {"kernel": normal(4, 3, 2, 5), "bias": normal(5, 2, 5)}}
    masked = {"mixer": {"kernel": params["mixer"]["kernel"], "bias": optax.MaskedNode()}}
    got, _ = tx.update(masked, tx.init(params), params)
    np.testing.assert_allclose(got["mixer"]["kernel"].mean(0), np.zeros((2, 5)), atol=1e-6)


def test_inside_masked_and_multi_transform():
    labels = {"Dense_0": {"kernel": "w", "bias": "b"}}
    for tx in (
        optax.multi_transform({"w": centralize(), "b": optax.identity()}, labels),
        optax.masked(centralize(), {"Dense_0": {"kernel": True, "bias": False}}),
    ):
        got, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(got["Dense_0"]["kernel"].mean(0), np.zeros(4), atol=1e-6)
        np.testing.assert_array_equal(got["Dense_0"]["bias"], PARAMS["Dense_0"]["bias"])


def test_it_says_what_it_does():
    info = _info.find(optax.chain(centralize(layers="conv"), optax.sgd(0.1)), "centralize")
    assert info.settings["layers"] == "conv"
    assert isinstance(info.static, Centralizing)
    read = info.static.describe({**PARAMS, "Conv_0": {"kernel": normal(2, 3, 3, 2, 4)}})
    assert read.axes == {"Conv_0/kernel": (0, 1, 2)}
    assert read.untouched == {
        "Dense_0/bias": "vector",
        "Dense_0/kernel": 'a dense layer, and layers is "conv"',
    }


# What the user names, and what can't be read.


def test_axes_by_pattern_come_first():
    tree = {**PARAMS, "free": normal(6, 2, 3, 4), "table": normal(7, 4, 3)}
    axes = {re.compile("^free$"): (0, -1), "table": (), lambda path: path.endswith("kernel"): 1}
    read = centralized_axes(tree, axes=axes, layers="conv")
    assert read.axes == {"Dense_0/kernel": (1,), "free": (0, 2)}
    assert read.untouched["table"] == "axes['table'] is ()"
    got = apply(tree, axes={"free": np.array([0, 2]).tolist(), "table": [np.int64(0)]})
    np.testing.assert_allclose(got["free"].mean((0, 2)), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(got["table"].mean(0), np.zeros(3), atol=1e-6)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"kernel": (4, 4, 6), "bias": (4, 6)}},  # 4 layers of Dense(4, 6), or heads
        {"a": {"kernel": (3, 4, 6)}},
        {"a": {"kernel": (3, 3, 4, 6)}},
        {"a": {"weight": (4, 4), "bias": (4,)}},  # (out, in) or (in, out)
        {"w": (4, 5)},
        {"a": {"kernel": (3, 4), "bias": (5,)}},
    ],
    ids=str,
)
def test_what_can_not_be_read_is_refused_by_name(tree):
    tree = jax.tree.map(jnp.zeros, tree, is_leaf=lambda x: isinstance(x, tuple))
    (path,) = [
        p
        for p in ("a/kernel", "a/weight", "w")
        if p in centralized_axes(tree, unreadable="skip").untouched
        and "can't be read" in centralized_axes(tree, unreadable="skip").untouched[p]
    ]
    with pytest.raises(ValueError, match=rf"(?s)can't tell.*{path} .*axes=\{{path pattern"):
        centralize().init(tree)
    assert centralized_axes(tree, axes={path: 0}).axes == {path: (0,)}


def test_wrong_arguments_are_named():
    tree = {"Dense_0": {"kernel": jnp.zeros((3, 4))}}
    with pytest.raises(ValueError, match=r"layers must be one of .*'conv'.*Did you mean 'conv'"):
        centralize(layers="cnv")
    with pytest.raises(ValueError, match="unreadable must be one of"):
        centralize(unreadable="ignore")
    with pytest.raises(ValueError, match=r"axes\['\*'\] must be an int or a sequence"):
        centralize(axes={"*": True})
    with pytest.raises(ValueError, match="axes must be a mapping"):
        centralize(axes=["kernel"])
    with pytest.raises(ValueError, match=r"'Dense_1/\*' matches no leaf.*Dense_0/kernel"):
        centralize(axes={"Dense_1/*": 0}).init(tree)
    with pytest.raises(ValueError, match="has the axes 0 to 1"):
        centralize(axes={"*": (0, 2)}).init(tree)
    with pytest.raises(ValueError, match="has the axes 0 to 1"):
        centralize(axes={"*": (0, -2)}).init(tree)
    with pytest.raises(ValueError, match=r"model must be an nnx\.Module, got dict"):
        centralize(model={})
    with pytest.raises(ValueError, match="model has none of these parameters"):
        centralize(model=nnx.Linear(3, 4, rngs=nnx.Rngs(0))).init(tree)
