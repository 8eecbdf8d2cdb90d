"""Start a run of several processes: a thin function over ``jax.distributed.initialize``.

What it adds: arguments that are checked before anything waits for the others, the variables that
``boostax launch`` sets, a plain answer where there is only one process, and an end of all processes
when one of them fails. JAX by itself lets a process whose script raised wait in its exit for the
others, while those wait for it in a collective operation.

Source: JAX documentation, "Introduction to multi-controller JAX"; ``jax.distributed``.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from boostax.parallel._start_arguments import (
    VARIABLES,
    at_least_one,
    check_launchers,
    device_ids,
    from_arguments,
    from_variables,
)

__all__ = ["Processes", "start"]


class Processes(NamedTuple):
    """The processes of a run, as one of them sees them.

    Attributes:
      index: int, the number of this process, ``jax.process_index()``. Process 0 is the one that
        writes files and prints.
      count: int, how many processes there are, ``jax.process_count()``.
      local_devices: int, the devices of this process, ``jax.local_device_count()``.
      devices: int, the devices of all processes, ``jax.device_count()``.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    """

    index: int
    count: int
    local_devices: int
    devices: int
    platform: str

    def __str__(self) -> str:
        return (
            f"process {self.index} of {self.count}, with {self.local_devices} of {self.devices} "
            f"{self.platform} devices"
        )


class _Started(NamedTuple):
    arguments: tuple[Any, ...]
    processes: Processes


_STARTED: list[_Started] = []
_CODES: list[int] = []  # exit codes of this process after an error, the first one counts


def start(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    cluster: str | None = None,
    timeout: int = 300,
    heartbeat_timeout: int = 15,
    shutdown_timeout: int = 300,
) -> Processes:
    """Join the processes of a run, so that ``jax.devices()`` are the devices of all of them.

    Call it once in each process, before anything that makes JAX look at its devices. Where the
    processes come from, in this order: the arguments; the variables that ``boostax launch`` sets
    (``BOOSTAX_COORDINATOR``, ``BOOSTAX_NUM_PROCESSES``, ``BOOSTAX_PROCESS_ID``); the cluster that
    JAX recognises by itself (SLURM, Open MPI, Cloud TPU, Kubernetes). With none of them there is one
    process and nothing to start: the call does nothing and returns its description.

    A second call with the same arguments returns the description again.

    When a process dies, the others end with an error: at once where they wait for it in a collective
    operation on CPU, else within ``heartbeat_timeout`` seconds. A process whose script ends with an
    exception leaves at once, with exit code 1 (130 after Ctrl-C), instead of waiting for the others.

    Args:
      coordinator: ``"host:port"`` of process 0, the same in all processes; the port must be free on
        that host. Default None: see above. Goes with the next two, all or none.
      num_processes: int >= 1, how many processes there are.
      process_id: int in 0 .. num_processes - 1, another one in each process.
      local_device_ids: int or ints, the GPUs of this host that the process may use. Default None:
        all, and under SLURM and Open MPI the one with the number of the process on its host.
      cluster: a cluster that JAX shall take without looking for others, such as ``"slurm"`` or
        ``"mpi4py"``. Default None. Not together with ``coordinator``.
      timeout: int >= 1, seconds to wait for all processes to come. Default 300.
      heartbeat_timeout: int >= 1, seconds without a sign of life after which a process counts as
        dead and the others end. Default 15.
      shutdown_timeout: int >= 1, seconds that a process that is done waits at its end for the
        others. Default 300.

    Returns:
      The :class:`Processes`.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: an argument is out of range, only some of ``coordinator``, ``num_processes`` and
        ``process_id`` are given, or ``cluster`` was not found.
      RuntimeError: JAX has looked at its devices already, the run was started already with other
        arguments, or the port is taken. Where the others don't come in time, JAX ends the process.

    Example:
      >>> import boostax
      >>> processes = boostax.parallel.start()  # no cluster here: one process, nothing to start
      >>> processes.index, processes.count
      (0, 1)

    Source:
      JAX documentation, `Introduction to multi-controller JAX
      <https://docs.jax.dev/en/latest/multi_process.html>`_.

    When not to use: one process sees all devices of its host. A single machine with several GPUs
    needs no ``start``.
    """
    given = from_arguments(coordinator, num_processes, process_id)
    if given is not None and cluster is not None:
        raise ValueError(
            f"cluster={cluster!r} was given together with coordinator={coordinator!r}; leave one out"
        )
    if cluster is not None and not isinstance(cluster, str):
        raise TypeError(f"cluster must be a str or None, got {cluster!r}")
    if given is None and cluster is None:
        given = from_variables(os.environ)
    ids = device_ids(local_device_ids)
    seconds = {
        "timeout": at_least_one("timeout", timeout),
        "heartbeat_timeout": at_least_one("heartbeat_timeout", heartbeat_timeout),
        "shutdown_timeout": at_least_one("shutdown_timeout", shutdown_timeout),
    }
    arguments = (given, ids, cluster, *seconds.values())
    if _STARTED:
        if _STARTED[0].arguments != arguments:
            raise RuntimeError(
                f"boostax.parallel.start was called already, with other arguments; this is "
                f"{_STARTED[0].processes}. Call it once, at the top of the script"
            )
        return _STARTED[0].processes
    joined = _join(given, ids, cluster, seconds)
    processes = _describe()
    _STARTED.append(_Started(arguments, processes))
    if joined:
        _leave_at_once_after_an_error(processes)
    return processes


def _join(
    given: tuple[str, int, int] | None,
    ids: list[int] | None,
    cluster: str | None,
    seconds: Mapping[str, int],
) -> bool:
    """Initialise ``jax.distributed``; say whether there was anything to initialise."""
    import jax

    from boostax import _compat

    if jax.distributed.is_initialized():
        if given is not None or cluster is not None or ids is not None:
            raise RuntimeError(
                "jax.distributed.initialize was called already, so that these arguments come too "
                "late; leave that call out, or call boostax.parallel.start() without arguments"
            )
        return True
    if _compat.backend_is_up():
        if given is None and cluster is None and not _compat.in_a_cluster():
            check_launchers(os.environ)
            return False
        raise RuntimeError(
            "boostax.parallel.start must come before anything that makes JAX look at its devices: "
            "computations, but also jax.devices(), jax.device_count() and jax.device_put. Call it at "
            "the top of the script, right after the imports"
        )
    if jax.config.jax_cpu_collectives_implementation is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options: dict[str, Any] = {
        "local_device_ids": ids,
        "initialization_timeout": seconds["timeout"],
        "heartbeat_timeout_seconds": seconds["heartbeat_timeout"],
        "shutdown_timeout_seconds": seconds["shutdown_timeout"],
    }
    if given is None:
        if _compat.initialize_in_cluster(cluster, options):
            return True
        if cluster is not None:
            raise ValueError(
                f"cluster={cluster!r}: JAX does not find this process in such a cluster; start it with "
                "the cluster's own launcher, or give coordinator, num_processes and process_id"
            )
        check_launchers(os.environ)
        return False
    address, count, index = given
    if index == 0 and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        _check_port_is_free(address)
    notice = threading.Timer(
        min(10, seconds["timeout"] / 2), _say_who_is_waited_for, (given, seconds)
    )
    notice.daemon = True
    notice.start()
    try:
        jax.distributed.initialize(
            address, count, index, cluster_detection_method="deactivate", **options
        )
    finally:
        notice.cancel()
    return True


def _check_port_is_free(address: str) -> None:
    # JAX 0.12 ends with a segmentation fault where it is not.
    port = int(address.rsplit(":", 1)[1])
    kind, host = (socket.AF_INET6, "::") if socket.has_ipv6 else (socket.AF_INET, "")
    try:
        probe = socket.socket(kind, socket.SOCK_STREAM)
    except OSError:  # IPv6 is built in and switched off
        kind, host = socket.AF_INET, ""
        probe = socket.socket(kind, socket.SOCK_STREAM)
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RuntimeError(
                f"coordinator {address!r}: process 0 can't listen on port {port} ({error.strerror}); "
                "give another port, the same in all processes"
            ) from None


def _say_who_is_waited_for(given: tuple[str, int, int], seconds: Mapping[str, int]) -> None:
    # JAX ends the process when the time is over, with a message that does not say for what.
    address, count, index = given
    others = (
        f"process 0 at {address}" if index else f"the other {count - 1}, which must call {address}"
    )
    print(
        f"boostax: process {index} of {count} is waiting for {others}, and gives up after "
        f"{seconds['timeout']} s. All processes must be started with the same coordinator, and its "
        "port must be open on the host of process 0.",
        file=sys.stderr,
        flush=True,
    )


def _describe() -> Processes:
    import jax

    return Processes(
        index=jax.process_index(),
        count=jax.process_count(),
        local_devices=jax.local_device_count(),
        devices=jax.device_count(),
        platform=jax.default_backend(),
    )


def is_launched() -> bool:
    """Say whether ``boostax launch`` started this process."""
    return any(os.environ.get(key) for key in VARIABLES.values())


def leave_at_exit(code: int) -> None:
    """End with ``code`` at exit, without the wait for the other processes that JAX makes there.

    They may be waiting for this process in a collective operation, and would do so until the
    shutdown times out. Its sudden end is what they notice. With one process this does nothing.
    """
    _CODES.append(code)


def _leave_at_once_after_an_error(processes: Processes) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        leave_at_exit(130 if issubclass(kind, KeyboardInterrupt) else 1)
        before(kind, value, trace)
        if processes.count > 1:
            print(
                f"boostax: process {processes.index} of {processes.count} ends with the error above, "
                "and the others will end too. If it is about a lost connection, another process "
                "failed first: see its output. Then start all again from the last checkpoint.",
                file=sys.stderr,
                flush=True,
            )

    def leave() -> None:
        if _CODES:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            if processes.index == 0 and processes.count > 1:
                # Its end aborts the others, who may be about to end with an error of their own.
                time.sleep(1)
            os._exit(_CODES[0])

    sys.excepthook = hook
    # Runs after what is registered later, and before what JAX registered when it was imported.
    atexit.register(leave)
