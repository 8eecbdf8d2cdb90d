"""One loss scale a group: gradients, blame, rules, and the values recorded from the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import boostax
from boostax import GroupLossScale

HALF = jnp.float16


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) * 0.5


def close(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def exactly(function):
    """Compile without leave to keep more bits than the program says."""
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False})


def layer(h, w):
    return jnp.tanh(h @ w)


def scanned(params, x):
    block = lambda h, w: (layer(layer(h, w["b"]), w["c"]), None)
    h, _ = jax.lax.scan(block, layer(x, params["a"]), {k: params[k] for k in "bc"})
    return jnp.mean(h)


def recurrent(params, x):
    step = lambda h, row: (layer(h, params["b"]) + row @ params["a"], h @ params["c"])
    h, out = jax.lax.scan(step, jnp.zeros(4), x)
    return jnp.mean(h) + jnp.mean(out)


def in_turn(params, x):
    for name in "abcab":
        x = x + jax.checkpoint(layer)(x, params[name])
    return jnp.mean(x) + 0.1 * sum(jnp.sum(w**2) for w in params.values())


def opaque(params, x):
    h = jax.lax.cond(x[0, 0] > 0, lambda h: h @ params["b"], jnp.sin, x @ params["a"])
    return jnp.mean(jax.nn.relu(h) @ params["c"] @ params["a"].T)


MATRICES = {name: normal(4, 4, seed=i) for i, name in enumerate("abc")}
STACKS = {"a": normal(4, 4), "b": normal(3, 4, 4, seed=1), "c": normal(3, 4, 4, seed=2)}
X = normal(6, 4, seed=9)


@pytest.mark.parametrize(
    ("loss", "params"),
    [(scanned, STACKS), (recurrent, MATRICES), (in_turn, MATRICES), (opaque, MATRICES)],
)
def test_gradients_are_those_without_scales(loss, params):
    value, grads = jax.jit(jax.value_and_grad(loss))(params, X)
    scaling = GroupLossScale(["a", "b", "c"], init=[2.0**-6, 2.0**9, 2.0**3])
    fn = jax.jit(scaling.value_and_grad(loss))
    for scales in ([2.0**-6, 2.0**9, 2.0**3], [3.0, 700.0, 0.01]):
        state = boostax.set_loss_scale(scaling.init_state(), scales)
        got, found, finite, after = fn(state, params, X)
        np.testing.assert_allclose(got, value, rtol=1e-6)
        close(found, grads, 2e-5)
        assert bool(finite)
        np.testing.assert_array_equal(after.good_steps, 1)
    assert fn._cache_size() == 1


def test_a_float16_loss_that_rounds_its_scale():
    loss = lambda p, x: (x @ p["a"]).astype(HALF) @ p["b"]
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2, HALF)}
    scaling = GroupLossScale(["a", "b"], init=[64.0, 1001.3])
    _, grads, finite, _ = scaling.value_and_grad(loss)(scaling.init_state(), params, jnp.ones(2))
    assert bool(finite)
    np.testing.assert_allclose(grads["a"], np.ones((2, 2)), rtol=1e-6)
    # A power of two, so that the product with the rounded scale is not rounded once more.
    np.testing.assert_allclose(grads["b"], [2.0, 2.0], rtol=1e-6)


@pytest.mark.quick
def test_float16_towers_that_no_single_scale_serves():
    """Task weights 2**16 and 2**-20: in each tower less than a tenth of the gradients is zero."""
    params = {"a": {"in": normal(16, 16), "out": normal(16, 4, seed=1)}}
    params["b"] = jax.tree.map(lambda w: w + 0.0, params["a"])
    x = normal(32, 16, seed=2)
    y = jax.random.randint(jax.random.key(3), (32,), 0, 4)

    def loss(params, x, dtype=HALF):
        total = 0.0
        for name, weight in (("a", 2.0**16), ("b", 2.0**-20)):
            tower = jax.tree.map(lambda w: w.astype(dtype), params[name])
            out = jnp.tanh(x.astype(dtype) @ tower["in"]) @ tower["out"]
            out = out.astype(jnp.float32)
            total += weight * jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, y))
        return total

    def zeros(grads):
        share = lambda tree: float(
            np.mean([np.mean(np.asarray(g) == 0) for g in jax.tree.leaves(tree)])
        )
        return {name: share(grads[name]) for name in "ab"}

    scaling = GroupLossScale(["a/*", "b/*"], init=[2.0**-4, 2.0**24])
    _, grads, finite, _ = exactly(scaling.value_and_grad(loss))(scaling.init_state(), params, x)
    assert bool(finite)
    assert max(zeros(grads).values()) < 0.1
    expected = jax.jit(jax.grad(functools.partial(loss, dtype=jnp.float32)))(params, x)
    for name in "ab":
        for got, true in zip(
            jax.tree.leaves(grads[name]), jax.tree.leaves(expected[name]), strict=True
        ):
            assert np.linalg.norm(got - true) < 0.01 * np.linalg.norm(true)

    one = boostax.DynamicLossScale(min_scale=2.0**-24)
    fn = exactly(one.value_and_grad(loss))
    lost, wrong = [], []
    for exponent in range(-24, 25, 2):
        state = boostax.set_loss_scale(one.init_state(), 2.0**exponent)
        _, grads, finite, _ = fn(state, params, x)
        lost.append(1.0 if not finite else max(zeros(grads).values()))
        wrong.append(
            max(
                np.linalg.norm(got - true) / np.linalg.norm(true)
                for got, true in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
            )
        )
    # At all but one of these scales everything in a tower is lost, and there most of it.
    assert sum(share == 1 for share in lost) == len(lost) - 1
    assert min(lost) > 0.15
    assert np.nanmin(wrong) > 0.5


def blamed(loss, params, groups):
    """Return ``(batch, scales) -> numbers of the groups whose scale falls``."""
    scaling = GroupLossScale(groups, min_scale=2.0**-24, max_scale=2.0**30)
    fn = exactly(scaling.value_and_grad(loss))

    def numbers(batch, scales):
        state = boostax.set_loss_scale(scaling.init_state(), scales)
        _, _, finite, after = fn(state, params, batch)
        assert not bool(finite)
        return [
            i for i, (a, b) in enumerate(zip(after.scale, state.scale, strict=True), 1) if a < b
        ]

    return numbers


def half_chain(names):
    """Float16 layers; behind each comes a factor, of which a large one makes the cotangent overflow."""

    def loss(params, batch):
        x, gains = batch
        h = x.astype(HALF)
        for number, name in enumerate(names):
            h = h @ params[name].astype(HALF) * gains[number]
        return jnp.mean(h.astype(jnp.float32))

    return loss


EYES = {name: jnp.eye(4) for name in "abc"}
SMALL = jnp.full((8, 4), 1e-5)


def gains(count, at=None):
    return SMALL, tuple(HALF(6e4 if i == at else 1) for i in range(count))


@pytest.mark.quick
def test_an_overflow_is_blamed_on_the_group_where_it_arose():
    numbers = blamed(half_chain("abc"), EYES, ["a", "b", "c"])
    for number in range(3):
        # Nothing but the scale of one group is too large for float16.
        scales = [2.0**10] * 3
        scales[number] = 2.0**24
        assert numbers(gains(3), scales) == [number + 1]
        # What lies ahead of the group gets the infinity handed on.
        assert numbers(gains(3, number), 2.0**10) == [number + 1]


def test_an_overflow_where_groups_take_turns():
    numbers = blamed(half_chain("abab"), {name: EYES[name] for name in "ab"}, ["a", "b"])
    for number in range(4):
        assert numbers(gains(4, number), 2.0**10) == [number % 2 + 1]


def test_an_overflow_in_one_turn_of_a_scan():
    def loss(params, batch):
        def turn(h, both):
            w, gain = both
            h = h @ w["a"].astype(HALF)
            return (h @ w["b"].astype(HALF)) * gain, None

        h, _ = jax.lax.scan(turn, batch[0].astype(HALF), (params, jnp.stack(batch[1])))
        return jnp.mean(h.astype(jnp.float32))

    params = {name: jnp.stack([jnp.eye(4)] * 3) for name in "ab"}
    numbers = blamed(loss, params, ["a", "b"])
    for turn in range(3):
        assert numbers(gains(3, turn), 2.0**10) == [2]


def test_one_group_overflows_and_the_other_keeps_its_count():
    """Scales (4096, 4096) become (2048, 4096), and nothing else changes."""
    scaling = GroupLossScale(["a", "b"], init=4096.0, window=3)

    def loss(params, batch):
        return jnp.sum((params["a"].astype(HALF) * batch).astype(jnp.float32)) + jnp.sum(
            params["b"] ** 2
        )

    step = boostax.train_step(loss, optax.adam(0.1), loss_scale=scaling)
    state = step.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    good, bad = jnp.full(2, 1.0, HALF), jnp.full(2, 100.0, HALF)
    state, metrics = step(state, good)
    assert not metrics["overflow"]
    before = jax.tree.map(np.asarray, state)
    state, metrics = step(state, bad)
    assert bool(metrics["overflow"])
    np.testing.assert_array_equal(metrics["loss_scale"], [4096, 4096])
    np.testing.assert_array_equal(state.loss_scale.scale, [2048, 4096])
    np.testing.assert_array_equal(state.loss_scale.good_steps, [0, 1])
    np.testing.assert_array_equal(state.loss_scale.overflows, [1, 0])
    equal((before.params, before.opt_state), (state.params, state.opt_state))
    assert (int(state.attempt), int(state.updates)) == (2, 1)
    for _ in range(2):
        state, metrics = step(state, good)
    np.testing.assert_array_equal(state.loss_scale.scale, [2048, 8192])


@pytest.mark.quick
def test_one_group_is_the_dynamic_scale_bit_for_bit():
    params = {"w": normal(4, 8), "v": normal(8, 2, seed=1)}
    batches = [normal(16, 4, seed=i) * (1e4 if i == 3 else 1) for i in range(8)]

    def loss(params, x):
        w, v = (params[name].astype(HALF) for name in "wv")
        return jnp.mean((jnp.tanh(x.astype(HALF) @ w) @ v).astype(jnp.float32) ** 2)

    shared = {"init": 2.0**24, "window": 2, "min_scale": 1.0, "max_scale": 2.0**24}
    ends = []
    for scaling in (GroupLossScale(["*"], **shared), boostax.DynamicLossScale(**shared)):
        step = boostax.train_step(loss, optax.sgd(0.1, 0.9), loss_scale=scaling)
        state, seen = step.init(params), []
        for batch in batches:
            state, metrics = step(state, batch)
            seen.append((float(jnp.squeeze(metrics["loss_scale"])), bool(metrics["overflow"])))
        ends.append(
            (state.params, state.opt_state, seen, jax.tree.map(jnp.squeeze, state.loss_scale))
        )
    assert any(flag for _, flag in ends[0][2])
    assert not all(flag for _, flag in ends[0][2])
    equal(ends[0], ends[1])


def test_scales_recorded_from_the_reference(reference):
    recorded = reference("j_group_loss_scale")
    scaling = GroupLossScale(["a", "b"], init=4096.0, rule="reference", min_scale=2.0**-20)
    state = scaling.init_state()
    np.testing.assert_array_equal([1, *state.scale, 1], recorded["init_scales"])
    for layer_, overflow, returned, scales in zip(
        *(recorded[f"upd_{n}"] for n in ("layer", "overflow", "returned", "scales")), strict=True
    ):
        ratio = 2.0**-0.5 if overflow else 2.0 ** (1 / 1000)
        state, new = scaling.update_group(state, int(layer_) + 1, ratio)
        np.testing.assert_allclose(new, returned, rtol=1e-5)
        np.testing.assert_allclose(state.scale, scales[1:3], rtol=1e-5)

    sizes = recorded["amp_group_sizes"]
    groups = [1] * int(sizes[0]) + [2] * int(sizes[1])
    state = boostax.set_loss_scale(state, 256.0)
    tx = optax.sgd(0.1, 0.9)
    params = [jnp.asarray(recorded[f"amp_w0_{i}"]) for i in range(5)]
    opt_state, theirs, their_state = tx.init(params), params, tx.init(params)
    for step, status in enumerate(recorded["amp_status"]):
        used = state.scale
        state = scaling.update(state, not status.any(), blamed=status)
        # A group without an overflow grows although the call is skipped for another one.
        np.testing.assert_allclose(state.scale, recorded["amp_scales"][step][1:3], rtol=1e-5)
        assert int(status.sum()) == recorded["amp_flag"][step]
        if status.any():
            continue
        scaled = [recorded[f"amp_grads_{i}"][step] for i in range(5)]
        for scales, name in ((used, "ours"), (state.scale, "theirs")):
            grads = [g / scales[group - 1] for g, group in zip(scaled, groups, strict=True)]
            if name == "ours":
                updates, opt_state = tx.update(grads, opt_state)
                params = optax.apply_updates(params, updates)
            else:
                updates, their_state = tx.update(grads, their_state)
                theirs = optax.apply_updates(theirs, updates)
        # The recorded weights come of dividing by the updated scales: steps too small by 2**(1/1000).
        for i in range(5):
            np.testing.assert_allclose(
                theirs[i], recorded[f"amp_w_{i}"][step], rtol=2e-5, atol=1e-6
            )
            start = recorded[f"amp_w0_{i}"]
            ratio = np.linalg.norm(params[i] - start) / np.linalg.norm(theirs[i] - start)
            np.testing.assert_allclose(ratio, 2 ** (1 / 1000), rtol=1e-4)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_scales_follow_the_rule_and_stay_within_bounds(calls, window, most):
    scaling = GroupLossScale(
        ["a", "b"],
        init=[1.0, 2.0],
        window=window,
        min_scale=[0.5, 1.0],
        max_scale=[4.0, 2.0**most + 1],
    )
    state = scaling.init_state()
    scales, counts = [1.0, 2.0], [0, 0]
    for bad in calls:
        state = scaling.update(state, not any(bad), blamed=np.asarray(bad))
        for i in range(2):
            if bad[i]:
                scales[i], counts[i] = max(scales[i] / 2, (0.5, 1.0)[i]), 0
            elif not any(bad):
                counts[i] += 1
                if counts[i] == window:
                    scales[i], counts[i] = min(scales[i] * 2, (4.0, 2.0**most + 1)[i]), 0
        np.testing.assert_array_equal(state.scale, np.float32(scales))
        np.testing.assert_array_equal(state.good_steps, counts)


@pytest.mark.quick
def test_groups_of_leaves():
    params = {"a": {"w": 0, "b": 0}, "c": {"w": 0}, "d": 0}
    scaling = GroupLossScale([["a/*"], ["c/*", "d"]])
    assert len(scaling) == 2
    assert scaling.assign(params) == {"a/b": 1, "a/w": 1, "c/w": 2, "d": 2}
    with pytest.raises(ValueError, match=r"in no group: d \(add a pattern.*in several groups: c/w"):
        GroupLossScale(["a/*", "c/*", "*/w"]).assign({**params, "a": {"b": 0}})
    with pytest.raises(ValueError, match=r"group 2: the pattern 'x/.' matches no leaf"):
        GroupLossScale(["*", "x/*"]).assign(params)
    layers = {f"layer_{i}": {"kernel": jnp.ones((2, 2))} for i in range(4)}
    groups = boostax.parameter_groups(layers, 2)
    found = GroupLossScale(groups).assign(layers)
    assert list(found.values()) == [1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"made for other parameters .*in no group: a/b"):
        GroupLossScale(groups).assign(params)
    step = boostax.train_step(
        lambda p, x: jnp.mean(x @ p["a"]), optax.sgd(1.0), loss_scale=GroupLossScale(["b"])
    )
    with pytest.raises(ValueError, match="group 1: the pattern 'b' matches no leaf"):
        step.init({"a": jnp.ones(2)})


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "groups must be a non-empty sequence", {"groups": "a"}),
        (TypeError, "groups must be a non-empty sequence", {"groups": []}),
        (TypeError, "group 2 must be a path pattern", {"groups": ["a", 3]}),
        (ValueError, "group 1 is empty", {"groups": [[], "a"]}),
        (ValueError, "init must be one number or one a group, got 3 for 2", {"init": [1, 2, 3]}),
        (ValueError, "init must lie in", {"init": [1.0, 2.0**25]}),
        (TypeError, "init must be a number", {"init": "1"}),
        (ValueError, "min_scale must be a float32 number", {"min_scale": 0}),
        (ValueError, "max_scale must be finite and at least", {"max_scale": [1e-9, 2.0**24]}),
        (ValueError, "factor must be a finite number > 1", {"factor": 1.0}),
        (TypeError, "window must be an int", {"window": 2.5}),
        (
            ValueError,
            "must be at most 2.*126 times the smallest min_scale",
            {"init": 1.0, "min_scale": [2.0**-80, 1.0], "max_scale": [1.0, 2.0**80]},
        ),
        (ValueError, "rule must be .* Did you mean 'reference'", {"rule": "referense"}),
    ],
)
def test_wrong_arguments(error, match, arguments):
    with pytest.raises(error, match=match):
        GroupLossScale(**{"groups": ["a", "b"], **arguments})


def test_wrong_uses():
    scaling = GroupLossScale(["a", "b"])
    state = scaling.init_state()
    for group in (0, 3):
        with pytest.raises(ValueError, match=r"group must be from 1 to 2 .the ends 0 and 3"):
            scaling.update_group(state, group, 2.0)
    with pytest.raises(TypeError, match="group must be an int"):
        scaling.update_group(state, True, 2.0)
    with pytest.raises(TypeError, match=r"state must be a boostax\.LossScaleState"):
        scaling.update_group(None, 1, 2.0)
    with pytest.raises(ValueError, match="update_group: the state has one scale"):
        scaling.update_group(boostax.DynamicLossScale().init_state(), 1, 2.0)
    assert float(scaling.update_group(state, 1, jnp.float32(0.5))[1]) == 2.0**14
    with pytest.raises(ValueError, match="ratio must be finite and above 0"):
        scaling.update_group(state, 1, 0.0)
    clipped, new = scaling.update_group(state, np.int64(2), 1e30)
    assert float(new) == 2.0**24
    np.testing.assert_array_equal(clipped.scale, [2.0**15, 2.0**24])
    with pytest.raises(ValueError, match="after must be from 0 to 3"):
        scaling(X, 1, 4)
    with pytest.raises(TypeError, match="before must be an int"):
        scaling(X, 1.0, 2)
    with pytest.raises(ValueError, match="one number for all 2 groups"):
        boostax.set_loss_scale(state, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(boostax.set_loss_scale(state, [1.0, 2.0]).scale, [1, 2])
    np.testing.assert_array_equal(boostax.set_loss_scale(state, 4).scale, [4, 4])


def test_a_loop_of_ones_own_takes_what_the_function_takes():
    scaling = GroupLossScale(["a", "b"])
    params = {"a": jnp.float32(2.0), "b": jnp.float32(3.0)}

    def fun(params, x, train, *, name, act):
        value = act(params["a"] * params["b"]) * x if train else jnp.float32(0)
        return value, {"name": name, "x": x, "value": value}

    fn = scaling.value_and_grad(fun, has_aux=True)
    (value, aux), grads, finite, _ = fn(
        scaling.init_state(), params, np.float32(5), True, name="n", act=lambda v: v
    )
    assert (float(value), aux["name"], float(aux["x"]), float(aux["value"])) == (30, "n", 5, 30)
    assert (float(grads["a"]), float(grads["b"]), bool(finite)) == (15, 10, True)
    state = scaling.init_state()
    for wrong, match in (
        (lambda p: (p["a"], p["b"]), "got tuple; with .scalar, aux. pass has_aux=True"),
        (lambda p: jnp.stack([p["a"], p["b"]]), r"got shape \(2,\)"),
        (lambda p: p["a"] * 1j, "dtype complex64"),
    ):
        with pytest.raises(TypeError, match=match):
            scaling.value_and_grad(wrong)(state, params)
        with pytest.raises(TypeError, match=match):
            boostax.DynamicLossScale().value_and_grad(wrong)(
                boostax.DynamicLossScale().init_state(), params
            )


@pytest.mark.parametrize("checks", [True, False])
def test_gradients_are_the_same_on_all_devices_of_a_shard_map(checks):
    scaling = GroupLossScale(["a", "b"], init=[4.0, 64.0])
    params = {"a": jnp.float32(2.0), "b": jnp.float32(3.0)}
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    fn = scaling.value_and_grad(lambda p, x: jnp.sum(p["a"] * x * p["b"]), axis_name="i")

    def local(state, params, x):
        _, grads, finite, state = fn(state, params, x)
        return (grads if checks else jax.lax.psum(grads, "i")), finite, state

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P(), check_vma=checks
    )
    grads, finite, _ = jax.jit(mapped)(scaling.init_state(), params, jnp.float32([1.0, 4.0]))
    assert (float(grads["a"]), float(grads["b"]), bool(finite)) == (15, 10, True)


class Net(linen.Module):
    """The documented net, with boundaries where the reference's example has them."""

    scaling: GroupLossScale

    @linen.compact
    def __call__(self, x):
        x = self.scaling(x, 0, 1)
        x = linen.Conv(4, (3, 3), dtype=HALF, name="conv1")(x)
        x = linen.relu(linen.Conv(4, (3, 3), dtype=HALF, name="conv2")(x))
        x = self.scaling(x.reshape(x.shape[0], -1), 1, 2)
        x = linen.relu(linen.Dense(8, dtype=HALF, name="fc1")(x))
        return self.scaling(linen.Dense(3, dtype=HALF, name="fc2")(x), 2, 3)


def test_the_documented_net_trains_with_boundaries_placed_by_hand():
    scaling = GroupLossScale(["conv*", "fc*"], init=[512.0, 4096.0])
    x, y = normal(4, 4, 4, 1), jnp.arange(4) % 3
    net = Net(scaling)
    params = jax.jit(net.init)(jax.random.key(0), x)["params"]

    def loss(params, batch):
        out = net.apply({"params": params}, batch[0]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, batch[1]))

    _, grads, finite, _ = exactly(scaling.value_and_grad(loss))(
        scaling.init_state(), params, (x, y)
    )
    assert bool(finite)
    expected = jax.jit(jax.grad(loss))(params, (x, y))
    for got, true in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(got - true) < 0.02 * np.linalg.norm(true) + 1e-6
    step = boostax.train_step(loss, optax.sgd(0.1), loss_scale=scaling)
    state, metrics = step(step.init(params), (x, y))
    first = float(metrics["loss"])
    for _ in range(5):
        state, metrics = step(state, (x, y))
    assert float(metrics["loss"]) < first
