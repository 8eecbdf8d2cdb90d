"""From runs to ``results.json``: summaries of each arm, ratios to the plain arm, the verdict."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from boostax.compare.runner import Plan, machine, versions
from boostax.compare.statistics import (
    Interval,
    bootstrap_median,
    median,
    paired_ratios,
    time_to_target,
    verdict,
)
from boostax.compare.storage import plain_json

__all__ = ["RESULTS_FORMAT", "summarise"]

RESULTS_FORMAT = "boostax-compare/1"

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def summarise(
    plan: Plan, runs: Runs, builds: Mapping[str, Mapping[str, Any]], command: str
) -> dict[str, Any]:
    """Return the contents of ``results.json``.

    Every interval is ``{"median", "low", "high"}`` with the 95 % bootstrap interval over the seeds;
    a ``null`` there means "longer than the budget" (the run missed the target). The final metrics
    are those of the runs where they are finite; ``not_finite`` counts the others. Ratios are of pairs
    with equal seeds; below 1 the arm needs less than the plain one.

    Args:
      plan: what was run.
      runs: by arm, the records in the order of the seeds.
      builds: by arm, what is known of its build.
      command: the command line, for the reader.
    """
    plain = plan.arms[0].name
    arms = [_arm(plan, arm, runs[arm.name], runs[plain], builds[arm.name]) for arm in plan.arms]
    results = {
        "format": RESULTS_FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "task": plan.task.name,
        "target": {
            "text": str(plan.target),
            "metric": plan.target.metric,
            "value": plan.target.value,
            "lower_is_better": plan.target.lower_is_better,
        },
        "seeds": plan.seeds,
        "steps": plan.steps,
        "eval_every": plan.eval_every,
        "plain": plain,
        "versions": versions(),
        "machine": machine(),
        "arms": arms,
        "runs": [_run(plan, run) for records in runs.values() for run in records],
    }
    return plain_json(results)


def _arm(
    plan: Plan,
    arm: Any,
    records: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
    build: Mapping[str, Any],
) -> dict[str, Any]:
    ours = [time_to_target(run, plan.target) for run in records]
    theirs = [time_to_target(run, plan.target) for run in plain]
    is_plain = arm.name == plan.arms[0].name
    compile_ours, compile_theirs = _compile_seconds(records), _compile_seconds(plain)
    flops = records[0].get("flops_per_step")
    flops_plain = plain[0].get("flops_per_step")

    def ratio(of: Callable[[Any], float]) -> Interval:
        return bootstrap_median(paired_ratios([of(o) for o in ours], [of(o) for o in theirs]))

    def step_time(run: Mapping[str, Any]) -> float:
        return sum(run["step_seconds"]) / len(run["step_seconds"])

    seconds_ratio = ratio(lambda o: o.seconds)
    with_compile = paired_ratios(
        [o.seconds + compile_ours for o in ours], [o.seconds + compile_theirs for o in theirs]
    )
    metrics = records[0]["evaluations"][-1]["metrics"]
    return {
        "name": arm.name,
        "level": arm.level,
        "learning_rate": build["learning_rate"],
        "config": build["config"],
        "enabled": list(build["enabled"]),
        "updates": build["updates"],
        "notes": list(build["notes"]),
        "runs": len(records),
        "reached": sum(o.reached for o in ours),
        "steps_to_target": _interval([o.steps for o in ours]),
        "seconds_to_target": _interval([o.seconds for o in ours]),
        "cpu_seconds_to_target": _interval([o.cpu_seconds for o in ours]),
        "step_seconds": _interval([step_time(run) for run in records]),
        "compile_seconds": compile_ours,
        "flops_per_step": flops,
        "temp_bytes": records[0].get("temp_bytes"),
        "final": {
            name: _final([run["evaluations"][-1]["metrics"].get(name) for run in records])
            for name in metrics
        },
        "flops_ratio": flops / flops_plain if flops and flops_plain else None,
        "step_seconds_ratio": dataclasses.asdict(
            bootstrap_median(paired_ratios([*map(step_time, records)], [*map(step_time, plain)]))
        ),
        "steps_ratio": dataclasses.asdict(ratio(lambda o: o.steps)),
        "seconds_ratio": dataclasses.asdict(seconds_ratio),
        "cpu_seconds_ratio": dataclasses.asdict(ratio(lambda o: o.cpu_seconds)),
        "seconds_ratio_with_compile": dataclasses.asdict(bootstrap_median(with_compile)),
        "verdict": "the plain arm" if is_plain else verdict(ours, theirs),
    }


def _compile_seconds(records: Sequence[Mapping[str, Any]]) -> float:
    # An arm compiles in its first run of a process and again after an interruption; the longest
    # is one whole compilation.
    return max(run["compile_seconds"] for run in records)


def _interval(values: Sequence[float]) -> dict[str, float]:
    return dataclasses.asdict(bootstrap_median([v for v in values if not math.isnan(v)]))


def _final(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the interval of the finite values, and how many are not."""
    finite = [float(v) for v in values if v is not None]
    return {**_interval(finite), "not_finite": len(values) - len(finite)}


def _run(plan: Plan, run: Mapping[str, Any]) -> dict[str, Any]:
    outcome = time_to_target(run, plan.target)
    return {
        "arm": run["arm"],
        "seed": run["seed"],
        "reached": outcome.reached,
        "steps_to_target": outcome.steps,
        "seconds_to_target": outcome.seconds,
        "cpu_seconds_to_target": outcome.cpu_seconds,
        "seconds": sum(run["step_seconds"]),
        "cpu_seconds": sum(run["cpu_seconds"]),
        "compile_seconds": run["compile_seconds"],
        "compilations": run["compilations"],
        "median_step_seconds": median(run["step_seconds"]),
        "evaluations": run["evaluations"],
    }
