"""The one module that knows how JAX versions differ, and what its types need in ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

__all__ = [
    "all_gather",
    "as_carry",
    "backend_is_up",
    "bind",
    "called",
    "cond",
    "explicit_spec",
    "in_a_cluster",
    "initialize_in_cluster",
    "inner_jaxprs",
    "laid_out",
    "laid_out_by_xla",
    "like",
    "open_jaxpr",
    "scan_parts",
    "tracks_varying",
    "varying_axes",
    "whole",
    "zeros_like",
    "zeros_of",
]


def in_manual_region() -> bool:
    """Say whether this is traced inside ``shard_map``."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes over which a value in ``shard_map`` differs between devices."""
    kind = getattr(value, "manual_axis_type", None)
    if kind is None:
        kind = getattr(jax.typeof(value), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def explicit_spec(value: Any) -> Any | None:
    """Return how an array lies over Explicit mesh axes, or None where its type tells of none."""
    sharding = getattr(jax.typeof(value), "sharding", None)
    spec = getattr(sharding, "spec", ())
    return spec if any(part is not None for part in spec) else None


def laid_out(value: jax.Array, spec: Any) -> jax.Array:
    """Lay an array out over the Explicit mesh axes as ``spec`` says; None changes nothing."""
    return value if spec is None else jax.sharding.reshard(value, spec)


def laid_out_by_xla(function: Callable[..., Any], *values: jax.Array) -> Any:
    """Call a function of arrays that Explicit mesh axes split; its results are split by none."""
    if all(explicit_spec(value) is None for value in values):
        return function(*values)
    replicated = jax.sharding.PartitionSpec()
    return jax.sharding.auto_axes(function, out_sharding=replicated)(*values)


def whole(value: jax.Array) -> jax.Array:
    """Return an array that no Explicit mesh axis splits, so that it can take any shape."""
    if explicit_spec(value) is None:
        return value
    return laid_out(value, jax.sharding.PartitionSpec(*[None] * jnp.ndim(value)))


def zeros_like(value: Any) -> jax.Array:
    """Return zeros of the same shape, dtype and sharding, the same on all devices in ``shard_map``.

    ``jnp.zeros_like`` of a value that varies over a mesh axis varies as well.
    """
    if not in_manual_region():
        return jnp.zeros_like(value)
    spec = explicit_spec(value)
    if spec is None:
        return jnp.zeros(jnp.shape(value), jnp.result_type(value))
    return jnp.zeros(jnp.shape(value), jnp.result_type(value), out_sharding=spec)


def like(value: Any, other: Any) -> Any:
    """Return ``value``, varying over the mesh axes in ``shard_map`` that ``other`` varies over."""
    missing = varying_axes(other) - varying_axes(value)
    return lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def cond(pred: Any, on_true: Callable[[], Any], on_false: Callable[[], Any]) -> Any:
    """``lax.cond`` without operands, for known predicates and for ``shard_map``.

    A predicate that is known (outside of jit) picks its branch in Python: ``lax.cond`` would
    compile both, anew at every call. Inside ``shard_map`` the branches' results are brought to
    the same type: a leaf that varies over a mesh axis in one branch varies in both.
    """
    if not isinstance(pred, Tracer):
        return on_true() if pred else on_false()
    if in_manual_region():
        on_true, on_false = _joined(on_true, on_false), _joined(on_false, on_true)
    return lax.cond(pred, on_true, on_false)


def _joined(branch: Callable[[], Any], other: Callable[[], Any]) -> Callable[[], Any]:
    def joined() -> Any:
        return jax.tree.map(like, branch(), jax.eval_shape(other))

    return joined


def zeros_of(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros as ``jax.eval_shape`` describes them, with the sharding that the type tells."""
    sharding = getattr(struct, "sharding", None)
    if sharding is None or in_manual_region():
        return jnp.zeros(struct.shape, struct.dtype)
    return jnp.zeros(struct.shape, struct.dtype, device=sharding)


def as_carry(body: Callable[[Any], Any], carry: Any) -> Any:
    """Return the first carry of a scan with the type that ``body`` gives it in ``shard_map``.

    There a sum of what differs between devices differs as well, and zeros don't.
    """
    while in_manual_region():
        out = jax.eval_shape(body, carry)
        joined = jax.tree.map(like, carry, out)
        if all(
            varying_axes(a) == varying_axes(b)
            for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(carry), strict=True)
        ):
            break
        carry = joined
    return carry


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr without its constants, whether it came closed or open."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner if hasattr(inner, "eqns") else jaxpr


def inner_jaxprs(eqn: Any) -> dict[str, list[Any]]:
    """Return the jaxprs among an equation's parameters, opened, by parameter name.

    Some JAX versions keep them closed, some open, some in a tuple.
    """
    found: dict[str, list[Any]] = {}
    for name, value in eqn.params.items():
        values = value if isinstance(value, (tuple, list)) else [value]
        jaxprs = [open_jaxpr(v) for v in values if hasattr(open_jaxpr(v), "eqns")]
        if jaxprs:
            found[name] = jaxprs
    return found


def tracks_varying(axis_name: str) -> bool:
    """Say whether types tell what varies over this bound axis (``shard_map`` with its checks)."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def all_gather(value: jax.Array, axis_name: str) -> jax.Array:
    """Gather along a new first axis; where types tell, the result is the same on all devices."""
    if tracks_varying(axis_name):
        return lax.all_gather(value, axis_name, to="invarying")
    return lax.all_gather(value, axis_name)


def backend_is_up() -> bool:
    """Say whether JAX has looked at its devices, after which no process can join a run."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def in_a_cluster() -> bool:
    """Say whether JAX recognises the cluster that this process runs in."""
    from jax._src.clusters import ClusterEnv

    return any(
        kind.is_env_present() for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method
    )


# What JAX says where it finds no cluster: the first thing that it lacks.
_NO_CLUSTER = "coordinator_address should be defined."


def initialize_in_cluster(cluster: str | None, options: dict[str, Any]) -> bool:
    """Call ``jax.distributed.initialize`` with what the cluster tells; False where there is none."""
    try:
        jax.distributed.initialize(cluster_detection_method=cluster, **options)
    except ValueError as error:
        if str(error) != _NO_CLUSTER:
            raise
        return False
    return True


def called(eqn: Any) -> tuple[Any, list[Any]]:
    """Return the jaxpr that a call, a scan or a custom derivative holds, opened, and its constants."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            held = eqn.params[name]
            return open_jaxpr(held), list(getattr(held, "consts", ()))
    raise KeyError(f"{eqn.primitive.name}: no jaxpr among {sorted(eqn.params)}")


def scan_parts(eqn: Any) -> tuple[int, int]:
    """Return how many inputs of a scan are fixed, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    numbered = eqn.params["ft_in"].update(list(range(len(eqn.invars))))
    fixed, carried, _ = map(list, numbered.unpack())
    return len(fixed), len(carried)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation of a jaxpr."""
    given = eqn.primitive.get_bind_params(eqn.params)
    functions: Sequence[Any] = ()
    if isinstance(given, tuple):
        functions, given = given
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **given)
    return list(out) if eqn.primitive.multiple_results else [out]
