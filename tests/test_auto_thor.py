"""AutoBoost with thor: its layers, the learning rate of its clip, what it goes with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import boostax
from boostax import AutoBoost, _info
from boostax.errors import ConfigError

MANUAL = {"mode": "manual", "thor": True}
SECTION = {"learning_rate": 0.1, "frequency": 3}


@pytest.fixture
def params():
    key = jax.random.key(0)
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(jax.random.fold_in(key, i), (3, 3)) / 2,
            "bias": jnp.zeros(3),
        }
        for i in range(2)
    }


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return jnp.mean((x - 1) ** 2)


@pytest.fixture
def batches():
    return [jax.random.normal(jax.random.key(10 + i), (4, 3)) for i in range(4)]


def names(tx):
    return [info.name for info in _info.walk(tx)]


def run(step, state, batches):
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def manual(**sections):
    return {"boost": MANUAL, "thor": SECTION, **sections}


def test_no_level_has_it():
    assert all("thor" not in AutoBoost(level).enabled for level in ("O0", "O1", "O2"))


def test_with_sgd_and_momentum_it_is_thor(params, batches):
    boost = AutoBoost("O0", manual())
    step, state = boost.start(loss_fn, optax.sgd(0.1, 0.9), params, batches[0])
    layers = boostax.capture_layers(loss_fn, params, batches[0])
    own = boostax.train_step(loss_fn, boostax.thor(0.1, 0.01, layers=layers, frequency=3))
    ours, _ = run(step, state, batches)
    theirs, _ = run(own, own.init(params), batches)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    # Captured before or by the optimizer, the layers are the same.
    given = boost.optimizer(optax.sgd(0.1, 0.9), params, layers=layers)
    info = _info.find(given, "scale_by_thor")
    assert info is not None
    assert info.static == layers == step.settings.layers
    told = boost.describe(step=step, state=ours, batch=batches[0])
    assert "dense: A 4 x 4, G 3 x 3" in str(told)
    assert told.step is not None
    assert told.step.variants[0].flops > told.step.plain.flops


def test_it_goes_with_window_freezing_centralization_and_clip(params, batches):
    config = manual(
        boost={**MANUAL, "grad_accumulation": True, "grad_freeze": True, "centralize": True},
        grad_accumulation={"every": 2},
        grad_freeze={"param_groups": 2, "total_steps": 4, "full_fraction": 0.5, "kind": "ramp"},
        clip={"global_norm": 1.0},
    )
    boost = AutoBoost("O0", config)
    step, state = boost.start(loss_fn, optax.sgd(0.1, 0.9), params, batches[0])
    assert names(step.tx)[:5] == ["accumulate", "freeze", "centralize", "clip", "scale_by_thor"]
    assert boost.describe().order[4].startswith("thor: ")
    state, metrics = run(step, state, batches)
    assert int(metrics["updates"]) == 2
    assert np.isfinite(metrics["loss"])


def test_the_kl_clip_takes_the_named_optimizers_rate(params, batches):
    schedule = {"name": "linear_schedule", "init_value": 0.4, "end_value": 0.1}
    schedule["transition_steps"] = 2
    named = {"name": "sgd", "learning_rate": schedule, "momentum": 0.9}
    config = {"boost": MANUAL, "thor": {"frequency": 3}, "optimizer": named}
    step, state = AutoBoost("O0", config).start(loss_fn, None, params, batches[0])
    layers = boostax.capture_layers(loss_fn, params, batches[0])
    rate = optax.linear_schedule(0.4, 0.1, 2)
    own = boostax.train_step(loss_fn, boostax.thor(rate, 0.01, layers=layers, frequency=3))
    ours, _ = run(step, state, batches)
    theirs, _ = run(own, own.init(params), batches)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_damping_may_be_a_schedule_by_name_or_a_function(params, batches):
    named = {"name": "exponential_decay", "init_value": 0.1, "transition_steps": 1}
    for damping in ({**named, "decay_rate": 0.5}, lambda count: 0.1 * 0.5**count):
        boost = AutoBoost("O0", manual(thor={**SECTION, "damping": damping}))
        tx = boost.optimizer(optax.sgd(0.1), params, loss_fn=loss_fn, batch=batches[0])
        info = _info.find(tx, "scale_by_thor")
        assert info is not None
        np.testing.assert_allclose(info.settings["damping"](jnp.int32(2)), 0.025, rtol=1e-6)


def test_the_layers_are_captured_as_the_section_says(params, batches):
    section = {**SECTION, "block_size": 2, "exclude": ["layer_0/*"], "fisher": "empirical"}
    boost = AutoBoost("O0", manual(thor=section))
    tx = boost.optimizer(optax.sgd(0.1), params, loss_fn=loss_fn, batch=batches[0])
    info = _info.find(tx, "scale_by_thor")
    assert info is not None
    (block,) = info.static.blocks
    assert (block.kernel, block.inputs.pieces) == ("layer_1/kernel", 2)
    # Only the shapes of the batch are looked at.
    abstract = jax.eval_shape(lambda: batches[0])
    again = boost.optimizer(optax.sgd(0.1), params, loss_fn=loss_fn, batch=abstract)
    found = _info.find(again, "scale_by_thor")
    assert found is not None
    assert found.static == info.static


def test_the_true_fisher_and_linen_with_batch_norm(batches):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(linen.BatchNorm(use_running_average=False)(x))

    net = Net()
    variables = net.init(jax.random.key(0), batches[0])
    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(params, x, *, model_state):
        logits, new = net.apply({"params": params, **model_state}, x, mutable=["batch_stats"])
        value = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(4, int)).mean()
        predictive = boostax.Categorical(logits)
        return value, boostax.LossAux(model_state=new, predictive=predictive)

    boost = AutoBoost("O0", manual(thor={**SECTION, "fisher": "true"}))
    step, state = boost.start(
        loss, optax.sgd(0.1), params, batches[0], model_state=rest, rng=0, has_aux=True
    )
    assert step.settings.layers.fisher == "true"
    state, first = step(state, batches[0])
    state, last = step(state, batches[0])
    assert float(last["loss"]) < float(first["loss"])
    fates = {p.path: p.fate for p in boost.describe(params, step.tx).parameters}
    assert "first order" in fates["BatchNorm_0/scale"]


def test_nnx(batches):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    step, state = AutoBoost("O0", manual()).start(loss, optax.sgd(0.1), model, batches[0])
    _, metrics = run(step, state, [batches[0]] * 3)
    assert float(metrics["loss"]) < float(loss(model, batches[0]))


def test_what_is_missing_or_does_not_fit_is_said(params, batches):
    boost = AutoBoost("O0", manual(thor={**SECTION, "block_size": 2}))
    with pytest.raises(ConfigError, match=r"thor needs the layers.*missing: loss_fn, batch"):
        boost.optimizer(optax.sgd(0.1), params)
    with pytest.raises(ConfigError, match=r"missing: batch, params"):
        boost.optimizer(optax.sgd(0.1), loss_fn=loss_fn)
    with pytest.raises(TypeError, match=r"layers must be what boostax.capture_layers returned"):
        boost.optimizer(optax.sgd(0.1), params, layers=3)
    layers = boostax.capture_layers(loss_fn, params, batches[0])
    with pytest.raises(ConfigError, match=r"thor.block_size: is 2, but the layers .* have 256"):
        boost.optimizer(optax.sgd(0.1), params, layers=layers)
    with pytest.raises(ConfigError, match=r"thor.mode: is 'reference', but the layers"):
        AutoBoost("O0", manual(thor={"mode": "reference"})).optimizer(
            optax.sgd(0.1), params, layers=layers
        )
    with pytest.raises(ConfigError, match=r"thor.exclude: has no effect on layers"):
        AutoBoost("O0", manual(thor={**SECTION, "exclude": ["*/bias"]})).optimizer(
            optax.sgd(0.1), params, layers=layers
        )
    with pytest.raises(ConfigError, match=r"thor.learning_rate: the KL clip asks for"):
        AutoBoost("O0", {"boost": MANUAL}).optimizer(optax.sgd(0.1), params, layers=layers)
    with pytest.raises(ConfigError, match=r"thor: .*split_indices"):
        AutoBoost("O0", manual(thor={**SECTION, "split_indices": [7]})).optimizer(
            optax.sgd(0.1), params, layers=layers
        )
    with pytest.raises(ConfigError, match=r"boost.thor: .*the pattern 'head' matches no leaf"):
        AutoBoost("O0", manual(thor={**SECTION, "exclude": ["head"]})).optimizer(
            optax.sgd(0.1), params, loss_fn=loss_fn, batch=batches[0]
        )
    with pytest.raises(ValueError, match=r"thor is on, but tx holds no scale_by_thor"):
        boost.train_step(loss_fn, optax.sgd(0.1))
    # Without the clip no rate is asked for.
    tx = AutoBoost("O0", manual(thor={"clip": False})).optimizer(
        optax.sgd(0.1), params, layers=layers
    )
    assert "scale_by_thor" in names(tx)


ALL = {
    "boost": {"mode": "enable_all"},
    "grad_freeze": {"param_groups": 2},
    "loss_scale_group": {"groups": ["*/bias", "*/kernel"]},
}


def test_enable_all_leaves_it_out_with_the_reason(params, batches):
    base = optax.sgd(0.1)
    capturing = {"loss_fn": loss_fn, "batch": batches[0]}
    for section, given, reason in (
        ({}, capturing, "the KL clip asks for"),
        (SECTION, {}, "thor needs the layers of the loss"),
        (SECTION, {**capturing, "loss_fn": lambda p, x: x.sum()}, "has no dense layer"),
    ):
        boost = AutoBoost("O0", {**ALL, "thor": section})
        tx = boost.optimizer(base, params, **given)
        assert "scale_by_thor" not in names(tx)
        told = boost.describe(params, tx).resolution
        left = {d.technique: d.reason for d in told.decisions if d.state == "left out"}
        assert set(left) == {"loss_scale", "dim_reduce", "thor"}
        assert reason in left["thor"]
        boost.train_step(loss_fn, tx)
    boost = AutoBoost("O0", {**ALL, "thor": SECTION})
    tx = boost.optimizer(base, params, **capturing)
    assert "scale_by_thor" in names(tx)
    told = boost.describe(params, tx).resolution
    left = {d.technique for d in told.decisions if d.state == "left out"}
    assert left == {"dim_reduce", "loss_scale"}
    # A transformation that it did not make holds no reason of its own.
    bare = optax.chain(boostax.centralize(), base)
    (reason,) = (
        d.reason
        for d in boost._resolution_of(bare).decisions
        if d.technique == "thor" and d.state == "left out"
    )
    assert "loss_fn=loss_fn" in reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda layers: boostax.thor(0.1, 0.01, layers=layers), "preconditions already"),
        (lambda layers: optax.lbfgs(), "curvature pairs"),
        (lambda layers: optax.polyak_sgd(1.0), "the loss over the gradient's norm"),
        (lambda layers: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "SAM goes up"),
        (lambda layers: optax.MultiSteps(optax.sgd(0.1), 2), "accumulates by itself"),
        (
            lambda layers: boostax.freeze(
                optax.sgd(0.1), boostax.Freezing([["layer_0/*"], ["layer_1/*"]], [0, 1])
            ),
            "boostax.freeze already",
        ),
    ],
)
def test_optimizers_that_it_does_not_go_with(make, reason, params, batches):
    layers = boostax.capture_layers(loss_fn, params, batches[0])
    with pytest.raises(ConfigError, match=f"thor does not go with this optimizer: .*{reason}"):
        AutoBoost("O0", manual()).optimizer(make(layers), params, layers=layers)


def test_a_line_search_behind_it_descends(params, batches):
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
    boost = AutoBoost("O0", manual(thor={"clip": False}))
    step, state = boost.start(loss_fn, search, params, batches[0])
    losses = []
    for _ in range(4):
        state, metrics = step(state, batches[0])
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)


def test_an_optimizer_with_a_step_length_of_its_own_is_noted(params, batches):
    note = "sets the length of its step by itself"
    named = {"optimizer": {"name": "adam", "learning_rate": 0.1}}
    assert any(note in text for text in AutoBoost("O0", manual(**named)).notes)
    for tx, expected in ((optax.adam(0.1), True), (optax.sgd(0.1), False)):
        boost = AutoBoost("O0", manual())
        made = boost.optimizer(tx, params, loss_fn=loss_fn, batch=batches[0])
        assert (note in str(boost.describe(params, made))) == expected
    # Nothing is known of the layers without the transformation.
    assert "told with tx=" in str(boost.describe(params))
