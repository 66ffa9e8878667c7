"""Bad records are found by bisection, whatever their number and place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Batch, FeedError, Mode, TaskRecords
from elasticdl.worker.quarantine import BadRecords, inspected

pytestmark = pytest.mark.ci


class Picky:
    """A framework whose `feed` raises on records that say so; minibatches of four."""

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            num_batches = -(-len(task.records) // 4)
            for n in range(num_batches):
                if b"bad" in task.records[4 * n : 4 * n + 4]:
                    raise FeedError(task.lease, n, "a bad record")
                yield Batch(task.lease, n, size=4)
            yield Batch(task.lease, num_batches, end=True)


@given(st.lists(st.booleans(), max_size=40))
def test_exactly_the_bad_records_are_found(bad: list[bool]) -> None:
    task = TaskRecords(1, 0, [b"bad" if one else b"good" for one in bad])
    found: list[int] = []
    try:
        assert inspected(Picky(), Mode.TRAINING, task, limit=100)[-1].end  # type: ignore[arg-type]
    except BadRecords as error:
        found.extend(error.positions)
    assert found == [i for i, one in enumerate(bad) if one]


def test_the_search_ends_one_beyond_the_limit() -> None:
    task = TaskRecords(1, 0, [b"bad"] * 64)
    with pytest.raises(BadRecords) as found:
        inspected(Picky(), Mode.TRAINING, task, limit=2)  # type: ignore[arg-type]
    assert list(found.value.positions) == [0, 1, 2]
