"""Bad records are found by bisection, whatever their number and place."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords
from elasticdl.worker.quarantine import Quarantine, inspected


class Picky:
    """A framework whose `feed` raises on records that say so, and drops others; minibatches of four."""

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            num_batches = -(-len(task.records) // 4)
            for n in range(num_batches):
                if b"bad" in task.records[4 * n : 4 * n + 4]:
                    raise FeedError(task.lease, n, "a bad record")
                yield Batch(task.lease, n, size=4)
            yield Batch(task.lease, num_batches, end=True, surplus=Surplus(-task.records.count(b"dull"), "filter"))


def looked_through(task: TaskRecords, quarantine: Quarantine) -> list[Batch]:
    return list(inspected(Picky(), Mode.TRAINING, iter((task,)), quarantine))  # type: ignore[arg-type]


@given(st.lists(st.booleans(), max_size=40))
def test_exactly_the_bad_records_are_found(bad: list[bool]) -> None:
    task = TaskRecords(1, 0, [b"bad" if one else b"good" for one in bad])
    found: list[int] = []
    try:
        assert looked_through(task, Quarantine(100))[-1].end
    except FeedError as error:
        found.extend(error.bad_records)
    assert found == [i for i, one in enumerate(bad) if one]


def test_the_search_ends_one_beyond_the_limit() -> None:
    task = TaskRecords(1, 0, [b"bad"] * 64)
    with pytest.raises(FeedError) as found:
        looked_through(task, Quarantine(2))
    assert found.value.bad_records == (0, 1, 2)


def test_bad_records_and_their_errors_are_written_once_however_often_they_are_found(tmp_path: Path) -> None:
    records = [b"good", b"bad", b"good", b"good", b"good", b"bad"]
    task = TaskRecords(1, 0, records, "/data/part-0", numbers=[40, 44, 41, 43, 42, 45])
    for _ in range(2):
        with pytest.raises(FeedError) as found:
            looked_through(task, Quarantine(5, tmp_path / "bad"))
        assert found.value.bad_records == (44, 45)
    (file,) = (tmp_path / "bad").iterdir()
    assert file.name.startswith("part-0-")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["shard"], line["record"]) for line in lines] == [("/data/part-0", 44), ("/data/part-0", 45)]
    assert [base64.b64decode(line["base64"]) for line in lines] == [b"bad", b"bad"]
    assert all("a bad record" in line["error"] for line in lines)


def test_names_and_errors_of_any_characters_are_written(tmp_path: Path) -> None:
    class Half(Picky):
        def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
            for task in tasks:
                raise FeedError(task.lease, 0, "no label: \ud83d")
            yield Batch(0, 0, end=True)

    task = TaskRecords(1, 0, [b"bad"], f"/data/{'数' * 82}.csv", numbers=[0])  # as long as a name may be
    with pytest.raises(FeedError):
        list(inspected(Half(), Mode.TRAINING, iter((task,)), Quarantine(5, tmp_path)))  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    line = json.loads(file.read_text())
    assert (line["shard"], line["error"]) == (task.shard, "no label: \ud83d")


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    task = TaskRecords(1, 0, [b"good", b"bad"], "/data/part-0", numbers=[0, 1])
    with pytest.raises(FeedError) as found:
        looked_through(task, Quarantine(5, tmp_path / "file"))
    assert found.value.bad_records == (1,)


def test_a_strict_feed_makes_one_sample_of_each_record_before_any_of_them_is_given() -> None:
    task = TaskRecords(7, 0, [b"good"] * 5 + [b"dull"] * 2)
    with pytest.raises(FeedError, match=r"feed \(filter in it\) makes 5 samples of 7 records") as found:
        next(inspected(Picky(), Mode.TRAINING, iter((task,)), Quarantine(is_strict=True)))  # type: ignore[arg-type]
    assert (found.value.lease, found.value.bad_records, found.value.details) == (7, (), "")
    assert looked_through(task, Quarantine(3))[-1].surplus.count == -2
    assert looked_through(TaskRecords(8, 0, [b"good"] * 7), Quarantine(is_strict=True))[-1].end


def test_a_strict_feed_alone_looks_for_no_bad_record() -> None:
    with pytest.raises(FeedError) as found:
        looked_through(TaskRecords(1, 0, [b"bad"]), Quarantine(is_strict=True))
    assert found.value.bad_records == ()
