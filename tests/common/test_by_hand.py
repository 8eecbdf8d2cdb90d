"""Common suite: values of the rows' own runs that can be told by hand."""

from __future__ import annotations

import flax.serialization
import jax
import numpy as np
import pytest

import boostax
from tests.common import harness, programs
from tests.common.harness import for_rows
from tests.common.settings import ROWS

FLUSHING = [row for row in ROWS if "flush" in row.covers]
HOLDING = [row for row in ROWS if row.name == "train_step_linen_freeze"]


@pytest.mark.quick
@for_rows("flush", FLUSHING)
def test_flush(row):
    """Windows of three and two by turns: each ends in SGD with momentum on the window's mean."""
    _, grads, updates = harness.driven(row)
    for path, got in jax.tree_util.tree_leaves_with_path(updates):
        stream = np.asarray(_at(grads, path), np.float64)
        expected, momentum = np.zeros_like(stream), np.zeros_like(stream[0])
        for start, end in ((0, 3), (3, 5), (5, 8), (8, 10)):
            momentum = 0.9 * momentum + stream[start:end].mean(0)
            expected[end - 1] = -harness.LEARNING_RATE * momentum
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@for_rows("flush", [row for row in ROWS if row.name.startswith("accumulate_skip")])
def test_flush_after_a_scan_and_after_a_restore(row):
    """The window that a run leaves open, flushed at its end, and again from a saved state."""
    params, grads, _ = harness.driven(row)
    tx = row.make()
    flush = jax.jit(lambda state: boostax.flush(tx, state, params))

    @jax.jit
    def scanned(state):
        def step(state, g):
            return tx.update(g, state, params)[::-1]

        state, _ = jax.lax.scan(step, state, jax.tree.map(lambda g: g[:5], grads))
        return boostax.flush(tx, state, params), state

    (updates, flushed), state = scanned(tx.init(params))
    for path, got in jax.tree_util.tree_leaves_with_path(updates):
        stream = np.asarray(_at(grads, path), np.float64)
        expected = -harness.LEARNING_RATE * (0.9 * stream[:3].mean(0) + stream[3:5].mean(0))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert bool(boostax.has_updated(flushed))
    saved = flax.serialization.to_bytes(harness.host(state))
    restored = flax.serialization.from_bytes(tx.init(params), saved)
    harness.assert_bitwise(flush(restored), flush(state), "flushed after a restore")
    nothing, _ = flush(flushed)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing))


@for_rows("hold", HOLDING)
def test_hold(row):
    """At index 1 the first layer, its norm and the norm's statistics stay; at index 0 they move."""
    run = harness.recorded(row)
    for t in range(row.length):
        before, after = run.carries[t], run.carries[t + 1]
        frozen = programs.LINEN_FREEZING.index_at(t) == 1
        old, new = (
            (
                state.model_state["batch_stats"],
                {name: state.params[name] for name in ("Dense_0", "BatchNorm_0")},
            )
            for state in (before, after)
        )
        if frozen:
            harness.assert_bitwise(new, old, f"frozen part, step {t}")
        else:
            moved = jax.tree.map(lambda a, b: bool((a != b).any()), old, new)
            # The bias ahead of a batch norm has no gradient.
            moved[1]["Dense_0"].pop("bias")
            assert all(jax.tree.leaves(moved)), f"step {t}"
        assert (after.params["Dense_1"]["kernel"] != before.params["Dense_1"]["kernel"]).any()


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree
