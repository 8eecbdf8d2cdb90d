"""Live progress of a comparison in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from boostax.compare.runner import Plan, Watcher
from boostax.errors import require

__all__ = ["Display"]


class Display(Watcher):
    """Live progress in the terminal: all runs, and the step of the one in progress.

    Attributes:
      kept: finished runs on disk so far.
      total: all runs.
      console: where it writes.
    """

    def __init__(self, plan: Plan):
        progress = require("rich.progress", "demo")
        self.console = require("rich.console", "demo").Console()
        self.console.print(
            f"[bold]{_escape(plan.task.name)}[/bold]\n{len(plan.arms)} arms x {plan.seeds} seeds, "
            f"{plan.steps} steps each, target {_escape(str(plan.target))}"
        )
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=12),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[told]}"),
            progress.TimeElapsedColumn(),
            console=self.console,
        )
        self._metric = plan.target.metric
        self.kept = self.total = 0
        self._all: Any = None
        self._one: Any = None

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the live display; a second time does nothing."""
        self._bars.stop()

    def begin(self, total: int, kept: int) -> None:
        self.kept, self.total = kept, total
        self._all = self._bars.add_task("all runs", total=total, completed=kept, told="")
        if kept:
            self.console.print(f"{kept} of {total} runs are there already and are taken up.")

    def start(self, arm: str, seed: int) -> None:
        if self._one is not None:
            self._bars.remove_task(self._one)
        self._one = self._bars.add_task(
            f"{_escape(_short(arm, 16))}, seed {seed}", total=None, told="starting"
        )

    def progress(
        self, step: int, steps: int, loss: float | None, metrics: Mapping[str, float]
    ) -> None:
        del loss  # the metric is what the target is about, and a line has 80 columns
        told = ""
        if self._metric in metrics:
            told = f"{_escape(_short(self._metric, 10))} {metrics[self._metric]:.4g}"
        self._bars.update(self._one, total=steps, completed=step, told=told)

    def finish(self, run: Mapping[str, Any]) -> None:
        self.kept += 1
        self._bars.update(self._all, completed=self.kept)
        self.console.print(_escape(finished_line(run, self._metric)), highlight=False)


def finished_line(run: Mapping[str, Any], metric: str) -> str:
    """Return what is told of a finished run, in less than 80 columns."""
    value = run["evaluations"][-1]["metrics"].get(metric)
    return (
        f"{_short(run['arm'], 16)}, seed {run['seed']}: {_short(metric, 10)} {_number(value)}; "
        f"{sum(run['step_seconds']):.2f} s, compiling {run['compile_seconds']:.1f} s"
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _escape(text: str) -> str:
    return require("rich.markup", "demo").escape(text)
