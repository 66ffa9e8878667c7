"""Laws of applied sets and fences."""

from __future__ import annotations

import tracemalloc
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.ps.applied import AppliedSet, FencingTokens, MinibatchName
from elasticdl.task_numbers import TaskNumbers

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


TASKS = st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 5), st.integers(0, 3 << 12)))


@given(changes=st.lists(st.tuples(TASKS, st.integers(-1, 1 << 40)), max_size=40))
def test_numbers_of_tasks_are_those_of_a_counter(changes: list[tuple[tuple[int, int], int]]) -> None:
    numbers, expected = TaskNumbers(), Counter[tuple[int, int]]()
    before = numbers.copy()
    for task, number in changes:
        numbers[task] = expected[task] = number
        assert numbers[task[0], task[1] + 1] == expected[task[0], task[1] + 1]
    kept = {task: number for task, number in expected.items() if number}
    assert numbers == kept
    assert (list(numbers), len(numbers)) == (sorted(kept), len(kept))
    assert numbers.copy() == numbers
    assert not before
    assert all((task in numbers) == (task in kept) for task, _ in changes)


SMALL = st.dictionaries(st.tuples(st.integers(0, 1), st.integers(4093, 4098)), st.integers(0, 2), max_size=3)


@given(one=SMALL, other=SMALL)
def test_numbers_of_tasks_are_equal_where_those_that_are_not_zero_are(
    one: dict[tuple[int, int], int], other: dict[tuple[int, int], int]
) -> None:
    numbers, others = TaskNumbers(), TaskNumbers()
    numbers.update(one)
    others.update(other)
    assert (numbers == others) == ({k: n for k, n in one.items() if n} == {k: n for k, n in other.items() if n})


def test_the_names_of_a_million_tasks_take_some_megabytes() -> None:
    applied = AppliedSet()
    tracemalloc.start()
    try:
        for task in range(100_000):
            applied.add(MinibatchName(task // 20, task % 20, 0))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 5_000_000


def test_many_tasks_that_are_alike_are_one_entry_on_the_wire() -> None:
    applied = AppliedSet()
    for epoch in range(100):
        applied.fill(epoch, 0, 1000, 8)
    applied.add(MinibatchName(50, 500, 11))
    applied.add(MinibatchName(70, 2000, 0), is_skipped=True)
    message = applied.to_message()
    assert (len(message.runs), len(message.tasks), message.ByteSize() < 2000) == (101, 2, True)
    assert AppliedSet.from_message(message).has_same_names(applied)


@given(numbers=st.lists(st.tuples(TASKS, st.integers(0, 3)), max_size=20), others=st.lists(TASKS, max_size=20))
def test_numbers_of_an_epoch_and_the_least_of_two(
    numbers: list[tuple[tuple[int, int], int]], others: list[tuple[int, int]]
) -> None:
    one, other, again = TaskNumbers(), TaskNumbers(), TaskNumbers()
    one.update(numbers)
    other.update(dict.fromkeys(others, 2))
    assert one.least(other) == {key: min(one[key], 2) for key in one.keys() & other.keys()}
    for epoch in range(4):
        found = one.of_epoch(epoch, 3 << 12)
        assert list(found[:6]) == [one[epoch, task] for task in range(6)]
        assert (len(found), sum(found)) == (
            3 << 12,
            sum(one[key] for key in one if key[0] == epoch and key[1] < 3 << 12),
        )
        again.put(epoch, found)
    assert again == {key: number for key, number in one.items() if key[1] < 3 << 12}
    assert one.last_epoch() == max((epoch for epoch, _ in one), default=-1)


@given(names=NAMES, skipped=st.sets(st.integers(0, 12)))
def test_an_applied_set_survives_the_wire(names: list[MinibatchName], skipped: set[int]) -> None:
    applied = AppliedSet()
    for name in names:
        applied.num_applies += applied.add(name, is_skipped=name.n in skipped)
    message = applied.to_message()
    back = AppliedSet.from_message(message)
    assert list(back) == list(applied)
    assert back.num_applies == applied.num_applies
    assert back.skipped == applied.skipped == applied.copy().skipped
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
