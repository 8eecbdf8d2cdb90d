"""The example on digits: its tasks, its split of the data, and what it chooses."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from boostax.compare.task import as_task

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples" / "finetune_digits.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # An untrained network in place of the pretrained one: the same shapes, and nothing to wait for.
    module.pretrained = lambda network=0: module.fresh(jax.random.key(network))
    return module


def test_the_tasks_are_tasks(example):
    for name in ("scratch", "alone", "joint", "joint_random"):
        task = as_task(getattr(example, name), name)
        params, model_state = task.init(jax.random.key(0))
        batch = next(iter(task.batches(0)))
        if "joint" in name:
            assert set(batch) == {"source", "target"}
        loss, aux = jax.eval_shape(
            lambda p, b, m, task=task: task.loss(p, b, model_state=m), params, batch, model_state
        )
        assert loss.shape == ()
        assert jax.tree.structure(aux.model_state) == jax.tree.structure(model_state)


def test_the_few_labelled_images(example):
    rows = example.labelled(3, 5)
    np.testing.assert_array_equal(np.bincount(example.labels[rows]), [5] * 5)
    assert not set(rows) & set(example.test)
    assert set(rows) <= set(example.pool)


def test_the_chosen_source_images(example):
    chosen = example.nearest(example.labelled(0, 5))
    assert set(chosen) <= set(example.source)
    assert len(set(chosen)) == len(chosen)
    assert example.NEIGHBOURS <= len(chosen) <= 25 * example.NEIGHBOURS


def test_batches_repeat_with_the_seed_and_pass_over_all(example):
    rows = example.labelled(0, 5)
    first, again = (next(example.draw_batches(rows, 7, size=25)) for _ in range(2))
    np.testing.assert_array_equal(first["x"], again["x"])
    np.testing.assert_array_equal(np.bincount(first["y"]), [5] * 5)
