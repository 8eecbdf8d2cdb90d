"""``boostax basis``: a file from a folder of checkpoints, messages, exit codes."""

import numpy as np
import pytest

import boostax
from boostax import cli


@pytest.fixture
def folder(tmp_path):
    where = tmp_path / "checkpoints"
    where.mkdir()
    rng = np.random.default_rng(0)
    for number in (2, 10, 1):
        np.savez(
            where / f"checkpoint_{number}.npz",
            **{
                "params/w": rng.normal(size=(4, 2)).astype(np.float32),
                "params/b": rng.normal(size=2).astype(np.float32),
                "opt/mu": np.zeros(3, np.float32),
            },
        )
    return where


def test_a_basis_is_written(folder, tmp_path, capsys):
    out = tmp_path / "basis"
    assert cli.main(["basis", str(folder), "-k", "2", "-o", str(out)]) == 0
    captured = capsys.readouterr()
    assert (
        "2 directions of 10 weights in 2 leaves, from 3 snapshots less their mean" in captured.out
    )
    assert f"Basis: {out}.npz" in captured.out
    assert captured.err == ""
    read = boostax.TrajectoryBasis.load(f"{out}.npz")
    right = boostax.trajectory_basis(folder, 2)
    np.testing.assert_array_equal(read.to_array(), right.to_array())
    # A basis may be written anew.
    arguments = ["basis", str(folder), "-k", "2", "-o", f"{out}.npz", "--no-center"]
    assert cli.main([*arguments, "--exclude", "b", "--dtype", "bfloat16"]) == 0
    read = boostax.TrajectoryBasis.load(f"{out}.npz")
    assert (read.paths, str(read.dtype), read.centered) == (("w",), "bfloat16", False)
    assert "not covered: b (float32)" in capsys.readouterr().out


def test_wrong_input(folder, tmp_path, capsys):
    (tmp_path / "other.npz").write_bytes(b"foreign")
    out = str(tmp_path / "basis.npz")
    for arguments, part in (
        ([str(folder), "-k", "3", "-o", out], "k is 3, but the 3 snapshots have only 2 directions"),
        ([str(folder), "-k", "0", "-o", out], "-k must be an integer >= 1, got '0'"),
        ([str(folder), "-k", "x", "-o", out], "-k must be an integer >= 1, got 'x'"),
        (
            [str(folder), "-k", "1", "-o", out, "--max-held", "1"],
            "--max-held must be an integer >= 4",
        ),
        ([str(folder), "-k", "1", "-o", ""], "must not be empty"),
        (["missing", "-k", "1", "-o", out], "missing is not a folder"),
        ([str(folder), "-k", "1", "-o", str(tmp_path / "no" / "b")], "there is no folder"),
        ([str(folder), "-k", "1", "-o", str(tmp_path / "other.npz")], "is there and not a basis"),
        ([str(folder), "-k", "1", "-o", out, "--exclude", "v"], "matches no leaf"),
        (
            [str(folder), "-k", "1", "-o", out, "--part", "par"],
            "has no part 'par'; it has opt, params",
        ),
        ([str(folder), "-k", "1", "-o", out, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([str(folder), "-k", "1"], "required: -o/--out"),
    ):
        assert cli.main(["basis", *arguments]) == 2
        captured = capsys.readouterr()
        assert part in captured.err
        assert "Traceback" not in captured.err
        assert captured.out == ""
    assert not (tmp_path / "basis.npz").exists()


def test_help(capsys):
    assert cli.main(["basis", "--help"]) == 0
    assert "CHECKPOINT_DIR" in capsys.readouterr().out


def test_the_progress_bar(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert cli.main(["basis", str(folder), "-k", "1", "-o", str(tmp_path / "b.npz")]) == 0
    assert "reading checkpoints" in capsys.readouterr().err
