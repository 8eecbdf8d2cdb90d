"""Folding batch norms into the layers ahead: same outputs, and the reason wherever one stays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st

from boostax.models.fold_batch_norm import fold_batch_norm
from boostax.models.less_bn import less_bn

X = jax.random.normal(jax.random.key(7), (2, 4, 4, 4))


def trained(tree):
    """Give norms the values of a trained network: no ones, no zeros."""

    def fill(path, leaf):
        shift = len(jax.tree_util.keystr(path))
        wave = np.sin(shift + np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape)
        kind = leaf.dtype
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = 0.3 * wave
        last = str(getattr(path[-1], "key", ""))
        last = last if last != "value" else str(path[-2].key)
        if last in ("var", "scale"):
            return jnp.asarray(1.5 + wave, kind)
        return jnp.asarray(wave if last in ("mean", "bias") else leaf, kind)

    return jax.tree_util.tree_map_with_path(fill, tree)


def bn(name, **kinds):
    return nn.BatchNorm(use_running_average=True, name=name, **kinds)


class Layers(nn.Module):
    """One layer of each kind, each with a norm behind it."""

    dtype: object = None

    @nn.compact
    def __call__(self, x):
        kinds = {"dtype": self.dtype}
        x = bn("bn1", **kinds)(nn.Conv(4, (3, 3), use_bias=False, name="plain", **kinds)(x))
        x = nn.relu(x)
        x = bn("bn2", use_scale=False)(nn.Conv(4, (3, 3), feature_group_count=2, name="grouped")(x))
        depthwise = nn.Conv(4, (3, 3), feature_group_count=4, use_bias=False, name="depthwise")
        x = bn("bn3", use_bias=False)(depthwise(x))
        x = bn("bn4", use_bias=False, use_scale=False)(
            nn.ConvTranspose(6, (2, 2), strides=(2, 2), name="transposed")(x)
        )
        x = nn.ConvTranspose(5, (2, 2), transpose_kernel=True, name="swapped")(x)
        x = bn("bn5", epsilon=0.1)(x)
        return bn("bn6")(nn.Dense(3, name="dense")(x.mean((1, 2))))


def test_every_kind_of_layer():
    model = Layers()
    variables = trained(jax.eval_shape(model.init, jax.random.key(0), X))
    folded, values, report = fold_batch_norm(model, X, variables=variables)
    assert [(c.path, c.after) for c in report.changes] == [
        ("bn1", "part of plain"),
        ("bn2", "part of grouped"),
        ("bn3", "part of depthwise"),
        ("bn4", "part of transposed"),
        ("bn5", "part of swapped"),
        ("bn6", "part of dense"),
    ]
    assert report.left == ()
    assert list(values) == ["params"]
    assert sorted(values["params"]) == sorted(
        ["plain", "grouped", "depthwise", "transposed", "swapped", "dense"]
    )
    expected = jax.jit(model.apply)(variables, X)
    np.testing.assert_allclose(jax.jit(folded.apply)(values, X), expected, atol=1e-5)
    jaxpr = str(jax.make_jaxpr(folded.apply)(values, X))
    assert "rsqrt" not in jaxpr
    # A model initialised anew has the same parameters; the user's are as they were.
    made = jax.eval_shape(folded.init, jax.random.key(0), X)
    assert jax.tree.structure(made) == jax.tree.structure(values)
    assert "batch_stats" in variables


def test_by_hand():
    model = nn.Sequential([nn.Dense(1, use_bias=False), nn.BatchNorm(True, epsilon=1.0)])
    params = {
        "layers_0": {"kernel": jnp.array([[2.0], [4.0]])},
        "layers_1": {"scale": jnp.array([3.0]), "bias": jnp.array([1.0])},
    }
    stats = {"layers_1": {"mean": jnp.array([10.0]), "var": jnp.array([8.0])}}
    variables = freeze({"params": params, "batch_stats": stats})
    _, values, _ = fold_batch_norm(model, jnp.ones((1, 2)), variables=variables)
    # scale / sqrt(var + epsilon) = 1, so the kernel stays, and the bias is 0 - 10 + 1.
    assert values["params"]["layers_0"]["kernel"].tolist() == [[2.0], [4.0]]
    assert values["params"]["layers_0"]["bias"].tolist() == [-9.0]
    assert isinstance(values, type(variables))


FLOATS = st.floats(-3, 3, width=32)
ROWS = st.lists(FLOATS, min_size=3, max_size=3).map(lambda row: jnp.asarray(row, jnp.float32))


@given(ROWS, ROWS, ROWS, ROWS, ROWS)
def test_any_statistics_give_the_same_outputs(kernel, scale, bias, mean, var):
    model = nn.Sequential([nn.Dense(3, use_bias=False), nn.BatchNorm(True, epsilon=1e-3)])
    params = {"layers_0": {"kernel": kernel[None]}, "layers_1": {"scale": scale, "bias": bias}}
    stats = {"layers_1": {"mean": mean, "var": jnp.abs(var)}}
    x = jnp.asarray([[1.0], [-2.0]])
    variables = {"params": params, "batch_stats": stats}
    folded, values, _ = fold_batch_norm(model, x, variables=variables)
    expected = model.apply(variables, x)
    size = float(jnp.max(jnp.abs(expected)))
    # Both terms of w x - mean are scaled; where they cancel, rounding is relative to each.
    parts = 20 * float(jnp.max(jnp.abs(scale) / jnp.sqrt(jnp.abs(var) + 1e-3)))
    out = folded.apply(values, x)
    np.testing.assert_allclose(out, expected, atol=1e-6 * (1 + size + parts))


def test_bfloat16_keeps_its_dtypes():
    model = Layers(dtype=jnp.bfloat16)
    x = X.astype(jnp.bfloat16)
    variables = trained(jax.eval_shape(model.init, jax.random.key(0), x))
    folded, values, _ = fold_batch_norm(model, x, variables=variables)
    before, after = (
        jax.eval_shape(model.apply, variables, x),
        jax.eval_shape(folded.apply, values, x),
    )
    assert before == after
    assert {leaf.dtype for leaf in jax.tree.leaves(values)} == {jnp.dtype("float32")}


class NnxNet(nnx.Module):
    def __init__(self, rngs, *, bias=False):
        self.conv = nnx.Conv(4, 4, (3, 3), use_bias=bias, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.bn(self.conv(x))))


@pytest.mark.parametrize("bias", [False, True])
def test_nnx(bias):
    model = NnxNet(nnx.Rngs(0), bias=bias)
    nnx.update(model, trained(nnx.state(model, (nnx.Param, nnx.BatchStat))))
    kernel = model.conv.kernel[...]
    folded, report = fold_batch_norm(model, X)
    assert [c.path for c in report.changes] == ["bn"]
    assert sorted(str(p[-1]) for p, _ in nnx.to_flat_state(nnx.state(folded, nnx.Param))) == [
        "bias",
        "kernel",
    ]
    assert not nnx.state(folded, nnx.BatchStat)
    # The user's model is as it was, in training mode too.
    assert model.conv.kernel[...] is kernel
    assert not model.dropout.deterministic
    model.eval()
    np.testing.assert_allclose(folded(X), model(X), atol=1e-5)


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(NnxNet, in_axes=0, out_axes=0)(rngs.split(3))

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


def test_stacked_layers():
    model = Stack(nnx.Rngs(0))
    nnx.update(model, trained(nnx.state(model, (nnx.Param, nnx.BatchStat))))
    folded, report = fold_batch_norm(model, X)
    assert [(c.path, c.after) for c in report.changes] == [("blocks/bn", "part of blocks/conv")]
    model.eval()
    run = nnx.jit(lambda model: model(X))
    np.testing.assert_allclose(run(folded), run(model), atol=1e-5)

    class LinenStack(nn.Module):
        axis: int

        @nn.compact
        def __call__(self, x):
            body = lambda layer, x, _: (layer(x), None)
            axes = {"params": self.axis, "batch_stats": self.axis}
            scan = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=2)
            block = nn.Sequential([nn.Dense(4, use_bias=False), bn(None)], name="block")
            return scan(block, x, None)[0]

    linen = LinenStack(0)
    variables = trained(linen.init(jax.random.key(0), X))
    new, values, _ = fold_batch_norm(linen, X, variables=variables)
    np.testing.assert_allclose(
        jax.jit(new.apply)(values, X), jax.jit(linen.apply)(variables, X), atol=1e-5
    )
    other = LinenStack(1)
    variables = other.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"its statistics .* don't match the kernel"):
        fold_batch_norm(other, X, variables=variables)


class Stays(nn.Module):
    """Norms that can't be folded, each for another reason, behind one that can."""

    @nn.compact
    def __call__(self, x, train=False):
        x = bn("front")(x)
        y = nn.Conv(4, (1, 1), name="used")(x)
        x = bn("of_used")(y) + y
        x = bn("of_sum")(x)
        x = bn("of_relu")(nn.relu(nn.Conv(4, (1, 1), name="ahead")(x)))
        shared = nn.Conv(4, (1, 1), name="shared")
        x = bn("of_shared")(shared(x)) + shared(jnp.sin(x))
        tied = bn("tied")
        x = tied(nn.Conv(4, (1, 1), name="one")(x)) + tied(nn.Conv(4, (1, 1), name="two")(x))
        x = bn("of_group_norm")(nn.GroupNorm(2, name="group_norm")(x))
        x = bn("of_weight_norm")(nn.WeightNorm(nn.Dense(4, name="inner"), name="wn")(x))
        x = bn("of_general")(nn.DenseGeneral(4, name="general")(x))
        x = bn("rows", axis=1)(nn.Conv(4, (1, 1), name="of_rows")(x))
        conv = nn.Conv(4, (1, 1), name="in_training")
        x = nn.BatchNorm(use_running_average=False, name="own_batch")(conv(x))
        return bn("last")(nn.Conv(4, (1, 1), name="end")(x))


def test_what_stays_and_why():
    model = Stays()
    variables = trained(model.init(jax.random.key(0), X))
    folded, values, report = fold_batch_norm(model, X, variables=variables)
    assert [c.path for c in report.changes] == ["last"]
    relu = "its input comes from a maximum, such as ReLU, between it and ahead"
    assert dict(report.left) == {
        "front": "its input comes from the model's input",
        "of_used": "what used gives is used elsewhere too",
        "of_sum": "its input comes from an addition between it and used, of_used",
        "of_relu": relu,
        "of_shared": "shared is shared: it is called without this norm too",
        "tied": "shared, and behind several layers: one, two",
        "of_group_norm": "group_norm, a GroupNorm, is ahead of it",
        "of_weight_norm": "the kernel of inner is made by a WeightNorm",
        "of_general": "general is a DenseGeneral, whose kernel is not known",
        "rows": "it normalises the axis 1, and layers give their channels last",
        "own_batch": "it takes the batch's statistics; call the model for evaluation, as with "
        "train=False",
    }
    out, _ = folded.apply(values, X, mutable=["batch_stats"])
    expected, _ = model.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_shared_pairs_are_folded_once():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.net = NnxNet(rngs)

        def __call__(self, x):
            return self.net(self.net(x))

    model = Twice(nnx.Rngs(0))
    nnx.update(model, trained(nnx.state(model, (nnx.Param, nnx.BatchStat))))
    folded, _ = fold_batch_norm(model, X)
    model.eval()
    np.testing.assert_allclose(folded(X), model(X), atol=1e-5)


def test_a_kernel_that_two_layers_hold_stays():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = NnxNet(rngs), NnxNet(rngs)
            self.b.conv.kernel = self.a.conv.kernel
            self.end = NnxNet(rngs)

        def __call__(self, x):
            return self.end(self.b(self.a(x)))

    model = Tied(nnx.Rngs(0))
    folded, report = fold_batch_norm(model, X)
    assert [c.path for c in report.changes] == ["end/bn"]
    assert dict(report.left)["b/bn"] == "b/conv shares its kernel or bias with another layer"
    model.eval()
    np.testing.assert_allclose(folded(X), model(X), atol=1e-5)


def test_after_less_bn():
    class Branch(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = bn("bn1")(nn.Conv(4, (1, 1), use_bias=False, name="conv1")(x))
            return x + bn("bn2")(nn.Conv(4, (1, 1), use_bias=False, name="conv2")(nn.relu(y)))

    for compensation in (None, "scaled_ws"):
        model, _ = less_bn(Branch(), X, compensation=compensation)
        variables = trained(model.init(jax.random.key(0), X))
        folded, values, report = fold_batch_norm(model, X, variables=variables)
        assert [c.path for c in report.changes] == ["bn2"]
        np.testing.assert_allclose(folded.apply(values, X), model.apply(variables, X), atol=1e-5)
    model, _ = less_bn(Branch(), X, patterns="bn1", compensation="scaled_ws")
    again, _ = less_bn(model, X, patterns="bn2", compensation="scaled_ws")
    with pytest.raises(
        ValueError, match="nothing in the model is a batch norm that could be folded"
    ):
        fold_batch_norm(again, X, variables=again.init(jax.random.key(0), X))


def test_wrong_arguments():
    net = NnxNet(nnx.Rngs(0))
    with pytest.raises(TypeError, match="variables= is for linen"):
        fold_batch_norm(net, X, variables={})
    with pytest.raises(TypeError, match=r"a linen model needs variables=.*got NoneType"):
        fold_batch_norm(Layers(), X)
    with pytest.raises(TypeError, match="model must be a linen or nnx module, got int"):
        fold_batch_norm(3, X)
    variables = jax.eval_shape(Layers().init, jax.random.key(0), X)
    with pytest.raises(TypeError, match="folding needs the trained arrays"):
        fold_batch_norm(Layers(), X, variables=variables)
    variables = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), variables)
    with pytest.raises(ValueError, match=r"bn1 \(variables hold nothing at its path\)"):
        fold_batch_norm(Layers(), X, variables={"params": variables["params"]})
    training = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"Looked at: layers/0 \(Linear\)"):
        fold_batch_norm(training, X)


class _Tied(nnx.Module):
    """A layer whose kernel the model reads itself, and one that it doesn't."""

    def __init__(self, read):
        rngs = nnx.Rngs(0)
        self.a, self.b = (nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(2))
        self.n1, self.n2 = (nnx.BatchNorm(4, rngs=rngs) for _ in range(2))
        self.read = read

    def __call__(self, x):
        x = nnx.relu(self.n2(self.b(x)))
        y = self.n1(self.a(x))
        if self.read == "tied":
            return y @ self.a.kernel[...].T
        return (y, (self.a.kernel[...] ** 2).sum()) if self.read == "penalty" else y


@pytest.mark.parametrize("read", ["tied", "penalty"])
def test_a_kernel_that_the_model_reads_itself_is_left(read):
    model = _Tied(read)
    for norm in (model.n1, model.n2):
        norm.var.set_value(jnp.full(4, 4.0))
    x = jnp.ones((2, 4)) * jnp.arange(4.0)[None]
    folded, report = fold_batch_norm(model, jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert [change.path for change in report.changes] == ["n2"]
    assert report.left == (
        ("n1", "the model reads the kernel or bias of a itself, beside calling it"),
    )
    model.eval()
    for got, wanted in zip(jax.tree.leaves(folded(x)), jax.tree.leaves(model(x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


class _LinenTied(nn.Module):
    @nn.compact
    def __call__(self, x):
        a = nn.Dense(4, use_bias=False, name="a")
        y = nn.BatchNorm(use_running_average=True, name="n1")(a(x))
        y = nn.relu(y) @ a.variables["params"]["kernel"].T
        return nn.BatchNorm(use_running_average=True, name="n2")(nn.Dense(4, name="b")(y))


def test_a_kernel_that_a_linen_model_reads_itself_is_left():
    x = jax.random.normal(jax.random.key(1), (3, 4))
    variables = _LinenTied().init(jax.random.key(0), x)
    variables["batch_stats"]["n1"]["var"] = jnp.full(4, 4.0)
    model, folded, report = fold_batch_norm(_LinenTied(), x, variables=variables)
    assert [change.path for change in report.changes] == ["n2"]
    wanted = _LinenTied().apply(variables, x)
    np.testing.assert_allclose(model.apply(folded, x), wanted, rtol=1e-5, atol=1e-5)
