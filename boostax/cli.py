"""The command line: ``boostax compare``, ``launch``, ``basis``, ``describe``, ``validate``, ``schema``.

Exit codes: 0 fine, 2 wrong input or an output that can't be written (the message goes to stderr,
without a traceback), 130 after Ctrl-C, 141 when the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence

import boostax
from boostax.errors import ConfigError, MissingExtraError

__all__ = ["main"]

_COMMANDS = {
    "compare": "train plain and boosted, and report how long each takes to a target",
    "launch": "start several processes of a program on this machine",
    "basis": "make a basis of the directions that training moved in, from checkpoints",
    "describe": "say which techniques a config switches on, and the order of the chain",
    "validate": "check a config file",
    "schema": "print the JSON Schema of config files, for editors",
}


# Errors of a full or broken disk; others are no fault of the output and keep their traceback.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
      argv: the arguments after the program's name. Default None: those of the process.

    Returns:
      0, 2, 130 or 141; see above.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except BrokenPipeError:
        _give_up_stdout()
        return 141
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _give_up_stdout()
        print(f"boostax: can't write the output: {error.strerror}", file=sys.stderr)
        return 2


def _give_up_stdout() -> None:
    # Python flushes stdout once more at exit, which must not fail again.
    with contextlib.suppress(OSError, ValueError):  # stdout may be no file, as in a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is not None:  # as after >&-
        sys.stdout.flush()


def _run(arguments: list[str]) -> int:
    parser = _parser(next((a for a in arguments if not a.startswith("-")), None))
    try:
        args = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has printed help, version or what is wrong
        _flush()
        return stop.code if isinstance(stop.code, int) else 2
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if args.command == "compare" and "scipy" not in sys.modules:
        # LAPACK's own threads and XLA's wait for each other on a small machine; it is read only once.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = guarded(f"boostax {args.command}", args.run, args)
    _flush()
    return code


def guarded(name: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; after wrong input or Ctrl-C print a message, without a traceback.

    Args:
      name: the command, for the message.
      run: takes the arguments and returns the exit code.
      args: the parsed arguments.

    Returns:
      What ``run`` returns; 2 after wrong input, 130 after Ctrl-C.
    """
    try:
        return run(args)
    except (ConfigError, MissingExtraError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nboostax: interrupted", file=sys.stderr)
        return 130


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="boostax",
        description="Train JAX, Flax and Optax networks in less time, fewer steps or less memory.",
    )
    parser.add_argument("--version", action="version", version=f"boostax {boostax.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.set_defaults(run=_RUN[name])
        # Some commands' arguments live with their code, which is imported only when it is asked for.
        if name == "compare" and command == name:
            from boostax.compare.cli import add_arguments

            add_arguments(sub)
        if name == "basis" and command == name:
            from boostax.updates.basis_cli import add_arguments

            add_arguments(sub)
        if name == "launch":
            from boostax.parallel.launch import add_arguments

            add_arguments(sub)
        if name in ("describe", "validate"):
            number = None if name == "validate" else "?"
            sub.add_argument("file", metavar="FILE", nargs=number, help="a config, a JSON file")
            sub.add_argument(
                "--level",
                metavar="LEVEL",
                help="O0, O1 or O2; default: the file's compare.level, or O0",
            )
    return parser


def _compare(args: argparse.Namespace) -> int:
    from boostax.compare.cli import run

    return run(args)


def _launch(args: argparse.Namespace) -> int:
    from boostax.parallel.launch import run

    return run(args)


def _basis(args: argparse.Namespace) -> int:
    from boostax.updates.basis_cli import run

    return run(args)


def _validate(args: argparse.Namespace) -> int:
    from boostax.config import load_config
    from boostax.rules import resolve

    config = load_config(_path(args.file))
    resolution = resolve(config, _level(args, config))
    print(f"{args.file}: no faults")
    print(resolution)
    return 0


def _describe(args: argparse.Namespace) -> int:
    from boostax.auto import AutoBoost
    from boostax.config import load_config

    config = load_config(None if args.file is None else _path(args.file))
    print(AutoBoost(_level(args, config), config).describe())
    return 0


def _schema(args: argparse.Namespace) -> int:
    from boostax._config_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


_RUN = {
    "compare": _compare,
    "launch": _launch,
    "basis": _basis,
    "describe": _describe,
    "validate": _validate,
    "schema": _schema,
}


def _path(text: str) -> str:
    # load_config takes "" for "no config", which an empty shell variable does not mean.
    if not text:
        raise ConfigError("FILE is empty; give the path of a JSON file")
    return text


def _level(args: argparse.Namespace, config: boostax.BoostConfig) -> str:
    if args.level is not None:
        return args.level
    return config.compare.level or "O0"
