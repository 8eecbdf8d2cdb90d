"""AdaSum over all devices of all processes; a second start goes on from the last checkpoint."""

import sys

import boostax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

STEPS, EVERY, EACH = 40, 10, 8  # updates, updates between checkpoints, examples on each device


def loss_fn(params, batch):
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return jnp.mean(error**2)


def my_batch(number, processes):
    # Each process reads its own part of the data, here examples that it makes itself.
    rng = np.random.default_rng([number, processes.index])
    x = rng.normal(size=(EACH * processes.local_devices, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([[1], [-2], [0.5]]) + 0.3}


def main(folder):
    processes = boostax.parallel.start()  # ahead of everything that looks at a device
    mesh = jax.make_mesh((processes.devices,), ("data",))
    tx = optax.chain(boostax.adasum("data"), optax.sgd(0.05, momentum=0.9))
    step = boostax.train_step(loss_fn, tx, mesh=mesh)
    state = step.init({"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)})

    # Orbax writes a folder under another name and renames it, and every process must call it.
    with ocp.CheckpointManager(folder) as checkpoints:
        if (latest := checkpoints.latest_step()) is not None:
            state = checkpoints.restore(latest, args=ocp.args.StandardRestore(state))
        for number in range(latest or 0, STEPS):
            state, metrics = step(state, my_batch(number, processes))
            if (number + 1) % EVERY == 0:
                checkpoints.save(number + 1, args=ocp.args.StandardSave(state))
                if processes.index == 0:  # one of them is enough to print
                    print(f"step {number + 1}: loss {metrics['loss']:.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])  # a folder that all processes reach, as an absolute path or gs://...
