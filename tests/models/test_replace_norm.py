"""One kind of norm into another: values, names of parameters, statistics, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import boostax
import boostax.linen
import boostax.nnx
from boostax import replace_norm
from tests.models import zoo_linen, zoo_nnx

OPTIONS = {
    "batch": {},
    "layer": {},
    "group": {"num_groups": 2},
    "instance": {},
    "ghost_batch": {"ghost_batch_size": 2},
}
NAMES = {
    "batch": "BatchNorm",
    "layer": "LayerNorm",
    "group": "GroupNorm",
    "instance": "InstanceNorm",
    "ghost_batch": "GhostBatchNorm",
}
X = np.random.default_rng(0).normal(size=(4, 3, 5, 4)).astype(np.float32)
SCALE, BIAS = np.float32([1, 2, 3, 4]), np.float32([0.5, 0, -1, 2])


class Nnx(nnx.Module):
    def __init__(self, kind):
        kinds = {"rngs": nnx.Rngs(0), "epsilon": 1e-3}
        more = {"num_groups": 4} if kind == "group" else {}
        more |= {"ghost_batch_size": 4} if kind == "ghost_batch" else {}
        home = boostax.nnx if kind == "ghost_batch" else nnx
        self.norm = getattr(home, NAMES[kind])(4, **more, **kinds)
        self.norm.scale[...], self.norm.bias[...] = SCALE, BIAS

    def __call__(self, x):
        return self.norm(x)


class Linen(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x, train=True):
        more = {"num_groups": 4} if self.kind == "group" else {}
        more |= {"ghost_batch_size": 4} if self.kind == "ghost_batch" else {}
        if self.kind in ("batch", "ghost_batch"):
            more["use_running_average"] = not train
        home = boostax.linen if self.kind == "ghost_batch" else nn
        return getattr(home, NAMES[self.kind])(epsilon=1e-3, name="norm", **more)(x)


def expected(to):
    """The statistics by hand: over which axes each kind takes them."""
    cut = {"ghost_batch": (2, 2, 3, 5, 4), "group": (4, 3, 5, 2, 2)}.get(to, X.shape)
    axes = {
        "batch": (0, 1, 2),
        "layer": (3,),
        "group": (1, 2, 4),
        "instance": (1, 2),
        "ghost_batch": (1, 2, 3),
    }[to]
    x = X.reshape(cut)
    y = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-3)
    return y.reshape(X.shape) * SCALE + BIAS


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("kind", NAMES)
def test_any_into_any(kind, to):
    if kind == to and kind not in ("group", "ghost_batch"):
        with pytest.raises(ValueError, match=rf"norm \({NAMES[kind]}, is an? \w+ norm already\)"):
            replace_norm(Nnx(kind), to)
        return
    model = Nnx(kind)
    new, report = replace_norm(model, to, X, **OPTIONS[to])
    assert type(new.norm) is getattr(boostax.nnx, NAMES[to])
    assert type(model.norm).__name__ == NAMES[kind]  # the user's own is not touched
    assert [(c.path, c.before, c.after) for c in report.changes] == [
        ("norm", NAMES[kind], NAMES[to])
    ]
    np.testing.assert_allclose(new(X), expected(to), atol=2e-5)

    net, report = replace_norm(Linen(kind), to, X, **OPTIONS[to])
    variables = net.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"norm": {"scale": (4,), "bias": (4,)}}
    assert ("batch_stats" in variables) == (to in ("batch", "ghost_batch"))
    kept = {**variables, "params": {"norm": {"scale": SCALE, "bias": BIAS}}}
    y, _ = net.apply(kept, X, mutable=["batch_stats"])
    np.testing.assert_allclose(y, expected(to), atol=2e-5)
    assert len(report.changes) == 1


def test_groups_that_are_right_already_stay():
    with pytest.raises(ValueError, match="GroupNorm, is a group norm already"):
        replace_norm(Nnx("group"), "group", num_groups=4)
    with pytest.raises(ValueError, match="GroupNorm, is a group norm already"):
        replace_norm(Linen("group"), "group", X, group_size=1)


def test_running_statistics_go_on_from_batch_to_ghost_batch():
    model = Nnx("batch")
    model.norm.mean[...], model.norm.var[...] = np.arange(4.0), 1 + np.arange(4.0)
    model.eval()
    new, report = replace_norm(model, "ghost_batch", ghost_batch_size=2)
    np.testing.assert_array_equal(new(X), model(X))
    assert new.norm.momentum == model.norm.momentum
    assert not report.notes
    net, _ = replace_norm(Linen("batch"), "ghost_batch", X, ghost_batch_size=2)
    variables = Linen("batch").init(jax.random.key(0), X)
    np.testing.assert_array_equal(
        net.apply(variables, X, train=False), Linen("batch").apply(variables, X, train=False)
    )


def test_new_statistics_start_fresh_and_linen_says_when_they_are_used():
    new, report = replace_norm(Nnx("layer"), "batch", momentum=0.5)
    assert "start at mean 0 and variance 1" in report.notes[0]
    new.eval()
    np.testing.assert_allclose(new(X), X / np.sqrt(1 + 1e-3) * SCALE + BIAS, rtol=1e-5, atol=1e-6)
    net, report = replace_norm(Linen("layer"), "batch", X, momentum=0.5)
    assert any("batch_stats is mutable" in note for note in report.notes)
    variables = net.init(jax.random.key(0), X)
    _, new = net.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_allclose(new["batch_stats"]["norm"]["mean"], X.mean((0, 1, 2)) / 2, rtol=1e-4)
    np.testing.assert_allclose(net.apply(variables, X), X / np.sqrt(1 + 1e-3), rtol=1e-5)


def test_new_statistics_move_in_a_train_step_with_a_window():
    net, _ = replace_norm(Linen("layer"), "batch", X, momentum=0.5)
    variables = net.init(jax.random.key(0), X)

    def loss_fn(params, batch, *, model_state):
        y, new = net.apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
        return (y**2).mean(), boostax.LossAux(model_state=dict(new))

    tx = boostax.accumulate(optax.sgd(0.1), 2)
    step = boostax.train_step(loss_fn, tx, has_aux=True)
    state = step.init(variables["params"], model_state={"batch_stats": variables["batch_stats"]})
    for part in (X[:2], X[2:]):
        state, _ = step(state, part)
    stats = state.model_state["batch_stats"]["norm"]
    np.testing.assert_allclose(stats["mean"], X.mean((0, 1, 2)) / 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.5 + X.var((0, 1, 2)) / 2, rtol=1e-4)


def test_instance_norm_with_running_statistics_and_layer_norm_over_an_example():
    new, _ = replace_norm(Nnx("batch"), "instance", track_running_stats=True, momentum=0.0)
    new(X)
    np.testing.assert_allclose(new.norm.var[...], X.var((1, 2)).mean(0), rtol=1e-5)
    net, _ = replace_norm(Linen("batch"), "instance", X, track_running_stats=True, momentum=0.0)
    _, new = net.apply(net.init(jax.random.key(0), X), X, mutable=["batch_stats"])
    np.testing.assert_allclose(new["batch_stats"]["norm"]["var"], X.var((1, 2)).mean(0), rtol=1e-5)
    axes = (1, 2, 3)
    whole = X - X.mean(axes, keepdims=True)
    whole /= np.sqrt(X.var(axes, keepdims=True) + 1e-3)
    for model in (
        replace_norm(Nnx("batch"), "layer", begin_norm_axis=1)[0],
        replace_norm(Linen("batch"), "layer", X, begin_norm_axis=1)[0].bind(
            {"params": {"norm": {"scale": SCALE, "bias": BIAS}}}
        ),
    ):
        np.testing.assert_allclose(model(X), whole * SCALE + BIAS, atol=2e-5)


def test_patterns_choose_and_the_report_says_what_was_left():
    model = zoo_nnx.resnet8(rngs=nnx.Rngs(0), width=4)
    new, report = replace_norm(model, "group", patterns="layer2/*", num_groups=2)
    assert [c.path for c in report.changes] == [
        "layer2/0/bn1",
        "layer2/0/bn2",
        "layer2/0/downsample/bn",
    ]
    assert len(report.left) == 6
    assert type(new.layer1[0].bn1) is nnx.BatchNorm
    out = nnx.eval_shape(lambda m: m(jnp.zeros((2, 8, 8, 3))), new)
    assert out.shape == (2, 10)


def test_a_checkpoint_of_the_original_loads_in_linen():
    x = jnp.zeros((2, 8, 8, 3))
    net = zoo_linen.resnet8(width=4)
    before = jax.eval_shape(net.init, jax.random.key(0), x)
    new, report = replace_norm(net, "group", x, num_groups=4, train=True)
    after = jax.eval_shape(new.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, after) == {"params": jax.tree.map(jnp.shape, before["params"])}
    assert len(report.changes) == 9


def test_layer_norms_of_a_vision_transformer():
    x = jnp.zeros((2, 8, 8, 3))
    _, report = replace_norm(zoo_nnx.ViT(rngs=nnx.Rngs(0)), "batch", x)
    assert len(report.changes) == 5
    net, report = replace_norm(zoo_linen.ViT(), "batch", x)
    assert len(report.changes) == 5
    stats = jax.eval_shape(net.init, jax.random.key(0), x)["batch_stats"]
    assert len(jax.tree.leaves(stats)) == 10


def test_stacked_layers_keep_their_axis():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return nnx.LayerNorm(4, rngs=rngs)

    new, _ = replace_norm(nnx.Sequential(stack(nnx.Rngs(0))), "batch")
    assert new.layers[0].scale.shape == new.layers[0].mean.shape == (3, 4)


def test_a_channel_axis_is_kept():
    model = nnx.Sequential(nnx.BatchNorm(3, axis=1, rngs=nnx.Rngs(0)))
    for to, axes in (("group", (1, 2, 3)), ("layer", (1,)), ("instance", (2, 3))):
        more = {"num_groups": 1} if to == "group" else {}
        new, _ = replace_norm(model, to, **more)
        y = (X - X.mean(axes, keepdims=True)) / np.sqrt(X.var(axes, keepdims=True) + 1e-5)
        np.testing.assert_allclose(new(X), y, atol=1e-4)


ERRORS = [
    (("groups",), {}, "to must be one of 'batch', .*Did you mean 'group'"),
    (("group",), {"num_groups": 3}, r"BatchNorm norm: num_groups 3 does not divide the 4 channels"),
    (("group",), {}, "num_groups 32 does not divide the 4 channels"),
    (("group",), {"num_groups": 2, "group_size": 2}, "one of num_groups and group_size"),
    (("layer",), {"num_groups": 2}, "num_groups is for to='group', got to='layer'"),
    (("instance",), {"momentum": 0.9}, "momentum needs track_running_stats=True"),
    (("ghost_batch",), {"ghost_batch_size": 0}, "ghost_batch_size must be at least 1"),
    (("layer",), {"epsilon": -1.0}, "epsilon must be above 0"),
    (("layer",), {"patterns": "norm1"}, "'norm1' matches no norm layer. Did you mean 'norm'"),
]


@pytest.mark.parametrize(("args", "settings", "words"), ERRORS)
def test_errors(args, settings, words):
    with pytest.raises(ValueError, match=words):
        replace_norm(Nnx("batch"), *args, **settings)
    with pytest.raises(ValueError, match=words):
        replace_norm(Linen("batch"), *args, X, **settings)


def test_errors_of_models():
    with pytest.raises(TypeError, match="linen or nnx module, got dict"):
        replace_norm({}, "layer")
    with pytest.raises(ValueError, match="found by a call; give example inputs"):
        replace_norm(Linen("batch"), "layer")
    with pytest.raises(ValueError, match=r"num_group has no use .* Did you mean 'num_groups'"):
        replace_norm(Nnx("batch"), "group", num_group=2)
    plain = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"nothing in the model is a norm .*layers/0 \(Linear\)"):
        replace_norm(plain, "layer")
    with pytest.raises(ValueError, match=r"nothing in the model is a norm .*\(model\) \(Dense\)"):
        replace_norm(nn.Dense(3), "layer", X)
    full = nnx.Sequential(boostax.nnx.LayerNorm((3, 5, 4), rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match="LayerNorm layers/0: its scale and bias have several axes"
    ):
        replace_norm(full, "batch")
    with pytest.raises(ValueError, match=r"LayerNorm .*: its scale and bias have several axes"):
        replace_norm(nn.LayerNorm(reduction_axes=(1, 2, 3), feature_axes=(2, 3)), "batch", X)
    dense = nnx.Sequential(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="InstanceNorm: the input must have"):
        replace_norm(dense, "instance", jnp.ones((2, 4)))
