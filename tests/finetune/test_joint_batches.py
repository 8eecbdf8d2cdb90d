"""joint_batches: which batches meet, for every rule, and what starts anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boostax import joint_batches


def pairs(*arguments, **keywords):
    return [(b["source"], b["target"]) for b in joint_batches(*arguments, **keywords)]


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        ("longer", ["a0", "b1", "c0", "d1", "e0"]),
        ("source", ["a0", "b1", "c0", "d1", "e0"]),
        ("shorter", ["a0", "b1"]),
        ("target", ["a0", "b1"]),
    ],
)
def test_by_hand(epoch, expected):
    assert ["".join(pair) for pair in pairs("abcde", "01", epoch=epoch)] == expected


@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from(["longer", "shorter", "source", "target"])
)
def test_lengths_and_order(source, target, epoch):
    loader = joint_batches(list(range(source)), list(range(target)), epoch=epoch)
    length = {
        "longer": max(source, target),
        "shorter": min(source, target),
        "source": source,
        "target": target,
    }[epoch]
    for _ in range(2):
        assert [(b["source"], b["target"]) for b in loader] == [
            (i % source, i % target) for i in range(length)
        ]
    assert len(loader) == length


def test_functions_of_the_pass():
    seen = []

    def target(number):
        seen.append(number)
        return [10 * number, 10 * number + 1]

    loader = joint_batches("abcde", target)
    assert [b["target"] for b in loader] == [0, 1, 10, 11, 20]
    # The next epoch starts both anew, with the passes counted on.
    assert [b["target"] for b in loader] == [30, 31, 40, 41, 50]
    assert seen == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match="target does not tell its length"):
        len(loader)


def test_an_iterator_may_be_the_longer_one():
    assert len(pairs(iter("abcde"), [1, 2])) == 5
    with pytest.raises(TypeError, match="target is an iterator, which can't start anew"):
        pairs("abcde", iter([1, 2]))
    loader = joint_batches(iter("abc"), [1])
    assert len(list(loader)) == 3
    with pytest.raises(TypeError, match="source is an iterator"):
        list(loader)


def test_an_endless_loader_follows_the_other():
    endless = lambda number: iter(int, 1)
    assert pairs(endless, [1, 2], epoch="target") == [(0, 1), (0, 2)]


def test_errors():
    with pytest.raises(ValueError, match="target has no batch; give at least one"):
        pairs("abc", [])
    with pytest.raises(ValueError, match="target has no batch when it starts anew"):
        pairs("abc", lambda number: [1, 2][: 2 - 2 * number])
    with pytest.raises(ValueError, match=r"got 'long'\. Did you mean 'longer'\?"):
        joint_batches("abc", [1], epoch="long")
    with pytest.raises(TypeError, match=r"source must be an iterable of batches, .* got int"):
        joint_batches(5, [1])
