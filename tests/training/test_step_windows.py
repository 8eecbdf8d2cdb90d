"""The train step together with accumulation, micro-batches and freezing."""

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax import Freezing, LossAux, StateMismatchError, accumulate, freeze, train_step
from boostax.updates._skip import find_state


def linear(params, x):
    """Gradient: the mean of the batch."""
    return jnp.mean(x @ params)


class LinenNorm(nn.Module):
    """Two batch norms with parameters, so that one can be frozen."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="first")(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.9, name="second")(x)


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.BatchNorm(1, momentum=0.9, rngs=rngs)
        self.second = nnx.BatchNorm(1, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def norm_loss(params, x, *, model_state):
    out, changed = LinenNorm().apply({"params": params, **model_state}, x, mutable=["batch_stats"])
    return jnp.mean(out * x), LossAux(model_state=changed)


def start_linen(step):
    variables = LinenNorm().init(jax.random.key(0), jnp.ones((2, 1)))
    return step.init(variables["params"], model_state={"batch_stats": variables["batch_stats"]})


def micro(mean):
    """Two examples with this mean and variance 1."""
    return jnp.array([[mean - 1.0], [mean + 1.0]])


def together(micros):
    """The batch whose parts are these: part i holds every n-th example."""
    return jnp.stack(micros, axis=1).reshape(-1, 1)


def first_stats(state):
    stats = state.model_state["batch_stats"]["first"]
    return float(stats["mean"][0]), float(stats["var"][0])


class TestStatisticsOfAWindow:
    @pytest.mark.parametrize("in_step", [True, False])
    def test_pooled_per_window(self, in_step):
        # Means 0, 2, 4, 6 and variance 1 each: pooled mean 3, pooled variance 1 + 5 = 6.
        micros = [micro(mean) for mean in (0.0, 2.0, 4.0, 6.0)]
        if in_step:
            step = train_step(norm_loss, optax.sgd(0.0), has_aux=True, microbatch=4)
            state, _ = step(start_linen(step), together(micros))
        else:
            step = train_step(norm_loss, accumulate(optax.sgd(0.0), 4), has_aux=True)
            state = start_linen(step)
            for i, batch in enumerate(micros):
                assert first_stats(state) == (0.0, 1.0), i
                state, _ = step(state, batch)
        np.testing.assert_allclose(first_stats(state), (0.3, 1.5), rtol=1e-5)

    @pytest.mark.parametrize("in_step", [True, False])
    def test_moving_per_micro_batch(self, in_step):
        batch = micro(2.0)
        if in_step:
            step = train_step(
                norm_loss, optax.sgd(0.0), has_aux=True, microbatch=4, stats="per_micro"
            )
            state, _ = step(start_linen(step), together([batch] * 4))
        else:
            tx = accumulate(optax.sgd(0.0), 4)
            step = train_step(norm_loss, tx, has_aux=True, stats="per_micro")
            state = start_linen(step)
            for _ in range(4):
                state, _ = step(state, batch)
        np.testing.assert_allclose(first_stats(state)[0], 0.6878, rtol=1e-5)

    @pytest.mark.parametrize("stats", ["per_window", "per_micro"])
    def test_a_dropped_window_leaves_them_as_they_were(self, stats):
        tx = accumulate(optax.sgd(0.1), 2, nonfinite="skip_window")
        step = train_step(norm_loss, tx, has_aux=True, stats=stats)
        state = start_linen(step)
        for batch in (micro(1.0), micro(3.0)):
            state, _ = step(state, batch)
        before = jax.tree.map(np.asarray, (state.params, state.model_state))
        for batch in (micro(5.0), jnp.full((2, 1), jnp.nan)):
            state, metrics = step(state, batch)
        jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.model_state))
        assert (int(metrics["updates"]), int(metrics["micro_steps"])) == (1, 4)
        for batch in (micro(5.0), micro(5.0)):
            state, metrics = step(state, batch)
        assert int(metrics["updates"]) == 2
        assert np.isfinite(first_stats(state)).all()

    def test_nnx_reads_the_momentum_from_the_modules(self):
        step = train_step(lambda model, x: jnp.mean(model(x)), accumulate(optax.sgd(0.0), 4))
        state = step.init(NnxNorm(nnx.Rngs(0)))
        for mean in (0.0, 2.0, 4.0, 6.0):
            state, _ = step(state, micro(mean))
        norm = state.merge(NnxNorm(nnx.Rngs(0))).first
        np.testing.assert_allclose(norm.mean[...], [0.3], rtol=1e-5)
        np.testing.assert_allclose(norm.var[...], [1.5], rtol=1e-5)


class TestAccumulation:
    def test_clip_after_the_average(self):
        tx = accumulate(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), 2)
        step = train_step(linear, tx)
        state = step.init(jnp.zeros(2))
        for batch in ([[3.0, 4.0]], [[0.0, 0.0]]):
            state, metrics = step(state, jnp.array(batch))
        np.testing.assert_allclose(state.params, [-0.6, -0.8], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], 2.5, rtol=1e-5)  # of the window's mean
        assert (int(metrics["updates"]), int(metrics["micro_steps"])) == (1, 2)
        assert int(state.updates) == 1

    def test_weights_of_the_loss_reach_the_window(self):
        def loss(params, batch):
            return params * batch["mean"][0], LossAux(weight=batch["tokens"][0])

        step = train_step(loss, accumulate(optax.sgd(1.0), 2), has_aux=True)
        state = step.init(jnp.zeros(()))
        for mean, tokens in ((6.0, 1.0), (2.0, 3.0)):
            state, _ = step(state, {"mean": jnp.array([mean]), "tokens": jnp.array([tokens])})
        np.testing.assert_allclose(state.params, -3.0, rtol=1e-6)

    def test_multisteps_of_the_user_counts_as_a_window(self):
        step = train_step(linear, optax.MultiSteps(optax.sgd(1.0), 2))
        state = step.init(jnp.zeros(1))
        for value in (1.0, 3.0, 1.0):
            state, metrics = step(state, jnp.array([[value]]))
        assert float(state.params[0]) == -2.0
        assert int(metrics["updates"]) == 1

    def test_microbatch_equals_the_whole_batch(self):
        x = jnp.asarray(np.random.RandomState(0).randn(12, 3), jnp.float32)
        loss = lambda params, x: jnp.mean(jnp.tanh(x @ params) ** 2)
        whole = train_step(loss, optax.adam(0.1))
        parts = train_step(loss, optax.adam(0.1), microbatch=4)
        a, b = whole.init(jnp.ones(3)), parts.init(jnp.ones(3))
        for _ in range(3):
            a, whole_metrics = whole(a, x)
            b, part_metrics = parts(b, x)
        np.testing.assert_allclose(a.params, b.params, rtol=1e-5)
        np.testing.assert_allclose(whole_metrics["loss"], part_metrics["loss"], rtol=1e-5)
        assert int(part_metrics["micro_steps"]) == 12


SCHEDULE = (0, 1, 2, 1, 0, 2)
GROUPS = (("a", "b", "c"), ("b", "c"), ("c",))


def three(params, x):
    hidden = jnp.tanh(x @ params["a"])
    return jnp.mean((jnp.tanh(hidden @ params["b"]) @ params["c"]) ** 2)


def three_params():
    rng = np.random.RandomState(0)
    return {k: jnp.asarray(rng.randn(3, 3), jnp.float32) for k in "abc"}


class TestFreezing:
    x = jnp.asarray(np.random.RandomState(1).randn(5, 3), jnp.float32)

    def freezing(self):
        return Freezing(GROUPS, SCHEDULE, params=three_params())

    def run(self, steps=8, wrap=lambda tx: tx, **settings):
        freezing = self.freezing()
        tx = wrap(freeze(optax.adamw(0.1, weight_decay=0.1), freezing))
        step = train_step(three, tx, freezing=freezing, **settings)
        state = step.init(three_params())
        states, metrics = [jax.tree.map(np.asarray, state.params)], []
        for _ in range(steps):
            state, shown = step(state, self.x)
            states.append(jax.tree.map(np.asarray, state.params))
            metrics.append(jax.tree.map(np.asarray, shown))
        return step, state, states, metrics

    def test_holds_and_reports_by_the_schedule(self):
        step, _, states, metrics = self.run()
        assert [int(m["freeze_index"]) for m in metrics] == [*SCHEDULE, 0, 0]
        for before, after, index in zip(states, states[1:], [*SCHEDULE, 0, 0], strict=False):
            for name in "abc":
                held = name not in GROUPS[index]
                assert np.array_equal(before[name], after[name]) == held
        assert sorted(index for index, _ in step._compiled) == [0, 1, 2]
        assert all(f._cache_size() == 1 for f in step._compiled.values())

    def test_switch_inside_the_step_gives_the_same(self):
        _, _, host, _ = self.run()
        _, _, switch, _ = self.run(freeze_dispatch="switch")
        for a, b in zip(host, switch, strict=True):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), a, b)

    def test_scan_over_steps_gives_the_same(self):
        step, _, host, _ = self.run(steps=6)
        state, metrics = jax.lax.scan(
            step, step.init(three_params()), jnp.broadcast_to(self.x, (6, 5, 3))
        )
        assert metrics["freeze_index"].tolist() == list(SCHEDULE)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), state.params, host[-1]
        )

    def test_the_index_moves_once_a_window(self):
        _, _, _, metrics = self.run(steps=8, wrap=lambda tx: accumulate(tx, 2, nonfinite="off"))
        assert [int(m["freeze_index"]) for m in metrics] == [0, 0, 1, 1, 2, 2, 1, 1]

    def test_the_index_moves_with_skipped_windows(self):
        for settings, wrap in (
            ({"skip_nonfinite": True}, lambda tx: tx),
            ({}, lambda tx: accumulate(tx, 1, nonfinite="skip_window")),
        ):
            freezing = self.freezing()
            tx = wrap(freeze(optax.adamw(0.1), freezing))
            step = train_step(three, tx, freezing=freezing, **settings)
            state = step.init(three_params())
            seen = []
            for call in range(4):
                batch = jnp.full_like(self.x, jnp.nan) if call == 1 else self.x
                before = jax.tree.map(np.asarray, state.params)
                state, shown = step(state, batch)
                seen.append(int(shown["freeze_index"]))
                if call == 1:
                    jax.tree.map(np.testing.assert_array_equal, before, state.params)
            assert seen == [0, 1, 2, 1]
            assert int(state.updates) == 3

    def test_a_state_from_elsewhere_is_read(self):
        step, _, _, _ = self.run(steps=0)
        state = step.init(three_params())
        state, _ = step(state, self.x)
        copy = jax.tree.map(jnp.copy, state)
        state, first = step(state, self.x)
        _, again = step(copy, self.x)
        assert int(first["freeze_index"]) == int(again["freeze_index"]) == 1
        np.testing.assert_array_equal(first["loss"], again["loss"])

    def test_norm_counts_trainable_leaves_only(self):
        loss = lambda p, x: (
            jnp.sum(p["a"] * jnp.array([1000.0, 1000.0])) + jnp.sum(p["b"] * jnp.array([0.3, 0.4]))
        )
        params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
        freezing = Freezing([["a", "b"], ["b"]], [1], params=params)
        tx = freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), freezing)
        for dispatch in ("host", "switch"):
            step = train_step(loss, tx, freezing=freezing, freeze_dispatch=dispatch)
            state, metrics = step(step.init(params), jnp.ones(1))
            np.testing.assert_allclose(state.params["b"], [-0.3, -0.4], rtol=1e-6)
            np.testing.assert_allclose(metrics["grad_norm"], 0.5, rtol=1e-6)
            assert state.params["a"].tolist() == [0.0, 0.0]

    def test_frozen_norm_layers_keep_their_statistics(self):
        params = LinenNorm().init(jax.random.key(0), jnp.ones((2, 1)))["params"]
        freezing = Freezing([["*"], ["second/*"]], [1] * 3, params=params)
        step = train_step(norm_loss, freeze(optax.sgd(0.1), freezing), has_aux=True)
        state = start_linen(step)
        for _ in range(3):
            state, _ = step(state, micro(2.0))
        stats = state.model_state["batch_stats"]
        assert (stats["first"]["mean"].tolist(), stats["first"]["var"].tolist()) == ([0.0], [1.0])
        assert stats["second"]["var"].tolist() != [1.0]

    def test_frozen_norm_layers_keep_their_statistics_in_nnx(self):
        model = NnxNorm(nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        freezing = Freezing([["*"], ["second/*"]], [1] * 3, params=params)
        step = train_step(lambda m, x: jnp.mean(m(x) * x), freeze(optax.sgd(0.1), freezing))
        state = step.init(model)
        for _ in range(3):
            state, _ = step(state, micro(2.0))
        trained = state.merge(model)
        assert trained.first.mean[...].tolist() == [0.0]
        assert trained.second.var[...].tolist() != [1.0]

    def test_backward_work_is_saved(self):
        step, state, _, _ = self.run(steps=0)
        flops = [
            step.lower(state, self.x, index=i).compile().cost_analysis()["flops"] for i in range(3)
        ]
        assert flops[0] > flops[1] > flops[2]

    def test_mismatches_are_refused(self):
        freezing = self.freezing()
        other = Freezing(GROUPS, (0, 0), params=three_params())
        with pytest.raises(StateMismatchError, match="not the one"):
            train_step(three, freeze(optax.sgd(0.1), freezing), freezing=other)
        with pytest.raises(ValueError, match=r"holds no boostax\.freeze"):
            train_step(three, optax.sgd(0.1), freezing=freezing).init(three_params())
        step = train_step(three, freeze(optax.sgd(0.1), freezing))
        foreign = train_step(three, freeze(optax.sgd(0.1), other)).init(three_params())
        with pytest.raises(StateMismatchError, match="other groups or another schedule"):
            step(foreign, self.x)
        plain = train_step(three, optax.sgd(0.1)).init(three_params())
        with pytest.raises(StateMismatchError, match="no FreezeState"):
            step(plain, self.x)

    def test_describe_compares_each_variant_with_the_plain_step(self):
        step, state, _, _ = self.run(steps=0)
        description = step.describe(state, self.x)
        assert [c.name for c in description.variants] == [f"freeze index {i}" for i in range(3)]
        assert description.variants[2].flops < description.plain.flops
        text = str(description)
        assert "freeze(groups=3" in text
        assert "after the end of the freeze schedule nothing is frozen" in text


def test_line_search_of_the_user():
    step = train_step(
        lambda p, x: jnp.mean((x - p) ** 2),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    )
    state = step.init(jnp.zeros(()))
    losses = []
    for _ in range(3):
        state, metrics = step(state, jnp.array([1.0, 3.0]))
        losses.append(float(metrics["loss"]))
    assert losses[0] > losses[-1]


def test_freezing_is_found_in_the_chain():
    freezing = Freezing(GROUPS, SCHEDULE, params=three_params())
    tx = optax.chain(optax.clip(1.0), freeze(optax.sgd(0.1), freezing))
    step = boostax.train_step(three, tx)
    _, metrics = step(step.init(three_params()), TestFreezing.x)
    assert int(metrics["freeze_index"]) == 0


class TestWrappersAroundFreezing:
    """The host's count of windows never differs from the state's."""

    def indices(self, tx, freezing, batches, **settings):
        step = train_step(three, tx, freezing=freezing, **settings)
        state = step.init(three_params())
        used, said = [], []
        for batch in batches:
            frozen = find_state(state.opt_state, boostax.FreezeState)
            said.append(freezing.index_at(int(frozen.count)))
            state, metrics = step(state, batch)
            used.append(int(metrics["freeze_index"]))
        return used, said

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda tx: optax.MultiSteps(tx, 2),
            lambda tx: optax.apply_if_finite(tx, 5),
            lambda tx: optax.chain(optax.clip(1.0), accumulate(tx, 2, nonfinite="off")),
            lambda tx: optax.masked(tx, dict.fromkeys("abc", True)),
            lambda tx: tx,
        ],
    )
    def test_the_index_is_that_of_the_state(self, wrap):
        freezing = Freezing(GROUPS, SCHEDULE, params=three_params())
        x = TestFreezing.x
        batches = [x, jnp.full_like(x, jnp.nan), x, x, x, x]
        used, said = self.indices(wrap(freeze(optax.sgd(0.1), freezing)), freezing, batches)
        assert used == said


def test_nnx_statistics_with_micro_batches():
    step = train_step(lambda model, x: jnp.mean(model(x)), optax.sgd(0.0), microbatch=4)
    state = step.init(NnxNorm(nnx.Rngs(0)))
    batch = together([micro(mean) for mean in (0.0, 2.0, 4.0, 6.0)])
    state, _ = step(state, batch)
    np.testing.assert_allclose(state.merge(NnxNorm(nnx.Rngs(0))).first.mean[...], [0.3], rtol=1e-5)


def test_a_merged_model_outlives_the_state():
    model = NnxNorm(nnx.Rngs(0))
    step = train_step(lambda m, x: jnp.mean(m(x) * x), optax.sgd(0.1))
    state, _ = step(step.init(model), micro(2.0))
    best = state.merge(model)
    best.first.scale[...] = jnp.full(1, 7.0)
    assert state.params["first"]["scale"][...].tolist() != [7.0]
    state, _ = step(state, micro(2.0))
    assert best.first.scale[...].tolist() == [7.0]
    assert np.isfinite(best(micro(1.0))).all()


def test_a_merged_model_draws_with_its_own_kind_of_key():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(1, 1, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.layer(x))

    model = Noisy(nnx.Rngs(jax.random.key(0, impl="rbg")))
    step = train_step(lambda m, x: jnp.mean(m(x)), optax.sgd(0.1))
    state, _ = step(step.init(model), micro(2.0))
    assert np.isfinite(state.merge(model)(micro(1.0))).all()


@pytest.mark.parametrize("stats", ["per_window", "per_micro"])
def test_flush_closes_the_statistics_of_the_window_too(stats):
    step = train_step(norm_loss, accumulate(optax.sgd(0.0), 4), has_aux=True, stats=stats)
    state = start_linen(step)
    for mean in (0.0, 4.0):
        state, _ = step(state, micro(mean))
    state = step.flush(state)
    if stats == "per_window":  # means 0 and 4, variance 1: pooled 2 and 1 + 4
        np.testing.assert_allclose(first_stats(state), (0.2, 1.4), rtol=1e-5)
    assert int(state.updates) == 1
    before = first_stats(state)
    for _ in range(4):
        state, _ = step(state, micro(before[0]))
    again = step.flush(state)  # an empty window
    assert int(again.updates) == 2


def test_the_decision_does_not_depend_on_the_metrics():
    loss = lambda p, x: jnp.mean(x @ p) + jax.lax.stop_gradient(jnp.log(jnp.float32(-1.0)))
    for metrics in (None, ("loss",)):
        step = train_step(loss, accumulate(optax.sgd(1.0), 2), metrics=metrics)
        state = step.init(jnp.zeros(2))
        for _ in range(2):
            state, _ = step(state, jnp.ones((1, 2)))
        assert state.params.tolist() == [0.0, 0.0]


def test_momentum_is_found_behind_a_jit_of_the_user():
    forward = jax.jit(
        lambda params, model_state, x: LinenNorm().apply(
            {"params": params, **model_state}, x, mutable=["batch_stats"]
        )
    )

    def loss(params, x, *, model_state):
        out, changed = forward(params, model_state, x)
        return jnp.mean(out * x), LossAux(model_state=changed)

    step = train_step(loss, accumulate(optax.sgd(0.0), 2), has_aux=True)
    state = start_linen(step)
    forward(state.params, state.model_state, micro(0.0))
    for mean in (0.0, 4.0):
        state, _ = step(state, micro(mean))
    np.testing.assert_allclose(first_stats(state), (0.2, 1.4), rtol=1e-5)


def test_a_weight_that_only_some_batches_have():
    def loss(params, batch):
        return jnp.mean(params * batch["x"]), LossAux(weight=batch.get("w"))

    step = train_step(loss, optax.sgd(1.0), has_aux=True)
    state = step.init(jnp.zeros(()))
    state, _ = step(state, {"x": jnp.ones(1)})
    state, _ = step(state, {"x": jnp.ones(1), "w": jnp.float32(0.0)})
    assert (float(state.params), int(state.updates), int(state.skipped)) == (-1.0, 1, 1)


def test_several_windows_in_one_optimizer():
    labels = {"x": "x", "y": "y"}
    tx = optax.multi_transform(
        {"x": accumulate(optax.sgd(1.0), 2), "y": accumulate(optax.sgd(1.0), 4)}, labels
    )
    step = train_step(lambda p, b: jnp.mean((p["x"] + p["y"]) * b), tx)
    state = step.init({"x": jnp.zeros(()), "y": jnp.zeros(())})
    for _ in range(4):
        state, _ = step(state, jnp.ones(1))
    assert (float(state.params["x"]), float(state.params["y"])) == (-2.0, -1.0)


def test_an_optimizer_with_a_key_in_its_state():
    step = train_step(linear, optax.noisy_sgd(0.1, key=jax.random.key(0)))
    state, _ = step(step.init(jnp.zeros(2)), jnp.ones((1, 2)))
    assert np.isfinite(state.params).all()


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)])
def test_an_optimizer_that_refuses_what_it_does_not_know(wrap):
    sam = optax.contrib.sam(
        optax.sgd(0.1), optax.contrib.normalize(), opaque_mode=True, sync_period=2
    )
    loss = lambda p, x: jnp.mean((x - p) ** 2)
    x, params = jnp.ones(2), jnp.zeros(2)
    step = train_step(loss, wrap(sam))
    state, opt_state = step.init(params), sam.init(params)
    for _ in range(3):
        state, _ = step(state, x)
        updates, opt_state = sam.update(
            jax.grad(loss)(params, x), opt_state, params, grad_fn=lambda p, _: jax.grad(loss)(p, x)
        )
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.params, params, rtol=1e-5)
    assert float(params[0]) > 0.05


def test_collections_may_come_frozen():
    step = train_step(norm_loss, optax.sgd(0.1), has_aux=True)
    variables = flax.core.freeze(LinenNorm().init(jax.random.key(0), jnp.ones((2, 1))))
    state = step.init(variables["params"], model_state={"batch_stats": variables["batch_stats"]})
    state, _ = step(state, micro(2.0))
    np.testing.assert_allclose(first_stats(state), (0.2, 1.0), rtol=1e-5)
