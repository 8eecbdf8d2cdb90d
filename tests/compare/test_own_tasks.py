"""Arms with tasks of their own: a start, a loss and batches that a config can't tell."""

import argparse
import json
import re

import pytest

from boostax.compare.arms import Arm
from boostax.compare.cli import add_arguments
from boostax.compare.cli import run as run_command
from boostax.compare.runner import Plan, compare
from boostax.compare.storage import RunStore
from boostax.compare.task import UsageError, load_task, own_tasks, parse_target

FILE = """
import itertools
import jax.numpy as jnp, numpy as np, optax
from boostax.compare import Task

COUNT = itertools.count()
loaded = next(COUNT)

def make(start, aim):
    return Task(
        init=lambda key: jnp.float32(start),
        loss=lambda w, batch: jnp.mean((w - aim * batch) ** 2),
        batches=lambda seed: iter([np.ones(4, np.float32)] * 10),
        evaluate=lambda w, model_state: {"far": jnp.abs(w - aim)},
        optimizer=lambda rate, steps: optax.sgd(rate),
        learning_rate=0.5, steps=4, target="far<=0.01")

near, away = make(1.0, 2.0), make(9.0, 3.0)
other_metric = make(0.0, 5.0)
object.__setattr__(other_metric, "evaluate", lambda w, model_state: {"loss": w})
done = make(2.0, 2.0)
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "tasks.py").write_text(FILE)

    def call(own):
        configs = []
        for name, task in {"near": None, "other": own}.items():
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps({"compare": {} if task is None else {"task": task}}))
            configs.append(str(path))
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        line = [f"{tmp_path / 'tasks.py'}:near", "--configs", *configs, "--seeds", "1"]
        return run_command(parser.parse_args([*line, "--out", str(tmp_path / "out"), "--fresh"]))

    return call


def test_each_arm_trains_its_own_task(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(FILE)
    task, _ = load_task(f"{path}:near")
    arms = (Arm("near"), Arm("other", task="away"))
    plan = Plan(
        task, arms, 1, 4, parse_target(task.target), 0.5, 4, own_tasks=own_tasks(["away"], path)
    )
    runs, builds = compare(plan, RunStore(tmp_path / "out"))
    # (1 - 2)^2 and (9 - 3)^2, before the first update.
    assert [runs[name][0]["loss"][0] for name in ("near", "other")] == [1.0, 36.0]
    assert builds["near"]["notes"] == []
    assert any("those of the task 'away'" in note for note in builds["other"]["notes"])
    assert plan.settings(arms[1])["own_task"] == "away"
    assert "own_task" not in plan.settings(arms[0])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("awy", r"compare\.task: .* has no attribute 'awy'\. Did you mean 'away'\?"),
        ("make", r"tasks\.py:make needs the arguments start, aim"),
        ("other_metric", r"evaluate of the task 'other_metric' returns no metric 'far'"),
        ("done", r"met before any training of the task 'done'"),
    ],
)
def test_a_task_that_does_not_fit_is_told(command, capsys, own, words):
    assert command(own) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_file_is_run_once(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(FILE)
    task, _ = load_task(f"{path}:near")
    tasks = own_tasks(["away", None, "away"], path)
    assert set(tasks) == {"away"}
    assert task.init.__globals__ is tasks["away"].init.__globals__


def test_without_a_file_there_are_no_other_tasks():
    assert own_tasks([None], None) == {}
    with pytest.raises(UsageError, match="'joint' is looked for in the TASK's file"):
        own_tasks(["joint"], None)
