"""The task that runs without arguments, and the example of the documentation."""

import argparse
import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import optax
import pytest

from boostax.compare.arms import load_arms
from boostax.compare.cli import add_arguments, run
from boostax.compare.digits import default_arms, digits_arms, digits_task
from boostax.compare.measure import run_arm
from boostax.compare.runner import Plan, build_all, compare
from boostax.compare.storage import RunStore
from boostax.compare.task import Task, UsageError, load_task, parse_target

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples"


def plan_of(task, arms, steps):
    return Plan(task, tuple(arms), 1, steps, parse_target(task.target), task.learning_rate, steps)


def test_the_example_has_30_lines_and_runs(tmp_path):
    source = (EXAMPLES / "my_task.py").read_text()
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 30
    task, _ = load_task(f"{EXAMPLES / 'my_task.py'}:task")
    arms = load_arms([str(EXAMPLES / "plain.json"), str(EXAMPLES / "o1.json")])
    runs, builds = compare(plan_of(task, arms, 3), RunStore(tmp_path))
    assert builds["plain"]["enabled"] == []
    assert builds["o1"]["enabled"] == ["grad_freeze", "centralize"]
    assert builds["o1"]["config"]["grad_freeze"]["total_steps"] == 3
    assert all(len(runs[name][0]["loss"]) == 3 for name in ("plain", "o1"))


@pytest.mark.slow
def test_the_example_runs_without_configs(tmp_path):
    task, _ = load_task(f"{EXAMPLES / 'my_task.py'}:task")
    built = build_all(plan_of(task, default_arms(), 4))
    assert list(built) == ["plain", "O1", "accumulation", "centralization", "thor", "dim_reduce"]
    assert built["O1"].config["grad_freeze"]["param_groups"] == 3
    assert any("(scale_by_adam) sets the length" in note for note in built["thor"].notes)
    assert "4 groups of layers were asked for, and the model has layers for 3" in built["O1"].notes
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    line = [f"{EXAMPLES / 'my_task.py'}:task", "--steps", "4", "--seeds", "1"]
    assert run(parser.parse_args([*line, "--out", str(tmp_path)])) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 6
    (left_out,) = (n for n in built["dim_reduce"].notes if n.startswith("dim_reduce is left out"))
    assert "leaves 3 of 4 steps for snapshots" in left_out


@pytest.fixture(scope="module")
def digits():
    task = digits_task()
    return task, build_all(plan_of(task, digits_arms(), 200))


def test_the_digits_have_six_arms(digits):
    task, built = digits
    assert {name: arm.enabled for name, arm in built.items()} == {
        "plain": (),
        "O1": ("grad_freeze", "centralize"),
        "accumulation": ("grad_accumulation",),
        "centralization": ("centralize",),
        "thor": ("thor",),
        "dim_reduce": ("dim_reduce",),
    }
    assert [arm.updates for arm in built.values()] == [200, 200, 100, 200, 200, 150]
    # The task's optimizer does not tell its rate, so that the arm's goes to the KL clip.
    assert built["thor"].config["thor"]["learning_rate"] == task.learning_rate
    kernels = [block.kernel for block in built["thor"].step.settings.layers.blocks]
    assert kernels == ["Conv_0/kernel", "Conv_1/kernel", "Conv_2/kernel", "Dense_0/kernel"]


def test_the_digits_train_and_move_their_batch_statistics(digits):
    task, built = digits
    step = built["plain"].step
    record = run_arm(task, step, seed=1, steps=4, eval_every=4)
    assert record["loss"][-1] < record["loss"][0]
    assert set(record["evaluations"][-1]["metrics"]) == {"accuracy", "loss"}
    params, model_state = task.init(jax.random.key(0))
    state = step.init(params, model_state=model_state)
    state, _ = step(state, next(iter(task.batches(0))))
    mean = state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(mean).max() > 0


def test_without_layers_thor_is_left_out_and_noted():
    def loss(params, batch):
        return ((params["scale"][None] * batch) ** 2).mean()

    task = Task(
        init=lambda key: {"scale": jax.numpy.ones(3)},
        loss=loss,
        batches=lambda seed: itertools.repeat(np.ones((4, 3), np.float32)),
        evaluate=lambda params, model_state: {"loss": params["scale"].sum()},
        optimizer=lambda rate, steps: optax.sgd(rate),
        learning_rate=0.1,
        steps=2,
        target="loss=0",
    )
    thor = default_arms()[-2]
    built = build_all(plan_of(task, [thor], 2))["thor"]
    assert built.enabled == ()
    assert any("thor is left out: capture_layers: the loss has no dense" in n for n in built.notes)
    own = dataclasses.replace(thor, adapts=False)
    with pytest.raises(
        UsageError, match=r"arm 'thor': capture_layers: the loss has no dense layer"
    ):
        build_all(plan_of(task, [own], 2))
