"""Snapshots on disk, in the order of their numbers: .npz and flax msgpack files, orbax step folders."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from boostax._tree import leaf_paths, natural_key
from boostax.errors import require
from boostax.updates._npz import read_npz, write_npz

__all__ = ["SNAPSHOT_FORMAT", "SnapshotFile", "snapshot_files", "write_snapshot"]

SNAPSHOT_FORMAT = "boostax-snapshot/1"
_PART = "params"
_TEMPORARY = ".orbax-checkpoint-tmp"
_KINDS = {"npz": ".npz files", "msgpack": "flax msgpack files", "orbax": "orbax step folders"}


@dataclasses.dataclass(frozen=True)
class SnapshotFile:
    """One snapshot on disk: its path, and ``"npz"``, ``"msgpack"`` or ``"orbax"``."""

    path: pathlib.Path
    kind: str

    def load(self, part: str | None, wanted: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Read the parameters, by name.

        Args:
          part: the part of the file that holds them. None: ``"params"`` where it has one, else all.
          wanted: the names that the parameters have. None: not known yet.

        Raises:
          ValueError: the file can't be read, or lacks the part; the message names it.
        """
        if self.kind == "orbax":
            return self._orbax(part, wanted)
        own = False
        if self.kind == "npz":
            header, named = read_npz(self.path, "a .npz file of parameters")
            own = header.get("format") == SNAPSHOT_FORMAT
            if not own and header:
                raise ValueError(
                    f"{self.path} is a file of format {header.get('format')!r}, no snapshot; "
                    "take it out of the folder"
                )
        else:
            named = self._msgpack()
        if own and part is None and wanted is None:
            wanted = tuple(named)  # it holds parameters and nothing else
        names = _take_part(self.path, named, part, wanted)
        return {short: named[full] for full, short in names.items()}

    def _msgpack(self) -> dict[str, np.ndarray]:
        from flax import serialization

        try:
            tree = serialization.msgpack_restore(self.path.read_bytes())
            named = {p: np.asarray(v) for p, v in _by_name(tree).items() if v is not None}
        # Whatever a parser makes of bytes that are not its own.
        except Exception as error:
            raise ValueError(
                f"{self.path} is not a flax msgpack file, or not whole: {error}"
            ) from None
        strange = [path for path, value in named.items() if value.dtype.kind in "OUSV"]
        if strange or not isinstance(tree, Mapping):
            raise ValueError(
                f"{self.path} is not a flax msgpack file of parameters"
                + (f": the entry {strange[0]} is no array" if strange else "")
            )
        return named

    def _orbax(self, part: str | None, wanted: Iterable[str] | None) -> dict[str, np.ndarray]:
        checkpoints = require("orbax.checkpoint", "orbax")
        item = _orbax_item(self.path)
        try:
            # The handler alone: a Checkpointer warns about each step that a manager wrote.
            reader = checkpoints.PyTreeCheckpointHandler()
            tree = reader.metadata(item)
            tree = getattr(tree, "tree", tree)
            names = _take_part(self.path, _by_name(tree), part, wanted)
            as_numpy = checkpoints.RestoreArgs(restore_type=np.ndarray)
            some = _prune(tree, set(names))
            arguments = checkpoints.args.PyTreeRestore(
                item=some,
                restore_args=jax.tree.map(lambda _: as_numpy, some),
                partial_restore=True,
            )
            named = _by_name(reader.restore(item, args=arguments))
            reader.close()
        except _PartError:
            raise
        except Exception as error:  # orbax has no error of its own for a broken checkpoint
            told = str(error).split("[tensorstore_spec")[0][:300]
            raise ValueError(
                f"{self.path} is not an orbax checkpoint, or not whole: {type(error).__name__}: {told}"
            ) from None
        return {short: np.asarray(named[full]) for full, short in names.items()}


def snapshot_files(where: str | os.PathLike[str] | Sequence[Any]) -> list[SnapshotFile]:
    """Find the snapshots in a folder, or in a list of paths, and put them in order.

    Raises:
      ValueError: there are none, they are of several kinds, or their names give no order.
    """
    if isinstance(where, (str, os.PathLike)):
        folder = pathlib.Path(where)
        if not folder.is_dir():
            raise ValueError(f"snapshots: {folder} is not a folder; give one, or a list of files")
        if _is_orbax(folder):
            raise ValueError(
                f"snapshots: {folder} is a single orbax checkpoint; give the folder that holds all steps"
            )
        files = [found for path in folder.iterdir() if (found := _in_folder(path)) is not None]
        shown = str(folder)
    else:
        files = [_given(pathlib.Path(path)) for path in where]
        shown = "the list"
    if not files:
        raise ValueError(
            f"snapshots: {shown} has no snapshots: no .npz files, no msgpack files (checkpoint_10, "
            "or *.msgpack), no step folders of orbax"
        )
    kinds = {file.kind: file.path.name for file in reversed(files)}
    if len(kinds) > 1:
        told = ", ".join(f"{_KINDS[kind]} ({name})" for kind, name in sorted(kinds.items()))
        raise ValueError(
            f"snapshots: {shown} has several kinds: {told}; give a list of the ones meant"
        )
    for file in files:
        if not re.search(r"\d", _stem(file)):
            raise ValueError(
                f"snapshots: {file.path} has no number in its name, which gives the order; rename it "
                "or move it elsewhere"
            )
    patterns = {re.sub(r"\d+", "#", _stem(file)): file.path.name for file in files}
    if len(patterns) > 1:
        one, other, *_ = sorted(patterns.values())
        raise ValueError(
            f"snapshots: {shown} has names of two sorts, {one} and {other}, which have no common order; "
            "give a list of the ones meant"
        )
    files.sort(key=lambda file: natural_key(_stem(file)))
    for one, other in itertools.pairwise(files):
        if natural_key(_stem(one)) == natural_key(_stem(other)):
            raise ValueError(f"snapshots: {one.path} and {other.path} have the same number")
    return files


def write_snapshot(path: pathlib.Path, params: Mapping[str, np.ndarray]) -> None:
    """Write parameters, by name, to a .npz file."""
    write_npz(path, SNAPSHOT_FORMAT, {}, params)


class _PartError(ValueError):
    """The part that was asked for is not there."""


def _take_part(
    path: pathlib.Path, names: Iterable[str], part: str | None, wanted: Iterable[str] | None
) -> dict[str, str]:
    # Name in the file -> name in the parameters.
    whole = {name: name for name in names}
    prefix = f"{_PART if part is None else part}/"
    inside = {name: name.removeprefix(prefix) for name in whole if name.startswith(prefix)}
    if part is not None and not inside:
        tops = sorted({name.split("/")[0] for name in whole})
        raise _PartError(f"{path} has no part {part!r}; it has {', '.join(tops)}")
    whole, inside = _without_value(whole), _without_value(inside)
    if part is None and wanted is not None and set(wanted) <= set(whole.values()):
        return whole
    return inside or whole


def _without_value(names: dict[str, str]) -> dict[str, str]:
    # An nnx State is saved with a dict around each array.
    if all(name.endswith("/value") for name in names.values()):
        return {full: name.removesuffix("/value") for full, name in names.items()}
    return names


def _by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(tree)
    return dict(zip(leaf_paths(tree), leaves, strict=True))


def _prune(tree: Any, names: set[str], prefix: str = "") -> Any:
    # Orbax restores a part of a checkpoint from the part's own nesting.
    if isinstance(tree, Mapping):
        kept = {key: _prune(value, names, f"{prefix}{key}/") for key, value in tree.items()}
        return {key: value for key, value in kept.items() if value is not None} or None
    if isinstance(tree, (list, tuple)):
        kept = [_prune(value, names, f"{prefix}{index}/") for index, value in enumerate(tree)]
        return kept if any(value is not None for value in kept) else None
    return tree if prefix[:-1] in names else None


def _stem(file: SnapshotFile) -> str:
    return file.path.name if file.kind == "orbax" else file.path.name.removesuffix(file.path.suffix)


def _is_orbax(path: pathlib.Path) -> bool:
    return (path / "_METADATA").exists()


def _orbax_item(path: pathlib.Path) -> pathlib.Path:
    # A CheckpointManager keeps each item of a step in a folder of its own.
    if _is_orbax(path):
        return path.absolute()
    items = sorted(inner for inner in path.iterdir() if inner.is_dir() and _is_orbax(inner))
    named = [inner for inner in items if inner.name in ("default", "params", "state")]
    if len(items) != 1 and len(named) != 1:
        found = (
            f"has several items ({', '.join(i.name for i in items)})" if items else "has no item"
        )
        raise ValueError(
            f"{path} is not an orbax checkpoint of parameters, or not whole: it {found}"
        )
    return (items if len(items) == 1 else named)[0].absolute()


def _in_folder(path: pathlib.Path) -> SnapshotFile | None:
    name = path.name
    if name.startswith(".") or _TEMPORARY in name:
        return None
    if path.is_dir():
        return SnapshotFile(path, "orbax") if re.search(r"\d$", name) else None
    if path.suffix == ".npz":
        return SnapshotFile(path, "npz")
    if path.suffix == ".msgpack" or re.fullmatch(r"[A-Za-z_-]*\d+", name):
        return SnapshotFile(path, "msgpack")
    return None


def _given(path: pathlib.Path) -> SnapshotFile:
    if not path.exists():
        raise ValueError(f"snapshots: {path} is not there")
    if path.is_dir():
        return SnapshotFile(path, "orbax")
    return SnapshotFile(path, "npz" if path.suffix == ".npz" else "msgpack")
