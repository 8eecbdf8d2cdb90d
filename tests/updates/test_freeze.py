"""Freezing: held leaves and state, global measures, the index, statistics, resume, errors."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from boostax import (
    FreezeState,
    Freezing,
    StateMismatchError,
    accumulate,
    freeze,
    freeze_schedule,
    parameter_groups,
    train_step,
)
from boostax._info import find, walk
from boostax.updates._skip import skip

BOTH, LATE = ["a", "b"], ["b"]


def _params():
    return {"a": jnp.asarray([1.0, -2.0, 3.0]), "b": jnp.asarray([[0.5, -1.5], [2.0, 1.0]])}


def _grads(step):
    return jax.tree.map(lambda p: jnp.cos(p + step) * 0.5, _params())


def _assert_equal(tree, other):
    chex_leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    for left, right in chex_leaves:
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def _loss(params):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


# The inner transformation, and what it is when it has only the leaf b.
INNERS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "momentum": optax.sgd(0.1, 0.9),
    "lamb": optax.lamb(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1),
    "multi_transform": optax.multi_transform(
        {"m": optax.adam(0.1), "v": optax.sgd(0.1)},
        lambda tree: jax.tree.map(lambda leaf: "m" if leaf.ndim > 1 else "v", tree),
    ),
    "masked": optax.masked(
        optax.adam(0.1), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.01, 5)),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "sm3": optax.sm3(0.1),
    "linesearch": optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
    "lbfgs": optax.lbfgs(memory_size=2),
}


@pytest.mark.parametrize("name", INNERS)
def test_the_rest_trains_as_if_it_were_alone(name):
    inner = INNERS[name]
    tx = freeze(inner, Freezing([BOTH, LATE], [1] * 10))
    alone = optax.with_extra_args_support(inner)
    params = start = _params()
    state = tx.init(params)
    b = {"b": params["b"]}
    b_state = alone.init(b)
    fixed = jnp.sum(params["a"] ** 2)
    for step in range(3):
        grads = _grads(step)
        extra = {"value": _loss(params), "grad": grads, "value_fn": _loss}
        updates, state = tx.update(grads, state, params, **extra)
        b_extra = {"value": _loss(params), "grad": {"b": grads["b"]}}
        b_extra["value_fn"] = lambda b: _loss({"a": start["a"], **b})
        b_updates, b_state = alone.update({"b": grads["b"]}, b_state, b, **b_extra)
        _assert_equal(updates["b"], b_updates["b"])
        assert not updates["a"].any()
        params, b = optax.apply_updates(params, updates), optax.apply_updates(b, b_updates)
    _assert_equal(params["a"], start["a"])
    assert float(fixed) == 14.0


@pytest.mark.quick
def test_a_frozen_leaf_is_bitwise_unchanged_after_a_hundred_steps():
    tx = freeze(optax.adamw(0.1, weight_decay=0.1), Freezing([BOTH, LATE], [1] * 100))
    alone = optax.adamw(0.1, weight_decay=0.1)
    params = _params()
    step = jax.jit(lambda g, s, p: tx.update(g, s, p, freeze_index=1))
    b_step = jax.jit(alone.update)
    state, b, b_state = tx.init(params), params["b"], alone.init(params["b"])
    for i in range(100):
        updates, state = step(_grads(i), state, params)
        b_updates, b_state = b_step(_grads(i)["b"], b_state, b)
        params, b = optax.apply_updates(params, updates), optax.apply_updates(b, b_updates)
    _assert_equal(params["a"], _params()["a"])
    _assert_equal(params["b"], b)
    # Zero gradients into adamw would already have moved it by the decay in the first step.
    moved, _ = alone.update(jnp.zeros(3), alone.init(params["a"]), params["a"])
    np.testing.assert_allclose(moved, -0.01 * params["a"], rtol=1e-6)


def test_frozen_gradients_stay_out_of_the_clip():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    grads = {"a": jnp.full(2, 1000.0), "b": jnp.asarray([0.3, 0.4])}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = freeze(inner, Freezing([BOTH, LATE], [1]))
    updates, _ = tx.update(grads, tx.init(params), params)
    _assert_equal(updates["b"], np.float32([-0.3, -0.4]))
    _assert_equal(updates["a"], np.zeros(2))


def test_moments_are_on_hold_and_counts_move_on():
    tx = freeze(optax.adam(0.1), Freezing([BOTH, LATE], [0, 1, 1, 0]))
    params = _params()
    state = tx.init(params)
    _, state = tx.update(_grads(0), state, params)
    held = state.inner_state[0]
    for _ in range(2):
        _, state = tx.update(_grads(1), state, params)
    now = state.inner_state[0]
    _assert_equal((now.mu["a"], now.nu["a"]), (held.mu["a"], held.nu["a"]))
    assert (now.mu["b"] != held.mu["b"]).all()
    assert int(now.count) == 3  # the global step, by which bias is corrected
    assert int(state.count) == 3


def test_learning_rate_schedules_read_the_global_step():
    rate = optax.piecewise_constant_schedule(1.0, {2: 0.1})
    tx = freeze(optax.sgd(rate), Freezing([BOTH, LATE], [1, 1]))
    params, ones = _params(), jax.tree.map(jnp.ones_like, _params())
    state = tx.init(params)
    for expected in (0.0, 0.0, -0.1):
        updates, state = tx.update(ones, state, params)
        np.testing.assert_allclose(updates["a"], expected)


def test_index_by_state_equals_static_index():
    freezing = Freezing([BOTH, LATE], [0, 1, 1])
    tx = freeze(optax.adamw(0.1), freezing)
    params = _params()
    by_state = jax.jit(lambda g, s, p: tx.update(g, s, p))
    by_host = jax.jit(tx.update, static_argnames="freeze_index")
    one = two = tx.init(params)
    for step in range(5):
        u1, one = by_state(_grads(step), one, params)
        u2, two = by_host(_grads(step), two, params, freeze_index=freezing.index_at(step))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), u1, u2)
        assert (np.asarray(u1["a"]) == 0).all() == (step in (1, 2))
    assert by_state._cache_size() == 1
    assert by_host._cache_size() == 2
    assert int(one.count) == int(two.count) == 5


def test_index_at():
    freezing = Freezing([BOTH, LATE], [1, 0, 1])
    traced = jax.jit(freezing.index_at)
    for count, index in enumerate([1, 0, 1, 0, 0]):
        assert freezing.index_at(count) == freezing.index_at(np.int32(count)) == index
        assert freezing.index_at(jnp.int32(count)) == index
        assert int(traced(jnp.int32(count))) == index
    assert traced(jnp.int32(0)).dtype == jnp.int32


def test_only_the_trained_leaves_are_updated_in_the_compiled_code():
    params = {f"layer_{i}": jnp.ones((64, 64)) for i in range(4)}
    tx = freeze(optax.adam(0.1), Freezing(parameter_groups(params, 4), [0]))
    state = tx.init(params)

    def flops(index):
        update = jax.jit(lambda g, s, p: tx.update(g, s, p, freeze_index=index))
        return update.lower(params, state, params).compile().cost_analysis()["flops"]

    whole = flops(0)
    for index in range(1, 4):
        assert flops(index) / whole == pytest.approx(1 - index / 4, abs=0.05)


def test_scan_over_steps():
    tx = freeze(optax.adam(0.1), Freezing([BOTH, LATE], [0, 1, 0, 1]))

    def step(carry, i):
        params, state = carry
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
        return (optax.apply_updates(params, updates), state), params["a"]

    params = _params()
    (_, state), seen = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(5))
    seen = np.asarray(seen)
    moved = [not np.array_equal(seen[i], seen[i + 1]) for i in range(4)]
    assert moved == [True, False, True, False]
    assert int(state.count) == 5


@given(
    flags=st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    name=st.sampled_from(["adamw", "momentum", "clip"]),
    seed=st.integers(0, 1000),
)
def test_held_means_bitwise_held(flags, name, seed):
    values = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
    params = {f"p{i}": jnp.asarray(values[i]) for i in range(4)}
    mask = {f"p{i}": flag for i, flag in enumerate(flags)}
    everything = dict.fromkeys(mask, True)
    tx = freeze(INNERS[name], Freezing([everything, mask], [0, 1]))
    _, state = tx.update(params, tx.init(params), params)
    updates, after = tx.update(params, state, params)
    for key, on in mask.items():
        assert np.any(updates[key]) == on
    if name == "adamw":
        adam, held = after.inner_state[0], state.inner_state[0]
        for key, on in mask.items():
            assert np.array_equal(adam.mu[key], held.mu[key]) == (not on)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_dtypes_are_the_same_at_every_index():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _params())
    tx = freeze(optax.adamw(0.1), Freezing([BOTH, LATE], [0, 1]))
    state = jax.tree.map(lambda s: s, tx.init(params))
    types = set()
    for index in (0, 1):
        updates, new_state = tx.update(params, state, params, freeze_index=index)
        types.add(str(jax.tree.map(lambda x: (x.dtype, x.shape), (updates, new_state))))
    assert len(types) == 1


def test_abstract_init_and_unknown_extra_arguments():
    tx = freeze(optax.adam(0.1), Freezing([BOTH, LATE], [1]))
    params = _params()
    abstract = jax.eval_shape(tx.init, jax.eval_shape(_params))
    state = tx.init(params)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    updates, _ = tx.update(params, state, unknown="x", weight=jnp.float32(3), freeze_index=1)
    assert not updates["a"].any()
    assert find(tx, "freeze").static == Freezing([BOTH, LATE], [1])


def test_inside_masked_and_multi_transform():
    params = {**_params(), "c": jnp.ones(2)}
    tx = optax.masked(
        freeze(optax.adam(0.1), Freezing([["a", "b"], ["b"]], [1])),
        {"a": True, "b": True, "c": False},
    )
    updates, _ = tx.update(params, tx.init(params), params)
    assert not updates["a"].any()
    _assert_equal(updates["c"], params["c"])


def test_skipped_windows_count():
    tx = optax.chain(freeze(optax.adam(0.1), Freezing([BOTH, LATE], [0, 1])), optax.identity())
    params = _params()
    state = tx.init(params)
    skipped = skip(state)
    assert int(skipped[0].count) == 1
    _assert_equal(skipped[0].inner_state, state[0].inner_state)
    updates, _ = tx.update(params, skipped, params)
    assert not updates["a"].any()


def test_masks_and_path_lists_are_the_same_groups():
    params = {"x": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}, "y": {"kernel": jnp.ones(2)}}
    everything = jax.tree.map(lambda _: True, params)
    by_mask = Freezing(
        [everything, {"x": {"kernel": False, "bias": False}, "y": {"kernel": True}}], [1]
    )
    paths = ["x/kernel", "x/bias", "y/kernel"]
    by_path = Freezing((set(paths), ("y/kernel",)), np.asarray([1]))
    by_pattern = Freezing([["*"], ["y/*"]], jnp.asarray([1]), params=params)
    by_groups = Freezing(parameter_groups(params, 2, order=paths), (1,))
    assert by_mask == by_path == by_pattern == by_groups
    assert len({by_mask, by_path, by_pattern, by_groups}) == 1
    assert by_mask.fingerprint == by_path.fingerprint == by_pattern.fingerprint
    assert by_mask != Freezing(by_mask.groups, [1, 0])
    with pytest.raises(ValueError, match="structure is not known"):
        by_path.trainable(1)
    assert by_path.bind(params).trainable(1) == by_mask.trainable(1)


def test_a_leaf_in_no_group_is_never_trained():
    freezing = Freezing([LATE], [0])
    tx = freeze(optax.adam(0.1), freezing)
    params = _params()
    updates, _ = tx.update(params, tx.init(params), params)
    assert not updates["a"].any()
    assert freezing.bind(params).trainable(0) == {"a": False, "b": True}
    assert freezing.bind(params).fingerprint == freezing.fingerprint


class Frozen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, name="bn_early")(nn.Dense(3, name="early")(x))
        x = nn.BatchNorm(use_running_average=False, name="bn_late")(nn.Dense(3, name="late")(x))
        return nn.Dense(1, name="head")(x)


def test_statistics_of_frozen_linen_norms_are_on_hold():
    net, x = Frozen(), jnp.arange(8.0).reshape(4, 2)
    variables = net.init(jax.random.key(0), x)
    order = [f"{m}/{leaf}" for m in ("early", "late", "head") for leaf in ("kernel", "bias")]
    order[2:2] = ["bn_early/scale", "bn_early/bias"]
    order[6:6] = ["bn_late/scale", "bn_late/bias"]
    groups = parameter_groups(variables["params"], 3, order=order)
    freezing = Freezing(groups, [1] * 20)
    old = {"batch_stats": variables["batch_stats"], "counters": {"n": jnp.int32(0)}}
    for _ in range(20):
        _, new = net.apply({"params": variables["params"], **old}, x, mutable=["batch_stats"])
        held = freezing.hold_statistics(
            1, old, {**new, "counters": {"n": old["counters"]["n"] + 1}}
        )
        _assert_equal(held["batch_stats"]["bn_early"], variables["batch_stats"]["bn_early"])
        assert (
            held["batch_stats"]["bn_late"]["mean"] != old["batch_stats"]["bn_late"]["mean"]
        ).any()
        assert jax.tree.structure(held) == jax.tree.structure(old)
        old = held
    assert int(old["counters"]["n"]) == 20
    assert freezing.hold_statistics(0, old, new) is new
    both = freezing.hold_statistics(2, old, new)
    _assert_equal(both["batch_stats"], old["batch_stats"])


def test_statistics_of_frozen_nnx_norms_are_on_hold():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.early = nnx.Linear(2, 3, rngs=rngs)
            self.bn = nnx.BatchNorm(3, rngs=rngs)
            self.bare = nnx.BatchNorm(3, use_scale=False, use_bias=False, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.bn_head = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.bn_head(self.drop(self.bare(self.bn(self.early(x)))))

    model = Model(nnx.Rngs(0))
    _, params, old = nnx.split(nnx.clone(model), nnx.Param, ...)
    order = ["early/kernel", "early/bias", "bn/scale", "bn/bias", "bn_head/scale", "bn_head/bias"]
    early = frozenset(order[:4])
    freezing = Freezing([order, [p for p in order if p not in early]], [1], params=params)
    model(jnp.arange(8.0).reshape(4, 2))
    _, _, new = nnx.split(model, nnx.Param, ...)
    held = freezing.hold_statistics(1, old, new)
    _assert_equal(held["bn"], old["bn"])
    _assert_equal(held["bn_head"], new["bn_head"])
    # Without parameters it goes with what is around it: the model, which is not wholly frozen.
    _assert_equal(held["bare"], new["bare"])
    assert int(held["drop"]["rngs"]["count"][...]) == 1
    assert (np.asarray(new["bn"]["mean"][...]) != np.asarray(old["bn"]["mean"][...])).any()
    assert jax.tree.structure(held) == jax.tree.structure(old)


def test_nnx_parameters():
    model = nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)))
    params = nnx.state(model, nnx.Param)
    tx = freeze(optax.adam(0.1), Freezing(parameter_groups(params, 3), [2]))
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert not updates["layers"][1]["kernel"][...].any()
    assert updates["layers"][2]["kernel"][...].all()
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def _run(tx, params, state, steps):
    update = jax.jit(tx.update)
    for step in steps:
        updates, state = update(_grads(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_saved_and_restored_at_every_step(tmp_path):
    schedule = freeze_schedule("interval", 2, full_fraction=0.5, total_steps=4)
    tx = freeze(optax.adamw(0.1), Freezing([BOTH, LATE], schedule))
    params, state = _params(), tx.init(_params())
    whole = _run(tx, params, state, range(6))
    with ocp.StandardCheckpointer() as saver:
        for stop in (1, 2, 4):
            here = _run(tx, params, state, range(stop))
            saver.save(tmp_path / str(stop), here)
            saver.wait_until_finished()
            back = saver.restore(tmp_path / str(stop), jax.eval_shape(lambda: (params, state)))
            text = flax.serialization.to_bytes(here)
            again = flax.serialization.from_bytes((params, state), text)
            for restored in (back, again):
                assert isinstance(restored[1], FreezeState)
                _assert_equal(_run(tx, *restored, range(stop, 6)), whole)


def test_a_state_of_another_run_is_refused():
    params = _params()
    freezing = Freezing([BOTH, LATE], [0, 1])
    tx = optax.chain(freeze(optax.adam(0.1), freezing), optax.identity())
    state = tx.init(params)
    freezing.check(state)
    other = Freezing([BOTH, LATE], [0, 1, 1])
    with pytest.raises(StateMismatchError, match="other groups or another schedule"):
        other.check(state)
    with pytest.raises(StateMismatchError, match="other groups"):
        freeze(optax.adam(0.1), other).update(params, state[0], params)
    with pytest.raises(StateMismatchError, match="restored without a target"):
        freezing.check(flax.serialization.to_state_dict(state))
    with pytest.raises(StateMismatchError, match=r"'c'.*which the parameters don't"):
        freeze(optax.adam(0.1), Freezing([["a", "b", "c"]], [0])).init(params)
    masks = [{"a": True, "b": True}]
    with pytest.raises(
        StateMismatchError, match=r"have 'bb', which the groups don't\. Did you mean"
    ):
        freeze(optax.adam(0.1), Freezing(masks, [0])).init({**params, "bb": params["b"]})


def test_a_fresh_state_can_be_donated_with_the_parameters():
    tx = freeze(optax.adam(0.1), Freezing([BOTH, LATE], [1]))
    params = _params()
    step = jax.jit(lambda p, s, g: tx.update(g, s, p), donate_argnums=(0, 1))
    updates, _ = step(params, tx.init(params), _grads(0))
    assert not updates["a"].any()


@pytest.mark.parametrize(
    ("groups", "schedule", "error", "text"),
    [
        (None, [0], ValueError, "a schedule needs groups"),
        ([BOTH], None, ValueError, "groups need a schedule"),
        ([BOTH, LATE], [], ValueError, "schedule is empty"),
        ([BOTH, LATE], [0, 2], ValueError, "holds the index 2, but with 2 groups"),
        ([BOTH, LATE], [0, -1], ValueError, "holds the index -1"),
        ([BOTH, LATE], [0.0, 1.0], TypeError, "1-D and of integers"),
        ([BOTH, LATE], [False, True], TypeError, "1-D and of integers"),
        ([BOTH, LATE], [0, True], TypeError, "holds bools"),
        ([BOTH, LATE], [[0, 1]], TypeError, "1-D and of integers"),
        ([BOTH, LATE], [[0, 1], [1]], TypeError, "one-dimensional"),
        ([BOTH, LATE], "01", TypeError, "schedule must be a tuple"),
        ([BOTH, LATE], 1, TypeError, "schedule must be a tuple"),
        ([], [0], ValueError, "groups is empty"),
        ([BOTH, []], [0], ValueError, r"groups\[1\] is empty"),
        (3, [0], TypeError, r"parameter_groups\(params, 3\)"),
        ({"a": True}, [0], TypeError, "one entry for each freeze index"),
        ([{"a": True}, {"a": False}], [0], ValueError, r"groups\[1\] trains nothing"),
        ([{"a": True}, {"b": True}], [0], ValueError, "another structure"),
        ([{"a": 1.0}], [0], TypeError, "got 1.0"),
    ],
)
def test_bad_groups_and_schedules(groups, schedule, error, text):
    with pytest.raises(error, match=text):
        Freezing(groups, schedule)


def test_bad_arguments():
    freezing = Freezing([BOTH, LATE], [1])
    with pytest.raises(TypeError, match=r"freezing must be a boostax\.Freezing"):
        freeze(optax.adam(0.1), {"a"})
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        freeze(0.1, freezing)
    tx = freeze(optax.adam(0.1), freezing)
    state = tx.init(_params())
    with pytest.raises(ValueError, match=r"freeze index: must be in \[0, 1\], got 2"):
        tx.update(_params(), state, freeze_index=2)
    with pytest.raises(TypeError, match="freeze index: must be an integer"):
        tx.update(_params(), state, freeze_index=True)
    with pytest.raises(ValueError, match="matches no leaf"):
        Freezing([["a", "z*"]], [0], params=_params())


@pytest.mark.parametrize(
    ("windowed", "name"),
    [
        (accumulate(optax.sgd(1.0), 2), "accumulate"),
        (optax.MultiSteps(optax.sgd(1.0), 2), "MultiSteps"),
        (optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(), "MultiSteps"),
        (optax.chain(optax.clip(1.0), accumulate(optax.sgd(1.0), 2)), "accumulate"),
        (optax.masked(accumulate(optax.sgd(1.0), 2), {"a": True, "b": True}), "accumulate"),
        (
            optax.inject_hyperparams(lambda rate: accumulate(optax.sgd(rate), 2))(rate=0.1),
            "accumulate",
        ),
    ],
)
def test_a_window_inside_is_refused(windowed, name):
    with pytest.raises(ValueError, match=rf"inner holds {name}, .*accumulate\(freeze\(inner"):
        freeze(windowed, Freezing([BOTH, LATE], [0, 1]))


def test_a_window_outside_holds_no_gradient_of_a_frozen_leaf():
    # Windows of two at the indices 0, 1, 0: a moves in the first and third by the mean of its own
    # two gradients, and not at all in the second.
    tx = accumulate(freeze(optax.sgd(1.0), Freezing([BOTH, LATE], [0, 1, 0])), 2)
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    state = tx.init(params)
    seen = []
    for value in (1.0, 3.0, 5.0, 7.0, 10.0, 20.0):
        grads = {"a": jnp.float32(value), "b": jnp.float32(value)}
        updates, state = tx.update(grads, state, params)
        seen.append((float(updates["a"]), float(updates["b"])))
    assert seen[1::2] == [(-2.0, -2.0), (0.0, -6.0), (-15.0, -15.0)]


def _injected(freezing, **settings):
    def factory(learning_rate, nothing=None, momentum=0.9):
        return freeze(optax.chain(optax.sgd(learning_rate, momentum)), freezing)

    return optax.inject_hyperparams(factory)(**settings)


@pytest.mark.parametrize("rate", [0.1, optax.linear_schedule(0.1, 0.01, 4)])
def test_inside_inject_hyperparams_the_step_finds_it(rate):
    freezing = Freezing([BOTH, LATE], [0, 1])
    inner = _injected(freezing, learning_rate=rate)
    tx = optax.chain(optax.clip(10.0), accumulate(inner, 2, nonfinite="skip_window"))
    assert find(tx, "freeze").static == freezing
    assert [i.name for i in walk(tx)][1:4] == ["accumulate", "inject_hyperparams", "freeze"]
    step = train_step(lambda params, batch: _loss(params) * batch.mean(), tx, donate=False)
    assert step.dispatches_on_host
    state = step.init(_params())
    indices, a = [], [state.params["a"]]
    for _ in range(4):
        state, metrics = step(state, jnp.ones(2))
        indices.append(int(metrics["freeze_index"]))
        a.append(state.params["a"])
    assert indices == [0, 0, 1, 1]
    assert (a[2] != a[0]).all()
    _assert_equal(a[4], a[2])


def test_inject_hyperparams_that_cannot_be_read_breaks_nothing():
    def factory(learning_rate):
        if learning_rate == 0.5:
            raise RuntimeError("not this one")
        return optax.sgd(learning_rate)

    tx = optax.inject_hyperparams(factory)(learning_rate=0.1)
    assert [info.name for info in walk(tx)] == ["inject_hyperparams"]
    assert [i.name for i in walk(optax.inject_hyperparams(optax.adamw)(0.1))][:2] == [
        "inject_hyperparams",
        "scale_by_adam",
    ]


def test_a_range_is_a_schedule():
    assert Freezing([BOTH, LATE], range(2)) == Freezing([BOTH, LATE], [0, 1])
    with pytest.raises(ValueError, match="holds the index 2"):
        Freezing([BOTH, LATE], range(3))


def test_the_fingerprint_is_made_once(monkeypatch):
    freezing = Freezing([BOTH, LATE], [0, 1] * 50)
    before, twin = hash(freezing), Freezing([BOTH, LATE], [0, 1] * 50)
    first = freezing.fingerprint
    monkeypatch.setattr("boostax.updates.freeze.zlib.crc32", lambda data: 1 / 0)
    tx, params = freeze(optax.sgd(0.1), freezing), _params()
    tx.update(params, tx.init(params), params)
    assert freezing.fingerprint == first
    assert hash(freezing) == before
    assert freezing == twin
