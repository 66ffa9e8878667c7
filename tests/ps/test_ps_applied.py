"""Laws of applied sets and fences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.ps.applied import AppliedSet, FencingTokens, MinibatchName

NAMES = st.lists(st.builds(MinibatchName, st.integers(0, 2), st.integers(0, 3), st.integers(0, 12)), max_size=80)


@given(names=NAMES)
def test_an_applied_set_is_a_set(names: list[MinibatchName]) -> None:
    applied, seen = AppliedSet(), set()
    for name in names:
        assert (name in applied) == (name in seen)
        assert applied.add(name) == (name not in seen)
        seen.add(name)
    assert list(applied) == sorted(seen)
    assert applied.num_names == len(seen)


@given(names=NAMES)
def test_an_applied_set_survives_the_wire(names: list[MinibatchName]) -> None:
    applied = AppliedSet()
    for name in names:
        applied.num_applies += applied.add(name)
    message = applied.to_message()
    back = AppliedSet.from_message(message)
    assert list(back) == list(applied)
    assert back.num_applies == applied.num_applies
    assert back.to_message() == message


@given(names=NAMES)
def test_extras_are_above_the_watermark(names: list[MinibatchName]) -> None:
    applied = AppliedSet()
    for name in names:
        applied.add(name)
        task = applied.of_task(name.epoch, name.task)
        assert all(n > task.watermark for n in task.extras)


@given(leases=st.lists(st.integers(1, 9), max_size=30))
def test_a_lease_older_than_the_newest_known_is_refused(leases: list[int]) -> None:
    fences, newest = FencingTokens(), 0
    for lease in leases:
        assert fences.refuses(lease, 0, 0) == (lease < newest)
        newest = max(newest, lease)
    assert not fences.refuses(1, 0, 1)
