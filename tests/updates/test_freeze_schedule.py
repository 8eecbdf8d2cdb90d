"""Freeze schedules: the reference's sequences, the ramp, shares, lengths, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boostax import freeze_schedule


def test_ramp_by_hand():
    schedule = freeze_schedule("ramp", 4, full_fraction=0.25, total_steps=8)
    assert schedule.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert schedule.dtype == np.int32


def test_unfreeze_by_hand():
    schedule = freeze_schedule("unfreeze", 4, full_fraction=0.25, total_steps=8)
    assert schedule.tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    ramp = freeze_schedule("ramp", 4, full_fraction=0.3, total_steps=11)
    schedule = freeze_schedule("unfreeze", 4, full_fraction=0.3, total_steps=11)
    assert schedule.tolist() == ramp.tolist()[::-1]
    assert not schedule.flags.writeable


def test_continuous_matches_the_reference(reference):
    values = reference("a_freeze_index_sequence")
    for i, (groups, share, steps) in enumerate(values["s0_cases"]):
        ours = freeze_schedule(
            "continuous", int(groups), full_fraction=share, total_steps=int(steps)
        )
        np.testing.assert_array_equal(ours, values[f"s0_{i}"][: int(steps)])
        assert len(ours) == steps


def test_interval_matches_the_reference(reference):
    values = reference("a_freeze_index_sequence")
    for i, (groups, share, steps, seed) in enumerate(values["s1_cases"]):
        ours = freeze_schedule(
            "interval", int(groups), full_fraction=share, total_steps=int(steps), seed=int(seed)
        )
        np.testing.assert_array_equal(ours, values[f"s1_{i}"][: int(steps)])
        assert len(ours) == steps


def test_interval_draws_as_often_as_the_reference(reference):
    # The reference draws 1 % more than it was asked for.
    total = sum(
        np.bincount(freeze_schedule("interval", 10, total_steps=5050, seed=seed), minlength=10)
        for seed in range(1000, 1020)
    )
    np.testing.assert_array_equal(total, reference("a_freeze_index_sequence")["s1_long_hist"])


def test_full_fraction_is_the_share_of_windows_with_nothing_frozen():
    for kind in ("continuous", "interval", "ramp", "unfreeze"):
        schedule = freeze_schedule(kind, 5, full_fraction=0.7, total_steps=1000)
        assert np.mean(schedule == 0) == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("kind", ["continuous", "interval", "ramp"])
def test_shares_of_zero_and_one(kind):
    assert not freeze_schedule(kind, 5, full_fraction=1, total_steps=20).any()
    none = freeze_schedule(kind, 5, full_fraction=0, total_steps=20)
    assert (none[1:] > 0).all()
    assert none[0] == (0 if kind == "interval" else 1)


def test_own_generator():
    state = np.random.get_state()
    one = freeze_schedule("interval", 5, total_steps=100, seed=3)
    np.random.seed(99)
    two = freeze_schedule("interval", 5, total_steps=100, seed=np.int64(3))
    np.testing.assert_array_equal(one, two)
    np.random.set_state(state)
    before = np.random.get_state()[1].copy()
    freeze_schedule("interval", 5, total_steps=100, seed=3)
    np.testing.assert_array_equal(before, np.random.get_state()[1])
    assert (one != freeze_schedule("interval", 5, total_steps=100, seed=4)).any()


@given(
    kind=st.sampled_from(["continuous", "interval", "ramp"]),
    groups=st.integers(1, 12),
    share=st.floats(0, 1),
    steps=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_schedule_is_long_enough_and_in_range(kind, groups, share, steps, seed):
    schedule = freeze_schedule(kind, groups, full_fraction=share, total_steps=steps, seed=seed)
    assert schedule.shape == (steps,)
    assert schedule.min() >= 0
    assert schedule.max() < groups
    if kind == "ramp":
        assert (np.diff(schedule) >= 0).all()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kind": "intervall"}, ValueError, "Did you mean 'interval'"),
        ({"kind": 1}, ValueError, "kind must be one of"),
        ({"groups": 0}, ValueError, "groups must be >= 1"),
        ({"groups": 2.0}, TypeError, "groups"),
        ({"groups": True}, TypeError, "groups must be an integer"),
        ({"full_fraction": 1.1}, ValueError, r"in \[0, 1\], got 1.1"),
        ({"full_fraction": float("nan")}, ValueError, r"in \[0, 1\]"),
        ({"full_fraction": "0.7"}, TypeError, "full_fraction must be a number"),
        ({"full_fraction": True}, TypeError, "full_fraction must be a number"),
        ({"total_steps": 0}, ValueError, "total_steps must be >= 1, got 0"),
        ({"total_steps": 2.5}, TypeError, "total_steps must be an integer"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"seed": None}, TypeError, "seed must be an integer"),
    ],
)
def test_bad_arguments(change, error, text):
    arguments = {"kind": "interval", "groups": 3, "total_steps": 10, **change}
    kind, groups = arguments.pop("kind"), arguments.pop("groups")
    with pytest.raises(error, match=text):
        freeze_schedule(kind, groups, **arguments)
