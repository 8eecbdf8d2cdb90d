"""The curves of a comparison as TensorBoard event files."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from boostax.compare.storage import slug
from boostax.errors import require

__all__ = ["write_events"]


def write_events(folder: pathlib.Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write one TensorBoard run for each arm and seed: ``folder/ARM/seed-N``.

    ARM is the arm's name as in its run files, so that no name leads out of the folder.

    Scalars are ``loss`` and ``seconds`` (step time so far) at every step, and ``eval/NAME`` for
    every metric of an evaluation. Event files of an earlier call in the same folders go away.

    Args:
      folder: where the runs are written.
      runs: by arm, the records in the order of the seeds.

    Raises:
      MissingExtraError: tensorboardX is not installed; it comes with the extra ``tensorboard``.
    """
    writer_of = require("tensorboardX", "tensorboard").SummaryWriter
    for arm, records in runs.items():
        for record in records:
            place = folder / slug(arm) / f"seed-{record['seed']}"
            for old in place.glob("events.out.tfevents.*"):
                old.unlink()
            with writer_of(str(place)) as writer:
                seconds = 0.0
                curve = zip(record["loss"], record["step_seconds"], strict=True)
                for step, (loss, spent) in enumerate(curve, 1):
                    seconds += spent
                    writer.add_scalar("loss", float("nan") if loss is None else loss, step)
                    writer.add_scalar("seconds", seconds, step)
                for point in record["evaluations"]:
                    for name, value in point["metrics"].items():
                        value = float("nan") if value is None else value
                        writer.add_scalar(f"eval/{name}", value, point["step"])
