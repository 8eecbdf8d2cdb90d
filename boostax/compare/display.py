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
            f"[bold]{_escape(plan.task.name)}[/bold]: {len(plan.arms)} arms x {plan.seeds} seeds, "
            f"{plan.steps} steps each, target {_escape(str(plan.target))}"
        )
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
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
        self._one = self._bars.add_task(f"{_escape(arm)}, seed {seed}", total=None, told="starting")

    def progress(
        self, step: int, steps: int, loss: float | None, metrics: Mapping[str, float]
    ) -> None:
        parts = [] if loss is None else [f"loss {loss:.4g}"]
        if self._metric in metrics:
            parts.append(f"{_escape(self._metric)} {metrics[self._metric]:.4g}")
        self._bars.update(self._one, total=steps, completed=step, told="  ".join(parts))

    def finish(self, run: Mapping[str, Any]) -> None:
        self.kept += 1
        self._bars.update(self._all, completed=self.kept)
        metrics = run["evaluations"][-1]["metrics"]
        told = ", ".join(f"{_escape(k)} {_number(v)}" for k, v in metrics.items())
        self.console.print(
            f"{_escape(run['arm'])}, seed {run['seed']}: {told}; {sum(run['step_seconds']):.2f} s in "
            f"steps, {run['compile_seconds']:.2f} s compiling",
            highlight=False,
        )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _escape(text: str) -> str:
    return require("rich.markup", "demo").escape(text)
