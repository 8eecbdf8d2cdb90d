"""Snapshots of the parameters during training, for ``boostax.trajectory_basis``.

Taking one costs a copy on the device, which is queued like a step. Everything else, the way to the
host and the file, happens in a thread, while training goes on.
"""

from __future__ import annotations

import os
import pathlib
import re
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from boostax._tree import leaf_paths
from boostax.updates._npz import read_npz
from boostax.updates._snapshot_files import SNAPSHOT_FORMAT, write_snapshot

__all__ = ["SnapshotWriter"]

_PENDING = 2  # snapshots on their way; each has a copy on the device
_NAME = re.compile(r"snapshot_(\d+)\.npz")


class SnapshotWriter:
    """Collects snapshots of the parameters while a network trains, in memory or on disk.

    Only the parameters that are handed in are kept, floats and integers alike, as NumPy arrays. They are
    copied on the device before anything else, so the buffers may be donated to the next step. At
    most two snapshots are on their way at a time; a third waits. What goes wrong in the thread is
    raised by the next call.

    On disk, a snapshot is the file ``snapshot_00000012.npz``: written under a temporary name, then
    renamed. A run that is started again goes on with the next number. With several processes, process
    0 writes; parameters that are split over processes are refused.

    Args:
      where: a folder, made if it is not there. Default None: host memory.
      every_steps: keep every n-th call of :meth:`step`. Default None.
      every_epochs: keep every n-th call of :meth:`epoch`. Default None. Without either, only
        :meth:`write` keeps something.
      keep: how many snapshots stay, the newest ones; older ones are deleted. Default None: all.

    Attributes:
      number: the number that the next snapshot gets.

    Raises:
      ValueError: an argument is out of range, or the folder can't be used.

    Example:
      >>> import jax.numpy as jnp
      >>> with SnapshotWriter(every_steps=2) as writer:
      ...     writer.write({"w": jnp.array([0.0])})
      ...     for step in range(1, 5):
      ...         kept = writer.step({"w": jnp.array([1.0 * step])})
      >>> [snapshot["w"].tolist() for snapshot in writer.snapshots]
      [[0.0], [2.0], [4.0]]

    When not to use:
      To go on with training later: snapshots have no optimizer state. Use orbax for that.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        keep: int | None = None,
    ):
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep", keep),
        ):
            _check(name, value)
        if every_steps is not None and every_epochs is not None:
            raise ValueError("SnapshotWriter: give every_steps or every_epochs, not both")
        self._every_steps, self._every_epochs, self._keep = every_steps, every_epochs, keep
        self._steps = self._epochs = 0
        self._memory: deque[Any] = deque(maxlen=keep)
        self._folder = None if where is None else pathlib.Path(where)
        self._files: deque[pathlib.Path] = deque()
        self.number = 0
        if self._folder is not None:
            self._files.extend(_open_folder(self._folder))
            if self._files:
                self.number = _number(self._files[-1]) + 1
        self._pending: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "boostax-snapshots")

    def step(self, params: Any) -> bool:
        """Count a step, and keep its parameters if it is a step's turn.

        Args:
          params: the parameters after the step.

        Returns:
          Whether they were kept.
        """
        self._raise_failed()
        self._steps += 1
        if self._every_steps is None or self._steps % self._every_steps:
            return False
        self.write(params)
        return True

    def epoch(self, params: Any) -> bool:
        """Count an epoch, and keep its parameters if it is an epoch's turn.

        Args:
          params: the parameters after the epoch.

        Returns:
          Whether they were kept.
        """
        self._raise_failed()
        self._epochs += 1
        if self._every_epochs is None or self._epochs % self._every_epochs:
            return False
        self.write(params)
        return True

    def write(self, params: Any) -> None:
        """Keep these parameters.

        Args:
          params: a pytree of arrays.

        Raises:
          ValueError: a leaf is no array of numbers, or is split over processes.
          RuntimeError: the writer is closed.
        """
        if self._pool is None:
            raise RuntimeError("SnapshotWriter: it is closed; make a new one")
        while len(self._pending) >= _PENDING:
            self._pending.popleft().result()
        self._raise_failed()
        leaves, treedef = jax.tree.flatten(params)
        paths = leaf_paths(params)
        for path, leaf in zip(paths, leaves, strict=True):
            _check_leaf(path, leaf)
        copies = _copies(leaves)
        number, self.number = self.number, self.number + 1
        if self._folder is None:
            task = self._pool.submit(self._keep_in_memory, treedef, copies)
        elif jax.process_index() == 0:
            task = self._pool.submit(self._keep_on_disk, number, paths, copies)
        else:
            return
        self._pending.append(task)

    @property
    def snapshots(self) -> list[Any]:
        """The snapshots, oldest first, once all are there: trees in memory, or the files' paths."""
        self.wait()
        return list(self._memory if self._folder is None else self._files)

    def wait(self) -> None:
        """Wait until all snapshots are where they belong, and raise what went wrong."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait for all snapshots and end the thread; a second time does nothing."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            self.wait()
        finally:
            pool.shutdown()
            self._pending.clear()

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"SnapshotWriter failed too: {fault!r}")

    def _raise_failed(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def _keep_in_memory(self, treedef: Any, leaves: list[Any]) -> None:
        self._memory.append(treedef.unflatten(_fetch(leaves)))

    def _keep_on_disk(self, number: int, paths: tuple[str, ...], leaves: list[Any]) -> None:
        assert self._folder is not None
        path = self._folder / f"snapshot_{number:08d}.npz"
        if path.exists():
            raise FileExistsError(
                f"SnapshotWriter: {path} is there already; does another run write here?"
            )
        write_snapshot(path, dict(zip(paths, _fetch(leaves), strict=True)))
        self._files.append(path)
        while self._keep is not None and len(self._files) > self._keep:
            self._files.popleft().unlink(missing_ok=True)


@jax.jit
def _device_copies(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(leaf) for leaf in leaves]


def _copies(leaves: list[Any]) -> list[Any]:
    copies = [None if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in leaves]
    # One device for all of a program's arguments: arrays of several meshes go one by one.
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            groups.setdefault(tuple(sorted(d.id for d in leaf.devices())), []).append(index)
    for places in groups.values():
        for index, copy in zip(places, _device_copies([leaves[i] for i in places]), strict=True):
            copy.copy_to_host_async()
            copies[index] = copy
    return copies


def _fetch(leaves: list[Any]) -> list[np.ndarray]:
    return [
        np.asarray(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))
        if isinstance(leaf, jax.Array)
        else leaf
        for leaf in leaves
    ]


def _check_leaf(path: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array):
        if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != bool:
            raise ValueError(f"SnapshotWriter: the leaf {path} has dtype {leaf.dtype}, no numbers")
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            raise ValueError(
                f"SnapshotWriter: the leaf {path} is split over several processes; gather it first, "
                "with jax.experimental.multihost_utils.process_allgather"
            )
    elif not isinstance(leaf, (np.ndarray, np.generic, bool, int, float)):
        raise ValueError(f"SnapshotWriter: the leaf {path} is a {type(leaf).__name__}, no array")


def _check(name: str, value: Any) -> None:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and (not is_int or value < 1):
        raise ValueError(f"SnapshotWriter: {name} is {value!r}, expected an integer >= 1 or None")


def _open_folder(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(
            f"SnapshotWriter: can't use the folder {folder} ({error.strerror}); give another one"
        ) from None
    strange = [path for path in names if path.suffix == ".npz" and not _NAME.fullmatch(path.name)]
    if strange:
        raise ValueError(
            f"SnapshotWriter: {strange[0]} is not of a SnapshotWriter and would be mixed up with its "
            "files; give a folder of its own"
        )
    files = sorted((path for path in names if _NAME.fullmatch(path.name)), key=_number)
    if files:
        header, _ = read_npz(files[-1], "a snapshot")
        if header.get("format") != SNAPSHOT_FORMAT:
            raise ValueError(f"SnapshotWriter: {files[-1]} is not a snapshot; move it elsewhere")
    if jax.process_index() == 0:
        for left in folder.glob(".snapshot_*.npz.*.tmp"):  # of a run that was killed while writing
            if time.time() - left.stat().st_mtime > 60:
                left.unlink(missing_ok=True)
    return files


def _number(path: pathlib.Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])
