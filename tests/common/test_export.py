"""Common suite: every technique's compiled step lowers for CPU, GPU and TPU."""

from __future__ import annotations

import jax
import jax.export

from boostax.training.step import TrainStep
from tests.common import harness
from tests.common.harness import for_rows
from tests.common.settings import ROWS


@for_rows("export", ROWS)
def test_export(row):
    run = harness.recorded(row)
    carry, batch = harness.avals(run.carries[0]), harness.avals(run.batches[0])
    expected = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((run.carries[1], run.outs[0]))]
    assert _exported(jax.jit(run.program.step), carry, batch) == expected
    step = run.program.step
    if isinstance(step, TrainStep) and step.dispatches_on_host:
        # What the user's loop calls: a program of its own for each freeze index.
        carry = step._without_idle_counter(carry, batch)
        for index in range(step.settings.freezing.num_indices):
            got = _exported(step._jitted(index, carry), carry, batch, {})
            # A counter of skipped calls that can't move stays outside of these.
            assert len(expected) - 1 <= len(got) <= len(expected)
            assert not set(got) - set(expected)


def _exported(step, *args):
    exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    return [(a.shape, a.dtype) for a in exported.out_avals]
