"""`feed` in processes (--input_workers): the minibatches of a thread, in their order, whatever happens to a process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, FeedError, Mode, TaskRecords
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.frameworks.torch.input_processes import InputProcesses
from elasticdl.frameworks.torch.samples import TensorSamples
from elasticdl.model_def import load
from elasticdl.worker.quarantine import Quarantine, inspected
from tests.torch.conftest import ZOO

SIZE = 4
BEGIN = partial(load, str(ZOO), "torch_input.custom_model", required=("feed",))
TASKS = [TaskRecords(10 + k, 100 + k, [b"x" * n for n in range(k, 11)]) for k in range(6)]
EMPTY = TaskRecords(20, 5, [])


def framework() -> TorchFramework:
    return TorchFramework(BEGIN(), SIZE, 3, Metadata(seed=3))


@pytest.fixture(scope="module")
def fed() -> Iterator[TorchFramework]:
    """A framework with two input processes: they take seconds to start."""
    processes = InputProcesses(BEGIN, 2, SIZE, Metadata(seed=3))
    processes.start()
    made = framework()
    made.feed_in(processes)
    yield made
    processes.close()


def task(lease: int, *records: bytes) -> TaskRecords:
    return TaskRecords(lease, lease, records)


def all_of(tested: TorchFramework, tasks: list[TaskRecords], mode: Mode = Mode.TRAINING) -> list[Batch]:
    return list(tested.batches(mode, iter(tasks)))


def assert_same(one: Any, other: Any) -> None:
    """The same types, values, shapes and strides."""
    assert type(one) is type(other)
    if isinstance(one, Batch | TensorSamples):
        for name in type(one).__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.PREDICTION])
def test_the_minibatches_of_processes_are_those_of_a_thread(fed: TorchFramework, mode: Mode) -> None:
    tasks = [*TASKS, EMPTY, *TASKS]
    found = all_of(fed, tasks, mode)
    assert_same(found, all_of(framework(), tasks, mode))
    assert [batch.lease for batch in found if batch.end] == [one.lease for one in tasks]


def test_tensors_of_processes_can_be_changed_in_place(fed: TorchFramework) -> None:
    first = all_of(fed, TASKS[:1])[0].data
    first.labels.zero_()
    first.features["by_text"]["x"][:] = 7
    assert_same(all_of(fed, TASKS[:1])[0], all_of(framework(), TASKS[:1])[0])


def test_tasks_are_drawn_one_ahead_for_each_process(fed: TorchFramework) -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[TaskRecords]:
        for one in TASKS:
            drawn.append(one.lease)
            yield one

    batches = fed.batches(Mode.TRAINING, tasks())
    assert max(len(drawn) - sum(taken.end for taken in takens) for takens in prefixes(batches)) <= 3
    assert drawn == [one.lease for one in TASKS]


def prefixes(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    taken: list[Batch] = []
    for batch in batches:
        yield taken
        taken.append(batch)


def test_an_error_of_feed_is_that_of_its_minibatch_with_the_lines_of_feed(fed: TorchFramework) -> None:
    failing = task(30, b"a", b"b", b"c", b"d", b"raise")
    batches = fed.batches(Mode.TRAINING, iter([TASKS[0], failing, TASKS[1]]))
    taken = []
    with pytest.raises(FeedError, match=r"^ValueError: no such picture$") as raised:
        taken.extend(batches)
    assert (raised.value.lease, raised.value.n) == (30, 1)
    assert 'raise ValueError("no such picture")' in raised.value.details
    assert_same(all_of(fed, TASKS), all_of(framework(), TASKS))


def test_a_connection_that_feed_loses_is_not_that_to_the_worker(fed: TorchFramework) -> None:
    with pytest.raises(FeedError, match=r"^ConnectionResetError: .*Connection reset by peer") as raised:
        all_of(fed, [TASKS[0], task(34, b"a", b"reset")])
    assert raised.value.lease == 34


def test_a_long_error_in_letters_of_several_bytes_comes_through(fed: TorchFramework) -> None:
    with pytest.raises(FeedError, match=r"^ValueError: 图图图"):
        all_of(fed, [task(34, b"raise at length")])
    assert_same(all_of(fed, TASKS), all_of(framework(), TASKS))


@pytest.mark.parametrize(
    ("record", "how"),
    [
        (b"kill", r"was killed by signal 9 \(Killed\)"),
        (b"exit", "has ended with code 3"),
    ],
)
def test_a_process_that_ends_costs_its_task_and_is_started_again(
    fed: TorchFramework, record: bytes, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FeedError, match=rf"^The input process that made the minibatches of this task {how}") as raised:
        all_of(fed, [TASKS[0], task(31, b"a", record)])
    assert (raised.value.lease, raised.value.details) == (31, "")
    with caplog.at_level(logging.WARNING):
        assert_same(all_of(fed, TASKS), all_of(framework(), TASKS))
    assert "another one is started" in caplog.text


def test_the_record_that_ends_a_process_is_named(fed: TorchFramework) -> None:
    numbered = TaskRecords(33, 33, [b"a", b"b", b"c", b"d", b"kill", b"e"], "a.bin", range(100, 106))
    batches = inspected(fed, Mode.TRAINING, iter([*TASKS[:2], numbered, TASKS[2]]), Quarantine())
    with pytest.raises(FeedError, match=r"\(record 104 of a\.bin: 'kill'\)\.") as raised:
        list(batches)
    assert raised.value.lease == 33


def test_a_minibatch_that_cannot_be_sent_is_named(fed: TorchFramework) -> None:
    with pytest.raises(FeedError, match=r"cannot send: features\['guard'\]\[0\] is a lock \(cannot pickle") as raised:
        all_of(fed, [task(32, b"a", b"lock")])
    assert "--input_workers" in str(raised.value)


def test_a_pipeline_that_is_left_gives_way_to_the_next_one(fed: TorchFramework) -> None:
    left = fed.batches(Mode.TRAINING, iter(TASKS * 3))
    assert next(left).lease == TASKS[0].lease
    left.close()
    assert_same(all_of(fed, TASKS[2:]), all_of(framework(), TASKS[2:]))


def test_two_modes_are_fed_at_once(fed: TorchFramework) -> None:
    training, evaluation = fed.batches(Mode.TRAINING, iter(TASKS)), fed.batches(Mode.EVALUATION, iter(TASKS))
    found = list(chain.from_iterable(zip(training, evaluation, strict=True)))
    expected = all_of(framework(), TASKS)
    assert_same(found[::2], expected)
    assert_same(found[1::2], expected)


def test_an_error_of_the_tasks_comes_behind_the_minibatches_before_it(fed: TorchFramework) -> None:
    def tasks() -> Iterator[TaskRecords]:
        yield TASKS[0]
        raise KeyError("lease")

    taken = []
    with pytest.raises(KeyError, match="lease"):
        taken.extend(fed.batches(Mode.TRAINING, tasks()))


def test_closing_ends_all_processes_also_one_that_is_in_feed() -> None:
    processes = InputProcesses(BEGIN, 1, SIZE, Metadata(seed=3))
    processes.start()
    made = framework()
    made.feed_in(processes)
    batches = made.batches(Mode.TRAINING, iter([TASKS[0], task(40, b"block")]))
    assert next(batches).lease == TASKS[0].lease
    pids = processes.pids()
    processes.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
