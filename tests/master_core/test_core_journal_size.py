"""The journal of a very large job: small in every state of an epoch, and exact."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import tracemalloc
import zlib
from array import array

from elasticdl.master.core.applied import CommittedSet, CommittedTask
from elasticdl.master.core.plan.data import MAX_IDENTITIES, Data
from elasticdl.master.core.plan.epoch import Epoch
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import DataKind
from elasticdl.master.journal import encode
from elasticdl.master.kubernetes.journal import MAX_BYTES
from elasticdl.protocol import Shard

SETTINGS = JobSettings("j", minibatch_size=1, num_minibatches_per_task=8)
WORKERS = 1000


def epoch_of(num_tasks: int) -> Epoch:
    return Epoch(0, [Shard("a", 0, 8)] * num_tasks, SETTINGS, None)


def train(epoch: Epoch, num_done: int, seed: int = 0) -> None:
    """The first tasks of the order are done, but for some that were lost; behind them each worker is in one."""
    lost = random.Random(seed)
    for task in epoch.order[:num_done]:
        if lost.random() < 0.999:
            epoch.change(task, CommittedTask.of(8), 8)
    for task in epoch.order[num_done : num_done + WORKERS]:
        epoch.change(task, CommittedTask.of(lost.randrange(8), (7,)))


def test_a_million_tasks_of_a_thousand_workers_fit_into_the_object_many_times_over() -> None:
    epoch = epoch_of(1_000_000)
    train(epoch, 20_000)
    first = json.dumps(epoch.snapshot())
    assert len(zlib.compress(encode({"epoch": first}))) < MAX_BYTES / 50
    last_done = epoch.order[20_000 + WORKERS]
    epoch.change(last_done, CommittedTask.of(8), 8)
    second = epoch.snapshot()
    assert json.dumps(second) != first
    changed = [n for n, (a, b) in enumerate(zip(json.loads(first)["sizes"], second["sizes"], strict=True)) if a != b]
    assert changed == [(20_000 + WORKERS) >> 14]  # nothing else was packed again


def test_an_epoch_that_is_covered_takes_some_bytes_a_task() -> None:
    """A job keeps all of its epochs."""
    num_tasks = 10_000
    slices = [Shard("a", 0, 8)] * num_tasks
    tracemalloc.start(8)
    try:
        epoch = Epoch(0, slices, SETTINGS, None)
        while (task := epoch.first_todo(lambda _: True)) is not None:
            epoch.take(task)
            epoch.change(task, CommittedTask.of(8), 8)
            epoch.leased.remove(task)
        epoch.cover()
        epoch.snapshot()
        # what this test allocates: threads that other tests left allocate too
        below_here = tracemalloc.Filter(True, __file__, all_frames=True)
        taken = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([below_here]).traces)
    finally:
        tracemalloc.stop()
    assert taken < 25 * num_tasks
    assert (epoch.is_todo(0), epoch.is_todo(num_tasks)) == (False, False)


def test_tasks_that_are_planned_again_are_at_their_places_in_the_order() -> None:
    epoch = epoch_of(50)
    order = list(epoch.order)
    epoch.take(order[0])
    epoch.stop()
    epoch.plan_again(CommittedSet.of([(epoch.number, order[7], 1, ()), (epoch.number, order[3], 0, (1,))], 2))
    epoch.validate()
    assert list(epoch.order) == [order[0], order[3], order[7]]
    assert epoch.first_todo(lambda task: task != order[3]) == order[7]
    assert epoch.first_todo(lambda _: True) == order[3]


def test_what_is_committed_is_the_same_in_the_next_life_whatever_was_left_out() -> None:
    epoch = epoch_of(40_000)
    train(epoch, 20_000, seed=3)
    epoch.skip(epoch.order[5], (3,))
    epoch.exclude(epoch.order[39_000], (2,))
    epoch.change(epoch.order[6], CommittedTask.of(8), 8, -3)
    epoch.stop()
    saved = json.loads(json.dumps(epoch.snapshot()))
    restored = epoch_of(40_000)
    restored.restore(saved)
    restored.validate()
    assert restored.order == epoch.order
    assert [restored.applied(task) for task in range(40_000)] == [epoch.applied(task) for task in range(40_000)]
    assert (restored.num_done, restored.num_filtered) == (epoch.num_done, 3)
    assert restored.committed_records == epoch.committed_records
    del saved["processed_records"]
    again = epoch_of(40_000)
    again.restore(saved)
    assert again.processed_records == restored.committed_records
    assert restored.snapshot() == epoch.snapshot()


def test_a_journal_with_more_steps_than_are_planned_now_is_taken_over() -> None:
    epoch = epoch_of(10)
    for task in epoch.order[:6]:
        epoch.change(task, CommittedTask.of(8), 8)
    shorter = Epoch(0, [Shard("a", 0, 8)] * 10, SETTINGS, 32)
    shorter.restore(json.loads(json.dumps(epoch.snapshot())))
    shorter.validate()
    assert (shorter.num_done, shorter.committed_records, shorter.complete) == (4, 32, True)


def test_an_epoch_that_the_journal_has_as_a_number_ends_with_the_steps_that_are_planned_now() -> None:
    epoch = Epoch(0, [Shard("a", 0, 8)] * 10, SETTINGS, 35)
    epoch.finish()
    epoch.validate()
    assert (epoch.num_done, epoch.num_minibatches, epoch.committed_records) == (5, 35, 35)


def test_the_journal_of_an_earlier_version_is_read() -> None:
    epoch = epoch_of(500)
    train(epoch, 200)
    saved = epoch.snapshot()
    watermarks = array("i", (epoch.applied(task).watermark for task in range(500)))
    sizes = array("i", (8 if epoch.is_done(task) else -1 for task in range(500)))
    for name, column in (("watermarks", watermarks), ("sizes", sizes), ("surpluses", array("q", [0]) * 500)):
        saved[name] = base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()
    restored = epoch_of(500)
    restored.restore(saved)
    restored.validate()
    assert [restored.applied(task) for task in range(500)] == [epoch.applied(task) for task in range(500)]
    assert restored.num_done == epoch.num_done > 0


def test_identities_of_files_are_in_the_journal_as_long_as_they_fit_into_the_object() -> None:
    for num_files, is_identified in ((MAX_IDENTITIES, True), (MAX_IDENTITIES + 1, False)):
        random_of = random.Random(1)
        shards = tuple(
            Shard(
                f"/data/part-{i:06}",
                0,
                5000 + i % 100,
                f"{random_of.randrange(1 << 20)}-{random_of.randbytes(4).hex()}",
            )
            for i in range(num_files)
        )
        data = Data(dataclasses.replace(SETTINGS, has_training_data=True))
        data.model_reported(False, {DataKind.TRAINING: shards})
        written = encode({"data": data.snapshot()})
        assert len(zlib.compress(written)) < MAX_BYTES * 0.9
        restored = Data(SETTINGS)
        restored.restore(json.loads(written)["snapshot"]["data"])
        assert restored.planned_shards() == shards
        assert restored.planned_shards()[-1].identity == (shards[-1].identity if is_identified else "")


def test_identities_are_left_out_of_the_journal_where_names_of_files_take_its_room() -> None:
    random_of = random.Random(1)
    for num_files, is_identified in ((10_000, True), (40_000, False)):
        shards = tuple(
            Shard(f"/data/{random_of.randbytes(16).hex()}.parquet", 0, 5000, f"1234-{random_of.randbytes(4).hex()}")
            for _ in range(num_files)
        )
        data = Data(dataclasses.replace(SETTINGS, has_training_data=True))
        data.model_reported(False, {DataKind.TRAINING: shards})
        written = encode({"data": data.snapshot()})
        assert len(zlib.compress(written)) < MAX_BYTES * 0.9
        restored = Data(data.settings)
        restored.restore(json.loads(written)["snapshot"]["data"])
        assert any(shard.identity for shard in restored.planned_shards()) == is_identified
        assert restored.fingerprint() == data.fingerprint()


def test_the_few_identities_of_many_shards_need_no_look_at_their_room() -> None:
    """The shards of a file have one, which takes no room to speak of; compressing all rows takes seconds."""
    random_of = random.Random(1)
    shards = tuple(Shard(random_of.randbytes(16).hex(), 0, 5000, f"1234-{i % 5:08x}") for i in range(40_000))
    data = Data(dataclasses.replace(SETTINGS, has_training_data=True))
    data.model_reported(False, {DataKind.TRAINING: shards})
    written = encode({"data": data.snapshot()})
    assert len(zlib.compress(written)) < MAX_BYTES
    restored = Data(data.settings)
    restored.restore(json.loads(written)["snapshot"]["data"])
    assert [shard.identity for shard in restored.planned_shards()] == [shard.identity for shard in sorted(shards)]
