"""The words and numbers of the report."""

import argparse

import pytest

from boostax.compare.cli import add_arguments
from boostax.compare.display import finished_line
from boostax.compare.report import _final, _ratio


@pytest.mark.parametrize(
    ("median", "low", "high", "text"),
    [
        (0.8, 0.7, 0.9, "0.80 [0.70, 0.90]"),
        (0.8, 0.7, 0.998, "0.800 [0.700, 0.998]"),
        (0.8, 0.7, 0.99996, "0.80000 [0.70000, 0.99996]"),
        (1.0, 0.7, 1.2, "1.00 [0.70, 1.20]"),
        (1.002, 1.001, None, "1.002 [1.001, ∞]"),
    ],
)
def test_an_end_of_an_interval_is_never_rounded_to_1(median, low, high, text):
    arm = {"reached": 5, "ratio": {"median": median, "low": low, "high": high}}
    assert _ratio(arm, "ratio") == text
    assert _ratio(arm, "ratio", whole=False) in (text.split()[0], f"{median:.2f}")


def test_no_target_no_ratio():
    assert _ratio({"reached": 0}, "ratio") == "-"


def test_the_digits_have_more_seeds_than_a_task_of_ones_own(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]).seeds is None
    assert "default 5, for the digits 9" in " ".join(parser.format_help().split())


def test_a_metric_that_is_not_finite_is_not_infinity():
    value = {"median": 0.5, "low": 0.25, "high": 1.0, "not_finite": 0}
    assert _final(value) == "0.5 [0.25, 1]"
    assert _final({**value, "not_finite": 2}) == "0.5 [0.25, 1] (2 not finite)"
    nothing = {"median": None, "low": None, "high": None, "not_finite": 5}
    assert _final(nothing) == _final(nothing, whole=False) == "not finite"
    assert _final(None) == ""


@pytest.mark.parametrize(("arm", "metric"), [("accumulation", "accuracy"), ("x" * 90, "y" * 90)])
def test_live_lines_fit_into_80_columns(arm, metric):
    run = {
        "arm": arm,
        "seed": 10,
        "step_seconds": [1234.5],
        "compile_seconds": 123.4,
        "evaluations": [{"metrics": {metric: -0.00012345}}],
    }
    line = finished_line(run, metric)
    assert len(line) < 80
    assert line.endswith("-0.0001234; 1234.50 s, compiling 123.4 s")
