"""The task protocol and the target."""

import numpy as np
import optax
import pytest

from boostax.compare import Target, Task, UsageError
from boostax.compare.task import as_task, load_task, parse_target

PARTS = {
    "init": lambda key: {"w": np.zeros(2)},
    "loss": lambda params, batch: 0.0,
    "batches": lambda seed: iter([]),
    "evaluate": lambda params, model_state: {"loss": 1.0},
    "optimizer": lambda learning_rate, steps: optax.sgd(learning_rate),
    "learning_rate": 0.1,
    "steps": 10,
    "target": "loss=0.1",
}


@pytest.mark.parametrize(
    ("text", "metric", "value", "lower"),
    [
        ("accuracy=0.95", "accuracy", 0.95, False),
        ("accuracy>=0.95", "accuracy", 0.95, False),
        ("loss=0.1", "loss", 0.1, True),
        ("eval_loss = 1e-2", "eval_loss", 0.01, True),
        ("error_rate=0.1", "error_rate", 0.1, True),
        ("glossiness=3", "glossiness", 3.0, False),
        ("score<=-2", "score", -2.0, True),
        ("loss>=2", "loss", 2.0, False),
        ("top 5=0.9", "top 5", 0.9, False),
    ],
)
def test_targets(text, metric, value, lower):
    assert parse_target(text) == Target(metric, value, lower)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "accuracy",
        "accuracy=",
        "=0.9",
        "accuracy=high",
        "accuracy=nan",
        "a=inf",
        "a==1",
        None,
        3,
    ],
)
def test_targets_of_another_form_are_refused(text):
    with pytest.raises(UsageError, match="METRIC=NUMBER"):
        parse_target(text)


def test_a_target_is_met_at_its_value():
    assert Target("a", 0.5).met(0.5)
    assert not Target("a", 0.5).met(0.49)
    assert Target("a", 0.5, lower_is_better=True).met(0.5)
    assert not Target("a", 0.5).met(float("nan"))


def test_a_task_an_object_and_a_function_will_all_do():
    class Mine:
        learning_rate, steps, target = np.float32(0.1), np.int64(10), "accuracy=0.5"

        def init(self, key):
            return {}

        def loss(self, params, batch, *, rng):
            return 0.0

        def batches(self, seed):
            return []

        def evaluate(self, model):
            return {}

        def optimizer(self, learning_rate, steps):
            return optax.sgd(learning_rate)

    assert as_task(Task(**PARTS), "f.py:task").name == "f.py:task"
    assert as_task(Task(**PARTS, name="mine"), "f.py:task").name == "mine"
    assert as_task(lambda: Task(**PARTS), "f.py:make").steps == 10
    assert as_task(Mine, "f.py:Mine").steps == 10
    assert type(as_task(Mine, "f.py:Mine").steps) is int
    assert type(as_task(Task(**{**PARTS, "steps": np.int32(7)}), "f.py:task").steps) is int
    assert not as_task(Mine(), "f.py:mine").has_aux


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": None}, "loss is missing"),
        ({"loss": 3}, "loss must be a function, got int"),
        ({"loss": lambda params: 0}, r"loss must take 2 positional argument\(s\), got \(params\)"),
        ({"init": lambda: 0}, "init must take 1"),
        ({"steps": 0}, "steps must be an int >= 1, got 0"),
        ({"steps": 1.5}, "steps must be an int >= 1, got 1.5"),
        ({"steps": 20.0}, "steps must be an int >= 1, got 20.0"),
        ({"steps": float("inf")}, "steps must be an int >= 1, got inf"),
        ({"steps": float("nan")}, "steps must be an int >= 1, got nan"),
        ({"steps": np.float32(20)}, "steps must be an int >= 1"),
        ({"steps": np.bool_(True)}, "steps must be an int >= 1"),
        ({"learning_rate": True}, "learning_rate must be a number > 0, got True"),
        ({"learning_rate": float("inf")}, "learning_rate must be a number > 0, got inf"),
        ({"steps": True}, "steps must be an int >= 1, got True"),
        ({"steps": "10"}, "steps must be an int >= 1, got '10'"),
        ({"learning_rate": 0}, "learning_rate must be a number > 0, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number > 0, got nan"),
        ({"target": "high"}, "target must be METRIC=NUMBER"),
    ],
)
def test_what_does_not_fit_the_protocol_is_named(change, message):
    with pytest.raises(UsageError, match=message):
        as_task(Task(**{**PARTS, **change}), "f.py:task")


def test_all_faults_come_in_one_message():
    with pytest.raises(
        UsageError, match=r"init is missing; loss is missing.*steps must be.*f|init"
    ):
        as_task(3, "f.py:task")


def test_a_function_with_arguments_is_no_task():
    with pytest.raises(UsageError, match="needs the arguments x"):
        as_task(lambda x: x, "f.py:task")


def test_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses\nimport helper_of_mine\nimport optax\nfrom boostax.compare import Task\n"
        "task = Task(init=lambda key: {}, loss=lambda p, b: 0., batches=lambda s: [],\n"
        "    evaluate=lambda p, m: {}, optimizer=lambda l, s: optax.sgd(l), learning_rate=.1,\n"
        "    steps=helper_of_mine.STEPS, target='a=1')\n"
    )
    (tmp_path / "helper_of_mine.py").write_text("STEPS = 7\n")
    task, source = load_task(f"{path}:task")
    assert (task.steps, task.name, source) == (7, "mine.py:task", path)
    assert load_task(str(path))[0].steps == 7
    with pytest.raises(UsageError, match=r"no attribute 'tsk'. Did you mean 'task'\?"):
        load_task(f"{path}:tsk")
    with pytest.raises(UsageError, match="there is no file"):
        load_task(f"{tmp_path / 'other.py'}:task")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match="not a Python file"):
        load_task(f"{tmp_path / 'x.json'}:task")
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_task(f"{path}:task")
