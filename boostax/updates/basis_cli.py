"""The command ``boostax basis``: from a folder of checkpoints to a file of a basis."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from boostax.cli import guarded
from boostax.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``boostax basis`` to a parser."""
    parser.description = (
        "Read the checkpoints in a folder, in the order of their numbers, and write an orthonormal "
        "basis of the directions in which the parameters moved most."
    )
    parser.add_argument(
        "folder",
        metavar="CHECKPOINT_DIR",
        help="a folder of orbax step folders, flax msgpack files or .npz files",
    )
    parser.add_argument(
        "-k", metavar="K", required=True, help="directions; m checkpoints have at most m - 1"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", required=True, help="the file to write, a .npz file"
    )
    parser.add_argument(
        "--no-center",
        action="store_true",
        help="orthogonalise the first K checkpoints in their order, instead of principal directions",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="leaves to leave out, such as '*/bias'; integer leaves are left out anyway",
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="the part of a checkpoint that holds the parameters; default: params where there is one, "
        "else all of it",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="of the basis; bfloat16 halves its memory; default float32",
    )
    parser.add_argument(
        "--max-held",
        metavar="N",
        default="64",
        help="checkpoints held in memory at a time, at least 4; with more of them, files are read "
        "several times; default 64",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, 2 for wrong input, or 130 after Ctrl-C."""
    return guarded("boostax basis", _run, args)


def _run(args: argparse.Namespace) -> int:
    k, held = _int("-k", args.k, 1), _int("--max-held", args.max_held, 4)
    if not args.folder or not args.out:
        raise ConfigError("CHECKPOINT_DIR and --out must not be empty")
    out = pathlib.Path(args.out)
    out = out if out.suffix == ".npz" else out.with_name(f"{out.name}.npz")
    # JAX and the rest are imported only now, so that a wrong argument is told at once.
    from boostax.updates._basis_files import check_free
    from boostax.updates.trajectory_basis import trajectory_basis

    try:
        check_free(out)
        with _Progress() as progress:
            basis = trajectory_basis(
                pathlib.Path(args.folder),
                k,
                center=not args.no_center,
                exclude=args.exclude,
                dtype=args.dtype,
                part=args.part,
                max_held=held,
                progress=progress,
            )
        basis.save(out)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    print(basis.describe())
    print(f"Basis: {out}")
    return 0


class _Progress:
    """A bar on stderr where rich is installed and someone is looking."""

    def __init__(self):
        self._bars: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return self
            self._bars = progress.Progress(
                progress.TextColumn("reading checkpoints"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bars.start()
            self._task = self._bars.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, done: int, total: int | None) -> None:
        if self._bars is not None:
            self._bars.update(self._task, completed=done, total=total)


def _int(argument: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(f"{argument} must be an integer >= {least}, got {text!r}")
    return value
