"""AdaSum through the config: the mesh, the chain, what is refused and what is told."""

import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax import AutoBoost, _info, adasum
from boostax.errors import ConfigError
from boostax.parallel import data_mesh

pytestmark = pytest.mark.slow

MANUAL = {"mode": "manual"}
ADASUM = {"boost": {**MANUAL, "adasum": True}}
FIRST, SECOND = [1.0, 0.0], [0.0, 1.0]


def linear(params, x):
    return jnp.mean(x @ params)


def tanh_net(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return jnp.mean((x - 1) ** 2)


def quadratic(params, x):
    return jnp.mean((x @ (params - 1)) ** 2)


# Two devices are enough where the exchange itself is not what is tested, and compile faster.
PAIR = data_mesh(devices=jax.devices()[:2])
OWN = {"axis_name": "device"}


def layers():
    key = jax.random.key(0)
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(jax.random.fold_in(key, i), (3, 3)) / 2,
            "bias": jnp.zeros(3),
        }
        for i in range(2)
    }


BATCHES = [np.random.default_rng(i).normal(size=(16, 3)).astype(np.float32) for i in range(2)]


def run(step, params, batches):
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def update_of(boost, rows, mesh=None):
    """Return minus the update by SGD at rate 1, one row a device."""
    rows = np.asarray(rows, np.float32)
    params = jnp.zeros(rows.shape[1])
    step = boost.train_step(linear, boost.optimizer(optax.sgd(1.0), params), mesh=mesh)
    state, _ = step(step.init(params), rows)
    return (0.0 - np.asarray(state.params)).tolist()


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# By hand


def test_orthogonal_gradients_are_added_not_averaged():
    """Two devices see (1, 0), two see (0, 1); the mean is (0.5, 0.5)."""
    mesh = data_mesh(devices=jax.devices()[:4])
    rows = [FIRST, FIRST, SECOND, SECOND]
    for on in ("gradient", "update"):
        boost = AutoBoost("O0", {**ADASUM, "adasum": {"axis_name": "device", "on": on}})
        assert update_of(boost, rows, mesh) == [1.0, 1.0]
    assert update_of(AutoBoost("O0"), rows, mesh) == [0.5, 0.5]
    # All eight devices, without a mesh of one's own.
    boost = AutoBoost("O0", ADASUM)
    assert update_of(boost, [FIRST] * 4 + [SECOND] * 4) == [1.0, 1.0]


def test_the_mean_inside_a_group_and_adasum_between():
    """Groups see (2, 0), (0, 2) and twice (1, -1): means (1, 1) and (1, -1), which are added."""
    rows = [[2.0, 0], [0, 2], [1, -1], [1, -1]]
    devices = jax.devices()[:4]
    own = {"axis_name": "host", "inner_axis": "device"}
    boost = AutoBoost("O0", {**ADASUM, "adasum": own})
    assert update_of(boost, rows, data_mesh(2, devices)) == [2.0, 0.0]
    flat = AutoBoost("O0", {**ADASUM, "adasum": {"axis_name": "device"}})
    assert update_of(flat, rows, data_mesh(4, devices)) == [3.0, 1.0]
    assert update_of(AutoBoost("O0"), rows, data_mesh(4, devices)) == [1.0, 0.0]
    # Two groups of four of the eight devices.
    boost = AutoBoost("O0", {**ADASUM, "common": {"device_number": 4}})
    assert update_of(boost, np.repeat(rows, 2, axis=0)) == [2.0, 0.0]


# The mesh


def exchange(size):
    if size in (None, 8):
        return adasum("device")
    return adasum("host") if size == 1 else adasum("host", inner_axis="device")


def frozen(params, first):
    groups = boostax.parameter_groups(params, 2)
    schedule = boostax.freeze_schedule("ramp", groups, full_fraction=0.5, total_steps=2)
    inner = optax.chain(first, boostax.centralize(), optax.sgd(0.1, 0.9))
    return boostax.freeze(inner, boostax.Freezing(groups, schedule))


@pytest.mark.parametrize("size", [None, 1, 2, 4, 8])
def test_the_axes_follow_the_group_size(size):
    common = {} if size is None else {"common": {"device_number": size}}
    tx = AutoBoost("O0", {**ADASUM, **common}).optimizer(optax.sgd(0.1))
    assert _info.exchanged_axes(tx) == _info.exchanged_axes(exchange(size))
    settings = _info.find(tx, "adasum").settings
    assert settings["inner_axis"] == ("device" if size in (2, 4) else None)


@pytest.mark.parametrize("size", [None, 2])
def test_o2_trains_as_the_chain_made_by_hand(size):
    config = {"grad_freeze": {"param_groups": 2, "total_steps": 2, "kind": "ramp", "freeze_p": 0.5}}
    if size is not None:
        config["common"] = {"device_number": size}
    boost = AutoBoost("O2", config)
    assert boost.enabled == ("less_bn", "grad_freeze", "adasum", "centralize")
    params = layers()
    step = boost.train_step(tanh_net, boost.optimizer(optax.sgd(0.1, 0.9), params))
    by_hand = boostax.train_step(tanh_net, frozen(params, exchange(size)), mesh=data_mesh(size))
    ours, told = run(step, params, BATCHES)
    theirs, _ = run(by_hand, params, BATCHES)
    equal(ours.params, theirs.params)
    assert (int(told["updates"]), int(told["freeze_index"])) == (2, 1)
    # AdaSum of several devices is not the mean.
    mean, _ = run(
        boostax.train_step(tanh_net, frozen(params, optax.identity()), mesh=data_mesh(8)),
        params,
        BATCHES,
    )
    assert np.any(mean.params["layer_1"]["bias"] != ours.params["layer_1"]["bias"])


def test_a_group_size_that_does_not_divide_is_refused():
    boost = AutoBoost("O2", {"common": {"device_number": 3}})
    message = r"common\.device_number: .*device_number = 3 does not divide the 8 devices"
    with pytest.raises(ConfigError, match=message):
        _ = boost.mesh
    with pytest.raises(ConfigError, match=message):
        boost.optimizer(optax.sgd(0.1), layers())
    # A config may be looked at where it won't run.
    assert "not with the devices here: common.device_number" in str(boost.describe())


def test_the_mesh_is_made_once_and_is_everyones():
    boost = AutoBoost("O0", {"common": {"device_number": 4}})
    assert boost.mesh is boost.mesh
    assert dict(boost.mesh.shape) == {"host": 2, "device": 4}
    own = AutoBoost("O2", {"adasum": {"axis_name": "data"}})
    with pytest.raises(ConfigError, match=r"adasum\.axis_name = 'data' .* pass yours"):
        _ = own.mesh


def test_making_an_object_leaves_the_devices_alone():
    code = (
        "import os\n"
        "os.environ['JAX_PLATFORMS'] = 'none_such'\n"
        "import jax, boostax\n"
        "boost = boostax.AutoBoost('O2', {'common': {'device_number': 4}})\n"
        "print(boost.enabled, boost.notes, boost)\n"
        "try:\n"
        "    boost.mesh\n"
        "except RuntimeError:\n"
        "    print('started now')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "'adasum'" in done.stdout
    assert done.stdout.endswith("started now\n")


# The chain


def names(tx):
    return [info.name for info in _info.walk(tx)]


WHOLE = {
    "boost": {
        **MANUAL,
        "adasum": True,
        "grad_freeze": True,
        "centralize": True,
        "grad_accumulation": True,
    },
    "grad_freeze": {"param_groups": 2, "total_steps": 2, "kind": "ramp", "freeze_p": 0.5},
    "grad_accumulation": {"every": 2},
    "clip": {"global_norm": 0.1},
    "optimizer": {"name": "adam", "learning_rate": 0.1},
}


@pytest.mark.parametrize("on", ["gradient", "update"])
@pytest.mark.parametrize("centralized", ["gradient", "update"])
def test_places(on, centralized):
    config = {**WHOLE, "adasum": {"on": on}, "centralize": {"on": centralized}}
    boost = AutoBoost("O0", config)
    middle = {
        ("gradient", "gradient"): ["adasum", "centralize", "clip", "adam"],
        ("gradient", "update"): ["adasum", "clip", "adam", "centralize"],
        ("update", "gradient"): ["centralize", "clip", "adam", "adasum"],
        ("update", "update"): ["clip", "adam", "adasum", "centralize"],
    }[on, centralized]
    assert names(boost.optimizer(params=layers())) == ["accumulate", "freeze", *middle]
    told = [line.split(":")[0].removesuffix("_update") for line in boost.describe().order]
    assert told == ["accumulate", "freeze", *middle]


def test_what_the_clip_sees_is_told():
    clip = {"clip": {"value": 1.0}}
    (line,) = (
        o for o in AutoBoost("O0", {**ADASUM, **clip}).describe().order if o.startswith("clip")
    )
    assert line == "clip: on the gradient of the trainable leaves, combined by AdaSum"
    (line,) = (
        o
        for o in AutoBoost("O0", {**WHOLE, "adasum": {"on": "update"}}).describe().order
        if o.startswith("clip")
    )
    assert line == "clip: on the window's mean gradient of the trainable leaves, each device's own"


def test_updates_are_combined_once_a_window():
    config = {
        "boost": {**MANUAL, "adasum": True, "grad_accumulation": True},
        "grad_accumulation": {"every": 2},
        "adasum": {**OWN, "on": "update"},
        "clip": {"global_norm": 0.1},
    }
    boost, params = AutoBoost("O0", config), jnp.zeros(3)
    tx = boost.optimizer(optax.adam(0.1), params)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1), adasum("device"))
    ours, told = run(boost.train_step(quadratic, tx, mesh=PAIR), params, BATCHES)
    by_hand = boostax.train_step(quadratic, boostax.accumulate(inner, 2), mesh=PAIR)
    equal(ours.params, run(by_hand, params, BATCHES)[0].params)
    assert int(told["updates"]) == 1
    # The sums of the window and the moments are each device's own.
    own = [leaf for leaf in jax.tree.leaves(ours.opt_state) if leaf.shape == (2, 3)]
    assert len(own) == 3
    assert all(np.any(leaf[0] != leaf[1]) for leaf in own)


def test_centralized_updates_stay_centralized():
    config = {
        "boost": {**MANUAL, "adasum": True, "centralize": True},
        "adasum": {**OWN, "on": "update"},
        "centralize": {"on": "update"},
    }
    boost, params = AutoBoost("O0", config), layers()
    step = boost.train_step(tanh_net, boost.optimizer(optax.adam(0.1), params), mesh=PAIR)
    state, _ = run(step, params, BATCHES)
    for name, layer in params.items():
        moved = np.asarray(state.params[name]["kernel"] - layer["kernel"])
        assert np.abs(moved).max() > 0.01
        np.testing.assert_allclose(moved.mean(axis=0), 0.0, atol=1e-6)


def test_a_windows_sum_is_its_mean_times_its_weight():
    """A common factor comes out of AdaSum: two micro-batches of eight examples make it 16."""
    section = {"every": 2, "reduce": "sum"}
    flags = {**MANUAL, "adasum": True, "grad_accumulation": True}
    ends = {}
    for reduce in ("mean", "sum"):
        config = {"boost": flags, "grad_accumulation": {**section, "reduce": reduce}, "adasum": OWN}
        boost, params = AutoBoost("O0", config), jnp.zeros(3)
        step = boost.train_step(quadratic, boost.optimizer(optax.sgd(0.1), params), mesh=PAIR)
        state, _ = run(step, params, BATCHES)
        ends[reduce] = np.asarray(state.params)
    np.testing.assert_allclose(ends["sum"], 16 * ends["mean"], rtol=1e-5)


LOCAL = {"on": "update", "local_steps": 2}


@pytest.mark.parametrize("outer", [None, {"name": "sgd", "learning_rate": 0.7, "momentum": 0.9}])
def test_local_steps_train_as_the_chain_made_by_hand(outer):
    section = {**OWN, **LOCAL, **({} if outer is None else {"outer": outer})}
    flags = {**MANUAL, "adasum": True, "centralize": True}
    config = {
        "boost": flags,
        "adasum": section,
        "centralize": {"on": "update"},
        "clip": {"value": 1.0},
    }
    boost, params = AutoBoost("O0", config), jnp.zeros(3)
    tx = boost.optimizer(optax.adam(0.1), params)
    assert names(tx)[:2] == ["local_steps", "clip"]
    assert names(tx)[-1] == "centralize"
    ours, _ = run(boost.train_step(quadratic, tx, mesh=PAIR), params, BATCHES * 2)
    inner = optax.chain(optax.clip(1.0), optax.adam(0.1))
    made = None if outer is None else optax.sgd(0.7, 0.9)
    by_hand = boostax.local_steps(inner, 2, adasum("device"), outer=made)
    theirs, _ = run(boostax.train_step(quadratic, by_hand, mesh=PAIR), params, BATCHES * 2)
    equal(ours.params, theirs.params)
    assert np.all(np.asarray(ours.params) != 0)
    order = [line.split(":")[0] for line in boost.describe().order]
    assert order == ["local_steps", "clip", "your optimizer", "adasum_update", "centralize_update"]
    notes = boost.describe(
        step=boost.train_step(quadratic, tx, mesh=PAIR), state=ours, batch=BATCHES[0]
    ).notes
    assert notes[0] == "adasum: 2 devices, combined by AdaSum over 'device', every 2 updates"


def test_local_steps_inside_a_window():
    config = {
        "boost": {**MANUAL, "adasum": True, "grad_accumulation": True},
        "grad_accumulation": {"every": 2},
        "adasum": {**OWN, **LOCAL},
    }
    boost, params = AutoBoost("O0", config), jnp.zeros(3)
    tx = boost.optimizer(optax.sgd(0.1), params)
    assert names(tx)[:2] == ["accumulate", "local_steps"]
    step = boost.train_step(quadratic, tx, mesh=PAIR)
    half, _ = run(step, params, BATCHES)  # one update, which each device made alone
    assert np.all(np.asarray(half.params) == 0)
    whole, told = run(step, params, BATCHES * 2)
    assert np.all(np.asarray(whole.params) != 0)
    assert int(told["updates"]) == 2


def test_freezing_and_local_steps_do_not_go_together():
    with pytest.raises(ConfigError, match=r"boost\.grad_freeze: .*would not learn of it"):
        AutoBoost("O2", {"adasum": LOCAL})
    boost = AutoBoost("O0", {"boost": {"mode": "enable_all"}, "adasum": LOCAL})
    assert "grad_freeze" not in boost.enabled
    assert {"adasum", "centralize", "grad_accumulation"} <= set(boost.enabled)


def test_the_step_needs_local_steps_where_they_are_asked_for():
    boost = AutoBoost("O0", {**ADASUM, "adasum": LOCAL})
    with pytest.raises(ValueError, match="adasum is on, but tx holds no local_steps"):
        boost.train_step(quadratic, optax.chain(optax.sgd(0.1), adasum("device")))


def sent(text):
    """Return how many numbers the permutes and gathers of an HLO text bring in."""
    shapes = re.findall(
        r"= f32\[([\d,]*)\]\S* (?:collective-permute|all-gather)(?:-start)?\(", text
    )
    return sum(int(np.prod([int(d) for d in s.split(",") if d] or [1])) for s in shapes)


def test_frozen_leaves_are_not_exchanged():
    params = {f"layer_{i}": {"kernel": jnp.eye(64), "bias": jnp.zeros(64)} for i in range(2)}
    config = {"grad_freeze": {"param_groups": 2, "total_steps": 2, "kind": "ramp", "freeze_p": 0.5}}
    boost = AutoBoost("O2", {**config, "less_bn": {"gc_flag": False}})
    step = boost.train_step(tanh_net, boost.optimizer(optax.sgd(0.1), params))
    state, x = step.init(params), np.ones((8, 64), np.float32)
    whole, half = (sent(step.lower(state, x, index=i).compile().as_text()) for i in range(2))
    assert half == whole / 2 > 0


# Buffers


def test_split_points_and_order_reach_the_exchange_and_those_beyond_are_told():
    params = layers()
    order = [f"layer_{i}/{name}" for i in (1, 0) for name in ("kernel", "bias")]
    config = {**ADASUM, "common": {"gradient_split_groups": [2, 4, 9]}}
    boost = AutoBoost("O0", config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx = boost.optimizer(optax.sgd(0.1), params, order=order)
        tx.init(params)
    exchanging = _info.find(tx, "adasum").static
    assert exchanging.buckets.points == (2,)
    assert exchanging.describe(params).buffers == (tuple(order[:2]), tuple(order[2:]))
    told = boost.describe(params, tx)
    assert told.notes == (
        "adasum: one group of 8 devices, combined by AdaSum over 'device'",
        "common.gradient_split_groups: 4, 9 at or beyond the last leaf: nothing is cut there",
    )
    assert "note: common.gradient_split_groups: 4, 9" in str(told)
    fates = {p.path: p.fate for p in told.parameters}
    assert fates["layer_1/bias"] == "adasum: combined by AdaSum over 'device', buffer 1 of 2"
    one = AutoBoost("O0", {**ADASUM, "common": {"gradient_split_groups": 2}})
    assert _info.find(one.optimizer(optax.sgd(0.1), params), "adasum").static.buckets.points == (2,)


def test_start_reads_the_forward_order_where_it_matters(monkeypatch):
    params, seen = {"z": jnp.ones((3, 3)), "a": jnp.ones((3, 1))}, []

    def loss(params, x):
        seen.append(1)
        return jnp.mean(x @ params["z"] @ params["a"])

    boost = AutoBoost("O0", {**ADASUM, "common": {"gradient_split_groups": 1}})
    step, state = boost.start(loss, optax.sgd(0.1), params, BATCHES[0])
    exchanging = _info.find(step.tx, "adasum").static
    assert exchanging.describe(params).buffers == (("z",), ("a",))
    state, metrics = step(state, BATCHES[0])
    assert int(metrics["updates"]) == 1
    monkeypatch.setattr("boostax.auto.forward_order", None)  # not called for one buffer
    AutoBoost("O0", ADASUM).start(loss, optax.sgd(0.1), params, BATCHES[0])


def test_settings_reach_the_exchange():
    section = {"granularity": "tree", "algorithm": "gather"}
    tx = AutoBoost("O0", {**ADASUM, "adasum": section}).optimizer(optax.sgd(0.1))
    settings = _info.find(tx, "adasum").settings
    assert {key: settings[key] for key in section} == section


# Meshes of one's own


def test_a_mesh_of_ones_own_must_fit():
    params = layers()
    own = AutoBoost("O0", {**ADASUM, "adasum": {"axis_name": "data"}})
    tx = own.optimizer(optax.sgd(0.1), params)
    with pytest.raises(
        ValueError, match=r"adasum goes over \['data'\], axes of a mesh of your own"
    ):
        own.train_step(tanh_net, tx)
    with pytest.raises(
        ValueError, match=r"has the axes \['device'\], but adasum goes over \['data'"
    ):
        own.train_step(tanh_net, tx, mesh=data_mesh())
    ours = AutoBoost("O0", ADASUM)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(ValueError, match=r"set adasum\.axis_name"):
        ours.train_step(tanh_net, ours.optimizer(optax.sgd(0.1), params), mesh=mesh)
    assert own.train_step(tanh_net, tx, mesh=mesh).settings.replicas.size == 4
    told = own.describe(params, tx).notes
    assert told[0] == "adasum: AdaSum over 'data', of the mesh that you pass"
    inner = AutoBoost("O0", {"adasum": {"axis_name": "data", "inner_axis": "x"}, **ADASUM})
    assert inner.describe().notes == (
        "adasum: the mean over 'x', then AdaSum over 'data', of the mesh that you pass",
    )


def test_descriptions_tell_groups_and_devices():
    def told(size):
        common = {} if size is None else {"common": {"device_number": size}}
        return AutoBoost("O0", {**ADASUM, **common}).describe().notes

    assert told(None) == ("adasum: one group of 8 devices, combined by AdaSum over 'device'",)
    assert told(1) == ("adasum: 8 groups of one device, combined by AdaSum over 'host'",)
    assert told(2) == (
        "adasum: 4 groups of 2 devices: the mean over 'device' inside a group, AdaSum over 'host' "
        "between groups",
    )
    assert AutoBoost("O1").describe().notes == ()
    boost, params = AutoBoost("O0", {**ADASUM, "adasum": {"axis_name": "data"}}), jnp.zeros(3)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    step = boost.train_step(quadratic, boost.optimizer(optax.sgd(0.1), params), mesh=mesh)
    whole = boost.describe(step=step, state=step.init(params), batch=BATCHES[0])
    assert whole.notes[0] == "adasum: 2 devices, combined by AdaSum over 'data'"
    assert "gradients are combined by the exchange in tx" in str(whole)


def test_one_device_changes_nothing_and_is_told():
    params, mesh = jnp.zeros(3), data_mesh(devices=jax.devices()[:1])
    boost = AutoBoost("O0", {**ADASUM, "adasum": {"axis_name": "device"}})
    step = boost.train_step(quadratic, boost.optimizer(optax.sgd(0.1, 0.9), params), mesh=mesh)
    state, _ = run(step, params, BATCHES)
    alone, _ = run(boostax.train_step(quadratic, optax.sgd(0.1, 0.9)), params, BATCHES)
    np.testing.assert_allclose(state.params, alone.params, rtol=1e-6)
    told = boost.describe(step=step, state=state, batch=BATCHES[0])
    assert told.notes[0] == "adasum: one device: nothing to combine"


# What does not go together

searching = lambda: optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=4)
)


def own_freeze():
    return boostax.freeze(optax.sgd(0.1), boostax.Freezing([["layer_0/*"], ["layer_1/*"]], (0, 1)))


@pytest.mark.parametrize(
    ("tx", "on", "message"),
    [
        (lambda: optax.chain(adasum("device"), optax.sgd(0.1)), "gradient", "exchanges between"),
        (lambda: optax.MultiSteps(optax.sgd(0.1), 2), "gradient", "it accumulates by itself"),
        (lambda: boostax.accumulate(optax.sgd(0.1), 2), "update", "it accumulates by itself"),
        (own_freeze, "gradient", "would send the frozen leaves too"),
        (searching, "gradient", "takes the slope from each device's own gradient"),
        (searching, "update", "a line of its own"),
        (lambda: optax.lbfgs(0.1, linesearch=None), "gradient", "curvature pairs of L-BFGS"),
        (optax.polyak_sgd, "update", "the loss is that of all devices"),
        (optax.contrib.momo, "update", "the loss is that of all devices"),
    ],
)
def test_optimizers_that_do_not_go_with_it(tx, on, message):
    config = {**ADASUM, "adasum": {"on": on}}
    with pytest.raises(ConfigError, match=rf"boost\.adasum: .*this optimizer: .*{message}"):
        AutoBoost("O0", config).optimizer(tx())
    everything = {"boost": {"mode": "enable_all"}, "adasum": {"on": on}}
    boost = AutoBoost("O0", {**everything, "grad_freeze": {"param_groups": 2}})
    made = boost.optimizer(tx(), layers())
    left = {
        d.technique for d in boost.describe(tx=made).resolution.decisions if d.state == "left out"
    }
    assert "adasum" in left
    # What was left out asks for no mesh of all devices.
    assert boost.train_step(tanh_net, made).settings.replicas is None


@pytest.mark.parametrize(
    ("tx", "on"),
    [
        (optax.polyak_sgd, "gradient"),
        (optax.contrib.momo, "gradient"),
        (lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "update"),
        (lambda: optax.adamw(0.1, weight_decay=0.1), "update"),
        (lambda: optax.lamb(0.1), "gradient"),
    ],
)
def test_optimizers_that_go_with_it_train(tx, on):
    boost, params = AutoBoost("O0", {**ADASUM, "adasum": {**OWN, "on": on}}), jnp.zeros(3)
    step = boost.train_step(quadratic, boost.optimizer(tx(), params), mesh=PAIR)
    state, first = run(step, params, BATCHES[:1])
    for _ in range(2):
        state, metrics = step(state, BATCHES[0])
    assert float(metrics["loss"]) < float(first["loss"])
    for leaf in jax.tree.leaves(state.params):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def test_named_optimizers_are_checked_with_the_config():
    with pytest.raises(ConfigError, match=r"boost\.adasum: adasum does not go with this optimizer"):
        boostax.load_config({**ADASUM, "optimizer": {"name": "lbfgs"}})


def test_the_step_needs_the_exchange():
    with pytest.raises(ValueError, match="adasum is on, but tx holds no adasum"):
        AutoBoost("O0", ADASUM).train_step(tanh_net, optax.sgd(0.1))
