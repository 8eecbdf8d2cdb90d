"""The whole command on a tiny task: files, taking up again, compilations, wrong input."""

import argparse
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto.event_pb2 import Event

from boostax.compare import Task, UsageError
from boostax.compare.arms import Arm, build_arm, load_arms
from boostax.compare.cli import add_arguments, run
from boostax.compare.measure import run_arm, split_compile_time
from boostax.compare.report import rows
from boostax.compare.results import summarise
from boostax.compare.runner import Plan, compare, run_order
from boostax.compare.storage import RunStore
from boostax.compare.task import parse_target
from boostax.compare.tensorboard import write_events

TASK = """
import jax, jax.numpy as jnp, numpy as np, optax
from boostax.compare import Task

X = np.random.RandomState(0).normal(size=(64, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32)

def init(key):
    a, b = jax.random.split(key)
    return {"layer_0": {"kernel": 0.5 * jax.random.normal(a, (3, 4))},
            "layer_1": {"kernel": 0.5 * jax.random.normal(b, (4, 1))}}

def error(params, x, y):
    return jnp.mean((x @ params["layer_0"]["kernel"] @ params["layer_1"]["kernel"] - y) ** 2)

def batches(seed):
    for chosen in np.random.RandomState(seed).randint(0, 64, size=(1000, 8)):
        yield X[chosen], Y[chosen]

task = Task(init=init, loss=lambda params, batch: error(params, *batch), batches=batches,
    evaluate=lambda params, model_state: {"mse": error(params, X, Y)},
    optimizer=lambda learning_rate, steps: optax.sgd(optax.cosine_decay_schedule(learning_rate, steps)),
    learning_rate=0.1, steps=12, target="mse=0.5")
"""
PLAIN, O1 = (
    {},
    {"compare": {"level": "O1"}, "grad_freeze": {"param_groups": 2, "full_fraction": 0.5}},
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "plain.json").write_text(json.dumps(PLAIN))
    (tmp_path / "o1.json").write_text(json.dumps(O1))
    return tmp_path


@pytest.fixture
def no_plots(monkeypatch):
    from boostax.compare import report

    images = {"curves.png": b"", "time_to_target.png": b""}
    monkeypatch.setattr(report, "plot_all", lambda results, runs: images)


def command(folder, *more, task="my_task.py:task", configs=("plain.json", "o1.json")):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    line = [str(folder / task), "--configs", *(str(folder / c) for c in configs)]
    return run(parser.parse_args([*line, "--out", str(folder / "out"), *more]))


def test_the_command_writes_a_report_that_stands_alone(folder, capsys):
    assert command(folder, "--seeds", "5", "--target", "mse=0.6") == 0
    out = folder / "out"
    told = capsys.readouterr().out
    assert "Time to mse <= 0.6, 5 paired seeds" in told
    assert "o1: " in told
    page = (out / "report.html").read_text()
    assert all(link.startswith("data:") for link in re.findall(r'(?:src|href)="([^"]*)', page))
    assert "http" not in page
    assert "@import" not in page
    assert page.count("data:image/png;base64,") == 2
    for fact in ("jax", "cores", "mse &lt;= 0.6", "full_fraction"):
        assert fact in page
    for name in ("curves.png", "time_to_target.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    RunStore(out)  # knows its own files again
    results = json.loads((out / "results.json").read_text())
    assert results["format"] == "boostax-compare/1"
    assert results["target"] == {
        "text": "mse <= 0.6", "metric": "mse", "value": 0.6, "lower_is_better": True
    }  # fmt: skip
    plain, boosted = results["arms"]
    assert (plain["name"], plain["verdict"], plain["seconds_ratio"]["median"]) == (
        "plain", "the plain arm", 1.0
    )  # fmt: skip
    assert boosted["enabled"] == ["grad_freeze", "centralize"]
    assert boosted["config"]["grad_freeze"]["total_steps"] == 12
    assert boosted["flops_per_step"] < plain["flops_per_step"] * 1.5
    assert len(results["runs"]) == 10
    assert {len(r["evaluations"]) for r in results["runs"]} == {13}


def test_a_second_start_takes_finished_runs_up(folder, capsys, no_plots):
    assert command(folder, "--seeds", "1") == 0
    files = {p.name: p.read_bytes() for p in (folder / "out" / "runs").iterdir()}
    assert sorted(files) == ["o1-seed0.json", "plain-seed0.json"]
    capsys.readouterr()
    assert command(folder, "--seeds", "2") == 0
    assert "2 of 4 runs are there already" in capsys.readouterr().out
    for name, content in files.items():
        assert (folder / "out" / "runs" / name).read_bytes() == content
    results = json.loads((folder / "out" / "results.json").read_text())
    assert [a["verdict"] for a in results["arms"]] == ["the plain arm", "not enough seeds to tell"]
    assert command(folder, "--seeds", "1", "--steps", "13") == 2
    assert "steps: 12, now 13" in capsys.readouterr().err
    assert command(folder, "--seeds", "1", "--steps", "13", "--fresh") == 0
    assert len(list((folder / "out" / "runs").iterdir())) == 2


def test_an_interruption_loses_only_the_run_in_progress(folder, capsys, no_plots, monkeypatch):
    from boostax.compare import runner

    real, made = runner.run_arm, []

    def interrupted_at_the_third(*args, progress, **settings):
        def stop(step, steps, loss, metrics):
            if len(made) == 2 and step == 6:
                raise KeyboardInterrupt
            progress(step, steps, loss, metrics)

        record = real(*args, progress=stop, **settings)
        made.append(record)
        return record

    monkeypatch.setattr(runner, "run_arm", interrupted_at_the_third)
    assert command(folder, "--seeds", "2") == 130
    assert "interrupted; 2 of 4 runs are kept" in capsys.readouterr().err
    assert len(list((folder / "out" / "runs").iterdir())) == 2
    monkeypatch.setattr(runner, "run_arm", real)
    assert command(folder, "--seeds", "2") == 0
    assert "2 of 4 runs are there already" in capsys.readouterr().out


def test_an_interruption_before_the_count_names_no_number(folder, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunStore, "load", interrupted)
    assert command(folder, "--seeds", "2") == 130
    told = capsys.readouterr().err
    assert "interrupted; the finished runs are kept in" in told
    assert "0 of 0" not in told


def test_the_command_alone_ends_cleanly_too(folder, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("boostax.compare.arms.load_arms", interrupted)
    assert command(folder) == 130
    assert capsys.readouterr().err == "\nboostax: interrupted\n"


@pytest.mark.parametrize("place", ["report.html", "tensorboard"])
def test_places_that_are_taken_are_told_before_the_training(folder, capsys, monkeypatch, place):
    monkeypatch.setattr("boostax.compare.runner.run_arm", None)
    (folder / "out").mkdir()
    if place == "tensorboard":
        (folder / "out" / place).write_text("")
    else:
        (folder / "out" / place).mkdir()
    assert command(folder, "--seeds", "1", "--tensorboard") == 2
    assert place in capsys.readouterr().err


def test_a_metric_that_is_never_finite_is_said_to_be_so(tmp_path):
    plan = Plan(tiny_task(), (Arm("plain"),), 1, 60, parse_target("mse<=1e-3"), 1e6, 20)
    runs, builds = compare(plan, RunStore(tmp_path))
    results = summarise(plan, runs, builds, "")
    assert results["arms"][0]["final"]["mse"]["not_finite"] == 1
    assert "not finite" in rows(results)[0]


def test_a_fault_in_the_users_code_keeps_its_traceback(folder):
    (folder / "my_task.py").write_text(TASK.replace("X[chosen], Y[chosen]", "1 / 0"))
    with pytest.raises(ZeroDivisionError):
        command(folder, "--seeds", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "no.py:task"}, "there is no file"),
        ({"task": "my_task.py:taks"}, "Did you mean 'task'"),
        ({"task": "my_task.py:X"}, "is not a task: init is missing"),
        ({"configs": ("plain.json", "no.json")}, "can't read"),
        ({"configs": ("my_task.py",)}, "broken JSON"),
        ({"configs": ("plain.json", "plain.json")}, "two arms are called 'plain'"),
        ({"more": ("--target", "0.9")}, "--target: target must be METRIC=NUMBER"),
        ({"more": ("--target", "msee=0.1")}, "no metric 'msee'. Did you mean 'mse'?"),
        ({"more": ("--target", "mse=1e9")}, "met before any training"),
        ({"more": ("--seeds", "0")}, "--seeds must be an integer >= 1, got '0'"),
        ({"more": ("--seeds", "2.5")}, "--seeds must be an integer >= 1"),
        ({"more": ("--steps", "-1")}, "--steps must be an integer >= 1"),
        ({"more": ("--steps", "2000")}, "batches(0) ended after 1000 of 2000 batches"),
        ({"more": ("--eval-every", "x")}, "--eval-every must be"),
        ({"more": ("--learning-rate", "nan")}, "--learning-rate must be a finite number > 0"),
        ({"more": ("--levels", "O0", "O1", "O2")}, "got 3 levels for 2 configs"),
        ({"more": ("--levels", "O7")}, "--levels: got 'O7'"),
        ({"more": ("--out", "/dev/null/x")}, "can't write to the folder"),
    ],
)
def test_wrong_input_exits_with_2_and_the_message(folder, capsys, arguments, message):
    more = arguments.pop("more", ())
    assert command(folder, "--seeds", "1", *more, **arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"boost": {"grad_freze": True}}, "boost.grad_freze"),
        ({"compare": {"levl": "O1"}}, "Did you mean 'level'?"),
        ({"compare": {"learning_rate": "0.1"}}, "compare.learning_rate: got"),
        ({"compare": {"level": "O1"}, "grad_freeze": {"param_groups": 9}}, "arm 'bad'"),
    ],
)
def test_a_config_that_does_not_fit_is_named(folder, capsys, config, message):
    (folder / "bad.json").write_text(json.dumps(config))
    assert command(folder, "--seeds", "1", configs=("plain.json", "bad.json")) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_a_missing_extra_is_named_before_the_training(folder, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert command(folder) == 2
    assert f"{package!r}, which is not installed" in (told := capsys.readouterr().err)
    assert "boostax[demo]" in told
    assert not (folder / "out").exists()


def test_tensorboard_runs_hold_the_curves(tmp_path):
    run = {
        "seed": 3,
        "loss": [2.0, 1.0],
        "step_seconds": [0.5, 0.25],
        "evaluations": [{"step": 2, "metrics": {"accuracy": 0.75}}],
    }
    for _ in range(2):  # the second call replaces what the first wrote
        write_events(tmp_path, {"plain": [run]})
    (events,) = (tmp_path / "plain" / "seed-3").iterdir()
    found = []
    for record in record_loader(events):
        for value in record.summary.value:
            found.append((value.tag, record.step, value.simple_value))
    assert sorted(found) == [
        ("eval/accuracy", 2, 0.75),
        ("loss", 1, 2.0),
        ("loss", 2, 1.0),
        ("seconds", 1, 0.5),
        ("seconds", 2, 0.75),
    ]


@pytest.mark.parametrize("name", ["../../escaped", "{parent}/absolute", ".."])
def test_no_arm_name_leads_tensorboard_runs_out_of_the_folder(tmp_path, name):
    run = {"seed": 0, "loss": [1.0], "step_seconds": [0.5], "evaluations": []}
    name = name.format(parent=tmp_path)
    folder = tmp_path / "out" / "tensorboard"
    write_events(folder, {name: [run]})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tensorboard"]
    assert len(list(folder.glob("*/seed-0/events.out.tfevents.*"))) == 1


def test_arms_whose_names_are_not_ascii_keep_their_runs_apart(folder, no_plots):
    for name in ("普通", "加速"):
        (folder / f"{name}.json").write_text("{}", encoding="utf-8")
    assert command(folder, "--seeds", "1", configs=("普通.json", "加速.json")) == 0
    assert len(list((folder / "out" / "runs").iterdir())) == 2
    assert command(folder, "--seeds", "1", configs=("普通.json", "加速.json")) == 0


def record_loader(path):
    """Read an event file: each record is its length, a checksum, the data and a checksum."""
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_a_missing_tensorboard_extra_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert command(folder, "--tensorboard") == 2
    assert "boostax[tensorboard]" in capsys.readouterr().err


def test_levels_of_the_command_line_win(folder):
    paths = [str(folder / "plain.json"), str(folder / "o1.json")]
    assert [a.level for a in load_arms(paths)] == ["O0", "O1"]
    assert [a.level for a in load_arms(paths, ["O2"])] == ["O2", "O2"]
    assert [a.level for a in load_arms(paths, ["O1", "O0"])] == ["O1", "O0"]


def test_arms_take_turns():
    assert [arm for _, arm in run_order("abc", 3)] == list("abcbcacab")


def tiny_task(**change):
    x = np.eye(2, dtype=np.float32)
    parts = {
        "init": lambda key: {"w": jax.random.normal(key, (2, 2))},
        "loss": lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        "batches": lambda seed: iter([x] * 100),
        "evaluate": lambda params, model_state: {"mse": jnp.mean((x @ params["w"]) ** 2)},
        "optimizer": lambda learning_rate, steps: optax.sgd(learning_rate),
        "learning_rate": 0.5,
        "steps": 8,
        "target": "mse=0.01",
        "name": "tiny",
    }
    return Task(**{**parts, **change})


def test_an_arm_compiles_once_for_all_seeds_and_runs_are_paired(tmp_path):
    budgets = []

    def optimizer(learning_rate, steps):
        budgets.append(steps)
        return optax.sgd(learning_rate)

    windows = {
        "boost": {"mode": "manual", "grad_accumulation": True},
        "grad_accumulation": {"every": 3},
    }
    arms = (Arm("plain"), Arm("faster", learning_rate=0.9), Arm("window", windows))
    plan = Plan(tiny_task(optimizer=optimizer), arms, 3, 8, parse_target("mse=0.01"), 0.5, 4)
    runs, builds = compare(plan, RunStore(tmp_path))
    for records in runs.values():
        assert [r["compilations"] for r in records] == [1, 0, 0]
        assert [r["compile_seconds"] > 0 for r in records] == [True, False, False]
        assert [len(r["step_seconds"]) for r in records] == [8, 8, 8]
        assert [[e["step"] for e in r["evaluations"]] for r in records] == [[0, 4, 8]] * 3
    starts = {n: [r["evaluations"][0]["metrics"]["mse"] for r in rs] for n, rs in runs.items()}
    assert starts["plain"] == starts["faster"] == starts["window"]
    assert len(set(starts["plain"])) == 3
    assert runs["faster"][0]["loss"][-1] < runs["plain"][0]["loss"][-1]
    # The window's schedules end at its own number of updates.
    assert (builds["plain"]["updates"], builds["window"]["updates"]) == (8, 2)
    assert set(budgets) == {8, 2}
    assert builds["window"]["notes"] == ["the last 2 batches do not fill a window of 3"]
    assert runs["window"][0]["updates"] == 2
    # The loss is that of the parameters before the step: w0**2, then (0.75 w0)**2 and so on.
    plain = runs["plain"][0]["loss"]
    np.testing.assert_allclose(plain[1] / plain[0], 0.75**2, rtol=1e-5)
    results = summarise(plan, runs, builds, "boostax compare")
    assert results["arms"][0]["flops_ratio"] == 1.0
    assert results["arms"][0]["cpu_seconds_ratio"]["median"] in (1.0, None)


def test_a_freeze_schedule_of_another_length_is_noted(tmp_path):
    config = {
        "boost": {"mode": "manual", "grad_freeze": True},
        "grad_freeze": {"param_groups": 1, "total_steps": 99},
    }
    plan = Plan(
        tiny_task(), (Arm("plain"), Arm("o1", config)), 1, 2, parse_target("mse=1e-9"), 0.1, 1
    )
    _, builds = compare(plan, RunStore(tmp_path))
    assert any("ends after 99 updates, its budget after 2" in n for n in builds["o1"]["notes"])


def build(config, *, steps=20, task=None, **arm):
    task = task or tiny_task()
    return build_arm(
        Arm("arm", config, **arm),
        task,
        steps=steps,
        rate=0.1,
        model=task.init(jax.random.key(0)),
        model_state=None,
        batch=next(iter(task.batches(0))),
    )


ADASUM = {"boost": {"mode": "manual", "adasum": True}}


def test_an_arm_with_adasum_runs_on_all_devices_and_says_so(tmp_path):
    x = np.tile(np.eye(2, dtype=np.float32), (4, 1))
    task = tiny_task(batches=lambda seed: iter([x] * 100))
    arms = (Arm("plain"), Arm("adasum", ADASUM))
    plan = Plan(task, arms, 1, 2, parse_target("mse=1e-9"), 0.1, 1)
    runs, builds = compare(plan, RunStore(tmp_path))
    assert builds["adasum"]["enabled"] == ["adasum"]
    assert builds["adasum"]["notes"] == [
        "adasum: one group of 8 devices, combined by AdaSum over 'device'",
        "its batch is split over 8 devices, and its FLOPs and memory are those of one; an arm "
        "without adasum runs on one device",
    ]
    assert builds["plain"]["notes"] == []
    # A device sees one of two rows, each of which has the gradient of its own: they are added.
    losses = {name: records[0]["loss"] for name, records in runs.items()}
    assert losses["adasum"][0] == pytest.approx(losses["plain"][0])
    assert losses["adasum"][1] < losses["plain"][1]


def test_a_batch_that_the_devices_cannot_share_is_refused():
    with pytest.raises(UsageError, match="arm 'arm': batch: 2 examples can't be split over 8 dev"):
        build(ADASUM)
    own = {**ADASUM, "adasum": {"axis_name": "data"}}
    with pytest.raises(UsageError, match="axes of a mesh of your own"):
        build(own)


def test_the_rate_of_a_named_optimizer_is_the_configs():
    assert build({}).learning_rate == 0.1
    assert build({}, learning_rate=0.3).learning_rate == 0.1  # the plan's rate is what counts
    assert build({"optimizer": {"name": "sgd", "learning_rate": 0.2}}).learning_rate == 0.2
    assert build({"optimizer": {"name": "prodigy"}}).learning_rate == "by its config"
    schedule = {"name": "cosine_decay_schedule", "init_value": 0.1, "decay_steps": 99}
    arm = build({"optimizer": {"name": "sgd", "learning_rate": schedule}})
    assert arm.learning_rate == "by its config (cosine_decay_schedule)"
    assert arm.notes[-1] == (
        "its schedule cosine_decay_schedule has decay_steps = 99, its budget 20 updates"
    )
    schedule["decay_steps"] = 20
    arm = build({"optimizer": {"name": "sgd", "learning_rate": schedule}})
    assert not any("decay_steps" in note for note in arm.notes)
    joined = {"name": "join_schedules", "boundaries": [5], "schedules": [
        {"name": "linear_schedule", "init_value": 0.0, "end_value": 1.0, "transition_steps": 5},
        {"name": "exponential_decay", "init_value": 1.0, "transition_steps": 3, "decay_rate": 0.5},
    ]}  # fmt: skip
    arm = build({"optimizer": {"name": "sgd", "learning_rate": joined}})
    assert [n for n in arm.notes if "schedule" in n] == [
        "its schedule linear_schedule has transition_steps = 5, its budget 20 updates"
    ]


def test_a_rate_beside_a_named_optimizer_is_refused():
    config = {"optimizer": {"name": "sgd", "learning_rate": 0.2}}
    with pytest.raises(UsageError, match=r"compare\.learning_rate = 0\.3 would do nothing"):
        build(config, learning_rate=0.3)


def test_the_report_shows_the_rate_that_was_used(folder, no_plots):
    config = {"optimizer": {"name": "sgd", "learning_rate": 0.2}}
    (folder / "sgd.json").write_text(json.dumps(config))
    assert command(folder, "--seeds", "1", configs=("plain.json", "sgd.json")) == 0
    results = json.loads((folder / "out" / "results.json").read_text())
    assert [arm["learning_rate"] for arm in results["arms"]] == [0.1, 0.2]
    assert "learning rate 0.2, 12 updates" in (folder / "out" / "report.html").read_text()


def window(every):
    return {
        "boost": {"mode": "manual", "grad_accumulation": True},
        "grad_accumulation": {"every": every},
    }


def test_updates_are_counted_as_they_happen():
    with pytest.raises(UsageError, match="window is longer than the budget of 20 steps"):
        build(window(50))
    assert build(window(20)).updates == 1
    assert (build(window(6)).updates, build(window(6)).notes) == (
        3,
        ("the last 2 batches do not fill a window of 6",),
    )
    # Windows of 1, 2, 3, 4 and 5 batches: 15 in 5 updates, and the sixth is not full.
    growing = build(window(lambda updates: updates + 1))
    assert (growing.updates, growing.notes) == (5, ("the last 5 batches do not fill a window",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (window(2), "its line search needs the loss of the whole window"),
        ({"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": {"param_groups": 1}},
         "the curvature pairs of L-BFGS"),
    ],
)  # fmt: skip
def test_a_tasks_optimizer_is_checked_beneath_its_injected_rate(config, message):
    task = tiny_task(optimizer=lambda learning_rate, steps: optax.lbfgs(learning_rate))
    assert build({}, task=task).updates == 20
    with pytest.raises(UsageError, match=message):
        build(config, task=task)


def test_groups_are_lowered_only_where_the_user_asked_for_none():
    config = {
        "boost": {"mode": "manual", "grad_freeze": True},
        "grad_freeze": {"param_groups": 4, "full_fraction": 0.5},
    }
    with pytest.raises(UsageError, match="only 1 layers"):
        build(config)
    arm = build(config, adapts=True)
    assert arm.config["grad_freeze"]["param_groups"] == 1
    assert config["grad_freeze"]["param_groups"] == 4
    assert arm.notes[-2:] == (
        "4 groups of layers were asked for, and the model has layers for 1",
        "with one group nothing is ever frozen",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": lambda key: (1, 2, 3)}, "got a tuple of 3"),
        ({"evaluate": lambda p, m: [1.0]}, "evaluate must return a dict"),
        ({"evaluate": lambda p, m: {"mse": np.ones(3)}}, "evaluate must return scalars, got 'mse'"),
        ({"evaluate": lambda p, m: {"mse": "low"}}, "evaluate must return scalars"),
        ({"optimizer": lambda learning_rate, steps: None}, "must return an optax transformation"),
        ({"batches": lambda seed: []}, "ended after 0 of 1 batches"),
        ({"batches": lambda seed: 3}, "must return an iterable"),
    ],
)
def test_a_task_that_breaks_the_protocol_is_named(tmp_path, change, message):
    plan = Plan(tiny_task(**change), (Arm("plain"),), 1, 2, parse_target("mse=1e-9"), 0.1, 1)
    with pytest.raises(UsageError, match=message):
        compare(plan, RunStore(tmp_path))


def test_an_nnx_model_is_a_task_too(tmp_path):
    from flax import nnx

    x = np.ones((4, 2), np.float32)
    task = tiny_task(
        init=lambda key: nnx.Sequential(
            nnx.Linear(2, 3, rngs=nnx.Rngs(key)), nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        ),
        loss=lambda model, batch: jnp.mean((model(batch) - 1) ** 2),
        batches=lambda seed: [x] * 9,
        evaluate=lambda model: {"mse": jnp.mean(model(x) ** 2)},
    )
    plan = Plan(task, (Arm("plain"),), 2, 3, parse_target("mse>=99"), 0.1, 1)
    runs, _ = compare(plan, RunStore(tmp_path))
    assert [r["compilations"] for r in runs["plain"]] == [1, 0]


def test_a_diverged_run_is_kept_and_does_not_reach_the_target(tmp_path):
    plan = Plan(tiny_task(), (Arm("plain"),), 1, 60, parse_target("mse<=1e-3"), 1e6, 20)
    runs, builds = compare(plan, RunStore(tmp_path))
    assert runs["plain"][0]["loss"][-1] is None
    results = summarise(plan, runs, builds, "")
    assert results["arms"][0]["reached"] == 0
    assert results["arms"][0]["seconds_to_target"]["median"] is None


def test_compile_time_is_what_a_compiling_call_takes_beyond_a_usual_one():
    times, compiled, indices = [9.0, 1.0, 3.0, 5.0, 2.0], [1, 0, 0, 1, 0], [0, 0, 0, 1, 1]
    assert split_compile_time(times, compiled, indices) == ([2.0, 1.0, 3.0, 2.0, 2.0], 10.0)
    assert split_compile_time([4.0], [True], [0]) == ([0.0], 4.0)


def test_evaluation_and_data_are_not_in_the_step_time():
    import time

    import boostax

    def slow(values):
        for value in values:
            time.sleep(0.02)
            yield value

    def evaluate(params, model_state):
        time.sleep(0.02)
        return {"mse": 1.0}

    x = np.eye(2, dtype=np.float32)
    task = tiny_task(batches=lambda seed: slow([x] * 9), evaluate=evaluate)
    step = boostax.train_step(task.loss, optax.sgd(0.1))
    record = run_arm(task, step, seed=0, steps=5, eval_every=1)
    assert min(record["step_seconds"]) < 0.02
    assert record["evaluations"][-1]["seconds"] == pytest.approx(sum(record["step_seconds"]))
