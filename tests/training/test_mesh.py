"""The train step over a mesh, against hand values and against one device."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax import LossAux
from tests.models import data, linen_net, nnx_net, plain

BATCH = jax.tree.map(lambda leaf: leaf[0], data.batches(1))


def mesh_of(count, kind=AxisType.Auto, name="data"):
    return jax.make_mesh((count,), (name,), (kind,), devices=jax.devices()[:count])


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def assert_same_on_all(tree):
    for leaf in jax.tree.leaves(tree):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(copies) == 1


def run(step, params, batches, **init):
    state = step.init(params, **init)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


class TestMean:
    def test_by_hand(self):
        """Two devices see (1, 0), two see (0, 1)."""
        step = boostax.train_step(lambda p, x: jnp.mean(x @ p), optax.sgd(1.0), mesh=mesh_of(4))
        x = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
        state, metrics = step(step.init(jnp.zeros(2)), x)
        assert state.params.tolist() == [-0.5, -0.5]
        assert float(metrics["grad_norm"]) == pytest.approx(0.5**0.5)

    @pytest.mark.parametrize(
        ("count", "kind"),
        [(1, "Auto"), (2, "Explicit"), (3, "Auto"), (4, "Explicit"), (8, "Auto"), (8, "Explicit")],
    )
    def test_equals_one_device(self, count, kind):
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
        batches = [BATCH] * 3
        alone, told_alone = run(boostax.train_step(plain.loss, tx), plain.init(), batches)
        step = boostax.train_step(plain.loss, tx, mesh=mesh_of(count, AxisType[kind]))
        state, told = run(step, plain.init(), batches)
        close(state, alone)
        close(told, told_alone)
        assert_same_on_all(state)

    def test_microbatches(self):
        alone, _ = run(boostax.train_step(plain.loss, optax.sgd(0.5)), plain.init(), [BATCH] * 2)
        step = boostax.train_step(plain.loss, optax.sgd(0.5), microbatch=3, mesh=mesh_of(4))
        state, metrics = run(step, plain.init(), [BATCH] * 2)
        close(state.params, alone.params)
        assert int(metrics["micro_steps"]) == 6

    def test_line_search_sees_the_loss_of_all_devices(self):
        tx = optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
        )
        alone, _ = run(boostax.train_step(plain.loss, tx), plain.init(), [BATCH] * 2)
        step = boostax.train_step(plain.loss, tx, mesh=mesh_of(4))
        state, _ = run(step, plain.init(), [BATCH] * 2)
        close(state.params, alone.params)

    def test_does_not_compile_twice_and_scans(self):
        step = boostax.train_step(plain.loss, optax.sgd(0.1, 0.9), mesh=mesh_of(4), donate=False)
        state = step.init(plain.init())
        first = state
        batches = jax.tree.map(lambda leaf: np.stack([leaf] * 3), BATCH)
        for _ in range(3):
            state, _ = step(state, BATCH)
        assert step._jitted(None, state)._cache_size() == 1
        scanned, told = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(first, batches)
        close(scanned.params, state.params)
        assert told["updates"].tolist() == [1, 2, 3]


class TestPlacement:
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
    def test_parameters_stay_split_over_other_axes(self, kind):
        mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, AxisType.Auto))
        params = plain.init()
        split = NamedSharding(mesh, P(None, "model"))
        params["layers_0"]["kernel"] = jax.device_put(params["layers_0"]["kernel"], split)
        step = boostax.train_step(plain.loss, optax.adam(0.1), mesh=mesh)
        state, _ = run(step, params, [BATCH] * 2)
        alone, _ = run(boostax.train_step(plain.loss, optax.adam(0.1)), plain.init(), [BATCH] * 2)
        close(state.params, alone.params)
        moments = state.opt_state[0].mu["layers_0"]["kernel"]
        for leaf in (state.params["layers_0"]["kernel"], moments):
            assert leaf.sharding.spec == P(None, "model")
            assert leaf.addressable_shards[0].data.shape == (4, 4)
        assert state.params["layers_0"]["bias"].sharding.is_fully_replicated
        assert step._jitted(None, state)._cache_size() == 1

    def test_parameters_split_over_the_data_axis_are_kept_for_the_mean(self):
        mesh = mesh_of(4)
        params = plain.init()
        split = NamedSharding(mesh, P("data"))
        params["layers_0"]["kernel"] = jax.device_put(params["layers_0"]["kernel"], split)
        step = boostax.train_step(plain.loss, optax.sgd(0.1), mesh=mesh)
        state, _ = run(step, params, [BATCH] * 2)
        alone, _ = run(boostax.train_step(plain.loss, optax.sgd(0.1)), plain.init(), [BATCH] * 2)
        close(state.params, alone.params)
        assert state.params["layers_0"]["kernel"].sharding.spec == P("data")

    def test_two_data_axes(self):
        mesh = jax.make_mesh((2, 4), ("host", "device"), (AxisType.Auto,) * 2)
        step = boostax.train_step(
            plain.loss, optax.sgd(0.1), mesh=mesh, data_axes=("host", "device")
        )
        state, _ = run(step, plain.init(), [BATCH])
        alone, _ = run(boostax.train_step(plain.loss, optax.sgd(0.1)), plain.init(), [BATCH])
        close(state.params, alone.params)

    def test_arrays_that_lie_on_one_device_are_moved(self):
        step = boostax.train_step(plain.loss, optax.sgd(0.1), mesh=mesh_of(2))
        params, batch = jax.device_put((plain.init(), BATCH), jax.devices()[0])
        state, _ = run(step, params, [batch])
        assert len(state.params["layers_0"]["bias"].sharding.device_set) == 2

    def test_a_state_from_a_checkpoint(self):
        step = boostax.train_step(plain.loss, optax.adam(0.1), mesh=mesh_of(4), donate=False)
        state = step.init(plain.init())
        state, _ = step(state, BATCH)
        saved = flax.serialization.to_bytes(state)
        unbroken, _ = step(state, BATCH)
        fresh = boostax.train_step(plain.loss, optax.adam(0.1), mesh=mesh_of(4))
        restored = flax.serialization.from_bytes(fresh.init(plain.init()), saved)
        equal(fresh(restored, BATCH)[0], unbroken)


def weighted_loss(params, batch):
    logits = plain.apply(params, batch["x"])
    picked = jnp.take_along_axis(logits, batch["y"][:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    total = batch["mask"].sum()
    mean = lambda x: jnp.sum(x * batch["mask"]) / jnp.maximum(total, 1)
    return mean(losses), LossAux(weight=total, metrics={"first": mean(batch["x"][:, 0])})


class TestWeights:
    MASK = (np.arange(24) % 5 != 0).astype(np.float32)

    def expected(self, batch):
        tx = optax.sgd(0.5)
        return run(boostax.train_step(weighted_loss, tx, has_aux=True), plain.init(), [batch])

    @pytest.mark.parametrize("count", [3, 8])
    def test_loss_gradients_and_metrics_are_averaged_by_weight(self, count):
        batch = {**BATCH, "mask": self.MASK}
        alone, told_alone = self.expected(batch)
        step = boostax.train_step(weighted_loss, optax.sgd(0.5), has_aux=True, mesh=mesh_of(count))
        state, told = run(step, plain.init(), [batch])
        close(state.params, alone.params)
        close(told, told_alone)

    @pytest.mark.parametrize("size", [1, 23])
    def test_a_batch_that_does_not_divide_is_filled_up(self, size):
        batch = jax.tree.map(lambda leaf: leaf[:size], {**BATCH, "mask": self.MASK})
        batch["mask"] = np.ones(size, np.float32)
        alone, told_alone = self.expected(batch)
        step = boostax.train_step(
            weighted_loss,
            optax.sgd(0.5),
            has_aux=True,
            mesh=mesh_of(4),
            example_weights="mask",
            microbatch=2,
        )
        state, told = run(step, plain.init(), [batch])
        close(state.params, alone.params)
        assert float(told["loss"]) == pytest.approx(float(told_alone["loss"]), rel=1e-5)
        assert float(told["first"]) == pytest.approx(float(told_alone["first"]), rel=1e-5)

    def test_a_device_of_weight_zero_adds_nothing_whatever_it_holds(self):
        batch = {**BATCH, "mask": np.ones(24, np.float32)}
        batch["mask"][:6] = 0
        alone, _ = self.expected(batch)
        batch["x"] = batch["x"].copy()
        batch["x"][:6] = np.nan
        step = boostax.train_step(
            lambda p, b: _mean_where(p, b), optax.sgd(0.5), has_aux=True, mesh=mesh_of(4)
        )
        state, metrics = run(step, plain.init(), [batch])
        assert bool(metrics["finite"])
        close(state.params, alone.params)

    def test_weights_of_zero_everywhere_skip(self):
        batch = {**BATCH, "mask": np.zeros(24, np.float32)}
        step = boostax.train_step(weighted_loss, optax.sgd(0.5), has_aux=True, mesh=mesh_of(4))
        state, metrics = run(step, plain.init(), [batch])
        equal(state.params, plain.init())
        assert (int(state.attempt), int(state.skipped), float(metrics["loss"])) == (1, 1, 0)

    def test_errors(self):
        step = boostax.train_step(plain.loss, optax.sgd(0.1), mesh=mesh_of(4))
        state = step.init(plain.init())
        with pytest.raises(ValueError, match=r"7 examples can't be split over 4 devices.*drop 3"):
            step(state, jax.tree.map(lambda leaf: leaf[:7], BATCH))
        with pytest.raises(ValueError, match="leading sizes differ"):
            step(state, {"x": BATCH["x"][:8], "y": BATCH["y"][:4]})
        with pytest.raises(ValueError, match="nothing in it to split"):
            step(state, jax.tree.map(lambda leaf: leaf[:0], BATCH))
        options = {"mesh": mesh_of(4), "example_weights": "mask"}
        with pytest.raises(ValueError, match="has_aux=True"):
            boostax.train_step(plain.loss, optax.sgd(0.1), **options)
        loss = lambda p, b: (plain.loss(p, b), LossAux())
        step = boostax.train_step(loss, optax.sgd(0.1), has_aux=True, **options)
        batch = jax.tree.map(lambda leaf: leaf[:7], BATCH)
        with pytest.raises(ValueError, match=r"no LossAux\.weight"):
            step(step.init(plain.init()), {**batch, "mask": np.ones(7, np.float32)})
        with pytest.raises(ValueError, match=r"no array 'mask'; it has \['x', 'y'\]"):
            step(step.init(plain.init()), batch)


def _mean_where(params, batch):
    logits = plain.apply(params, batch["x"])
    picked = jnp.take_along_axis(logits, batch["y"][:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    total = batch["mask"].sum()
    return jnp.sum(losses * batch["mask"]) / total, LossAux(weight=total)


class TestFinite:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_one_device_decides_for_all(self, value):
        batch = {**BATCH, "x": BATCH["x"].copy()}
        batch["x"][7] = value
        tx = optax.adam(0.1)
        step = boostax.train_step(plain.loss, tx, skip_nonfinite=True, mesh=mesh_of(4))
        state, metrics = run(step, plain.init(), [BATCH, batch])
        before, _ = run(step, plain.init(), [BATCH])
        equal((state.params, state.opt_state), (before.params, before.opt_state))
        assert not bool(metrics["finite"])
        assert (int(state.attempt), int(state.skipped)) == (2, 1)
        assert_same_on_all(state)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.5)(x)


class TestStatistics:
    def test_by_hand(self):
        """Two devices with means 2 and 6, variances 1, at momentum 0: mean 4, variance 5."""
        variables = Normed().init(jax.random.key(0), jnp.zeros((2, 1)))

        def loss(params, x, *, model_state):
            out, changed = Normed().apply(
                {"params": params, **model_state}, x, mutable=["batch_stats"]
            )
            return jnp.mean(out), LossAux(model_state=changed)

        step = boostax.train_step(loss, optax.sgd(0.0), has_aux=True, mesh=mesh_of(2))
        state = step.init(
            variables["params"], model_state={"batch_stats": variables["batch_stats"]}
        )
        state, _ = step(state, np.array([[1], [3], [5], [7]], np.float32))
        stats = state.model_state["batch_stats"]["BatchNorm_0"]
        # At momentum 0.5 half of that, beside half of mean 0 and variance 1.
        assert float(stats["mean"][0]) == pytest.approx(2.0)
        assert float(stats["var"][0]) == pytest.approx(0.5 * 1 + 0.5 * 5)

    @pytest.mark.parametrize("stats", ["per_window", "per_micro"])
    @pytest.mark.parametrize("microbatch", [1, 3])
    def test_the_devices_pool_as_micro_batches_do(self, stats, microbatch):
        """Without training, the first norm's input is the same however the batch is split."""
        variables = linen_net.init()

        def after(count, **settings):
            mesh = None if count == 1 else mesh_of(count)
            step = boostax.train_step(
                linen_net.loss, optax.sgd(0.0), has_aux=True, mesh=mesh, **settings
            )
            model_state = {"batch_stats": variables["batch_stats"]}
            state, _ = run(step, variables["params"], [BATCH] * 2, model_state=model_state)
            return state.model_state

        if stats == "per_window" or microbatch == 1:
            close(after(4, stats=stats, microbatch=microbatch), after(1))
        else:
            # Micro-batch i holds every third example, on one device as on four.
            close(after(4, stats=stats, microbatch=3), after(1, stats=stats, microbatch=3))

    def test_a_window_over_calls_and_devices(self):
        variables = linen_net.init()
        halves = [jax.tree.map(lambda leaf, i=i: leaf[i::2], BATCH) for i in (0, 1)]

        def after(batches, every, **settings):
            tx = boostax.accumulate(optax.sgd(0.0), every)
            step = boostax.train_step(linen_net.loss, tx, has_aux=True, **settings)
            model_state = {"batch_stats": variables["batch_stats"]}
            return run(step, variables["params"], batches, model_state=model_state)[0].model_state

        close(after(halves, 2, mesh=mesh_of(4)), after([BATCH], 1))

    def test_nnx_counters_move_once_and_keys_stay(self):
        step = boostax.train_step(nnx_net.loss, optax.sgd(0.1), mesh=mesh_of(4))
        alone = boostax.train_step(nnx_net.loss, optax.sgd(0.1))
        model = nnx_net.init()
        state, _ = run(step, model, [BATCH] * 2)
        other, _ = run(alone, model, [BATCH] * 2)
        is_rng = lambda path, leaf: isinstance(leaf, nnx.RngState)
        equal(*(nnx.filter_state(s.model_state, is_rng) for s in (state, other)))
        assert_same_on_all(state)

    def test_an_nnx_model_without_dropout_equals_one_device(self):
        """Batch norm normalises each device's part alone, so only its own examples are the same."""
        batch = jax.tree.map(lambda leaf: np.concatenate([leaf[:6]] * 4), BATCH)
        model = nnx_net.init(dropout=0.0)
        step = boostax.train_step(nnx_net.loss, optax.sgd(0.1), mesh=mesh_of(4))
        alone = boostax.train_step(nnx_net.loss, optax.sgd(0.1))
        state, _ = run(step, model, [batch] * 3)
        other, _ = run(alone, model, [jax.tree.map(lambda leaf: leaf[:6], batch)] * 3)
        close(state.params, other.params)
        close(state.model_state, other.model_state)


class TestKeys:
    def test_each_device_draws_its_own(self):
        def loss(params, x, *, rng):
            return jnp.mean(params * x) * 0, LossAux(
                metrics={"draw": jax.random.uniform(rng), "fixed": jnp.mean(x)}
            )

        step = boostax.train_step(loss, optax.sgd(1.0), has_aux=True, mesh=mesh_of(4))
        _, metrics = step(step.init(jnp.ones(()), rng=0), np.ones(4, np.float32))
        key = jax.random.fold_in(jax.random.key(0), 0)
        draws = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(4)]
        assert float(metrics["draw"]) == pytest.approx(np.mean(draws))
        assert len(set(draws)) == 4

    def test_nnx_dropout_masks_differ(self):
        class Drops(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones(64))
                self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(3))

            def __call__(self, x):
                return self.drop(self.w[...][None] * x)

        step = boostax.train_step(
            lambda model, x: jnp.mean(model(x)), optax.sgd(64.0), mesh=mesh_of(4)
        )
        state, _ = step(step.init(Drops()), np.ones((4, 64), np.float32))
        kept = np.unique(np.round(np.asarray(1 - jax.tree.leaves(state.params)[0]) * 2).tolist())
        # The same mask on all devices would keep each weight four times or never.
        assert set(kept) >= {1, 2, 3}


class TestErrors:
    def test_mesh_and_axes(self):
        make = lambda **options: boostax.train_step(plain.loss, optax.sgd(0.1), **options)
        with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got int"):
            make(mesh=8)
        with pytest.raises(ValueError, match="pass mesh="):
            make(data_axes="data")
        mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
        with pytest.raises(ValueError, match="none is called 'data'"):
            make(mesh=mesh)
        with pytest.raises(ValueError, match=r"\['c'\]: the mesh has the axes \['a', 'b'\]"):
            make(mesh=mesh, data_axes="c")
        with pytest.raises(TypeError, match="tuple of names"):
            make(mesh=mesh, data_axes=3)
        with pytest.raises(ValueError, match="twice"):
            make(mesh=mesh, data_axes=("a", "a"))

    def test_the_description_tells_of_the_devices(self):
        step = boostax.train_step(plain.loss, optax.sgd(0.1), mesh=mesh_of(4))
        text = str(step.describe(step.init(plain.init()), BATCH))
        assert "devices=4 (4 'data')" in text
        assert "gradients are combined by the step, as their mean, ahead of tx" in text


def test_a_data_axis_of_one_device_beside_others_is_refused():
    mesh = jax.make_mesh((1, 8), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"one device, and the others 8; leave mesh= out"):
        boostax.train_step(lambda p, x: (p * x).mean(), optax.sgd(0.1), mesh=mesh, data_axes="data")
