"""Batch statistics of a window: values by hand, whole batches, streaming, momenta."""

import flax.linen as nn
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from boostax.training import batch_stats

START = {"batch_stats": {"bn": {"mean": jnp.zeros(1), "var": jnp.ones(1)}}}


def after(mean, var, momentum=0.9, start=START):
    """The statistics that a batch of this mean and variance leads to."""
    old = start["batch_stats"]["bn"]
    new = {"mean": mean, "var": var}
    mix = lambda name: momentum * old[name] + (1 - momentum) * jnp.float32(new[name])
    return {"batch_stats": {"bn": {"mean": mix("mean"), "var": mix("var")}}}


def values(state):
    return [float(state["batch_stats"]["bn"][name][0]) for name in ("mean", "var")]


def test_equal_micro_batches_pool_to_the_whole_batch():
    micro = [after(mean, 1.0) for mean in (0.0, 2.0, 4.0, 6.0)]
    pooled = batch_stats.pool(START, micro, [1, 1, 1, 1], (0.9,))
    assert values(pooled) == pytest.approx([0.3, 1.5], rel=1e-5)


def test_per_micro_statistics_advance_with_each_micro_batch():
    state = START
    for _ in range(4):
        state = after(2.0, 1.0, start=state)
    assert values(state)[0] == pytest.approx(0.6878, rel=1e-5)
    pooled = batch_stats.pool(START, [after(2.0, 1.0)] * 4, [1] * 4, (0.9,))
    assert values(pooled)[0] == pytest.approx(0.2, rel=1e-5)


def test_dropped_micro_batches_and_windows_leave_the_statistics_exactly():
    window = batch_stats.init_window(START)
    bad = after(jnp.nan, jnp.inf)
    spoiled = batch_stats.add_micro(window, START, bad, 1.0, False)
    spoiled = batch_stats.add_micro(spoiled, START, bad, 0.0)
    jax.tree.map(np.testing.assert_array_equal, spoiled, window)
    closed = batch_stats.close_window(spoiled, START, (0.9,))
    jax.tree.map(np.testing.assert_array_equal, closed, START)
    some = batch_stats.add_micro(spoiled, START, after(2.0, 1.0), 3.0)
    jax.tree.map(np.testing.assert_array_equal, batch_stats.reset(some), window)
    assert values(batch_stats.close_window(some, START, (0.9,))) == pytest.approx([0.2, 1.0])


def test_a_layer_that_never_moves_has_no_spread():
    micro = [after(mean, 1.0, momentum=1.0) for mean in (0.0, 6.0)]
    assert values(batch_stats.pool(START, micro, [1, 1], (1.0,))) == [0.0, 1.0]


@hypothesis.given(
    hnp.arrays(np.float32, (12, 2), elements=st.floats(-100, 100, width=32)),
    st.floats(0.0, 0.99),
    st.lists(st.integers(1, 11), max_size=3, unique=True),
    st.floats(0, 1e4),
)
def test_any_cut_equals_the_whole_batch(x, momentum, cuts, offset):
    x = x + np.float32(offset)
    start = {"batch_stats": {"bn": {"mean": jnp.full(2, 3.0), "var": jnp.full(2, 2.0)}}}
    one = lambda part: after(part.mean(0), part.var(0), momentum, start)
    parts = np.split(x, sorted(cuts))
    pooled = batch_stats.pool(start, [one(p) for p in parts], [len(p) for p in parts], (momentum,))
    scale = float(np.abs(x).max()) + 1.0
    for name, power in (("mean", 1), ("var", 2)):
        # float32: a variance of numbers of size 1e4 carries their rounding.
        np.testing.assert_allclose(
            pooled["batch_stats"]["bn"][name],
            one(x.astype(np.float64))["batch_stats"]["bn"][name],
            rtol=1e-4,
            atol=2e-6 * scale**power,
        )


def test_streaming_in_a_scan_equals_the_loop_and_threads_the_rest():
    start = {**START, "counter": {"calls": jnp.int32(0), "mean": jnp.zeros(1)}}

    def forward(state, mean):
        new = after(mean, 1.0, start=state)
        rest = {"calls": state["counter"]["calls"] + 1, "mean": state["counter"]["mean"] + 1}
        return {**new, "counter": rest}

    @jax.jit
    def scan(means):
        def visit(carry, mean):
            window, state = carry
            new = forward(state, mean)
            return (
                batch_stats.add_micro(window, state, new),
                batch_stats.thread(state, new, jnp.isfinite(mean)),
            ), None

        (window, state), _ = jax.lax.scan(visit, (batch_stats.init_window(start), start), means)
        return batch_stats.close_window(window, state, (0.9,))

    state = scan(jnp.array([0.0, 2.0, 4.0, 6.0]))
    assert values(state) == pytest.approx([0.3, 1.5], rel=1e-5)
    assert int(state["counter"]["calls"]) == 4
    # A pair counts only in the batch_stats collection.
    assert float(state["counter"]["mean"][0]) == 4.0
    assert jax.tree.structure(state) == jax.tree.structure(start)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        x = nn.remat(nn.BatchNorm)(use_running_average=False, momentum=0.7, name="second")(x)
        return nn.LayerNorm()(nn.Dense(2)(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(3, momentum=0.7, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.momentum = "not a number"

    def __call__(self, x):
        return self.dropout(self.blocks[0](self.first(x)))


def test_momenta_are_read_from_linen_modules():
    x = jnp.arange(12.0).reshape(4, 3) ** 2
    variables = Linen().init(jax.random.key(0), x)
    state = {"batch_stats": variables["batch_stats"]}

    def forward(state, x):
        return Linen().apply({"params": variables["params"], **state}, x, mutable=["batch_stats"])[
            1
        ]

    for _ in range(2):  # also when JAX has traced the function before
        found = batch_stats.collect_momenta(forward, state, x)
        assert found == {"BatchNorm_0": 0.9, "second": 0.7}
    momenta = batch_stats.momenta_for(state, found)
    assert dict(zip(batch_stats.pair_paths(state), momenta, strict=True)) == found
    halves = [forward(state, x[:2]), forward(state, x[2:])]
    pooled = batch_stats.pool(state, halves, [2, 2], momenta)
    np.testing.assert_allclose(
        *(s["batch_stats"]["BatchNorm_0"]["var"] for s in (pooled, forward(state, x))), rtol=1e-5
    )


def test_momenta_are_read_from_nnx_modules():
    model = Nnx(nnx.Rngs(0))
    x = jnp.arange(12.0).reshape(4, 3) ** 2
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    assert batch_stats.collect_momenta(model) == {"first": 0.9, "blocks/0": 0.7}

    def forward(state, x):
        merged = nnx.merge(graphdef, params, state, copy=True)
        merged(x)
        return nnx.state(merged, nnx.Not(nnx.Param))

    momenta = batch_stats.momenta_for(state, batch_stats.collect_momenta(model))
    halves = [forward(state, x[:2]), forward(state, x[2:])]
    pooled = batch_stats.pool(state, halves, [2, 2], momenta)
    whole = forward(state, x)
    np.testing.assert_allclose(pooled["first"]["var"][...], whole["first"]["var"][...], rtol=1e-5)
    np.testing.assert_allclose(pooled["first"]["mean"][...], whole["first"]["mean"][...], rtol=1e-5)
    # Keys and counters move on from one micro-batch to the next.
    assert int(pooled["dropout"]["rngs"]["count"][...]) == int(
        whole["dropout"]["rngs"]["count"][...]
    )
    assert jax.tree.structure(pooled) == jax.tree.structure(state)


def test_an_unknown_momentum_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"'bn' is not known.*batch_norm_momentum"):
        batch_stats.momenta_for(START, {})
    assert batch_stats.momenta_for(START, {}, 0.5) == (0.5,)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        batch_stats.momenta_for(START, {}, 1.5)
    nested = {"batch_stats": {"encoder": START["batch_stats"]}}
    assert batch_stats.momenta_for(nested, {"bn": 0.8}) == (0.8,)


def test_states_that_do_not_fit_are_refused():
    window = batch_stats.init_window({})
    with pytest.raises(ValueError, match="0 pairs"):
        batch_stats.add_micro(window, START, START)
    with pytest.raises(ValueError, match="another structure"):
        batch_stats.thread(START, {**START, "more": jnp.zeros(1)})
