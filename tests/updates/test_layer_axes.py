"""Reading the input axes of every layer of Flax, in linen and nnx trees, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from boostax._tree import leaf_paths
from boostax.updates.centralize import centralize, centralized_axes

X = jnp.ones((2, 5, 8))


def shapes_of(module, *args):
    return jax.eval_shape(module.init, jax.random.key(0), *args)["params"]


class Block(nn.Module):
    bias: bool = True

    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, use_bias=self.bias)(h, h)
        x = nn.Conv(8, (3,), use_bias=self.bias)(x)
        return nn.Dense(8, use_bias=self.bias, name="mixer")(x), None


class Stacked(nn.Module):
    bias: bool = True
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            Block, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=3
        )
        x, _ = scanned(self.bias, name="layers")(x, None)
        return nn.Dense(4)(x)


# Module, example input, and the axes of each kernel.
LINEN = {
    "dense": (nn.Dense(3), X, {"kernel": (0,)}),
    "square dense": (nn.Dense(8), X, {"kernel": (0,)}),
    "conv1d": (nn.Conv(6, (3,)), X, {"kernel": (0, 1)}),
    "conv2d": (nn.Conv(6, (3, 3)), jnp.ones((1, 4, 4, 2)), {"kernel": (0, 1, 2)}),
    "conv3d": (nn.Conv(6, (2, 2, 2)), jnp.ones((1, 4, 4, 4, 2)), {"kernel": (0, 1, 2, 3)}),
    "grouped": (nn.Conv(6, (3,), feature_group_count=2), X, {"kernel": (0, 1)}),
    "depthwise": (nn.Conv(8, (3,), feature_group_count=8), X, {"kernel": (0, 1)}),
    "transposed": (nn.ConvTranspose(5, (3,)), X, {"kernel": (0, 1)}),
    "transposed kernel": (nn.ConvTranspose(5, (3,), transpose_kernel=True), X, {"kernel": (0, 2)}),
    "two inputs": (nn.DenseGeneral(3, axis=(-2, -1)), X, {"kernel": (0, 1)}),
    "two outputs": (nn.DenseGeneral((3, 2)), X, {"kernel": (0,)}),
    "two and two": (nn.DenseGeneral((3, 2), axis=(-2, -1)), X, {"kernel": (0, 1)}),
    "batch axis": (nn.DenseGeneral(3, batch_dims=(0,)), X, {"kernel": (1,)}),
    "unshared": (nn.ConvLocal(6, (3,)), X, {"kernel": (1,)}),
    "einsum": (nn.Einsum((8, 2, 3), "abc,cde->abde"), X, {"kernel": (0,)}),
    "weight norm": (nn.WeightNorm(nn.Dense(3)), X, {"layer_instance/kernel": (0,)}),
    "attention": (
        nn.MultiHeadDotProductAttention(num_heads=2),
        X,
        {"key/kernel": (0,), "out/kernel": (0, 1), "query/kernel": (0,), "value/kernel": (0,)},
    ),
}
LINEN["attention without bias"] = (
    nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False),
    *LINEN["attention"][1:],
)


@pytest.mark.parametrize("name", LINEN)
def test_linen_layers(name):
    module, x, expected = LINEN[name]
    params = shapes_of(module, x)
    read = centralized_axes(params)
    assert read.axes == expected
    assert {*read.axes, *read.untouched} == set(leaf_paths(params))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_linen_layers_stacked_by_scan_never_mix(bias, axis):
    params = shapes_of(Stacked(bias, axis), X)
    one = shapes_of(Block(bias), X, None)
    alone = centralized_axes(one).axes
    stacked = centralized_axes(params).axes
    assert stacked.pop("Dense_0/kernel") == (0,)
    assert set(stacked) == {f"layers/{path}" for path in alone}
    for path, axes in alone.items():
        assert stacked[f"layers/{path}"] == tuple(a + (a >= axis) for a in axes), path


def test_stacked_values_equal_each_layer_alone():
    params = jax.tree.map(
        lambda s: jnp.asarray(np.random.default_rng(0).normal(size=s.shape), s.dtype),
        shapes_of(Stacked(), X),
    )
    tx = centralize()
    got = tx.update(params, tx.init(params), params)[0]
    for layer in range(3):
        one = jax.tree.map(lambda x, i=layer: x[i], params["layers"])
        alone = tx.update(one, tx.init(one), one)[0]
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(got["layers"]), strict=True):
            np.testing.assert_allclose(a, b[layer], rtol=1e-5, atol=1e-6)


NNX = {
    "linear": (lambda r: nnx.Linear(3, 4, rngs=r), {"kernel": (0,)}),
    "conv": (lambda r: nnx.Conv(4, 6, (3, 3), rngs=r), {"kernel": (0, 1, 2)}),
    "conv1d": (lambda r: nnx.Conv(4, 6, 3, rngs=r), {"kernel": (0, 1)}),
    "grouped": (
        lambda r: nnx.Conv(4, 6, (3, 3), feature_group_count=2, rngs=r),
        {"kernel": (0, 1, 2)},
    ),
    "depthwise": (
        lambda r: nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=r),
        {"kernel": (0, 1, 2)},
    ),
    "transposed": (lambda r: nnx.ConvTranspose(4, 6, (3, 3), rngs=r), {"kernel": (0, 1, 2)}),
    "transposed kernel": (
        lambda r: nnx.ConvTranspose(4, 6, (3, 3), transpose_kernel=True, rngs=r),
        {"kernel": (0, 1, 3)},
    ),
    "general": (
        lambda r: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=r),
        {"kernel": (0, 1)},
    ),
    "batch axis": (
        lambda r: nnx.LinearGeneral(3, (4, 5), batch_axis={0: 2}, rngs=r),
        {"kernel": (1,)},
    ),
    "einsum": (
        lambda r: nnx.Einsum("abc,cde->abde", (8, 2, 3), (2, 3), rngs=r),
        {"kernel": (0,)},
    ),
    "lora": (lambda r: nnx.LoRA(3, 2, 4, rngs=r), {"lora_a": (0,), "lora_b": (0,)}),
    "gru": (
        lambda r: nnx.GRUCell(3, 4, rngs=r),
        {"dense_h/kernel": (0,), "dense_i/kernel": (0,)},
    ),
    "embed": (lambda r: nnx.Embed(5, 3, rngs=r), {}),
    "norm": (lambda r: nnx.LayerNorm(3, rngs=r), {}),
    "attention": (
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r),
        {"key/kernel": (0,), "out/kernel": (0, 1), "query/kernel": (0,), "value/kernel": (0,)},
    ),
}


@pytest.mark.parametrize("with_model", [False, True], ids=["tree", "model"])
@pytest.mark.parametrize("name", NNX)
def test_nnx_layers(name, with_model):
    make, expected = NNX[name]
    model = make(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    assert centralized_axes(state, model=model if with_model else None).axes == expected
    tx = centralize(model=model if with_model else None)
    got, _ = tx.update(state, tx.init(state), state)
    assert jax.tree.structure(got) == jax.tree.structure(state)


def test_the_model_tells_what_the_tree_can_not():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.ConvTranspose(4, 4, 3, transpose_kernel=True, rngs=rngs)
            self.mix = nnx.Einsum("bchw,cdh->bcdw", (3, 3, 4), None, rngs=rngs)
            self.split = nnx.LinearGeneral(4, (3, 2), use_bias=False, rngs=rngs)
            self.free = nnx.Param(jnp.ones((3, 4)))

    model = Net(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match=r"of 5 leaves: free .*mix/kernel .*split/kernel"):
        centralized_axes(state)
    with pytest.raises(ValueError, match=r"1 of 5 leaves: free "):
        centralized_axes(state, model=model)
    read = centralized_axes(state, model=model, axes={"free": ()})
    assert read.axes == {"mix/kernel": (2,), "split/kernel": (0,), "up/kernel": (0, 2)}


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize(
    ("layer", "axes"),
    [
        (lambda r: nnx.Linear(3, 4, rngs=r), (1,)),
        (lambda r: nnx.Linear(3, 4, use_bias=False, rngs=r), (1,)),
        (lambda r: nnx.Conv(4, 6, 3, rngs=r), (1, 2)),
        (lambda r: nnx.LinearGeneral(3, (4, 5), rngs=r), (1,)),
    ],
)
def test_layers_stacked_by_vmap(layer, axes, size):
    model = nnx.vmap(layer)(nnx.Rngs(0).split(size))
    state = nnx.state(model, nnx.Param)
    assert centralized_axes(state, model=model).axes == {"kernel": axes}
    # Without the model it is read right, or refused.
    assert centralized_axes(state, unreadable="skip").axes in ({}, {"kernel": axes})


def test_convolutions_only():
    params = {
        "Conv_0": {"kernel": jnp.ones((3, 3, 1, 4)), "bias": jnp.ones(4)},
        "Dense_0": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)},
        **shapes_of(nn.Sequential([nn.MultiHeadDotProductAttention(num_heads=2)]), X),
    }
    assert centralized_axes(params, layers="conv").axes == {"Conv_0/kernel": (0, 1, 2)}
    # (3, 4, 6) with bias (6,) has known axes, but is a convolution or a dense layer.
    unknown = {"a": {"kernel": jnp.ones((3, 4, 6)), "bias": jnp.ones(6)}}
    assert centralized_axes(unknown).axes == {"a/kernel": (0, 1)}
    with pytest.raises(ValueError, match="a convolution or a dense layer"):
        centralized_axes(unknown, layers="conv")


@pytest.mark.parametrize(
    ("tree", "axes"),
    [
        ({"w1": (4, 5), "b1": (5,), "w2": (5, 3), "b2": (3,)}, {"w1": (0,), "w2": (0,)}),
        ({"fc": {"weight": (5, 4), "bias": (5,)}}, {"fc/weight": (1,)}),
        ({"c": {"w": (3, 3, 2, 5), "b": (5,)}}, {"c/w": (0, 1, 2)}),
        ([((4, 5), (5,)), ((5, 5), (5,))], {"0/0": (0,), "1/0": (0,)}),
        ({"c": {"weight": (5, 2, 3, 3), "bias": (5,)}}, {"c/weight": (1, 2, 3)}),
    ],
    ids=["flat", "out-in", "conv", "pairs, a square one as its namesake", "out-in-conv"],
)
def test_trees_of_plain_functions(tree, axes):
    is_shape = lambda x: isinstance(x, tuple) and all(isinstance(i, int) for i in x)
    params = jax.tree.map(jnp.zeros, tree, is_leaf=is_shape)
    assert centralized_axes(params).axes == axes


def test_a_network_without_biases_is_read_by_its_norms():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

    state = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    assert centralized_axes(state).axes == {"head/kernel": (0,), "stem/kernel": (0, 1, 2)}
