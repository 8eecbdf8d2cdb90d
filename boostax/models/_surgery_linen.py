"""Replace what layers of a linen module do, by path, with all names of parameters kept.

A rewritten module is an instance of a subclass of the user's own class, with the same fields and
the same name. Its public methods run as they were, under an interceptor that looks at every call
of a layer inside. So paths, automatic names, and the keys that parameters are initialised from
stay, and a layer that is left out never creates anything.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
from flax.core import freeze

__all__ = ["Rule", "Substitute", "flag", "flag_trace", "is_claimed", "path_of", "rewrite"]

# What a rule does in place of a layer: ``run(layer, call, *args, **kwargs)``, where ``layer`` is
# the bound module and ``call(*args, **kwargs)`` runs it as it was. Hashable.
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is done at a path in place of the call of a layer.

    Attributes:
      path: the layer's path in the model, as in ``"layer1_0/BatchNorm_0"``.
      of: the layer's type; other modules at that path (a wrapper that shares its scope) stay.
      run: ``run(layer, call, *args, **kwargs)``; hashable. ``layer`` is the bound module, whose
        ``param`` makes parameters under the layer's name; ``call`` runs the layer itself.
    """

    path: str
    of: type[nn.Module]
    run: Run


@dataclasses.dataclass(frozen=True)
class Substitute:
    """Run another module at the layer's place, with its parameters under the layer's name.

    It gets the arguments of the call that it declares, by their names in the layer's signature,
    and the first one in any case.

    Attributes:
      module: an unbound linen module; hashable.
    """

    module: nn.Module

    def __call__(self, layer: nn.Module, call: Run, *args: Any, **kwargs: Any) -> Any:
        del call
        given = inspect.signature(type(layer).__call__).bind(layer, *args, **kwargs).arguments
        values = list(given.items())[1:]
        new = self.module.clone(parent=layer.scope)
        known = inspect.signature(type(new).__call__).parameters
        taken = {name: value for name, value in values[1:] if name in known}
        return new(values[0][1], **taken)


Stages = tuple[tuple[Rule, ...], ...]


def rewrite(model: nn.Module, rules: Sequence[Rule]) -> Any:
    """Return a module that does what ``rules`` say in place of the layers at their paths.

    Rewriting a rewritten module composes: the later rules see what the earlier ones left. The
    result works wherever the original does (``init``, ``apply`` with any method, ``bind``,
    lifted transformations, as a part of a larger module). A submodule that is called from outside,
    as in ``bound.encoder(x)``, runs as it was.
    """
    if model.scope is not None:
        raise ValueError(
            f"{type(model).__name__} is bound to variables; rewrite the module that it was bound from"
        )
    base, stages = getattr(model, "_rewritten", (type(model), ()))
    return _with_class(model, base, (*stages, tuple(rules)))


def _with_class(model: nn.Module, base: type[nn.Module], stages: Stages) -> Any:
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
    return _rewritten_class(base, stages)(**fields)


@functools.cache
def _rewritten_class(base: type[nn.Module], stages: Stages) -> type[nn.Module]:
    # One class for the same rules: modules made twice are equal, and jit compiles them once.
    body: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    for name in dir(base):
        function = inspect.getattr_static(base, name)
        own = name == "__call__" or not (hasattr(nn.Module, name) or name.startswith("__"))
        if own and inspect.isfunction(function):
            body[name] = _under_rules(function, stages)
    body |= {name: _with_method(getattr(base, name), base) for name in _TAKE_A_METHOD}
    body["_rewritten"] = (base, stages)
    body["__reduce__"] = nn.nowrap(_reduce)
    # The same name: inside a larger module an automatic name comes from it.
    new = type(base.__name__, (base,), body)
    new.__qualname__ = base.__qualname__
    return new


_TAKE_A_METHOD = ("apply", "init", "init_with_output", "lazy_init", "tabulate")


def _with_method(function: Callable[..., Any], base: type[nn.Module]) -> Callable[..., Any]:
    """Let ``method=Net.encode`` mean the rewritten class's ``encode``, not that of ``Net``."""

    @nn.nowrap
    @functools.wraps(function, updated=())
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = kwargs.get("method")
        name = getattr(method, "__name__", None)
        if name is not None and getattr(base, name, None) is method:
            kwargs["method"] = name
        return function(self, *args, **kwargs)

    return call


def _reduce(self: Any) -> Any:
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
    return _rebuilt, (*type(self)._rewritten, fields)


def _rebuilt(base: type[nn.Module], stages: Stages, fields: dict[str, Any]) -> Any:
    return _rewritten_class(base, stages)(**fields)


def _under_rules(function: Callable[..., Any], stages: Stages) -> Callable[..., Any]:
    @nn.nowrap
    @functools.wraps(function, updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or any(f.stages is stages and f.root == self.path for f in _frames()):
            return function(self, *args, **kwargs)
        flag(self, _token(stages))
        with _Frame(stages, self.path).entered():
            return function(self, *args, **kwargs)

    return method


@functools.cache
def _token(stages: Stages) -> int:
    del stages
    return next(_TOKENS)


_TOKENS = itertools.count()


class _Active(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_ACTIVE = _Active()


def _frames() -> list[_Frame]:
    return _ACTIVE.frames


class _Frame:
    """One running method of a rewritten module."""

    def __init__(self, stages: Stages, root: tuple[str, ...]):
        self.stages, self.root = stages, root
        self.rules = [{rule.path: rule for rule in stage} for stage in stages]
        self.done: dict[str, int] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        _ACTIVE.frames.append(self)
        try:
            with nn.intercept_methods(self.intercept):
                yield
        finally:
            _ACTIVE.frames.remove(self)

    def next_rule(self, module: nn.Module) -> tuple[int, Rule] | None:
        """Return the first rule that has not run yet for the call of this module."""
        path = path_of(module, self.root)
        if path is None:
            return None
        for stage in range(self.done.get(path, 0), len(self.rules)):
            rule = self.rules[stage].get(path)
            if rule is not None and isinstance(module, rule.of):
                return stage, rule
        return None

    def intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        path = path_of(module, self.root)
        found = None if is_claimed(module, self) else self.next_rule(module)
        if path is None or found is None:
            return call(*args, **kwargs)
        stage, rule = found
        before = self.done.get(path, 0)
        self.done[path] = stage + 1
        try:
            # The layer's call comes by here again, so that later rules see it.
            return rule.run(
                module, functools.partial(type(module).__call__, module), *args, **kwargs
            )
        finally:
            self.done[path] = before


def is_claimed(module: nn.Module, by_others_than: _Frame | None = None) -> bool:
    """Say whether a rewrite further inside changes this call; then others wait for what it left."""
    frames = _frames()
    inner = frames[frames.index(by_others_than) + 1 :] if by_others_than in frames else frames
    return any(frame.next_rule(module) is not None for frame in inner)


def path_of(module: nn.Module, root: tuple[str, ...]) -> str | None:
    """Return a bound module's path below ``root`` as text, or None where it is not below."""
    path = tuple(map(str, module.path))
    return "/".join(path[len(root) :]) if path[: len(root)] == root else None


def flag(module: nn.Module, token: Any) -> None:
    """Leave a note in a bound module's scope and those of its submodules to come.

    ``nn.jit`` keeps traces by the flags of the scope among others, and knows nothing of
    interceptors: without this it would run what it traced before the rewrite.
    """
    scope = module.scope
    if scope is None:
        return
    there: tuple[Any, ...] = scope.flags.get("boostax_rewritten", ())  # pyright: ignore[reportAssignmentType]
    if token not in there:
        scope.flags = freeze({**scope.flags, "boostax_rewritten": (*there, token)})


def flag_trace(module: nn.Module) -> None:
    """Flag a bound module as no other trace has, so that ``nn.jit`` traces all of it anew.

    A number of its own, not an object: ``nn.jit`` compares hashes, and objects get the place in memory,
    and so the hash, of others that are gone.
    """
    flag(module, next(_TOKENS))
