"""What ``start`` refuses before it waits for anyone, and the one process that it leaves alone."""

import socket

import jax
import numpy as np
import pytest

import boostax.parallel
from boostax.cli import main
from boostax.parallel import Processes, _start_arguments, processes, start
from boostax.parallel.launch import free_port

WHOLE = {"coordinator": "10.0.0.1:1234", "num_processes": 2, "process_id": 0}


@pytest.fixture(autouse=True)
def _a_fresh_process(monkeypatch):
    monkeypatch.setattr(processes, "_STARTED", [])
    for name in (*_start_arguments.VARIABLES.values(), *_start_arguments.LAUNCHERS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"coordinator": "a:1"}, ValueError, "coordinator given without num_processes and process_id"),
        ({"num_processes": 2, "process_id": 0}, ValueError, "num_processes and process_id given"),
        ({**WHOLE, "process_id": 2}, ValueError, r"process_id must be in 0 \.\. 1 with num_processes=2"),
        ({**WHOLE, "process_id": -1}, ValueError, "got -1"),
        ({**WHOLE, "process_id": True}, TypeError, "process_id must be an int, got True"),
        ({**WHOLE, "process_id": "0"}, TypeError, "process_id must be an int, got '0'"),
        ({**WHOLE, "num_processes": 0}, ValueError, "num_processes must be >= 1, got 0"),
        ({**WHOLE, "num_processes": 2.0}, TypeError, "num_processes must be an int, got 2.0"),
        ({**WHOLE, "coordinator": "10.0.0.1"}, ValueError, "must be 'host:port'"),
        ({**WHOLE, "coordinator": "http://a:80"}, ValueError, "must be 'host:port'"),
        ({**WHOLE, "coordinator": "a:0"}, ValueError, r"port in 1 \.\. 65535"),
        ({**WHOLE, "coordinator": "a:65536"}, ValueError, r"port in 1 \.\. 65535"),
        ({**WHOLE, "coordinator": 1234}, TypeError, "coordinator must be a str"),
        ({**WHOLE, "cluster": "slurm"}, ValueError, "together with coordinator"),
        ({"cluster": 3}, TypeError, "cluster must be a str"),
        ({"timeout": 0}, ValueError, "timeout must be >= 1"),
        ({"heartbeat_timeout": 1.5}, TypeError, "heartbeat_timeout must be an int"),
        ({"shutdown_timeout": -3}, ValueError, "shutdown_timeout must be >= 1, got -3"),
        ({"local_device_ids": []}, ValueError, "one or more different numbers"),
        ({"local_device_ids": [1, 1]}, ValueError, "one or more different numbers"),
        ({"local_device_ids": -1}, ValueError, "numbers >= 0"),
        ({"local_device_ids": "0,1"}, TypeError, "an int or ints"),
        ({"local_device_ids": [0, True]}, TypeError, "must be an int, got True"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, error, part):
    with pytest.raises(error, match=part):
        start(**arguments)
    assert not jax.distributed.is_initialized()


def test_numpy_integers_are_integers():
    given = _start_arguments.from_arguments("[::1]:1234", np.int64(2), np.int32(1))
    assert given == ("[::1]:1234", 2, 1)
    assert type(given[1]) is type(given[2]) is int
    assert _start_arguments.device_ids(np.int64(3)) == [3]
    assert _start_arguments.device_ids(np.array([2, 0])) == [2, 0]


def test_variables_of_the_launcher(monkeypatch):
    assert _start_arguments.from_variables({}) is None
    whole = {"BOOSTAX_COORDINATOR": "a:1", "BOOSTAX_NUM_PROCESSES": "4", "BOOSTAX_PROCESS_ID": "3"}
    assert _start_arguments.from_variables(whole) == ("a:1", 4, 3)
    for name, text, part in (
        ("BOOSTAX_COORDINATOR", "", "set without BOOSTAX_COORDINATOR;"),
        ("BOOSTAX_PROCESS_ID", "4", r"process_id \(from BOOSTAX_PROCESS_ID\) must be in 0 \.\. 3"),
        ("BOOSTAX_NUM_PROCESSES", "four", "BOOSTAX_NUM_PROCESSES must be a number, got 'four'"),
        (
            "BOOSTAX_COORDINATOR",
            "a",
            r"coordinator \(from BOOSTAX_COORDINATOR\) must be 'host:port'",
        ),
    ):
        with pytest.raises(ValueError, match=part):
            _start_arguments.from_variables({**whole, name: text})
    monkeypatch.setenv("BOOSTAX_PROCESS_ID", "0")
    with pytest.raises(ValueError, match="without BOOSTAX_COORDINATOR and BOOSTAX_NUM_PROCESSES"):
        start()


def test_one_process_without_a_cluster_has_nothing_to_start():
    told = start()
    assert told == Processes(0, 1, jax.device_count(), jax.device_count(), "cpu")
    assert str(told) == f"process 0 of 1, with {told.devices} of {told.devices} cpu devices"
    assert start() is told
    assert not jax.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="already, with other arguments; this is process 0 of 1"):
        start(timeout=10)


def test_too_late_where_there_is_something_to_start():
    jax.devices()
    with pytest.raises(RuntimeError, match="before anything that makes JAX look at its devices"):
        start(**WHOLE)
    with pytest.raises(RuntimeError, match="right after the imports"):
        start(cluster="slurm")


def test_too_late_in_a_cluster(monkeypatch):
    values = {
        "JOB_ID": "5", "STEP_NODELIST": "node1", "NTASKS": "2", "PROCID": "1", "LOCALID": "1"
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    jax.devices()
    with pytest.raises(RuntimeError, match="before anything that makes JAX look"):
        start()


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_a_launcher_that_jax_does_not_recognise_is_told(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert start().count == 1
    monkeypatch.setattr(processes, "_STARTED", [])
    monkeypatch.setenv(variable, "4")
    with pytest.raises(RuntimeError, match=f"{variable}=4 says that this is one of 4 processes"):
        start()


def test_a_taken_port_is_told():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"can't listen on port {port}"):
            processes._check_port_is_free(f"127.0.0.1:{port}")
    processes._check_port_is_free(f"127.0.0.1:{free_port()}")


def test_the_package_has_its_names():
    assert boostax.parallel.start is start
    with pytest.raises(AttributeError, match="has no attribute 'strat'"):
        boostax.parallel.strat  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["-n", "2"], "PROGRAM is missing"),
        (["-n", "0", "a.py"], "-n must be an integer >= 1, got '0'"),
        (["-n", "two", "a.py"], "-n must be an integer >= 1, got 'two'"),
        (["-n", "2", "--devices", "-1", "a.py"], "--devices must be an integer >= 1"),
        (["-n", "2", "--port", "70000", "a.py"], "--port must be an integer >= 1 and <= 65535"),
        (["-n", "2", "not_there.py"], "there is no file 'not_there.py'"),
        (["-n", "2", "--", "validate"], "(.py), compare, or -- -m and a module, got 'validate'"),
        (["-n", "2", "--", "-m"], "PROGRAM is missing"),
    ],
)
def test_wrong_arguments_of_the_launcher(capsys, arguments, part):
    assert main(["launch", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("boostax launch: ")
    assert part in error
