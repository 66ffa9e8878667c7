"""Bad records: with `--max_bad_records`, a task's records all go through `feed` before its first push.

A record on which `feed` raises is found by bisection, so it can be set aside before any minibatch of its task is in the
model.  This module only finds; the master decides what becomes of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticdl.frameworks.framework import Batch, FeedError, Framework, Mode, TaskRecords


class BadRecords(Exception):
    """`feed` raises on these records.

    Attributes:
        positions: in the task's records; empty if no record alone is to blame.
        error: of the whole task.
    """

    def __init__(self, positions: Sequence[int], error: FeedError) -> None:
        super().__init__(str(error))
        self.positions = positions
        self.error = error


def inspected(framework: Framework, mode: Mode, task: TaskRecords, limit: int) -> list[Batch]:
    """All minibatches of a task, its end included.

    Args:
        limit: bad records beyond this many are not looked for.

    Raises:
        BadRecords: there are some.
    """
    try:
        return list(framework.batches(mode, iter((task,))))
    except FeedError as error:
        found: list[int] = []
        _bisect(framework, mode, task, 0, len(task.records), limit + 1, found)
        raise BadRecords(found, error) from error


def _bisect(
    framework: Framework, mode: Mode, task: TaskRecords, start: int, end: int, limit: int, found: list[int]
) -> None:
    if start == end or len(found) >= limit or _is_good(framework, mode, task, start, end):
        return
    if end - start == 1:
        found.append(start)
        return
    middle = (start + end) // 2
    _bisect(framework, mode, task, start, middle, limit, found)
    _bisect(framework, mode, task, middle, end, limit, found)


def _is_good(framework: Framework, mode: Mode, task: TaskRecords, start: int, end: int) -> bool:
    part = replace(task, records=task.records[start:end])
    try:
        for _ in framework.batches(mode, iter((part,))):
            pass
    except FeedError:
        return False
    return True
