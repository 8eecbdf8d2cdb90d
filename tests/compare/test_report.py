"""The words and numbers of the report."""

import argparse

import pytest

from boostax.compare.cli import add_arguments
from boostax.compare.report import _ratio


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
