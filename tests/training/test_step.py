"""The train step against hand values and hand-written optax loops."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax import LossAux

X = np.asarray(np.random.RandomState(0).randn(12, 4), np.float32)
Y = np.asarray(np.random.RandomState(1).randn(12, 3), np.float32)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(5)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def quadratic(params, batch):
    return jnp.mean((batch @ params) ** 2)


def linen_loss(params, batch, *, model_state, rng):
    x, y = batch
    out, changed = LinenNet().apply(
        {"params": params, **model_state}, x, rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    return jnp.mean((out - y) ** 2), LossAux(model_state=changed, metrics={"top": jnp.max(out)})


def nnx_loss(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


@pytest.fixture(scope="module")
def linen_variables():
    return LinenNet().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-7), a, b)


class TestByHand:
    def test_one_sgd_step(self):
        step = boostax.train_step(quadratic, optax.sgd(0.5))
        state = step.init(jnp.array([1.0, 2.0]))
        # loss = (1 + 4) / 2; gradient = (1, 2); 1 - 0.5 = 0.5 and 2 - 1 = 1
        state, metrics = step(state, jnp.eye(2))
        assert state.params.tolist() == [0.5, 1.0]
        assert float(metrics["loss"]) == 2.5
        np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(5), rtol=1e-6)
        assert bool(metrics["finite"])
        assert int(metrics["updates"]) == int(metrics["micro_steps"]) == int(state.attempt) == 1
        assert "learning_rate" not in metrics
        assert "freeze_index" not in metrics

    def test_skips_what_is_not_finite(self):
        step = boostax.train_step(quadratic, optax.sgd(0.5, momentum=0.9), skip_nonfinite=True)
        state = step.init(jnp.ones(2))
        state, _ = step(state, jnp.eye(2))
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        state, metrics = step(state, jnp.full((2, 2), jnp.inf))
        equal(before, (state.params, state.opt_state))
        assert not bool(metrics["finite"])
        assert (int(state.attempt), int(state.skipped), int(state.updates)) == (2, 1, 1)
        state, metrics = step(state, jnp.eye(2))
        assert (int(metrics["updates"]), int(metrics["micro_steps"])) == (2, 2)

    def test_reports_what_is_not_finite_without_skipping(self):
        step = boostax.train_step(quadratic, optax.sgd(0.5))
        state, metrics = step(step.init(jnp.ones(2)), jnp.full((2, 2), jnp.inf))
        assert not bool(metrics["finite"])
        assert not np.isfinite(state.params).any()

    def test_weight_zero_skips_even_a_nan_loss(self):
        def loss(params, batch):
            x, weight = batch
            total = jnp.sum(weight)
            return jnp.sum(weight * (x @ params)) / total, LossAux(weight=total)

        step = boostax.train_step(loss, optax.sgd(1.0), has_aux=True)
        state = step.init(jnp.zeros(2))
        state, _ = step(state, (jnp.eye(2), jnp.array([0.0, 0.0])))
        assert state.params.tolist() == [0.0, 0.0]
        assert int(state.updates) == 0
        state, _ = step(state, (jnp.eye(2), jnp.array([1.0, 0.0])))
        assert state.params.tolist() == [-1.0, 0.0]

    def test_learning_rate_is_the_one_used(self):
        schedule = lambda count: 0.1 * (count + 1)
        step = boostax.train_step(quadratic, optax.sgd(schedule), learning_rate=schedule)
        state = step.init(jnp.ones(2))
        rates = []
        for _ in range(3):
            state, metrics = step(state, jnp.eye(2))
            rates.append(float(metrics["learning_rate"]))
        np.testing.assert_allclose(rates, [0.1, 0.2, 0.3], rtol=1e-6)

    def test_learning_rate_is_found_where_injected(self):
        tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.25))
        step = boostax.train_step(quadratic, tx)
        _, metrics = step(step.init(jnp.ones(2)), jnp.eye(2))
        assert float(metrics["learning_rate"]) == 0.25

    def test_extra_arguments_reach_the_transformation(self):
        def update(updates, state, params=None, *, factor, **extra):
            return jax.tree.map(lambda u: -factor * u, updates), state

        tx = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
        step = boostax.train_step(quadratic, tx)
        state, _ = step(step.init(jnp.ones(2)), jnp.eye(2), factor=jnp.float32(0.5))
        assert state.params.tolist() == [0.5, 0.5]

    def test_fewer_metrics(self):
        step = boostax.train_step(quadratic, optax.sgd(0.5), metrics=("loss",))
        _, metrics = step(step.init(jnp.ones(2)), jnp.eye(2))
        assert list(metrics) == ["loss"]


class TestAgainstHandWrittenLoops:
    def test_linen_with_statistics_and_dropout(self, linen_variables):
        tx = optax.adam(1e-2)
        step = boostax.train_step(linen_loss, tx, has_aux=True)
        state = step.init(
            linen_variables["params"],
            model_state={"batch_stats": linen_variables["batch_stats"]},
            rng=jax.random.key(7),
        )

        @jax.jit
        def by_hand(params, stats, opt_state, attempt):
            rng = jax.random.fold_in(jax.random.key(7), attempt)
            (loss, aux), grads = jax.value_and_grad(linen_loss, has_aux=True)(
                params, (X, Y), model_state=stats, rng=rng
            )
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), aux.model_state, opt_state, loss

        params, stats = linen_variables["params"], {"batch_stats": linen_variables["batch_stats"]}
        opt_state = tx.init(params)
        for attempt in range(4):
            params, stats, opt_state, loss = by_hand(params, stats, opt_state, attempt)
            state, metrics = step(state, (X, Y))
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        close((state.params, state.model_state), (params, stats))
        assert np.isfinite(metrics["top"])

    def test_nnx_with_statistics_and_dropout(self):
        model, reference = NnxNet(nnx.Rngs(0)), NnxNet(nnx.Rngs(0))
        optimizer = nnx.Optimizer(reference, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def by_hand(model, optimizer):
            loss, grads = nnx.value_and_grad(nnx_loss)(model, (X, Y))
            optimizer.update(model, grads)
            return loss

        step = boostax.train_step(nnx_loss, optax.adam(1e-2))
        state = step.init(model)
        kept = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
        for _ in range(4):
            loss = by_hand(reference, optimizer)
            state, metrics = step(state, (X, Y))
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        trained = state.merge(model)
        close(nnx.state(trained, nnx.Param), nnx.state(reference, nnx.Param))
        close(nnx.state(trained, nnx.BatchStat), nnx.state(reference, nnx.BatchStat))
        equal(kept, nnx.state(model, nnx.Param))  # donation spared the user's model

    def test_nnx_trains_only_what_the_filter_selects(self):
        model = NnxNet(nnx.Rngs(0))
        wrt = nnx.All(nnx.Param, nnx.PathContains("last"))
        step = boostax.train_step(nnx_loss, optax.adam(1e-1), wrt=wrt)
        state = step.init(model)
        assert len(jax.tree.leaves(state.opt_state[0].mu)) == 2
        for _ in range(2):
            state, _ = step(state, (X, Y))
        trained = state.merge(model)
        equal(nnx.state(trained.first), nnx.state(model.first))
        assert not np.array_equal(trained.last.kernel[...], model.last.kernel[...])


class TestCompilation:
    def test_second_call_does_not_compile(self, linen_variables):
        step = boostax.train_step(linen_loss, optax.adam(1e-2), has_aux=True)
        state = step.init(
            linen_variables["params"],
            model_state={"batch_stats": linen_variables["batch_stats"]},
            rng=0,
        )
        for _ in range(3):
            state, _ = step(state, (X, Y))
        assert step._jitted(None, state)._cache_size() == 1

    def test_scan_over_steps(self):
        step = boostax.train_step(quadratic, optax.sgd(0.1))
        batches = jnp.stack([jnp.eye(2)] * 3)
        scanned, metrics = jax.lax.scan(step, step.init(jnp.ones(2)), batches)
        state = step.init(jnp.ones(2))
        for batch in batches:
            state, _ = step(state, batch)
        np.testing.assert_allclose(scanned.params, state.params, rtol=1e-6)
        assert metrics["updates"].tolist() == [1, 2, 3]

    def test_key_moves_with_the_attempt_only(self):
        def loss(params, batch, *, rng):
            return jnp.sum(params) * jax.random.uniform(rng) * jnp.sum(batch)

        step = boostax.train_step(loss, optax.sgd(0.0), skip_nonfinite=True)
        state = step.init(jnp.ones(()), rng=jax.random.key(3))
        for attempt in range(3):
            state, metrics = step(state, jnp.full((1,), jnp.nan if attempt == 1 else 1.0))
            if attempt != 1:
                key = jax.random.fold_in(jax.random.key(3), attempt)
                np.testing.assert_allclose(metrics["loss"], jax.random.uniform(key), rtol=1e-6)


class TestErrors:
    def step(self, **settings):
        return boostax.train_step(quadratic, optax.sgd(0.1), **settings)

    @pytest.mark.parametrize(
        ("settings", "error", "text"),
        [
            ({"metrics": ("lose",)}, ValueError, "Did you mean 'loss'"),
            ({"metrics": "loss"}, TypeError, "sequence of names"),
            ({"metrics": ("freeze_index",)}, ValueError, "needs freezing"),
            ({"microbatch": 0}, ValueError, "microbatch must be an int >= 1"),
            ({"microbatch": True}, ValueError, "microbatch"),
            ({"stats": "window"}, ValueError, "per_window"),
            ({"batch_norm_momentum": 1.5}, ValueError, "batch_norm_momentum"),
            ({"freeze_dispatch": "device"}, ValueError, "freeze_dispatch"),
            ({"skip_nonfinite": 1}, TypeError, "skip_nonfinite must be a bool"),
        ],
    )
    def test_bad_settings(self, settings, error, text):
        with pytest.raises(error, match=text):
            self.step(**settings)

    def test_bad_functions(self):
        with pytest.raises(TypeError, match="tx must be an optax transformation"):
            boostax.train_step(quadratic, 0.1)
        with pytest.raises(TypeError, match="must be called as"):
            boostax.train_step(lambda params: 0.0, optax.sgd(0.1))
        with pytest.raises(TypeError, match="must be a function"):
            boostax.train_step(3, optax.sgd(0.1))

    def test_outputs_that_break_the_contract(self):
        for loss, settings, text in [
            (lambda p, b: p * b, {}, "real floating scalar"),
            (lambda p, b: (jnp.sum(p), {}), {}, "has_aux is False"),
            (lambda p, b: (jnp.sum(p), {}), {"has_aux": True}, "LossAux"),
            (
                lambda p, b: (jnp.sum(p), LossAux(metrics={"m": p})),
                {"has_aux": True},
                "must be a scalar mean",
            ),
            (
                lambda p, b: (jnp.sum(p), LossAux(metrics={"loss": jnp.sum(p)})),
                {"has_aux": True},
                "the step's own",
            ),
            (
                lambda p, b: (jnp.sum(p), LossAux(model_state={"a": p})),
                {"has_aux": True},
                "pass model_state= to step.init",
            ),
        ]:
            step = boostax.train_step(loss, optax.sgd(0.1), **settings)
            with pytest.raises((TypeError, ValueError), match=text):
                step(step.init(jnp.ones(2)), jnp.ones(2))

    def test_bad_starts(self):
        step = self.step()
        with pytest.raises(TypeError, match="linen module LinenNet"):
            step.init(LinenNet())
        with pytest.raises(ValueError, match="no arrays"):
            step.init({})
        with pytest.raises(TypeError, match=r"must be a boostax\.TrainState"):
            step({"params": jnp.ones(2)}, jnp.eye(2))
        with pytest.raises(ValueError, match="learning_rate"):
            self.step(metrics=("learning_rate",)).init(jnp.ones(2))
        keyed = boostax.train_step(lambda p, b, *, rng: jnp.sum(p), optax.sgd(0.1))
        with pytest.raises(ValueError, match="a key is needed"):
            keyed.init(jnp.ones(2))
        with pytest.raises(TypeError, match="must hold arrays"):
            step(step.init(jnp.ones(2)), jnp.eye(2), value_fn=lambda p: 0.0)

    @pytest.mark.parametrize("batch", [np.zeros((0, 2), np.float32), {}, np.float32(1)])
    def test_batches_without_examples(self, batch):
        step = boostax.train_step(lambda p, b: jnp.sum(p), optax.sgd(0.1))
        with pytest.raises(ValueError, match="batch"):
            step(step.init(jnp.ones(2)), batch)


class TestDescription:
    def test_plain_step_costs_what_it_costs(self):
        step = boostax.train_step(quadratic, optax.sgd(0.1))
        description = step.describe(step.init(jnp.ones(2)), jnp.eye(2))
        (variant,) = description.variants
        assert variant.flops == description.plain.flops
        assert variant.bytes == description.plain.bytes
        assert [p.path for p in description.parameters] == [""]
        assert "compiled steps" in str(description)
