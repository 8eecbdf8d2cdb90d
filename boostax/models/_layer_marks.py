"""Mark where the calls of a model's layers begin and end, in a trace of its forward pass.

Each call is enclosed by two named identities, ``"layer in 3"`` on the first argument and ``"layer out
3"`` on the result, where 3 is its place in a list of calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from boostax.models._calls import init_call, split_arrays, watched
from boostax.models._kinds import REPARAMETRIZED, kind_of
from boostax.models._surgery_nnx import named_modules

__all__ = ["IN", "OUT", "LayerCall", "marked_jaxpr"]

IN, OUT = "layer in ", "layer out "


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
      path: the layer's path.
      kind: ``"batch_norm"``, ``"norm"`` or ``"weight"``.
      layer: the layer: an unbound linen module, or the nnx model's own module.
      inputs: shape of the first argument.
      output: shape of the result.
      dtype: dtype of the result.
      normalizes_batch: for a batch norm, whether it takes the batch's own statistics.
      made_by: the type of the module that makes the layer's kernel anew at each call, or "".
    """

    path: str
    kind: str
    layer: Any
    inputs: tuple[int, ...]
    output: tuple[int, ...]
    dtype: Any = None
    normalizes_batch: bool = False
    made_by: str = ""

    @property
    def type(self) -> str:
        """The name of the layer's class."""
        return type(self.layer).__name__


def marked_jaxpr(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rngs: Any = None,
    method: str | None = None,
) -> tuple[Any, int, list[LayerCall]]:
    """Return a model's jaxpr with marks, the number of its inputs, and the marked calls."""
    if not args and not kwargs:
        raise TypeError(
            "example inputs are missing: the model is traced, so give what it can be called with, as in "
            "less_bn(model, images)"
        )
    calls: list[LayerCall] = []
    make: Any = _nnx_call if isinstance(model, nnx.Module) else _linen_call
    arrays, state, call = make(model, args, kwargs, rngs, method, calls)
    return jax.make_jaxpr(call)(arrays, state).jaxpr, len(arrays), calls


# Of the inputs, and of the variables.
Call = Callable[[Sequence[Any], Any], Any]


def _linen_call(
    model: nn.Module, args: Any, kwargs: Any, rngs: Any, method: Any, calls: list[LayerCall]
) -> tuple[list[Any], Any, Call]:
    arrays, run = init_call(model, args, kwargs, rngs=rngs, method=method)
    makers: list[str] = []

    def watch(path: str, layer: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        kind = kind_of(layer)
        if isinstance(layer, REPARAMETRIZED):
            makers.append(type(layer).__name__)
            out = call(*args, **kwargs)
            makers.pop()
            return out
        if kind is None:
            return call(*args, **kwargs)
        mark = _Mark(None, path, layer.clone(parent=None), "".join(makers[-1:]), calls)
        return _marked(mark, kind, call, args, kwargs)

    def call(arrays: Sequence[Any], state: None) -> Any:
        del state  # init makes them
        with watched(watch):
            return _arrays(run(arrays)[0])

    return arrays, None, call


def _nnx_call(
    model: nnx.Module, args: Any, kwargs: Any, rngs: Any, method: Any, calls: list[LayerCall]
) -> tuple[list[Any], Any, Call]:
    del rngs
    copy = nnx.clone(model)
    trace, originals = object(), named_modules(model)
    made = [(path, m) for path, m in originals.items() if isinstance(m, REPARAMETRIZED)]
    for path, module in named_modules(copy).items():
        if kind_of(module) is not None:
            # An attribute that no other trace has: nnx.jit reuses traces of equal models.
            maker = next((type(m).__name__ for p, m in made if _below(path, p)), "")
            module._layer_mark = _Mark(trace, path, originals[path], maker, calls)  # pyright: ignore
            object.__setattr__(module, "__class__", _marking(type(module)))
    arrays, rebuild = split_arrays(args, kwargs)
    graphdef, state = nnx.split(copy)

    def call(arrays: Sequence[Any], state: Any) -> Any:
        merged = nnx.merge(graphdef, state, copy=True)
        args, kwargs = rebuild(arrays)
        out = getattr(merged, method or "__call__")(*args, **kwargs)
        return _arrays(out)

    return arrays, state, call


def _arrays(out: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(out) if _is_array(leaf)]


def _below(path: str, other: str) -> bool:
    return path.startswith(f"{other}/") or not other


@dataclasses.dataclass(frozen=True)
class _Mark:
    trace: Any
    path: str
    layer: Any = dataclasses.field(compare=False)
    made_by: str
    calls: Any = dataclasses.field(compare=False)


@functools.cache
def _marking(base: type) -> type:
    """Return a subclass of a layer's class that marks where its calls begin and end."""
    plain = base.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark: _Mark = self._layer_mark
        kind = kind_of(self) or ""
        run = functools.partial(plain, self)
        return _marked(mark, kind, run, args, kwargs)

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _marked(mark: _Mark, kind: str, call: Any, args: Any, kwargs: Any) -> Any:
    path, layer, calls = mark.path, mark.layer, mark.calls
    number = len(calls)
    # Held first: layers inside this one come after it.
    calls.append(LayerCall(path, kind, layer, (), ()))
    first, args, kwargs = _mark_first(f"{IN}{number}", args, kwargs)
    out = call(*args, **kwargs)
    own = kind == "batch_norm" and not _uses_average(layer, args, kwargs)
    shape = tuple(getattr(out, "shape", ()))
    dtype = getattr(out, "dtype", None)
    calls[number] = LayerCall(path, kind, layer, first, shape, dtype, own, mark.made_by)
    end = lambda leaf: checkpoint_name(leaf, f"{OUT}{number}") if _is_array(leaf) else leaf
    return jax.tree.map(end, out)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _mark_first(name: str, args: Any, kwargs: Any) -> tuple[tuple[int, ...], Any, Any]:
    if args and isinstance(args[0], jax.Array):
        return tuple(args[0].shape), (checkpoint_name(args[0], name), *args[1:]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, jax.Array) and not args:
            return tuple(value.shape), args, {**kwargs, key: checkpoint_name(value, name)}
    return (), args, kwargs


def _uses_average(layer: Any, args: Any, kwargs: Any) -> bool:
    given = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
    return bool(layer.use_running_average if given is None else given)
