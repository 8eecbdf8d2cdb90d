"""AutoBoost with loss scales: from the config to the step, the description, what they go with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import boostax
from boostax import AutoBoost
from boostax.errors import ConfigError
from boostax.parallel import data_mesh

HALF = jnp.float16
GROUPS = ["layers", ["gate", "head"]]
BATCH = np.ones((4, 2), np.float32)


def manual(*flags, **sections):
    return {"boost": {"mode": "manual", **dict.fromkeys(flags, True)}, **sections}


def params():
    return {
        "gate": jnp.ones(2, HALF),
        "head": jnp.ones((2, 1), HALF),
        "layers": jnp.full((3, 2, 2), 0.5, HALF),
    }


def loss_fn(params, x):
    """Three layers in a scan, whose gate belongs to the head's group."""

    def layer(h, kernel):
        return jnp.tanh(h @ kernel) * params["gate"][None], None

    h, _ = jax.lax.scan(layer, x.astype(HALF), params["layers"])
    return jnp.mean((h @ params["head"]).astype(jnp.float32) ** 2)


def times(params, x):
    return jnp.mean(params * x)


def used(step, state, batches):
    """Return the last state, and the scale that each call used."""
    scales = []
    for batch in batches:
        state, metrics = step(state, batch)
        scales.append(np.asarray(metrics["loss_scale"]).tolist())
    return state, scales


def test_nothing_switches_it_on_by_itself():
    for level in ("O0", "O1", "O2"):
        boost = AutoBoost(level)
        assert not {"loss_scale", "loss_scale_group"} & set(boost.enabled)
        assert boost.loss_scale is None
    assert AutoBoost("O0", {"loss_scale": {"init": 4}}).loss_scale is None
    assert "loss scale" not in str(AutoBoost().describe())


def test_the_dynamic_scale_of_the_section():
    section = {"init": 8, "factor": 4, "window": 2, "min_scale": 2, "max_scale": 64}
    boost = AutoBoost("O1", manual("loss_scale", loss_scale=section))
    assert boost.loss_scale == boostax.DynamicLossScale(8, 4, 2, 2, 64)
    step, state = boost.start(times, optax.sgd(1.0), jnp.float32(0), BATCH[0])
    bad = np.full(2, np.inf, np.float32)
    state, scales = used(step, state, [BATCH[0]] * 5 + [bad] * 4)
    # Up by 4 after two good calls, at most to 64; down at each bad one, at least to 2.
    assert scales == [8, 8, 32, 32, 64, 64, 16, 4, 2]
    assert (int(state.loss_scale.overflows), int(state.loss_scale.stuck)) == (4, 1)
    # Five updates by the gradient 1, and none by infinity.
    assert float(state.params) == -5.0
    assert AutoBoost("O0", manual("loss_scale")).loss_scale == boostax.DynamicLossScale()


def test_a_fixed_scale_stays_where_it_is():
    boost = AutoBoost("O0", manual("loss_scale", loss_scale={"dynamic": False, "init": 0.5}))
    assert boost.loss_scale == 0.5
    step, state = boost.start(times, optax.sgd(1.0), jnp.float32(0), BATCH[0])
    bad = np.full(2, np.inf, np.float32)
    state, scales = used(step, state, [BATCH[0], bad, BATCH[0]])
    assert scales == [0.5] * 3
    assert float(state.params) == -2.0
    assert "loss scale: fixed at 2**-1;" in str(boost.describe())


def test_the_keyword_wins():
    boost = AutoBoost("O0", manual("loss_scale", loss_scale={"init": 8}))
    tx = boost.optimizer(optax.sgd(1.0))
    given = boostax.DynamicLossScale(16)
    step = boost.train_step(times, tx, loss_scale=given)
    state, scales = used(step, step.init(jnp.float32(0)), [BATCH[0]])
    assert scales == [16]
    told = boost.describe(step=step, state=state, batch=BATCH[0])
    assert "loss scale: DynamicLossScale(init=16, " in str(told)
    assert "as train_step was given it" in str(told)
    step = boost.train_step(times, tx, loss_scale=None)
    state = step.init(jnp.float32(0))
    assert state.loss_scale is None
    told = boost.describe(step=step, state=state, batch=BATCH[0])
    assert "none, because train_step was given loss_scale=None" in told.notes[0]
    # Where the config has none, the keyword stands alone.
    own = AutoBoost().train_step(times, tx, loss_scale=given)
    assert own.settings.loss_scale is given


@pytest.fixture(scope="module")
def grouped():
    section = {"groups": GROUPS, "init": [4, 16], "window": 2, "max_scale": [4, 64]}
    boost = AutoBoost(
        "O0",
        manual(
            "loss_scale_group",
            "grad_accumulation",
            loss_scale_group=section,
            grad_accumulation={"microbatch": 2},
        ),
    )
    step, state = boost.start(loss_fn, optax.sgd(0.1), params(), BATCH)
    return boost, step, state, boost.describe(step=step, state=state, batch=BATCH)


def test_the_groups_of_the_section(grouped):
    boost, step, state, _ = grouped
    assert boost.loss_scale == boostax.GroupLossScale(
        GROUPS, init=[4, 16], window=2, max_scale=[4, 64]
    )
    state, scales = used(step, jax.tree.map(jnp.copy, state), [BATCH] * 4)
    # A call of two micro-batches is a window; the first group is at its bound.
    assert scales == [[4, 16], [4, 32], [4, 64], [4, 64]]
    plain = boostax.train_step(loss_fn, optax.sgd(0.1), microbatch=2)
    expected = plain.init(params())
    for _ in range(4):
        expected, _ = plain(expected, BATCH)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=4e-3, atol=4e-3),
        state.params,
        expected.params,
    )


def test_description_of_groups(grouped):
    boost, _, _, told = grouped
    assert told.step is not None
    assert [(g.number, g.init, g.leaves) for g in told.step.scale_groups] == [
        (1, 4.0, ("layers",)),
        (2, 16.0, ("gate", "head")),
    ]
    # The gate is used in each turn of the scan; a micro-batch holds two examples.
    found = [(b.before, b.after, b.what, b.times) for b in told.step.scale_boundaries]
    assert found == [
        ("group 2", "group 1", "float16[2,2] into dot_general", 3),
        ("group 1", "group 2", "float16[2,2] into mul", 3),
    ]
    assert all(b.equation.count(".") == 1 for b in told.step.scale_boundaries)
    fates = {p.path: p.fate for p in told.parameters}
    assert fates["layers"] == "trained as usual; loss scale: group 1"
    assert fates["gate"] == fates["head"] == "trained as usual; loss scale: group 2"
    words = (
        "GroupLossScale(2 groups, init=(4, 16), factor=2, window=2, min_scale=2**-24, "
        "max_scale=(4, 64))"
    )
    assert told.step.settings["loss_scale"] == words
    assert told.notes == (
        f"loss scale: {words}; gradients are unscaled, and an overflow found, ahead of the chain",
    )
    for part in ("groups of the loss scale", "boundaries between them", "float16[2,2] into mul"):
        assert part in str(told)
    # Parameters alone tell the groups as well.
    alone = boost.describe(params())
    assert [p.fate for p in alone.parameters] == [p.fate for p in told.parameters]
    assert alone.notes == told.notes
    assert boost.describe().notes == told.notes


def test_the_plain_step_has_no_loss_scale(grouped):
    _, _, _, told = grouped
    bare = boostax.train_step(loss_fn, optax.sgd(0.1))
    expected = bare.describe(bare.init(params()), BATCH)
    assert told.step.plain == expected.plain
    assert told.step.variants[0].flops > told.step.plain.flops
    assert expected.scale_groups == expected.scale_boundaries == ()
    assert "loss_scale" not in expected.settings
    assert "groups of the loss scale" not in str(expected)


def test_description_of_one_scale():
    boost = AutoBoost(
        "O0", manual("loss_scale", loss_scale={"init": 8192, "min_scale": 0.25, "max_scale": 1e5})
    )
    step, state = boost.start(times, optax.sgd(1.0), jnp.float32(0), BATCH[0])
    told = step.describe(state, BATCH[0])
    words = "DynamicLossScale(init=2**13, factor=2, window=2000, min_scale=2**-2, max_scale=100000)"
    assert told.settings["loss_scale"] == words
    assert told.settings["skip_nonfinite"] is True
    assert told.scale_groups == told.scale_boundaries == ()
    assert told.parameters[0].fate == "trained as usual"
    section = {"groups": ["*"], "rule": "reference"}
    grouped = AutoBoost("O0", manual("loss_scale_group", loss_scale_group=section))
    expected = "GroupLossScale(1 groups, rule='reference', init=2**15, min_scale=2**-24, "
    assert expected in grouped.describe().notes[0]


def test_an_overflow_on_one_device_is_everyones():
    pair = data_mesh(devices=jax.devices()[:2])
    boost = AutoBoost(
        "O0",
        manual(
            "loss_scale",
            "adasum",
            "grad_accumulation",
            "centralize",
            loss_scale={"init": 1024},
            adasum={"axis_name": "device"},
            grad_accumulation={"every": 2, "nonfinite": "skip_window"},
            clip={"global_norm": 1.0},
        ),
    )
    tx = boost.optimizer(optax.sgd(0.1, 0.9), jnp.zeros(2))
    step = boost.train_step(lambda p, x: jnp.mean(x @ p), tx, mesh=pair)
    state = step.init(jnp.zeros(2))
    good = BATCH * np.float32([[3.0, 4.0]])
    bad = good.copy()
    bad[-1] = np.inf
    for batch in (good, bad, good, good):
        state, metrics = step(state, batch)
    # The first window is dropped as a whole; the second one's gradient, (3, 4), is clipped to 1.
    np.testing.assert_allclose(state.params, [-0.06, -0.08], rtol=1e-6)
    assert (float(metrics["loss_scale"]), int(metrics["updates"])) == (512.0, 1)
    assert int(state.loss_scale.overflows) == 1
    for leaf in jax.tree.leaves((state.params, state.loss_scale)):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
        assert leaf.sharding.spec == PartitionSpec()


def test_nnx_and_marks_of_ones_own():
    section = {"groups": ["stem/*", "head/*"], "init": [2, 8]}
    boost = AutoBoost("O0", manual("loss_scale_group", loss_scale_group=section))
    mark = boost.loss_scale

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Linear(2, 2, rngs=rngs)
            self.head = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(mark(self.stem(x), 1, 2))

    model = Net(nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    step, state = boost.start(loss, optax.sgd(0.1), model, BATCH)
    told = step.describe(state, BATCH)
    assert [g.leaves for g in told.scale_groups] == [
        ("stem/bias", "stem/kernel"),
        ("head/bias", "head/kernel"),
    ]
    assert [(b.before, b.after, b.what) for b in told.scale_boundaries] == [
        ("group 1", "group 2", "float32[4,2] into name")
    ]
    state, scales = used(step, state, [BATCH])
    assert scales == [[2, 8]]
    merged = state.merge(model)
    assert float(loss(merged, BATCH)) < float(loss(model, BATCH))


def test_leaves_without_a_group_are_listed():
    section = {"groups": ["layers", "head"]}
    boost = AutoBoost("O0", manual("loss_scale_group", loss_scale_group=section))
    with pytest.raises(ValueError, match="GroupLossScale: in no group: gate"):
        boost.start(loss_fn, optax.sgd(0.1), params(), BATCH)
    with pytest.raises(ConfigError, match=r"loss_scale_group\.groups: missing"):
        AutoBoost("O0", manual("loss_scale_group"))


def test_enable_all_takes_the_groups_or_the_one_scale():
    everything = {"boost": {"mode": "enable_all"}}
    assert AutoBoost("O0", everything).loss_scale == boostax.DynamicLossScale()
    boost = AutoBoost("O0", {**everything, "loss_scale_group": {"groups": GROUPS}})
    assert boost.loss_scale == boostax.GroupLossScale(GROUPS)
    layer = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    tx = boost.optimizer(optax.lbfgs(), layer)
    assert "loss_scale_group" in boost.describe(tx=tx).resolution.enabled
