"""`elasticdl.api.data` in a process without a master: a plain loop over all data."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elasticdl.api.data import DataShardService, RecordIndexService
from elasticdl.protocol import task_order
from elasticdl_client.errors import DataError, JobError

pytestmark = pytest.mark.estimator_too


def test_every_record_of_every_epoch_comes_once() -> None:
    data = DataShardService(batch_size=4, dataset_size=42, num_epochs=3, num_minibatches_per_shard=2)
    seen: dict[int, Counter[int]] = {0: Counter(), 1: Counter(), 2: Counter()}
    names = []
    for minibatch in data:
        seen[minibatch.epoch].update(minibatch.indices)
        names.append(minibatch.name)
        assert 0 < len(minibatch) <= 4
    assert all(epoch == Counter(range(42)) for epoch in seen.values())
    assert len(names) == len(set(names)) == 3 * data.get_minibatch_count_per_epoch() == 33
    assert data.is_over


def draw_in_a_child(data: DataShardService, answers: Any) -> None:
    def draw() -> None:
        try:
            answers.send([len(minibatch) for minibatch in data])
        except JobError as error:
            answers.send(str(error))

    child = multiprocessing.get_context("fork").Process(target=draw)
    child.start()
    child.join(60)
    child.kill()


def test_a_copy_in_another_process_is_refused() -> None:
    """Else each process of a DataLoader over it would be given all records."""
    data = DataShardService(batch_size=4, dataset_size=8)
    found, answers = multiprocessing.Pipe(duplex=False)
    draw_in_a_child(data, answers)
    assert found.poll(60), "a child of a process with threads may hang"
    assert "belongs to the process that has made it" in found.recv()
    with pytest.raises(JobError, match="belongs to the process that has made it"):
        pickle.dumps(data)
    assert [len(minibatch) for minibatch in data] == [4, 4]


def test_a_script_alone_may_stop_training_early() -> None:
    data = DataShardService(batch_size=4, dataset_size=42, num_epochs=3, num_minibatches_per_shard=2)
    seen = []
    for minibatch in data:
        if not seen:
            data.stop_training("one task is enough")
        seen.append(minibatch.name)
    assert [n for _, _, n in seen] == [0, 1]
    assert data.is_over


def test_the_reports_of_a_process_are_kept_and_sent_in_runs_of_tasks() -> None:
    data = DataShardService(batch_size=2, dataset_size=400, num_minibatches_per_shard=2, num_epochs=2)
    for minibatch in data:
        data.done(minibatch)
    message = data._ledger()
    assert not message.tasks
    runs = [(run.epoch, run.first_task, run.num_tasks, run.watermark) for run in message.runs]
    assert runs == [(0, 0, 100, 2), (1, 0, 100, 2)]
    assert message.num_applies == 400


def test_a_minibatch_always_holds_the_same_records() -> None:
    def minibatches(shuffle: bool) -> dict[tuple[int, int, int], list[int]]:
        data = DataShardService(batch_size=4, dataset_size=30, num_epochs=2, shuffle=shuffle)
        return {minibatch.name: minibatch.indices for minibatch in data}

    assert minibatches(True) == minibatches(True)
    assert minibatches(True) != minibatches(False)


def test_the_order_of_tasks_is_the_masters() -> None:
    data = DataShardService(batch_size=2, dataset_size=40, num_epochs=3, num_minibatches_per_shard=1)
    order = [(epoch, task, 0) for epoch in range(3) for task in task_order(data.session.spec.seed, epoch, 20)]
    assert [minibatch.name for minibatch in data] == order


def test_an_iterator_thrown_away_gives_again_what_was_not_reported() -> None:
    data = DataShardService(batch_size=2, dataset_size=12, num_minibatches_per_shard=3)
    drawn = data.minibatches()
    first, second, third = next(drawn), next(drawn), next(drawn)
    assert not data.done(first)
    drawn.close()
    again = list(data.minibatches())
    assert [m.name for m in again[:2]] == [second.name, third.name]
    assert len(again) == 5
    assert [data.done(m) for m in again] == [False, True, False, False, True]
    assert not data.done(first)  # twice makes no difference


def test_records_of_files_come_with_their_minibatch(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n" + "".join(f"{n},x\n" for n in range(10)))
    data = DataShardService(batch_size=4, training_data=str(tmp_path / "rows.csv"))
    assert data.metadata().column_names == ("a", "b")
    rows = {
        index: record for minibatch in data for index, record in zip(minibatch.indices, minibatch.records, strict=True)
    }
    assert rows == {n: f"{n},x".encode() for n in range(10)}


def test_shards_and_counts_of_records_as_in_the_original() -> None:
    data = DataShardService(batch_size=4, dataset_size=10, num_minibatches_per_shard=2)
    shards = []
    while (shard := data.fetch_shard()) is not None:
        assert shard.indices == list(range(shard.start, shard.end))
        shards.append(shard)
    assert sorted((s.start, s.end) for s in shards) == [(0, 8), (8, 10)]
    reports = [data.report_batch_done(size) for size in (1, 1, 3, 4, 1)]
    assert sum(reports) == 2
    assert data.get_current_task() is None


def test_a_report_without_a_number_is_of_one_minibatch() -> None:
    data = DataShardService(batch_size=4, dataset_size=6, num_minibatches_per_shard=2)
    assert data.fetch_shard() is not None
    assert [data.report_batch_done() for _ in range(3)] == [False, True, False]


def test_record_by_record() -> None:
    service = RecordIndexService(batch_size=4, dataset_size=10)
    assert sorted(service.fetch_record_index() for _ in range(10)) == list(range(10))
    with pytest.raises(StopIteration):
        service.fetch_record_index()
    assert service.report_batch_done(10)


def test_a_failure_ends_a_script_that_is_alone() -> None:
    data = DataShardService(batch_size=4, dataset_size=6)
    data.fetch_shard()
    with pytest.raises(JobError, match="the disk is gone"):
        data.report_batch_done(err_msg="the disk is gone")


def test_a_script_must_say_what_it_trains_on() -> None:
    with pytest.raises(DataError, match="what to train on"):
        DataShardService(batch_size=4)
    with pytest.raises(DataError, match="-1"):
        DataShardService(batch_size=4, dataset_size=-1)
