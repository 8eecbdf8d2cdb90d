"""Norm layers of boostax.nnx and boostax.linen: PyTorch's and MindSpore's numbers, errors, edges.

``n_torch_norms`` was recorded with PyTorch 2.13.0 on a CPU in float64, ``p_mindspore_norms`` with
MindSpore 2.7.0 on a CPU in float32; both hold images with channels on axis 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import boostax.linen
import boostax.nnx

FRAMEWORKS = ("nnx", "linen")
KINDS = {
    "batch": ("BatchNorm2d", {"num_features": 6, "momentum": 0.2}),
    "layer_chw": ("LayerNorm", {"normalized_shape": (6, 3, 5)}),
    "group": ("GroupNorm", {"num_groups": 2, "num_channels": 6}),
    "instance": (
        "InstanceNorm2d",
        {"num_features": 6, "affine": True, "track_running_stats": True},
    ),
    "instance_notrack": ("InstanceNorm2d", {"num_features": 6, "affine": True}),
}


def last(value):
    return np.moveaxis(value, 1, -1)


class Made:
    """A layer of either framework as functions of parameters, statistics and input."""

    def __init__(self, framework, layer, variables=None):
        self.framework, self.layer = framework, layer
        if framework == "nnx":
            layer.train()
            self.params = {k: getattr(layer, k)[...] for k in ("scale", "bias")}
            self.stats = {k: getattr(layer, k)[...] for k in ("mean", "var") if hasattr(layer, k)}
        else:
            self.params = variables["params"]
            self.stats = variables.get("batch_stats", {})

    def run(self, params, stats, x, evaluate=False):
        """Return the output and the new statistics."""
        if self.framework == "nnx":
            layer = nnx.clone(self.layer)
            layer.eval() if evaluate else layer.train()
            for name, value in {**params, **stats}.items():
                setattr(layer, name, type(getattr(layer, name))(value))
            return layer(x), {k: getattr(layer, k)[...] for k in stats}
        variables = {"params": params, "batch_stats": stats}
        kinds = {"use_running_average": evaluate} if stats else {}
        y, new = self.layer.apply(variables, x, mutable=["batch_stats"], **kinds)
        return y, new.get("batch_stats", {})

    def all(self, x, dy):
        """Return y, new statistics, gradients of <y, dy>, and the evaluation's y, compiled once."""

        def compute(params, stats, x, dy):
            def loss(params, x):
                y, new = self.run(params, stats, x)
                return jnp.vdot(y, dy), (y, new)

            (_, (y, new)), (dp, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
            return y, new, dp, dx, self.run(params, new, x, evaluate=True)[0]

        return jax.jit(compute)(self.params, self.stats, x, dy)


def imported(framework, source, kind, **kinds):
    function = getattr(getattr(boostax, framework), f"from_{source}")
    made = function(kind, **kinds)
    return Made(framework, made) if framework == "nnx" else Made(framework, *made)


def torch_state(ref, name):
    keys = ("weight", "bias")
    state = {key: ref[f"{name}_{key}"] for key in keys}
    if f"{name}_after_running_mean" in ref:
        c = ref["x"].shape[1]
        state |= {"running_mean": np.zeros(c), "running_var": np.ones(c), "num_batches_tracked": 0}
    return state


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_pytorch(reference, framework, name):
    ref = reference("n_torch_norms")
    kind, settings = KINDS[name]
    made = imported(framework, "torch", kind, state=torch_state(ref, name), **settings)
    x, dy = np.float32(last(ref["x"])), np.float32(last(ref["dy"]))
    y, new, dp, dx, evaluated = made.all(x, dy)
    close = lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    close(y, last(ref[f"{name}_train_y"]))
    close(dx, last(ref[f"{name}_dx"]))
    turned = (lambda v: np.moveaxis(v, 0, -1)) if name == "layer_chw" else lambda v: v
    close(dp["scale"], turned(ref[f"{name}_dweight"]))
    close(dp["bias"], turned(ref[f"{name}_dbias"]))
    close(evaluated, last(ref[f"{name}_eval_y"]))
    for ours, theirs in (("mean", "running_mean"), ("var", "running_var")):
        if f"{name}_after_{theirs}" in ref:
            close(new[ours], ref[f"{name}_after_{theirs}"])
    assert set(new) == ({"mean", "var"} if f"{name}_after_running_mean" in ref else set())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_pytorch_in_float64_with_its_own_layout(reference, framework, name):
    ref = reference("n_torch_norms")
    kind, settings = KINDS[name]
    made = imported(
        framework, "torch", kind, state=torch_state(ref, name), channels="first", **settings
    )
    with jax.enable_x64(True):
        params = {"scale": ref[f"{name}_weight"], "bias": ref[f"{name}_bias"]}
        stats = {k: jnp.asarray(v, jnp.float64) for k, v in made.stats.items()}
        y, new = jax.jit(made.run)(params, stats, ref["x"])
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, ref[f"{name}_train_y"], rtol=1e-9)
        if stats:
            np.testing.assert_allclose(new["mean"], ref[f"{name}_after_running_mean"], rtol=1e-9)
            np.testing.assert_allclose(new["var"], ref[f"{name}_after_running_var"], rtol=1e-9)


MINDSPORE = {
    "layer_chw": (
        "LayerNorm",
        {"normalized_shape": (4, 2, 3), "begin_norm_axis": 1, "begin_params_axis": 1},
        "last",
    ),
    "layer_mixed": (
        "LayerNorm",
        {"normalized_shape": (3,), "begin_norm_axis": 1, "begin_params_axis": -1},
        "first",
    ),
    "layer": ("LayerNorm", {"normalized_shape": (3,)}, "first"),
    "group": ("GroupNorm", {"num_groups": 2, "num_channels": 4}, "last"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_agrees_with_mindspore(reference, framework):
    ref = reference("p_mindspore_norms")
    close = lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    for name, (kind, settings, channels) in MINDSPORE.items():
        state = {key: ref[f"{name}_{key}"] for key in ("gamma", "beta")}
        made = imported(framework, "mindspore", kind, state=state, channels=channels, **settings)
        turn = last if channels == "last" else lambda value: value
        close(made.run(made.params, {}, turn(ref["x"]))[0], turn(ref[f"{name}_y"]))
    state = {key: ref[f"batch_{key}"] for key in ("gamma", "beta")}
    fresh = {"moving_mean": np.zeros(4), "moving_variance": np.ones(4)}
    made = imported(
        framework,
        "mindspore",
        "BatchNorm2d",
        state={**state, **fresh},
        num_features=4,
        momentum=0.8,
    )
    y, new = made.run(made.params, made.stats, last(ref["x"]))
    close(y, last(ref["batch_train_y"]))
    close(new["mean"], ref["batch_moving_mean"])
    close(new["var"], ref["batch_moving_variance"])
    evaluated, _ = made.run(made.params, new, last(ref["x"]), evaluate=True)
    close(evaluated, last(ref["batch_eval_y"]))


def test_layer_norm_of_small_values_needs_mindspores_epsilon(reference):
    ref = reference("p_mindspore_norms")
    norm = boostax.nnx.from_mindspore("LayerNorm", normalized_shape=6)
    np.testing.assert_allclose(norm(ref["small_x"]), ref["small_y"], rtol=1e-5)
    theirs = nnx.LayerNorm(6, rngs=nnx.Rngs(0))(ref["small_x"])
    assert float(jnp.std(theirs)) < 0.5 * float(np.std(ref["small_y"]))


def layer(framework, name, features, x, **settings):
    """Return a fresh layer's output and statistics."""
    kind = getattr(getattr(boostax, framework), name)
    if framework == "nnx":
        made = kind(features, rngs=nnx.Rngs(0), **settings)
        y = made(x)
        return y, {k: getattr(made, k)[...] for k in ("mean", "var") if hasattr(made, k)}
    takes = name in ("BatchNorm", "GhostBatchNorm") or settings.get("track_running_stats")
    made = kind(**settings, **({"use_running_average": False} if takes else {}))
    variables = made.init(jax.random.key(0), x)
    y, new = made.apply(variables, x, mutable=["batch_stats"])
    return y, new.get("batch_stats", {})


FAR = 1e4 + np.random.default_rng(0).normal(size=(16, 8, 4)).astype(np.float32)
ALL = {
    "BatchNorm": {},
    "GhostBatchNorm": {"ghost_batch_size": 8},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "LayerNorm": {"begin_norm_axis": 1},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ALL)
def test_far_from_zero_the_standard_deviation_is_1(framework, name):
    y, _ = layer(framework, name, 4, FAR, **ALL[name])
    assert abs(float(jnp.std(y)) - 1) < 0.01


def test_flax_itself_loses_the_variance_there():
    y = nnx.BatchNorm(4, rngs=nnx.Rngs(0))(FAR)
    assert float(jnp.std(y)) > 10


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ALL)
def test_statistics_of_bfloat16_are_float32(framework, name):
    x = jnp.asarray(FAR - 1e4 + 4, jnp.bfloat16)
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    y, stats = layer(framework, name, 4, x, **ALL[name], **kinds)
    wide, _ = layer(framework, name, 4, x.astype(jnp.float32), **ALL[name])
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), wide, atol=0.02)
    assert all(value.dtype == jnp.float32 for value in stats.values())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_affine_off_and_initialisers(framework):
    x = np.float32([[1.0, 2, 3, 6]])
    plain, _ = layer(framework, "LayerNorm", 4, x, use_scale=False, use_bias=False)
    init = {"scale_init": nn.initializers.constant(2.0), "bias_init": nn.initializers.constant(1.0)}
    scaled, _ = layer(framework, "LayerNorm", 4, x, **init)
    np.testing.assert_allclose(plain, (x - 3) / np.sqrt(3.5 + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(scaled, 2 * plain + 1, rtol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4), (6, 3, 2, 4), (6, 2, 2, 3, 4)])
def test_any_number_of_spatial_axes(framework, shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    y, stats = layer(framework, "BatchNorm", 4, x, momentum=0.0)
    flat = x.reshape(-1, 4)
    np.testing.assert_allclose(y.reshape(-1, 4), (flat - flat.mean(0)) / flat.std(0), atol=1e-4)
    np.testing.assert_allclose(stats["var"], flat.var(0), rtol=1e-5)
    first, _ = layer(framework, "BatchNorm", 4, np.moveaxis(x, -1, 1), axis=1)
    np.testing.assert_allclose(np.moveaxis(first, 1, -1), y, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ghost_batch_norm(framework):
    x = np.random.default_rng(2).normal(size=(6, 5, 2)).astype(np.float32)
    settings = {"momentum": 0.9, "unbiased": True}
    y, stats = layer(framework, "GhostBatchNorm", 2, x, ghost_batch_size=3, **settings)
    parts = [layer(framework, "BatchNorm", 2, part, **settings) for part in (x[:3], x[3:])]
    np.testing.assert_allclose(y, np.concatenate([part for part, _ in parts]), atol=1e-5)
    for key in ("mean", "var"):
        np.testing.assert_allclose(stats[key], np.mean([s[key] for _, s in parts], 0), rtol=1e-5)
    whole, _ = layer(framework, "GhostBatchNorm", 2, x, ghost_batch_size=6)
    np.testing.assert_allclose(whole, layer(framework, "BatchNorm", 2, x)[0], atol=1e-5)


def test_ghost_batches_must_divide_the_batch():
    x, words = jnp.ones((6, 2)), "batch of 6 can't be cut into chunks of ghost_batch_size 4"
    norm = boostax.nnx.GhostBatchNorm(2, ghost_batch_size=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=words):
        norm(x)
    net = boostax.linen.GhostBatchNorm(ghost_batch_size=4, use_running_average=False)
    variables = net.init(jax.random.key(0), x)  # of any size: nothing is kept from it
    with pytest.raises(ValueError, match=words):
        net.apply(variables, x, mutable=["batch_stats"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_mask_leaves_values_out(framework):
    x = np.random.default_rng(3).normal(size=(4, 6, 2)).astype(np.float32)
    mask = np.ones((4, 6, 1), bool)
    mask[:, 4:] = False
    spoiled = np.where(mask, x, 1e6).astype(np.float32)

    def run(name, value, **settings):
        made = getattr(getattr(boostax, framework), name)
        takes = name != "LayerNorm"
        if framework == "nnx":
            net = made(2, rngs=nnx.Rngs(0), **settings)
            y = net(value, mask=mask)
            return y, net.var[...] if takes else None
        net = made(**settings, **({"use_running_average": False} if takes else {}))
        variables = net.init(jax.random.key(0), value)
        y, new = net.apply(variables, value, mask=mask, mutable=["batch_stats"])
        return y, new["batch_stats"]["var"] if takes else None

    for name, settings in (
        ("BatchNorm", {"unbiased": True}),
        ("GhostBatchNorm", {"ghost_batch_size": 2, "unbiased": True}),
        ("InstanceNorm", {"track_running_stats": True}),
        ("LayerNorm", {"begin_norm_axis": 1}),
    ):
        y, var = run(name, spoiled, **settings)
        short, stats = layer(framework, name, 2, x[:, :4], **settings)
        np.testing.assert_allclose(y[:, :4], short, rtol=1e-4, atol=1e-5, err_msg=name)
        if var is not None:
            np.testing.assert_allclose(var, stats["var"], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["BatchNorm", "GhostBatchNorm"])
def test_devices_share_statistics(framework, name):
    # vmap's named axis is what shard_map's is, on one device.
    x = np.random.default_rng(4).normal(size=(2, 4, 3, 2)).astype(np.float32)
    settings = {"unbiased": True, "momentum": 0.5}
    if name == "GhostBatchNorm":
        settings["ghost_batch_size"] = 2
    whole, wanted = layer(framework, name, 2, x.reshape(8, 3, 2), **settings)
    if framework == "nnx":
        graph, state = nnx.split(
            getattr(boostax.nnx, name)(2, axis_name="data", rngs=nnx.Rngs(0), **settings)
        )

        def run(x):
            norm = nnx.merge(graph, state, copy=True)
            return norm(x), {"mean": norm.mean[...], "var": norm.var[...]}
    else:
        net = getattr(boostax.linen, name)(use_running_average=False, axis_name="data", **settings)
        variables = net.init(jax.random.key(0), x[0])

        def run(x):
            y, new = net.apply(variables, x, mutable=["batch_stats"])
            return y, new["batch_stats"]

    y, stats = jax.vmap(run, axis_name="data")(x)
    np.testing.assert_allclose(y.reshape(8, 3, 2), whole, atol=1e-5)
    for key in ("mean", "var"):
        np.testing.assert_allclose(stats[key][0], wanted[key], rtol=1e-5)
        np.testing.assert_array_equal(stats[key][0], stats[key][1])


NORMALIZERS = (
    boostax.nnx.BatchNorm(4, epsilon=1e-9, rngs=nnx.Rngs(0)),
    boostax.nnx.GhostBatchNorm(4, ghost_batch_size=2, epsilon=1e-9, rngs=nnx.Rngs(0)),
    boostax.nnx.LayerNorm(4, begin_norm_axis=1, epsilon=1e-9, rngs=nnx.Rngs(0)),
    boostax.nnx.GroupNorm(4, 2, epsilon=1e-9, rngs=nnx.Rngs(0)),
    boostax.nnx.InstanceNorm(4, epsilon=1e-9, rngs=nnx.Rngs(0)),
)


@given(st.integers(0, 1000), st.floats(0.5, 100), st.floats(-100, 100))
def test_scale_and_shift_of_the_input_do_not_matter(seed, factor, shift):
    x = np.random.default_rng(seed).normal(size=(4, 6, 4)).astype(np.float32)
    for norm in NORMALIZERS:
        y = norm(x)
        np.testing.assert_allclose(norm(factor * x + shift), y, atol=5e-3)
        assert abs(float(y.mean())) < 1e-4


def test_instance_norm_evaluates_in_a_view():
    norm = boostax.nnx.InstanceNorm(2, track_running_stats=True, rngs=nnx.Rngs(0))
    x = 3 + np.ones((2, 3, 2), np.float32)
    evaluated = nnx.view(norm, use_running_average=True)(x)
    np.testing.assert_allclose(evaluated, 4 / np.sqrt(1 + 1e-6), rtol=1e-6)
    assert norm.use_running_average is False


BUILD_ERRORS = [
    (
        lambda n, kw: n.BatchNorm(**kw, momentum=1.5),
        ValueError,
        r"momentum .* in \[0, 1\], got 1.5",
    ),
    (lambda n, kw: n.BatchNorm(**kw, momentum="0.9"), TypeError, "momentum must be a number"),
    (lambda n, kw: n.BatchNorm(**kw, epsilon=0), ValueError, "epsilon must be above 0"),
    (lambda n, kw: n.BatchNorm(**kw, unbiased=1), TypeError, "unbiased must be True or False"),
    (lambda n, kw: n.BatchNorm(**kw, use_bias=None), TypeError, "use_bias must be True or False"),
    (lambda n, kw: n.BatchNorm(**kw, spatial_dims="2"), TypeError, "spatial_dims must be an int"),
    (lambda n, kw: n.BatchNorm(**kw, spatial_dims=-1), ValueError, "spatial_dims must not be neg"),
    (lambda n, kw: n.GhostBatchNorm(**kw, ghost_batch_size=0), ValueError, "at least 1, got 0"),
    (lambda n, kw: n.GhostBatchNorm(**kw, ghost_batch_size=2.0), TypeError, "ghost_batch_size"),
    (lambda n, kw: n.GroupNorm(**kw, num_groups=0), ValueError, "num_groups must be at least 1"),
    (lambda n, kw: n.GroupNorm(**kw, num_groups=2, group_size=2), ValueError, "one of num_groups"),
    (lambda n, kw: n.GroupNorm(**kw, num_groups=2, axis=0), ValueError, "0 is the batch axis"),
    (lambda n, kw: n.InstanceNorm(**kw, feature_axes=0), ValueError, "0 is the batch axis"),
    (lambda n, kw: n.InstanceNorm(**kw, unbiased=True), ValueError, "track_running_stats=True"),
    (
        lambda n, kw: n.InstanceNorm(**kw, track_running_stats=True, use_fast_variance=True),
        ValueError,
        "use_fast_variance does not go with",
    ),
    (
        lambda n, kw: n.LayerNorm(**kw, begin_norm_axis=1, reduction_axes=(1,)),
        ValueError,
        "begin_norm_axis or reduction_axes, not both",
    ),
    (lambda n, kw: n.LayerNorm(**kw, begin_norm_axis=1.0), TypeError, "begin_norm_axis must be"),
]
CALL_ERRORS = [
    ("BatchNorm", {}, (4,), "batch axis, a channel axis"),
    ("BatchNorm", {"spatial_dims": 2}, (2, 3, 4), r"spatial_dims=2 .* rank 4 .*\(2, 3, 4\)"),
    ("BatchNorm", {"axis": 3}, (2, 3, 4), "axis 3 is not a channel axis"),
    ("BatchNorm", {"unbiased": True}, (1, 4), "of 1 value a channel has no unbiased"),
    ("InstanceNorm", {}, (2, 4), "at least one spatial axis"),
    ("GroupNorm", {"num_groups": 2, "axis": 2}, (2, 4), "axis 2 is not a channel axis"),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_errors_when_built(framework):
    module = getattr(boostax, framework)
    kinds = {"num_features": 4, "rngs": nnx.Rngs(0)} if framework == "nnx" else {}
    for build, kind, words in BUILD_ERRORS:
        with pytest.raises(kind, match=words):
            build(module, kinds)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_errors_at_a_call(framework):
    for name, settings, shape, words in CALL_ERRORS:
        with pytest.raises(ValueError, match=words):
            layer(framework, name, 4, jnp.ones(shape), **settings)
    for name, settings in ALL.items():
        with pytest.raises(TypeError, match="must be floating, got int32"):
            layer(framework, name, 4, jnp.ones((16, 8, 4), int), **settings)


def test_errors_of_channel_counts():
    kinds = {"rngs": nnx.Rngs(0)}
    x = jnp.ones((2, 3, 5))
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        boostax.nnx.BatchNorm(0, **kinds)
    with pytest.raises(TypeError, match=r"num_features must be an int .* got 3.0 \(float\)"):
        boostax.nnx.InstanceNorm(3.0, **kinds)
    with pytest.raises(ValueError, match="num_groups 3 does not divide the 4 channels"):
        boostax.nnx.GroupNorm(4, num_groups=3, **kinds)
    with pytest.raises(ValueError, match=r"group_size 3 .*allowed are \[1, 2, 4\]"):
        boostax.nnx.GroupNorm(4, num_groups=None, group_size=3, **kinds)
    for made in (
        boostax.nnx.BatchNorm(4, **kinds),
        boostax.nnx.GroupNorm(4, 2, **kinds),
        boostax.nnx.InstanceNorm(4, **kinds),
        boostax.nnx.LayerNorm(4, **kinds),
    ):
        with pytest.raises(ValueError, match=r"num_features=4\): the input has 5 channels on axis"):
            made(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return boostax.linen.GroupNorm(num_groups=2, name="norm1")(x)

    with pytest.raises(ValueError, match="GroupNorm norm1: num_groups 2 does not divide the 5"):
        Net().init(jax.random.key(0), x)


def test_errors_of_layer_norm_axes():
    kinds = {"rngs": nnx.Rngs(0)}
    made = boostax.nnx.LayerNorm
    with pytest.raises(ValueError, match="at least one axis"):
        made((), **kinds)
    with pytest.raises(ValueError, match="begin_params_axis -2 needs num_features with 2 axes"):
        made(4, begin_params_axis=-2, **kinds)
    with pytest.raises(ValueError, match="begin_norm_axis 3 is not an axis of an input of rank 3"):
        made((3, 4), begin_norm_axis=3, begin_params_axis=1, **kinds)
    with pytest.raises(ValueError, match="rank 3, got shape"):
        made((3, 4), begin_norm_axis=1, begin_params_axis=1, **kinds)(jnp.ones((2, 2, 3, 4)))
    with pytest.raises(ValueError, match="rank 2 or more"):
        made((3, 4), **kinds)(jnp.ones(4))
    with pytest.raises(ValueError, match="begin_norm_axis 2 lies behind the first axis"):
        made((3, 4), begin_norm_axis=2, **kinds)(jnp.ones((2, 3, 4)))
    net = boostax.linen.LayerNorm(begin_norm_axis=3)
    with pytest.raises(ValueError, match="begin_norm_axis 3 is not an axis of an input of rank 3"):
        net.init(jax.random.key(0), jnp.ones((2, 3, 4)))


IMPORT_ERRORS = [
    ("torch", "BatchNorm2D", {"num_features": 4}, "Did you mean 'BatchNorm2d'"),
    ("torch", "BatchNorm2d", {}, "num_features is missing"),
    ("torch", "BatchNorm2d", {"num_features": 4, "epsilon": 1}, "unknown setting 'epsilon'"),
    ("torch", "BatchNorm2d", {"num_features": 4, "momentum": None}, "cumulative average"),
    ("torch", "BatchNorm2d", {"num_features": 4, "track_running_stats": False}, "in evaluation"),
    ("torch", "LayerNorm", {"normalized_shape": 4, "channels": "NCHW"}, "'last' or 'first'"),
    ("torch", "LayerNorm", {"normalized_shape": 4, "axis_name": "data"}, "is for batch norms"),
    ("torch", "GroupNorm", {"num_groups": 3, "num_channels": 4}, "does not divide"),
    ("mindspore", "BatchNorm2d", {"num_features": 4, "use_batch_statistics": True}, "fixes the"),
    (
        "mindspore",
        "LayerNorm",
        {"normalized_shape": 4, "begin_norm_axis": 1},
        "pass channels='first'",
    ),
]


@pytest.mark.parametrize(("source", "kind", "settings", "words"), IMPORT_ERRORS)
def test_errors_of_imports(source, kind, settings, words):
    with pytest.raises(ValueError, match=words):
        getattr(boostax.nnx, f"from_{source}")(kind, **settings)


def test_errors_of_imported_arrays():
    good = {"weight": np.ones(4), "bias": np.zeros(4)}
    take = lambda state, **kw: boostax.linen.from_torch(
        "GroupNorm", num_groups=2, num_channels=4, state=state, **kw
    )
    assert take(good, name="norm1")[0].name == "norm1"
    with pytest.raises(ValueError, match=r"state lacks \['bias'\]"):
        take({"weight": np.ones(4)})
    with pytest.raises(ValueError, match="'running_mean', which this layer has no place for"):
        take({**good, "running_mean": np.ones(4)})
    with pytest.raises(
        ValueError, match=r"state\['bias'\] has shape \(3,\), the settings say \(4,\)"
    ):
        take({**good, "bias": np.ones(3)})
