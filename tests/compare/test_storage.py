"""Finished runs on disk: whole or not there, and never mixed with those of other settings."""

import json
import math
import os

import numpy as np
import pytest

from boostax.compare.storage import RunStore, check_names, fingerprint, plain_json, slug, write_json
from boostax.compare.task import UsageError

SETTINGS = {"task": "t", "config": {"a": 1}, "steps": 10}


def run_of(arm="plain", seed=0, settings=SETTINGS):
    return {
        "arm": arm,
        "seed": seed,
        "settings": settings,
        "build": {
            "updates": 2, "config": {}, "enabled": [], "notes": ["a"], "learning_rate": 0.1
        },
        "loss": [2.0, None],
        "step_seconds": [0.1, np.float32(0.5)],
        "cpu_seconds": [0.1, 0],
        "compile_seconds": 1.5,
        "compilations": 1,
        "flops_per_step": None,
        "temp_bytes": 10,
        "evaluations": [point(0), point(2, metrics={"accuracy": None})],
    }  # fmt: skip


def point(step, **change):
    return {"step": step, "seconds": 0.5, "cpu_seconds": 1, "metrics": {"accuracy": 0.5}, **change}


def test_plain_json_knows_numpy_and_replaces_what_json_lacks():
    value = {"a": np.float32(0.5), 1: (np.int64(2), math.inf), "b": np.array([1.0, math.nan])}
    assert plain_json(value) == {"a": 0.5, "1": [2, None], "b": [1.0, None]}
    assert plain_json([True, None, "x", 3]) == [True, None, "x", 3]


def test_fingerprints_do_not_depend_on_the_order_of_keys():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_a_run_comes_back(tmp_path):
    store = RunStore(tmp_path / "deep" / "out")
    assert store.load("plain", 0, SETTINGS) is None
    path = store.save(run_of())
    assert path == tmp_path / "deep" / "out" / "runs" / "plain-seed0.json"
    run = RunStore(tmp_path / "deep" / "out").load("plain", 0, SETTINGS)
    assert run is not None
    assert run["step_seconds"] == [0.1, 0.5]
    assert run["format"] == "boostax-compare-run/1"


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_left_temporary_files_are_swept_away(tmp_path):
    store = RunStore(tmp_path)
    left = store.runs / ".plain-seed0.json.123.tmp"
    left.write_text("{")
    assert RunStore(tmp_path).load("plain", 0, SETTINGS) is None
    assert not left.exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "x"}', '{"format": "boostax-compare-run/1"}']
)
def test_a_file_that_is_no_run_is_named(tmp_path, content):
    store = RunStore(tmp_path)
    store.path("plain", 0).write_text(content)
    with pytest.raises(UsageError, match=r"plain-seed0\.json is not a whole run"):
        store.load("plain", 0, SETTINGS)
    if "boostax" not in content:  # then it may be anybody's
        with pytest.raises(UsageError, match=r"--fresh: .*plain-seed0\.json"):
            RunStore(tmp_path, fresh=True)
        assert store.path("plain", 0).read_text() == content


def test_other_settings_are_refused_and_named(tmp_path):
    store = RunStore(tmp_path)
    store.save(run_of())
    with pytest.raises(UsageError, match=r"plain-seed0.json was made.*steps: 10, now 20.*--fresh"):
        store.load("plain", 0, {**SETTINGS, "steps": 20})
    RunStore(tmp_path, fresh=True)
    assert store.load("plain", 0, {**SETTINGS, "steps": 20}) is None


def test_a_file_under_another_runs_name_is_refused(tmp_path):
    store = RunStore(tmp_path)
    store.save(run_of("a b")).rename(store.path("a_b", 0))
    with pytest.raises(UsageError, match="holds the run of arm 'a b'"):
        store.load("a_b", 0, SETTINGS)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out: can't write"):
        RunStore(tmp_path / "file" / "out")


def test_foreign_results_are_not_overwritten(tmp_path):
    (tmp_path / "results.json").write_text('{"mine": 1}')
    with pytest.raises(UsageError, match=r"results\.json is not of boostax compare"):
        RunStore(tmp_path)


def test_names_that_come_to_the_same_letters_have_files_of_their_own(tmp_path):
    names = ["普通", "加速", "a b", "a_b", "a?b", "../../escaped", "/tmp/x", "..", ".", "x" * 400]
    assert slug("plain") == "plain"
    assert slug("a b") == "a_b-c8687a08"
    store = RunStore(tmp_path)
    files = [store.save(run_of(name)) for name in names]
    assert len(set(files)) == len(names)
    assert {f.parent for f in files} == {store.runs}
    for name in names:
        run = store.load(name, 0, SETTINGS)
        assert run is not None
        assert run["arm"] == name
    check_names(names)


def test_arms_that_would_share_a_file_are_refused():
    with pytest.raises(UsageError, match="arms 'O1' and 'o1' would share their files"):
        check_names(["O1", "plain", "o1"])
    with pytest.raises(UsageError, match="arms 'ab' and 'ab'"):
        check_names(["ab", "ab"])


MISSING = object()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("build", MISSING, "build: missing or not an object"),
        ("build", {"updates": 1}, r"build\.config: missing or not an object"),
        ("evaluations", [], "evaluations: missing or not a list with a part in it"),
        ("evaluations", [3], "evaluations: one has no step"),
        ("evaluations", [point("0")], "evaluations: one has no step"),
        ("evaluations", [point(0, metrics={"accuracy": "high"})], "evaluations: one has no step"),
        ("evaluations", [point(2), point(0)], "evaluations: their steps are not in order"),
        ("evaluations", [point(3)], "or not those of the run"),
        ("step_seconds", "x", "step_seconds: missing or not a list of numbers"),
        ("step_seconds", [0.1, None], "step_seconds: missing or not a list of numbers"),
        ("step_seconds", [0.1], "are not of one length"),
        ("loss", MISSING, "loss: missing or not a list of numbers"),
        ("compile_seconds", True, "compile_seconds: missing or not a number"),
        ("flops_per_step", "many", "flops_per_step: missing or not a number or null"),
        ("settings", [], "settings: missing or not an object"),
    ],
)
def test_a_run_with_a_field_missing_or_ill_typed_is_named(tmp_path, key, value, message):
    store = RunStore(tmp_path)
    run = {**run_of(), key: value}
    path = store.path("plain", 0)
    whole = {"format": "boostax-compare-run/1", "fingerprint": fingerprint(SETTINGS), **run}
    write_json(path, {k: v for k, v in whole.items() if v is not MISSING})
    with pytest.raises(UsageError, match=rf"plain-seed0\.json is not a whole run.*{message}"):
        store.load("plain", 0, SETTINGS)
    RunStore(tmp_path, fresh=True)
    assert store.load("plain", 0, SETTINGS) is None


def test_a_truncated_run_is_thrown_away_by_fresh(tmp_path):
    store = RunStore(tmp_path)
    path = store.save(run_of())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="is not a whole run"):
        store.load("plain", 0, SETTINGS)
    RunStore(tmp_path, fresh=True)
    assert not path.exists()


@pytest.mark.parametrize("name", ["report.html", "curves.png", "time_to_target.png"])
def test_files_of_the_report_are_looked_at_before_the_training(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"{name} is not a file"):
        RunStore(tmp_path)
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text("<html>mine</html>")
    with pytest.raises(UsageError, match=f"{name} is not of boostax compare"):
        RunStore(tmp_path)
    assert (tmp_path / name).read_text() == "<html>mine</html>"
    (tmp_path / name).write_text("<html>... boostax compare")
    RunStore(tmp_path)
