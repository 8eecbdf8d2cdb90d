"""The classifier made a normalised one: which layer it is, its values, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import boostax
from boostax import norm_head
from boostax.models.normalized import normalized_linear
from tests.models import zoo_linen, zoo_nnx

IMAGE = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class Nnx(nnx.Module):
    def __init__(self, after=lambda y: y, use_bias=True):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, use_bias=use_bias, rngs=rngs)
        self.after = after

    def features(self, x):
        return nnx.relu(self.body(x))

    def __call__(self, x):
        return self.after(self.head(self.features(x)))


class Linen(nn.Module):
    after: object = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.relu(nn.Dense(8, name="body")(x))
        y = nn.Dense(3, name="head")(x)
        return y if self.after is None else self.after(y)


@pytest.mark.parametrize(
    ("name", "path"),
    [("resnet8", "fc"), ("DenseNet", "classifier"), ("ViT", "head")],
)
def test_only_the_classifier_of_known_networks(name, path):
    new, report = norm_head(getattr(zoo_nnx, name)(rngs=nnx.Rngs(0)), IMAGE)
    assert [(c.path, c.after) for c in report.changes] == [(path, "NormalizedLinear")]
    assert type(getattr(new, path)) is boostax.NormalizedLinear
    assert nnx.eval_shape(lambda m, x: m(x), new, IMAGE).shape == (2, 10)

    net, report = norm_head(getattr(zoo_linen, name)(), IMAGE)
    assert [(c.path, c.after) for c in report.changes] == [(path, "NormalizedDense")]
    params = jax.eval_shape(net.init, jax.random.key(0), IMAGE)["params"]
    before = jax.eval_shape(getattr(zoo_linen, name)().init, jax.random.key(0), IMAGE)["params"]
    assert set(params[path]) == {"kernel", "multiplier"}
    rest = lambda tree: jax.tree.map(jnp.shape, {k: v for k, v in tree.items() if k != path})
    assert rest(params) == rest(before)
    if name == "ViT":
        # The reference replaces the last dense layer of every container too.
        assert {p for p, _ in report.left} >= {"blocks_0/fc1", "blocks_0/fc2", "blocks_1/fc2"}


def test_values_and_the_users_own_model():
    model = Nnx()
    before = model(X)
    new, report = norm_head(model, X, multiplier_init=5.0)
    kernel = model.head.kernel[...]
    wanted = normalized_linear(model.features(X), kernel, 5.0)
    np.testing.assert_allclose(new(X), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model(X), before)
    assert report.notes == ("the head's bias is dropped",)
    assert "multiplier 5" in report.changes[0].why
    new.head.kernel[...] = 0 * kernel
    np.testing.assert_array_equal(model.head.kernel[...], kernel)

    net, _ = norm_head(Linen(), X, multiplier_init=5.0)
    params = Linen().init(jax.random.key(0), X)["params"]
    made = net.init(jax.random.key(0), X)["params"]
    np.testing.assert_array_equal(made["head"]["kernel"], params["head"]["kernel"])
    features = nn.relu(X @ params["body"]["kernel"])
    np.testing.assert_allclose(
        net.apply({"params": made}, X),
        normalized_linear(features, params["head"]["kernel"], 5.0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_the_bias_can_stay():
    model = Nnx()
    model.head.bias[...] = jnp.arange(3.0)
    new, report = norm_head(model, X, use_bias=True)
    np.testing.assert_array_equal(new.head.bias[...], jnp.arange(3.0))
    assert not report.notes
    net, _ = norm_head(Linen(), X, use_bias=True)
    assert net.init(jax.random.key(0), X)["params"]["head"]["bias"].shape == (3,)
    new, _ = norm_head(Nnx(use_bias=False), X, use_bias=True)
    np.testing.assert_array_equal(new.head.bias[...], 0)


@pytest.mark.parametrize(
    "after", [lambda y: y.astype(jnp.bfloat16), lambda y: y.reshape(-1, 1, 3), lambda y: {"y": y}]
)
def test_casts_and_shapes_may_follow_the_head(after):
    assert norm_head(Nnx(after), X)[1].changes[0].path == "head"
    assert norm_head(Linen(after), X)[1].changes[0].path == "head"


@pytest.mark.parametrize("make", [Nnx, Linen])
def test_after_a_softmax_the_path_is_needed(make):
    model = make(jax.nn.log_softmax)
    with pytest.raises(
        ValueError, match=r"Looked at: body \(\w+\), head \(\w+\).* name it by path="
    ):
        norm_head(model, X)
    _, report = norm_head(model, X, path="head")
    assert [c.path for c in report.changes] == ["head"]
    assert report.left == (("body", "path does not match it"),)


@pytest.mark.parametrize("make", [Nnx, Linen])
def test_errors_of_paths(make):
    with pytest.raises(ValueError, match=r"path 'haed' must match one .* Did you mean 'head'"):
        norm_head(make(), X, path="haed")
    with pytest.raises(ValueError, match=r"path '\*' must match one .* matches body, head"):
        norm_head(make(), X, path="*")


def test_several_outputs():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="a")(x), nn.Dense(2, name="b")(x)

    with pytest.raises(ValueError, match="several dense layers give an output of the model: a, b"):
        norm_head(Two(), X)
    net, _ = norm_head(Two(), X, path="b")
    params = net.init(jax.random.key(0), X)["params"]
    assert set(params["a"]) == {"kernel", "bias"}
    assert set(params["b"]) == {"kernel", "multiplier"}


def test_errors():
    with pytest.raises(TypeError, match="linen or nnx module, got function"):
        norm_head(lambda x: x, X)
    with pytest.raises(ValueError, match=r"norm_head\(model, x\), or path"):
        norm_head(Nnx())
    with pytest.raises(ValueError, match="give example inputs"):
        norm_head(Linen(), path="head")
    assert norm_head(Nnx(), path="head")[1].changes[0].path == "head"
    with pytest.raises(ValueError, match="multiplier_init must be above 0"):
        norm_head(Nnx(), X, multiplier_init=-1)
    general = nnx.Sequential(nnx.LinearGeneral(4, (3,), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"layers/0 is a LinearGeneral; only Dense"):
        norm_head(general, X)


def test_it_trains_in_a_train_step():
    net, _ = norm_head(Linen(), X)
    labels = np.arange(6) % 3

    def loss_fn(params, batch):
        logits = net.apply({"params": params}, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = boostax.train_step(loss_fn, optax.sgd(0.5))
    state = step.init(net.init(jax.random.key(0), X)["params"])
    losses = []
    for _ in range(5):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert float(state.params["head"]["multiplier"]) != 1.0
