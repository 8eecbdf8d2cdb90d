"""The output of a submodule by its path, for linen and nnx: features of a trained network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from boostax.errors import did_you_mean

__all__ = ["feature_tap"]

Pool = Literal["mean", "max"]
_NAME = "feature_tap"
_SHOWN = 40


def feature_tap(
    model: Any,
    path: str,
    variables: Any = None,
    *,
    pool: Pool | None = None,
    flatten: bool = False,
    call: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Callable[..., jax.Array]:
    r"""Return a compiled function that gives what a submodule puts out: ``inputs -> features``.

    The network runs in evaluation mode: batch norm uses its running statistics, dropout is off, and
    no state changes. With ``pool`` the axes between the first and the last are reduced,

    .. math::
        f_{nc} = \operatorname{mean}_{hw}\, y_{nhwc} \quad\text{or}\quad \max_{hw}\, y_{nhwc},

    the mean in float32 or better. What the network computes after the submodule is not compiled.

    Args:
      model: an nnx module, of which a copy is taken as it is now; or a linen module.
      path: the submodule's path: ``"layer1/0/conv1"`` (nnx: attributes, with the index in a list),
        ``"layer1_0/conv1"`` (linen: names of the parameters' tree); ``""`` is the whole model.
      variables: linen's variables, ``{"params": ..., "batch_stats": ...}``. Default None, for nnx.
      pool: ``"mean"``, ``"max"`` or None. Default None: as it is.
      flatten: whether all axes but the first become one, after pooling. Default False.
      call: which call counts where the submodule is called several times, from 0; -1 is the last.
        Default None: it must be called once.
      kwargs: keywords of the model's call that never change, a dict. nnx models are switched by
        ``eval()``; a model that has to be told in its call that it does not train is told so here:
        ``{"train": False}``. Default None.

    Returns:
      ``tap(*inputs) -> features`` with the leading axis of the inputs. It compiles once a shape.

    Raises:
      TypeError: an argument has a wrong type, or linen's variables are missing.
      ValueError: there is no submodule at the path; it was not called, or several times; it puts out
        something other than one array; pooling without axes to pool; a layer that ``scan`` or ``vmap``
        stacks; a model that trains in its call (it updates batch statistics or draws random numbers).

    Example:
      >>> import jax, jax.numpy as jnp, boostax
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Conv(4, (3, 3)), nn.relu, nn.Conv(2, (3, 3))])
      >>> x = jnp.ones((5, 8, 8, 1))
      >>> variables = model.init(jax.random.key(0), x)
      >>> boostax.feature_tap(model, "layers_0", variables, pool="mean")(x).shape
      (5, 4)

    When not to use:
      Inside a loss that is differentiated: it compiles by itself, and holds the weights that it was
      made with. A layer inside ``scan`` or ``vmap`` has no path of its own.
    """
    if not isinstance(path, str):
        raise TypeError(f"{_NAME}: path must be text such as 'layer1/conv1', got {path!r}")
    if pool is not None and pool not in get_args(Pool):
        raise ValueError(
            f"{_NAME}: pool must be None, 'mean' or 'max', got {pool!r}."
            f"{did_you_mean(str(pool), get_args(Pool))}"
        )
    if call is not None and (isinstance(call, bool) or not isinstance(call, int)):
        raise TypeError(f"{_NAME}: call must be None or an int, got {call!r}")
    if not isinstance(flatten, (bool, np.bool_)):
        raise TypeError(f"{_NAME}: flatten must be True or False, got {flatten!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"{_NAME}: kwargs must be None or a dict of keywords, got {kwargs!r}")
    held, run = _nnx_run(model, path, variables) or _linen_run(model, path, variables)
    given = dict(kwargs or {})

    @jax.jit
    def tap(held: Any, *inputs: Any) -> jax.Array:
        outputs = run(held, *inputs, **given)
        return _shaped(_chosen(outputs, call, path), pool, flatten, path)

    return functools.partial(tap, held)


_TRAINS = (
    f"{_NAME}: the model runs as in training (it changes its state or draws random numbers); tell it "
    "that it does not, by kwargs={'train': False} or what its call takes"
)
Run = Callable[..., tuple[Any, ...]]


def _nnx_run(model: Any, path: str, variables: Any) -> tuple[Any, Run] | None:
    """Return the state of a copy that notes what the submodule puts out, and how to run it."""
    from boostax.training._start import nnx_module

    nnx = nnx_module(model)
    if nnx is None:
        return None
    from boostax.models._surgery_nnx import named_modules, replace_modules

    if variables is not None:
        raise TypeError(f"{_NAME}: an nnx model holds its own variables; leave variables out")
    modules = named_modules(model)
    if path not in modules:
        _raise_unknown(path, modules)
    copy = replace_modules(model, {path: _noting})
    copy.eval()
    watch = _Watch(copy)
    graphdef, state = nnx.split(copy)

    def run(state: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        merged = nnx.merge(graphdef, state, copy=True)
        watch.draws, watch.updated = 0, False
        merged(*inputs, **kwargs)
        if watch.updated or watch.draws > 0:
            raise ValueError(_TRAINS)
        noted = getattr(named_modules(merged)[path], _NOTED, None)
        if noted is None:
            return ()
        outputs = noted.get_value()
        if _shapes(outputs) != noted.get_metadata()["shapes"]:
            raise ValueError(
                f"{_NAME}: the submodule {path!r} runs inside scan or vmap, which stacks what it puts "
                "out; tap the module that holds the stack, or one outside of it"
            )
        return outputs

    return state, run


class _Watch:
    """Notes, while an nnx model is traced, that batch statistics are set or random numbers drawn.

    By hooks of the variables: a transformation such as remat hands all variables on as new values, so
    that comparing them before and after would take each for changed.
    """

    def __init__(self, model: Any):
        from flax import nnx

        self.draws, self.updated = 0, False
        for _, node in nnx.iter_graph(model):
            hook = (
                self._on_statistic
                if isinstance(node, nnx.BatchStat)
                else self._on_count
                if isinstance(node, nnx.RngCount)
                else None
            )
            if hook is not None:
                own = node.get_metadata().get("on_set_value", ())
                own = own if isinstance(own, tuple) else (own,)
                node.set_metadata(on_set_value=(*own, hook))

    def _on_statistic(self, variable: Any, value: Any) -> Any:
        del variable
        self.updated = True
        return value

    def _on_count(self, variable: Any, value: Any) -> Any:
        # split_rngs draws a key for each layer of a stack, whether or not a layer uses it, and then
        # gives the count an axis: such a draw is none of the model's.
        before, after = jnp.ndim(variable.get_value()), jnp.ndim(value)
        self.draws += 1 if after == before else -1 if after > before else 0
        return value


def _shapes(outputs: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(outputs))


_NOTED = "boostax_outputs"


def _noting(module: Any) -> Any:
    # The same object with another class: its attributes and its variables stay where others look.
    module.__class__ = _noting_class(type(module))
    return module


@functools.cache
def _noting_class(base: type) -> type:
    from flax import nnx

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.__call__(self, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        earlier = getattr(self, _NOTED, None)
        # A variable, so that nnx's own transformations hand it on.
        outputs = (*(() if earlier is None else earlier.get_value()), output)
        setattr(self, _NOTED, nnx.Intermediate(outputs, shapes=_shapes(outputs)))
        return output

    return type(base.__name__, (base,), {"__call__": __call__, "__module__": base.__module__})


def _linen_run(model: Any, path: str, variables: Any) -> tuple[Any, Run]:
    from flax import errors
    from flax import linen as nn

    from boostax.models._surgery_linen import path_of

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{_NAME}: model must be an nnx or a linen module, got {type(model).__name__}"
        )
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            f"{_NAME}: a linen model needs variables={{'params': ..., ...}}, what model.init returned, "
            f"got {type(variables).__name__}"
        )

    def run(variables: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        seen: dict[str, None] = {}

        def wanted(module: nn.Module, method: str) -> bool:
            at = path_of(module, ())
            if at is None or method != "__call__":
                return False
            seen[at] = None
            return at == path

        try:
            _, found = model.apply(
                {k: v for k, v in variables.items() if k != "intermediates"},
                *inputs,
                capture_intermediates=wanted,
                mutable=["intermediates"],
                **kwargs,
            )
        except (errors.ModifyScopeVariableError, errors.InvalidRngError) as error:
            raise ValueError(_TRAINS) from error
        if path not in seen:
            _raise_unknown(path, seen)
        # A stacked layer's are lost inside, and where it is the only one there is no collection.
        node: Any = found.get("intermediates", {})
        for part in filter(None, path.split("/")):
            node = node.get(part, {})
        return node.get("__call__", ())

    return dict(variables), run


def _raise_unknown(path: str, known: Any) -> None:
    names = [name or "'' (the model)" for name in known]
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ValueError(
        f"{_NAME}: the model calls no submodule at path {path!r}.{did_you_mean(path, known)} There "
        f"are: {', '.join(names[:_SHOWN])}{more}"
    )


def _chosen(outputs: tuple[Any, ...], call: int | None, path: str) -> jax.Array:
    if not outputs:
        raise ValueError(
            f"{_NAME}: the submodule {path!r} was not called with these inputs; a layer inside scan, "
            "vmap or another method than __call__ can't be tapped"
        )
    if call is None and len(outputs) > 1:
        raise ValueError(
            f"{_NAME}: the submodule {path!r} is called {len(outputs)} times; say which one counts: "
            "call=0 is the first, call=-1 the last"
        )
    if call is not None and not -len(outputs) <= call < len(outputs):
        raise ValueError(
            f"{_NAME}: call is {call}, but the submodule {path!r} is called {len(outputs)} time(s)"
        )
    output = outputs[0 if call is None else call]
    if not hasattr(output, "shape"):
        raise ValueError(
            f"{_NAME}: the submodule {path!r} puts out a {type(output).__name__}, not one array; tap "
            "one of its parts"
        )
    return output


def _shaped(features: jax.Array, pool: Pool | None, flatten: bool, path: str) -> jax.Array:
    if pool is not None:
        if features.ndim < 3:
            raise ValueError(
                f"{_NAME}: pool={pool!r} needs axes between the first and the last, but {path!r} puts "
                f"out the shape {features.shape}"
            )
        axes = tuple(range(1, features.ndim - 1))
        if pool == "mean":
            wide = jnp.promote_types(features.dtype, jnp.float32)
            features = jnp.mean(features, axes, dtype=wide).astype(features.dtype)
        else:
            features = jnp.max(features, axes)
    return features.reshape(features.shape[0], -1) if flatten else features
