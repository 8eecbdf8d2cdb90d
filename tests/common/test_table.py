"""Common suite: the table is complete, and what it leaves out has a reason."""

from __future__ import annotations

import collections

import pytest

import boostax
from boostax import rules
from tests.common import harness, settings

pytestmark = pytest.mark.quick


def test_every_public_name_is_a_row_or_not_a_technique():
    covered = {name for row in settings.ROWS for name in row.covers}
    missing = set(boostax.__all__) - covered - set(settings.NOT_TECHNIQUES)
    assert not missing, (
        f"{sorted(missing)} have no row in tests/common/settings.py; add one, or write into "
        "NOT_TECHNIQUES why they are no technique"
    )
    assert not covered & set(settings.NOT_TECHNIQUES)
    unknown = (covered | set(settings.NOT_TECHNIQUES)) - set(boostax.__all__)
    assert not unknown, f"the table names what boostax does not have: {sorted(unknown)}"


def test_every_technique_of_the_config_has_a_row():
    covered = {name for row in settings.ROWS for name in row.covers}
    missing = {name for name in rules.TECHNIQUES if settings.CONFIG_NAMES.get(name) not in covered}
    assert not missing, (
        f"{sorted(missing)} have no row; add each to CONFIG_NAMES and a row for it in "
        "tests/common/settings.py"
    )
    assert set(settings.CONFIG_NAMES) <= set(rules.TECHNIQUES)


def test_row_names_are_unique():
    count = collections.Counter(row.name for row in settings.ROWS)
    assert not [name for name, times in count.items() if times > 1]


@pytest.mark.parametrize("row", settings.ROWS, ids=lambda row: row.name)
def test_row_is_complete(row):
    assert row.covers, "a row says which techniques it covers"
    assert row.seam in {"model", "gradient", "update", "all"}
    assert (row.transform is None) != (row.program is None)
    assert (row.transform is not None) == (row.seam == "update")
    assert row.cycle >= 1
    assert row.length >= 2 * row.cycle, "a run has two full cycles"
    unknown = set(row.does_not_apply) - set(harness.CHECKS)
    assert not unknown, f"unknown checks: {sorted(unknown)}"
    for check, reason in row.does_not_apply.items():
        harness.assert_reason(reason, f"{row.name}, {check}")


@pytest.mark.parametrize("name", settings.NOT_TECHNIQUES)
def test_what_is_no_technique_says_why(name):
    harness.assert_reason(settings.NOT_TECHNIQUES[name], name, words=3)
