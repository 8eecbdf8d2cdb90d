"""The train step with a dynamic or a fixed loss scale."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import boostax
from boostax import DynamicLossScale, GroupLossScale, LossAux, StateMismatchError, set_loss_scale
from boostax.updates._skip import find_state
from tests.models import data, linen_net, nnx_net, plain

INF = np.float32(np.inf)


def linear(params, batch):
    """Its gradient is the mean of the batch's rows."""
    return jnp.mean(batch @ params)


def rows(*values):
    return np.asarray(values, np.float32)


def host(tree):
    return jax.tree.map(np.asarray, tree)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def mean_squares(weights, batch):
    x, y = batch
    return jnp.mean((x @ weights - y) ** 2)


class TestRecorded:
    @pytest.mark.quick
    def test_first_form(self, reference):
        d = reference("i_loss_scale_cell")
        scaling = DynamicLossScale(2**12, 2, 1000)
        step = boostax.train_step(mean_squares, optax.sgd(0.1, 0.9), loss_scale=scaling)
        x, y = np.ones((10, 16), np.float32), np.ones((10, 1), np.float32)
        state, metrics = step(step.init(jnp.ones((16, 10))), (x, y))
        np.testing.assert_allclose(metrics["loss"], d["form1_loss"], rtol=1e-6)
        assert bool(metrics["overflow"]) == bool(d["form1_overflow"])
        assert float(metrics["loss_scale"]) == d["form1_scale"] == float(state.loss_scale.scale)
        np.testing.assert_allclose(state.params, d["form1_weight"], rtol=1e-5)

    def test_second_form_overflows_skips_and_reports(self, reference):
        d = reference("i_loss_scale_cell")
        scale = np.full(1, np.finfo(np.float32).max, np.float32)
        step = boostax.train_step(mean_squares, optax.sgd(0.1, 0.9), loss_scale=scale)
        x, y = np.ones((16, 16), np.float32), np.zeros((16, 10), np.float32)
        state, metrics = step(step.init(jnp.ones((16, 10))), (x, y))
        assert float(metrics["loss"]) == d["form2_loss"] == 256
        assert bool(metrics["overflow"]) is bool(d["form2_overflow"]) is True
        assert float(metrics["loss_scale"]) == d["form2_scale"] == float(state.loss_scale.scale)
        np.testing.assert_array_equal(state.params, d["form2_weight"])
        assert (int(state.attempt), int(state.skipped), int(state.updates)) == (1, 1, 0)
        assert int(state.loss_scale.overflows) == 1
        # The host can set another, and then it trains; nothing is compiled anew.
        state, metrics = step(set_loss_scale(state, 1024), (x, y))
        assert not metrics["overflow"]
        assert int(metrics["updates"]) == 1
        assert step._jitted(None, state)._cache_size() == 1

    @pytest.mark.quick
    def test_trajectory(self, reference):
        d = reference("i_loss_scale_cell")
        scaling = DynamicLossScale(1024, 2, 3, min_scale=1)
        step = boostax.train_step(mean_squares, optax.sgd(0.05, 0.9), loss_scale=scaling)
        state, updates, scale = step.init(jnp.asarray(d["traj_w0"])), 0, 1024.0
        for t, overflow in enumerate(d["traj_overflow"]):
            before = host((state.params, state.opt_state))
            state, metrics = step(state, (d["traj_x"][t], d["traj_y"][t]))
            np.testing.assert_allclose(metrics["loss"], d["traj_loss"][t], rtol=1e-5)
            assert bool(metrics["overflow"]) == bool(overflow) != bool(metrics["finite"])
            assert float(metrics["loss_scale"]) == scale
            scale = float(state.loss_scale.scale)
            assert scale == d["traj_scale_after"][t]
            # One weight passes through zero, where the last bits of its past are all there is.
            np.testing.assert_allclose(state.params, d["traj_w"][t], rtol=1e-5, atol=1e-6)
            if overflow:
                equal((state.params, state.opt_state), before)
            updates += not overflow
            assert (int(state.attempt), int(metrics["updates"])) == (t + 1, updates)
        assert step._jitted(None, state)._cache_size() == 1


class TestWindows:
    """Windows of four, with an overflow in the second micro-batch of the second window."""

    BATCHES = tuple(rows([i, -i]) for i in range(1, 5))

    def run(self, policy, calls):
        tx = boostax.accumulate(optax.sgd(0.5, 0.5), 4, nonfinite=policy)
        step = boostax.train_step(linear, tx, loss_scale=DynamicLossScale(1024, window=100))
        state, scales, told = step.init(jnp.zeros(2)), [], []
        for batch in calls:
            before = host(state)
            state, metrics = step(state, batch)
            scales.append(float(state.loss_scale.scale))
            told.append(bool(metrics["overflow"]))
        assert step._jitted(None, state)._cache_size() == 1
        return state, before, scales, told

    @pytest.mark.quick
    def test_a_window_is_dropped_whole(self):
        bad = [self.BATCHES[0], rows([INF, 0]), *self.BATCHES[2:]]
        state, before, scales, told = self.run("skip_window", [*self.BATCHES, *bad])
        # Once, and not once for each call that is left.
        assert scales == [1024] * 5 + [512] * 3
        assert told == [False] * 5 + [True] + [False] * 2
        window = find_state(state.opt_state, boostax.AccumulateState)
        assert (int(window.updates), int(window.skipped_windows)) == (1, 1)
        assert int(state.updates) == 1
        equal(window.grads, np.zeros(2, np.float32))
        assert int(window.position) == 0
        # The mean gradient of the first window is (2.5, -2.5).
        assert state.params.tolist() == [-1.25, 1.25]
        equal(window.inner_state, before.opt_state.inner_state)
        assert window.inner_state[0].trace.tolist() == [2.5, -2.5]
        assert int(state.attempt) == 8
        # The next window is clean: the trace is 2.5 + 0.5 * 2.5.
        clean, *_ = self.run("skip_window", [*self.BATCHES, *bad, *self.BATCHES])
        assert clean.params.tolist() == [-1.25 - 0.5 * 3.75, 1.25 + 0.5 * 3.75]
        assert int(clean.updates) == 2

    @pytest.mark.parametrize("policy", ["skip_micro", "off"])
    def test_a_micro_batch_is_left_out(self, policy):
        """The window's gradients come under two scales, and add up to the true mean."""
        calls = [self.BATCHES[0], rows([0, np.nan]), *self.BATCHES[1:]]
        state, _, scales, told = self.run(policy, calls)
        assert scales == [1024] + [512] * 4
        assert told == [False, True, False, False, False]
        assert state.params.tolist() == [-1.25, 1.25]
        assert (int(state.attempt), int(state.updates)) == (5, 1)
        assert int(state.loss_scale.good_steps) == 3

    def test_flush(self):
        tx = boostax.accumulate(optax.sgd(1.0, 0.5), 4)
        step = boostax.train_step(linear, tx, loss_scale=DynamicLossScale(1024))
        state = step.init(jnp.zeros(2, jnp.float16))
        for batch in (rows([1, 2]), rows([INF, 0]), rows([3, 4])):
            state, _ = step(state, batch.astype(np.float16))
        scale = host(state.loss_scale)
        state = step.flush(state)
        assert state.params.tolist() == [-2, -3]
        assert state.params.dtype == jnp.float16
        equal(state.loss_scale, scale)
        assert float(scale.scale) == 512


class TestOrder:
    """Unscale, average, clip, update: the mean of (3, 4) and (0, 0) has the norm 2.5."""

    @pytest.mark.parametrize("dtype", [np.float32, np.float16])
    def test_in_a_window(self, dtype):
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        tx = boostax.accumulate(clipped, 2)
        step = boostax.train_step(linear, tx, loss_scale=DynamicLossScale(1024))
        state = step.init(jnp.zeros(2, dtype))
        for batch in (rows([3, 4]), rows([0, 0])):
            state, metrics = step(state, batch.astype(dtype))
        np.testing.assert_allclose(state.params, [-0.6, -0.8], rtol=np.finfo(dtype).eps)
        assert float(metrics["grad_norm"]) == 2.5

    def test_in_micro_batches(self):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        scaling = DynamicLossScale(1024)
        step = boostax.train_step(linear, tx, microbatch=2, loss_scale=scaling)
        state, metrics = step(step.init(jnp.zeros(2)), rows([3, 4], [0, 0]))
        np.testing.assert_allclose(state.params, [-0.6, -0.8], rtol=1e-6)
        assert float(metrics["grad_norm"]) == 2.5
        assert int(state.loss_scale.good_steps) == 2


class TestWhatCounts:
    def test_micro_batches_count_each(self):
        scaling = DynamicLossScale(8, 2, window=5)
        step = boostax.train_step(linear, optax.sgd(1.0), microbatch=2, loss_scale=scaling)
        state, seen = step.init(jnp.zeros(2)), []
        good, bad = rows([1, 2], [3, 4]), rows([1, 2], [INF, 4])
        for batch in (good, good, bad, good, good, good):
            state, metrics = step(state, batch)
            seen.append((float(state.loss_scale.scale), int(state.loss_scale.good_steps)))
        # The call with the bad half is skipped whole.
        assert seen == [(8, 2), (8, 4), (4, 0), (4, 2), (4, 4), (8, 1)]
        assert state.params.tolist() == [-10, -15]
        assert int(metrics["updates"]) == 5

    @pytest.mark.parametrize("policy", [None, "skip_micro"])
    def test_weight_zero_leaves_the_scale_alone(self, policy):
        def loss(params, batch):
            x, weight = batch
            return jnp.mean(x @ params), LossAux(weight=weight)

        tx = optax.sgd(1.0)
        tx = tx if policy is None else boostax.accumulate(tx, 2, nonfinite=policy)
        scaling = DynamicLossScale(8, window=2)
        step = boostax.train_step(loss, tx, has_aux=True, loss_scale=scaling)
        state = step.init(jnp.zeros(2))
        state, _ = step(state, (rows([1, 2]), np.float32(1)))
        before = host(state.loss_scale)
        for x in (rows([1, 2]), rows([INF, 2])):
            state, metrics = step(state, (x, np.float32(0)))
            equal(before, state.loss_scale)
            assert not metrics["overflow"]
        state, _ = step(state, (rows([1, 2]), np.float32(1)))
        assert float(state.loss_scale.scale) == 16

    @pytest.mark.parametrize("dispatch", ["host", "switch"])
    def test_frozen_leaves_do_not(self, dispatch):
        """The gradient of the root is infinite at 0, the loss is not."""

        def loss(params, batch):
            return jnp.sqrt(params["a"]) + params["b"] * jnp.mean(batch)

        freezing = boostax.Freezing([["a", "b"], ["b"]], [1, 0, 0, 1, 1])
        step = boostax.train_step(
            loss,
            boostax.freeze(optax.sgd(1.0, 0.5), freezing),
            freeze_dispatch=dispatch,
            loss_scale=DynamicLossScale(64, 2, window=2),
        )
        state, seen = step.init({"a": jnp.float32(0), "b": jnp.float32(0)}), []
        for _ in range(5):
            before = host((state.params, find_state(state.opt_state, optax.TraceState)))
            state, metrics = step(state, jnp.ones(2))
            seen.append((int(metrics["freeze_index"]), float(state.loss_scale.scale)))
            if metrics["overflow"]:
                equal((state.params, find_state(state.opt_state, optax.TraceState)), before)
        # The index moves on in calls that were skipped too.
        assert seen == [(1, 64), (0, 32), (0, 16), (1, 16), (1, 32)]
        assert float(state.params["b"]) == -(1 + 1.5 + 1.75)
        assert float(state.params["a"]) == 0


class TestModels:
    """An overflow leaves statistics, moments and counters as they were; only attempts move."""

    @staticmethod
    def batch(dtype, bad=False):
        batch = jax.tree.map(lambda leaf: leaf[0], data.batches(1, dtype))
        if bad:
            batch = {**batch, "x": np.full_like(batch["x"], INF)}
        return batch

    def check(self, step, state, dtype):
        held = lambda s: host((s.params, s.opt_state, s.model_state))
        state, _ = step(state, self.batch(dtype))
        before = held(state)
        state, metrics = step(state, self.batch(dtype, bad=True))
        assert bool(metrics["overflow"])
        assert float(state.loss_scale.scale) == 512
        assert (int(state.attempt), int(state.updates)) == (2, 1)
        after = held(state)
        state, metrics = step(state, self.batch(dtype))
        assert not metrics["overflow"]
        assert np.isfinite(metrics["loss"])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
        assert step._jitted(None, state)._cache_size() == 1
        return before, after, state

    @pytest.mark.parametrize(
        "dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
    )
    def test_linen(self, dtype):
        variables = linen_net.init(dtype)
        step = boostax.train_step(
            linen_net.loss, optax.adam(0.1), has_aux=True, loss_scale=DynamicLossScale(1024)
        )
        stats = {"batch_stats": variables["batch_stats"]}
        state = step.init(variables["params"], model_state=stats)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state[0].nu)} == {"float32"}
        before, after, state = self.check(step, state, dtype)
        equal(before, after)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(dtype)}

    def test_nnx(self):
        model = nnx_net.init(jnp.float16)
        step = boostax.train_step(nnx_net.loss, optax.adam(0.1), loss_scale=DynamicLossScale(1024))
        before, after, state = self.check(step, step.init(model), jnp.float16)
        equal(before[:2], after[:2])
        # The dropout's key counter moves on, the statistics don't.
        was, new = (dict(jax.tree_util.tree_leaves_with_path(part[2])) for part in (before, after))
        counts = [path for path in was if "count" in jax.tree_util.keystr(path)]
        assert len(counts) == 1
        for path, leaf in was.items():
            np.testing.assert_array_equal(new[path], leaf + (path in counts))
        merged = state.merge(model)
        assert merged.first.kernel[...].dtype == jnp.float16

    def test_the_key_moves_with_the_attempt(self):
        def loss(params, batch, *, rng):
            return jnp.mean(batch @ params) + 0 * params[0], LossAux(
                metrics={"drawn": jax.random.uniform(rng)}
            )

        step = boostax.train_step(
            loss, optax.sgd(1.0), has_aux=True, loss_scale=DynamicLossScale(8)
        )
        state, drawn = step.init(jnp.zeros(2), rng=0), []
        for batch in (rows([INF, 0]), rows([INF, 0]), rows([1, 0])):
            state, metrics = step(state, batch)
            drawn.append(float(metrics["drawn"]))
        assert len(set(drawn)) == 3


class TestDevices:
    @pytest.mark.parametrize(
        ("count", "kind", "tx"),
        [
            pytest.param(2, "Auto", optax.sgd(1.0, 0.5), id="mean-2"),
            pytest.param(8, "Explicit", optax.sgd(1.0, 0.5), id="mean-8"),
            pytest.param(
                2,
                "Explicit",
                optax.chain(boostax.adasum("data"), optax.sgd(1.0, 0.5)),
                id="adasum-2",
            ),
            pytest.param(
                8,
                "Auto",
                optax.chain(boostax.adasum("data"), optax.sgd(1.0, 0.5)),
                id="adasum-8",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_decide_together(self, count, kind, tx):
        mesh = jax.make_mesh(
            (count,), ("data",), (getattr(AxisType, kind),), devices=jax.devices()[:count]
        )
        scaling = DynamicLossScale(1024, window=2)
        step = boostax.train_step(linear, tx, mesh=mesh, loss_scale=scaling)
        state, seen = step.init(jnp.zeros(2, jnp.float16)), []
        good = np.tile(rows([1, 2]), (count, 1)).astype(np.float16)
        bad = np.array(good)
        bad[1, 0] = np.inf  # on one device alone
        held = lambda state: host((state.params, find_state(state.opt_state, optax.TraceState)))
        for batch in (good, bad, good, good):
            before = held(state)
            state, metrics = step(state, batch)
            seen.append((bool(metrics["overflow"]), float(state.loss_scale.scale)))
            if metrics["overflow"]:
                equal(held(state), before)
        assert seen == [(False, 1024), (True, 512), (False, 512), (False, 1024)]
        # Equal gradients: AdaSum takes their mean too. The trace is 1, 1.5 and 1.75 times them.
        np.testing.assert_allclose(state.params, [-4.25, -8.5], rtol=1e-3)
        for leaf in jax.tree.leaves((state.params, state.opt_state, state.loss_scale)):
            assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
        _, metrics = step(set_loss_scale(state, 64), good)
        assert (float(metrics["loss_scale"]), bool(metrics["overflow"])) == (64, False)
        assert step._jitted(None, state)._cache_size() == 1

    def test_where_replicas_differ(self):
        """Two local steps, then the mean of what was moved; an overflow on one device is no step."""
        mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
        tx = boostax.local_steps(optax.sgd(1.0, 0.5), 2, boostax.all_reduce("data"))
        scaling = DynamicLossScale(1024, window=2)
        step = boostax.train_step(linear, tx, mesh=mesh, loss_scale=scaling)
        state, seen = step.init(jnp.zeros(2, jnp.float16)), []
        good, bad = rows([1, 2], [3, 4]), rows([1, 2], [INF, 4])
        for batch in (good, good, bad, good, good):
            state, _ = step(state, batch.astype(np.float16))
            seen.append((float(state.loss_scale.scale), *state.params.tolist()))
        # The traces are 1, 1.5, 1.75 and 1.875 times the gradients, whose mean is (2, 3).
        moved = [0, 2.5, 2.5, 2.5, 6.125]
        scales = [1024, 2048, 1024, 1024, 2048]
        assert seen == [(s, -2 * m, -3 * m) for s, m in zip(scales, moved, strict=True)]

    def test_a_device_of_weight_zero_adds_nothing(self):
        def loss(params, batch):
            x, mask = batch
            total = jnp.sum(mask)
            return jnp.sum((x @ params) * mask) / jnp.maximum(total, 1), LossAux(weight=total)

        mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
        step = boostax.train_step(
            loss, optax.sgd(1.0), has_aux=True, mesh=mesh, loss_scale=DynamicLossScale(8)
        )
        batch = (rows([1, 2], [INF, 0]), np.float32([1, 0]))
        state, metrics = step(step.init(jnp.zeros(2)), batch)
        assert not metrics["overflow"]
        assert state.params.tolist() == [-1, -2]
        assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (8, 1)


def drawn(params, batch):
    logits = plain.apply(params, batch["x"])
    return data.cross_entropy(logits, batch["y"]), LossAux(predictive=boostax.Categorical(logits))


class TestThor:
    """Statistics of the backward pass are unscaled as gradients are."""

    STREAM = data.batches(3)

    def runs(self, fisher, loss_scale, scales):
        """Give the parameters after a run from each of these scales, all by one program."""
        loss = drawn if fisher == "true" else plain.loss
        batches = [jax.tree.map(lambda leaf, t=t: leaf[t], self.STREAM) for t in range(3)]
        layers = boostax.capture_layers(loss, plain.init(), batches[0], fisher=fisher)
        step = boostax.train_step(
            loss,
            boostax.thor(0.05, 0.1, layers=layers, frequency=2, early=(0,)),
            has_aux=fisher == "true",
            due_dispatch="cond",
            loss_scale=loss_scale,
        )
        for scale in scales:
            state = set_loss_scale(step.init(plain.init(), rng=0), scale)
            for batch in batches:
                state, metrics = step(state, batch)
                assert not metrics["overflow"]
            yield host(state.params)
        # An overflow where statistics are due leaves factors and inverses alone; they stay due.
        state, _ = step(state, batches[0])
        assert find_state(state.opt_state, boostax.ThorState).due
        before = host((state.params, state.opt_state))
        bad = {**batches[0], "x": np.full_like(batches[0]["x"], INF)}
        state, metrics = step(state, bad)
        assert metrics["overflow"]
        equal((state.params, state.opt_state), before)

    @pytest.mark.slow
    @pytest.mark.parametrize("fisher", ["empirical", "true"])
    def test_a_scale_is_invisible(self, fisher):
        expected, scaled = self.runs(fisher, DynamicLossScale(), (1, 1024))
        close(scaled, expected, rtol=1e-4)
        groups = GroupLossScale(["layers_0/*", "layers_[12]/*"])
        (by_group,) = self.runs(fisher, groups, ([1024, 2.0**-4],))
        close(by_group, expected, rtol=1e-4)


class TestOptimizers:
    """What asks for more evaluations of the loss gets unscaled ones, in half precision too."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "tx",
        [
            pytest.param(
                optax.contrib.sam(
                    optax.sgd(0.1), optax.contrib.normalize(), sync_period=2, opaque_mode=True
                ),
                id="sam",
            ),
            pytest.param(optax.contrib.sophia(0.01, update_interval=1), id="sophia"),
            pytest.param(
                optax.chain(
                    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
                ),
                id="backtracking",
            ),
            pytest.param(optax.lbfgs(memory_size=2), id="lbfgs"),
        ],
    )
    def test_in_float16(self, tx):
        """One program, at the scales 1 and 1024."""
        batch = jax.tree.map(lambda leaf: leaf[0], data.batches(1, np.float16))
        step = boostax.train_step(plain.loss, tx, loss_scale=DynamicLossScale())
        shapes = lambda state: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        ends, losses = [], []
        for scale in (1, 1024):
            state = set_loss_scale(step.init(plain.init(np.float16)), scale)
            before = shapes(state)
            for _ in range(3):
                state, metrics = step(state, batch)
                assert not metrics["overflow"]
                losses.append(float(metrics["loss"]))
            assert shapes(state) == before
            ends.append(state.params)
        assert step._jitted(None, state)._cache_size() == 1
        assert losses[2] < losses[0]
        close(losses[3:], losses[:3], rtol=1e-2)
        close(*ends, rtol=1e-2, atol=1e-2)


class TestCompilation:
    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
    def test_half_precision(self, dtype):
        """Moments are float32 from the start, and a scan over steps equals the loop."""
        scaling = DynamicLossScale(1024, window=2)
        step = boostax.train_step(linear, optax.adam(0.1), loss_scale=scaling)
        first = step.init(jnp.zeros(2, dtype))
        scanned = jax.tree.map(jnp.copy, first)
        assert first.opt_state[0].mu.dtype == first.opt_state[0].nu.dtype == jnp.float32
        batches = jnp.asarray([[[1, 2]], [[2, 3]], [[INF, 0]], [[1, 1]]], dtype)
        state = first
        for batch in batches:
            state, metrics = step(state, batch)
        assert step._jitted(None, state)._cache_size() == 1
        assert state.params.dtype == dtype
        assert metrics["loss"].dtype == metrics["loss_scale"].dtype == jnp.float32
        assert metrics["loss_scale"].shape == metrics["overflow"].shape == ()
        again, told = jax.lax.scan(step, scanned, batches)
        assert told["loss_scale"].tolist() == [1024, 1024, 2048, 1024]
        assert told["overflow"].tolist() == [False, False, True, False]
        close(again.params, state.params, rtol=1e-2)
        equal(again.loss_scale, state.loss_scale)

    def test_the_smallest_gradients_survive(self):
        """2^-26 is below float16's smallest number; what adam makes of it is not."""

        def loss(params, batch):
            return jnp.mean(params * batch).astype(jnp.float32) * jnp.float32(2**-13)

        batch = jnp.full(1, 2**-13, jnp.float16)
        params = {}
        for scale in (1, 1024):
            step = boostax.train_step(loss, optax.adam(0.5, eps=1e-12), loss_scale=scale)
            state, _ = step(step.init(jnp.ones((), jnp.float16)), batch)
            params[scale] = float(state.params)
        assert params == {1: 1.0, 1024: 0.5}

    def test_donates(self):
        step = boostax.train_step(linear, optax.sgd(1.0), loss_scale=8.0)
        state = step.init(jnp.zeros(2))
        step(state, rows([1, 2]))
        assert all(leaf.is_deleted() for leaf in state.loss_scale)

    def test_vmap_over_runs(self):
        step = boostax.train_step(linear, optax.sgd(1.0), loss_scale=DynamicLossScale(8))
        states = jax.vmap(step.init)(jnp.zeros((2, 2)))
        states, metrics = jax.jit(jax.vmap(step))(states, np.stack([rows([1, 2]), rows([INF, 0])]))
        assert metrics["overflow"].tolist() == [False, True]
        assert states.loss_scale.scale.tolist() == [8, 4]
        assert states.params.tolist() == [[-1, -2], [0, 0]]

    def test_metrics_can_be_left_out(self):
        step = boostax.train_step(linear, optax.sgd(1.0), metrics=("loss",), loss_scale=8.0)
        state, metrics = step(step.init(jnp.zeros(2)), rows([INF, 0]))
        assert set(metrics) == {"loss"}
        assert state.params.tolist() == [0, 0]


class TestState:
    def make(self, loss_scale):
        return boostax.train_step(linear, optax.sgd(1.0, 0.5), loss_scale=loss_scale, donate=False)

    def test_goes_on_bitwise(self, tmp_path):
        """Broken off in the middle of a window of the scale, by flax and by orbax."""
        step = self.make(DynamicLossScale(1024, window=3))
        batches = [rows([1, 2]), rows([INF, 0]), rows([3, 4]), rows([5, 6]), rows([7, 8])]
        states = [step.init(jnp.zeros(2, jnp.float16))]
        for batch in batches:
            states.append(step(states[-1], batch)[0])
        middle = states[3]
        assert [leaf.item() for leaf in middle.loss_scale] == [512, 1, 1, 0]
        by_flax = flax.serialization.from_bytes(states[0], flax.serialization.to_bytes(middle))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", middle)
            checkpointer.wait_until_finished()
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, states[0])
            by_orbax = checkpointer.restore(tmp_path / "state", target)
        for state in (by_flax, by_orbax):
            equal(state, middle)
            for batch in batches[3:]:
                state, _ = step(state, batch)
            equal(state, states[-1])
        assert float(states[-1].loss_scale.scale) == 1024

    def test_must_be_of_the_step(self):
        none, one, fixed = self.make(None), self.make(DynamicLossScale()), self.make(8.0)
        params, x = {"a": jnp.zeros(2), "b": jnp.zeros(2)}, rows([1, 2])
        groups = {n: GroupLossScale(["a", "b"][:n] if n == 2 else ["*"]) for n in (1, 2)}
        by_group = {
            n: boostax.train_step(
                lambda p, x: jnp.mean(x @ (p["a"] + p["b"])), optax.sgd(1.0), loss_scale=scaling
            )
            for n, scaling in groups.items()
        }
        p = jnp.zeros(2)
        with pytest.raises(StateMismatchError, match=r"the step has .* and the state has none"):
            one(none.init(p), x)
        with pytest.raises(StateMismatchError, match=r"the state has .* and the step has none"):
            none(one.init(p), x)
        with pytest.raises(StateMismatchError, match=r"scale has the shape \(2,\), .* \(1,\)"):
            by_group[1](by_group[2].init(params), x)
        with pytest.raises(StateMismatchError, match=r"scale has the shape \(2,\), .* \(\)"):
            one(one.init(p).replace(loss_scale=groups[2].init_state()), x)
        with pytest.raises(StateMismatchError, match=r"is a dict, not a LossScaleState"):
            one(one.init(p).replace(loss_scale={"scale": 8.0}), x)
        # Fixed and dynamic scales keep the same: a run can go from one to the other.
        assert int(fixed(one.init(p), x)[0].updates) == 1
        with pytest.raises(ValueError, match=r"set_loss_scale: this train state has no loss scale"):
            set_loss_scale(none.init(p), 8)

    @pytest.mark.parametrize(
        "value",
        [8, 8.0, np.float32(8), np.int64(8), np.array(8), np.full(1, 8.0), jnp.full(1, 8)],
        ids=str,
    )
    def test_fixed(self, value):
        scale = self.make(value).init(jnp.zeros(2)).loss_scale.scale
        assert (scale.shape, scale.dtype, float(scale)) == ((), jnp.float32, 8)

    @pytest.mark.parametrize("value", [DynamicLossScale, GroupLossScale])
    def test_refuses_a_class(self, value):
        with pytest.raises(TypeError, match=f"loss_scale: got the class {value.__name__}; call it"):
            self.make(value)

    @pytest.mark.parametrize(
        "value", ["8", True, np.True_, [8.0], (8.0,), {}, np.array(["8"]), 1j, np.array([True])]
    )
    def test_refuses_other_types(self, value):
        with pytest.raises(
            TypeError, match=r"^loss_scale must be a number.*or a boostax\.DynamicLossScale, or"
        ):
            self.make(value)

    @pytest.mark.parametrize(
        "value", [0, 0.0, -1, np.nan, np.inf, 1e39, np.zeros(1), np.ones(2), np.ones((1, 1))]
    )
    def test_refuses_other_values(self, value):
        with pytest.raises(ValueError, match=r"^loss_scale must be"):
            self.make(value)

    def test_metrics_of_a_scale_need_one(self):
        with pytest.raises(ValueError, match=r"metrics: 'overflow' needs loss_scale="):
            boostax.train_step(linear, optax.sgd(1.0), metrics=("loss", "overflow"))


@pytest.mark.parametrize(
    "scaling", [DynamicLossScale(2.0**20), boostax.GroupLossScale(["*"], init=2.0**20)]
)
def test_gradients_that_an_optimizer_takes_by_itself_are_scaled(scaling):
    """The gradient of value_fn, in float16, would be zero without the scale."""

    def loss(params, x):
        return jnp.float32(2.0**-26) * jnp.mean(
            (x.astype(jnp.float16) * params["w"]).astype(jnp.float32)
        )

    def update(updates, state, params=None, *, value_fn, obj_fn, **extra):
        value, grads = jax.value_and_grad(value_fn, allow_int=True)(params)
        same = jax.grad(obj_fn, allow_int=True)(params)
        return jax.tree.map(jnp.zeros_like, params), (value, grads["w"], same["w"], updates["w"])

    zero = jnp.zeros(())
    tx = optax.GradientTransformationExtraArgs(
        lambda params: (zero, *(jnp.zeros((), jnp.float32) for _ in range(3))), update
    )
    step = boostax.train_step(loss, tx, loss_scale=scaling)
    state = step.init({"w": jnp.ones((), jnp.float16), "n": jnp.int32(3)})
    state, _ = step(state, jnp.full(4, 1.0))
    assert [float(x) for x in state.opt_state] == [2.0**-26] * 4
