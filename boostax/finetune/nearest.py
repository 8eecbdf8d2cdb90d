"""The part of the source data that is nearest to the target data: selective joint fine-tuning."""

from __future__ import annotations

import numbers
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.core import Tracer

from boostax.errors import did_you_mean
from boostax.finetune import _search
from boostax.finetune._blocks import matrix, row_blocks, row_count

__all__ = ["SourceSubset", "enlarge_neighbours", "nearest_source_subset"]

Metric = Literal["euclidean", "cosine", "symmetric_kl"]
_NAME = "nearest_source_subset"
_TILE = 4096
_LARGEST = 2**31 - 1


class SourceSubset(NamedTuple):
    """The source examples that are near to the targets, as numpy arrays.

    Attributes:
      indices: (n,) int32, the chosen source examples, ascending, each once.
      neighbours: (targets, largest k) int32, for each target its source examples, the nearest first;
        -1 behind its own k.
      distances: (targets, largest k) float, how far they are; inf behind its own k.
      k: (targets,) int32, how many each target has.
    """

    indices: np.ndarray
    neighbours: np.ndarray
    distances: np.ndarray
    k: np.ndarray


def nearest_source_subset(
    source_features: Any,
    target_features: Any,
    k: Any,
    *,
    metric: Metric = "euclidean",
    block: int = 8192,
) -> SourceSubset:
    r"""Choose for each target example its nearest source examples, exactly, and take them together.

    .. math::
        S = \bigcup_i \operatorname{arg\,min}^{(k_i)}_j\; d(t_i, s_j), \qquad
        d \in \Big\{ \lVert t - s \rVert,\; 1 - \tfrac{t \cdot s}{\lVert t \rVert \lVert s \rVert},\;
        \textstyle\sum_c (t_c - s_c)(\log t_c - \log s_c) \Big\}

    The source is read once, in blocks: each is one matrix product, its ``top_k``, and a merge with
    what was found before. Of equally near examples the lowest index wins. Products and sums are
    float32 or better, whatever the features' dtype, of features less the targets' mean. So distances
    are exact to some 1e-7 of the largest distance from that mean: within clusters that lie far apart
    from each other, digits are lost.

    Args:
      source_features: ``(examples, features)``, real and finite: an array (numpy, a memory map, JAX),
        the name of a .npy file, or an iterable of blocks of rows.
      target_features: ``(targets, features)``, an array or the name of a .npy file; held as a whole.
      k: neighbours of each target, an int >= 1, or ``(targets,)`` ints >= 0: hard targets get more, see
        :func:`enlarge_neighbours`. At most the number of source examples.
      metric: ``"euclidean"``, ``"cosine"`` (a row of zeros has the distance 1 from every row), or
        ``"symmetric_kl"`` for the rows of :func:`feature_histograms`. Default ``"euclidean"``.
      block: source rows that are looked at together, an int >= 1. Default 8192. Beside the targets and
        the result, memory is ``block * (features + min(targets, 4096))`` numbers, a few times.

    Returns:
      A :class:`SourceSubset`.

    Raises:
      TypeError: an argument has a wrong type, or features are no real numbers.
      ValueError: features are empty, no matrix, of different widths, or not finite (the message names
        the row); ``k`` or ``block`` is out of range; an unknown metric; entries that are not above 0
        with ``"symmetric_kl"``; squares that overflow.

    Example:
      >>> import numpy as np, boostax
      >>> source = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0], [9.0, 9.0]])
      >>> target = np.array([[1.0, 1.0], [8.0, 8.0]])
      >>> subset = boostax.nearest_source_subset(source, target, [2, 1])
      >>> subset.indices.tolist(), subset.neighbours.tolist()
      ([0, 1, 3], [[1, 0], [3, -1]])

    Source:
      W. Ge and Y. Yu, "Borrowing Treasures from the Wealthy: Deep Transfer Learning through Selective
      Joint Fine-tuning", 2017.

    When not to use:
      With a source that is small enough to train on as a whole; or with hundreds of millions of source
      examples, where an approximate index pays.
    """
    if not isinstance(metric, str) or metric not in _search.METRICS:
        raise ValueError(
            f"{_NAME}: metric must be one of {', '.join(map(repr, _search.METRICS))}, got {metric!r}."
            f"{did_you_mean(str(metric), _search.METRICS)}"
        )
    rows = _whole("block", block)
    if rows < 1:
        raise ValueError(f"{_NAME}: block must be >= 1, got {rows}")
    targets = matrix(f"{_NAME}: target_features", target_features)
    count, width = targets.shape
    counts = _neighbours("k", k, count)
    known = row_count(f"{_NAME}: source_features", source_features)
    largest = int(counts.max())
    if largest == 0:
        raise ValueError(f"{_NAME}: k is 0 for every target; ask for at least one neighbour")
    if known is not None:
        _check_enough(largest, known)
    tile = -(-count // -(-count // _TILE))
    held, unfit = _search.prepare_targets(targets, metric=metric, tile=tile)
    _check_rows("target_features", int(unfit), metric)
    # How long an iterable is turns out at its end: no room for more than there can be.
    room, seen = largest if known is not None else min(largest, rows), 0
    found = _search.start(held, room)
    for part, used in row_blocks(f"{_NAME}: source_features", source_features, rows):
        if part.shape[1] != width:
            raise ValueError(
                f"{_NAME}: source_features has {part.shape[1]} features, target_features {width}; both "
                "must come from the same layer"
            )
        if seen + used >= _search.NO_ROW:
            raise ValueError(f"{_NAME}: source_features has 2**31 rows or more")
        first = np.int32(seen)
        if room < min(largest, seen + used):
            room = min(largest, 2 * room)
            found = _search.widen(found, room)
        prepared = _search.prepare_block(part, held, first, np.int32(used), metric=metric)
        found = _search.step(found, held, *prepared, first)
        seen += used
    _check_rows("source_features", int(found.unfit), metric)
    _check_enough(largest, seen)
    far = _search.distances(found.scores, held, metric=metric)
    indices = np.asarray(found.indices).reshape(-1, largest)[:count].copy()
    apart = np.asarray(far).reshape(-1, largest)[:count].copy()
    behind = np.arange(largest) >= counts[:, None]
    indices[behind], apart[behind] = -1, np.inf
    return SourceSubset(np.unique(indices[~behind]), indices, apart, counts)


def enlarge_neighbours(
    k: Any,
    logits: Any,
    labels: Any,
    *,
    wrong: int,
    uncertain: int = 0,
    entropy: float = 0.1,
) -> np.ndarray:
    r"""Give hard targets more neighbours for the next search, by what the network makes of them.

    .. math::
        k_i \leftarrow k_i + \begin{cases}
          w & \text{the label is not the largest logit} \\
          u & \text{it is, and } H(p_i) > h \\
          0 & \text{otherwise} \end{cases}
        \qquad H(p) = -\sum_c p_c \log p_c

    with the wrong targets' growth w, the uncertain ones' u, and the entropy bound h in nats. After
    some epochs of joint training on a subset: evaluate the targets, enlarge, search anew, go on.

    Args:
      k: the neighbours so far, an int >= 1 or ``(targets,)`` ints >= 0.
      logits: ``(targets, classes)``, the target head's, in evaluation mode; finite.
      labels: ``(targets,)`` integers in [0, classes).
      wrong: how many more a misclassified target gets, an int >= 0.
      uncertain: how many more a right but uncertain one gets, an int >= 0. Default 0.
      entropy: the entropy above which a target is uncertain, in nats, >= 0. Default 0.1; ln(classes)
        is the largest possible.

    Returns:
      A ``(targets,)`` int32 array for :func:`nearest_source_subset`.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: shapes that don't go together, labels out of range, logits that are not finite, or a
        negative number.

    Example:
      >>> import numpy as np, boostax
      >>> logits = np.array([[9.0, 0.0], [9.0, 0.0], [0.1, 0.0]])
      >>> boostax.enlarge_neighbours(5, logits, np.array([0, 1, 0]), wrong=10, uncertain=3).tolist()
      [5, 15, 8]

    Source:
      W. Ge and Y. Yu, "Borrowing Treasures from the Wealthy: Deep Transfer Learning through Selective
      Joint Fine-tuning", 2017; the numbers there depend on its data.

    When not to use:
      With targets that the network fits at once: then no target is hard, and nothing changes.
    """
    caller = "enlarge_neighbours"
    scores, classes = _numbers("logits", logits, caller), _numbers("labels", labels, caller)
    if scores.ndim != 2 or 0 in scores.shape or classes.shape != scores.shape[:1]:
        raise ValueError(
            f"{caller}: logits must be (targets, classes) and labels (targets,), got "
            f"{scores.shape} and {classes.shape}"
        )
    if not np.issubdtype(classes.dtype, np.integer):
        raise TypeError(f"{caller}: labels must be integers, got dtype {classes.dtype}")
    scores = scores.astype(np.float64)
    if classes.min() < 0 or classes.max() >= scores.shape[1]:
        raise ValueError(
            f"{caller}: labels must be in [0, {scores.shape[1] - 1}], got {classes.min()} to "
            f"{classes.max()}"
        )
    if not np.isfinite(scores).all():
        raise ValueError(f"{caller}: logits hold NaN or infinity")
    more = {"wrong": wrong, "uncertain": uncertain}
    for name, value in more.items():
        if _whole(name, value, caller) < 0:
            raise ValueError(f"{caller}: {name} must be >= 0, got {value}")
        if value > _LARGEST:
            raise ValueError(f"{caller}: {name} must be below 2**31, got {value}")
    if not isinstance(entropy, numbers.Real) or isinstance(entropy, bool) or not entropy >= 0:
        raise ValueError(f"{caller}: entropy must be a number >= 0, in nats, got {entropy!r}")
    counts = _neighbours("k", k, len(classes), caller)
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    spread = -(np.exp(logs) * logs).sum(axis=1)
    growth = np.where(spread > entropy, uncertain, 0)
    growth = np.where(scores.argmax(axis=1) != classes, wrong, growth)
    grown = counts.astype(np.int64) + growth
    if grown.max() > _LARGEST:
        raise ValueError(f"{caller}: k grows to {grown.max()}; it must stay below 2**31")
    return grown.astype(np.int32)


def _check_enough(largest: int, examples: int) -> None:
    if largest > examples:
        raise ValueError(
            f"{_NAME}: k is up to {largest}, but there are only {examples} source examples"
        )


def _check_rows(argument: str, row: int, metric: str) -> None:
    if row == _search.NO_ROW:
        return
    if metric == "symmetric_kl":
        raise ValueError(
            f"{_NAME}: {argument}: row {row} has an entry that is not a finite number above 0, which "
            "metric='symmetric_kl' needs; feature_histograms with smoothing > 0 gives such rows"
        )
    raise ValueError(
        f"{_NAME}: {argument}: row {row} holds NaN, infinity, or numbers whose squares overflow"
    )


def _neighbours(argument: str, value: Any, targets: int, caller: str = _NAME) -> np.ndarray:
    given = _numbers(argument, value, caller)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(
            f"{caller}: {argument} must be an int or integers, one a target, got {value!r}"
        )
    if given.size and given.max() > _LARGEST:
        raise ValueError(f"{caller}: {argument} must be below 2**31, got {given.max()}")
    if given.ndim == 0:
        if given < 1:
            raise ValueError(f"{caller}: {argument} must be >= 1, got {int(given)}")
        given = np.full(targets, given)
    if given.shape != (targets,):
        raise ValueError(
            f"{caller}: {argument} must be one int or {targets} of them, one a target, got shape "
            f"{given.shape}"
        )
    if given.min() < 0:
        raise ValueError(f"{caller}: {argument} must not be negative, got {given.min()}")
    return given.astype(np.int32)


def _numbers(argument: str, value: Any, caller: str) -> np.ndarray:
    if isinstance(value, Tracer):
        raise TypeError(f"{caller}: {argument} is traced: call this outside jit, grad and vmap")
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{caller}: {argument} must be an array of numbers: {error}") from error
    if given.dtype.kind not in "biufV" or isinstance(value, dict):
        raise TypeError(f"{caller}: {argument} must be an array of real numbers, got {value!r}")
    return given


def _whole(argument: str, value: Any, caller: str = _NAME) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{caller}: {argument} must be an int, got {value!r}")
    return int(value)
