"""A comparison in several processes: process 0 keeps the files, all devices share each batch.

Every process draws the same batches and takes its rows of each; every process evaluates, so that none
waits long for another. With one process nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from boostax.compare.task import UsageError
from boostax.errors import ConfigError

__all__ = ["flags_of_main", "is_main", "local", "mesh", "on_main", "part_of"]


def is_main() -> bool:
    """Say whether this process writes and prints."""
    return jax.process_index() == 0


def mesh() -> jax.sharding.Mesh | None:
    """Return the devices of all processes along one axis, or None with one process."""
    if jax.process_count() == 1:
        return None
    return jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))


def on_main(call: Callable[[], Any]) -> Any:
    """Call a function in process 0 and return its result there, None elsewhere.

    Raises:
      UsageError: in all processes, if the function raised a ConfigError.
    """
    if jax.process_count() == 1:
        return call()
    result, error = None, None
    if is_main():
        try:
            result = call()
        except ConfigError as caught:
            error = caught
    failed = flags_of_main([error is not None])
    if error is not None:
        raise error
    if failed[0]:
        raise UsageError(f"process {jax.process_index()} ends because process 0 does")
    return result


def flags_of_main(flags: Sequence[bool]) -> list[bool]:
    """Return in all processes what process 0 has; the others' flags must be as many."""
    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(flags, bool))).tolist()


def part_of(batch: Any) -> Any:
    """Return this process's rows of a batch that all processes have whole.

    Raises:
      UsageError: the batch can't be split evenly over the devices.
    """
    count, devices = jax.process_count(), jax.device_count()
    if count == 1:
        return batch

    def rows(leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        size = np.shape(leaf)[0]
        if size % devices:
            raise UsageError(
                f"batches: {size} examples can't be split over the {devices} devices of {count} "
                f"processes; make the batches a multiple of {devices}"
            )
        start = jax.process_index() * (size // count)
        return np.asarray(leaf)[start : start + size // count]

    return jax.tree.map(rows, batch)


def local(state: Any) -> Any:
    """Return a train state whose parameters and model state are this process's own arrays."""
    if jax.process_count() == 1:
        return state
    own = lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
    return state.replace(params=own(state.params), model_state=own(state.model_state))
