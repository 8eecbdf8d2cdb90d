"""nnx models at the gradient seam: split outside the step, merged anew inside each trace."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, serialization

from boostax._tree import leaf_paths
from boostax.training.batch_stats import collect_momenta
from boostax.training.contract import CanonicalLoss, LossAux, check_output, declared_keywords


class NnxModel:
    """The static half of an nnx model, and the loss in canonical form.

    Random keys inside the model (those of ``nnx.Rngs``) are kept as raw uint32 data in the train
    state, because not every checkpoint format takes typed keys; they are typed again on merging.

    Attributes:
      params: ``nnx.State`` of the leaves that ``wrt`` selects.
      model_state: ``nnx.State`` of all other leaves, keys as raw data.
      momenta: momentum of each normalisation layer, by module path.
    """

    def __init__(self, model: nnx.Module, wrt: Any):
        self.graphdef, self.params, rest = nnx.split(model, wrt, ...)
        leaves, self._treedef = jax.tree.flatten(rest)
        self._key_impls = [_key_impl(leaf) for leaf in leaves]
        self.momenta = collect_momenta(model)
        self.model_state = self._pack(rest)

    def _pack(self, rest: Any) -> Any:
        leaves, treedef = jax.tree.flatten(rest)
        if treedef != self._treedef:
            raise ValueError(
                "loss_fn changed which variables the model has (a variable was added or removed "
                "during the forward pass); create all variables in the model's constructor, or run "
                "the model once before step.init"
            )
        raw = [
            leaf if impl is None else jax.random.key_data(leaf)
            for leaf, impl in zip(leaves, self._key_impls, strict=True)
        ]
        return self._treedef.unflatten(raw)

    def merge(self, params: Any, model_state: Any) -> nnx.Module:
        """Return a new model with these values; its variables belong to the current trace."""
        typed = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(
                self._treedef.flatten_up_to(model_state), self._key_impls, strict=True
            )
        ]
        return nnx.merge(self.graphdef, params, self._treedef.unflatten(typed), copy=True)

    def fold_keys(self, model_state: Any, data: Any) -> Any:
        """Return the model state with ``data`` folded into each random key."""

        def fold(raw: Any, impl: str | None) -> Any:
            if impl is None:
                return raw
            keys = jax.random.wrap_key_data(raw, impl=impl)
            folded = jax.vmap(lambda key: jax.random.fold_in(key, data))(keys.reshape(-1))
            return jax.random.key_data(folded).reshape(raw.shape)

        leaves = self._treedef.flatten_up_to(model_state)
        return self._treedef.unflatten(
            [fold(raw, impl) for raw, impl in zip(leaves, self._key_impls, strict=True)]
        )

    def with_keys_of(self, source: Any, model_state: Any) -> Any:
        """Return ``model_state`` with the random keys of ``source``; their counters stay."""
        pairs = zip(
            self._treedef.flatten_up_to(source),
            self._treedef.flatten_up_to(model_state),
            self._key_impls,
            strict=True,
        )
        return self._treedef.unflatten([new if impl is None else old for old, new, impl in pairs])

    def canonical_loss(self, loss_fn: Callable[..., Any], has_aux: bool) -> CanonicalLoss:
        """Bring ``loss_fn(model, batch, *, rng)`` into the form of the gradient seam."""
        declared = declared_keywords(loss_fn)
        if "model_state" in declared and not _takes_any(loss_fn):
            raise TypeError(
                "loss_fn declares model_state, but an nnx model holds its own state; write "
                "loss_fn(model, batch) or loss_fn(model, batch, *, rng)"
            )
        passes_rng = "rng" in declared

        def loss(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, LossAux]:
            model = self.merge(params, model_state)
            output = loss_fn(model, batch, rng=rng) if passes_rng else loss_fn(model, batch)
            value, aux = check_output(output, has_aux)
            if aux.model_state is not None:
                raise TypeError(
                    "loss_fn returned LossAux.model_state for an nnx model; the model's own state "
                    "is read after the forward pass, so leave it out"
                )
            _, _, rest = nnx.split(model, same_paths(params), ...)
            return value, aux.replace(model_state=self._pack(rest))

        return loss


def same_paths(params: Any) -> Any:
    """Return the nnx filter that selects the leaves that ``params`` has."""
    paths = {path for path, _ in nnx.to_flat_state(params)}
    return lambda path, value: tuple(path) in paths


def _key_impl(leaf: Any) -> str | None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return str(jax.random.key_impl(leaf))


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _to_state_dict(state: nnx.State) -> dict[str, Any]:
    return dict(zip(leaf_paths(state), jax.tree.leaves(state), strict=True))


def _from_state_dict(target: nnx.State, saved: dict[str, Any]) -> nnx.State:
    paths = leaf_paths(target)
    if set(saved) != set(paths):
        raise ValueError(
            "the saved nnx state does not fit the model: missing "
            f"{sorted(set(paths) - set(saved))}, unknown {sorted(set(saved) - set(paths))}"
        )
    return jax.tree.unflatten(jax.tree.structure(target), [saved[path] for path in paths])


# flax.serialization knows linen's dicts but not nnx.State, which an nnx model's train state holds.
# Where a later flax, or the user, has registered it, that stays.
with contextlib.suppress(ValueError):
    serialization.register_serialization_state(nnx.State, _to_state_dict, _from_state_dict)
