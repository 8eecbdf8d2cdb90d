"""accumulate: values by hand, the reference, optax.MultiSteps, policies, dtypes, composition."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import boostax
from boostax import accumulate
from boostax._info import find
from boostax.updates._skip import skip

NAN, INF = float("nan"), float("inf")


def run(tx, gradients, params=0.0, dtype=jnp.float32, extras=None, state=None):
    """Feed scalars (or trees) to ``tx``; return (emitted updates, params, state)."""
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    emitted = []
    for i, gradient in enumerate(gradients):
        gradient = jax.tree.map(lambda g: jnp.asarray(g, dtype), gradient)
        extra = {k: jnp.asarray(v[i], jnp.float32) for k, v in (extras or {}).items()}
        updates, state = update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
        emitted.append(updates)
    return emitted, params, state


def floats(values):
    return [float(v) for v in values]


# By hand


def test_weights_combine_micro_batches_of_unequal_size():
    tx = accumulate(optax.sgd(1.0), 2)
    _, params, _ = run(tx, [6.0, 2.0], extras={"weight": [1, 3]})
    assert float(params) == -3.0
    _, params, _ = run(tx, [6.0, 2.0])
    assert float(params) == -4.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("policy", "expected", "pending", "windows"),
    [("skip_micro", [0, 0, -1, 0], 1, 0), ("skip_window", [0, 0, 0, -1], 0, 1)],
)
def test_one_non_finite_micro_batch(bad, policy, expected, pending, windows):
    emitted, _, state = run(accumulate(optax.sgd(1.0), 2, nonfinite=policy), [bad, 1, 1, 1])
    assert floats(emitted) == expected
    assert int(state.position) == pending
    assert (int(state.skipped_micro), int(state.skipped_windows)) == (1, windows)
    assert (int(state.micro_steps), int(state.updates)) == (4, 1)
    assert np.isfinite(state.grads)


def test_a_bad_micro_batch_never_enters_the_sum():
    tx = accumulate(optax.sgd(1.0), 3, nonfinite="skip_window")
    _, _, state = run(tx, [1.0, NAN])
    assert (float(state.grads), bool(state.spoiled)) == (1.0, True)
    emitted, _, state = run(tx, [5.0, 2.0, 4.0, 6.0], state=state)
    assert floats(emitted) == [0, 0, 0, -4]
    _, _, state = run(tx, [1.0, NAN, 1.0])
    assert (float(state.grads), float(state.weight), int(state.position)) == (0, 0, 0)


def test_off_does_not_look():
    emitted, _, state = run(accumulate(optax.sgd(1.0), 2, nonfinite="off"), [NAN, 1, 1, 1])
    assert np.isnan(emitted[1])
    # The next window is clean: sums are overwritten, never multiplied by 0.
    assert float(emitted[3]) == -1.0
    assert int(state.skipped_micro) == 0


def test_a_decision_taken_elsewhere_replaces_the_check():
    tx = accumulate(optax.sgd(1.0), 2)
    emitted, _, state = run(tx, [5.0, 1.0, 3.0], extras={"finite": [0, 1, 1]})
    assert floats(emitted) == [0, 0, -2]
    assert int(state.skipped_micro) == 1


def test_unscaled_gradients_are_averaged_before_they_are_clipped():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    emitted, _, _ = run(accumulate(inner, 2), [[3.0, 4.0], [0.0, 0.0]], [0.0, 0.0])
    np.testing.assert_allclose(emitted[1], [-0.6, -0.8], rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_flush_applies_the_partial_window(jit):
    tx = accumulate(optax.sgd(1.0), 4)
    emitted, params, state = run(tx, [1, 2, 3, 4, 5, 6])
    assert floats(emitted) == [0, 0, 0, -2.5, 0, 0]
    flush = functools.partial(boostax.flush, tx)
    updates, flushed = (jax.jit(flush) if jit else flush)(state, params)
    assert float(params + updates) == -8.0
    assert (int(flushed.position), float(flushed.weight)) == (0, 0.0)
    assert (int(flushed.updates), int(flushed.micro_steps)) == (2, 6)
    assert bool(boostax.has_updated(flushed))
    emitted, _, _ = run(tx, [1, 1, 1, 1], state=flushed)
    assert floats(emitted) == [0, 0, 0, -1]
    again, same = (jax.jit(flush) if jit else flush)(flushed, params)
    assert float(again) == 0.0
    jax.tree.map(np.testing.assert_array_equal, same, flushed)


def test_flush_inside_a_chain_leaves_what_comes_before():
    tx = optax.chain(
        optax.scale_by_schedule(lambda count: 1.0 + count),
        accumulate(optax.trace(0.5), 4),
        optax.scale_by_schedule(lambda count: -1.0 - count),
    )
    _, params, state = run(tx, [1.0, 1.0])
    before, window, after = (float(state[0].count), state[1], int(state[2].count))
    updates, state = jax.jit(lambda s, p: boostax.flush(tx, s, p))(state, params)
    # Scaled by 1 and 2 before the window, by -(1 + 2) after it.
    assert float(updates) == pytest.approx(-3 * (1 + 2) / 2)
    assert float(state[0].count) == before
    assert int(state[2].count) == after + 1
    assert int(state[1].updates) == int(window.updates) + 1
    _, same = boostax.flush(tx, state, params)
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_flush_drops_a_spoiled_window_and_needs_a_window():
    tx = accumulate(optax.sgd(1.0), 3, nonfinite="skip_window")
    _, params, state = run(tx, [NAN, 1.0])
    updates, state = boostax.flush(tx, state, params)
    assert float(updates) == 0.0
    assert (int(state.position), int(state.skipped_windows), int(state.updates)) == (0, 1, 0)
    sgd = optax.sgd(1.0)
    with pytest.raises(ValueError, match="no AccumulateState"):
        boostax.flush(sgd, sgd.init(params), params)
    with pytest.raises(ValueError, match="no AccumulateState"):
        boostax.has_updated(sgd.init(params))


@pytest.mark.parametrize("swallows", [True, False])
def test_flush_passes_the_weight_that_was_gathered(swallows):
    def update(g, state, params=None, *, weight):
        return g, weight

    def update_any(g, state, params=None, **extra):
        return g, extra["weight"]

    inner = optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros(()), update_any if swallows else update
    )
    tx = accumulate(inner, 4)
    _, params, state = run(tx, [6.0, 2.0], extras={"weight": [1, 3]})
    updates, state = jax.jit(lambda s: boostax.flush(tx, s, params))(state)
    assert (float(updates), float(state.inner_state)) == (3.0, 4.0)
    strict = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda g, state, params=None: (g, state)
    )
    tx = accumulate(strict, 4)
    _, params, state = run(tx, [6.0, 2.0])
    assert float(boostax.flush(tx, state, params)[0]) == 4.0


def test_flush_emits_the_dtype_of_the_gradients():
    tx = accumulate(optax.sgd(1.0), 4)
    params, exact = jnp.ones((), jnp.bfloat16), 1.00390625
    state = tx.init(params)
    emitted, state = tx.update(jnp.float32(exact), state, params)
    updates, _ = boostax.flush(tx, state, params, gradient_dtype=jnp.float32)
    assert (updates.dtype, float(updates)) == (emitted.dtype, -exact) == (jnp.float32, -exact)
    again, _ = boostax.flush(tx, tx.init(params), params, gradient_dtype=jnp.float32)
    assert (again.dtype, float(again)) == (jnp.float32, 0.0)
    updates, _ = boostax.flush(tx, state, params)
    assert optax.apply_updates(params, updates).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="gradient_dtype"):
        boostax.flush(tx, state, params, gradient_dtype=jnp.int32)


def test_everything_in_the_optimizer_happens_once_a_window():
    schedule = optax.piecewise_constant_schedule(1.0, {1: 10.0})
    emitted, params, state = run(accumulate(optax.sgd(schedule), 4), [1.0] * 8)
    assert float(params) == pytest.approx(-11.0)
    assert floats(emitted)[:3] == [0, 0, 0]
    assert (int(state.micro_steps), int(state.updates)) == (8, 2)
    adamw = optax.adamw(0.1, weight_decay=0.1)
    _, params, _ = run(accumulate(adamw, 4), [0.0] * 4, params=1.0)
    assert float(params) == pytest.approx(0.99)
    _, params, _ = run(accumulate(optax.sgd(1.0, momentum=0.9), 4), [1.0] * 8)
    assert float(params) == pytest.approx(-2.9)


def test_sums_are_kept_and_handed_on_in_float32():
    seen = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda g, state, params=None: (g, g)
    )
    tx = accumulate(seen, 512, reduce="sum")
    params = jnp.zeros((), jnp.bfloat16)

    @jax.jit
    def train(state):
        step = lambda state, g: tx.update(g, state, params)[::-1]
        return jax.lax.scan(step, state, jnp.ones(512, jnp.bfloat16))

    state, updates = train(tx.init(params))
    assert (float(state.inner_state), state.inner_state.dtype) == (512.0, jnp.float32)
    assert updates.dtype == jnp.bfloat16


# References


@pytest.mark.parametrize("k", [1, 3, 4])
def test_reference_values(reference, k):
    data = reference("c_gradient_accumulation")
    lr, momentum, _, _ = data[f"k{k}_hyper"]
    tx = accumulate(optax.sgd(float(lr), float(momentum)), k)
    names = [f"k{k}_{{}}_{i}" for i in (0, 1)]
    params = [jnp.asarray(data[n.format("w0")]) for n in names]
    state = tx.init(params)
    update = jax.jit(tx.update)
    for call, counter in enumerate(data[f"k{k}_counter"]):
        grads = [jnp.asarray(data[n.format("grads")][call]) for n in names]
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert int(state.position) == counter
        for n, param in zip(names, params, strict=True):
            np.testing.assert_allclose(param, data[n.format("params")][call], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("every", [1, 3, lambda count: 1 + count])
@pytest.mark.parametrize("mean", [True, False])
def test_equals_multisteps_on_finite_gradients(every, mean):
    adam = optax.adam(0.1)
    ours = accumulate(adam, every_k_schedule=every, use_grad_mean=mean)
    theirs = optax.MultiSteps(adam, every, use_grad_mean=mean)
    gradients = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    start = np.array([1.0, 2.0, 3.0])
    a, _, ours_state = run(ours, gradients, start)
    b, _, theirs_state = run(theirs, gradients, start)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert int(ours_state.updates) == int(theirs_state.gradient_step)
    assert bool(boostax.has_updated(ours_state)) == bool(theirs.has_updated(theirs_state))


def test_should_skip_update_fn_leaves_a_micro_batch_out():
    large = functools.partial(optax.skip_large_updates, max_squared_norm=10.0)
    ours = accumulate(optax.sgd(1.0), 2, should_skip_update_fn=large)
    theirs = optax.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=large)
    gradients = [1.0, 100.0, 3.0, 2.0]
    emitted, _, state = run(ours, gradients)
    assert floats(emitted) == floats(run(theirs, gradients)[0]) == [0, 0, -2, 0]
    assert int(state.skipped_micro) == 1
    assert float(state.skip_state["norm_squared"]) == 4.0


# Properties


@hypothesis.given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 5)), min_size=1, max_size=6),
)
def test_a_window_is_the_weighted_mean_however_it_is_cut(parts):
    total = sum(w for _, w in parts)
    tx = accumulate(optax.sgd(1.0), len(parts))
    state, params = tx.init(jnp.float32(0.0)), jnp.float32(0.0)
    for value, weight in parts:
        updates, state = tx.update(jnp.float32(value), state, params, weight=weight)
    expected = -sum(v * w for v, w in parts) / total if total else 0.0
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-5)
    assert int(state.updates) == (total > 0)
    assert int(state.skipped_windows) == (total == 0)


@hypothesis.given(
    st.sampled_from(["skip_micro", "skip_window"]),
    st.integers(1, 3),
    st.lists(st.sampled_from([1.0, 2.0, NAN, INF]), min_size=1, max_size=8),
)
def test_policies_match_their_description(policy, every, gradients):
    tx = accumulate(optax.sgd(1.0), every, nonfinite=policy)
    state, params = tx.init(jnp.float32(0.0)), jnp.float32(0.0)
    window, spoiled, calls = [], False, 0
    for g in gradients:
        updates, state = tx.update(jnp.float32(g), state, params)
        good = bool(np.isfinite(g))
        calls += 1 if policy == "skip_window" else good
        spoiled |= not good
        window += [g] if good else []
        expected = 0.0
        if calls == every:
            whole = policy == "skip_micro" or not spoiled
            if whole and (policy == "skip_window" or good):
                expected = -sum(window) / len(window)
            window, spoiled, calls = [], False, 0
        assert float(updates) == pytest.approx(expected)
        assert bool(boostax.has_updated(state)) == (expected != 0)


# Weights


@pytest.mark.parametrize("policy", ["skip_micro", "skip_window", "off"])
@pytest.mark.parametrize("every", [1, 2])
def test_no_weight_at_all_drops_the_window(policy, every):
    tx = accumulate(optax.sgd(1.0, momentum=0.9), every, nonfinite=policy)
    # A masked-out micro-batch often has a NaN loss: with weight 0 it adds nothing.
    emitted, _, state = run(tx, [NAN] * every, extras={"weight": [0.0] * every})
    assert floats(emitted) == [0.0] * every
    assert (int(state.skipped_windows), int(state.skipped_micro), int(state.updates)) == (1, 0, 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("skip_micro", [0, 0, -3]), ("skip_window", [0, 0, 0]), ("off", [0, 0, 0])],
)
def test_a_nan_weight_is_a_bad_micro_batch(policy, expected):
    tx = accumulate(optax.sgd(1.0), 2, nonfinite=policy)
    emitted, _, state = run(tx, [2.0, 2.0, 4.0], extras={"weight": [1.0, NAN, 1.0]})
    assert floats(emitted) == expected
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


LARGE = float(np.float32(3e38))  # two of them do not fit into float32


@pytest.mark.parametrize("policy", ["skip_micro", "skip_window", "off"])
def test_finite_gradients_never_make_a_mean_overflow(policy):
    two = accumulate(optax.sgd(1.0), 2, nonfinite=policy)
    theirs = optax.MultiSteps(optax.sgd(1.0), 2)
    emitted, _, _ = run(two, [LARGE, LARGE])
    assert floats(emitted) == floats(run(theirs, [LARGE, LARGE])[0]) == [0, -LARGE]
    assert floats(run(two, [LARGE, -LARGE])[0]) == [0, 0]
    emitted, _, _ = run(two, [LARGE, -LARGE], extras={"weight": [1.0, 3.0]})
    np.testing.assert_allclose(emitted[1], LARGE / 2, rtol=1e-6)
    four = accumulate(optax.sgd(1.0), 4, nonfinite=policy)
    emitted, _, state = run(
        four, [1e30, -1e30, 1.0, 1.0], extras={"weight": [1e10, 1e10, 1.0, 1.0]}
    )
    np.testing.assert_allclose(emitted[3], -1e-10, rtol=1e-6)
    assert (int(state.updates), int(state.skipped_micro)) == (1, 0)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", ["skip_micro", "skip_window"])
def test_a_sum_that_overflows_is_a_bad_micro_batch(policy, every):
    tx = accumulate(optax.sgd(1.0), every, reduce="sum", nonfinite=policy)
    emitted, _, state = run(tx, [1.0, LARGE, 1.0], extras={"weight": [1.0, 10.0, 1.0]})
    if every == 1:
        assert floats(emitted) == [-1, 0, -1]
    else:
        assert floats(emitted) == ([0, 0, -2] if policy == "skip_micro" else [0, 0, 0])
    assert int(state.skipped_micro) == 1
    assert np.all(np.isfinite(jax.tree.leaves(state.grads)))


@pytest.mark.parametrize("policy", ["skip_micro", "skip_window", "off"])
@pytest.mark.parametrize(("weights", "every"), [([INF], 1), ([1.0, INF], 2), ([LARGE, LARGE], 2)])
def test_a_weight_that_is_not_finite_never_emits_nan(policy, weights, every):
    tx = accumulate(optax.sgd(1.0), every, nonfinite=policy)
    emitted, _, state = run(tx, [2.0] * every, extras={"weight": weights})
    assert floats(emitted) == [0.0] * every
    assert int(state.updates) == 0
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


@hypothesis.given(
    st.lists(
        st.tuples(st.floats(-LARGE, LARGE, width=32), st.floats(0, LARGE, width=32)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["mean", "sum"]),
)
def test_nothing_non_finite_is_kept_or_emitted(parts, reduce):
    tx = accumulate(optax.sgd(1.0), len(parts), reduce=reduce, nonfinite="skip_window")
    state = tx.init(jnp.float32(0.0))
    for value, weight in parts:
        updates, state = tx.update(jnp.float32(value), state, None, weight=weight)
        assert np.isfinite(updates)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_extra_arguments_are_averaged_by_weight():
    shown = optax.GradientTransformationExtraArgs(
        lambda params: (jnp.zeros(()), jnp.zeros(2)),
        lambda g, state, params=None, *, value, pair, label, **_: (g, (value, pair["x"])),
    )
    tx = accumulate(shown, 2, average_extra={"value": jnp.float32(0), "pair": {"x": jnp.zeros(2)}})
    state = tx.init(jnp.float32(0.0))
    for value, weight in ((2.0, 1.0), (6.0, 3.0)):
        pair = {"x": jnp.array([value, 0.0])}
        _, state = tx.update(
            jnp.float32(1), state, None, weight=weight, value=value, pair=pair, label="static"
        )
    np.testing.assert_allclose(state.inner_state[0], 5.0)
    np.testing.assert_allclose(state.inner_state[1], [5.0, 0.0])
    with pytest.raises(ValueError, match="'pair'"):
        tx.update(jnp.float32(1), state, None, value=1.0, label="")
    with pytest.raises(ValueError, match="shapes"):
        tx.update(jnp.float32(1), state, None, value=jnp.ones(2), pair={"x": jnp.ones(2)})


def test_static_extra_arguments_stay_static_inside_the_window():
    def update(g, state, params=None, *, freeze_index, **_):
        assert type(freeze_index) is int
        return (g if freeze_index == 3 else -g), state

    tx = accumulate(optax.GradientTransformationExtraArgs(lambda params: (), update), 2)
    call = jax.jit(lambda g, s: tx.update(g, s, None, freeze_index=3, weight=jnp.float32(2)))
    _, state = call(jnp.float32(1), tx.init(jnp.float32(0)))
    updates, _ = call(jnp.float32(1), state)
    assert float(updates) == 1.0


# Types and trees


@pytest.mark.parametrize(
    ("params_dtype", "grads_dtype"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")],
)
def test_state_types_never_change(params_dtype, grads_dtype):
    tx = accumulate(optax.adamw(0.1), 2)
    params = {"w": jnp.ones((2, 3), params_dtype), "b": jnp.ones(3, params_dtype)}
    state = tx.init(params)
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, grads_dtype), params)
    step = jax.jit(tx.update)
    for _ in range(3):
        updates, new = step(grads, state, params)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        assert all(u.dtype == grads_dtype for u in jax.tree.leaves(updates))
        state = new
    assert step._cache_size() == 1
    jax.lax.scan(lambda s, _: (tx.update(grads, s, params)[1], None), state, None, length=3)


@pytest.mark.parametrize("every", [1, 3])
def test_float64_stays_float64(every):
    with jax.enable_x64(True):
        gradients = np.random.default_rng(0).normal(size=(every, 3))
        params = jnp.zeros(3, jnp.float64)
        tx = accumulate(optax.sgd(1.0, momentum=0.5), every)
        state = tx.init(params)
        for g in gradients:
            updates, new = tx.update(jnp.asarray(g), state, params)
            assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
            state = new
        np.testing.assert_allclose(updates, -gradients.mean(0), rtol=1e-14)
        updates, state = boostax.flush(tx, state, params)
        assert updates.dtype == jnp.float64


def test_integer_float0_complex_and_masked_leaves():
    params = {
        "f": jnp.ones(2),
        "i": jnp.arange(3),
        "c": jnp.ones(2, jnp.complex64),
        "m": optax.MaskedNode(),
    }
    grads = {
        "f": jnp.ones(2),
        "i": np.zeros(3, jax.dtypes.float0),
        "c": jnp.full(2, 1 + 2j),
        "m": optax.MaskedNode(),
    }
    passing = optax.GradientTransformation(lambda params: (), lambda g, s, params=None: (g, s))
    tx = accumulate(passing, 2, reduce="sum")
    state = tx.init(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state, params)
    np.testing.assert_array_equal(updates["f"], [2.0, 2.0])
    np.testing.assert_array_equal(updates["c"], [2 + 4j] * 2)
    assert updates["i"].dtype == jax.dtypes.float0
    with pytest.raises(ValueError, match="'f' has shape"):
        tx.update({**grads, "f": jnp.ones(3)}, state, params)


def test_abstract_init_fresh_buffers_and_donation():
    tx = accumulate(optax.contrib.schedule_free_sgd(0.1), 2)
    params = {"w": jnp.ones(4)}
    abstract = jax.eval_shape(tx.init, jax.eval_shape(lambda: params))
    state = tx.init(params)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(lambda s: s.shape, abstract)
    step = jax.jit(lambda p, s: tx.update(p, s, p), donate_argnums=(0, 1))
    step(params, state)


def test_one_micro_batch_and_no_check_cost_nothing():
    inner = optax.adamw(0.1)
    params = jnp.ones((64, 64))
    tx = accumulate(inner, np.int64(1), nonfinite="off")

    def flops(tx, **extra):
        call = jax.jit(lambda g, s, p: tx.update(g, s, p, **extra))
        return call.lower(params, tx.init(params), params).compile().cost_analysis()["flops"]

    state = tx.init(params)
    sizes = lambda tree: sorted(leaf.size for leaf in jax.tree.leaves(tree) if leaf.size > 1)
    assert sizes(state) == sizes(inner.init(params))
    # The two counters are all there is.
    assert flops(inner) <= flops(tx) <= flops(inner) + 2
    assert flops(tx, weight=np.float32(32)) <= flops(inner) + 4


# Composition


def test_inside_masked_multi_transform_and_inject_hyperparams():
    params = {"a": 0.0, "b": 0.0}
    grads = [{"a": 1.0, "b": 2.0}] * 4
    masked = optax.masked(accumulate(optax.sgd(1.0), 2), {"a": True, "b": False})
    emitted, _, _ = run(masked, grads, params)
    assert [float(u["a"]) for u in emitted] == [0, -1, 0, -1]
    both = optax.multi_transform(
        {"two": accumulate(optax.sgd(1.0), 2), "three": accumulate(optax.sgd(1.0), 3)},
        {"a": "two", "b": "three"},
    )
    emitted, end, state = run(both, grads, params)
    assert [float(u["a"]) for u in emitted] == [0, -1, 0, -1]
    assert [float(u["b"]) for u in emitted] == [0, 0, -2, 0]
    updates, state = boostax.flush(both, state, end)
    assert (float(updates["a"]), float(updates["b"])) == (0.0, -2.0)
    injected = optax.inject_hyperparams(
        lambda learning_rate: accumulate(optax.sgd(learning_rate), 2)
    )(learning_rate=0.5)
    emitted, _, _ = run(injected, grads, params)
    assert [float(u["a"]) for u in emitted] == [0, -0.5, 0, -0.5]
    every = optax.inject_hyperparams(accumulate, static_args=("inner", "accumulator_dtype"))
    emitted, _, _ = run(every(optax.sgd(1.0), every=2), grads, params)
    assert [float(u["a"]) for u in emitted] == [0, -1, 0, -1]


def test_nested_windows_weigh_windows():
    tx = accumulate(accumulate(optax.sgd(1.0), 2), 2)
    emitted, _, _ = run(tx, [1.0, 3.0, 5.0, 9.0], extras={"weight": [1, 1, 3, 3]})
    assert floats(emitted) == [0, 0, 0, -(1 + 3 + 15 + 27) / 8]


def test_vmap_and_scan_equal_the_loop():
    tx = accumulate(optax.adam(0.1), 2)
    gradients = jnp.array([[1.0, 2.0, NAN, 4.0, 5.0], [5.0, NAN, 3.0, 2.0, 1.0]])

    def train(gradients):
        step = lambda state, g: tx.update(g, state, jnp.zeros(()))[::-1]
        return jax.lax.scan(step, tx.init(jnp.zeros(())), gradients)[1]

    both = jax.jit(jax.vmap(train))(gradients)
    for row, expected in zip(gradients, both, strict=True):
        np.testing.assert_allclose(floats(run(tx, row)[0]), expected, rtol=1e-6)


@pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])
def test_inside_shard_map_updates_stay_the_same_on_all_devices(axis_type):
    axis_types = (getattr(jax.sharding.AxisType, axis_type),)
    mesh = jax.make_mesh((2,), ("data",), axis_types=axis_types, devices=jax.devices()[:2])
    spec, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    mean = optax.GradientTransformation(
        lambda params: (), lambda g, s, params=None: (jax.lax.pmean(g, "data"), s)
    )
    tx = accumulate(optax.chain(mean, optax.sgd(1.0)), 2, nonfinite="off")

    @functools.partial(jax.shard_map, in_specs=(spec,), out_specs=(whole, whole), mesh=mesh)
    def train(gradients):
        state = tx.init(jnp.zeros(()))
        first, state = tx.update(gradients[0, 0], state)
        second, _ = tx.update(gradients[0, 1], state)
        return first, second

    gradients = jax.device_put(
        jnp.array([[1.0, 2.0], [3.0, 6.0]]), jax.sharding.NamedSharding(mesh, spec)
    )
    assert floats(jax.jit(train)(gradients)) == [0.0, -3.0]


def test_skips_count_attempts_and_leave_the_rest():
    class Counted(NamedTuple):
        attempts: jax.Array
        moved: jax.Array

        def on_skip(self):
            return self._replace(attempts=self.attempts + 1)

    zero = jnp.zeros((), jnp.int32)
    inner = optax.GradientTransformation(
        lambda params: Counted(zero, zero + 0),
        lambda g, s, params=None: (g, Counted(s.attempts + 1, s.moved + 1)),
    )
    _, _, state = run(accumulate(inner, 2, nonfinite="skip_window"), [NAN, 1, 1, 1])
    assert (int(state.inner_state.attempts), int(state.inner_state.moved)) == (2, 1)
    # Skipped outside: an open window stays, but with every=1 the window itself was skipped.
    assert int(skip(state).inner_state.attempts) == 2
    single = accumulate(inner, 1).init(jnp.zeros(()))
    assert int(skip((single,))[0].inner_state.attempts) == 1


# Arguments


@pytest.mark.parametrize("every", [0, -2])
def test_every_must_be_positive(every):
    with pytest.raises(ValueError, match=r"every must be an int >= 1.*got"):
        accumulate(optax.sgd(1.0), every)


@pytest.mark.parametrize("every", [2.5, True, np.True_, "4", None])
def test_every_must_be_an_int(every):
    with pytest.raises(TypeError, match="every"):
        accumulate(optax.sgd(1.0), every)


@pytest.mark.parametrize("every", [4, np.int64(4), np.int32(4), lambda count: 4])
def test_every_takes_ints_and_schedules(every):
    emitted, _, _ = run(accumulate(optax.sgd(1.0), every), [1.0] * 4)
    assert floats(emitted) == [0, 0, 0, -1]


def test_wrong_arguments_are_named():
    sgd = optax.sgd(1.0)
    with pytest.raises(TypeError, match="every and every_k_schedule"):
        accumulate(sgd, 2, every_k_schedule=2)
    with pytest.raises(TypeError, match="reduce and use_grad_mean"):
        accumulate(sgd, 2, reduce="mean", use_grad_mean=False)
    with pytest.raises(ValueError, match="Did you mean 'skip_micro'"):
        accumulate(sgd, 2, nonfinite="skip_mico")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce must be one of"):
        accumulate(sgd, 2, reduce="avg")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="accumulator_dtype"):
        accumulate(sgd, 2, accumulator_dtype=jnp.int32)
    with pytest.raises(TypeError, match="inner must be"):
        accumulate(0.1, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="average_extra"):
        accumulate(sgd, 2, average_extra="value")
    with pytest.raises(ValueError, match="average_extra"):
        accumulate(sgd, 2, average_extra=("weight",))


def test_the_description_tells_the_settings():
    tx = optax.chain(optax.clip(1.0), accumulate(optax.sgd(1.0), 4))
    info = find(tx, "accumulate")
    assert info is not None
    assert (info.settings["every"], info.settings["nonfinite"]) == (4, "skip_micro")


def test_a_state_made_with_another_window_size_is_refused():
    params = jnp.zeros(3)
    state = accumulate(optax.sgd(1.0), 4).init(params)
    for every, told in ((2, "every=2"), (lambda count: 4, "a schedule")):
        with pytest.raises(
            boostax.StateMismatchError, match=f"made with every=4, here it is {told}"
        ):
            accumulate(optax.sgd(1.0), every).update(params, state, params)
    step = boostax.train_step(lambda p, x: jnp.sum(p * x), accumulate(optax.sgd(1.0), 2))
    with pytest.raises(boostax.StateMismatchError, match="made with every=4"):
        step(step.init(params).replace(opt_state=state), params)
    with pytest.raises(boostax.StateMismatchError, match="no AccumulateState"):
        step(step.init(params).replace(opt_state=optax.sgd(1.0).init(params)), params)
