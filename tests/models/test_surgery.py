"""Replacing layers by path, in nnx and in linen; the report of a rewrite."""

import dataclasses
import functools
import pickle
from collections import namedtuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from boostax.models._calls import called_layers
from boostax.models._surgery_linen import Rule, Substitute, rewrite
from boostax.models._surgery_nnx import named_modules, replace_modules
from boostax.models.report import Change, ModelReport, nothing_matched

X = jnp.ones((2, 4))
Pair = namedtuple("Pair", "left right")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bn = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.bn(x)


class Holder(nnx.Module):
    """Modules in all the places where nnx lets them hang."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = self.again = Block(rngs)
        self.listed = nnx.List([Block(rngs), Block(rngs)])
        self.named = nnx.Dict(x=Block(rngs))
        self.held = nnx.data((Block(rngs), {"k": [Block(rngs)]}, Pair(Block(rngs), 3)))
        self.layers = nnx.Sequential(Block(rngs), nnx.relu)


def test_nnx_modules_are_replaced_wherever_they_hang_and_the_model_stays():
    model = Holder(nnx.Rngs(0))
    before = nnx.state(model)
    norms = [path for path, m in named_modules(model).items() if isinstance(m, nnx.BatchNorm)]
    assert norms == [
        "again/bn",
        "held/0/bn",
        "held/1/k/0/bn",
        "held/2/left/bn",
        "layers/layers/0/bn",
        "listed/0/bn",
        "listed/1/bn",
        "named/x/bn",
    ]
    make = lambda old: nnx.LayerNorm(old.num_features, rngs=nnx.Rngs(0))
    new = replace_modules(model, dict.fromkeys(norms, make))
    kinds = {type(m) for m in named_modules(new).values()}
    assert nnx.BatchNorm not in kinds
    assert nnx.LayerNorm in kinds
    assert new.first is new.again
    assert new.held[2].left.bn.use_bias
    assert new.held[2].right == 3
    assert sum(isinstance(m, nnx.BatchNorm) for m in named_modules(model).values()) == 8
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.state(model)))
    # The copy owns its arrays: training it moves nothing in the user's model.
    new.first.bn.scale[...] = 2 * new.first.bn.scale[...]
    assert model.first.bn.scale[...].tolist() == [1.0] * 4


def test_nnx_root_and_unknown_paths():
    block = Block(nnx.Rngs(0))
    other = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert replace_modules(block, {"": lambda old: other}) is other
    whole = replace_modules(Twins(nnx.Rngs(0)), {"held/0": lambda old: other})
    assert whole.held == (other, other)
    with pytest.raises(KeyError, match="no modules at \\['nothing'\\]"):
        replace_modules(block, {"nothing": lambda old: other})


class Twins(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        block = Block(rngs)
        self.held = nnx.data((block, block))


@dataclasses.dataclass(frozen=True)
class Drop:
    def __call__(self, layer, call, x, *args, **kwargs):
        return x


@dataclasses.dataclass(frozen=True)
class Gain:
    def __call__(self, layer, call, *args, **kwargs):
        gain = layer.param("gain", nn.initializers.constant(3.0), ())
        return gain * call(*args, **kwargs)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.Dense(4, use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not train)(y)
        return x + nn.Dense(4)(nn.relu(y))


class ScanBody(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x, _):
        return LinenBlock(name="block")(x, self.train), None


JitBlock = nn.jit(LinenBlock, static_argnames=("train",))
STACKED = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}


class Net(nn.Module):
    wrap: str

    @nn.compact
    def __call__(self, x, train=True):
        if self.wrap == "plain":
            x = LinenBlock(name="block")(x, train)
        elif self.wrap == "remat":
            x = nn.remat(LinenBlock, static_argnums=(2,))(name="block")(x, train)
        elif self.wrap == "jit":
            x = JitBlock(name="block")(x, train=train)
        elif self.wrap == "vmap":
            many = nn.vmap(LinenBlock, in_axes=(None, None), axis_size=2, **STACKED)
            x = jnp.sum(many(name="block")(x, train), axis=0)
        else:
            x, _ = nn.scan(ScanBody, length=2, **STACKED)(train, name="scan")(x, None)
        return nn.Dense(2)(self.encode(x))

    def encode(self, x):
        return x + 1


WRAPS = ("plain", "remat", "jit", "vmap", "scan")


def without(tree, word):
    return {
        k: without(v, word) if isinstance(v, dict) else v for k, v in tree.items() if word not in k
    }


@pytest.mark.parametrize("wrap", WRAPS)
def test_linen_paths_and_initial_values_stay(wrap):
    model = Net(wrap)
    block = "scan/block" if wrap == "scan" else "block"
    # The original first: a trace that nn.jit kept of it must not be taken for the other.
    was = model.init(jax.random.key(0), X)
    dropped = rewrite(model, [Rule(f"{block}/BatchNorm_0", nn.BatchNorm, Drop())])
    variables = dropped.init(jax.random.key(0), X)
    assert not variables.get("batch_stats")
    expected = without(was["params"], "BatchNorm")
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], expected)

    gained = rewrite(dropped, [Rule(f"{block}/Dense_1", nn.Dense, Gain())])
    variables = gained.init(jax.random.key(0), X)
    inner = functools.reduce(dict.__getitem__, block.split("/"), variables["params"])
    assert sorted(inner) == ["Dense_0", "Dense_1"]
    assert inner["Dense_1"]["gain"].shape == ((2,) if wrap in ("vmap", "scan") else ())
    assert variables["params"]["Dense_0"]["kernel"].shape == (4, 2)

    larger = nn.Sequential([gained, nn.Dense(2)])
    inside = larger.init(jax.random.key(0), X)["params"]["layers_0"]
    assert jax.tree.structure(inside) == jax.tree.structure(variables["params"])


@pytest.mark.parametrize("wrap", ["plain", "jit"])
def test_linen_values(wrap):
    model = rewrite(
        Net(wrap),
        [Rule("block/BatchNorm_0", nn.BatchNorm, Drop()), Rule("block/Dense_1", nn.Dense, Gain())],
    )
    x = jnp.arange(8.0).reshape(2, 4)
    variables = model.init(jax.random.key(0), x)
    p = variables["params"]
    y = nn.relu(x @ p["block"]["Dense_0"]["kernel"]) @ p["block"]["Dense_1"]["kernel"]
    expected = (x + 3 * y + 1) @ p["Dense_0"]["kernel"]
    for out in (model.apply(variables, x), model.bind(variables)(x)):
        np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_linen_module_keeps_its_face():
    rules = [Rule("block/BatchNorm_0", nn.BatchNorm, Drop())]
    model = rewrite(Net("plain"), rules)
    variables = model.init(jax.random.key(0), X)
    assert isinstance(model, Net)
    assert model.wrap == "plain"
    for method in ("encode", Net.encode, model.encode):
        assert model.apply(variables, X, method=method).tolist() == (X + 1).tolist()
    assert rewrite(Net("plain"), rules) == model
    assert hash(pickle.loads(pickle.dumps(model))) == hash(model)
    assert model.clone(wrap="remat") == rewrite(Net("remat"), rules)
    assert repr(model) == repr(Net("plain"))
    assert "Total Parameters: 46" in model.tabulate(jax.random.key(0), X)
    # Rewritten twice is rewritten once with both; the plain module is left as it was.
    assert "batch_stats" in Net("plain").init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="is bound to variables"):
        rewrite(model.bind(variables), rules)


class SetUp(nn.Module):
    """Modules made in setup, in a list and under names."""

    def setup(self):
        self.blocks = [LinenBlock(), LinenBlock()]
        self.head = nn.Dense(2)

    def __call__(self, x, train=True):
        return self.head(self.features(x, train))

    def features(self, x, train=True):
        for block in self.blocks:
            x = block(x, train)
        return x


def test_linen_modules_made_in_setup():
    model = rewrite(SetUp(), [Rule("blocks_1/BatchNorm_0", nn.BatchNorm, Drop())])
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert list(variables["batch_stats"]) == ["blocks_0"]
    assert sorted(variables["params"]) == ["blocks_0", "blocks_1", "head"]
    out = jax.eval_shape(
        lambda v: model.apply(v, X, False, method=SetUp.features, mutable=["batch_stats"]),
        variables,
    )
    assert out[0].shape == X.shape


def test_linen_rules_of_a_larger_module_see_what_inner_ones_left():
    inner = rewrite(Net("plain"), [Rule("block/BatchNorm_0", nn.BatchNorm, Drop())])
    larger = nn.Sequential([inner])
    seen = called_layers(larger, (X,), {}, of=(nn.BatchNorm, nn.Dense))
    assert [layer.path for layer in seen] == [
        "layers_0/block/Dense_0",
        "layers_0/block/Dense_1",
        "layers_0/Dense_0",
    ]
    rules = [
        Rule("layers_0/block/BatchNorm_0", nn.BatchNorm, Gain()),
        Rule("layers_0/block/Dense_1", nn.Dense, Gain()),
    ]
    params = rewrite(larger, rules).init(jax.random.key(0), X)["params"]["layers_0"]
    assert sorted(params["block"]) == ["Dense_0", "Dense_1"]
    assert "gain" in params["block"]["Dense_1"]


def test_linen_substitute_takes_the_layers_place_and_scope():
    norm = Rule("block/BatchNorm_0", nn.BatchNorm, Substitute(nn.GroupNorm(num_groups=2)))
    model = rewrite(Net("plain"), [norm])
    variables = model.init(jax.random.key(0), X)
    assert sorted(variables["params"]["block"]["BatchNorm_0"]) == ["bias", "scale"]
    assert "batch_stats" not in variables
    # Later rules see the substitute.
    again = rewrite(model, [Rule("block/BatchNorm_0", nn.GroupNorm, Gain())])
    params = again.init(jax.random.key(0), X)["params"]["block"]
    assert sorted(params["BatchNorm_0"]) == ["bias", "gain", "scale"]
    kinds = [type(c.layer) for c in called_layers(again, (X,), {}, of=(nn.BatchNorm, nn.GroupNorm))]
    assert kinds == [nn.GroupNorm]


@pytest.mark.parametrize("wrap", WRAPS)
def test_linen_calls_are_seen_with_their_shapes(wrap):
    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    seen = called_layers(Net(wrap), (shape,), {"train": False}, of=nn.BatchNorm)
    # Several times more: a trace that nn.jit kept would show nothing.
    for _ in range(5):
        assert called_layers(Net(wrap), (shape,), {"train": False}, of=nn.BatchNorm) == seen
    path = "scan/block/BatchNorm_0" if wrap == "scan" else "block/BatchNorm_0"
    assert {layer.path for layer in seen} == {path}
    assert seen[0].inputs == seen[0].output == shape
    assert seen[0].layer.use_running_average is True


def test_report():
    first = ModelReport("less_bn", (Change("a", "BatchNorm", "bias", "an earlier one"),))
    second = ModelReport("norm_head", left=(("fc", "no class"),), notes=("all good",))
    both = first + second
    assert both.rewrite == "less_bn, norm_head"
    assert str(both).splitlines()[0] == "less_bn, norm_head: 1 layer changed, 1 layer left"
    assert "an earlier one" in str(both)
    assert str(both).splitlines()[-1] == "note: all good"
    assert str(ModelReport()) == "no layer was changed"
    error = nothing_matched(
        "less_bn", "a batch norm", [(f"l{i}", "Dense") for i in range(40)], "Go."
    )
    assert str(error).startswith(
        "less_bn: nothing in the model is a batch norm. Looked at: l0 (Dense)"
    )
    assert str(error).endswith("l29 (Dense), and 10 more. Go.")
