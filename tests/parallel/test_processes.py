"""Runs of two and four processes on this machine: against one process, after a death, launched."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from boostax.parallel.launch import free_port
from tests.parallel import worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds for a whole run, on a machine that does other things too
LIMIT = 30  # seconds for a process to notice that another has died

# What the user gets to read in a process that was let down.
TOLD = (
    "and the others will end too",
    "Terminating process because the JAX distributed service detected fatal errors",
)


def environment(**more):
    dropped = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "PYTEST_CURRENT_TEST")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        **more,
    }


def cache_of(folder, index):
    """Return the compilation cache of a process, for all tests of this file.

    JAX does not write an entry in one piece, and only process 0 writes: each has a folder of its
    own, and the others get what process 0 has after a run.
    """
    cache = folder.parent / f"jax-cache-{index}"
    cache.mkdir(exist_ok=True)
    return cache


class Run:
    """Some processes of the worker, all started at once."""

    def __init__(self, folder, count, **options):
        folder.mkdir(exist_ok=True)
        self.folder, self.count = folder, count
        command = [sys.executable, "-m", "tests.parallel.worker", str(folder)]
        command += [f"{key}={value}" for key, value in options.items()]
        address = f"127.0.0.1:{free_port()}"
        self.processes = []
        for index in range(count):
            told = environment(
                BOOSTAX_COORDINATOR=address,
                BOOSTAX_NUM_PROCESSES=str(count),
                BOOSTAX_PROCESS_ID=str(index),
                JAX_NUM_CPU_DEVICES="1",
                JAX_COMPILATION_CACHE_DIR=str(cache_of(folder, index)),
            )
            with open(folder / f"log-{index}.txt", "wb") as log:
                self.processes.append(
                    subprocess.Popen(command, env=told, cwd=ROOT, stdout=log, stderr=log)
                )

    def log(self, index):
        return (self.folder / f"log-{index}.txt").read_text(errors="replace")

    def codes(self, timeout=PATIENCE):
        try:
            deadline = time.monotonic() + timeout
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            for index in range(1, self.count):
                shutil.copytree(
                    cache_of(self.folder, 0), cache_of(self.folder, index), dirs_exist_ok=True
                )

    def params(self):
        logs = "\n".join(f"--- {i}\n{self.log(i)}" for i in range(self.count))
        assert self.codes() == [0] * self.count, logs
        return load(self.folder, self.count)


def load(folder, count):
    """Return the parameters, after a check that all processes have the same bits."""
    first, *others = ({**np.load(folder / f"params-{index}.npz")} for index in range(count))
    for other in others:
        assert first.keys() == other.keys()
        for name, value in first.items():
            assert value.dtype == other[name].dtype
            assert value.tobytes() == other[name].tobytes(), name
    return first


def finished(folder, count, **options):
    """Return the parameters of a run; once more where somebody took its port."""
    run = Run(folder, count, **options)
    codes = run.codes()
    if any(codes) and "can't listen on port" in run.log(0):
        run = Run(folder, count, **options)
    return run.params()


def in_one_process(kind, devices, hosts):
    mesh = worker.mesh_of(kind, jax.devices()[:devices], hosts)
    return worker.flatten(worker.told(worker.train(kind, mesh)))


def assert_near(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the parameters of two processes that nothing happened to, by kind of run."""
    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = finished(tmp_path_factory.mktemp(kind), 2, kind=kind)
        return known[kind]

    return of


@pytest.mark.parametrize("kind", ["window", "deltas", "scaled"])
def test_two_processes_equal_two_devices(unbroken, kind):
    alone = in_one_process(kind, 2, 2)
    assert_near(unbroken(kind), alone)
    start = worker.flatten(worker.init())
    assert all(np.abs(alone[name] - start[name]).max() > 0.01 for name in start)
    if kind == "scaled":
        # An overflow on one process made all of them skip.
        assert min(alone["['scales']"]) == 4


def test_four_processes_equal_four_devices(tmp_path):
    assert_near(finished(tmp_path, 4), in_one_process("gradients", 4, 4))


def test_mean_inside_a_process_and_adasum_between_them(tmp_path):
    command = [sys.executable, "-m", "boostax", "launch", "-n", "2", "--devices", "2", "--"]
    command += ["-m", "tests.parallel.worker", str(tmp_path), "kind=hosts"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "done: process 1 of 2, with 2 of 4 cpu devices" in done.stdout
    hierarchy = load(tmp_path, 2)
    assert_near(hierarchy, in_one_process("hosts", 4, 2))
    flat = in_one_process("gradients", 4, 4)
    assert any(np.abs(hierarchy[name] - flat[name]).max() > 1e-3 for name in flat)


@pytest.mark.parametrize(("victim", "kind"), [(0, "window"), (1, "deltas")])
def test_after_a_death_the_others_end_and_a_restart_goes_on_exactly(
    tmp_path, unbroken, victim, kind
):
    run = Run(tmp_path, 2, kind=kind, at=f"{victim}:2", happens="die")
    run.processes[victim].wait(PATIENCE)
    codes = run.codes(LIMIT)
    assert codes[victim] == -signal.SIGKILL, run.log(victim)
    assert codes[1 - victim] not in (0, -signal.SIGKILL)
    assert any(text in run.log(1 - victim) for text in TOLD), run.log(1 - victim)
    assert not (tmp_path / f"params-{1 - victim}.npz").exists()
    again = finished(tmp_path, 2, kind=kind)
    assert "goes on from the checkpoint of step 3" in Run.log(run, 0)
    for name, value in unbroken(kind).items():
        assert again[name].tobytes() == value.tobytes(), name


def test_the_script_of_the_documentation_trains_and_goes_on(tmp_path):
    script = str(ROOT / "docs" / "examples" / "several_processes.py")
    command = [sys.executable, "-m", "boostax", "launch", "-n", "2", "--devices", "1", script]

    def run():
        done = subprocess.run(
            [*command, str(tmp_path)],
            env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("step ")]

    whole = run()
    assert [line.split(":")[0] for line in whole] == ["step 10", "step 20", "step 30", "step 40"]
    assert float(whole[-1].split()[-1]) < 0.1 * float(whole[0].split()[-1])
    shutil.rmtree(tmp_path / "30")
    shutil.rmtree(tmp_path / "40")
    assert run() == whole[2:]


def test_a_process_that_waits_for_nobody_ends_by_the_heartbeat(tmp_path):
    run = Run(tmp_path, 2, at="1:0", happens="die", busy="yes", heartbeat=6)
    run.processes[1].wait(PATIENCE)
    codes = run.codes(LIMIT)
    assert codes[0] not in (0, -signal.SIGKILL)
    assert TOLD[1] in run.log(0)


def test_an_exception_in_one_process_ends_all(tmp_path):
    command = [sys.executable, "-m", "boostax", "launch", "-n", "2", "--"]
    command += ["-m", "tests.parallel.worker", str(tmp_path), "at=1:0", "happens=raise"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1, done.stderr
    assert "ValueError: an error in the user's script" in done.stderr
    assert "boostax: process 1 of 2 ends with the error above" in done.stderr
    assert "boostax launch: process 1 of 2 ended with exit code 1" in done.stderr


def test_what_a_cluster_tells_is_enough(tmp_path):
    script = tmp_path / "starts.py"
    script.write_text("import boostax.parallel\nprint(boostax.parallel.start())\n")
    port = str(free_port())
    started = []
    for index in ("0", "1"):
        told = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "2", "PROCID": index}
        slurm = {f"SLURM_{key}": value for key, value in {**told, "LOCALID": index}.items()}
        started.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=environment(JAX_COORDINATOR_PORT=port, JAX_NUM_CPU_DEVICES="1", **slurm),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for index, process in enumerate(started):
            out, error = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, error
            assert f"process {index} of 2, with 1 of 2 cpu devices" in out
    finally:
        for process in started:
            process.kill()


def test_the_launcher_ends_its_processes_when_it_is_ended(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "boostax", "launch", "-n", "2", str(script)]
    launcher = subprocess.Popen(
        command,
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGTERM)
        _, error = launcher.communicate(timeout=PATIENCE)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "SIGTERM, all ended" in error
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
