"""Common suite: every technique's compiled step lowers for CPU, GPU and TPU."""

from __future__ import annotations

import jax
import jax.export

from tests.common import harness
from tests.common.harness import for_rows
from tests.common.settings import ROWS


@for_rows("export", ROWS)
def test_export(row):
    run = harness.recorded(row)
    step = jax.jit(run.program.step)
    carry, batch = harness.avals(run.carries[0]), harness.avals(run.batches[0])
    exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(carry, batch)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    expected = jax.tree.leaves((run.carries[1], run.outs[0]))
    got = [(a.shape, a.dtype) for a in exported.out_avals]
    assert got == [(leaf.shape, leaf.dtype) for leaf in expected]
