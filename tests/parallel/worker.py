"""One process of a small run with AdaSum; the tests start several, and import ``train`` themselves.

Usage: worker.py FOLDER [key=value ...], with ``boostax.parallel.start``'s variables set. Trains the
classifier below on all devices of all processes, leaves ``params-INDEX.npz`` of each
process in FOLDER, and a checkpoint there after every step, from which a later start goes on.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import boostax

STEPS = 6
EACH = 4  # examples on each device
FEATURES, CLASSES = 4, 3


def init() -> dict[str, Any]:
    """Return fresh parameters: one layer, since compiling is what these tests spend their time on."""
    kernel = np.random.RandomState(7).normal(size=(FEATURES, CLASSES))
    return {"bias": jnp.zeros(CLASSES), "kernel": jnp.asarray(kernel, jnp.float32)}


def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean cross entropy."""
    logits = batch["x"] @ params["kernel"] + params["bias"][None, :]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def chain(kind: str) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a run."""
    sgd = optax.sgd(0.2, 0.9)
    inner = {
        "gradients": [boostax.adasum("data"), sgd],
        "window": [boostax.adasum("data"), sgd],
        "scaled": [boostax.adasum("data"), sgd],
        "deltas": [optax.adam(0.02), boostax.adasum("data")],
        "hosts": [boostax.adasum("host", inner_axis="device"), sgd],
    }[kind]
    whole = optax.chain(boostax.centralize(), *inner)
    return boostax.accumulate(whole, 2) if kind == "window" else whole


def mesh_of(kind: str, devices: Any, hosts: int) -> Mesh:
    """Return the mesh of a run; its rows are the processes."""
    if kind == "hosts":
        return Mesh(np.asarray(devices).reshape(hosts, -1), ("host", "device"))
    return Mesh(np.asarray(devices), ("data",))


def batch_of(number: int, devices: int, kind: str = "") -> dict[str, np.ndarray]:
    """Return the whole batch of a step, over all processes."""
    rng = np.random.RandomState(number)
    x = rng.normal(size=(EACH * devices, FEATURES)).astype(np.float32)
    if kind == "scaled" and number == 2:
        x[-1] = np.inf  # the last process's
    return {"x": x, "y": rng.randint(CLASSES, size=EACH * devices)}


def train(
    kind: str,
    mesh: Mesh,
    *,
    state_of: Callable[[Any], Any] = lambda state: state,
    after: Callable[[int, Any], None] = lambda number, state: None,
) -> Any:
    """Train on a mesh; each process feeds its own part of the batch. Return the last state."""
    scaling = boostax.GroupLossScale(["bias", "kernel"], init=8.0) if kind == "scaled" else None
    step = boostax.train_step(loss, chain(kind), mesh=mesh, loss_scale=scaling)
    state = state_of(step.init(init(), rng=jax.random.key(0)))
    index, count = jax.process_index(), jax.process_count()
    for number in range(int(state.attempt), STEPS):
        batch = batch_of(number, mesh.size, kind)
        rows = len(batch["y"]) // count
        mine = {key: x[index * rows : (index + 1) * rows] for key, x in batch.items()}
        state, _ = step(state, mine)
        after(number, state)
    return state


def told(state: Any) -> Any:
    """Return what a run ends with: parameters, and the loss scales where there are some."""
    if state.loss_scale is None:
        return state.params
    return {**state.params, "scales": state.loss_scale.scale}


def whole(tree: Any) -> Any:
    """Return the arrays of all processes as numpy arrays; every process must call it."""

    def gathered(x: jax.Array) -> np.ndarray:
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gathered, tree)


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(folder: pathlib.Path, options: dict[str, str]) -> None:
    processes = boostax.parallel.start(heartbeat_timeout=int(options.get("heartbeat", "15")))
    kind = options.get("kind", "gradients")
    checkpoint = folder / "checkpoint.msgpack"

    def restored(state: Any) -> Any:
        if not checkpoint.exists():
            return state
        saved = flax.serialization.from_bytes(whole(state), checkpoint.read_bytes())
        print(f"goes on from the checkpoint of step {saved.attempt}", flush=True)
        return saved

    def after(number: int, state: Any) -> None:
        host = whole(state)
        if processes.index == 0:
            write(checkpoint, flax.serialization.to_bytes(host))
        # Every process has its checkpoint before one goes on, and may die.
        multihost_utils.sync_global_devices(f"checkpoint {number}")
        if options.get("at") == f"{processes.index}:{number}":
            HAPPENS[options["happens"]]()
        if "busy" in options and number == int(options["at"].split(":")[1]):
            time.sleep(60)

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    mesh = mesh_of(kind, jax.devices(), processes.count)
    state = train(kind, mesh, state_of=restored, after=after)
    params = whole(told(state))
    np.savez(folder / f"params-{processes.index}.npz", **flatten(params))
    print(f"done: {processes}", flush=True)


def flatten(params: Any) -> dict[str, np.ndarray]:
    """Return the leaves by their paths."""
    leaves, _ = jax.tree.flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("an error in the user's script")


HAPPENS = {"die": _die, "raise": _raise}

if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
