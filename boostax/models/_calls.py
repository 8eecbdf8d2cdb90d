"""Call a model abstractly with a user's example inputs: nothing is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from boostax.models._surgery_linen import flag_trace, is_claimed, path_of

__all__ = ["CalledLayer", "called_layers", "init_call", "split_arrays", "watched"]


def split_arrays(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the arrays among a call's arguments, and a function that puts others in their place.

    Python scalars such as ``train=True`` stay as they are. ``ShapeDtypeStruct`` counts as an array.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)))
    where = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    ]

    def rebuild(arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[i] for i in where], rebuild


def init_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rngs: Any = None,
    method: str | None = None,
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays of a call, and a function of them that initialises a linen model.

    Args:
      model: an unbound linen module.
      args: its example inputs.
      kwargs: its keyword arguments.
      rngs: a key, or a dict of them by name. Default None: keys for ``params`` and ``dropout``.
      method: the name of the method that is called. Default None: ``__call__``.
    """
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    keys |= {"params": rngs} if isinstance(rngs, jax.Array) else dict(rngs or {})
    arrays, rebuild = split_arrays(args, kwargs)

    def call(arrays: Sequence[Any]) -> Any:
        args, kwargs = rebuild(arrays)

        def run(bound: nn.Module) -> Any:
            # Every trace anew: what nn.jit kept of another one was not watched.
            flag_trace(bound)
            return getattr(bound, method or "__call__")(*args, **kwargs)

        return nn.init_with_output(run, model)(keys)

    return arrays, call


@contextmanager
def watched(watch: Callable[..., Any]) -> Iterator[None]:
    """Run ``watch(path, layer, call, args, kwargs)`` in place of each call of a linen module.

    Calls that a rewrite of the model leaves out or does otherwise are not seen; what it puts in
    their place is.
    """

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__" or is_claimed(module):
            return call(*args, **kwargs)
        return watch(path_of(module, ()), module, call, args, kwargs)

    with nn.intercept_methods(intercept):
        yield


@dataclasses.dataclass(frozen=True)
class CalledLayer:
    """One call of a layer of a linen model.

    Attributes:
      path: the layer's path, as in ``"layer1_0/BatchNorm_0"``.
      layer: the layer, not bound to variables, with the fields it was called with.
      inputs: shape and dtype of the first argument.
      output: shape and dtype of the result.
    """

    path: str
    layer: nn.Module
    inputs: Any
    output: Any


def called_layers(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    of: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module,
    rngs: Any = None,
    method: str | None = None,
) -> tuple[CalledLayer, ...]:
    """Return the calls of layers of the types ``of`` in the order of the forward pass.

    A layer inside ``nn.scan`` may be seen several times; its shapes are those of one pass.
    """
    found: list[CalledLayer] = []

    def watch(path: str, layer: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if isinstance(layer, of):
            first = args[0] if args else next(iter(kwargs.values()), None)
            free = layer.clone(parent=None)
            found.append(CalledLayer(path, free, _shapes(first), _shapes(out)))
        return out

    arrays, call = init_call(model, args, kwargs, rngs=rngs, method=method)
    with watched(watch):
        jax.eval_shape(call, arrays)
    return tuple(found)


def _shapes(value: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf
        ),
        value,
    )
