"""joint_loss: values, gradients, batch statistics of two batches, keys, train steps, errors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import boostax
from boostax import LossAux, joint_loss
from tests.common.harness import mesh_of

RNG = np.random.default_rng(0)


def part(size, shift=0.0):
    x = RNG.normal(size=(size, 4)).astype(np.float32) + np.float32(shift)
    return {"x": x, "y": RNG.integers(0, 3, size).astype(np.int32)}


BATCH = {"source": part(6), "target": part(4, shift=2.0)}


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


class Linen(nn.Module):
    """One batch norm without scale and bias, and two heads."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(
            use_running_average=False, momentum=0.5, use_scale=False, use_bias=False, name="norm"
        )(x)
        return {side: nn.Dense(3, name=side)(x) for side in ("source", "target")}


class Nnx(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.norm = nnx.BatchNorm(4, momentum=0.5, use_scale=False, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.source = nnx.Linear(4, 3, rngs=rngs)
        self.target = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(x))
        return {"source": self.source(x), "target": self.target(x)}


def linen_loss(side):
    def loss(params, batch, *, model_state):
        logits, changed = Linen().apply(
            {"params": params, **model_state}, batch["x"], mutable=["batch_stats"]
        )
        return cross_entropy(logits[side], batch), LossAux(model_state=dict(changed))

    return loss


def nnx_loss(side):
    return lambda model, batch: cross_entropy(model(batch["x"])[side], batch)


@pytest.fixture(scope="module")
def variables():
    return Linen().init(jax.random.key(0), BATCH["source"]["x"])


def updated(old, batches):
    """Running mean and variance after batches, with the momentum 0.5."""
    mean, var = old
    for x in batches:
        mean, var = (mean + x.mean(0)) / 2, (var + x.var(0)) / 2
    return {"mean": mean, "var": var}


FRESH = (np.zeros(4), np.ones(4))
S, T = BATCH["source"]["x"], BATCH["target"]["x"]
KEPT = {"target": [T], "source": [S], "both": [S, T]}


def assert_statistics(got, batches):
    expected = updated(FRESH, batches)
    for name in ("mean", "var"):
        np.testing.assert_allclose(np.asarray(got[name]), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", KEPT)
def test_linen_two_passes(variables, kept):
    losses = (linen_loss("source"), linen_loss("target"))
    loss_fn = joint_loss(*losses, weights=(0.5, 2.0), statistics=kept)
    state = {"batch_stats": variables["batch_stats"]}
    value, aux = loss_fn(variables["params"], BATCH, model_state=state)
    own = [
        float(loss(variables["params"], BATCH[side], model_state=state)[0])
        for side, loss in zip(("source", "target"), losses, strict=True)
    ]
    np.testing.assert_allclose(value, 0.5 * own[0] + 2 * own[1], rtol=1e-6)
    np.testing.assert_allclose(
        [aux.metrics["source/loss"], aux.metrics["target/loss"]], own, rtol=1e-6
    )
    assert float(aux.weight) == 10
    assert_statistics(aux.model_state["batch_stats"]["norm"], KEPT[kept])


@pytest.mark.parametrize("kept", KEPT)
def test_nnx_two_passes(kept):
    model = Nnx(nnx.Rngs(0))
    expected = nnx_loss("source")(nnx.clone(model), BATCH["source"])
    expected += nnx_loss("target")(nnx.clone(model), BATCH["target"])
    value, aux = joint_loss(nnx_loss("source"), nnx_loss("target"), statistics=kept)(model, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert aux.model_state is None
    assert_statistics({"mean": model.norm.mean[...], "var": model.norm.var[...]}, KEPT[kept])


def test_linen_one_pass(variables):
    def forward(params, x, *, model_state):
        return Linen().apply({"params": params, **model_state}, x, mutable=["batch_stats"])

    loss_fn = joint_loss(
        lambda out, batch: cross_entropy(out["source"], batch),
        lambda out, batch: (cross_entropy(out["target"], batch), LossAux(metrics={"two": 2.0})),
        forward=forward,
    )
    state = {"batch_stats": variables["batch_stats"]}
    value, aux = loss_fn(variables["params"], BATCH, model_state=state)
    joined = np.concatenate([S, T])
    assert_statistics(aux.model_state["batch_stats"]["norm"], [joined])
    logits = forward(variables["params"], joined, model_state=state)[0]
    expected = cross_entropy(logits["source"][:6], BATCH["source"])
    expected += cross_entropy(logits["target"][6:], BATCH["target"])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert aux.metrics["target/two"] == 2.0


def test_nnx_one_pass():
    model = Nnx(nnx.Rngs(0))
    loss_fn = joint_loss(
        lambda out, batch: cross_entropy(out["source"], batch),
        lambda out, batch: cross_entropy(out["target"], batch),
        forward=lambda model, x: model(x),
        inputs=lambda part: part["x"],
    )
    loss_fn(model, BATCH)
    joined = np.concatenate([S, T])
    assert_statistics({"mean": model.norm.mean[...], "var": model.norm.var[...]}, [joined])


@pytest.mark.parametrize("second", ["array", "mapping", "three"])
@pytest.mark.parametrize("stateful", [False, True])
def test_one_pass_of_a_network_that_returns_a_tuple(second, stateful):
    def heads(x):
        last = {"out": 3 * x} if second == "mapping" else 3 * x
        return (2 * x, last, x) if second == "three" else (2 * x, last)

    def with_state(params, x, *, model_state):
        return heads(x), {"count": model_state["count"] + 1}

    def outputs_alone(params, x, *, model_state):
        return heads(x)

    def target_loss(out, batch):
        return jnp.mean(out[1]["out"] if second == "mapping" else out[1])

    batch = {"source": {"x": jnp.ones(3)}, "target": {"x": jnp.full(2, 5.0)}}
    source_loss = lambda out, batch: jnp.mean(out[0])
    for forward in (with_state, outputs_alone) if stateful else (lambda params, x: heads(x),):
        loss_fn = joint_loss(source_loss, target_loss, forward=forward)
        given = {"model_state": {"count": jnp.int32(4)}} if stateful else {}
        value, aux = loss_fn(jnp.float32(0), batch, **given)
        assert float(value) == 2 + 15
        assert aux.model_state == ({"count": 5} if forward is with_state else None)


@pytest.mark.parametrize("kind", [np.float32, np.array, jnp.float32])
def test_weights_of_other_libraries(kind):
    batch = {"source": jnp.ones(3), "target": jnp.full(2, 4.0)}
    for weights in ((kind(0.5), kind(2.0)), np.array([0.5, 2.0])):
        loss_fn = joint_loss(lambda p, b: p, lambda p, b: jnp.mean(b), weights=weights)
        assert float(loss_fn(jnp.float32(1), batch)[0]) == 8.5


def test_heads_get_the_gradient_of_their_own_loss(variables):
    loss_fn = joint_loss(linen_loss("source"), linen_loss("target"), weights=(3.0, 1.0))
    state = {"batch_stats": variables["batch_stats"]}
    grads = jax.grad(loss_fn, has_aux=True)(variables["params"], BATCH, model_state=state)[0]
    for side, weight in (("source", 3.0), ("target", 1.0)):
        own = jax.grad(linen_loss(side), has_aux=True)(
            variables["params"], BATCH[side], model_state=state
        )[0]
        for name in ("kernel", "bias"):
            np.testing.assert_allclose(
                grads[side][name], weight * own[side][name], rtol=1e-5, atol=1e-6
            )


def test_a_part_of_weight_zero_is_left_out():
    loss_fn = joint_loss(
        lambda p, b: p / 0.0 * jnp.sum(b), lambda p, b: p * jnp.mean(b), weights=(0, 1)
    )
    batch = {"source": jnp.ones(3), "target": jnp.full(2, 4.0)}
    value, grad = jax.value_and_grad(lambda p: loss_fn(p, batch)[0])(jnp.float32(2))
    assert (float(value), float(grad)) == (8.0, 4.0)


def test_each_part_has_its_own_key():
    draw = lambda p, b, *, rng: jnp.mean(b) * 0 + jax.random.uniform(rng)
    loss_fn = joint_loss(draw, draw)
    key = jax.random.key(3)
    batch = {"source": jnp.ones(3), "target": jnp.ones(2)}
    metrics = loss_fn(jnp.float32(0), batch, rng=key)[1].metrics
    for number, side in enumerate(("source", "target")):
        assert metrics[f"{side}/loss"] == jax.random.uniform(jax.random.fold_in(key, number))


def test_weights_metrics_and_aux_of_the_parts():
    def loss(params, batch):
        return params * jnp.mean(batch), LossAux(
            weight=jnp.float32(10), metrics={"seen": jnp.mean(batch)}, aux=batch
        )

    batch = {"source": jnp.ones(3), "target": jnp.full(2, 5.0)}
    _, aux = joint_loss(loss, lambda p, b: p)(jnp.float32(1), batch)
    assert float(aux.weight) == 12
    assert float(aux.metrics["source/seen"]) == 1
    assert aux.aux["target"] is None
    assert aux.aux["source"] is batch["source"]


def test_train_steps_of_linen_and_nnx(variables):
    linen_step = boostax.train_step(
        joint_loss(linen_loss("source"), linen_loss("target")), optax.sgd(0.1), has_aux=True
    )
    state = linen_step.init(
        variables["params"], model_state={"batch_stats": variables["batch_stats"]}
    )
    for _ in range(2):
        state, metrics = linen_step(state, BATCH)
    assert set(metrics) >= {"loss", "source/loss", "target/loss"}
    assert_statistics(state.model_state["batch_stats"]["norm"], [T, T])

    model = Nnx(nnx.Rngs(0), dropout=0.5)
    step = boostax.train_step(
        joint_loss(nnx_loss("source"), nnx_loss("target")), optax.sgd(0.1), has_aux=True
    )
    state = step.init(model)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    merged = state.merge(model)
    assert_statistics({"mean": merged.norm.mean[...], "var": merged.norm.var[...]}, [T, T])
    # The dropout's counter moved with both passes of both steps.
    assert int(merged.dropout.rngs.count[...]) == 4


def test_over_devices_as_on_one():
    loss = lambda p, b: jnp.mean((b["x"] @ p["w"] - b["y"]) ** 2)
    loss_fn = joint_loss(loss, loss, weights=(0.5, 1.0))
    params = {"w": jnp.ones(4)}
    batch = {"source": part(8), "target": part(4)}
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), batch)
    results = []
    for mesh in (None, mesh_of(4)):
        step = boostax.train_step(loss_fn, optax.sgd(0.1), has_aux=True, mesh=mesh)
        state, metrics = step(step.init(params), batch)
        results.append((state.params["w"], metrics["loss"], metrics["target/loss"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *results)
    odd = {**batch, "source": jax.tree.map(lambda leaf: leaf[:7], batch["source"])}
    with pytest.raises(ValueError, match="7 examples can't be split over 4 devices"):
        step(state, odd)


def test_micro_batches_inside_a_step():
    loss = lambda p, b: jnp.mean(p * b)
    batch = {"source": np.arange(6.0, dtype=np.float32), "target": np.arange(4, dtype=np.float32)}
    step = boostax.train_step(joint_loss(loss, loss), optax.sgd(1.0), has_aux=True, microbatch=2)
    state, _ = step(step.init(jnp.float32(0)), batch)
    assert float(state.params) == pytest.approx(-4.0)
    with pytest.raises(ValueError, match=r"leading size 6 .* n=4"):
        boostax.microbatch(joint_loss(loss, loss), 4, has_aux=True)(jnp.float32(0), batch)


def test_windows_of_equal_shares_are_one_large_batch():
    loss = lambda p, b: jnp.mean(p * b)
    loss_fn = joint_loss(loss, loss)
    source, target = np.arange(6.0, dtype=np.float32), np.arange(4.0, dtype=np.float32)
    whole = {"source": source, "target": target}
    halves = [{"source": source[i::2], "target": target[i::2]} for i in range(2)]
    ends = []
    for tx, batches in ((optax.sgd(1.0), [whole]), (boostax.accumulate(optax.sgd(1.0), 2), halves)):
        step = boostax.train_step(loss_fn, tx, has_aux=True)
        state = step.init(jnp.float32(0))
        for batch in batches:
            state, _ = step(state, batch)
        ends.append(float(state.params))
    assert ends == pytest.approx([-(2.5 + 1.5)] * 2)


def test_groups_and_unfreezing():
    params = {"backbone": jnp.ones(2), "source_head": jnp.ones(2), "target_head": jnp.ones(2)}
    loss = lambda head: lambda p, b: jnp.mean((b @ (p["backbone"] * p[head])) ** 2)
    loss_fn = joint_loss(loss("source_head"), loss("target_head"))
    groups = boostax.parameter_groups(params, patterns=["backbone", "*_head"])
    schedule = boostax.freeze_schedule("unfreeze", groups, full_fraction=0.5, total_steps=4)
    freezing = boostax.Freezing(groups, schedule)
    slow = {"params": "backbone", "learning_rate": 0.01}
    sgd = boostax.optimizer("sgd", learning_rate=0.1, groups=[slow])
    tx = boostax.freeze(sgd, freezing)
    step = boostax.train_step(loss_fn, tx, freezing=freezing, has_aux=True)
    state = step.init(params)
    batch = {"source": np.ones((3, 2), np.float32), "target": np.ones((2, 2), np.float32)}
    moved = []
    for _ in range(3):
        before = jax.tree.map(np.asarray, state.params)
        state, _ = step(state, batch)
        change = jax.tree.map(
            lambda a, b: float(np.abs(np.asarray(a) - b).max()), state.params, before
        )
        moved.append({name: value > 0 for name, value in change.items()})
    heads = {"source_head": True, "target_head": True}
    assert moved == [{"backbone": False, **heads}] * 2 + [{"backbone": True, **heads}]


def test_errors():
    loss = lambda p, b: jnp.mean(p * b)
    aux = lambda p, b: (loss(p, b), LossAux(model_state={}))
    good = {"source": jnp.ones(2), "target": jnp.ones(2)}
    own = lambda p, b: (loss(p, b), LossAux(metrics={"loss": p}))
    pair = lambda p, x: (x, p)
    images = {side: {"image": leaf} for side, leaf in good.items()}
    with pytest.raises(ValueError, match=r"a batch must be .* got the keys \['x', 'y'\]"):
        joint_loss(loss, loss)(jnp.float32(1), {"x": 1, "y": 2})
    with pytest.raises(ValueError, match=r"a batch must be .*tuple"):
        joint_loss(loss, loss)(jnp.float32(1), (1, 2))
    with pytest.raises(TypeError, match="weights must be two numbers"):
        joint_loss(loss, loss, weights=1.0)
    with pytest.raises(TypeError, match=r"the target's weight must be a number .* got '1'"):
        joint_loss(loss, loss, weights=(1, "1"))
    with pytest.raises(TypeError, match=r"the source's weight must be a number .* got .*True"):
        joint_loss(loss, loss, weights=(np.bool_(True), 1))
    with pytest.raises(
        TypeError, match="the source's weight must be a number that does not change"
    ):
        jax.eval_shape(lambda w: joint_loss(loss, loss, weights=(w, 1))(w, good), jnp.float32(1))
    with pytest.raises(ValueError, match="target_loss returned a metric 'loss', but 'target/loss'"):
        joint_loss(loss, own)(jnp.float32(1), good)
    with pytest.raises(ValueError, match=r"the source's part has no key 'x', got \['image'\]"):
        joint_loss(loss, loss, forward=lambda p, x: x)(jnp.float32(1), images)
    with pytest.raises(ValueError, match=r"leading axis of 4, got the shape \(\) at outputs\[1\]"):
        joint_loss(loss, loss, forward=pair, inputs=lambda b: b)(jnp.float32(1), good)
    with pytest.raises(ValueError, match="the source's weight must be finite and >= 0, got -1"):
        joint_loss(loss, loss, weights=(-1, 1))
    with pytest.raises(ValueError, match="both weights are 0"):
        joint_loss(loss, loss, weights=(0, 0))
    with pytest.raises(ValueError, match=r"got 'targe'\. Did you mean 'target'\?"):
        joint_loss(loss, loss, statistics="targe")
    with pytest.raises(ValueError, match="statistics= goes with two passes"):
        joint_loss(loss, loss, statistics="both", forward=lambda p, x: x)
    with pytest.raises(ValueError, match="inputs= goes with forward="):
        joint_loss(loss, loss, inputs="image")
    with pytest.raises(TypeError, match="inputs must be a key or a function"):
        joint_loss(loss, loss, forward=lambda p, x: x, inputs=3)
    with pytest.raises(TypeError, match="target_loss must be called as"):
        joint_loss(loss, lambda p, b, other: p)
    with pytest.raises(TypeError, match=r"source_loss .* can't have rng, which forward gets"):
        joint_loss(lambda p, b, *, rng: p, loss, forward=lambda p, x: x)
    with pytest.raises(
        TypeError, match=r"source_loss returned LossAux\.model_state; with forward="
    ):
        joint_loss(aux, loss, forward=lambda p, x: x * p, inputs=lambda b: b)(jnp.float32(1), good)
    with pytest.raises(TypeError, match="source_loss must return a real floating scalar"):
        joint_loss(lambda p, b: p * b, loss)(jnp.float32(1), good)


def test_a_table_in_the_batch_is_not_cut():
    def loss(p, batch):
        w = batch["class_weight"][batch["y"]]
        return jnp.sum(w * (p - batch["x"]) ** 2) / jnp.sum(w), boostax.LossAux(weight=jnp.sum(w))

    batch = {
        "x": jnp.arange(8.0),
        "y": jnp.arange(8) % 4,
        "class_weight": jnp.array([1.0, 2.0, 4.0, 8.0]),
    }
    step = boostax.train_step(loss, optax.sgd(0.1), has_aux=True, microbatch=2)
    with pytest.raises(ValueError, match="the leading sizes differ"):
        step(step.init(jnp.float32(0)), batch)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = boostax.train_step(loss, optax.sgd(0.1), has_aux=True, mesh=mesh)
    with pytest.raises(ValueError, match="the leading sizes differ"):
        step(step.init(jnp.float32(0)), batch)


def test_one_leaf_can_not_fill_up_two_parts():
    side = lambda p, batch: jnp.mean((p - batch["y"]) ** 2)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with pytest.raises(
        ValueError, match="in the parts source, target, each with weights of its own"
    ):
        boostax.train_step(
            boostax.joint_loss(side, side),
            optax.sgd(0.1),
            has_aux=True,
            mesh=mesh,
            example_weights="target/m",
        )
    step = boostax.train_step(
        boostax.joint_loss(side, side), optax.sgd(0.1), has_aux=True, mesh=mesh
    )
    batch = {"source": {"y": np.zeros(4, np.float32)}, "target": {"y": np.zeros(3, np.float32)}}
    with pytest.raises(ValueError, match=r"drop 1 or add 1\.$"):
        step(step.init(jnp.float32(0)), batch)
