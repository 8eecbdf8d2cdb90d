"""local_steps: by hand, against a loop in float64, what is sent and when, resuming."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from boostax import (
    LocalStepsState,
    accumulate,
    adasum,
    all_reduce,
    local_params,
    local_steps,
)
from boostax._info import exchanged_axes
from boostax.updates._skip import skip

SPEC = PartitionSpec
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def pair64(a, b):
    dot, aa, bb = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def mean64(offsets):
    return np.mean(offsets, 0)


def adasum64(offsets):
    rest = list(offsets)
    while len(rest) > 1:
        rest = [pair64(rest[i], rest[i + 1]) for i in range(0, len(rest), 2)]
    return rest[0]


EXCHANGES = {"mean": (all_reduce, mean64), "adasum": (adasum, adasum64)}


def targets(n):
    return np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)


def loop64(n, steps, every, combine, outer):
    """Each replica pulls towards its own target by SGD with momentum 0.9 and rate 0.1."""
    targets_ = targets(n).astype(np.float64)
    params = np.zeros(3)
    at, moments = np.zeros((n, 3)), np.zeros((n, 3))
    outer_moment = np.zeros(3)
    seen = []
    for t in range(1, steps + 1):
        moments = 0.9 * moments + (at - targets_)
        at = at - 0.1 * moments
        if t % every == 0:
            moved = combine(at - params)
            if outer:
                outer_moment = 0.9 * outer_moment - moved
                moved = -0.7 * (0.9 * outer_moment - moved)
            params = params + moved
            at = np.broadcast_to(params, at.shape).copy()
        seen.append(params)
    return np.array(seen)


def make(kind, every=3, outer=True):
    return local_steps(
        optax.sgd(0.1, 0.9),
        every,
        EXCHANGES[kind][0]("d"),
        outer=optax.sgd(**OUTER) if outer else None,
    )


def run_steps(tx, steps, target, params, state):
    """Return the parameters after each step, and the state."""
    seen = []
    for _ in range(steps):
        grads = local_params(state, params) - target
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return jnp.stack(seen), state


# By hand


def test_by_hand():
    tx = local_steps(optax.sgd(1.0), 2, all_reduce("d"))

    def two_windows(gradient):
        params, state, out = jnp.float32(10), tx.init(jnp.float32(10)), []
        for _ in range(4):
            updates, state = tx.update(gradient, state, params)
            params = params + updates
            out.append(jnp.stack([updates, local_params(state, params), state.offset]))
        return jnp.stack(out), state.step

    out, step = jax.vmap(two_windows, axis_name="d")(jnp.array([1.0, 3.0]))
    # (update, where the replica stands, offset) of replica 0 and of replica 1.
    np.testing.assert_allclose(out[0], [[0, 9, -1], [-4, 6, 0], [0, 5, -1], [-4, 2, 0]])
    np.testing.assert_allclose(out[1], [[0, 7, -3], [-4, 6, 0], [0, 3, -3], [-4, 2, 0]])
    np.testing.assert_array_equal(step, [4, 4])


def test_outer_momentum_by_hand():
    # D = -2 twice; m = 2, then 0.9 * 2 + 2 = 3.8; Nesterov: -0.7 (0.9 m + 2) = -2.66, -3.794.
    tx = local_steps(optax.sgd(1.0), 1, all_reduce("d"), outer=optax.sgd(**OUTER))

    def steps(gradient):
        params, state, out = jnp.float32(0), tx.init(jnp.float32(0)), []
        for _ in range(2):
            updates, state = tx.update(gradient, state, params)
            out.append(updates)
        return jnp.stack(out)

    out = jax.vmap(steps, axis_name="d")(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(out, [[-2.66, -3.794]] * 2, rtol=1e-6)


def test_every_step_is_the_exchange_on_updates():
    grads = jnp.asarray(targets(4))
    inner = optax.adam(0.1)
    tx, chain = local_steps(inner, 1, adasum("d")), optax.chain(inner, adasum("d"))
    params = jnp.zeros(3)

    def steps(tx, gradient):
        state, out = tx.init(params), []
        for factor in (1.0, -2.0, 0.5):
            updates, state = tx.update(gradient * factor, state, params)
            out.append(updates)
        return jnp.stack(out)

    got, expected = (
        jax.jit(jax.vmap(lambda g, tx=tx: steps(tx, g), axis_name="d"))(grads) for tx in (tx, chain)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


# Against float64


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize(("n", "outer"), [(2, False), (4, True)])
def test_lanes_equal_a_loop_in_float64(n, kind, outer):
    tx, params = make(kind, outer=outer), jnp.zeros(3)
    one = lambda target: run_steps(tx, 7, target, params, tx.init(params))[0]
    got = jax.jit(jax.vmap(one, axis_name="d"))(targets(n))
    expected = loop64(n, 7, 3, EXCHANGES[kind][1], outer)
    np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-6)
    assert len({row.tobytes() for row in np.asarray(got)}) == 1


def over_devices(tx, n, steps, check_vma):
    """Return ``(target, params, state) -> (params seen, state)``; states have a leading axis."""

    def inside(target, params, state):
        seen, new = run_steps(tx, steps, target[0], params, jax.tree.map(lambda x: x[0], state))
        return seen, jax.tree.map(lambda x: x[None], new)

    own = LocalStepsState(SPEC(), SPEC("d"), SPEC(), SPEC("d"))
    if check_vma:
        # The types see to it: what is common has no leading axis that is split.
        def inside(target, params, state):
            state = state._replace(
                inner_state=jax.tree.map(lambda x: x[0], state.inner_state),
                offset=state.offset[0],
            )
            seen, new = run_steps(tx, steps, target[0], params, state)
            return seen, new._replace(
                inner_state=jax.tree.map(lambda x: x[None], new.inner_state),
                offset=new.offset[None],
            )

        specs = own
    else:
        specs = SPEC("d")
    return jax.jit(
        jax.shard_map(
            inside,
            mesh=Mesh(np.array(jax.devices()[:n]), ("d",)),
            in_specs=(SPEC("d"), SPEC(), specs),
            out_specs=(SPEC(), specs),
            check_vma=check_vma,
        )
    )


def first_state(tx, n, check_vma):
    state, spread = tx.init(jnp.zeros(3)), lambda x: jnp.stack([x] * n)
    if not check_vma:
        return jax.tree.map(spread, state)
    return state._replace(
        inner_state=jax.tree.map(spread, state.inner_state), offset=spread(state.offset)
    )


@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize(("n", "check_vma"), [(2, False), (4, True)])
def test_devices_equal_a_loop_in_float64(n, kind, check_vma):
    tx = make(kind)
    step = over_devices(tx, n, 7, check_vma)
    got, state = step(targets(n), jnp.zeros(3), first_state(tx, n, check_vma))
    np.testing.assert_allclose(got, loop64(n, 7, 3, EXCHANGES[kind][1], True), rtol=1e-5, atol=1e-6)
    copies = {np.asarray(shard.data).tobytes() for shard in got.addressable_shards}
    assert len(copies) == 1
    assert np.asarray(state.offset).any()  # the seventh step is one of a new round


def test_resuming_in_mid_round_is_exact():
    tx = make("mean")
    one = over_devices(tx, 2, 1, True)
    state, params, runs = first_state(tx, 2, True), jnp.zeros(3), []
    saved = None
    for t in range(6):
        if t == 2:
            saved = jax.tree.map(np.asarray, (params, state))
        seen, state = one(targets(2), params, state)
        params = seen[0]
        runs.append(np.asarray(params))
    params, state = jax.tree.map(jnp.asarray, saved)
    assert isinstance(state, LocalStepsState)
    assert int(state.step) == 2
    for t in range(2, 6):
        seen, state = one(targets(2), params, state)
        params = seen[0]
        np.testing.assert_array_equal(params, runs[t])


# What is sent


def test_the_exchange_is_inside_the_conditional():
    params = jnp.zeros((64, 64))
    tx = local_steps(optax.sgd(0.1), 4, all_reduce("d"))

    def inside(grads, step):
        state = tx.init(params)._replace(step=step)
        return tx.update(grads[0], state, params)[0]

    mapped = jax.shard_map(
        inside,
        mesh=Mesh(np.array(jax.devices()[:4]), ("d",)),
        in_specs=(SPEC("d"), SPEC()),
        out_specs=SPEC(),
    )
    compiled = jax.jit(mapped).lower(jnp.ones((4, 64, 64)), jnp.int32(0)).compile()
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\{)", compiled.as_text())
    holding = [c for c in computations if re.search(r"f32\[64,64\]\S* all-reduce", c)]
    assert len(holding) == 1
    name = holding[0].split("(")[0].strip()
    branches = re.findall(
        r"(?:branch_computations=\{.*?\}|(?:true|false)_computation=\S+)", compiled.as_text()
    )
    assert any(name in branch for branch in branches), (name, branches)
    np.testing.assert_array_equal(compiled(jnp.ones((4, 64, 64)), jnp.int32(0)), 0)
    np.testing.assert_allclose(compiled(jnp.ones((4, 64, 64)), jnp.int32(3)), -0.1)


# Composition and states


def test_found_anywhere_and_common_decisions_around_it():
    tx = optax.chain(
        optax.clip_by_global_norm(1e3),
        accumulate(local_steps(optax.sgd(1.0), 2, all_reduce("d")), 2),
    )
    assert exchanged_axes(tx) == ("d",)
    params = jnp.float32(0)

    def steps(gradient):
        state, out = tx.init(params), []
        for _ in range(4):
            updates, state = tx.update(gradient, state, params)
            out.append(jnp.stack([updates, local_params(state, params)]))
        return jnp.stack(out)

    out = jax.vmap(steps, axis_name="d")(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(out[0], [[0, 0], [0, -1], [0, -1], [-4, 0]])
    np.testing.assert_allclose(out[1], [[0, 0], [0, -3], [0, -3], [-4, 0]])


def test_halves_keep_their_dtype_and_small_moves_add_up():
    # 256 moves of 2^-9 each would be lost one by one beside 1 in bfloat16, which has 8 bits.
    tx = local_steps(optax.sgd(1.0), 256, all_reduce("d"))
    params = jnp.ones(2, jnp.bfloat16)

    def steps(gradient):
        def body(state, _):
            updates, state = tx.update(gradient, state, params)
            return state, updates

        return jax.lax.scan(body, tx.init(params), None, length=256)

    state, out = jax.vmap(steps, axis_name="d")(jnp.full((2, 2), -(2.0**-9), jnp.bfloat16))
    assert (out.dtype, state.offset.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(out[0, -1], [0.5, 0.5])
    assert local_params(jax.tree.map(lambda x: x[0], state), params).dtype == jnp.bfloat16


def test_leaves_that_are_not_floating_and_masked_ones_pass():
    params = {"w": jnp.zeros(2), "n": jnp.zeros(2, jnp.int32), "masked": optax.MaskedNode()}
    inner = optax.stateless(lambda u, _: jax.tree.map(lambda x: -x, u))
    tx = local_steps(inner, 2, all_reduce("d"), outer=optax.sgd(1.0, 0.9))
    state = jax.eval_shape(tx.init, params)
    assert state.offset["n"] == optax.MaskedNode()
    grads = {"w": jnp.ones((2, 2)), "n": jnp.zeros((2, 2), jnp.int32), "masked": params["masked"]}

    def steps(grads):
        state = tx.init(params)
        _, state = tx.update(grads, state, params)
        at = local_params(state, params)
        return at, tx.update(grads, state, params)[0]

    at, updates = jax.vmap(steps, axis_name="d")(grads)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    np.testing.assert_array_equal(at["w"], -np.ones((2, 2)))
    np.testing.assert_array_equal(updates["w"], -2 * np.ones((2, 2)))
    assert updates["n"].dtype == jnp.int32


def test_a_skipped_step_leaves_everything():
    tx = make("mean")
    state = tx.init(jnp.zeros(3))._replace(step=jnp.int32(5), offset=jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, skip(state), state)


def test_wrong_arguments_are_named():
    exchange = all_reduce("d")
    for every, error in ((0, ValueError), (True, TypeError), (2.0, TypeError), ("4", TypeError)):
        with pytest.raises(error, match="local_steps: every must be"):
            local_steps(optax.sgd(0.1), every, exchange)
    with pytest.raises(TypeError, match=r"exchange must be an optax\.GradientTransformation"):
        local_steps(optax.sgd(0.1), 2, "d")
    with pytest.raises(TypeError, match=r"outer must be an optax\.GradientTransformation"):
        local_steps(optax.sgd(0.1), 2, exchange, outer=0.7)
    with pytest.raises(ValueError, match=r"inner exchanges over \['d'\] at every step"):
        local_steps(optax.chain(exchange, optax.sgd(0.1)), 2, exchange)
    tx = local_steps(optax.sgd(0.1), np.int64(2), exchange)
    with pytest.raises(ValueError, match="params are needed"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    with pytest.raises(ValueError, match="there is no LocalStepsState"):
        local_params(optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
