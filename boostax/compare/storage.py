"""Finished runs on disk: one JSON file for each (arm, seed), taken up again on the next start.

A file is written under a temporary name and renamed, so it is either whole or not there. It
carries the settings that the run was made with (task, arm, budget, target, versions, machine) and
their fingerprint; runs of other settings are never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from boostax.compare.records import RUN_FORMAT, run_faults
from boostax.compare.task import UsageError

__all__ = ["RUN_FORMAT", "RunStore", "fingerprint", "plain_json", "write_json"]

# What write_report writes; each carries this mark, so that nobody else's file is overwritten.
MARK = "boostax compare"
_OUTPUTS = ("report.html", "curves.png", "time_to_target.png")


def plain_json(value: Any) -> Any:
    """Bring a value into plain JSON: numpy scalars to numbers, NaN and infinities to null.

    Example:
      >>> plain_json({"a": (1, float("nan"))})
      {'a': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(k): plain_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(v) for v in value]
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, int):
        return value
    if hasattr(value, "tolist"):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return a short digest of settings; equal settings give equal digests in any key order."""
    text = json.dumps(plain_json(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write JSON so that ``path`` is either the old file or the whole new one."""
    write_bytes(path, (json.dumps(plain_json(value), indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def slug(name: str) -> str:
    """Return an arm's name as a part of a file name; another name gives another part.

    Example:
      >>> slug("plain"), slug("a b"), slug("a?b")
      ('plain', 'a_b-c8687a08', 'a_b-c2a7b64a')
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:80].strip(".") or "arm"
    if plain == name:
        return plain
    # Many names come to the same letters, so the rest is told by a digest.
    return f"{plain}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


def check_names(names: Iterable[str]) -> None:
    """Check that no two arms share a file, on file systems that ignore case too.

    Raises:
      UsageError: two do; the message names both.
    """
    taken: dict[str, str] = {}
    for name in names:
        key = slug(name).casefold()
        if key in taken:
            raise UsageError(
                f"arms {taken[key]!r} and {name!r} would share their files; give one a name of its own "
                'in its file: {"compare": {"name": "..."}}'
            )
        taken[key] = name


class RunStore:
    """The folder of a comparison.

    Args:
      folder: made if it is not there.
      fresh: delete the runs that an earlier comparison left there. Default False.

    Raises:
      UsageError: the folder can't be made or written to, or holds a ``results.json`` that is not
        of a comparison.
    """

    def __init__(self, folder: pathlib.Path | str, *, fresh: bool = False):
        self.folder = pathlib.Path(folder)
        self.runs = self.folder / "runs"
        try:
            for place in (self.folder, self.runs):
                place.mkdir(parents=True, exist_ok=True)
                probe = place / f".probe.{os.getpid()}.tmp"
                probe.write_bytes(b"")
                probe.unlink()
        except OSError as error:
            raise UsageError(
                f"--out: can't write to the folder {str(self.folder)!r} ({error.strerror}); give "
                "another one"
            ) from None
        results = self.folder / "results.json"
        if results.exists() and not _is_ours(results, "boostax-compare/"):
            raise UsageError(
                f"--out: {results} is not of boostax compare and would be overwritten; give "
                "another folder"
            )
        for name in _OUTPUTS:
            check_output(self.folder / name)
        for left in self.runs.glob(".*.json.*.tmp"):  # of a run that was killed while writing
            left.unlink(missing_ok=True)
        if fresh:
            for path in sorted(self.runs.glob("*.json")):
                # A run cut short by a full disk is ours too; its first line says so.
                if not _is_ours(path, RUN_FORMAT) and not _begins_as_a_run(path):
                    raise UsageError(
                        f"--fresh: {path} is not a whole run of boostax compare and is left alone; "
                        "move or delete it yourself"
                    )
                path.unlink()

    def path(self, arm: str, seed: int) -> pathlib.Path:
        """Return the file of one run."""
        return self.runs / f"{slug(arm)}-seed{seed}.json"

    def load(self, arm: str, seed: int, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a finished run, or None if it is not there.

        Raises:
          UsageError: the file is not a whole run, or of other settings; the message names it.
        """
        path = self.path(arm, seed)
        if not path.exists():
            return None
        run = _read(path)
        if faults := run_faults(run):
            raise UsageError(
                f"{path} is not a whole run of boostax compare ({'; '.join(faults)}); delete it and "
                "start again to make this run anew"
            )
        if (run["arm"], run["seed"]) != (arm, seed):
            raise UsageError(
                f"{path} holds the run of arm {run['arm']!r} with seed {run['seed']}, which its "
                "name does not say; delete it, or rename the arm"
            )
        if run["fingerprint"] != fingerprint(settings):
            raise UsageError(
                f"{path} was made with other settings ({_differences(run['settings'], settings)}); "
                "give another --out folder, or --fresh to throw the finished runs there away"
            )
        return run

    def save(self, run: Mapping[str, Any]) -> pathlib.Path:
        """Put a finished run on disk, with its format and fingerprint."""
        path = self.path(run["arm"], run["seed"])
        full = {"format": RUN_FORMAT, "fingerprint": fingerprint(run["settings"]), **run}
        write_json(path, full)
        return path


def check_output(path: pathlib.Path) -> None:
    """Check before any training that a file of the report can be written, and is nobody else's.

    Raises:
      UsageError: it is a folder, or holds something that is not of boostax compare.
    """
    if not path.exists():
        return
    try:
        with open(path, "rb") as file:
            head = file.read(1000)
    except OSError as error:
        raise UsageError(
            f"--out: {path} is not a file that can be read ({error.strerror}), and the report goes "
            "there; move it, or give another folder"
        ) from None
    if head and MARK.encode() not in head:
        raise UsageError(
            f"--out: {path} is not of boostax compare and would be overwritten; move it, or give "
            "another folder"
        )


def _begins_as_a_run(path: pathlib.Path) -> bool:
    try:
        with open(path, "rb") as file:
            return f'"format": "{RUN_FORMAT}"'.encode() in file.read(200)
    except OSError:
        return False


def _read(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _is_ours(path: pathlib.Path, mark: str) -> bool:
    value = _read(path)
    return isinstance(value, dict) and str(value.get("format", "")).startswith(mark)


def _differences(old: Any, new: Mapping[str, Any]) -> str:
    old, now = old if isinstance(old, dict) else {}, plain_json(new)
    parts = []
    for key in sorted({*old, *now}):
        before, after = old.get(key), now.get(key)
        if before != after:
            texts = [json.dumps(v, sort_keys=True) for v in (before, after)]
            short = [t if len(t) <= 60 else t[:57] + "..." for t in texts]
            same = "" if short[0] != short[1] else ", further in"
            parts.append(f"{key}: {short[0]}, now {short[1]}{same}")
    return "; ".join(parts) or "its fingerprint does not fit its settings"
