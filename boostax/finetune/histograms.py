"""Histograms of filter responses: descriptors of an image by its low-level content.

With ``x[n, p, c]`` the response of filter ``c`` at position ``p`` of image ``n``, of ``P`` positions,
``C`` filters and ``B`` bins with the inner edges ``e[c, 1] <= ... <= e[c, B - 1]``::

    count[n, c, b] = number of positions p with e[c, b] <= x[n, p, c] < e[c, b + 1]
    h[n, c, b]     = (count[n, c, b] + s) / (C * (P + B * s))

so that a row sums to 1, and the descriptors of several layers, joined, weigh each layer alike.
"""

from __future__ import annotations

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from boostax.finetune._blocks import native

__all__ = ["feature_histograms", "histogram_edges"]


def histogram_edges(features: Any, bins: int) -> np.ndarray:
    r"""Return inner edges of bins that hold equal shares of the responses, one row a filter.

    .. math:: e_{cb} = \text{the } b/B \text{ quantile of } x_{\cdot\cdot c}, \qquad b = 1, \dots, B - 1

    so that bins are narrow where responses are frequent.

    Args:
      features: filter responses ``(examples, positions..., filters)``, finite real numbers, such as
        :func:`boostax.feature_tap` gives. Some thousand images of both data sets are enough.
      bins: number of bins, an int >= 2.

    Returns:
      A float32 array of shape ``(filters, bins - 1)``, to be handed to :func:`feature_histograms`.

    Raises:
      TypeError: ``bins`` is no integer, or the features are no real numbers.
      ValueError: ``bins`` is below 2; the features are empty, not finite, or have fewer than two axes.

    Example:
      >>> import numpy as np, boostax
      >>> boostax.histogram_edges(np.arange(9.0).reshape(1, 9, 1), 4).tolist()
      [[2.0, 4.0, 6.0]]

    Source:
      W. Ge and Y. Yu, "Borrowing Treasures from the Wealthy: Deep Transfer Learning through Selective
      Joint Fine-tuning", 2017.

    When not to use:
      On the target's few examples alone: the edges should be those of both data sets together.
    """
    count = _bins("histogram_edges", bins)
    if isinstance(features, Tracer):
        raise TypeError("histogram_edges: features is traced: call this outside jit, grad and vmap")
    values = _real("histogram_edges", features)
    responses = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32)
    responses = responses.reshape(-1, responses.shape[-1])
    if not np.isfinite(responses).all():
        raise ValueError("histogram_edges: features hold NaN or infinity")
    edges = np.quantile(responses, np.arange(1, count) / count, axis=0)
    return np.ascontiguousarray(edges.T, np.float32)


def feature_histograms(features: Any, bins: Any, *, smoothing: float = 0.5) -> jax.Array:
    r"""Describe each example by the histograms of its filter responses, one histogram a filter.

    .. math:: h_{ncb} = \frac{\#\{p : e_{cb} \le x_{npc} < e_{c,b+1}\} + s}{C\,(P + B s)}

    with C filters, P positions, B bins and the pseudo-count s. A row sums to 1. The first bin is open
    below and the last one above. Descriptors of several layers are joined by
    ``jnp.concatenate([h1, h2], axis=1)``, in which each layer weighs the same.

    Args:
      features: filter responses ``(examples, positions..., filters)``, real numbers; one position if
        there are only two axes.
      bins: the edges that :func:`histogram_edges` returned, ``(filters, bins - 1)``, not decreasing
        along the last axis: the same for both data sets. Or an int >= 2, for the edges of these
        features alone (not inside jit).
      smoothing: the pseudo-count s, >= 0. Default 0.5. With 0 a bin can be empty, which
        ``metric="symmetric_kl"`` of :func:`boostax.nearest_source_subset` refuses.

    Returns:
      A float32 array ``(examples, filters * bins)``. Inside jit an example with NaN has a row of NaN.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: outside jit, features that are not finite; edges of another shape or not sorted;
        features that are empty or have fewer than two axes; a negative ``smoothing``.

    Example:
      >>> import numpy as np, boostax
      >>> x = np.array([[0.0, 1.0, 2.0, 7.0]]).reshape(1, 2, 2, 1)
      >>> boostax.feature_histograms(x, np.array([[1.0, 5.0]]), smoothing=0.0).tolist()
      [[0.25, 0.5, 0.25]]

    Source:
      W. Ge and Y. Yu, "Borrowing Treasures from the Wealthy: Deep Transfer Learning through Selective
      Joint Fine-tuning", 2017.

    When not to use:
      Where position matters: a histogram forgets where in the image a response was.
    """
    values = _real("feature_histograms", features)
    if not isinstance(smoothing, numbers.Real) or isinstance(smoothing, bool):
        raise TypeError(f"feature_histograms: smoothing must be a number >= 0, got {smoothing!r}")
    if not 0 <= float(smoothing) < np.inf:
        raise ValueError(f"feature_histograms: smoothing must be >= 0 and finite, got {smoothing}")
    known = not isinstance(values, Tracer)
    if isinstance(bins, (numbers.Integral, bool)):
        if not known:
            raise TypeError(
                "feature_histograms: inside jit bins must be edges; make them outside, with "
                "boostax.histogram_edges(features, bins)"
            )
        bins = histogram_edges(values, _bins("feature_histograms", bins))
    edges = _edges(bins, values.shape[-1])
    histograms = _histograms(values, edges, float(smoothing))
    if known and not bool(jnp.isfinite(histograms).all()):
        raise ValueError("feature_histograms: features hold NaN or infinity")
    return histograms


@functools.partial(jax.jit, static_argnames="smoothing")
def _histograms(features: Any, edges: Any, smoothing: float) -> jax.Array:
    x = jnp.asarray(features)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    positions, filters, bins = x.shape[1], x.shape[2], edges.shape[1] + 1
    # Counts at or above each edge, whose differences are the bins: nothing of size P * B is kept.
    above = jnp.sum(
        x[..., None] >= edges.astype(x.dtype)[None, None], axis=1, dtype=jnp.int32
    ).astype(jnp.float32)
    first = jnp.full_like(above[..., :1], positions)
    counts = jnp.diff(
        jnp.concatenate([first, above, jnp.zeros_like(first)], axis=-1)[..., ::-1], axis=-1
    )[..., ::-1]
    rows = (counts + smoothing) / (filters * (positions + bins * smoothing))
    finite = jnp.isfinite(x).all(axis=(1, 2))
    return jnp.where(finite[:, None], rows.reshape(x.shape[0], -1), jnp.nan)


def _bins(caller: str, bins: Any) -> int:
    if isinstance(bins, (bool, np.bool_)) or not isinstance(bins, numbers.Integral):
        raise TypeError(f"{caller}: bins must be an int >= 2, got {bins!r}")
    if bins < 2:
        raise ValueError(f"{caller}: bins must be >= 2, got {bins}")
    return int(bins)


def _real(caller: str, features: Any) -> Any:
    values = native(features if hasattr(features, "dtype") else np.asarray(features))
    if not (
        jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(values.dtype, jnp.integer)
    ):
        raise TypeError(f"{caller}: features must be real numbers, got dtype {values.dtype}")
    if values.ndim < 2 or 0 in values.shape:
        raise ValueError(
            f"{caller}: features must have the axes (examples, positions..., filters), none of them "
            f"empty, got shape {tuple(values.shape)}"
        )
    return values


def _edges(bins: Any, filters: int) -> Any:
    edges = bins if isinstance(bins, jax.Array) else native(np.asarray(bins))
    if edges.ndim != 2 or edges.shape[0] != filters or edges.shape[1] < 1:
        raise ValueError(
            f"feature_histograms: bins must be an int or edges of shape ({filters}, bins - 1), a row a "
            f"filter, got shape {tuple(edges.shape)}"
        )
    if not isinstance(edges, Tracer):
        known = np.asarray(edges, np.float64)
        if not (np.isfinite(known).all() and (np.diff(known, axis=1) >= 0).all()):
            raise ValueError(
                "feature_histograms: the edges in bins must be finite and not decrease along the last "
                "axis; make them with boostax.histogram_edges"
            )
    return edges
