"""Reads a PyTorch optimizer's state from a dict of arrays, or from a .npz file, unpickling nothing."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from boostax.updates._thor_checks import whole_number

__all__ = ["read_state"]


def read_state(
    caller: str, state: Any
) -> tuple[dict[int, dict[str, Any]], list[Mapping[str, Any]]]:
    """Return the entries by parameter number, and the parameter groups."""
    if isinstance(state, (str, os.PathLike)):
        state = _read_file(caller, os.fspath(state))
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        keys = f" with the keys {', '.join(map(str, state))}" if isinstance(state, Mapping) else ""
        raise TypeError(
            f"{caller}: state must be a mapping with 'state' and 'param_groups', as PyTorch's "
            f"state_dict() returns it, or the path of an .npz file, got {type(state).__name__}{keys}"
        )
    groups = state["param_groups"]
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not groups:
        raise TypeError(f"{caller}: param_groups must be a list of groups, got {groups!r}")
    groups = [_group(caller, number, group) for number, group in enumerate(groups)]
    try:
        entries = {int(index): dict(entry) for index, entry in state["state"].items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"{caller}: state['state'] must be a mapping from PyTorch's parameter numbers to its "
            "buffers by name"
        ) from None
    for index, entry in entries.items():
        for key, value in entry.items():
            if value is not None and not _is_real(np.asarray(value).dtype):
                got = f"{type(value).__name__} of dtype {np.asarray(value).dtype}"
                raise TypeError(
                    f"{caller}: state[{index}][{key!r}] must be real numbers, got {got}; turn tensors "
                    "into numpy arrays first, those of bfloat16 with .float().numpy()"
                )
    return entries, groups


def _group(caller: str, number: int, group: Any) -> Mapping[str, Any]:
    where = f"{caller}: param_groups[{number}]"
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(f"{where} must be a mapping with 'params' and settings, got {group!r}")
    members = group["params"]
    members = members.tolist() if isinstance(members, np.ndarray) else members
    if not isinstance(members, (list, tuple)) or not all(map(whole_number, members)):
        raise TypeError(f"{where}['params'] must be a list of parameters' numbers, got {members!r}")
    return {**group, "params": [int(member) for member in members]}


def _is_real(dtype: Any) -> bool:
    # numpy calls bfloat16 neither a float nor a number.
    return dtype.kind in "biuf" or bool(jnp.issubdtype(dtype, jnp.floating))


def _read_file(caller: str, path: str) -> dict[str, Any]:
    how = "write one as docs/techniques/optimizers.md shows"
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except OSError as error:
        raise ValueError(f"{caller}: can't read {path}: {error.strerror or error}") from error
    except (ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{caller}: {path} is no .npz file of plain arrays; {how}") from error
    if "param_groups" not in arrays:
        raise ValueError(f"{caller}: {path} has no entry 'param_groups'; {how}")
    try:
        groups = json.loads(str(arrays.pop("param_groups")))
    except ValueError as error:
        raise ValueError(f"{caller}: 'param_groups' in {path} is no JSON text; {how}") from error
    entries: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        parts = key.split("/")
        if len(parts) != 3 or parts[0] != "state" or not parts[1].isdigit():
            raise ValueError(
                f"{caller}: {path} has the entry {key!r}; expected 'state/INDEX/KEY'; {how}"
            )
        entries.setdefault(parts[1], {})[parts[2]] = array
    return {"state": entries, "param_groups": groups}
