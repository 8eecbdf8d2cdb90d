"""THOR in the train step: statistics only where due, windows, freezing, devices, recorded runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import boostax
from boostax import ThorState
from boostax.updates._skip import find_state
from tests.models import data, plain
from tests.updates.test_thor_reference import NETS, cross_entropy

STEPS = 8
STREAM = data.batches(STEPS)
BATCHES = [jax.tree.map(lambda leaf, t=t: leaf[t], STREAM) for t in range(STEPS)]
LAYERS = boostax.capture_layers(plain.loss, plain.init(), BATCHES[0])


def thor(**settings):
    return boostax.thor(0.05, 0.1, layers=LAYERS, **{"frequency": 3, "early": (0, 1), **settings})


def run(tx, batches=BATCHES, loss=plain.loss, state=None, params=None, **keywords):
    step = boostax.train_step(loss, tx, **keywords)
    if state is None:
        state = step.init(plain.init() if params is None else params)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def of_thor(state):
    return find_state(state.opt_state, ThorState)


def close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def alone():
    return run(thor())[0]


@pytest.mark.quick
def test_a_step_is_the_same_as_by_hand(alone):
    tx = thor()

    @jax.jit
    def by_hand(params, state, batch):
        due = find_state(state, ThorState).due
        _, grads, stats = LAYERS.value_and_grad(params, batch, due=due)
        updates, state = tx.update(grads, state, params, stats=stats)
        return optax.apply_updates(params, updates), state

    params, state = plain.init(), tx.init(plain.init())
    for batch in BATCHES:
        params, state = by_hand(params, state, batch)
    close(params, alone.params, rtol=1e-5, atol=1e-6)
    # Refreshes at 0, 1, 3 and 6; the next is due at 9.
    assert of_thor(alone).refreshes.tolist() == [4] * len(LAYERS.blocks)
    assert not bool(of_thor(alone).due)


def test_micro_batches_and_windows_see_the_whole_batch(alone):
    close(run(thor(), microbatch=3)[0].params, alone.params)
    halves = [
        jax.tree.map(lambda leaf, i=i: leaf[i::2], batch) for batch in BATCHES for i in range(2)
    ]
    state = run(boostax.accumulate(thor(), 2, average_extra=("stats",)), halves)[0]
    close(state.params, alone.params)
    assert of_thor(state).refreshes.tolist() == [4] * len(LAYERS.blocks)


def test_unequal_micro_batches_count_by_weight():
    def loss(params, batch):
        return plain.loss(params, batch), boostax.LossAux(weight=jnp.float32(len(batch["x"])))

    layers = boostax.capture_layers(loss, plain.init(), BATCHES[0])
    value_and_grad = jax.jit(layers.value_and_grad)
    whole = value_and_grad(plain.init(), BATCHES[0])[2]
    tx = boostax.accumulate(boostax.scale_by_thor(layers=layers, damping=0.1, clip=False), 2)
    state = tx.init(plain.init())
    for rows in (slice(6), slice(6, None)):
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCHES[0])
        (_, aux), grads, stats = value_and_grad(plain.init(), part)
        _, state = jax.jit(tx.update)(grads, state, weight=aux.weight, stats=stats)
    close(find_state(state, ThorState).factors, whole)


def test_frozen_layers_keep_factors_and_inverses():
    first, rest = LAYERS.blocks[0].leaves, [p for b in LAYERS.blocks[1:] for p in b.leaves]
    freezing = boostax.Freezing([[*first, *rest], rest], [0, 1, 1, 0, 1, 1, 1, 1])
    step = boostax.train_step(plain.loss, boostax.freeze(thor(), freezing))
    state = step.init(plain.init())
    seen = []
    for batch in BATCHES:
        state, _ = step(state, batch)
        found, kernel = of_thor(state), LAYERS.blocks[0].kernel
        seen.append(
            (found.refreshes.tolist()[:2], np.asarray(found.inverses[kernel].inputs).tobytes())
        )
    # Refreshes at 0, 1, 3 and 6; the first layer is trained at 0 and 3 only.
    assert [counts for counts, _ in seen] == [
        [1, 1], [1, 2], [1, 2], [2, 3], [2, 3], [2, 3], [2, 4], [2, 4]
    ]  # fmt: skip
    assert len({inverse for _, inverse in seen}) == 2


def test_devices_get_one_device_s_factors(alone):
    mesh = jax.make_mesh((3,), ("data",), (AxisType.Auto,), devices=jax.devices()[:3])
    state = run(thor(split_indices=(0,)), mesh=mesh)[0]
    close(state.params, alone.params)
    close(of_thor(state).factors, of_thor(alone).factors)
    for leaf in jax.tree.leaves(state):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def test_devices_and_windows(alone):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2])
    halves = [
        jax.tree.map(lambda leaf, i=i: leaf[i::2], batch) for batch in BATCHES for i in range(2)
    ]
    state = run(boostax.accumulate(thor(), 2), halves, mesh=mesh)[0]
    close(state.params, alone.params)
    close(of_thor(state).factors, of_thor(alone).factors)


def test_factors_are_common_where_gradients_are_not():
    """AdaSum on deltas: each device has moments of its own, but one set of factors."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    tx = optax.chain(thor(), boostax.adasum("data", buckets=()))
    found = of_thor(run(tx, BATCHES[:1], mesh=mesh)[0]).factors
    for block in LAYERS.blocks:
        assert found[block.kernel].inputs.shape == block.shapes().inputs.shape
    stats = jax.jit(LAYERS.value_and_grad)(plain.init(), BATCHES[0])[2]
    close(found, stats)


def test_a_loss_scale_is_invisible(alone):
    scale = 1024.0
    scaled = lambda params, batch: plain.loss(params, batch) * scale
    layers = boostax.capture_layers(scaled, plain.init(), BATCHES[0])
    tx = boostax.thor(0.05, 0.1, layers=layers, frequency=3, early=(0, 1), loss_scale=scale)
    state = run(tx, loss=scaled)[0]
    close(state.params, alone.params, rtol=1e-5)


def test_goes_on_bitwise_between_refreshes(alone):
    step = boostax.train_step(plain.loss, thor())
    state = step.init(plain.init())
    for batch in BATCHES[:5]:
        state, _ = step(state, batch)
    saved = jax.tree.map(np.asarray, state)
    state = jax.tree.map(jnp.asarray, saved)
    for batch in BATCHES[5:]:
        state, _ = step(state, batch)
    equal(state.params, alone.params)
    equal(of_thor(state), of_thor(alone))


class Small(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))


def drawn(model, batch):
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, boostax.LossAux(predictive=boostax.Categorical(logits))


def test_an_nnx_model_with_drawn_labels():
    model = Small(nnx.Rngs(0))
    batch = {"x": jnp.asarray(BATCHES[0]["x"]), "y": jnp.arange(len(BATCHES[0]["x"])) % 3}
    layers = boostax.capture_layers(drawn, model, batch, fisher="true")
    step = boostax.train_step(drawn, boostax.thor(0.1, 0.1, layers=layers), has_aux=True)
    with pytest.raises(ValueError, match=r"init: thor draws labels.*rng=jax.random.key"):
        step.init(model)
    state = step.init(model, rng=0)
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]


def test_layers_must_be_those_of_tx():
    other = boostax.capture_layers(plain.loss, plain.init(), BATCHES[0], block_size=4)
    with pytest.raises(boostax.StateMismatchError, match="not those that tx was built with"):
        boostax.train_step(plain.loss, thor(), layers=other)
    with pytest.raises(TypeError, match=r"must be what boostax\.capture_layers returned, got dict"):
        boostax.train_step(plain.loss, thor(), layers={})
    with pytest.raises(ValueError, match=r"tx must hold boostax\.thor"):
        boostax.train_step(plain.loss, optax.sgd(0.1), layers=LAYERS).init(plain.init())


@pytest.mark.parametrize("name", ["k_thor_conv_f2", "k_thor_embedding_ln_f4"])
def test_a_recorded_run_from_the_loss_alone(name, reference):
    """The reference's weights, with statistics captured from the loss as it takes them."""
    d = reference(name)
    net, _ = NETS[name]
    params = [jnp.asarray(d[f"w0_{i}"]) for i in range(len(d["param_names"]))]
    momentum, decay, scale, _, frequency, nesterov, clip = d["hyper"]
    loss = lambda w, batch: cross_entropy(net(w, batch["x"]), batch["y"]) * np.float32(scale)
    batches = [
        {"x": jnp.asarray(x), "y": jnp.asarray(y)} for x, y in zip(d["x"], d["y"], strict=True)
    ]
    layers = boostax.capture_layers(loss, params, batches[0], mode="reference")
    norms = [str(i) for i, kind in enumerate(d["layer_types"]) if kind == 4]
    rates, damping = jnp.asarray(d["lr"]), jnp.asarray(d["damping"])
    tx = boostax.thor(
        lambda n: rates[n],
        lambda n: damping[n],
        float(momentum),
        float(decay),
        layers=layers,
        use_nesterov=bool(nesterov),
        clip=bool(clip),
        frequency=int(frequency),
        loss_scale=float(scale),
        layer_norms=norms,
        mode="reference",
    )
    step = boostax.train_step(loss, tx)
    state = step.init(params)
    for t, batch in enumerate(batches):
        state, _ = step(state, batch)
        for i, leaf in enumerate(state.params):
            np.testing.assert_allclose(
                leaf, d[f"w_{i}"][t], rtol=1e-4, atol=1e-5, err_msg=f"step {t}"
            )
