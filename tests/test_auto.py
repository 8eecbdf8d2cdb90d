"""AutoBoost: composition, order, the config's optimizer, errors and the description."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import boostax
from boostax import AutoBoost, _info
from boostax.errors import ConfigError

MANUAL = {"mode": "manual"}


@pytest.fixture
def params():
    key = jax.random.key(0)
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(jax.random.fold_in(key, i), (3, 3)) / 2,
            "bias": jnp.zeros(3),
        }
        for i in range(3)
    }


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return jnp.mean((x - 1) ** 2)


@pytest.fixture
def batches():
    return [jax.random.normal(jax.random.key(10 + i), (4, 3)) for i in range(6)]


def names(tx):
    return [info.name for info in _info.walk(tx)]


def run(step, params, batches):
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def test_objects_are_independent():
    first = AutoBoost("O1", {"grad_freeze": {"param_groups": 2}})
    second = AutoBoost("O0", {"grad_freeze": {"param_groups": 3}})
    assert (first.enabled, second.enabled) == (
        ("less_bn", "grad_freeze", "centralize"),
        (),
    )
    assert (first.config.grad_freeze.param_groups, second.level) == (2, "O0")
    assert AutoBoost().enabled == ()
    # The arguments of the signature that is documented.
    assert list(inspect.signature(AutoBoost).parameters) == ["level", "config"]


def test_wrong_levels_and_modes_leave_nothing_behind():
    with pytest.raises(ConfigError, match="level: got 'O9'"):
        AutoBoost("O9")
    with pytest.raises(ConfigError, match=r"boost\.mode"):
        AutoBoost("O1", {"boost": {"mode": "fast"}})
    assert AutoBoost("O1").enabled == ("less_bn", "grad_freeze", "centralize")


def test_with_everything_off_the_optimizer_is_untouched(params, batches):
    base = optax.adamw(0.1)
    tx = AutoBoost().optimizer(base)
    assert tx.update is base.update
    boosted = run(AutoBoost().train_step(loss_fn, tx), params, batches)[0]
    plain = run(boostax.train_step(loss_fn, base), params, batches)[0]
    jax.tree.map(np.testing.assert_array_equal, boosted.params, plain.params)


WHOLE = {
    "boost": {**MANUAL, "grad_freeze": True, "grad_accumulation": True, "centralize": True},
    "grad_freeze": {"param_groups": 3, "total_steps": 4, "kind": "ramp", "full_fraction": 0.5},
    "grad_accumulation": {"every": 2},
    "clip": {"global_norm": 0.1},
}


def test_the_order_of_the_chain(params):
    tx = AutoBoost("O0", WHOLE).optimizer(optax.sgd(0.1), params)
    assert names(tx)[:4] == ["accumulate", "freeze", "centralize", "clip"]
    on_update = {
        **WHOLE,
        "centralize": {"on": "update"},
        "optimizer": {"name": "sgd", "learning_rate": 1},
    }
    tx = AutoBoost("O0", on_update).optimizer(params=params)
    assert names(tx) == ["accumulate", "freeze", "clip", "sgd", "centralize"]


def test_it_equals_the_composition_by_hand(params, batches):
    boost = AutoBoost("O0", WHOLE)
    step = boost.train_step(loss_fn, boost.optimizer(optax.sgd(0.1, 0.9), params))
    groups = boostax.parameter_groups(params, 3)
    schedule = boostax.freeze_schedule("ramp", groups, full_fraction=0.5, total_steps=4)
    assert schedule.tolist() == [0, 0, 1, 2]
    inner = optax.chain(boostax.centralize(), optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9))
    by_hand = boostax.accumulate(boostax.freeze(inner, boostax.Freezing(groups, schedule)), 2)
    ours, metrics = run(step, params, batches)
    theirs, _ = run(boostax.train_step(loss_fn, by_hand), params, batches)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert (int(metrics["updates"]), int(metrics["freeze_index"])) == (3, 1)
    # The third window had index 1, so that layer_0 stayed where two windows had brought it.
    two, _ = run(step, params, batches[:4])
    np.testing.assert_array_equal(ours.params["layer_0"]["kernel"], two.params["layer_0"]["kernel"])
    assert np.any(ours.params["layer_1"]["kernel"] != two.params["layer_1"]["kernel"])


def test_clip_comes_after_the_mean_of_the_window():
    # [3, 4] and [0, 0]: mean [1.5, 2.0], norm 2.5, update -[0.6, 0.8].
    config = {
        "boost": {**MANUAL, "grad_accumulation": True},
        "common": {"grad_accumulation_step": 2},
        "clip": {"global_norm": 1.0},
    }
    tx = AutoBoost("O0", config).optimizer(optax.sgd(1.0))
    state = tx.init(jnp.zeros(2))
    _, state = tx.update(jnp.array([3.0, 4.0]), state, jnp.zeros(2))
    update, _ = tx.update(jnp.zeros(2), state, jnp.zeros(2))
    np.testing.assert_allclose(update, [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ({"value": 1.0}, [-1.0, -0.5]),
        ({"global_norm": 0.5}, [-0.4932, -0.0822]),
        ({"adaptive": 0.1}, None),
    ],
)
def test_clips(clip, expected):
    tx = AutoBoost("O0", {"clip": clip}).optimizer(optax.sgd(1.0))
    grads, params = jnp.array([3.0, 0.5]), jnp.array([1.0, 1.0])
    update, _ = tx.update(grads, tx.init(params), params)
    if expected is None:
        expected, _ = optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1.0)).update(
            grads, (optax.EmptyState(), optax.sgd(1.0).init(params)), params
        )
    np.testing.assert_allclose(update, expected, atol=1e-4)


def test_the_learning_rate_of_a_named_optimizer_is_a_metric(params, batches):
    schedule = {
        "name": "piecewise_constant_schedule",
        "init_value": 0.5,
        "boundaries_and_scales": {"2": 0.1},
    }
    boost = AutoBoost("O0", {"optimizer": {"name": "sgd", "learning_rate": schedule}})
    step = boost.train_step(loss_fn, boost.optimizer())
    state, rates = step.init(params), []
    for batch in batches[:4]:
        state, metrics = step(state, batch)
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [0.5, 0.5, 0.05, 0.05], rtol=1e-6)
    fixed = AutoBoost("O0", {"optimizer": {"name": "adam", "learning_rate": 0.25}})
    step = fixed.train_step(loss_fn, fixed.optimizer(), metrics=("learning_rate",))
    assert float(run(step, params, batches[:1])[1]["learning_rate"]) == 0.25


def test_microbatch_and_window_settings_reach_the_step(params, batches):
    section = {"microbatch": 2, "stats": "per_micro", "batch_norm_momentum": 0.5}
    config = {"boost": {**MANUAL, "grad_accumulation": True}, "grad_accumulation": section}
    boost = AutoBoost("O2", config)
    tx = boost.optimizer(optax.sgd(0.1))
    assert "accumulate" not in names(tx)
    step = boost.train_step(loss_fn, tx)
    settings = step.settings
    assert (settings.microbatch, settings.stats, settings.batch_norm_momentum) == (
        2,
        "per_micro",
        0.5,
    )
    assert boost.train_step(loss_fn, tx, microbatch=4).settings.microbatch == 4
    plain = boostax.train_step(loss_fn, optax.sgd(0.1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        run(step, params, batches)[0].params,
        run(plain, params, batches)[0].params,
    )


def test_a_window_averages_the_loss_for_optimizers_that_take_it(params, batches):
    config = {
        "boost": {**MANUAL, "grad_accumulation": True},
        "grad_accumulation": {"every": 2},
        "optimizer": {"name": "polyak_sgd"},
    }
    boost = AutoBoost("O0", config)
    tx = boost.optimizer()
    assert _info.find(tx, "accumulate").settings["average_extra"] == ("value",)
    state, _ = run(boost.train_step(loss_fn, tx), params, batches[:2])
    whole = boostax.train_step(loss_fn, optax.polyak_sgd())
    expected, _ = run(whole, params, [jnp.concatenate(batches[:2])])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.params,
        expected.params,
    )
    tx = AutoBoost("O0", {k: v for k, v in config.items() if k != "optimizer"}).optimizer(
        optax.polyak_sgd()
    )
    assert _info.find(tx, "accumulate").settings["average_extra"] == ("value",)


def test_a_given_line_search_does_not_go_with_a_window():
    config = {"boost": {**MANUAL, "grad_accumulation": True}, "grad_accumulation": {"every": 2}}
    searching = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    with pytest.raises(ConfigError, match="does not go with this optimizer: its line search"):
        AutoBoost("O0", config).optimizer(searching)
    AutoBoost("O0").optimizer(searching)


def test_nnx_models(batches):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 4, rngs=rngs)
            self.second = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    def loss(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    model = Net(nnx.Rngs(0))
    config = {"grad_freeze": {"patterns": ["first/*", "second/*"], "total_steps": 4}}
    boost = AutoBoost("O1", config)
    tx = boost.optimizer(optax.sgd(0.1), model)
    _, metrics = run(boost.train_step(loss, tx), model, batches[:2])
    assert int(metrics["updates"]) == 2
    assert "first/kernel" in str(boost.describe(model, tx))


def test_errors_of_optimizer_and_train_step(params):
    with pytest.raises(ConfigError, match="no base optimizer"):
        AutoBoost().optimizer()
    named = {"optimizer": {"name": "sgd", "learning_rate": 0.1}}
    with pytest.raises(ConfigError, match="config names 'sgd'"):
        AutoBoost("O0", named).optimizer(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"params come second"):
        AutoBoost().optimizer(params)
    with pytest.raises(ValueError, match="params is needed, because grad_freeze and centralize"):
        AutoBoost("O1").optimizer(optax.sgd(0.1))
    # Ten groups are the default of mindspore.boost; this model has three layers.
    with pytest.raises(ConfigError, match=r"grad_freeze\.param_groups = 10: .*3"):
        AutoBoost("O1").optimizer(optax.sgd(0.1), params)
    boost = AutoBoost("O1", {"grad_freeze": {"param_groups": 3}})
    with pytest.raises(ValueError, match="grad_freeze is on, but tx holds no freeze"):
        boost.train_step(loss_fn, optax.sgd(0.1))
    with pytest.raises(ValueError, match="describe: step, state and batch go together"):
        boost.describe(step=1)


def test_abstract_parameters_do(params):
    shapes = jax.eval_shape(lambda: params)
    boost = AutoBoost("O1", {"grad_freeze": {"param_groups": 3}})
    tx = boost.optimizer(optax.sgd(0.1), shapes)
    jax.eval_shape(tx.init, shapes)


def test_descriptions(params, batches):
    boost = AutoBoost("O1", {"grad_freeze": {"param_groups": 3, "total_steps": 4, "freeze_p": 0.5}})
    text = str(boost.describe())
    assert "level O1, mode auto" in text
    assert "1. freeze: frozen leaves count in no norm" in text
    assert "3. your optimizer" in text
    told = boost.describe(params)
    assert [p.path for p in told.parameters][:2] == ["layer_0/bias", "layer_0/kernel"]
    assert told.parameters[1].fate == (
        "freeze: frozen at index 1, 2 (50% of the windows); centralize: mean over axes (0,) removed"
    )
    assert told.parameters[4].fate == "freeze: never frozen; centralize: unchanged (vector)"
    tx = boost.optimizer(optax.sgd(0.1), params)
    step = boost.train_step(loss_fn, tx)
    whole = boost.describe(step=step, state=step.init(params), batch=batches[0])
    assert len(whole.step.variants) == 3
    assert whole.step.variants[2].flops < whole.step.variants[0].flops
    assert "compiled steps" in str(whole)
    assert "less_bn" in str(whole)
    assert "AutoBoost('O1', {'grad_freeze'" in repr(boost)


def test_centralize_reads_axes_from_the_config():
    params = {"odd": {"weights": jnp.arange(6.0).reshape(2, 3)}}
    config = {"boost": {**MANUAL, "centralize": True}, "centralize": {"axes": {"*/weights": 0}}}
    tx = AutoBoost("O0", config).optimizer(optax.sgd(1.0), params)
    update, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(update["odd"]["weights"], [[1.5] * 3, [-1.5] * 3])
    with pytest.raises(ValueError, match="odd/weights"):
        AutoBoost("O0", {"boost": config["boost"]}).optimizer(optax.sgd(1.0), params)


def test_the_front_door_with_linen_and_batch_norm():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(4, (3, 3), name="stem")(x)
            x = linen.relu(linen.BatchNorm(use_running_average=False, name="norm")(x))
            return linen.Dense(2, name="head")(x.mean((1, 2)))

    net, batch = Net(), jax.random.normal(jax.random.key(1), (4, 4, 4, 1))
    with jax.numpy_rank_promotion("allow"):
        variables = net.init(jax.random.key(0), batch)
        params, statistics = variables["params"], {"batch_stats": variables["batch_stats"]}

        def loss(params, x, *, model_state):
            out, new = net.apply({"params": params, **model_state}, x, mutable=["batch_stats"])
            return jnp.mean((out - 1) ** 2), boostax.LossAux(model_state=new)

        config = {
            "grad_freeze": {"param_groups": 2, "total_steps": 4, "kind": "ramp", "freeze_p": 0.5}
        }
        boost = AutoBoost("O1", config)
        net, report = boost.model(net, batch)
        params = net.init(jax.random.key(0), batch)["params"]
        order = boostax.forward_order(loss, params, batch, model_state=statistics, has_aux=True)
        # The alphabet would have begun with the head.
        assert order[-1].startswith("head")
        tx = boost.optimizer(optax.sgd(0.1, 0.9), params, order=order)
        step = boost.train_step(loss, tx, has_aux=True)
        state = step.init(params, model_state=statistics, rng=jax.random.key(0))
        seen = []
        for _ in range(4):
            state, metrics = step(state, batch)
            seen.append((int(metrics["freeze_index"]), jax.tree.map(np.array, state)))
    # There is no block to take a norm out of, which is said where a level asks for it.
    assert [change.path for change in report.changes] == ["head"]
    assert report.notes[0].startswith("less_bn changed nothing: less_bn: nothing in the model is")
    assert [index for index, _ in seen] == [0, 0, 1, 1]
    (_, held), (_, end) = seen[1], seen[3]
    for tree in ("stem", "norm"):
        jax.tree.map(np.testing.assert_array_equal, held.params[tree], end.params[tree])
    jax.tree.map(np.testing.assert_array_equal, held.model_state, end.model_state)
    assert np.any(held.params["head"]["kernel"] != end.params["head"]["kernel"])


# A base optimizer that has a window or a freeze of its own

WINDOW = {"boost": {**MANUAL, "grad_accumulation": True}, "grad_accumulation": {"every": 2}}
FROZEN = {"boost": {**MANUAL, "grad_freeze": True}, "grad_freeze": {"param_groups": 3}}


def with_freeze(params):
    groups = boostax.parameter_groups(params, 3)
    schedule = boostax.freeze_schedule("ramp", groups, full_fraction=0.5, total_steps=4)
    return boostax.freeze(optax.sgd(0.1), boostax.Freezing(groups, schedule))


def own_windows():
    return [
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.chain(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
        boostax.accumulate(optax.sgd(0.1), 2),
        optax.inject_hyperparams(lambda rate: boostax.accumulate(optax.sgd(rate), 2))(rate=0.1),
    ]


@pytest.mark.parametrize("which", range(4))
def test_a_window_goes_around_no_window(which, params):
    tx = own_windows()[which]
    with pytest.raises(ConfigError, match=r"boost\.grad_accumulation: .* it accumulates by itself"):
        AutoBoost("O0", WINDOW).optimizer(tx)
    with pytest.raises(ConfigError, match=r"boost\.grad_freeze: .* count calls instead of updates"):
        AutoBoost("O0", FROZEN).optimizer(tx, params)
    with pytest.raises(
        ConfigError, match=r"clip\.value: does not go with this optimizer: it holds"
    ):
        AutoBoost("O0", {"clip": {"value": 1.0}}).optimizer(tx)
    # Micro-batches inside one call are no second window.
    AutoBoost("O0", {**WINDOW, "grad_accumulation": {"microbatch": 2}}).optimizer(tx)
    AutoBoost("O0").optimizer(tx)


def test_freezing_goes_around_no_freeze(params):
    tx = with_freeze(params)
    with pytest.raises(ConfigError, match=r"boost\.grad_freeze: .* holds boostax.freeze already"):
        AutoBoost("O0", FROZEN).optimizer(tx, params)
    with pytest.raises(ConfigError, match=r"clip\.global_norm: .* it holds freeze"):
        AutoBoost("O0", {"clip": {"global_norm": 1.0}}).optimizer(tx)
    assert names(AutoBoost("O0", WINDOW).optimizer(tx))[:2] == ["accumulate", "freeze"]
    boost = AutoBoost("O0", FROZEN)
    with pytest.raises(ConfigError, match="pass the optimizer that is inside it"):
        boost.optimizer(boost.optimizer(optax.sgd(0.1), params), params)


def test_curvature_pairs_are_found_behind_inject_hyperparams(params):
    tx = optax.inject_hyperparams(optax.lbfgs)(learning_rate=1.0)
    with pytest.raises(ConfigError, match="curvature pairs"):
        AutoBoost("O0", FROZEN).optimizer(tx, params)
    with pytest.raises(ConfigError, match="its line search needs the loss of the whole window"):
        AutoBoost("O0", WINDOW).optimizer(tx)


@pytest.mark.parametrize("kind", ["search", "window", "freeze"])
def test_enable_all_leaves_out_what_the_given_optimizer_does_not_take(kind, params, batches):
    tx = {
        "search": optax.lbfgs(),
        "window": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        "freeze": with_freeze(params),
    }[kind]
    config = {k: v for k, v in WHOLE.items() if k != "clip"} | {"boost": {"mode": "enable_all"}}
    boost = AutoBoost("O0", config)
    made = boost.optimizer(tx, params)
    found = set(names(made)) & {"accumulate", "freeze", "centralize"}
    assert found == ({"accumulate", "freeze"} if kind == "freeze" else set()) | {"centralize"}
    told = boost.describe(params, made)
    left = {d.technique: d.reason for d in told.resolution.decisions if d.state == "left out"}
    expected = {"grad_freeze"} if kind == "freeze" else {"grad_freeze", "grad_accumulation"}
    assert set(left) == {*expected, "adasum", "thor", "dim_reduce", "loss_scale_group"}
    assert "does not go with this optimizer" in str(told)
    step = boost.train_step(loss_fn, made)
    state, _ = run(step, params, batches[:2])
    whole = boost.describe(step=step, state=state, batch=batches[0])
    assert whole.resolution == told.resolution
    # The object itself keeps what it decided, so that another optimizer gets everything.
    assert names(boost.optimizer(optax.sgd(0.1), params))[:3] == [
        "accumulate",
        "freeze",
        "adasum",
    ]
    with pytest.raises(ValueError, match="grad_accumulation is on, but tx holds no accumulate"):
        boost.train_step(loss_fn, optax.sgd(0.1))


def test_the_clip_is_on_a_windows_mean_only_where_there_is_a_window():
    clip = {"clip": {"global_norm": 1.0}}
    assert AutoBoost("O0", clip).describe().order == (
        "clip: on the gradient of the trainable leaves",
        "your optimizer: sees the gradient that all the others have shaped",
    )
    windowed = AutoBoost("O0", {**WINDOW, **clip}).describe().order
    assert windowed[1] == "clip: on the window's mean gradient of the trainable leaves"


def test_start_trains_what_the_filter_selects():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 3, rngs=rngs)
            self.middle = nnx.Linear(3, 3, rngs=rngs)
            self.last = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.middle(self.first(x)))

    model = Net(nnx.Rngs(0))
    loss = lambda m, x, *, rng: jnp.mean(m(x) ** 2) + 0 * jax.random.uniform(rng)
    wrt = nnx.Any(nnx.PathContains("middle"), nnx.PathContains("last"))
    boost = AutoBoost("O1", {"grad_freeze": {"param_groups": 2, "total_steps": 4}})
    step, state = boost.start(
        loss, optax.sgd(0.1), model, jnp.ones((2, 3)), rng=np.int64(3), wrt=wrt
    )
    for _ in range(2):
        state, _ = step(state, jnp.ones((2, 3)))
    trained = state.merge(model)
    np.testing.assert_array_equal(trained.first.kernel[...], model.first.kernel[...])
    assert not np.array_equal(trained.last.kernel[...], model.last.kernel[...])
