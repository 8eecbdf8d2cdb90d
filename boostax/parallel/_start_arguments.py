"""What ``start`` is told, by its arguments or by variables, checked before anyone waits."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

# What `boostax launch` sets for each process.
COORDINATOR = "BOOSTAX_COORDINATOR"
NUM_PROCESSES = "BOOSTAX_NUM_PROCESSES"
PROCESS_ID = "BOOSTAX_PROCESS_ID"
VARIABLES = {"coordinator": COORDINATOR, "num_processes": NUM_PROCESSES, "process_id": PROCESS_ID}

# Launchers that JAX may fail to recognise, by the variable in which they say how many there are.
# Their processes would each train alone, and nothing would show it.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("Open MPI", "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("an MPI launcher", "PMI_SIZE and PMI_RANK"),
    "WORLD_SIZE": ("torchrun", "MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK"),
}


def from_arguments(coordinator: Any, num_processes: Any, process_id: Any) -> Any:
    values = {
        "coordinator": coordinator, "num_processes": num_processes, "process_id": process_id
    }  # fmt: skip
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == 3:
        return None
    if missing:
        there = [name for name in values if name not in missing]
        raise ValueError(
            f"{' and '.join(there)} given without {' and '.join(missing)}; give all three, or none of "
            "them where a launcher or a cluster tells them"
        )
    return _checked(values, dict.fromkeys(values, ""))


def from_variables(environment: Mapping[str, str]) -> Any:
    texts = {name: environment.get(key) for name, key in VARIABLES.items()}
    missing = [VARIABLES[name] for name, text in texts.items() if not text]
    if len(missing) == 3:
        return None
    if missing:
        raise ValueError(
            f"the variables of boostax launch are set without {' and '.join(missing)}; set all of "
            f"{', '.join(VARIABLES.values())}, or none"
        )
    values: dict[str, Any] = dict(texts)
    for name in ("num_processes", "process_id"):
        if not re.fullmatch(r"\d+", values[name]):
            raise ValueError(f"{VARIABLES[name]} must be a number, got {values[name]!r}")
        values[name] = int(values[name])
    return _checked(values, {name: f" (from {key})" for name, key in VARIABLES.items()})


def _checked(values: Mapping[str, Any], origins: Mapping[str, str]) -> tuple[str, int, int]:
    address = values["coordinator"]
    if not isinstance(address, str):
        raise TypeError(f"coordinator must be a str 'host:port', got {address!r}")
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\s/]+):(\d+)", address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(
            f"coordinator{origins['coordinator']} must be 'host:port' with a port in 1 .. 65535, such "
            f"as '10.0.0.1:1234', got {address!r}"
        )
    count = at_least_one("num_processes", values["num_processes"])
    index = integer("process_id", values["process_id"])
    if not 0 <= index < count:
        raise ValueError(
            f"process_id{origins['process_id']} must be in 0 .. {count - 1} with num_processes="
            f"{count}, got {index}"
        )
    return address, count, index


def check_launchers(environment: Mapping[str, str]) -> None:
    for variable, (name, what) in LAUNCHERS.items():
        size = environment.get(variable, "")
        if size.isdigit() and int(size) > 1:
            raise RuntimeError(
                f"{variable}={size} says that this is one of {size} processes of {name}, and JAX does "
                "not recognise them, so that each would train alone. Give coordinator, num_processes "
                f"and process_id from {what}; with MPI, cluster='mpi4py' does it too"
            )


def device_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes, bool)):
        raise TypeError(f"local_device_ids must be an int or ints, got {value!r}")
    ids = [
        integer("local_device_ids", v) for v in (value if hasattr(value, "__iter__") else [value])
    ]
    if not ids or min(ids) < 0 or len(set(ids)) != len(ids):
        raise ValueError(
            f"local_device_ids must be one or more different numbers >= 0, got {value!r}"
        )
    return ids


def integer(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {value!r}")


def at_least_one(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be >= 1, got {number}")
    return number
