"""AutoBoost.model: the rewrites that a config asks for, and the model to evaluate with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax import AutoBoost
from tests.models import data, residual

X = jax.ShapeDtypeStruct((4, data.FEATURES), jnp.float32)
BATCH = jax.tree.map(lambda leaf: leaf[0], data.batches(1))


def boosted(mode="manual", **section):
    flags = {"mode": mode, **({"less_bn": True} if mode == "manual" else {})}
    return AutoBoost("O0", {"boost": flags, "less_bn": {"gc_flag": False, **section}})


def nnx_net():
    return residual.NnxNet(rngs=nnx.Rngs(0))


def changes(report):
    return [(change.path, change.after) for change in report.changes]


@pytest.mark.quick
def test_it_does_what_the_section_says():
    model, report = boosted().model(nnx_net(), X)
    assert changes(report) == [("norm1", "bias"), ("head", "NormalizedLinear")]
    assert report.rewrite == "less_bn, norm_head"
    assert isinstance(model.head, boostax.NormalizedLinear)
    _, report = boosted(fn_flag=False, keep="none", bias=False).model(nnx_net(), X)
    assert [path for path, _ in changes(report)] == ["norm1", "norm2"]
    _, report = boosted(fn_flag=False, patterns=["norm2"]).model(nnx_net(), X)
    assert [path for path, _ in changes(report)] == ["norm2"]
    model, _ = boosted(multiplier_init=1.0, head="head").model(nnx_net(), X)
    assert float(model.head.multiplier.get_value()) == 1.0


def test_a_level_asks_for_it_and_off_leaves_the_model():
    _, report = AutoBoost("O1").model(nnx_net(), X)
    assert len(report.changes) == 2
    net = nnx_net()
    same, report = AutoBoost("O0").model(net, X)
    assert same is net
    assert report.notes == ("less_bn is off, so the model stays as it is",)
    function = lambda x: x
    assert AutoBoost("O0").model(function)[0] is function


def test_a_rewrite_that_finds_nothing():
    net = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"less_bn: nothing in the model .* Looked at"):
        boosted().model(net, X)
    _, report = AutoBoost("O1").model(net, X)
    assert report.notes[0].startswith("less_bn changed nothing")
    assert len(report.changes) == 1  # the head
    odd = nnx.Sequential(
        nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.tanh, lambda x: x @ jnp.ones((3, 2))
    )
    _, report = AutoBoost("O1").model(odd, X)
    assert [note.split(":")[0] for note in report.notes] == [
        "less_bn changed nothing",
        "norm_head changed nothing",
    ]
    with pytest.raises(TypeError, match="must be a linen or nnx module"):
        boosted().model(lambda x: x, X)
    with pytest.raises(ValueError, match="state goes with inference=True"):
        boosted().model(net, X, state=1)
    with pytest.raises(TypeError, match=r"state must be a boostax.TrainState"):
        boosted().model(nnx_net(), X, inference=True, state=1)


def test_it_is_in_the_description():
    boost = boosted()
    _, report = boost.model(nnx_net(), X)
    told = str(boost.describe(report=report))
    assert "less_bn, norm_head: 2 layers changed" in told
    assert "boost.model(model, *inputs) applies it" in told
    assert boost.describe().model is None


@pytest.mark.parametrize("fold", [False, True])
def test_an_nnx_model_to_evaluate_with(fold):
    boost = boosted(fold=fold)
    net = nnx_net()
    model, _ = boost.model(net, X)
    step = boost.train_step(residual.nnx_loss, boost.optimizer(optax.sgd(0.1), model))
    state, _ = step(step.init(model), BATCH)
    trained = state.merge(model)
    trained.eval()
    for given in (net, model):  # rewritten already, or not yet
        last, report = boost.model(given, X, inference=True, state=state)
        np.testing.assert_allclose(last(BATCH["x"]), trained(BATCH["x"]), rtol=1e-4, atol=1e-5)
        assert ("norm2", "part of second") in changes(report) or not fold
    bare, _ = boost.model(net, X, inference=True)
    assert bare.norm2.use_running_average


@pytest.mark.parametrize("fold", [False, True])
def test_a_linen_model_to_evaluate_with(fold):
    boost = boosted(fold=fold)
    net, _ = boost.model(residual.LinenNet(), X)
    variables = net.init(jax.random.key(0), BATCH["x"])

    def loss(params, batch, *, model_state):
        out, new = net.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return jnp.mean(out**2), boostax.LossAux(model_state=new)

    step = boost.train_step(
        loss, boost.optimizer(optax.sgd(0.1), variables["params"]), has_aux=True
    )
    state = step.init(variables["params"], model_state={"batch_stats": variables["batch_stats"]})
    state, _ = step(state, BATCH)
    trained = {"params": state.params, **state.model_state}
    expected = net.apply(trained, BATCH["x"], train=False)
    for given in (residual.LinenNet(), net):
        last, report = boost.model(given, X, inference=True, state=state, train=False)
        np.testing.assert_allclose(last(BATCH["x"], train=False), expected, rtol=1e-4, atol=1e-5)
        assert any(after.startswith("part of") for _, after in changes(report)) == fold


class Inverted(nnx.Module):
    """Expand, depthwise, project; a second pass over what less_bn left would take another norm."""

    def __init__(self, rngs):
        conv = lambda i, o, groups=1: nnx.Conv(
            i, o, (3, 3), use_bias=False, feature_group_count=groups, rngs=rngs
        )
        self.up, self.deep, self.down = conv(4, 8), conv(8, 8, 8), conv(8, 4)
        self.bn1, self.bn2, self.bn3 = (nnx.BatchNorm(n, rngs=rngs) for n in (8, 8, 4))
        self.fc = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu6(self.bn1(self.up(x)))
        y = self.bn3(self.down(nnx.relu6(self.bn2(self.deep(y)))))
        return self.fc((x + y).mean((1, 2)))


@pytest.mark.parametrize("section", [{}, {"head": "fc"}, {"patterns": ["bn2"]}, {"bias": False}])
def test_what_was_rewritten_is_not_rewritten_again(section):
    boost = boosted(**section)
    x = jnp.linspace(-1, 1, 2 * 4 * 4 * 4).reshape(2, 4, 4, 4)
    model, _ = boost.model(Inverted(nnx.Rngs(0)), x)
    state = boost.train_step(lambda m, x: m(x).sum(), optax.sgd(0.0)).init(model)
    wanted = state.merge(model)
    wanted.eval()
    again, report = boost.model(model, x, inference=True, state=state)
    np.testing.assert_array_equal(again(x), wanted(x))
    assert changes(report) == []
    assert [note.split(" ")[0] for note in report.notes] == ["less_bn", "norm_head"]
    first, report = boost.model(Inverted(nnx.Rngs(0)), x, inference=True, state=state)
    np.testing.assert_array_equal(first(x), wanted(x))
    assert [path for path, _ in changes(report)] == ["bn2", "fc"]


def test_a_linen_model_to_evaluate_with_outlives_the_next_step():
    boost = boosted()
    net, _ = boost.model(residual.LinenNet(), X)
    variables = net.init(jax.random.key(0), BATCH["x"])
    step = boostax.train_step(residual.linen_loss, optax.sgd(0.1), has_aux=True)
    stats = {"batch_stats": variables["batch_stats"]}
    state = step.init(variables["params"], model_state=stats)
    last, _ = boost.model(net, X, inference=True, state=state, train=False)
    before = last(BATCH["x"], train=False)
    step(state, BATCH)  # may write over the state that it is given
    np.testing.assert_array_equal(last(BATCH["x"], train=False), before)


class TwoHeads(nnx.Module):
    def __init__(self):
        self.first, self.second = (nnx.Linear(4, 3, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        return self.first(x), self.second(x)


def test_messages_name_the_keys_of_the_config():
    with pytest.raises(ValueError, match=r"\(In a config patterns= is less_bn.patterns, keep= is"):
        boosted().model(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), X)
    _, report = AutoBoost("O1").model(TwoHeads(), X)
    assert "several dense layers give an output" in report.notes[1]
    assert "path= is less_bn.head" in report.notes[1]
