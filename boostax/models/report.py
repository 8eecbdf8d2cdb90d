"""What a rewrite of a model changed, what it left, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from boostax.training.describe import format_table

__all__ = ["Change", "ModelReport", "NothingToRewriteError", "nothing_matched"]

_SHOWN = 30


class NothingToRewriteError(ValueError):
    """A rewrite found nothing to change in a model; the message lists what it looked at."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One layer that a rewrite changed.

    Attributes:
      path: the layer's path, as in ``"layer1/0/bn1"``; ``""`` is the model itself.
      before: the layer's type before the rewrite, such as ``"BatchNorm"``.
      after: what stands there now, such as ``"nothing"`` or ``"bias"``.
      why: the reason.
    """

    path: str
    before: str
    after: str
    why: str


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """What rewrites changed in a model; ``print`` shows it as tables.

    Reports are added with ``+``, in the order of the rewrites.

    Attributes:
      rewrite: the rewrite's name, or several, joined by ``", "``.
      changes: one :class:`Change` a layer.
      left: pairs of path and reason, for the layers that were looked at and stay as they were.
      notes: anything else that is worth knowing.
    """

    rewrite: str = ""
    changes: tuple[Change, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: ModelReport) -> ModelReport:
        return ModelReport(
            ", ".join(name for name in (self.rewrite, other.rewrite) if name),
            self.changes + other.changes,
            self.left + other.left,
            self.notes + other.notes,
        )

    def __str__(self) -> str:
        title = f"{self.rewrite}: " if self.rewrite else ""
        changed = f"{_count(self.changes)} changed" if self.changes else "no layer was changed"
        head = title + changed
        lines = [head + (f", {_count(self.left)} left" if self.left else "")]
        if self.changes:
            rows = [(c.path or "(model)", c.before, c.after, c.why) for c in self.changes]
            lines += format_table(("path", "before", "after", "why"), rows)
        if self.left:
            rows = [(path or "(model)", why) for path, why in self.left]
            lines += ["", *format_table(("left as it was", "why"), rows)]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def _count(of: Sequence[object]) -> str:
    return f"{len(of)} layer{'' if len(of) == 1 else 's'}"


def nothing_matched(
    rewrite: str, wanted: str, looked_at: Sequence[tuple[str, str]], advice: str = ""
) -> NothingToRewriteError:
    """Return the error of a rewrite that found nothing to change.

    Args:
      rewrite: the rewrite's name.
      wanted: what it looks for, as in ``"a batch norm ahead of an addition"``.
      looked_at: pairs of path and type.
      advice: what the user can do, a sentence.
    """
    seen = [f"{path or '(model)'} ({kind})" for path, kind in looked_at[:_SHOWN]]
    if len(looked_at) > _SHOWN:
        seen.append(f"and {len(looked_at) - _SHOWN} more")
    listed = ", ".join(seen) or "no layer"
    return NothingToRewriteError(
        f"{rewrite}: nothing in the model is {wanted}. Looked at: {listed}."
        + (f" {advice}" if advice else "")
    )
