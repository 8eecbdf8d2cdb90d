"""Start N processes of a program on this machine: the command ``boostax launch``.

Each process finds in the variables that ``boostax.parallel.start()`` reads where process 0 is, how
many there are, and which one it is. When one of them fails the others are ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from boostax.errors import ConfigError
from boostax.parallel._start_arguments import COORDINATOR, NUM_PROCESSES, PROCESS_ID

__all__ = ["add_arguments", "launch", "run"]

_GRACE = 10.0  # seconds between the request to end and the end by force
_POLL = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``boostax launch`` to a parser."""
    parser.usage = "boostax launch -n N [--devices K] (SCRIPT.py | compare | -- -m MODULE) ..."
    parser.description = (
        "Start N processes of a program on this machine. The program calls "
        "boostax.parallel.start(); boostax compare does so by itself."
    )
    parser.add_argument("-n", "--processes", metavar="N", required=True, help="how many processes")
    parser.add_argument(
        "--devices",
        metavar="K",
        help="devices of each process: K simulated ones on CPU; on GPU process 0 gets 0 to K-1, "
        "process 1 the next K, and so on; default: what JAX finds",
    )
    parser.add_argument(
        "--port", metavar="PORT", help="of the coordinator, on this machine; default: a free one"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM",
        help="a Python script, compare, or -- -m and a module, with its arguments",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    count = _number("-n", args.processes)
    devices = None if args.devices is None else _number("--devices", args.devices)
    port = None if args.port is None else _number("--port", args.port, 65535)
    return launch(_command(args.program), count, devices=devices, port=port)


def launch(
    command: Sequence[str], count: int, *, devices: int | None = None, port: int | None = None
) -> int:
    """Run ``count`` processes of a command to their end.

    SIGTERM ends all, and so does SIGINT (Ctrl-C reaches the processes from the terminal itself). When
    a process ends with an error, the others get SIGTERM, and SIGKILL 10 seconds later.

    Args:
      command: the program and its arguments.
      count: int >= 1.
      devices: devices of each process, int >= 1. Default None: what JAX finds.
      port: of the coordinator. Default None: a free one.

    Returns:
      0 if all ended with 0; else the exit code of the first that did not, 128 + N after signal N.
    """
    address = f"127.0.0.1:{free_port() if port is None else port}"
    children: list[subprocess.Popen[bytes]] = []
    caught: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for index in range(count):
            children.append(
                subprocess.Popen(command, env=_environment(address, count, index, devices))
            )
        failed = _wait(children, caught)
        if caught[:1] == [signal.SIGINT]:
            _interrupt(children)
    finally:
        _end(children)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if caught:
        print(f"\nboostax launch: {signal.Signals(caught[0]).name}, all ended", file=sys.stderr)
        return 128 + caught[0]
    if failed is None:
        return 0
    code = children[failed].returncode
    print(
        f"boostax launch: process {failed} of {count} {_ended(code)}; the others were ended",
        file=sys.stderr,
    )
    return code if code > 0 else 128 - code


def free_port() -> int:
    """Return a port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _wait(children: Sequence[subprocess.Popen[bytes]], caught: Sequence[int]) -> int | None:
    """Return the first child that failed, or None once all are done or a signal has come."""
    while not caught:
        codes = [child.poll() for child in children]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            return min(failed, key=lambda index: _lateness(children[index].returncode))
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL)
    return None


def _lateness(code: int) -> int:
    # Of several, one that a signal ended is the cause; another may have raised because of it, or JAX
    # aborted it.
    return 2 if code == -signal.SIGABRT else int(code > 0)


def _interrupt(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let the children end as after Ctrl-C, which a terminal has sent to them as well."""
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    deadline = time.monotonic() + _GRACE
    for child in children:
        if child.poll() is None and not at_terminal:
            child.send_signal(signal.SIGINT)
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(_POLL)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    alive = [child for child in children if child.poll() is None]
    for child in alive:
        child.terminate()
    deadline = time.monotonic() + _GRACE
    for child in alive:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # JAX takes SIGTERM for the notice of a preemption, and goes on.
            child.kill()
            child.wait()


def _environment(address: str, count: int, index: int, devices: int | None) -> dict[str, str]:
    values = {COORDINATOR: address, NUM_PROCESSES: str(count), PROCESS_ID: str(index)}
    if devices is not None:
        ids = range(index * devices, (index + 1) * devices)
        values["JAX_NUM_CPU_DEVICES"] = str(devices)
        values["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(i) for i in ids)
    return {**os.environ, **values}


def _command(program: Sequence[str]) -> list[str]:
    words = list(program)
    if words[:1] == ["--"]:
        words = words[1:]
    if not words or words == ["-m"]:
        raise ConfigError(
            "PROGRAM is missing; give a Python script, compare, or -- -m and a module"
        )
    if words[0] == "-m":
        return [sys.executable, *words]
    if words[0].endswith(".py"):
        if not os.path.isfile(words[0]):
            raise ConfigError(f"PROGRAM: there is no file {words[0]!r}")
        return [sys.executable, *words]
    if words[0] == "compare":
        return [sys.executable, "-m", "boostax", *words]
    raise ConfigError(
        f"PROGRAM must be a Python script (.py), compare, or -- -m and a module, got {words[0]!r}"
    )


def _number(argument: str, text: str, most: int | None = None) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1 or (most is not None and value > most):
        end = "" if most is None else f" and <= {most}"
        raise ConfigError(f"{argument} must be an integer >= 1{end}, got {text!r}")
    return value


def _ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
