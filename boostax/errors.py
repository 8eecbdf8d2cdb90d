"""Errors of boostax, and the helpers that word them.

Every message says which argument is wrong, what was got, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

__all__ = ["ConfigError", "MissingExtraError", "StateMismatchError", "did_you_mean", "require"]


class ConfigError(ValueError):
    """A configuration can't be used; the message lists every fault with its JSON path.

    Wrong::

        boostax.load_config({"boost": {"grad_freze": True}})

    Right::

        boostax.load_config({"boost": {"grad_freeze": True}})
    """


class MissingExtraError(ImportError):
    """A package of an optional extra is needed and not installed; the message names the extra."""


class StateMismatchError(ValueError):
    """A state was made with other static facts (groups, window, model) than those it meets now."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name nearest to ``name``, or ``""``."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise :class:`MissingExtraError` naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).split(".")[0]
        raise MissingExtraError(
            f"{module} needs the package {missing!r}, which is not installed; it comes with the "
            f"extra {extra!r}: pip install 'boostax[{extra}]'"
        ) from error
