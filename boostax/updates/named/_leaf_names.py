"""Which leaves are biases or parameters of a norm, by the names that Flax gives them."""

from __future__ import annotations

import re
from typing import Any

import jax

from boostax._tree import path_string
from boostax.updates.row_sparse import is_row_sparse

__all__ = ["is_bias_or_norm", "no_bias_or_norm"]

# BatchNorm_0, LayerNorm, RMSNorm_3, norm1, post_norm, bn2, ln_f ...
_NORM_LAYER = re.compile(r"(.*norm(_?\d+)?|(bn|ln|gn)(_?(\d+|f|final))?)", re.IGNORECASE)
_WEIGHTS = frozenset({"kernel", "embedding"})
_SCALES = frozenset({"scale", "gamma", "beta"})


def is_bias_or_norm(path: str) -> bool:
    """Say whether the leaf at ``path`` is a bias, or a scale or shift of a normalization layer.

    That is: its own name ends in ``bias`` or is ``scale``, ``gamma`` or ``beta``, or it lies in a layer
    whose name ends in ``norm`` (``BatchNorm_0``, ``LayerNorm``, ``GroupNorm``, ``RMSNorm``, ``norm1``)
    or is ``bn1``, ``ln_f`` and the like, and is no ``kernel`` or ``embedding``.
    """
    *layers, leaf = path.split("/")
    if leaf.endswith("bias") or leaf in _SCALES:
        return True
    inside = any(_NORM_LAYER.fullmatch(layer) for layer in layers)
    return inside and leaf not in _WEIGHTS


def no_bias_or_norm(params: Any) -> Any:
    """Return a mask like ``params``: False for biases and for the parameters of norms."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not is_bias_or_norm(path_string(path)), params, is_leaf=is_row_sparse
    )
