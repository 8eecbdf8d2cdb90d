"""Replace modules of an nnx model by path, in a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

__all__ = ["named_modules", "replace_modules"]


def path_text(path: Any) -> str:
    """Return an nnx path as ``"layer1/0/bn1"``."""
    return "/".join(map(str, path))


def named_modules(model: nnx.Module) -> dict[str, nnx.Module]:
    """Return every module of a model by its path; a shared one once, by its first path."""
    found = {path_text(path): module for path, module in nnx.iter_modules(model)}
    return {path: module for path, module in found.items() if not _is_container(module)}


def replace_modules(
    model: nnx.Module, makers: Mapping[str, Callable[[nnx.Module], nnx.Module]]
) -> Any:
    """Return a copy of ``model`` in which the modules at some paths are others.

    The user's model is not touched. A module that hangs at several places is replaced at all of
    them by one.

    Args:
      model: the model.
      makers: path to a function from the copied module to the one that takes its place. It may
        reuse the copy's variables.
    """
    copy = nnx.clone(model)
    modules = named_modules(copy)
    unknown = sorted(set(makers) - set(modules))
    if unknown:
        raise KeyError(f"no modules at {unknown}; there are {sorted(modules)}")
    return _put(copy, {id(modules[path]): make(modules[path]) for path, make in makers.items()})


def _put(root: Any, instead: Mapping[int, Any]) -> Any:
    seen: dict[int, Any] = {}

    def walk(node: Any) -> Any:
        if id(node) in instead:
            return instead[id(node)]
        if id(node) in seen:
            return node
        if isinstance(node, nnx.List | list):
            seen[id(node)] = node
            _each(node, enumerate(list(node)), walk, node.__setitem__)
        elif isinstance(node, nnx.Module):
            seen[id(node)] = node
            _each(node, list(vars(node).items()), walk, lambda k, v: _set(node, k, v))
        elif isinstance(node, dict):
            seen[id(node)] = node
            _each(node, list(node.items()), walk, node.__setitem__)
        elif isinstance(node, tuple):
            new = [walk(child) for child in node]
            if any(a is not b for a, b in zip(new, node, strict=True)):
                # A named tuple takes its fields one by one.
                return type(node)(*new) if hasattr(node, "_fields") else type(node)(new)
        return node

    return walk(root)


def _each(node: Any, items: Any, walk: Callable[[Any], Any], put: Callable[..., Any]) -> None:
    for key, child in items:
        new = walk(child)
        if new is not child:
            put(key, new)


def _set(node: nnx.Module, key: str, value: Any) -> None:
    setattr(node, key, value if isinstance(value, nnx.Module) else nnx.data(value))


def _is_container(module: nnx.Module) -> bool:
    return isinstance(module, nnx.List | nnx.Dict)
