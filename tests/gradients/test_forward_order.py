"""Forward order: first use with the data, through every kind of inner jaxpr."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from boostax import LossAux, forward_order

BATCH = jnp.ones((4, 2))


def _square(*names):
    return {name: jnp.full((2, 2), 0.5) for name in names}


def _chain(*names, wrap=lambda f: f):
    """A loss that applies the named matrices in turn, each through ``wrap``."""

    def loss_fn(params, batch):
        x = batch
        for name in names:
            x = wrap(lambda x, w: jnp.tanh(x @ w))(x, params[name])
        return jnp.mean(x)

    return loss_fn


@jax.custom_vjp
def _with_vjp(x, w):
    return jnp.tanh(x @ w)


_with_vjp.defvjp(lambda x, w: (_with_vjp(x, w), None), lambda _, g: (g, g))


@jax.custom_jvp
def _with_jvp(x, w):
    return jnp.tanh(x @ w)


_with_jvp.defjvps(lambda t, out, x, w: t, lambda t, out, x, w: t)

WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "custom_vjp": lambda f: _with_vjp,
    "custom_jvp": lambda f: _with_jvp,
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "fori": lambda f: lambda x, w: jax.lax.fori_loop(0, 2, lambda _, c: f(c, w), x),
    "while": lambda f: lambda x, w: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: f(c, w), x),
    "cond": lambda f: lambda x, w: jax.lax.cond(x.sum() > 0, f, lambda x, w: x, x, w),
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_order_of_use_not_of_the_tree(name):
    names = ("m10", "z", "a", "m2")
    loss_fn = _chain(*names, wrap=WRAPPERS[name])
    assert forward_order(loss_fn, _square(*sorted(names)), BATCH) == names


def test_casts_transposes_and_penalties_are_no_use():
    def loss_fn(params, batch):
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).T, params)
        normed = jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(leaf), cast)
        return penalty + jnp.mean((batch @ normed["z"]) @ normed["a"])

    assert forward_order(loss_fn, _square("a", "z"), BATCH) == ("z", "a")


def test_a_recurrent_cell_whose_state_starts_at_zero():
    def loss_fn(params, batch):
        def cell(carry, x):
            return jnp.tanh(carry @ params["a_hidden"] + x @ params["input"]), None

        carry, _ = jax.lax.scan(cell, jnp.zeros(2), batch)
        return jnp.mean(carry @ params["A_head"])

    order = forward_order(loss_fn, _square("A_head", "a_hidden", "input"), BATCH)
    assert set(order[:2]) == {"a_hidden", "input"}
    assert order[2] == "A_head"


def test_a_loss_without_a_batch():
    def loss_fn(params, batch):
        return jnp.sum(jnp.ones(2) @ params["z"].astype(jnp.bfloat16) @ params["a"])

    assert forward_order(loss_fn, _square("a", "z"), None) == ("z", "a")


def test_unused_leaves_come_last_with_a_warning():
    with pytest.warns(UserWarning, match="does not use a, b;"):
        order = forward_order(_chain("z", "c"), _square("a", "b", "c", "z"), BATCH)
    assert order == ("z", "c", "a", "b")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(11):
            x = nn.remat(nn.Dense)(3)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(1, name="AHead")(x)


def test_linen_with_state_and_key():
    net = Net()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCH)

    def loss_fn(params, batch, *, model_state, rng):
        y, state = net.apply(
            {"params": params, **model_state}, batch, mutable=["batch_stats"], rngs={"dropout": rng}
        )
        return jnp.mean(y), LossAux(model_state=state)

    stats = {"batch_stats": variables["batch_stats"]}
    order = forward_order(loss_fn, variables["params"], BATCH, model_state=stats, has_aux=True)
    expected = []
    for i in range(11):
        expected += [f"CheckpointDense_{i}/kernel", f"CheckpointDense_{i}/bias"]
        expected += [f"BatchNorm_{i}/scale", f"BatchNorm_{i}/bias"]
    assert list(order) == [*expected, "AHead/kernel", "AHead/bias"]
    abstract = jax.eval_shape(lambda: (variables["params"], stats, BATCH))
    assert order == forward_order(loss_fn, abstract[0], abstract[2], model_state=abstract[1])


def test_layers_stacked_by_scan_are_one_leaf():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(2)(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(2, name="stem")(x)
            scanned = nn.scan(
                Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=5
            )(name="blocks")
            return nn.Dense(1, name="a_head")(scanned(x, None)[0])

    net = Stack()
    params = net.init(jax.random.key(0), BATCH)["params"]
    order = forward_order(lambda p, b: jnp.mean(net.apply({"params": p}, b)), params, BATCH)
    assert order == (
        *("stem/kernel", "stem/bias", "blocks/Dense_0/kernel", "blocks/Dense_0/bias"),
        *("a_head/kernel", "a_head/bias"),
    )


def test_nnx_model_concrete_and_abstract():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.z = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.a = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.a(self.drop(self.norm(self.z(x))))

    def loss_fn(model, batch, *, rng):
        return jnp.mean(model(batch) + jax.random.normal(rng, (4, 1)))

    model = Model(nnx.Rngs(0))
    expected = ("z/kernel", "z/bias", "norm/scale", "norm/bias", "a/kernel", "a/bias")
    before = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert forward_order(loss_fn, model, BATCH) == expected
    after = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    assert forward_order(loss_fn, abstract, jax.ShapeDtypeStruct((4, 2), jnp.float32)) == expected


def test_bad_losses():
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        forward_order(3, _square("a"), BATCH)
    with pytest.raises(TypeError, match="has_aux is False"):
        forward_order(lambda p, b: (b.sum(), LossAux()), _square("a"), BATCH, has_aux=False)
