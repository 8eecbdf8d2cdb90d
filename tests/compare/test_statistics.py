"""Time to target, paired ratios, intervals and verdicts, by hand."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from boostax.compare.statistics import (
    Interval,
    Outcome,
    bootstrap_median,
    median,
    paired_ratios,
    time_to_target,
    verdict,
)
from boostax.compare.task import Target

INF = math.inf


def run_of(values, metric="accuracy"):
    return {
        "evaluations": [
            {"step": 10 * i, "seconds": 0.5 * i, "cpu_seconds": 0.75 * i, "metrics": {metric: v}}
            for i, v in enumerate(values)
        ]
    }


def outcomes(seconds):
    return [Outcome(s < INF, s * 10, s, 2 * s) for s in seconds]


def test_the_first_evaluation_that_meets_the_target_counts():
    run = run_of([0.1, 0.95, 0.2, 0.99])
    assert time_to_target(run, Target("accuracy", 0.95)) == Outcome(True, 10, 0.5, 0.75)
    assert time_to_target(run, Target("accuracy", 0.96)) == Outcome(True, 30, 1.5, 2.25)


def test_a_run_that_misses_is_infinite():
    assert time_to_target(run_of([0.1, 0.2]), Target("accuracy", 0.5)) == Outcome(
        False, INF, INF, INF
    )


def test_a_metric_that_was_not_finite_never_meets_the_target():
    run = run_of([None, float("nan"), 0.3], metric="loss")
    assert time_to_target(run, Target("loss", 0.5, lower_is_better=True)).steps == 20


@pytest.mark.parametrize(
    ("values", "expected"), [([3, 1, 2], 2), ([1, 2, 4, INF], 3), ([1, INF, INF], INF), ([7], 7)]
)
def test_median(values, expected):
    assert median(values) == expected


def test_median_of_nothing_is_nan():
    assert math.isnan(median([]))


def test_paired_ratios_of_missed_runs():
    arm, plain = [1, INF, 3, INF, 5, math.nan], [2, 1, INF, INF, 0, 1]
    assert paired_ratios(arm, plain) == [0.5, INF, 0.0]


def test_paired_ratios_need_pairs():
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1], [1, 2])


def test_the_interval_of_five_values_is_their_range():
    assert bootstrap_median([0.9, 0.7, 1.3, 0.8, 1.0]) == Interval(0.9, 0.7, 1.3)


def test_the_interval_holds_infinity_without_spoiling_the_median():
    assert bootstrap_median([0.5, 0.6, 0.7, 0.8, INF]) == Interval(0.7, 0.5, INF)


def test_the_interval_is_the_same_every_time_and_leaves_numpy_alone():
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    values = [1.0, 2.0, 5.0, 3.0, 8.0, 2.5, 1.5]
    assert bootstrap_median(values) == bootstrap_median(values)
    assert np.random.rand() == expected


def test_the_interval_of_nothing_is_nan():
    assert all(math.isnan(v) for v in (bootstrap_median([]).low, bootstrap_median([]).median))


@hypothesis.given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_an_interval_lies_within_the_values_and_around_the_median(values):
    interval = bootstrap_median(values)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)


@pytest.mark.parametrize(
    ("arm", "plain", "expected"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], "faster"),
        ([3, 3, 3, 3, 3], [2, 2, 2, 2, 2], "slower"),
        ([1, 2, 3, 1, 2], [2, 1, 2, 2, 2], "no benefit here"),
        ([2, 2, 2, 2, 2], [2, 2, 2, 2, 2], "no benefit here"),
        ([INF] * 5, [2] * 5, "did not reach the target"),
        ([INF] * 5, [INF] * 5, "did not reach the target"),
        ([2] * 5, [INF] * 5, "only this arm reached the target"),
        (
            [INF, INF, INF, 3, 3],
            [2, 2, 2, 2, 2],
            "slower (3 of 5 runs missed the target)",
        ),
        (
            [1, 1, 1, 1, INF],
            [2, 2, 2, 2, 2],
            "no benefit here (1 of 5 runs missed the target)",
        ),
        (
            [1, INF, INF, INF, INF],
            [2, 2, INF, INF, INF],
            "too few runs reached the target to tell (4 of 5 runs missed the target)",
        ),
    ],
)
def test_verdicts(arm, plain, expected):
    assert verdict(outcomes(arm), outcomes(plain)) == expected


@pytest.mark.parametrize(
    ("wall", "cpu", "expected"),
    [
        (0.8, 0.9, "faster"),
        (1.2, 1.1, "slower"),
        (0.8, 1.0, "no benefit here"),
        (1.0, 0.8, "no benefit here"),
        (0.8, 1.2, "no benefit here"),
        (1.2, 0.8, "no benefit here"),
        (1.2, 1.0, "no benefit here"),
    ],
)
def test_a_difference_has_to_show_on_both_clocks(wall, cpu, expected):
    plain = [Outcome(True, 10, 1.0, 2.0)] * 5
    assert verdict([Outcome(True, 10, wall, 2 * cpu)] * 5, plain) == expected


def test_a_clock_that_stands_still_shows_no_difference():
    plain, arm = [Outcome(True, 10, 2.0, 0.0)] * 5, [Outcome(True, 10, 1.0, 0.0)] * 5
    assert verdict(arm, plain) == "no benefit here"


@pytest.mark.parametrize("pairs", [0, 1, 2, 3, 4])
def test_fewer_than_five_pairs_never_give_a_verdict(pairs):
    for arm, plain in ((1.0, 100.0), (100.0, 1.0), (INF, 1.0), (1.0, INF)):
        assert verdict(outcomes([arm] * pairs), outcomes([plain] * pairs)) == (
            "not enough seeds to tell"
        )


def test_a_verdict_needs_pairs():
    with pytest.raises(ValueError, match="paired"):
        verdict(outcomes([1]), outcomes([1, 2]))
