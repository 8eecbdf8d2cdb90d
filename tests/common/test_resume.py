"""Common suite: a run that is broken off after every step is bitwise the unbroken run."""

from __future__ import annotations

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import boostax
from tests.common import harness
from tests.common.harness import for_rows
from tests.common.settings import ROWS


@for_rows("resume_orbax", ROWS)
def test_resume_orbax(row, tmp_path):
    run = harness.recorded(row)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, run.program.init())
    with ocp.StandardCheckpointer() as checkpointer:
        carry = run.program.init()
        for t, batch in enumerate(run.batches):
            path = tmp_path / str(t)
            checkpointer.save(path, carry)
            checkpointer.wait_until_finished()
            carry = checkpointer.restore(path, target)
            harness.assert_bitwise(carry, run.carries[t], f"state restored after {t} steps")
            carry, out = run.step(carry, batch)
            harness.assert_bitwise(out, run.outs[t], f"output of step {t} after the restore")
            harness.assert_bitwise(carry, run.carries[t + 1], f"state after step {t}")


@pytest.mark.quick
@for_rows("resume_flax", ROWS)
def test_resume_flax(row):
    run = harness.recorded(row)
    for start in range(row.length):
        saved = flax.serialization.to_bytes(harness.fresh(run.carries[start]))
        carry = flax.serialization.from_bytes(run.program.init(), saved)
        harness.assert_bitwise(carry, run.carries[start], f"state restored after {start} steps")
        for t in range(start, row.length):
            carry, out = run.step(carry, run.batches[t])
            harness.assert_bitwise(out, run.outs[t], f"output of step {t}, restored at {start}")
        harness.assert_bitwise(carry, run.carries[-1], f"last state, restored at {start}")


def test_a_saved_nnx_state_of_another_model_is_refused():
    def state(**layers):
        model = nnx.Dict(**{k: nnx.Linear(2, n, rngs=nnx.Rngs(0)) for k, n in layers.items()})
        step = boostax.train_step(lambda model, x: jnp.sum(model["a"](x)), optax.sgd(0.1, 0.9))
        return step.init(model)

    saved = flax.serialization.to_bytes(state(a=3, b=3))
    with pytest.raises(ValueError, match=r"does not fit the model: missing .*, unknown .*b/bias"):
        flax.serialization.from_bytes(state(a=3), saved)
