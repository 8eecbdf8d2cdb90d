"""Batch statistics taken anew are those of all the data as one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import boostax
from boostax import refresh_batch_statistics

X = np.random.RandomState(0).normal(3.0, 2.0, (14, 3)).astype(np.float32)
BATCHES = [X[:8], X[8:12], X[12:]]  # unequal: weights matter


class Net(nnx.Module):
    def __init__(self, momentum: float = 0.9, frozen: bool = False):
        rngs = nnx.Rngs(0)
        self.first = nnx.BatchNorm(3, momentum=0.99, use_running_average=frozen, rngs=rngs)
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.second = nnx.BatchNorm(2, momentum=momentum, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.linear(self.first(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.99, name="first")(x)
        x = nn.Dense(2, name="linear")(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, name="second")(x)


def loss_fn(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def linen_loss(params, x, *, model_state):
    out, new = LinenNet().apply({"params": params, **model_state}, x, mutable=["batch_stats"])
    return jnp.mean(out**2), boostax.LossAux(model_state=new)


def close(got, wanted):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=2e-5, atol=1e-6)


def test_by_hand():
    model = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    batches = [jnp.array([[0.0], [2.0]]), jnp.array([[10.0]])]
    new = refresh_batch_statistics(loss_fn, model, batches)
    # 0, 2, 10: mean 4, variance (16 + 4 + 36) / 3
    close(new.mean.get_value(), [4.0])
    close(new.var.get_value(), [56 / 3])
    assert float(model.mean.get_value()[0]) == 0  # the model that was given is as it was


def test_an_nnx_model_gets_the_statistics_of_all_the_data():
    model = Net()
    model.first.mean.set_value(jnp.full(3, 100.0))  # a stale start leaves no trace
    new = refresh_batch_statistics(loss_fn, model, BATCHES)
    close(new.first.mean.get_value(), X.mean(0))
    close(new.first.var.get_value(), X.var(0))
    np.testing.assert_array_equal(new.linear.kernel.get_value(), model.linear.kernel.get_value())


def test_a_batch_split_in_two_is_the_same_behind_the_first_layer():
    whole = refresh_batch_statistics(loss_fn, Net(), [X])
    out = Net().linear((X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5))
    close(whole.second.mean.get_value(), out.mean(0))
    close(whole.second.var.get_value(), out.var(0))


@pytest.mark.quick
def test_a_train_state_of_linen_and_of_nnx():
    variables = LinenNet().init(jax.random.key(0), X)
    stats = {"batch_stats": variables["batch_stats"]}
    step = boostax.train_step(linen_loss, optax.sgd(0.1), has_aux=True)
    state = step.init(variables["params"], model_state=stats)
    new = refresh_batch_statistics(linen_loss, state, BATCHES)
    close(new.model_state["batch_stats"]["first"]["mean"], X.mean(0))
    close(new.model_state["batch_stats"]["first"]["var"], X.var(0))
    assert new.params is state.params
    alone = refresh_batch_statistics(linen_loss, state.params, BATCHES, model_state=stats)
    np.testing.assert_array_equal(
        alone["batch_stats"]["second"]["var"], new.model_state["batch_stats"]["second"]["var"]
    )
    state, _ = step(new, X)  # it fits the step
    assert int(state.attempt) == 1

    model = Net()
    own = boostax.train_step(loss_fn, optax.sgd(0.1))
    moved = refresh_batch_statistics(loss_fn, own.init(model), BATCHES, model=model)
    close(moved.merge(model).first.mean.get_value(), X.mean(0))
    with pytest.raises(TypeError, match="pass model="):
        refresh_batch_statistics(loss_fn, own.init(model), BATCHES)


def test_a_layer_that_holds_its_statistics_keeps_them_and_is_run_with_them():
    model = Net(frozen=True)
    model.first.mean.set_value(jnp.full(3, 2.0))
    new = refresh_batch_statistics(loss_fn, model, [X])
    np.testing.assert_array_equal(new.first.mean.get_value(), np.full(3, 2.0, np.float32))
    out = model.linear((X - 2.0) / np.sqrt(1 + 1e-5))
    close(new.second.mean.get_value(), out.mean(0))


def test_batches_of_weight_0_and_padding_do_not_count():
    def weighted(params, batch, *, model_state):
        loss, aux = linen_loss(params, batch["x"], model_state=model_state)
        return loss, aux.replace(weight=batch["weight"])

    variables = LinenNet().init(jax.random.key(0), X)
    stats = {"batch_stats": variables["batch_stats"]}
    batches = [
        {"x": X[:7], "weight": 7.0},
        {"x": np.full((7, 3), np.nan, np.float32), "weight": 0.0},
    ]
    new = refresh_batch_statistics(weighted, variables["params"], batches, model_state=stats)
    close(new["batch_stats"]["first"]["mean"], X[:7].mean(0))
    with pytest.raises(ValueError, match="weight of all batches"):
        refresh_batch_statistics(weighted, variables["params"], batches[1:], model_state=stats)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
def test_a_second_time_and_a_start_that_is_right_already(momentum):
    model = nnx.BatchNorm(1, momentum=momentum, rngs=nnx.Rngs(0))
    first, second = jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])
    for _ in range(3):
        model = refresh_batch_statistics(loss_fn, model, [first])
        close(model.mean.get_value(), [2.0])
    model = refresh_batch_statistics(loss_fn, model, [first, second])
    close(model.mean.get_value(), [4.0])
    close(model.var.get_value(), [5.0])


def test_a_layer_that_runs_twice_is_refused():
    model = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
    twice = lambda model, x: jnp.mean(model(x) + model(x + 2))
    with pytest.raises(ValueError, match=r"keeps 0.81 of the old .* momentum is 0.9: it runs more"):
        refresh_batch_statistics(twice, model, [X])
    with pytest.raises(ValueError, match=r"keeps 0.9 of the old .* momentum is 0.5"):
        refresh_batch_statistics(loss_fn, model, [X], batch_norm_momentum=0.5)


def test_a_first_batch_without_weight_may_hold_anything():
    def weighted(model, batch):
        return jnp.mean(model(batch["x"]) ** 2), boostax.LossAux(weight=batch["weight"])

    batches = [{"x": X * np.nan, "weight": 0.0}, {"x": X, "weight": 1.0}]
    new = refresh_batch_statistics(weighted, Net(), batches)
    close(new.first.mean.get_value(), X.mean(0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batches": []}, ValueError, "batches is empty"),
        ({"batches": None}, TypeError, "an iterable of batches, got NoneType"),
        ({"batches": X}, TypeError, "an iterable of batches, got ndarray"),
        ({"batches": [np.full((4, 3), np.inf, np.float32)]}, ValueError, "'first' is not finite"),
        ({"target": nnx.Linear(3, 2, rngs=nnx.Rngs(0))}, ValueError, "no batch statistics"),
        ({"target": LinenNet()}, TypeError, "linen module LinenNet"),
        ({"target": Net(momentum=1.0), "same": True}, ValueError, "as they are"),
        ({"model": Net()}, TypeError, "model= goes with a train state"),
        ({"model_state": {}}, TypeError, "model_state= goes with parameters"),
        ({"batch_norm_momentum": 1.5}, ValueError, "batch_norm_momentum"),
        ({"batch_norm_momentum": 1.0}, ValueError, "is 1, with which"),
        ({"has_aux": True}, TypeError, "has_aux=True must return"),
    ],
)
def test_what_can_not_be(change, error, message):
    change = dict(change)
    loss = loss_fn
    if change.pop("same", False):
        loss = lambda model, x: jnp.mean(model.linear(x))
    arguments = {"target": Net(), "batches": BATCHES, **change}
    with pytest.raises(error, match=message):
        refresh_batch_statistics(
            loss, arguments.pop("target"), arguments.pop("batches"), **arguments
        )


def test_a_loss_with_a_key_needs_one():
    def noisy(model, x, *, rng):
        return jnp.mean(model(x + jax.random.normal(rng, x.shape)) ** 2)

    with pytest.raises(ValueError, match="declares rng"):
        refresh_batch_statistics(noisy, Net(), BATCHES)
    one = refresh_batch_statistics(noisy, Net(), BATCHES, rng=1)
    again = refresh_batch_statistics(noisy, Net(), BATCHES, rng=jax.random.key(1))
    np.testing.assert_array_equal(one.first.mean.get_value(), again.first.mean.get_value())
    assert np.abs(one.first.mean.get_value() - X.mean(0)).max() > 1e-3
