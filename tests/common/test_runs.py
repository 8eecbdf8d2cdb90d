"""Common suite: a technique at work, plain and compiled, batched, scanned, donated, in each dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.common import harness
from tests.common.harness import for_rows
from tests.common.settings import ROWS


@pytest.mark.slow  # operation by operation, each compiled by itself
@for_rows("plain", ROWS)
def test_plain(row):
    run = harness.recorded(row)
    # The first and the last step of a cycle: without jit a step takes a second.
    for t in {0, row.cycle - 1}:
        # Eager cond and switch compile anew at each call, so that only one step affords them.
        with jax.disable_jit(run.program.compiled or t < row.cycle - 1):
            carry, out = run.program.step(harness.fresh(run.carries[t]), run.batches[t])
        harness.assert_close(carry, run.carries[t + 1], f"state after step {t}", row.rtol)
        harness.assert_close(out, run.outs[t], f"output of step {t}", row.rtol)


@pytest.mark.quick
@for_rows("jit", ROWS)
def test_jit(row):
    run = harness.recorded(row)
    first, last = (run.program.params(run.carries[i]) for i in (0, -1))
    harness.assert_finite(run.carries[-1], "state")
    harness.assert_finite(run.outs[-1], "output")
    harness.assert_same_avals(run.carries[-1], run.carries[0], "state")
    moved = [
        bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True)
    ]
    assert all(moved), f"parameters that two cycles did not change: {moved}"


@for_rows("vmap", ROWS)
def test_vmap(row):
    run = harness.recorded(row)

    def pair(trees, t):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees[t : t + 2])

    # The lanes are one step apart, so that a window ends in one lane and not in the other.
    step = jax.jit(jax.vmap(run.program.step))
    carry = harness.fresh(pair(run.carries, 0))
    for t in range(row.cycle):
        carry, out = step(carry, pair(run.batches, t))
        harness.assert_close(carry, pair(run.carries, t + 1), f"state after step {t}", row.rtol)
        harness.assert_close(out, pair(run.outs, t), f"output of step {t}", row.rtol)


@for_rows("scan", ROWS)
def test_scan(row):
    run = harness.recorded(row)
    carry, outs = jax.jit(lambda c, b: jax.lax.scan(run.program.step, c, b))(
        run.program.init(), harness.stacked_batches(row)
    )
    harness.assert_close(carry, run.carries[-1], "state after the scan", row.rtol)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *run.outs)
    harness.assert_close(outs, expected, "outputs of the scan", row.rtol)


@for_rows("donated", ROWS)
def test_donated(row):
    run = harness.recorded(row)
    program = harness.build(row, donate=True)
    step = harness.compiled(program, donate_argnums=0)
    carry = first = program.init()
    shards = [s for leaf in jax.tree.leaves(carry) if leaf.size for s in leaf.addressable_shards]
    pointers = [shard.data.unsafe_buffer_pointer() for shard in shards]
    assert len(set(pointers)) == len(pointers), "leaves of a fresh state share a buffer"
    for t, batch in enumerate(run.batches):
        carry, _ = step(carry, batch)
        harness.assert_close(carry, run.carries[t + 1], f"state after step {t}", row.rtol)
    kept = [leaf for leaf in jax.tree.leaves(program.params(first)) if not leaf.is_deleted()]
    assert not kept, "donated parameters were not taken"


@for_rows("dtypes", ROWS)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.slow if dtype == "float16" else ())
        for dtype in harness.DTYPES
    ],
)
def test_dtypes(row, dtype):
    run = harness.recorded(row, dtype)
    floating = {
        leaf.dtype
        for leaf in jax.tree.leaves(run.program.params(run.carries[0]))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert floating == {jnp.dtype(dtype)}
    for t, carry in enumerate(run.carries):
        harness.assert_same_avals(carry, run.carries[0], f"state after {t} steps")
    harness.assert_finite(run.carries[-1], "state")
    if dtype == "float32":
        return
    # From the same start (an initializer may draw other numbers in another dtype).
    wide = harness.recorded(row)
    carry = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), wide.carries[0], run.carries[0])
    for batch in run.batches:
        carry, _ = run.step(carry, batch)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    got, expected = (
        jax.tree.map(lambda leaf: leaf.astype(np.float32), harness.host(run.program.params(c)))
        for c in (carry, wide.carries[-1])
    )
    harness.assert_close(got, expected, "parameters against float32", tolerance, tolerance)


@pytest.mark.quick
@for_rows("no_recompile", ROWS)
def test_no_recompile(row):
    run = harness.recorded(row)
    assert run.cache_size in (1, None), "the state's type changed: jit compiled again"
    later = sum(run.compilations[1:])
    assert later < row.variants, f"compiled {later} programs after the first step"
    # Steps after the two cycles that every row runs may meet variants of their own.
    second = run.compilations[row.cycle : 2 * row.cycle]
    assert not any(second), f"the second cycle compiled {second}"
