"""Parameter groups: nested suffixes in forward order, layers that never split, errors."""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from boostax import forward_order, parameter_groups
from boostax._tree import leaf_paths


def _stack(layers, size=2):
    return {
        f"layer_{i}": {"kernel": jnp.ones((size, size)), "bias": jnp.ones(size)}
        for i in range(layers)
    }


def _modules(segment):
    return list(dict.fromkeys(path.rpartition("/")[0] for path in segment))


def test_twelve_layers_in_numeric_order():
    groups = parameter_groups(_stack(12), 3)
    assert [_modules(s) for s in groups.segments] == [
        [f"layer_{i}" for i in range(start, start + 4)] for start in (0, 4, 8)
    ]
    assert groups.trained[0] == tuple(itertools.chain(*groups.segments))
    assert groups.trained[1] == groups.segments[1] + groups.segments[2]
    assert groups.trained[2] == groups.segments[2]


def test_leaves_at_the_root_in_numeric_order():
    groups = parameter_groups({f"layer_{i}": jnp.ones(2) for i in range(12)}, 3)
    assert groups.segments[1] == ("layer_4", "layer_5", "layer_6", "layer_7")


def test_lists_of_weights():
    pairs = [(jnp.ones((2, 2)), jnp.ones(2)) for _ in range(11)]
    assert parameter_groups(pairs, 11).segments[2] == ("2/0", "2/1")
    flat = list(itertools.chain(*pairs))
    assert parameter_groups(flat, 11).segments[1] == ("2", "3")


def test_numbered_pairs_at_the_root():
    params = {"w1": jnp.ones((2, 2)), "b1": jnp.ones(2), "w2": jnp.ones((2, 2)), "b2": jnp.ones(2)}
    groups = parameter_groups(params, 2, order=["w1", "b1", "w2", "b2"])
    assert groups.segments == (("w1", "b1"), ("w2", "b2"))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("stem", "middle", "early"):
            x = nn.Dense(3, name=name)(x)
            x = nn.BatchNorm(use_running_average=False, name=f"norm_{name}")(x)
        return nn.Dense(1, name="a_head")(x)


def test_a_layer_keeps_its_bias_and_its_norm():
    net, x = Net(), jnp.ones((4, 2))
    variables = net.init(jax.random.key(0), x)

    def loss_fn(params, batch):
        y, _ = net.apply({**variables, "params": params}, batch, mutable=["batch_stats"])
        return jnp.mean(y**2)

    order = forward_order(loss_fn, variables["params"], x)
    groups = parameter_groups(variables["params"], 4, order=order)
    assert [_modules(s) for s in groups.segments] == [
        ["stem", "norm_stem"],
        ["middle", "norm_middle"],
        ["early", "norm_early"],
        ["a_head"],
    ]
    with pytest.raises(ValueError, match=r"n=5 groups.*only 4 layers.*stem, middle, early, a_head"):
        parameter_groups(variables["params"], 5, order=order)


def test_a_norm_that_comes_first_joins_the_layer_after_it():
    params = {
        "norm": {"scale": jnp.ones(2)},
        "dense": {"kernel": jnp.ones((2, 2))},
        "head": {"kernel": jnp.ones((2, 1))},
    }
    groups = parameter_groups(params, 2, order=["norm/scale", "dense/kernel", "head/kernel"])
    assert groups.segments == (("norm/scale", "dense/kernel"), ("head/kernel",))


def test_nnx_state():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.head = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(self.stem(x)))

    model = Model(nnx.Rngs(0))
    order = forward_order(lambda model, batch: jnp.mean(model(batch)), model, jnp.ones((4, 2)))
    params = nnx.state(model, nnx.Param)
    groups = parameter_groups(params, 2, order=order)
    assert _modules(groups.segments[0]) == ["stem", "norm"]
    mask = groups.trainable(1)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert dict(zip(leaf_paths(mask), jax.tree.leaves(mask), strict=True)) == {
        **{"stem/kernel": False, "stem/bias": False, "norm/scale": False, "norm/bias": False},
        **{"head/kernel": True, "head/bias": True},
    }


def test_by_parameters_balances_the_cost():
    sizes = [1, 1, 1, 1, 8, 4]
    params = {f"layer_{i}": jnp.ones(size) for i, size in enumerate(sizes)}
    groups = parameter_groups(params, 2, by="parameters")
    # 16 numbers: half lies before layer 4 (4 numbers) or layer 5 (12); the first is taken at a tie.
    assert groups.segments[1] == ("layer_4", "layer_5")
    assert parameter_groups(params, 6, by="parameters").trained[5] == ("layer_5",)


def test_patterns():
    params = {"enc": _stack(2), "dec": _stack(1), "head": {"kernel": jnp.ones((2, 1))}}
    groups = parameter_groups(
        params, patterns=["enc/*", re.compile("^dec/"), lambda path: "head" in path]
    )
    assert [len(s) for s in groups.segments] == [4, 2, 1]
    assert groups.trained[1] == ("dec/layer_0/bias", "dec/layer_0/kernel", "head/kernel")
    with pytest.raises(ValueError, match="split the layer 'dec/layer_0'"):
        parameter_groups(params, patterns=["*/bias", "*"])
    with pytest.raises(ValueError, match="no pattern fits the leaf 'dec/layer_0/bias'"):
        parameter_groups(params, patterns=["enc/*", "head/*"])
    with pytest.raises(ValueError, match="matches no leaf"):
        parameter_groups(params, patterns=["encoder/*", "*"])
    with pytest.raises(ValueError, match="earlier patterns already took"):
        parameter_groups(params, patterns=["*", "head/*"])
    with pytest.raises(ValueError, match="n is 3, but there are 1 patterns"):
        parameter_groups(params, 3, patterns=["*"])


def _from_names(names):
    params = {}
    for name in names:
        *modules, leaf = str(name).split(".")
        node = params
        for module in modules:
            node = node.setdefault(module, {})
        node[leaf] = np.ones((2, 2) if leaf in ("weight", "embedding_table") else 2)
    return params


def test_resnet_splits_as_in_the_reference(reference):
    values = reference("b_split_parameters_groups")
    names = [str(name).replace(".", "/") for name in values["resnet18_names"]]
    params = _from_names(values["resnet18_names"])
    for n in (1, 2, 5, 10, 20):
        groups = parameter_groups(params, n, order=names)
        firsts = [names.index(group[0]) for group in groups.trained]
        assert firsts == values[f"resnet18_g{n}_first"].tolist()
    # With more groups than blocks the reference silently makes every group the whole network.
    for n in (25, 60):
        assert not values[f"resnet18_g{n}_first"].any()
        with pytest.raises(ValueError, match=f"n={n} groups.*only 21 layers"):
            parameter_groups(params, n, order=names)


def test_networks_without_norms_are_split_by_layer(reference):
    # The reference glues conv1, conv2 and fc1 together, because it counts tensors up to three.
    values = reference("b_split_parameters_groups")
    names = [str(name).replace(".", "/") for name in values["lenet5_names"]]
    assert values["lenet5_g2_first"].tolist() == [0, 4]
    groups = parameter_groups(_from_names(values["lenet5_names"]), 5, order=names)
    assert [names.index(group[0]) for group in groups.trained] == [0, 1, 2, 4, 6]


@given(layers=st.integers(1, 15), data=st.data())
def test_every_leaf_is_in_one_segment_and_groups_are_nested(layers, data):
    n = data.draw(st.integers(1, layers))
    by = data.draw(st.sampled_from(["count", "parameters"]))
    params = {
        f"layer_{i}": {"kernel": np.ones((1 + i % 3, 2)), "bias": np.ones(2)} for i in range(layers)
    }
    groups = parameter_groups(params, n, by=by)
    assert len(groups) == n
    assert sorted(itertools.chain(*groups.segments)) == sorted(leaf_paths(params))
    assert all(groups.segments)
    for earlier, later in itertools.pairwise(groups.trained):
        assert earlier[-len(later) :] == later
        assert len(later) < len(earlier)
    modules = [set(_modules(segment)) for segment in groups.segments]
    assert sum(map(len, modules)) == layers


def test_equal_groups_are_equal_and_hashable():
    abstract = jax.eval_shape(lambda: _stack(4))
    assert parameter_groups(_stack(4), 2) == parameter_groups(abstract, 2)
    assert hash(parameter_groups(_stack(4), 2)) == hash(parameter_groups(abstract, np.int64(2)))
    assert parameter_groups(_stack(4), 2) != parameter_groups(_stack(4), 4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"n": 0}, ValueError, "n must be >= 1, got 0"),
        ({"n": 2.0}, TypeError, "n must be an integer"),
        ({"n": True}, TypeError, "n must be an integer"),
        ({"n": None}, ValueError, "n .the number of groups. is needed"),
        ({"n": 4}, ValueError, "n=4 groups.*only 3 layers"),
        ({"n": 2, "by": "cost"}, ValueError, "by must be 'count' or 'parameters', got 'cost'"),
        ({"n": 2, "order": ["layer_0/kernel"]}, ValueError, "missing: layer_0/bias"),
        ({"n": 2, "order": "layer_0"}, TypeError, "order must be a sequence"),
        ({"n": 2, "patterns": []}, TypeError, "patterns must be a non-empty sequence"),
    ],
)
def test_bad_arguments(arguments, error, text):
    arguments = dict(arguments)
    with pytest.raises(error, match=text):
        parameter_groups(_stack(3), arguments.pop("n"), **arguments)


def test_unclear_orders_are_refused():
    with pytest.raises(ValueError, match=r"at the top: Conv_0, Dense_0.*forward_order\(loss_fn"):
        parameter_groups({"Conv_0": {"kernel": 1.0}, "Dense_0": {"kernel": 1.0}}, 2)
    with pytest.raises(ValueError, match="in 'block_0': attn, mlp"):
        parameter_groups({"block_0": {"attn": {"kernel": 1.0}, "mlp": {"kernel": 1.0}}}, 2)
    with pytest.raises(ValueError, match="Did you mean 'layer_1/kernel'"):
        parameter_groups(_stack(2), 2, order=[*leaf_paths(_stack(2))[:3], "layer_1/kernl"])
    with pytest.raises(ValueError, match="no leaves"):
        parameter_groups({}, 1)
