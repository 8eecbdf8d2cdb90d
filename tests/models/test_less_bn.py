"""less_bn: which batch norms go, what stays in their place, in nnx and in linen."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax._tree import path_string
from boostax.models.less_bn import less_bn
from boostax.models.load_weights import load_weights
from tests.models import zoo_linen, zoo_nnx

X = jnp.ones((2, 8, 8, 3))
F = jnp.ones((2, 4, 4, 4))


def nnx_net(name, **kwargs):
    make = lambda: getattr(zoo_nnx, name)(rngs=nnx.Rngs(0), **kwargs)
    return nnx.eval_shape(make)


COUNTS = [
    ("resnet18", {"width": 2}, 20, 9, 12),
    ("resnet50", {"width": 2}, 53, 17, 21),
    ("resnet20", {"width": 2}, 21, 10, 12),
    ("resnet20", {"width": 2, "act": jax.nn.gelu}, 21, 10, 12),
    ("resnet20", {"width": 2, "dtype": jnp.bfloat16, "shortcut": "pad"}, 19, 10, 10),
    ("MobileNetV2", {}, 17, 12, 12),
    ("DenseNet", {}, 11, 7, 7),
]


@pytest.mark.parametrize(("name", "kinds", "norms", "kept", "with_shortcut"), COUNTS)
def test_counts(name, kinds, norms, kept, with_shortcut):
    models = [(getattr(zoo_linen, name)(**kinds), {"train": True})]
    if name != "resnet50":
        models.append((nnx_net(name, **kinds), {}))
    for model, call in models:
        rewritten, report = less_bn(model, X, **call)
        assert len(report.left) == kept
        assert sum(change.before == "BatchNorm" for change in report.changes) == norms - kept
        if isinstance(model, nn.Module):
            _, more = less_bn(model, X, shortcut=True, **call)
            assert len(more.left) == with_shortcut
            made = jax.eval_shape(lambda m=rewritten: m.init(jax.random.key(0), X, train=True))
            statistics = len(jax.tree.leaves(made["batch_stats"]))
        else:
            statistics = len(jax.tree.leaves(nnx.state(rewritten, nnx.BatchStat)))
        assert statistics == 2 * kept


def test_a_network_without_batch_norms_is_an_error_that_lists_its_layers():
    with pytest.raises(ValueError, match=r"Looked at: patch_embed \(Conv\).*keep='none'"):
        less_bn(nnx_net("ViT"), X)
    with pytest.raises(ValueError, match=r"blocks_0/norm1 \(LayerNorm\)"):
        less_bn(zoo_linen.ViT(), X)


class Hidden(nn.Module):
    """A residual branch with all that may lie between its layers."""

    between: str
    train: bool = True

    @nn.compact
    def __call__(self, x):
        norm = lambda name: nn.BatchNorm(not self.train, name=name)
        y = nn.Conv(4, (3, 3), use_bias=False, name="conv1")(x)
        y = norm("bn1")(y.astype(jnp.bfloat16) if self.between == "cast" else y)
        y = nn.gelu(y)
        y = nn.Conv(4, (3, 3), use_bias=False, name="conv2")(y)
        y = norm("bn2")(y)
        if self.between == "squeeze":
            s = nn.relu(nn.Dense(2, name="squeeze")(y.mean((1, 2))))
            y = y * nn.sigmoid(nn.Dense(4, name="excite")(s))[:, None, None, :]
        elif self.between == "dropout":
            y = nn.Dropout(0.5, deterministic=not self.train)(y)
        elif self.between == "cast":
            y = y.astype(jnp.float32)
        elif self.between == "reshape":
            y = y.reshape(x.shape[0], -1).reshape(x.shape)
        elif self.between == "drop_path":
            keep = jax.random.bernoulli(self.make_rng("dropout"), 0.5, (x.shape[0], 1, 1, 1))
            y = jnp.where(keep, y, jnp.zeros((1, 1, 1, 1)))
        elif self.between == "cond":
            y = jax.lax.cond(jnp.sum(x) > 0, lambda y: y, jnp.zeros_like, y)
        elif self.between == "checkpoint":
            return jax.checkpoint(lambda a, b: a + jax.jit(jnp.negative)(b))(x, y)
        return y + x


@pytest.mark.parametrize(
    "between",
    ["squeeze", "dropout", "cast", "reshape", "drop_path", "cond", "checkpoint"],
)
def test_nothing_between_the_layers_hides_a_block(between):
    _, report = less_bn(Hidden(between), F)
    assert [(c.path, c.after) for c in report.changes] == [("bn1", "bias")]
    assert report.left == (("bn2", "the last of its branch before the addition"),)


class PreActivation(nn.Module):
    """Norm and ReLU ahead of each convolution; the shortcut starts behind the first norm."""

    project: bool

    @nn.compact
    def __call__(self, x):
        norm = lambda name: nn.BatchNorm(False, name=name)
        y = nn.relu(norm("bn1")(x))
        if self.project:
            x = nn.Conv(4, (1, 1), use_bias=False, name="shortcut")(y)
        y = nn.Conv(4, (3, 3), use_bias=False, name="conv1")(y)
        y = nn.Conv(4, (3, 3), use_bias=False, name="conv2")(nn.relu(norm("bn2")(y)))
        return x + y


def test_pre_activation_blocks():
    _, report = less_bn(PreActivation(project=False), F)
    # Nothing without bias is ahead of the first norm: nothing stays of it.
    assert [(c.path, c.after) for c in report.changes] == [("bn1", "nothing")]
    # With a projection both paths share the first norm, and the branch has one only.
    with pytest.raises(ValueError, match="nothing in the model is a batch norm ahead"):
        less_bn(PreActivation(project=True), F)
    model, report = less_bn(PreActivation(project=False), F, compensation="skip_init")
    after = {c.path: c.after for c in report.changes}
    assert after == {"bn1": "nothing", "bn2": "bias", "conv2": "Conv and skip_gain"}
    params = model.init(jax.random.key(0), F)["params"]
    assert sorted(params["conv2"]) == ["kernel", "skip_gain"]


class NnxPreActivation(nnx.Module):
    def __init__(self, rngs):
        self.bn1, self.bn2 = (nnx.BatchNorm(4, rngs=rngs) for _ in range(2))
        self.conv1, self.conv2 = (
            nnx.Conv(4, 4, (3, 3), use_bias=False, rngs=rngs) for _ in range(2)
        )

    def __call__(self, x):
        y = self.conv1(nnx.relu(self.bn1(x)))
        return x + self.conv2(nnx.relu(self.bn2(y)))


def test_a_scalar_at_a_layer_in_nnx():
    model, report = less_bn(NnxPreActivation(nnx.Rngs(0)), F, compensation="skip_init")
    after = {c.path: c.after for c in report.changes}
    assert after == {"bn1": "nothing", "bn2": "bias", "conv2": "Conv and skip_gain"}
    x = jnp.sin(jnp.arange(F.size, dtype=jnp.float32)).reshape(F.shape)
    np.testing.assert_array_equal(model(x), x)
    model.conv2.skip_gain[...] = jnp.array(2.0)
    branch = model.conv2(nnx.relu(model.conv1(nnx.relu(x))))
    np.testing.assert_allclose(model(x), x + branch, atol=1e-5)
    assert isinstance(model.conv2, nnx.Conv)


@pytest.mark.parametrize("axis", [1, -1])
def test_the_axis_of_what_is_left(axis):
    class Branch(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.BatchNorm(False, axis=axis, name="bn1")(nn.Dense(3, use_bias=False)(x))
            return x + nn.BatchNorm(False, name="bn2")(nn.Dense(3)(y))

    x = jnp.ones((2, 4, 3))
    model, _ = less_bn(Branch(), x, keep="none")
    variables = model.init(jax.random.key(0), x)
    assert sorted(variables["params"]) == ["Dense_0", "Dense_1", "bn1"]
    bias = jnp.arange(x.shape[axis], dtype=jnp.float32)
    variables["params"]["bn1"]["bias"] = bias
    p = variables["params"]
    y = x @ p["Dense_0"]["kernel"] + bias.reshape((1, -1, 1) if axis == 1 else (1, 1, -1))
    np.testing.assert_allclose(model.apply(variables, x), x + y @ p["Dense_1"]["kernel"], atol=1e-5)


class Block(nnx.Module):
    """Norms behind convolutions; ``twice`` calls the whole branch a second time."""

    def __init__(self, rngs, *, twice=False, bias=False):
        kinds = {"use_bias": bias, "rngs": rngs}
        self.conv1 = nnx.Conv(4, 4, (3, 3), **kinds)
        self.bn1 = nnx.BatchNorm(4, rngs=rngs)
        self.conv2 = nnx.Conv(4, 4, (3, 3), **kinds)
        self.bn2 = nnx.BatchNorm(4, rngs=rngs)
        self.twice = twice

    def __call__(self, x):
        for _ in range(2 if self.twice else 1):
            x = x + self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return x


def test_shared_layers():
    model, report = less_bn(Block(nnx.Rngs(0), twice=True), F)
    assert [change.path for change in report.changes] == ["bn1"]
    assert model(F).shape == F.shape

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = Block(rngs), Block(rngs)
            self.b.bn1 = self.a.bn2

        def __call__(self, x):
            return self.b(self.a(x))

    # a/bn2 is the last norm of one branch and the first of the other: it stays.
    tied, report = less_bn(Tied(nnx.Rngs(0)), F)
    assert [change.path for change in report.changes] == ["a/bn1"]
    assert dict(report.left)["a/bn2"].startswith("shared, and another of its calls is: the last")
    assert tied.a.bn2 is tied.b.bn1


def test_bias():
    after = lambda model, **kw: [c.after for c in less_bn(model, F, **kw)[1].changes]
    assert after(Block(nnx.Rngs(0))) == ["bias"]
    assert after(Block(nnx.Rngs(0)), bias=False) == ["nothing"]
    assert after(Block(nnx.Rngs(0), bias=True)) == ["nothing"]
    assert after(Block(nnx.Rngs(0), bias=True), bias=True) == ["bias"]
    assert after(PreActivation(project=False), bias=True) == ["bias"]


def test_patterns_say_exactly_which_go():
    model = nnx_net("resnet8", width=2)
    _, report = less_bn(model, X, patterns="layer[12]/*/bn2")
    assert [c.path for c in report.changes] == ["layer1/0/bn2", "layer2/0/bn2"]
    _, report = less_bn(
        model, X, patterns=["bn1", re.compile("downsample"), lambda p: p == "no"][:2]
    )
    assert [c.path for c in report.changes] == [
        "bn1",
        "layer2/0/downsample/bn",
        "layer3/0/downsample/bn",
    ]
    with pytest.raises(ValueError, match=r"'layer9/\*' matches no batch norm.*Batch norms: bn1, "):
        less_bn(model, X, patterns=["bn1", "layer9/*"])
    with pytest.raises(ValueError, match="patterns says which norms go"):
        less_bn(model, X, patterns="bn1", keep="none")
    with pytest.raises(TypeError, match="less_bn: patterns must be path patterns"):
        less_bn(model, X, patterns=3)


def test_keep_none_takes_them_all():
    for model, call in (
        (nnx_net("resnet8", width=2), {}),
        (zoo_linen.resnet8(width=2), {"train": True}),
    ):
        _, report = less_bn(model, X, keep="none", **call)
        assert len(report.changes) == 9
        assert report.left == ()


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("keep", "lest", "Did you mean 'last'"),
        ("shortcut", 1, "shortcut must be one of False, True, got 1"),
        ("bias", "no", "bias must be one of 'auto', True, False"),
        ("compensation", "skipinit", "Did you mean 'skip_init'"),
    ],
)
def test_arguments_out_of_range(argument, value, text):
    with pytest.raises(ValueError, match=text):
        less_bn(Block(nnx.Rngs(0)), F, **{argument: value})


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model must be a linen or nnx module, got function"):
        less_bn(lambda x: x, F)
    with pytest.raises(TypeError, match="example inputs are missing"):
        less_bn(Twin())


def by_hand(params, x, *, bn1):
    """The residual block Hidden("none") without its first norm; with plain batch statistics."""
    conv = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = conv(bn1(conv(x, params["conv1"]["kernel"])), params["conv2"]["kernel"])
    mean, var = y.mean((0, 1, 2), keepdims=True), y.var((0, 1, 2), keepdims=True)
    return y, x + (y - mean) / jnp.sqrt(var + 1e-5)


@pytest.fixture(scope="module")
def image():
    return jax.random.normal(jax.random.key(1), (2, 4, 4, 4))


def test_values_by_hand(image):
    model, _ = less_bn(Hidden("none"), F)
    variables = model.init(jax.random.key(0), image)
    assert sorted(variables["batch_stats"]) == ["bn2"]
    assert sorted(variables["params"]["bn1"]) == ["bias"]
    # A bias of its own tells that it is added.
    variables["params"]["bn1"]["bias"] = jnp.arange(4.0)
    bias = jnp.arange(4.0).reshape(1, 1, 1, 4)
    _, expected = by_hand(variables["params"], image, bn1=lambda y: nn.gelu(y + bias))
    out, changed = model.apply(variables, image, mutable=["batch_stats"])
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert list(changed["batch_stats"]) == ["bn2"]


def test_skip_init_begins_as_the_identity_and_learns(image):
    model, report = less_bn(Hidden("none"), F, compensation="skip_init")
    assert {c.path: c.after for c in report.changes} == {"bn1": "bias", "bn2": "bias and skip_gain"}
    variables = model.init(jax.random.key(0), image)
    assert list(variables) == ["params"]
    np.testing.assert_array_equal(model.apply(variables, image), image)
    grads = jax.grad(lambda v: jnp.sum(model.apply(v, image) ** 2))(variables)["params"]
    y, _ = by_hand(variables["params"], image, bn1=nn.gelu)
    np.testing.assert_allclose(grads["bn2"]["skip_gain"], jnp.sum(2 * image * y), rtol=1e-4)


def test_scaled_ws(image):
    model, report = less_bn(Hidden("none"), F, compensation="scaled_ws")
    after = {c.path: c.after for c in report.changes}
    assert after == {"bn1": "scale and bias", "conv1": "Conv, kernel standardised"}
    variables = model.init(jax.random.key(0), image)
    params = variables["params"]
    assert sorted(params["bn1"]) == ["bias", "scale"]
    w = params["conv1"]["kernel"]
    # No activation ahead of the first convolution: gain 1; 36 inputs to a unit.
    w = (w - w.mean((0, 1, 2), keepdims=True)) / (6 * w.std((0, 1, 2), keepdims=True))
    standardized = params | {"conv1": {"kernel": w}}
    _, expected = by_hand(standardized, image, bn1=nn.gelu)
    out, _ = model.apply(variables, image, mutable=["batch_stats"])
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_scaled_ws_through_casts_and_where_it_can_t():
    _, report = less_bn(Hidden("cast"), F, compensation="scaled_ws")
    assert [c.path for c in report.changes] == ["bn1", "conv1"]
    _, report = less_bn(PreActivation(project=False), F, compensation="scaled_ws")
    assert report.notes == ("bn1: no layer ahead whose kernel could be standardised",)

    class Twofold(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(4, name="dense")(x)
            y = nn.BatchNorm(False, name="bn1")(y) * nn.sigmoid(y)
            return x + nn.BatchNorm(False, name="bn2")(nn.Dense(4)(y))

    _, report = less_bn(Twofold(), F, compensation="scaled_ws")
    assert [(c.path, c.after) for c in report.changes] == [("bn1", "nothing")]
    assert report.notes == ("bn1: what dense gives is used elsewhere too, kernel left",)


def test_scaled_ws_knows_the_activation_ahead():
    _, report = less_bn(nnx_net("resnet8", width=2), X, compensation="scaled_ws")
    why = {c.path: c.why for c in report.changes}
    # sqrt(2 / (1 - 1/pi)) for ReLU.
    assert why["layer1/0/conv1"] == "ahead of layer1/0/bn1; gain 1.713 (activation: relu)"
    model = nnx_net("resnet8", width=2, act=jax.nn.gelu)
    assert "activation: gelu" in str(less_bn(model, X, compensation="scaled_ws")[1])


class Twin(nn.Module):
    """Block in linen."""

    @nn.compact
    def __call__(self, x):
        conv = lambda name: nn.Conv(4, (3, 3), use_bias=False, name=name)
        y = nn.relu(nn.BatchNorm(False, name="bn1")(conv("conv1")(x)))
        return x + nn.BatchNorm(False, name="bn2")(conv("conv2")(y))


@pytest.mark.parametrize("compensation", [None, "skip_init", "scaled_ws"])
def test_nnx_and_linen_agree(compensation, image):
    """The same parameters in both frameworks give the same values."""
    model, ours = less_bn(Block(nnx.Rngs(0)), F, compensation=compensation)
    linen, theirs = less_bn(Twin(), F, compensation=compensation)
    assert ours == theirs
    variables = linen.init(jax.random.key(0), image)
    ones = lambda path, leaf: leaf + 1 if path[-1].key != "kernel" else leaf
    variables = jax.tree_util.tree_map_with_path(ones, variables)
    loaded, report = load_weights(model, nnx.State(variables["params"]), allow_missing="*/*")
    assert report.missing == tuple(
        p for p in ("bn2/mean", "bn2/var") if compensation != "skip_init"
    )
    assert report.dropped == ()
    out, _ = linen.apply(variables, image, mutable=["batch_stats"])
    np.testing.assert_allclose(loaded(image), out, atol=1e-5)


class ScanNet(nnx.Module):
    """Blocks stacked by nnx.vmap and run by nnx.scan."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(3))

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


def test_blocks_stacked_by_nnx_scan():
    model = ScanNet(nnx.Rngs(0))
    for compensation, names in ((None, ["bn1"]), ("skip_init", ["bn1", "bn2"])):
        rewritten, report = less_bn(model, F, compensation=compensation)
        assert [c.path for c in report.changes] == [f"blocks/{name}" for name in names]
        assert nnx.eval_shape(lambda model: model(F), rewritten).shape == F.shape
    np.testing.assert_array_equal(nnx.jit(lambda model: model(F))(rewritten), F)
    assert rewritten.blocks.bn2.skip_gain.shape == (3,)
    assert rewritten.blocks.bn1.bias.shape == (3, 4)


class LinenScanNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return Hidden("none", name="block")(x), None

        axes = {"params": 0, "batch_stats": 0}
        scan = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scan(name="scan")(x, None)[0]


def test_blocks_stacked_by_linen_scan():
    model, report = less_bn(LinenScanNet(), F)
    assert [(c.path, c.after) for c in report.changes] == [("scan/block/bn1", "bias")]
    made = jax.eval_shape(model.init, jax.random.key(0), F)
    assert made["params"]["scan"]["block"]["bn1"]["bias"].shape == (3, 4)
    assert list(made["batch_stats"]["scan"]["block"]) == ["bn2"]


def test_a_loop_that_is_not_followed_is_told():
    class Looped(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Hidden("none", name="block")(x)
            norm = nn.BatchNorm(True, name="looped")
            norm(x)
            again = lambda module, x: module(x)
            return nn.while_loop(lambda m, x: jnp.sum(x) > 1e9, again, norm, x)

    _, report = less_bn(Looped(), F)
    assert [c.path for c in report.changes] == ["block/bn1"]
    assert report.notes == ("looped: inside a loop that is not followed, left as it was",)


def test_additions_that_are_no_blocks():
    class Parallel(nn.Module):
        @nn.compact
        def __call__(self, x):
            side = lambda i: nn.BatchNorm(False, name=f"bn{i}")(nn.Conv(4, (1, 1))(x))
            return side(1) + side(2)

    with pytest.raises(ValueError, match="nothing in the model is a batch norm ahead"):
        less_bn(Parallel(), F)
    _, report = less_bn(Parallel(), F, patterns="bn1")
    assert report.left == (("bn2", "matched by no pattern"),)

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = x
            for i in range(3):
                y = nn.relu(nn.BatchNorm(False, name=f"bn{i}")(nn.Conv(4, (3, 3))(y)))
            return jnp.concatenate([x, y], -1)

    with pytest.raises(ValueError, match="nothing in the model is a batch norm ahead"):
        less_bn(UNet(), F)


def test_a_dense_block_that_lists_its_features():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            features = [x]
            for i in range(3):
                y = jnp.concatenate(features, -1)
                for j, (size, width) in enumerate(((1, 8), (3, 4))):
                    y = nn.relu(nn.BatchNorm(False, name=f"bn{i}_{j}")(y))
                    y = nn.Conv(width, (size, size), use_bias=False)(y)
                features.append(y)
            return jnp.concatenate(features, -1)

    _, report = less_bn(Dense(), F)
    assert [c.path for c in report.changes] == ["bn0_0", "bn1_0", "bn2_0"]


def test_abstract_models_other_methods_and_the_user_s_model():
    class Encoder(nn.Module):
        @nn.compact
        def encode(self, x, train):
            return Hidden("none", train)(x)

    shape = jax.ShapeDtypeStruct(F.shape, F.dtype)
    model, report = less_bn(Encoder(), shape, True, method="encode")
    assert [c.path for c in report.changes] == ["Hidden_0/bn1"]
    made = jax.eval_shape(lambda: model.init(jax.random.key(0), F, True, method="encode"))
    assert list(made["batch_stats"]["Hidden_0"]) == ["bn2"]
    block = Block(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(block))
    less_bn(block, F, compensation="skip_init")
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(block)), strict=True))
    assert isinstance(block.bn1, nnx.BatchNorm)


def test_nnx_training_and_evaluation_switch_as_before():
    model, _ = less_bn(Block(nnx.Rngs(0)), F, keep="none")
    model.set_attributes(use_running_average=True)
    model.eval()
    assert model(F).shape == F.shape


@pytest.mark.parametrize("compensation", [None, "skip_init", "scaled_ws"])
def test_train_step(compensation):
    model = Block(nnx.Rngs(0))
    rewritten, _ = less_bn(model, F, compensation=compensation)
    rewritten, report = load_weights(rewritten, model, allow_missing="*/skip_gain")
    assert "bn1/mean" in report.dropped
    assert report.missing == (("bn2/skip_gain",) if compensation == "skip_init" else ())
    step = boostax.train_step(lambda m, x: jnp.mean(m(x) ** 2), optax.sgd(0.1))
    state = step.init(rewritten)
    before = jax.tree.map(jnp.copy, state.params)
    x = jnp.sin(jnp.arange(F.size, dtype=jnp.float32)).reshape(F.shape)
    state, metrics = step(state, x)
    assert np.isfinite(metrics["loss"])
    still = jax.tree.map(lambda a, b: bool((a == b).all()), before, state.params)
    still = {path_string(p) for p, v in jax.tree_util.tree_leaves_with_path(still) if v}
    # Behind the scalar 0 nothing moves in the first step.
    behind = {"bn1/bias", "bn2/bias", "conv1/kernel", "conv2/kernel"}
    assert still == (behind if compensation == "skip_init" else set())
    statistics = nnx.to_flat_state(nnx.filter_state(state.model_state, nnx.BatchStat))
    assert [p for p, _ in statistics] == (
        [] if compensation == "skip_init" else [("bn2", "mean"), ("bn2", "var")]
    )
