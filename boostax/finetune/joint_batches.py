"""Two loaders of unequal length as one, in step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

from boostax.errors import did_you_mean

__all__ = ["JointBatches", "joint_batches"]

Epoch = Literal["longer", "shorter", "source", "target"]
Loader = Iterable[Any] | Callable[[int], Iterable[Any]]
_NAME = "joint_batches"
_END = object()


class JointBatches:
    """One epoch of two loaders, made by :func:`joint_batches`; iterating again is the next epoch."""

    def __init__(self, source: Loader, target: Loader, epoch: Epoch):
        self._sides = {"source": _Side("source", source), "target": _Side("target", target)}
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sides = self._sides
        passes = {name: side.begin() for name, side in sides.items()}
        done: set[str] = set()
        ends = {"longer": set(sides), "shorter": set()}.get(self._epoch, {self._epoch})
        for number in itertools.count():
            batch = {name: next(part, _END) for name, part in passes.items()}
            over = {name for name, value in batch.items() if value is _END}
            if number == 0 and over:
                raise ValueError(f"{_NAME}: {min(over)} has no batch; give at least one")
            done |= over
            if over and ends <= done:
                return
            for name in sorted(over):
                passes[name] = sides[name].begin()
                batch[name] = next(passes[name], _END)
                if batch[name] is _END:
                    raise ValueError(f"{_NAME}: {name} has no batch when it starts anew")
            yield batch

    def __len__(self) -> int:
        """Return the batches of an epoch, where both loaders tell their lengths."""
        lengths = {name: side.length() for name, side in self._sides.items()}
        if self._epoch in lengths:
            return lengths[self._epoch]
        return (max if self._epoch == "longer" else min)(lengths.values())


class _Side:
    """One loader, and how often it was started."""

    def __init__(self, name: str, loader: Loader):
        self.name, self.loader, self.started = name, loader, 0

    def begin(self) -> Iterator[Any]:
        loader = self.loader
        if callable(loader) and not isinstance(loader, Iterable):
            loader = loader(self.started)
        elif self.started and iter(loader) is loader:
            raise TypeError(
                f"{_NAME}: {self.name} is an iterator, which can't start anew; give a list, a loader, "
                "or a function of the pass's number that returns an iterable"
            )
        self.started += 1
        return iter(loader)

    def length(self) -> int:
        if not hasattr(self.loader, "__len__"):
            raise TypeError(f"{_NAME}: {self.name} does not tell its length")
        return len(self.loader)  # pyright: ignore[reportArgumentType]


def joint_batches(source: Loader, target: Loader, *, epoch: Epoch = "longer") -> JointBatches:
    r"""Go through two loaders side by side: ``{"source": ..., "target": ...}`` a step.

    The rule for loaders of unequal length: with S and T batches an epoch has

    .. math::
        n = \max(S, T), \quad \min(S, T), \quad S \quad\text{or}\quad T

    steps, as ``epoch`` says. Both start anew with each epoch, and a loader that is used up before the
    epoch's end starts anew at once. So no batch of the loader that sets the epoch is left out or comes
    twice. Lengths are found by going through, not asked for.

    Args:
      source: batches of the source data: an iterable that can be gone through again (a list, a data
        loader), or a function of the number of the pass (0, 1, ..., counted over all epochs) that
        returns an iterable, so that each pass is shuffled otherwise. An iterator works as long as it
        need not start anew.
      target: the same for the target data.
      epoch: what ends an epoch: ``"longer"`` (default) or ``"shorter"`` of the two, ``"source"`` or
        ``"target"``.

    Returns:
      An iterable of dicts, one epoch an iteration; ``len`` where both loaders have one.

    Raises:
      ValueError: an unknown ``epoch``; while it runs: a loader without a batch.
      TypeError: a loader is neither; while it runs: an iterator would have to start anew.

    Example:
      >>> import boostax
      >>> [(b["source"], b["target"]) for b in boostax.joint_batches("abcde", [1, 2])]
      [('a', 1), ('b', 2), ('c', 1), ('d', 2), ('e', 1)]
      >>> len(boostax.joint_batches("abcde", [1, 2], epoch="target"))
      2

    When not to use:
      With endless loaders an epoch that waits for one of them never ends: take ``epoch="target"``, or
      ``zip`` and a number of steps.
    """
    if epoch not in get_args(Epoch):
        raise ValueError(
            f"{_NAME}: epoch must be one of {', '.join(map(repr, get_args(Epoch)))}, got {epoch!r}."
            f"{did_you_mean(str(epoch), get_args(Epoch))}"
        )
    for name, loader in (("source", source), ("target", target)):
        if not (isinstance(loader, Iterable) or callable(loader) or hasattr(loader, "__getitem__")):
            raise TypeError(
                f"{_NAME}: {name} must be an iterable of batches, or a function of the pass's number "
                f"that returns one, got {type(loader).__name__}"
            )
    return JointBatches(source, target, epoch)
