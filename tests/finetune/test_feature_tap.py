"""feature_tap: values against running the layers by hand, evaluation mode, pooling, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from boostax import feature_tap

X = np.random.default_rng(0).normal(size=(3, 4, 4, 2)).astype(np.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(4, (3, 3), name="conv")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.remat(nn.Dense)(3, name="again")(x)
        dense = nn.Dense(3, name="twice")
        return dense(dense(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Conv(2, 4, (3, 3), rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.again = nnx.Linear(4, 3, rngs=rngs)
        self.twice = nnx.Linear(3, 3, rngs=rngs)
        self.unused = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x, scale=1.0):
        x = self.dropout(self.norm(self.blocks[0](x) * scale))
        x = nnx.remat(lambda layer, x: layer(x))(self.again, x)
        return self.twice(self.twice(x)), x


@pytest.fixture(scope="module")
def linen():
    model = Linen()
    variables = jax.jit(model.init, static_argnames="train")(jax.random.key(0), X, train=False)
    stats = {"norm": {"mean": jnp.arange(4.0), "var": jnp.full(4, 4.0)}}
    return model, {**variables, "batch_stats": stats}


@pytest.fixture(scope="module")
def nnx_model():
    model = Nnx(nnx.Rngs(0))
    model.norm.mean.set_value(jnp.arange(4.0))
    model.norm.var.set_value(jnp.full(4, 4.0))
    return model


def normalised(y):
    return (np.asarray(y) - np.arange(4.0)) / np.sqrt(4.0 + 1e-5)


def test_linen_norm_uses_running_statistics(linen):
    model, variables = linen
    tap = feature_tap(model, "norm", variables, kwargs={"train": False})
    conv = nn.Conv(4, (3, 3)).apply({"params": variables["params"]["conv"]}, X)
    np.testing.assert_allclose(tap(X), normalised(conv), rtol=1e-5, atol=1e-5)


def test_nnx_norm_uses_running_statistics_and_the_model_stays(nnx_model):
    before = jax.tree.map(np.asarray, nnx.state(nnx_model, nnx.BatchStat))
    got = feature_tap(nnx_model, "norm")(X)
    np.testing.assert_allclose(got, normalised(nnx_model.blocks[0](X)), rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(nnx_model, nnx.BatchStat))
    assert not nnx_model.norm.use_running_average
    assert type(nnx_model.norm) is nnx.BatchNorm
    # Dropout is off as well: what it puts out is what it was given.
    np.testing.assert_array_equal(feature_tap(nnx_model, "dropout")(X), got)


def test_inside_a_list_and_inside_remat(nnx_model, linen):
    np.testing.assert_allclose(
        feature_tap(nnx_model, "blocks/0")(X), nnx_model.blocks[0](X), rtol=1e-5, atol=1e-6
    )
    assert feature_tap(nnx_model, "again", flatten=True)(X).shape == (3, 48)
    model, variables = linen
    assert feature_tap(model, "again", variables, kwargs={"train": False})(X).shape == (3, 4, 4, 3)


def test_the_model_as_a_whole(linen):
    model, variables = linen
    tap = feature_tap(model, "", variables, kwargs={"train": False})
    expected = model.apply(variables, X, train=False)
    np.testing.assert_allclose(tap(X), expected, rtol=1e-4, atol=1e-5)


def test_pooling(nnx_model):
    conv = np.asarray(feature_tap(nnx_model, "blocks/0")(X))
    mean = feature_tap(nnx_model, "blocks/0", pool="mean")(X)
    np.testing.assert_allclose(mean, conv.mean((1, 2)), rtol=1e-5, atol=1e-6)
    largest = feature_tap(nnx_model, "blocks/0", pool="max")(X)
    np.testing.assert_allclose(largest, conv.max((1, 2)), rtol=1e-6)


def test_a_submodule_that_is_called_twice(linen, nnx_model):
    model, variables = linen
    kwargs = {"train": False}
    for given, of in ((variables, model), (None, nnx_model)):
        keywords = kwargs if given is not None else None
        with pytest.raises(ValueError, match="'twice' is called 2 times"):
            feature_tap(of, "twice", given, kwargs=keywords)(X)
        first = feature_tap(of, "twice", given, call=0, kwargs=keywords)(X)
        last = feature_tap(of, "twice", given, call=-1, kwargs=keywords)(X)
        assert not np.allclose(first, last)
        with pytest.raises(ValueError, match=r"call is 2, .* called 2 time\(s\)"):
            feature_tap(of, "twice", given, call=2, kwargs=keywords)(X)


def test_arguments_of_the_call(nnx_model):
    double = feature_tap(nnx_model, "norm", kwargs={"scale": 2.0})(X)
    np.testing.assert_allclose(double, normalised(2 * nnx_model.blocks[0](X)), rtol=1e-5, atol=1e-5)


class Told(nnx.Module):
    """Told in its call whether it trains; its stack draws keys for all layers in any case."""

    def __init__(self, kind, rngs):
        self.noise, self.rngs = kind == "dropout", rngs
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.out = nnx.Linear(2, 2, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs))
        self.stack = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x, train=True):
        if not self.noise:
            x = nnx.remat(lambda layer, x: layer(x, use_running_average=not train))(self.norm, x)

        @nnx.split_rngs(splits=3)
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def layers(x, layer, rngs):
            return dropout(layer(x), deterministic=not (train and noise), rngs=rngs)

        dropout, noise = self.dropout, self.noise
        return self.out(layers(x, self.stack, self.rngs))


@pytest.mark.parametrize("kind", ["norm", "dropout"])
def test_an_nnx_model_that_is_told_in_its_call(kind):
    model, x = Told(kind, nnx.Rngs(0)), X[:, 0, 0]
    trains = feature_tap(model, "out")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"runs as in training .*kwargs=\{'train': False\}"):
            jax.eval_shape(trains, x)
    got = jax.eval_shape(feature_tap(model, "out", kwargs={"train": False}), x)
    assert got.shape == (3, 2)
    with pytest.raises(ValueError, match="'stack' runs inside scan or vmap"):
        jax.eval_shape(feature_tap(model, "stack", kwargs={"train": False}), x)


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.vmap(nn.Dense, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)
        return stack(3, name="stack")(x).sum(0)


def test_what_linen_stacks():
    variables = jax.eval_shape(Stacked().init, jax.random.key(0), X)
    tap = feature_tap(Stacked(), "stack", variables)
    with pytest.raises(ValueError, match=r"'stack' was not called .* inside scan, vmap"):
        jax.eval_shape(tap.func, variables, X)


def test_only_what_is_needed_is_compiled():
    deep = nn.Sequential([nn.Dense(8), *[nn.Dense(256) for _ in range(3)]])
    x = jnp.ones((4, 8))
    variables = jax.eval_shape(deep.init, jax.random.key(0), x)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    tap = feature_tap(deep, "layers_0", zeros)
    lowered = tap.func.lower(*tap.args, x)
    assert lowered.compile().cost_analysis()["flops"] < 4 * 8 * 8 * 4


def test_errors(linen, nnx_model):
    model, variables = linen
    with pytest.raises(ValueError, match=r"'nrm'\. Did you mean 'norm'\? There are: .*blocks/0"):
        feature_tap(nnx_model, "nrm")
    with pytest.raises(ValueError, match=r"'cnv'\. Did you mean 'conv'\?"):
        feature_tap(model, "cnv", variables, kwargs={"train": False})(X)
    with pytest.raises(ValueError, match=r"runs as in training .*kwargs=\{'train': False\}"):
        feature_tap(model, "norm", variables)(X)
    with pytest.raises(ValueError, match="'unused' was not called"):
        feature_tap(nnx_model, "unused")(X)
    with pytest.raises(ValueError, match="puts out a tuple, not one array"):
        feature_tap(nnx_model, "")(X)
    with pytest.raises(ValueError, match=r"pool must be .* got 'men'\. Did you mean 'mean'\?"):
        feature_tap(nnx_model, "norm", pool="men")
    with pytest.raises(ValueError, match=r"needs axes between .* the shape \(3, 3\)"):
        feature_tap(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "", pool="mean")(jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="needs variables="):
        feature_tap(model, "norm", variables["params"])
    with pytest.raises(TypeError, match="leave variables out"):
        feature_tap(nnx_model, "norm", variables)
    with pytest.raises(TypeError, match="nnx or a linen module, got function"):
        feature_tap(lambda x: x, "norm")
    with pytest.raises(TypeError, match="flatten must be True or False, got 'no'"):
        feature_tap(nnx_model, "norm", flatten="no")
    with pytest.raises(TypeError, match=r"kwargs must be None or a dict of keywords, got \[1\]"):
        feature_tap(nnx_model, "norm", kwargs=[1])
    with pytest.raises(TypeError, match="path must be text"):
        feature_tap(nnx_model, ("norm",))
    with pytest.raises(TypeError, match="call must be None or an int"):
        feature_tap(nnx_model, "norm", call=True)
