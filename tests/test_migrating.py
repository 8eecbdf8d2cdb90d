"""Each documented example of mindspore.boost that can be done with what is built, done here.

The numbers come from numpy or from a calculation by hand; docs/migrating.md explains the calls.
"""

import json
import pathlib
import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from tests.mindspore_config import DEFAULTS, WHOLE

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZE, IN, OUT = 16, 16, 10


def mse(params, batch):
    """The examples' network ``x @ weight`` with the mean squared error."""
    output = jnp.matmul(batch["x"], params["weight"])
    return jnp.mean((output - batch["label"]) ** 2)


def example():
    """The examples' parameters and data: a matrix of ones, inputs of ones, labels of zeros."""
    params = {"weight": jnp.ones((IN, OUT))}
    batch = {"x": jnp.ones((SIZE, IN)), "label": jnp.zeros((SIZE, OUT))}
    return params, batch


def momentum_by_hand(steps, rate=0.1, momentum=0.9):
    """The same training for one weight: all 160 stay equal. Return the losses and the weights."""
    weight, velocity, losses, weights = 1.0, 0.0, [], []
    for _ in range(steps):
        losses.append((IN * weight) ** 2)
        gradient = SIZE * 2 * (IN * weight) / (SIZE * OUT)  # 3.2 at the start
        velocity = momentum * velocity + gradient
        weight -= rate * velocity
        weights.append(weight)
    return losses, weights


def test_by_hand():
    losses, weights = momentum_by_hand(2)
    np.testing.assert_allclose(losses, [256.0, 118.3744], rtol=1e-12)
    np.testing.assert_allclose(weights, [0.68, 0.1744], rtol=1e-12)


# --- AutoBoost


def test_autoboost_from_a_dict_and_from_a_json_file(tmp_path):
    config = {"boost": {"mode": "auto"}}
    path = tmp_path / "boost_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    from_dict = boostax.AutoBoost("O1", config)
    from_file = boostax.AutoBoost("O1", str(path))
    with path.open() as file:
        from_loaded = boostax.AutoBoost("O1", json.load(file))
    assert from_dict.config == from_file.config == from_loaded.config
    assert "grad_freeze" in from_dict.enabled
    # Ordinary objects: the second one is not the first one again, as it is there.
    assert "grad_freeze" not in boostax.AutoBoost("O0", config).enabled


def test_recommended_config_holds_the_defaults():
    config = boostax.load_config(WHOLE)
    default = boostax.load_config(None).to_dict()
    for section, keys in WHOLE.items():
        for key, value in keys.items():
            assert config.to_dict()[section][key] == value, key
            assert default[section].get(key) == DEFAULTS[section][key], key


def test_mode_outside_the_list_is_a_value_error():
    with pytest.raises(ValueError, match=r"mode.*'auto', 'manual', 'enable_all', 'disable_all'"):
        boostax.AutoBoost("O1", {"boost": {"mode": "everything"}})


# --- BoostTrainOneStepCell


class LeNet5(linen.Module):
    """LeNet5 for one 32x32 channel and ten classes; the head starts at zero."""

    @linen.compact
    def __call__(self, x):
        for features in (6, 16):
            x = linen.max_pool(
                linen.relu(linen.Conv(features, (5, 5), padding="VALID")(x)), (2, 2), (2, 2)
            )
        x = x.reshape(x.shape[0], -1)
        for features in (120, 84):
            x = linen.relu(linen.Dense(features)(x))
        self.sow("intermediates", "features", x)
        return linen.Dense(10, kernel_init=linen.initializers.zeros, name="head")(x)


def test_train_one_step_with_an_existing_loss():
    net = LeNet5()
    image = jax.random.normal(jax.random.key(0), (4, 32, 32, 1))
    label = jnp.array([3, 1, 4, 1])
    params = net.init(jax.random.key(1), image)["params"]

    def loss_fn(params, batch):
        logits = net.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    step = boostax.train_step(loss_fn, optax.sgd(0.1, 0.9))
    state = step.init(params)
    state, metrics = step(state, {"x": image, "label": label})

    # With a head of zeros the ten classes are equally likely, and only the head has a gradient.
    np.testing.assert_allclose(metrics["loss"], np.log(10), rtol=1e-6)
    surplus = 0.1 - np.eye(10)[np.asarray(label)]
    np.testing.assert_allclose(
        state.params["head"]["bias"], -0.1 * surplus.mean(axis=0), rtol=1e-5, atol=1e-7
    )
    _, sown = net.apply({"params": params}, image, mutable=["intermediates"])
    features = np.asarray(sown["intermediates"]["features"][0])
    np.testing.assert_allclose(
        state.params["head"]["kernel"], -0.1 * features.T @ surplus / 4, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_array_equal(
        state.params["Conv_0"]["kernel"], np.asarray(params["Conv_0"]["kernel"])
    )


def test_train_one_step_with_a_loss_of_ones_own():
    # There, a Cell with a backbone of two inputs; here, a function.
    def backbone(params, x, y):
        return jnp.matmul(x + y, params["weight"])

    def loss_fn(params, batch):
        output = backbone(params, batch["x"], batch["y"])
        return jnp.mean((output - batch["label"]) ** 2)

    params, batch = example()
    batch = {"x": 0.25 * batch["x"], "y": 0.75 * batch["x"], "label": batch["label"]}
    step = boostax.train_step(loss_fn, optax.sgd(0.1, 0.9))
    state = step.init(params)
    losses, weights = momentum_by_hand(2)
    for loss, weight in zip(losses, weights, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)  # never None
        np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), weight), rtol=1e-6)
        assert bool(metrics["finite"])  # their "overflow" is the contrary


def test_sens_scales_the_gradient():
    # sens=0.5 there fills the backward pass; here it is a factor on the loss.
    params, batch = example()
    step = boostax.train_step(lambda p, b: 0.5 * mse(p, b), optax.sgd(0.1, 0.9))
    state, metrics = step(step.init(params), batch)
    np.testing.assert_allclose(metrics["loss"], 128.0, rtol=1e-6)
    np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), 0.84), rtol=1e-6)


# --- BoostTrainOneStepWithLossScaleCell


def test_loss_scale_of_a_cell():
    # The first example: its labels of ones are spread over the ten outputs.
    params = {"weight": jnp.ones((IN, OUT))}
    batch = {"x": jnp.ones((OUT, IN)), "label": jnp.ones((OUT, OUT))}
    manager = boostax.DynamicLossScale(init=2**12, factor=2, window=1000)
    step = boostax.train_step(mse, optax.sgd(0.1, 0.9), loss_scale=manager)
    state, metrics = step(step.init(params), batch)
    assert float(metrics["loss"]) == 225.0
    assert not bool(metrics["overflow"])
    assert float(metrics["loss_scale"]) == 4096.0
    np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), 0.7), rtol=1e-6)
    assert int(state.loss_scale.good_steps) == 1


@pytest.mark.parametrize("shape", [(), (1,)])
def test_loss_scale_of_a_tensor(shape):
    # The second example: the largest float32 overflows, so that nothing is trained.
    params, batch = example()
    sens = jnp.full(shape, jnp.finfo(jnp.float32).max)
    step = boostax.train_step(mse, optax.sgd(0.1, 0.9), loss_scale=sens)
    state, metrics = step(step.init(params), batch)
    assert float(metrics["loss"]) == 256.0
    assert bool(metrics["overflow"])
    assert float(metrics["loss_scale"]) == np.finfo(np.float32).max
    np.testing.assert_array_equal(state.params["weight"], np.ones((IN, OUT)))
    # set_sense_scale there.
    state, metrics = step(boostax.set_loss_scale(state, 8.0), batch)
    assert (float(metrics["loss_scale"]), bool(metrics["overflow"])) == (8.0, False)
    np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), 0.68), rtol=1e-6)


def test_loss_scale_raises_what_it_documents():
    for wrong, error in (("8", TypeError), (True, TypeError), (jnp.ones(2), ValueError)):
        with pytest.raises(error, match="loss_scale"):
            boostax.train_step(mse, optax.sgd(0.1), loss_scale=wrong)


# --- GroupLossScaleManager


class EnhancedNet(linen.Module):
    """The example's network, which marks its two groups, for images of 8 x 8."""

    enhanced_amp: boostax.GroupLossScale

    @linen.compact
    def __call__(self, x):
        x = self.enhanced_amp(x, 0, 1)
        x = linen.relu(linen.Conv(2, (3, 3), padding="VALID", name="conv1")(x))
        x = linen.max_pool(x, (2, 2), (2, 2))
        x = self.enhanced_amp(x.reshape(x.shape[0], -1), 1, 2)
        x = linen.relu(linen.Dense(8, name="fc1")(x))
        x = linen.Dense(10, name="fc2")(x)
        return self.enhanced_amp(x, 2, 3)


def test_group_loss_scale_manager():
    manager = boostax.GroupLossScale(["conv*", "fc*"], init=4096)
    net = EnhancedNet(manager)
    image = jnp.linspace(-1, 1, 256).reshape(4, 8, 8, 1)
    label = jnp.array([3, 1, 4, 1])
    params = jax.jit(net.init)(jax.random.key(1), image)["params"]

    def loss_fn(params, batch):
        logits = net.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    # Their model's train() needs the flag in a config; here that makes the same step.
    config = {
        "boost": {**dict.fromkeys(WHOLE["boost"], False), "mode": "manual"},
        "loss_scale_group": {"groups": ["conv*", "fc*"], "init": 4096},
    }
    config["boost"]["loss_scale_group"] = True
    boost = boostax.AutoBoost("O1", config)
    assert boost.loss_scale == manager
    batch = {"x": image, "label": label}
    step, state = boost.start(loss_fn, optax.sgd(0.1, 0.9), params, batch)
    gradients = jax.jit(jax.grad(loss_fn))(params, batch)
    state, metrics = step(state, batch)
    assert metrics["loss_scale"].tolist() == [4096.0, 4096.0]
    jax.tree.map(
        lambda new, old, g: np.testing.assert_allclose(new, old - 0.1 * g, rtol=1e-5, atol=1e-6),
        jax.device_get(state.params),
        params,
        gradients,
    )


def test_group_loss_scales_are_read_and_changed():
    # set_loss_scale_status(2, 4096.0) and update_loss_scale_status there, whose layer 1 is group 2.
    manager = boostax.GroupLossScale(["a", "b"], init=4096.0, rule="reference")
    state = manager.init_state()
    assert state.scale.tolist() == [4096.0, 4096.0]
    state, new = manager.update_group(state, 2, 2**-0.5)
    np.testing.assert_allclose(new, 2896.3093, rtol=1e-6)
    state, new = manager.update_group(state, 2, 2**0.001)
    np.testing.assert_allclose(new, 2898.3176, rtol=1e-6)
    np.testing.assert_allclose(state.scale, [4096.0, 2898.3176], rtol=1e-6)
    state = manager.update(state, True)
    np.testing.assert_allclose(state.scale, np.float32([4096, 2898.3176]) * 2**0.001, rtol=1e-6)
    assert boostax.set_loss_scale(state, 512.0).scale.tolist() == [512.0, 512.0]
    assert boostax.set_loss_scale(state, [8.0, 512.0]).scale.tolist() == [8.0, 512.0]


# --- GradientAccumulation


def test_gradient_accumulation():
    params, batch = example()
    tx = boostax.accumulate(optax.sgd(0.1, 0.9), every=2)
    step = boostax.train_step(mse, tx)
    state = step.init(params)
    _, (first, second) = momentum_by_hand(2)
    expected = [1.0, first, first, second]  # equal batches: their mean is the batch's gradient
    for number, weight in enumerate(expected, start=1):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), weight), rtol=1e-6)
        assert int(metrics["updates"]) == number // 2
        assert int(metrics["micro_steps"]) == number


def test_gradient_accumulation_inside_one_step():
    params, batch = example()
    step = boostax.train_step(mse, optax.sgd(0.1, 0.9), microbatch=4)
    state = step.init(params)
    losses, weights = momentum_by_hand(2)
    for loss, weight in zip(losses, weights, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), weight), rtol=1e-6)


# --- GradientFreeze, FreezeOpt, freeze_cell


def test_gradient_freeze_example_has_more_groups_than_layers():
    params, _ = example()
    with pytest.raises(ValueError, match="10"):
        boostax.parameter_groups(params, 10)


def deep(params, batch):
    """Ten linear layers of one weight each: the example's ten groups can be made of them."""
    output = batch["x"]
    for number in range(10):
        output = output * params[f"layer_{number}"]["weight"]
    return jnp.mean((output - batch["label"]) ** 2)


def test_gradient_freeze():
    params = {f"layer_{n}": {"weight": jnp.float32(1)} for n in range(10)}
    batch = {"x": jnp.ones((SIZE, 1)), "label": jnp.zeros((SIZE, 1))}
    order = boostax.forward_order(deep, params, batch)
    groups = boostax.parameter_groups(params, 10, order=order)
    schedule = boostax.freeze_schedule("interval", groups, full_fraction=0.5, total_steps=2000)
    assert len(schedule) == 2000
    assert 0.45 < np.mean(np.asarray(schedule) == 0) < 0.55
    freezing = boostax.Freezing(groups, schedule)
    tx = boostax.freeze(optax.sgd(0.01, 0.9), freezing)
    step = boostax.train_step(deep, tx, freezing=freezing)
    state = step.init(params)

    weights, velocities = np.ones(10), np.zeros(10)
    for index in np.asarray(schedule)[:6]:
        state, metrics = step(state, batch)
        output = np.prod(weights)
        np.testing.assert_allclose(metrics["loss"], output**2, rtol=1e-5)
        gradients = 2 * output * output / weights
        moving = np.arange(10) >= index  # the layers before group `index` are frozen
        velocities = np.where(moving, 0.9 * velocities + gradients, velocities)
        weights = np.where(moving, weights - 0.01 * velocities, weights)
        assert int(metrics["freeze_index"]) == index
        got = [float(state.params[f"layer_{n}"]["weight"]) for n in range(10)]
        np.testing.assert_allclose(got, weights, rtol=1e-5)


def test_freeze_index_sequence(reference):
    stored = reference("a_freeze_index_sequence")
    groups, share, steps = stored["s0_cases"][0]
    ours = boostax.freeze_schedule(
        "continuous", int(groups), full_fraction=float(share), total_steps=int(steps)
    )
    np.testing.assert_array_equal(ours, stored["s0_0"][: int(steps)])
    groups, share, steps, seed = stored["s1_cases"][1]
    ours = boostax.freeze_schedule(
        "interval", int(groups), full_fraction=float(share), total_steps=int(steps), seed=int(seed)
    )
    np.testing.assert_array_equal(ours, stored["s1_1"][: int(steps)])


def test_freeze_cell():
    # FreezeOpt(optimizer) without groups, and freeze_cell with sens=1.0 and one step a window.
    params, batch = example()
    groups = boostax.parameter_groups(params, 1)
    freezing = boostax.Freezing(groups, boostax.freeze_schedule("interval", groups, total_steps=3))
    tx = boostax.freeze(optax.sgd(0.1, 0.9), freezing)
    step = boostax.train_step(mse, tx, freezing=freezing)
    state = step.init(params)
    for weight in momentum_by_hand(2)[1]:
        state, metrics = step(state, batch)
        assert int(metrics["freeze_index"]) == 0
        np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), weight), rtol=1e-6)


def test_freeze_cell_with_accumulation():
    # use_grad_accumulation=True, max_accumulation_step=2: there, an AttributeError.
    params = {"layer_0": {"weight": jnp.float32(2)}, "layer_1": {"weight": jnp.float32(3)}}
    batch = {"x": jnp.ones((4, 1)), "label": jnp.zeros((4, 1))}

    def loss_fn(params, batch):
        output = batch["x"] * params["layer_0"]["weight"] * params["layer_1"]["weight"]
        return jnp.mean((output - batch["label"]) ** 2)

    groups = boostax.parameter_groups(
        params, 2, order=boostax.forward_order(loss_fn, params, batch)
    )
    freezing = boostax.Freezing(groups, [1, 0])
    tx = boostax.accumulate(boostax.freeze(optax.sgd(0.01), freezing), every=2)
    step = boostax.train_step(loss_fn, tx, freezing=freezing)
    state = step.init(params)
    # The gradient is 2 a b (b, a). First window: only b moves, 3 - .01 * 2*2*3*2 = 2.76. Second:
    # a to 2 - .01 * 2*2*2.76*2.76 = 1.695296, b to 2.76 - .01 * 2*2*2.76*2 = 2.5392.
    expected = [(2, 3), (2, 2.76), (2, 2.76), (1.695296, 2.5392)]
    for first, second in expected:
        state, _ = step(state, batch)
        np.testing.assert_allclose(state.params["layer_0"]["weight"], first, rtol=1e-6)
        np.testing.assert_allclose(state.params["layer_1"]["weight"], second, rtol=1e-6)


# --- OptimizerProcess


def test_optimizer_process():
    # The example's gradient is 3.2 everywhere: without its mean nothing is left of it.
    params, batch = example()
    tx = optax.chain(boostax.centralize(axes={"weight": 0}), optax.sgd(0.1, 0.9))
    step = boostax.train_step(mse, tx)
    state, _ = step(step.init(params), batch)
    np.testing.assert_allclose(state.params["weight"], np.ones((IN, OUT)), atol=1e-6)

    # With inputs that differ, the mean over the 16 inputs of each of the 10 outputs goes away.
    x = np.linspace(-1, 2, SIZE * IN).reshape(SIZE, IN)
    gradient = 2 / (SIZE * OUT) * x.T @ (x @ np.ones((IN, OUT)))
    expected = 1 - 0.1 * (gradient - gradient.mean(axis=0, keepdims=True))
    state, _ = step(step.init(params), {"x": jnp.float32(x), "label": batch["label"]})
    np.testing.assert_allclose(state.params["weight"], expected, rtol=1e-5)


# --- nn.thor


def test_nn_thor():
    params, batch = example()
    layers = boostax.capture_layers(mse, params, batch)
    tx = boostax.thor(0.1, 0.01, momentum=0.9, weight_decay=1e-4, clip=False, layers=layers)
    step = boostax.train_step(mse, tx)
    state, _ = step(step.init(params), batch)
    # Inputs of ones, derivatives of 2 * 16 / 160 = 0.2 for 16 examples: A is 16 x 16 ones, G is
    # 16 * 16 * 0.04 = 10.24 times ones, and the gradient, 3.2 everywhere, an eigenvector of both.
    pi = np.sqrt(1 / 10.24)
    scaled = 3.2 / ((IN + 0.1 * pi) * (OUT * 10.24 + 0.1 / pi))
    expected = np.full((IN, OUT), 1 - 0.1 * (scaled + 1e-4))
    np.testing.assert_allclose(state.params["weight"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("argument", "wrong", "error"),
    [
        ("learning_rate", "0.1", TypeError),
        ("momentum", "0.9", TypeError),
        ("momentum", -0.1, ValueError),
        ("weight_decay", "0", TypeError),
        ("weight_decay", -1, ValueError),
        ("loss_scale", "1", TypeError),
        ("loss_scale", 0.0, ValueError),
        ("use_nesterov", 1, TypeError),
        ("frequency", 2.0, TypeError),
        ("frequency", 0, ValueError),
    ],
)
def test_nn_thor_raises_what_it_documents(argument, wrong, error):
    layers = boostax.capture_layers(mse, *example())
    arguments = {"learning_rate": 0.1, "damping": 0.01, "layers": layers, argument: wrong}
    with pytest.raises(error, match=argument):
        boostax.thor(**arguments)


# --- ParameterProcess


def test_generate_group_params():
    # Two matrices, of which the first is given: an optimizer's group of it alone.
    params = {"weight": jnp.ones((IN, OUT)), "weight2": jnp.ones((IN, OUT))}
    groups = boostax.parameter_groups(params, patterns=["weight", "weight2"])
    assert groups.segments == (("weight",), ("weight2",))
    assert groups.trainable(1) == {"weight": False, "weight2": True}

    def loss_fn(params, batch):
        output = batch["x"] @ params["weight"] + batch["x"] @ params["weight2"]
        return jnp.mean((output - batch["label"]) ** 2)

    # Groups with settings of their own: here only the first one is trained.
    _, batch = example()
    others = {"params": "weight2", "learning_rate": 0.0}
    tx = boostax.optimizer("sgd", learning_rate=0.1, momentum=0.9, groups=[others])
    step = boostax.train_step(loss_fn, tx)
    state, metrics = step(step.init(params), batch)
    np.testing.assert_allclose(metrics["loss"], 32.0**2, rtol=1e-6)
    np.testing.assert_allclose(state.params["weight"], np.full((IN, OUT), 1 - 0.1 * 6.4), rtol=1e-6)
    np.testing.assert_array_equal(state.params["weight2"], np.ones((IN, OUT)))


# --- the textbook's techniques


def test_batch_normalization():
    x = np.array([[[[1, 2], [1, 2]], [[3, 4], [3, 4]]]], np.float32).transpose(0, 2, 3, 1)
    norm = linen.BatchNorm(use_running_average=False, momentum=0.8)
    variables = norm.init(jax.random.key(0), x)
    output, new = norm.apply(variables, x, mutable=["batch_stats"])
    scale = 0.5 / np.sqrt(0.25 + 1e-5)
    np.testing.assert_allclose(output, np.where(x % 2 == 1, -scale, scale), rtol=1e-5)
    # momentum is the share of the old value: 0.8 * 0 + 0.2 * mean, 0.8 * 1 + 0.2 * variance.
    np.testing.assert_allclose(new["batch_stats"]["mean"], [0.3, 0.7], rtol=1e-6)
    np.testing.assert_allclose(new["batch_stats"]["var"], [0.85, 0.85], rtol=1e-5)


@pytest.mark.parametrize(
    ("norm", "axes"),
    [
        (linen.LayerNorm(reduction_axes=(1, 2, 3), feature_axes=-1), (1, 2, 3)),
        (linen.InstanceNorm(), (1, 2)),
    ],
    ids=["layer", "instance"],
)
def test_other_normalizations(norm, axes):
    x = np.random.default_rng(0).normal(3, 2, (2, 3, 3, 4)).astype(np.float32)
    output = norm.apply(norm.init(jax.random.key(0), x), x)
    expected = (x - x.mean(axes, keepdims=True)) / np.sqrt(
        x.var(axes, keepdims=True) + norm.epsilon
    )
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


def test_group_normalization():
    x = np.random.default_rng(1).normal(-1, 3, (2, 3, 3, 4)).astype(np.float32)
    norm = linen.GroupNorm(num_groups=2)
    output = norm.apply(norm.init(jax.random.key(0), x), x)
    split = x.reshape(2, 3, 3, 2, 2)
    mean, var = (f((1, 2, 4), keepdims=True) for f in (split.mean, split.var))
    expected = ((split - mean) / np.sqrt(var + norm.epsilon)).reshape(x.shape)
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


def sgd(g, s, t):
    return -0.1 * g


def momentum(g, s, t):
    s["v"] = 0.9 * s.get("v", 0) + g
    return -0.1 * s["v"]


def nesterov(g, s, t):
    s["v"] = 0.9 * s.get("v", 0) + g
    return -0.1 * (g + 0.9 * s["v"])


def adagrad(g, s, t):
    s["sum"] = s.get("sum", 0) + g * g
    return -0.1 / (1 + 0.5 * (t - 1)) * g / (np.sqrt(s["sum"]) + 1e-10)


def adadelta(g, s, t):
    s["square"] = 0.9 * s.get("square", 0) + 0.1 * g * g
    delta = np.sqrt(s.get("delta", 0) + 1e-6) / np.sqrt(s["square"] + 1e-6) * g
    s["delta"] = 0.9 * s.get("delta", 0) + 0.1 * delta * delta
    return -1.0 * delta


def rmsprop(g, s, t):
    s["square"] = 0.99 * s.get("square", 0) + 0.01 * g * g
    s["mean"] = 0.99 * s.get("mean", 0) + 0.01 * g
    step = g / (np.sqrt(s["square"] - s["mean"] ** 2) + 1e-8)
    s["v"] = 0.5 * s.get("v", 0) + step
    return -0.1 * s["v"]


def adam(g, s, t):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    return -0.1 * (s["m"] / (1 - 0.9**t)) / (np.sqrt(s["v"] / (1 - 0.999**t)) + 1e-8)


@pytest.mark.parametrize(
    ("by_hand", "optimizer"),
    [
        (sgd, {"name": "sgd", "learning_rate": 0.1}),
        (momentum, {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}),
        (nesterov, {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
        (adagrad, {"name": "adagrad", "learning_rate": 0.1, "lr_decay": 0.5}),
        (adadelta, {"name": "adadelta", "learning_rate": 1.0}),
        (rmsprop, {"name": "rmsprop", "learning_rate": 0.1, "centered": True, "momentum": 0.5}),
        (adam, {"name": "adam", "learning_rate": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_optimizers_by_name(by_hand, optimizer):
    tx = boostax.load_config({"optimizer": optimizer}).optimizer.build()
    weight = np.array([1.0, -2.0, 0.5])
    step = boostax.train_step(lambda p, b: 0.5 * jnp.sum(b * p[None] ** 2, axis=-1).mean(), tx)
    state = step.init(jnp.float32(weight))
    memory: dict = {}
    curvature = np.array([[1.0, 3.0, 0.1]])
    for t in range(1, 4):
        weight = weight + by_hand(curvature[0] * weight, memory, t)
        state, _ = step(state, jnp.float32(curvature))
        np.testing.assert_allclose(state.params, weight, rtol=2e-4, atol=1e-6)


def test_fine_tuning_on_two_tasks():
    # One backbone, two heads' losses summed; the new classifier has a rate of its own.
    params = {"model": jnp.float32(2), "classifier": jnp.float32(3)}

    def loss_fn(params, batch):
        origin = (params["model"] * batch["origin"] - 1) ** 2
        target = (params["model"] * params["classifier"] * batch["target"] - 1) ** 2
        return jnp.mean(origin + target)

    labels = {"model": "slow", "classifier": "fast"}
    tx = optax.multi_transform({"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)}, labels)
    step = boostax.train_step(loss_fn, tx)
    state, metrics = step(step.init(params), {"origin": jnp.ones(2), "target": jnp.ones(2)})
    # loss (2-1)^2 + (6-1)^2; by the model 2*1 + 2*5*3, by the classifier 2*5*2.
    np.testing.assert_allclose(metrics["loss"], 26.0, rtol=1e-6)
    np.testing.assert_allclose(state.params["model"], 2 - 0.01 * 32, rtol=1e-6)
    np.testing.assert_allclose(state.params["classifier"], 3 - 0.1 * 20, rtol=1e-6)


# --- the page itself

API = {
    "AdaSum": "rank device_number group_number parameter_tuple delta_weights parameters "
    "old_parameters adasum_parameters",
    "AutoBoost": "level boost_config_dict network_auto_process_eval network_auto_process_train "
    "mode auto manual enable_all disable_all less_bn grad_freeze adasum grad_accumulation dim_reduce "
    "loss_scale_group gradient_split_groups device_number fn_flag gc_flag param_groups freeze_type "
    "freeze_p total_steps rho gamma alpha sigma n_components pca_mat_path weight_load_dir timeout "
    "ValueError",
    "BoostTrainOneStepCell": "network optimizer sens loss overflow TypeError adasum_process "
    "check_adasum_enable check_dim_reduce_enable gradient_accumulation_process "
    "gradient_freeze_process",
    "BoostTrainOneStepWithLossScaleCell": "network optimizer scale_sense set_sense_scale "
    "DynamicLossScaleUpdateCell TypeError ValueError",
    "DimReduce": "network optimizer weight pca_mat_local n_components rho gamma alpha sigma rank "
    "rank_size loss old_grad weight_clone",
    "GradientAccumulation": "max_accumulation_step optimizer",
    "GradientFreeze, FreezeOpt, freeze_cell": "param_groups freeze_type freeze_p total_steps "
    "freeze_generate generate_freeze_index_sequence split_parameters_groups "
    "parameter_groups_number freeze_strategy freeze_para_groups_number opt train_parameter_groups "
    "train_strategy reducer_flag network optimizer sens grad use_grad_accumulation mean degree "
    "max_accumulation_step",
    "GroupLossScaleManager": "init_loss_scale loss_scale_groups layer1 layer2 out get_loss_scale "
    "get_update_cell set_loss_scale_status loss_scale_number update_loss_scale_status layer "
    "update_ratio",
    "LessBN": "network fn_flag",
    "OptimizerProcess": "opt add_grad_centralization build_gc_params_group build_params_dict "
    "generate_new_optimizer params_dict parameters network",
    "ParameterProcess": "assign_parameter_group split_point generate_group_params parameters "
    "origin_params",
    "nn.thor": "net learning_rate damping momentum weight_decay loss_scale batch_size use_nesterov "
    "decay_filter split_indices enable_clip_grad frequency gradients TypeError ValueError",
}


@pytest.mark.quick
@pytest.mark.parametrize("section", API)
def test_page_names_everything(section):
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    missing = [
        name for name in API[section].split() if not re.search(rf"\b{name}\b", parts[section])
    ]
    assert not missing
