"""Exchanges inside ``tx``, on a mesh: AdaSum on gradients and deltas, windows, freezing."""

import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import boostax
from boostax import LossAux
from tests.common import programs
from tests.models import data, plain

STEPS = 6
STREAM = data.batches(STEPS)
BATCHES = [jax.tree.map(lambda leaf, t=t: leaf[t], STREAM) for t in range(STEPS)]
# Two devices see (1, 0), two see (0, 1): the mean is (1/2, 1/2), AdaSum (1, 1).
X = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)


def linear(params, x):
    return jnp.mean(x @ params)


def mesh_of(count):
    return jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count])


def adasum(axis="data", **settings):
    return boostax.adasum(axis, buckets=(), **settings)


def close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_same_on_all(tree):
    for leaf in jax.tree.leaves(tree):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def run(step, params, batches):
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def replicas_by_hand(tx, params, batches, count):
    """Train ``count`` replicas under vmap, each with its own optimizer state and share."""
    shares = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batches)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), tx.init(params))
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), params)

    def one(params, state, batch):
        grads = jax.grad(plain.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    every = jax.jit(jax.vmap(one, axis_name="data"))
    for batch in shares:
        params, states = every(params, states, batch)
    return jax.tree.map(lambda leaf: leaf[0], params), states


class TestAdaSum:
    @pytest.mark.parametrize("algorithm", ["halving", "gather"])
    def test_on_gradients_by_hand(self, algorithm):
        tx = optax.chain(adasum(algorithm=algorithm), optax.sgd(1.0))
        state, _ = run(boostax.train_step(linear, tx, mesh=mesh_of(4)), jnp.zeros(2), [X])
        assert state.params.tolist() == [-1, -1]

    def test_on_deltas_each_replica_keeps_its_moments(self):
        tx = optax.chain(optax.sgd(1.0, 0.5), adasum())
        state, _ = run(boostax.train_step(linear, tx, mesh=mesh_of(4)), jnp.zeros(2), [X, X])
        # Moments 1 and 1.5 along each device's own axis.
        assert state.params.tolist() == [-2.5, -2.5]
        (moments,) = jax.tree.leaves(state.opt_state)
        assert moments.tolist() == [[1.5, 0], [1.5, 0], [0, 1.5], [0, 1.5]]
        assert moments.sharding.spec[0] == "data"

    @pytest.mark.parametrize(
        ("on", "count"),
        [
            pytest.param("gradient", 3, marks=pytest.mark.slow),
            ("update", 2),
            pytest.param("update", 8, marks=pytest.mark.slow),
        ],
    )
    def test_equals_replicas_by_hand(self, on, count):
        parts = [optax.adam(0.05), adasum()]
        tx = optax.chain(*(parts if on == "update" else parts[::-1]))
        step = boostax.train_step(plain.loss, tx, mesh=mesh_of(count))
        state, _ = run(step, plain.init(), BATCHES[:3])
        params, states = replicas_by_hand(tx, plain.init(), BATCHES[:3], count)
        close(state.params, params)
        if on == "update":
            close(state.opt_state[0][0].mu, states[0][0].mu)
            assert jax.tree.leaves(state.opt_state[0][0].count)[0].shape == ()

    def test_mean_inside_and_adasum_between(self):
        mesh = jax.make_mesh((2, 2), ("host", "device"), (AxisType.Auto,) * 2)
        tx = optax.chain(adasum("host", inner_axis="device"), optax.sgd(1.0))
        x = np.array([[2, 0], [0, 0], [0, 1], [0, 3]], np.float32)
        state, _ = run(boostax.train_step(linear, tx, mesh=mesh), jnp.zeros(2), [x])
        assert state.params.tolist() == [-1, -2]

    def test_the_mean_inside_is_weighted(self):
        mesh = jax.make_mesh((2, 2), ("host", "device"), (AxisType.Auto,) * 2)
        tx = optax.chain(adasum("host", inner_axis="device"), optax.sgd(1.0))

        def loss(params, batch):
            weight = batch["w"].sum()
            value = jnp.sum(batch["w"] * (batch["x"] @ params)) / jnp.maximum(weight, 1)
            return value, LossAux(weight=weight)

        batch = {
            "x": np.array([[2, 0], [6, 0], [0, 5], [0, 3]], np.float32),
            "w": np.array([3, 1, 0, 1], np.float32),
        }
        step = boostax.train_step(loss, tx, has_aux=True, mesh=mesh)
        state, _ = run(step, jnp.zeros(2), [batch])
        assert state.params.tolist() == [-3, -3]

    def test_a_device_of_weight_zero_does_not_count(self):
        def loss(params, batch):
            weight = batch["w"].sum()
            return jnp.mean(batch["x"] @ params), LossAux(weight=weight)

        batch = {"x": X.copy(), "w": np.array([1, 1, 1, 0], np.float32)}
        batch["x"][3] = np.nan
        tx = optax.chain(adasum(), optax.sgd(1.0))
        step = boostax.train_step(loss, tx, has_aux=True, skip_nonfinite=True, mesh=mesh_of(4))
        state, metrics = run(step, jnp.zeros(2), [batch])
        assert state.params.tolist() == [-1, -1]
        assert bool(metrics["finite"])

    def test_one_device_decides_for_all(self):
        batch = X.copy()
        batch[1, 1] = np.inf
        tx = optax.chain(optax.sgd(1.0, 0.5), adasum())
        step = boostax.train_step(linear, tx, skip_nonfinite=True, mesh=mesh_of(4))
        state, _ = run(step, jnp.zeros(2), [X, batch, X])
        expected, _ = run(boostax.train_step(linear, tx, mesh=mesh_of(4)), jnp.zeros(2), [X, X])
        equal(state.params, expected.params)
        equal(state.opt_state, expected.opt_state)
        assert int(state.skipped) == 1

    def test_split_parameters_are_refused(self):
        mesh = mesh_of(4)
        params = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P("data")))
        step = boostax.train_step(
            lambda p, x: jnp.mean(x) * p.sum(), optax.chain(adasum(), optax.sgd(1.0)), mesh=mesh
        )
        with pytest.raises(ValueError, match="split over the data axis 'data'"):
            step.init(params)

    def test_what_would_leave_devices_apart_is_refused(self):
        mesh = jax.make_mesh((2, 2), ("host", "device"), (AxisType.Auto,) * 2)
        tx = optax.chain(adasum("host"), optax.sgd(1.0))
        step = boostax.train_step(linear, tx, mesh=mesh, data_axes=("host", "device"))
        with pytest.raises(ValueError, match=r"would differ between the devices.*inner_axis"):
            step.init(jnp.zeros(2))
        with pytest.raises(ValueError, match=r"exchanges over \['host'\]: the mesh has"):
            boostax.train_step(linear, tx, mesh=mesh_of(4))
        masked = optax.masked(adasum(), {"a": True, "b": False})
        step = boostax.train_step(lambda p, x: p["a"] + p["b"], masked, mesh=mesh_of(4))
        with pytest.raises(ValueError, match="the updates of 'b' would differ"):
            step.init({"a": jnp.zeros(()), "b": jnp.zeros(())})
        search = optax.chain(optax.scale_by_backtracking_linesearch(5), adasum())
        step = boostax.train_step(linear, search, mesh=mesh_of(4))
        with pytest.raises(ValueError, match="leave the exchange out of tx"):
            step.init(jnp.zeros(2))
        step = boostax.train_step(linear, optax.MultiSteps(tx, 2), mesh=mesh)
        with pytest.raises(ValueError, match=r"use boostax\.accumulate for optax\.MultiSteps"):
            step.init(jnp.zeros(2))


class TestLocalSteps:
    @pytest.mark.parametrize("kind", ["mean", "adasum"])
    def test_by_hand(self, kind):
        """Each replica goes its own way for two steps; the gradient is taken where it stands."""

        def loss(params, x):
            return jnp.mean(jnp.square(x @ params - 1))

        exchange = adasum() if kind == "adasum" else boostax.all_reduce("data")
        outer = optax.sgd(0.5, momentum=0.9, nesterov=True)
        tx = boostax.local_steps(optax.sgd(0.1), 2, exchange, outer=outer)
        step = boostax.train_step(loss, tx, mesh=mesh_of(4), donate=False)
        state = step.init(jnp.zeros(2))
        first, told = step(state, X)
        assert first.params.tolist() == [0, 0]
        assert float(told["loss"]) == 1
        second, told = step(first, X)
        # From 0 by 0.2 to 0.2, then by 0.1 * 2 * 0.8 to 0.36, along the axis that it sees.
        assert float(told["loss"]) == pytest.approx(0.8**2)
        length = 0.36 / 2 if kind == "mean" else 0.36
        np.testing.assert_allclose(second.params, np.full(2, 0.5 * 1.9 * length), rtol=1e-6)
        assert_same_on_all(second.params)

    def test_resumes_between_exchanges(self):
        tx = boostax.local_steps(optax.sgd(0.05, 0.9), 3, adasum())
        step = boostax.train_step(plain.loss, tx, mesh=mesh_of(4), donate=False)
        states = [step.init(plain.init())]
        for batch in BATCHES[:4]:
            states.append(step(states[-1], batch)[0])
        assert states[2].opt_state.offset["layers_0"]["bias"].shape == (4, 8)
        saved = flax.serialization.to_bytes(states[2])
        restored = flax.serialization.from_bytes(step.init(plain.init()), saved)
        for batch in BATCHES[2:4]:
            restored, _ = step(restored, batch)
        equal(restored, states[4])


class TestRestore:
    def make(self, count):
        tx = boostax.accumulate(optax.chain(optax.adam(0.05), adasum()), 2)
        return boostax.train_step(plain.loss, tx, mesh=mesh_of(count), donate=False)

    @pytest.mark.slow  # a row of the common suite does it with two devices
    def test_bitwise_from_every_point(self):
        step = self.make(4)
        states = [step.init(plain.init())]
        for batch in BATCHES[:4]:
            states.append(step(states[-1], batch)[0])
        for t, state in enumerate(states[:-1]):
            saved = flax.serialization.to_bytes(state)
            state = flax.serialization.from_bytes(self.make(4).init(plain.init()), saved)
            fresh = self.make(4)
            for batch in BATCHES[t:4]:
                state, _ = fresh(state, batch)
            equal(state, states[-1])

    def test_another_number_of_devices_is_refused(self):
        state, _ = run(self.make(4), plain.init(), BATCHES[:1])
        with pytest.raises(boostax.StateMismatchError, match=r"4 entries.*over 2 devices"):
            self.make(2)(state, BATCHES[1])
        alone = boostax.train_step(
            plain.loss, boostax.accumulate(optax.adam(0.05), 2), donate=False
        )
        state, _ = run(alone, plain.init(), BATCHES[:1])
        mean = boostax.train_step(
            plain.loss, boostax.accumulate(optax.adam(0.05), 2), mesh=mesh_of(4)
        )
        with pytest.raises(boostax.StateMismatchError, match="each device's own"):
            mean(state, BATCHES[1])


SCALE = 1024.0


def scaled_loss(params, batch):
    return SCALE * plain.loss(params, batch)


def composed(reduce, every=2):
    inner = optax.chain(
        optax.scale(1 / SCALE), optax.clip_by_global_norm(0.3), optax.adam(0.05, eps=1e-3)
    )
    freezing = programs.freezing((0, 2, 1))
    return boostax.accumulate(boostax.freeze(inner, freezing), every, reduce=reduce)


class TestWindows:
    @pytest.mark.parametrize(
        ("reduce", "count", "dispatch"),
        [("mean", 8, "host"), ("sum", 8, "host"), ("mean", 2, "switch"), ("sum", 3, "switch")],
    )
    def test_freeze_accumulate_exchange_and_scale_against_one_device(self, reduce, count, dispatch):
        results = []
        for mesh in (None, mesh_of(count)):
            step = boostax.train_step(
                scaled_loss, composed(reduce), mesh=mesh, freeze_dispatch=dispatch
            )
            state, metrics = run(step, plain.init(), BATCHES)
            results.append((state.params, state.opt_state.inner_state, metrics["loss"]))
        close(*results)

    def test_the_explicit_exchange_is_the_same(self):
        """An exchange written into the chain gives what the step adds by itself."""
        explicit = boostax.accumulate(optax.chain(boostax.all_reduce("data"), optax.adam(0.05)), 2)
        implicit = boostax.accumulate(optax.adam(0.05), 2)
        results = [
            run(boostax.train_step(plain.loss, tx, mesh=mesh_of(4)), plain.init(), BATCHES[:4])[0]
            for tx in (explicit, implicit)
        ]
        close(results[0].params, results[1].params)

    def test_a_flushed_window(self):
        tx = boostax.accumulate(optax.adam(0.05), 4)
        states = []
        for mesh in (None, mesh_of(4)):
            step = boostax.train_step(plain.loss, tx, mesh=mesh)
            state, _ = run(step, plain.init(), BATCHES[:3])
            states.append(step.flush(state))
        close(states[0].params, states[1].params)
        assert int(states[1].updates) == 1

    def test_a_bad_micro_batch_on_one_device_is_left_out_on_all(self):
        bad = jax.tree.map(np.copy, BATCHES[1])
        bad["x"][5, 0] = np.nan
        tx = boostax.accumulate(optax.adam(0.05), 2)
        step = boostax.train_step(plain.loss, tx, mesh=mesh_of(4))
        state, _ = run(step, plain.init(), [BATCHES[0], bad, BATCHES[2]])
        expected, _ = run(step, plain.init(), [BATCHES[0], BATCHES[2]])
        close(state.params, expected.params)
        assert int(state.opt_state.skipped_micro) == 1

    @pytest.mark.parametrize("kind", ["mean", "adasum"])
    def test_the_exchange_happens_once_a_window_and_for_trained_leaves_only(self, kind):
        inner = optax.adam(0.05) if kind == "mean" else optax.chain(adasum(), optax.adam(0.05))
        tx = boostax.accumulate(boostax.freeze(inner, programs.freezing((0, 2))), 2)
        step = boostax.train_step(plain.loss, tx, mesh=mesh_of(4), metrics=("loss",))
        state = step.init(plain.init())
        sent = {}
        for index in (0, 2):
            text = step.lower(state, BATCHES[0], index=index).compile().as_text()
            outside, inside = exchanged(text)
            # Outside of the window's end there are but loss, weight and decisions.
            assert outside <= 16
            sent[index] = inside
        whole = sum(leaf.size for leaf in jax.tree.leaves(plain.init()))
        trained = sum(leaf.size for leaf in jax.tree.leaves(plain.init()["layers_2"]))
        if kind == "mean":
            # And the window's weight.
            assert sent == {0: whole + 1, 2: trained + 1}
        else:
            # The ring's bound is 1.5; dot products and filled-up buffers count on leaves this small.
            assert 1.5 * whole <= sent[0] <= 3 * whole
            assert 1.5 * trained <= sent[2] <= 3 * trained


def exchanged(text):
    """Return how many elements the collectives of a compiled module take in: at its top, and in
    the branches of conditionals."""
    computations = {}
    name = None
    for line in text.splitlines():
        if line and not line[0].isspace() and "{" in line:
            name = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%")
            name = ("ENTRY " if line.startswith("ENTRY") else "") + name
            computations[name] = []
        elif name is not None:
            computations[name].append(line)
    counts = {"top": 0, "inside": 0}
    for name, lines in computations.items():
        for line in lines:
            found = re.search(
                r"= (.*?) (all-reduce|collective-permute|all-gather|reduce-scatter|all-to-all)"
                r"(-start)?\(",
                line,
            )
            if found:
                shapes = re.findall(r"\w+\[([\d,]*)\]", found[1])
                size = sum(int(np.prod([int(d) for d in s.split(",") if d] or [1])) for s in shapes)
                counts["top" if name.startswith("ENTRY") else "inside"] += size
    return counts["top"], counts["inside"]
