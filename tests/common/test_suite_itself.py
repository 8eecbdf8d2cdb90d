"""The common suite notices what it is there to notice: rows with one fault each must fail."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import boostax
from tests.common import (
    harness,
    settings,
    test_devices,
    test_export,
    test_resume,
    test_runs,
    test_table,
    test_transforms,
)
from tests.common.harness import Program, Row
from tests.models import plain


def _row(init, update, **fields):
    return Row(
        name="broken",
        covers=("broken",),
        seam="update",
        cycle=2,
        transform=lambda learning_rate: optax.GradientTransformationExtraArgs(init, update),
        **fields,
    )


def _sgd(grads):
    return jax.tree.map(lambda g: -0.1 * g, grads)


SOUND = _row(
    lambda params: (jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)),
    lambda grads, state, params=None, **extra: (_sgd(grads), (state[0] + 1, grads)),
)


@pytest.mark.quick
def test_a_sound_row_passes(tmp_path):
    test_runs.test_plain(SOUND)
    test_runs.test_jit(SOUND)
    test_runs.test_no_recompile(SOUND)
    test_runs.test_donated(SOUND)
    test_resume.test_resume_flax(SOUND)
    test_resume.test_resume_orbax(SOUND, tmp_path)
    test_export.test_export(SOUND)
    test_transforms.test_unknown_extra_args(SOUND)
    test_transforms.test_abstract_init(SOUND)


@pytest.mark.quick
def test_a_state_that_changes_its_dtype_fails():
    row = _row(
        lambda params: jnp.zeros((), jnp.int32),
        lambda grads, state, params=None, **extra: (_sgd(grads), state + 1.0),
    )
    with pytest.raises(AssertionError, match=r"state: .* was int32"):
        test_runs.test_jit(row)
    with pytest.raises(AssertionError, match="compiled again"):
        test_runs.test_no_recompile(row)


def test_an_update_that_refuses_unknown_arguments_fails():
    row = _row(lambda params: (), lambda grads, state, params=None: (_sgd(grads), state))
    with pytest.raises(TypeError, match="nobody_knows_this"):
        test_transforms.test_unknown_extra_args(row)


def test_a_state_that_holds_the_parameters_own_buffers_fails():
    row = _row(
        lambda params: params,
        lambda grads, state, params=None, **extra: (_sgd(grads), state),
    )
    with pytest.raises(AssertionError, match="share a buffer"):
        test_runs.test_donated(row)


def test_memory_outside_the_state_fails_to_resume():
    counter = itertools.count()
    step = jax.jit(lambda params, x: (jax.tree.map(lambda p: p - x, params), x))
    row = Row(
        name="broken",
        covers=("broken",),
        seam="all",
        cycle=2,
        program=lambda dtype, donate: Program(
            init=lambda: plain.init(dtype),
            step=lambda carry, batch: step(carry, float(next(counter))),
            params=lambda carry: carry,
            compiled=True,
        ),
    )
    with pytest.raises(AssertionError, match="differs"):
        test_resume.test_resume_flax(row)


def test_an_update_of_one_device_only_fails():
    def update(grads, state, params=None, **extra):
        moved = jax.tree.map(lambda g: g + jax.lax.axis_index("data").astype(g.dtype), grads)
        return _sgd(moved), state

    row = _row(lambda params: (), update)
    harness.driven.cache_clear()
    with pytest.raises((AssertionError, NameError, ValueError)):
        test_devices.test_shard_map(row, 2)


def test_a_step_that_only_runs_on_cpu_fails_to_lower():
    def update(grads, state, params=None, **extra):
        kernel = grads["layers_1"]["kernel"]
        return jax.tree.map(lambda g: g * jnp.abs(jnp.linalg.eigvals(kernel)[0]), grads), state

    with pytest.raises(NotImplementedError, match="tpu"):
        test_export.test_export(_row(lambda params: (), update))


@pytest.mark.quick
def test_a_technique_that_is_missing_from_the_table_fails(monkeypatch):
    monkeypatch.setattr(boostax, "__all__", [*boostax.__all__, "quicken"])
    with pytest.raises(AssertionError, match="quicken"):
        test_table.test_every_public_name_is_a_row_or_not_a_technique()


@pytest.mark.parametrize("reason", ["", "n/a", "todo: write this down before we ship it", None])
def test_a_check_left_out_without_a_reason_fails(monkeypatch, reason):
    row = _row(
        SOUND.transform(0.1).init, SOUND.transform(0.1).update, does_not_apply={"vmap": reason}
    )
    monkeypatch.setattr(settings, "ROWS", (row,))
    with pytest.raises(AssertionError, match="broken, vmap"):
        test_table.test_row_is_complete(row)


def test_a_check_that_does_not_exist_fails():
    row = _row(
        SOUND.transform(0.1).init,
        SOUND.transform(0.1).update,
        does_not_apply={"vmpa": "this technique has nothing that a batch axis could change"},
    )
    with pytest.raises(AssertionError, match="vmpa"):
        test_table.test_row_is_complete(row)
