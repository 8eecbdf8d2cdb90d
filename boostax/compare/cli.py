"""The command ``boostax compare``: arguments, live progress, exit codes."""

from __future__ import annotations

import argparse
import math
import pathlib
import shlex
import sys
from typing import Any

from boostax.cli import guarded
from boostax.compare.task import UsageError, load_task, own_tasks, parse_target
from boostax.errors import require
from boostax.parallel import processes

__all__ = ["add_arguments", "run"]

_SEEDS = 5
_SEEDS_OF_DIGITS = 9  # its runs are so short that five pairs leave much to chance
_POINTS = 40  # evaluations in a run, unless --eval-every says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``boostax compare`` to a parser."""
    parser.description = (
        "Train a task with several configs on paired seeds, and report how long each takes to "
        "reach a target. Without arguments: a small conv net on scikit-learn's digits, plain, at "
        "level O1, with accumulation, with centralization and with THOR."
    )
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK",
        help="path/to/file.py:name of a task (see boostax.compare.Task); default: the digits",
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        metavar="JSON",
        help="boostax configs, one an arm; the first is the plain arm that the others are held "
        "against ({} will do); default: the six of the digits, with no more groups of layers than "
        "the model has",
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        metavar="LEVEL",
        help="O0, O1 or O2, one for all configs or one each; default: the config's compare.level, "
        "or O0",
    )
    parser.add_argument("--target", metavar="METRIC=VALUE", help="default: the task's")
    parser.add_argument(
        "--seeds",
        metavar="N",
        help=f"paired seeds, from 0; default {_SEEDS}, for the digits {_SEEDS_OF_DIGITS}; fewer than 5 "
        "give no verdict",
    )
    parser.add_argument("--steps", metavar="N", help="budget in batches; default: the task's")
    parser.add_argument("--learning-rate", metavar="RATE", help="default: the task's")
    parser.add_argument(
        "--eval-every", metavar="N", help=f"steps between evaluations; default: budget / {_POINTS}"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="boostax-compare",
        help="folder for the report and the finished runs; default ./boostax-compare",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="throw away the finished runs in the folder instead of taking them up",
    )
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write the curves as TensorBoard runs, into DIR/tensorboard",
    )

    parser.add_argument(
        "--distributed",
        action="store_true",
        help="this is one of several processes, which SLURM, a TPU slice or another cluster started; "
        "boostax launch needs no such word. All devices share each batch, process 0 writes",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, 2 for wrong input, or 130 after Ctrl-C."""
    code = guarded("boostax compare", _run, args)
    if code:
        processes.leave_at_exit(code)
    return code


def _run(args: argparse.Namespace) -> int:
    if args.seeds is None:
        seeds = _SEEDS_OF_DIGITS if args.task is None else _SEEDS
    else:
        seeds = _positive_int("--seeds", args.seeds)
    target = None if args.target is None else _target(args.target)
    steps = None if args.steps is None else _positive_int("--steps", args.steps)
    every = None if args.eval_every is None else _positive_int("--eval-every", args.eval_every)
    rate = None if args.learning_rate is None else _positive("--learning-rate", args.learning_rate)
    if args.levels is not None and args.configs is None:
        raise UsageError("--levels goes with --configs, one level for all or one each")
    for module in ("rich", "matplotlib"):  # before minutes of training, not after
        require(module, "demo")
    if args.tensorboard:
        require("tensorboardX", "tensorboard")

    if args.distributed or processes.is_launched():
        processes.start()
    # JAX and the rest are imported only now, so that a wrong argument is told at once.
    from boostax.compare import digits, together
    from boostax.compare.arms import load_arms
    from boostax.compare.display import Display
    from boostax.compare.report import terminal_table, write_report
    from boostax.compare.results import summarise
    from boostax.compare.runner import Plan, compare, source_digest
    from boostax.compare.storage import RunStore

    if args.configs is not None:
        arms = tuple(load_arms(args.configs, args.levels))
    else:
        arms = digits.digits_arms() if args.task is None else digits.default_arms()
    if args.task is None:
        task, source = digits.digits_task(), pathlib.Path(digits.__file__)
    else:
        task, source = load_task(args.task)
    own = own_tasks([arm.task for arm in arms], None if args.task is None else source)
    steps = task.steps if steps is None else steps
    plan = Plan(
        task=task,
        arms=arms,
        seeds=seeds,
        steps=steps,
        target=target or parse_target(task.target),
        learning_rate=float(task.learning_rate) if rate is None else rate,
        eval_every=max(1, steps // _POINTS) if every is None else every,
        task_digest=source_digest(source),
        own_tasks=own,
    )
    store = together.on_main(lambda: RunStore(args.out, fresh=args.fresh))
    if store is None:  # process 0 does the rest
        compare(plan, None)
        return 0
    if args.tensorboard:
        _make(store.folder / "tensorboard")
    with Display(plan) as display:
        try:
            runs, builds = compare(plan, store, display)
        except KeyboardInterrupt:
            display.close()
            # Before all run files are read, nobody has counted.
            kept = f"{display.kept} of {display.total}" if display.total else "the finished"
            print(
                f"\nboostax compare: interrupted; {kept} runs are kept in {store.runs}, and the same "
                "command goes on from there",
                file=sys.stderr,
            )
            return 130
    results = summarise(plan, runs, builds, _command_line())
    written = write_report(store.folder, results, runs)
    if args.tensorboard:
        from boostax.compare.tensorboard import write_events

        write_events(store.folder / "tensorboard", runs)
    display.console.print(terminal_table(results))
    print(f"Report: {written[0]}")
    return 0


def _make(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--tensorboard: can't make the folder {str(folder)!r} ({error.strerror})"
        ) from None


def _target(text: str) -> Any:
    try:
        return parse_target(text)
    except UsageError as error:
        raise UsageError(f"--target: {error}") from None


def _positive_int(argument: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(f"{argument} must be an integer >= 1, got {text!r}")
    return value


def _positive(argument: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{argument} must be a finite number > 0, got {text!r}")
    return value


def _command_line() -> str:
    return shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
