"""The command line: exit codes, messages without tracebacks, and clean ends."""

import errno
import json
import os
import subprocess
import sys

import pytest

import boostax
from boostax import cli


@pytest.fixture
def config(tmp_path):
    def write(content, name="config.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_validate(config, capsys):
    path = config({"boost": {"grad_freeze": False}, "grad_accumulation": {"every": 4}})
    assert cli.main(["validate", path, "--level", "O1"]) == 0
    out = capsys.readouterr().out
    assert "level O1, mode auto" in out
    assert "boost.grad_freeze is false, but mode 'auto' overrides it: on" in out
    assert "section grad_accumulation is accepted and has no effect" in out
    assert cli.main(["validate", config({"compare": {"name": "mine", "level": "O2"}})]) == 0
    assert "level O2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"boost": {"grad_freze": True}}, "Did you mean 'grad_freeze'?"),
        ({"boost": {"adasum": "False", "mode": 1}}, "2 faults"),
        ('{"boost": ', "broken JSON"),
        ("[]", "top level"),
        ({"boost": {"mode": "manual", "dim_reduce": True}}, "dim_reduce.pca_mat_path: missing"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "describe"])
def test_wrong_configs(config, capsys, command, content, part):
    path = config(content)
    assert cli.main([command, path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"boostax {command}: {path}: ")
    assert part in captured.err
    assert "Traceback" not in captured.err


def test_wrong_arguments(config, capsys):
    right = config({})
    for arguments, part in (
        (["validate", "missing.json"], "missing.json: can't read"),
        (["validate", ""], "FILE is empty"),
        (["validate", right, "--level", "O7"], "level: got 'O7'"),
        (["validate"], "required: FILE"),
        (["validat", right], "invalid choice: 'validat'"),
        (["schema", "--nonsense"], "unrecognized arguments"),
        ([], "usage: boostax"),
    ):
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert part in captured.err
        assert captured.out == ""


def test_describe(config, capsys):
    content = {
        "boost": {"mode": "enable_all"},
        "grad_accumulation": {"every": 4},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    }
    assert cli.main(["describe", config(content)]) == 0
    out = capsys.readouterr().out
    for place, part in enumerate(("accumulate", "freeze", "adasum", "centralize", "thor", "adamw")):
        assert f"{place + 1}. {part}:" in out
    assert "boost.model(model, *inputs) applies it" in out
    assert cli.main(["describe", "--level", "O1"]) == 0
    assert "1. freeze:" in capsys.readouterr().out


def test_schema_is_json(capsys):
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {"$schema", *boostax.BoostConfig.model_fields}


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"boostax {boostax.__version__}\n"
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("compare", "describe", "validate", "schema"):
        assert command in out
    assert cli.main(["compare", "--help"]) == 0
    assert "--configs" in capsys.readouterr().out


def test_interrupts_end_cleanly(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._RUN, "schema", stop)
    assert cli.main(["schema"]) == 130
    assert capsys.readouterr().err == "\nboostax: interrupted\n"


def _start(*arguments, **settings):
    return subprocess.Popen(
        [sys.executable, "-m", "boostax", *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        **settings,
    )


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    with _start("schema", stdout=write) as process:
        os.close(write)
        error = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 141
    assert "Error" not in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("command", ["schema", "describe"])
def test_an_output_that_cannot_be_written_is_no_traceback(command):
    with open("/dev/full", "w") as full, _start(command, stdout=full) as process:
        error = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 2
    assert error == f"boostax: can't write the output: {os.strerror(errno.ENOSPC)}\n"


def test_other_system_errors_keep_their_traceback(monkeypatch):
    def fail(args):
        raise PermissionError(errno.EACCES, "a program's own fault")

    monkeypatch.setitem(cli._RUN, "schema", fail)
    with pytest.raises(PermissionError):
        cli.main(["schema"])


def test_without_a_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["schema"]) == 0


def test_python_m_boostax(config):
    with _start("validate", config({"less_bn": 1}), stdout=subprocess.PIPE) as process:
        out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    assert b"less_bn: got 1 (a number)" in error
    assert b"Traceback" not in error


def test_the_command_line_imports_little():
    code = "import sys, boostax.cli; print(sorted({'jax', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=os.getcwd(), check=True
    )
    assert done.stdout.strip() == "[]"
