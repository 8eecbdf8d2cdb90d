"""Loading the weights of one model into another, by path."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import boostax
from boostax.models.less_bn import less_bn
from boostax.models.load_weights import LoadReport, load_weights

X = jnp.ones((2, 4, 4, 4))


class Net(nnx.Module):
    def __init__(self, rngs, width=4):
        kinds = {"use_bias": False, "rngs": rngs}
        self.convs = nnx.List([nnx.Conv(4, 4, (1, 1), **kinds), nnx.Conv(4, 4, (1, 1), **kinds)])
        self.bns = nnx.List([nnx.BatchNorm(4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.fc = nnx.Linear(4, width, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.bns[0](self.convs[0](x)))
        return self.fc(x + self.dropout(self.bns[1](self.convs[1](y))))


def sources(model):
    state = nnx.state(model)
    pure = nnx.to_pure_dict(state)
    yield model
    yield state
    yield pure
    yield flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(text_keys(pure)))
    old = jax.tree.map(lambda leaf: {"value": leaf}, pure)
    yield old


def text_keys(tree):
    if not isinstance(tree, dict):
        is_key = jnp.issubdtype(tree.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(tree) if is_key else tree)
    return {str(key): text_keys(value) for key, value in tree.items()}


def test_a_checkpoint_of_the_original_loads_into_the_rewritten_model():
    original = Net(nnx.Rngs(1))
    original.bns[0].bias[...] = jnp.arange(4.0)
    target, _ = less_bn(Net(nnx.Rngs(2)), X)
    for source in sources(original):
        loaded, report = load_weights(target, source)
        assert set(report.dropped) == {"bns/0/mean", "bns/0/scale", "bns/0/var"}
        assert report.missing == report.mismatched == ()
        assert len(report.loaded) == 9
        assert loaded.bns[0].bias[...].tolist() == [0, 1, 2, 3]
        for path in ("kernel", "bias"):
            np.testing.assert_array_equal(
                getattr(loaded.fc, path)[...], getattr(original.fc, path)[...]
            )
    # The target and its random state are as they were, and nothing is shared with the source.
    assert target.bns[0].bias[...].tolist() == [0, 0, 0, 0]
    assert loaded.dropout.rngs.key[...] == target.dropout.rngs.key[...]
    loaded, _ = load_weights(target, original)
    assert loaded.fc.kernel[...] is not original.fc.kernel[...]


def test_train_states():
    model = Net(nnx.Rngs(0))
    step = boostax.train_step(lambda m, x: jnp.mean(m(x) ** 2), optax.sgd(0.1))
    state = step.init(model)
    loaded, report = load_weights(Net(nnx.Rngs(1)), state)
    assert len(report.loaded) == 12
    np.testing.assert_array_equal(loaded.fc.kernel[...], model.fc.kernel[...])
    dense = nn.Dense(2)
    variables = dense.init(jax.random.key(0), X)
    linen = boostax.train_step(lambda params, x: jnp.mean(x), optax.sgd(0.1)).init(
        variables["params"]
    )
    loaded, _ = load_weights(dense.init(jax.random.key(1), X), linen)
    np.testing.assert_array_equal(loaded["params"]["kernel"], variables["params"]["kernel"])


def test_missing_and_mismatched():
    source = {
        "conv": {"kernel": jnp.ones(3)},
        "fc": {"kernel": jnp.ones((3, 2))},
        "old": jnp.ones(1),
    }
    target = {
        "conv": {"kernel": jnp.zeros(3, jnp.bfloat16)},
        "fc": {"kernel": jnp.zeros((3, 5)), "bias": jnp.zeros(5)},
    }
    with pytest.raises(
        ValueError,
        match=r"fc/bias is missing from source; fc/kernel has shape \(3, 2\) in source, \(3, 5\) in",
    ):
        load_weights(target, source)
    with pytest.raises(
        ValueError, match=r"load_weights: fc/bias is missing from source. Name what"
    ):
        load_weights(target, source, allow_missing="fc/kernel")
    for allowed in (True, "fc/*", ["fc/kernel", "*/bias"]):
        loaded, report = load_weights(target, source, allow_missing=allowed)
        assert report == LoadReport(
            ("conv/kernel",), ("old",), ("fc/bias",), (("fc/kernel", (3, 2), (3, 5)),)
        )
        assert loaded["conv"]["kernel"].dtype == jnp.bfloat16
        assert loaded["conv"]["kernel"].tolist() == [1, 1, 1]
        assert loaded["fc"]["kernel"].shape == (3, 5)
    assert str(report).splitlines()[0] == "load_weights: 1 loaded, 3 not"
    assert "shape (3, 2) in the source, (3, 5) in the target" in str(report)


def test_wrong_arguments():
    target = {"a": jnp.zeros(2)}
    with pytest.raises(
        ValueError, match=r"no path of target is in source. target: a; source: params/a"
    ):
        load_weights(target, {"params": {"a": jnp.ones(2)}}, allow_missing=True)
    with pytest.raises(TypeError, match="source must be an nnx module"):
        load_weights(target, "checkpoint.msgpack")
    with pytest.raises(TypeError, match="allow_missing must be path patterns"):
        load_weights(target, target, allow_missing=3)


def test_abstract_targets_and_linen_collections():
    model = nn.Sequential([nn.Dense(3), nn.BatchNorm(True)])
    source = model.init(jax.random.key(0), X)
    target = jax.eval_shape(model.init, jax.random.key(1), X)
    loaded, report = load_weights(target, jax.tree.map(np.asarray, source))
    jax.tree.map(np.testing.assert_array_equal, loaded, source)
    assert "batch_stats/layers_1/mean" in report.loaded


NAMES = st.sets(st.sampled_from(["a", "b", "c", "d", "e"]))


@given(NAMES, NAMES)
def test_every_path_is_told_of_once(ours, theirs):
    ours, theirs = ours | {"f"}, theirs | {"f"}
    target = {name: np.zeros(1, np.float32) for name in ours}
    source = {name: np.ones(1, np.float32) for name in theirs}
    loaded, report = load_weights(target, source, allow_missing=True)
    assert set(report.loaded) == ours & theirs
    assert set(report.missing) == ours - theirs
    assert set(report.dropped) == theirs - ours
    assert {name for name in ours if loaded[name][0] == 1} == ours & theirs
