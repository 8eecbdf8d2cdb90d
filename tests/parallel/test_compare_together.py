"""``boostax compare`` in two processes: one report, and the numbers of one process."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from boostax.compare.arms import load_arms
from boostax.compare.runner import Plan, compare
from boostax.compare.storage import RunStore
from boostax.compare.task import load_task, parse_target
from tests.compare.test_compare import O1, TASK

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "o1.json").write_text(json.dumps(O1))
    (tmp_path / "sum.json").write_text('{"boost": {"mode": "manual", "adasum": true}}')
    return tmp_path


def launched(folder, *more):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTEST_CURRENT_TEST")}
    command = [sys.executable, "-m", "boostax", "launch", "-n", "2", "--", "compare"]
    command += ["my_task.py", "--configs", "o1.json", "sum.json", "--out", "out", *more]
    return subprocess.run(
        command,
        env={
            **kept,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_two_processes_write_one_report_with_the_numbers_of_one(folder):
    done = launched(folder, "--seeds", "1", "--steps", "4", "--eval-every", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report: ") == 1
    out = folder / "out"
    assert (out / "report.html").stat().st_size > 0
    assert sorted(p.name for p in (out / "runs").iterdir()) == ["o1-seed0.json", "sum-seed0.json"]
    adasum = json.loads((out / "runs" / "sum-seed0.json").read_text())
    together = json.loads((out / "runs" / "o1-seed0.json").read_text())
    task, _ = load_task(str(folder / "my_task.py"))
    plan = Plan(
        task=task,
        arms=tuple(load_arms([str(folder / "o1.json")])),
        seeds=1,
        steps=4,
        target=parse_target(task.target),
        learning_rate=task.learning_rate,
        eval_every=2,
    )
    alone = compare(plan, RunStore(folder / "alone"))[0]["o1"][0]
    np.testing.assert_allclose(together["loss"], alone["loss"], rtol=1e-5)
    assert together["freeze_index"] == alone["freeze_index"]
    for here, there in zip(together["evaluations"], alone["evaluations"], strict=True):
        np.testing.assert_allclose(here["metrics"]["mse"], there["metrics"]["mse"], rtol=1e-5)
    # AdaSum starts at the same parameters, and goes another way.
    assert adasum["build"]["enabled"] == ["adasum"]
    np.testing.assert_allclose(adasum["loss"][0], together["loss"][0], rtol=1e-5)
    assert abs(adasum["loss"][-1] / together["loss"][-1] - 1) > 1e-3
    machine = together["settings"]["machine"]
    assert (machine["processes"], machine["devices"]) == (2, 2)
    assert "processes" not in alone["settings"]["machine"]


def test_wrong_input_ends_both_with_one_reason(folder):
    (folder / "out").mkdir()
    (folder / "out" / "results.json").write_text("{}")
    done = launched(folder)
    assert done.returncode == 2, done.stderr
    assert "is not of boostax compare and would be overwritten" in done.stderr
    assert "Traceback" not in done.stderr
