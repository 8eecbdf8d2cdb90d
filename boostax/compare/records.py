"""What a whole run record has to hold; a file on disk may have been cut short or edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["RUN_FORMAT", "run_faults"]

RUN_FORMAT = "boostax-compare-run/1"


def run_faults(run: Any) -> list[str]:
    """Return what keeps the contents of a run file from being a whole run; nothing if it is one."""
    if not isinstance(run, dict) or run.get("format") != RUN_FORMAT:
        return ["it does not say that it is one"]
    faults = [
        f"{key}: missing or not {words}" for key, words, fits in _FIELDS if not fits(run, key)
    ]
    if faults:
        return faults
    build, points = run["build"], run["evaluations"]
    faults += [
        f"build.{key}: missing or not {words}"
        for key, words, fits in _BUILD_FIELDS
        if not fits(build, key)
    ]
    if not len(run["loss"]) == len(run["step_seconds"]) == len(run["cpu_seconds"]):
        faults.append("loss, step_seconds and cpu_seconds are not of one length")
    if not all(map(_is_point, points)):
        faults.append("evaluations: one has no step, seconds, cpu_seconds or metrics")
    elif [p["step"] for p in points] != sorted({p["step"] for p in points}) or not (
        0 <= points[0]["step"] <= points[-1]["step"] <= len(run["loss"])
    ):
        faults.append("evaluations: their steps are not in order, or not those of the run")
    return faults


def _number(value: Any, *, null: bool = False) -> bool:
    if value is None:
        return null
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is(*types: type) -> Callable[[Any, str], bool]:
    def fits(run: Any, key: str) -> bool:
        value = run.get(key)
        return isinstance(value, types) and not isinstance(value, bool)

    return fits


def _numbers(*, null: bool = False) -> Callable[[Any, str], bool]:
    def fits(run: Any, key: str) -> bool:
        values = run.get(key)
        return (
            isinstance(values, list) and bool(values) and all(_number(v, null=null) for v in values)
        )

    return fits


def _texts(run: Any, key: str) -> bool:
    values = run.get(key)
    return isinstance(values, list) and all(isinstance(v, str) for v in values)


def _is_point(point: Any) -> bool:
    return (
        isinstance(point, dict)
        and _is(int)(point, "step")
        and _number(point.get("seconds"))
        and _number(point.get("cpu_seconds"))
        and isinstance(point.get("metrics"), dict)
        and all(_number(value, null=True) for value in point["metrics"].values())
    )


_FIELDS: tuple[tuple[str, str, Callable[[Any, str], bool]], ...] = (
    ("fingerprint", "text", _is(str)),
    ("settings", "an object", _is(dict)),
    ("arm", "text", _is(str)),
    ("seed", "an integer", _is(int)),
    ("build", "an object", _is(dict)),
    ("loss", "a list of numbers", _numbers(null=True)),
    ("step_seconds", "a list of numbers", _numbers()),
    ("cpu_seconds", "a list of numbers", _numbers()),
    ("compile_seconds", "a number", _is(int, float)),
    ("compilations", "an integer", _is(int)),
    ("flops_per_step", "a number or null", lambda run, key: _number(run.get(key), null=True)),
    ("temp_bytes", "a number or null", lambda run, key: _number(run.get(key), null=True)),
    ("evaluations", "a list with a part in it", lambda run, key: _is(list)(run, key) and run[key]),
)
_BUILD_FIELDS: tuple[tuple[str, str, Callable[[Any, str], bool]], ...] = (
    ("updates", "an integer", _is(int)),
    ("config", "an object", _is(dict)),
    ("enabled", "a list of texts", _texts),
    ("notes", "a list of texts", _texts),
    ("learning_rate", "a number or text", _is(int, float, str)),
)
