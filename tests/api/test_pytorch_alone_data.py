"""Data of a PyTorch script with an elastic controller, run by itself: every record of every epoch, wherever it is."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, assert_equal, dataset, elastic_loop, loop, plain_loop
from torch import nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

from elasticdl.api.data import DataShardService, Minibatch
from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.api.pytorch.alone import LoneGroup
from elasticdl.api.pytorch.shares import LeasedShares
from elasticdl.frameworks.framework import TaskRecords
from elasticdl.worker.allreduce.group_session import GroupEnded
from elasticdl.worker.allreduce.step_header import BatchRef, StepPlan
from elasticdl.worker.tasks import HeldLease, TaskStream
from elasticdl_client.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_processes_of_the_loader_change_nothing() -> None:
    assert_equal(elastic_loop(Script(), num_workers=2, prefetch_factor=3), plain_loop(Script()))


def test_every_record_of_every_epoch_comes_once_and_epochs_have_their_numbers() -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, 3, SIZE, shuffle=True, state=script.state)
    loader = controller.loader(dataset(), num_workers=1)
    seen: dict[int, Counter[int]] = {}
    for epoch in controller.epochs():
        seen[epoch] = Counter()
        for batch in loader:
            with controller.step():
                seen[epoch].update(batch[2].tolist())
                script.train(batch)
    assert seen == {epoch: Counter(range(SIZE)) for epoch in range(3)}
    assert controller.get_current_epoch() == 3
    assert controller.global_completed_batch_num == controller.num_steps == 21


def test_a_script_alone_draws_a_bounded_number_of_minibatches_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds it back as a master's leases do: it once drew a hundred minibatches in each step."""
    drawn: list[int] = []
    read = TaskStream._read

    def count(stream: TaskStream, held: HeldLease) -> TaskRecords:
        task = read(stream, held)
        drawn.append(len(held.record_numbers))
        return task

    monkeypatch.setattr(TaskStream, "_read", count)
    script, size, num_steps = Script(), 100_000, 60
    controller = create_elastic_controller(BATCH, 1, size, state=script.state)
    loader = controller.loader(Subset(dataset(), [number % SIZE for number in range(size)]))
    for _, batch in zip(range(num_steps), loader, strict=False):
        with controller.step():
            script.train(batch)
    assert num_steps * BATCH < sum(drawn) < (num_steps + 256) * BATCH


class Stream(IterableDataset):  # type: ignore[misc, type-arg]
    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        data = dataset()
        return (data[k] for k in range(SIZE - self.missing))


class PlacedStream(Stream):
    def read(self, start: int, end: int) -> Iterator[Any]:
        data = dataset()
        return (data[k] for k in range(start, end))

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it is read from a place on")


@pytest.mark.parametrize("stream", [Stream(), PlacedStream()])
def test_an_iterable_data_set_is_exact_too(stream: Stream) -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    loader = controller.loader(stream, num_workers=2)
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
    assert_equal(script.values(), plain_loop(Script()))


def test_a_stream_that_is_too_short_says_so() -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    with pytest.raises(DataError, match="gives 4 samples"):
        loop(controller, Stream(missing=2), script.train)


def test_a_data_set_without_samples_is_refused_by_name() -> None:
    controller = create_elastic_controller(BATCH, state=Script().state)
    with pytest.raises(DataError, match=r"^TensorDataset has no samples"):
        controller.loader(TensorDataset(torch.zeros(0, 2)))


def test_records_of_files_reach_a_function(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x\n" + "".join(f"{n}\n" for n in range(20)))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    controller = create_elastic_controller(
        4, 1, training_data=str(tmp_path / "rows.csv"), fixed_global_batch=8, state=[model, optimizer]
    )
    seen: list[float] = []
    for column in controller.loader(lambda m: torch.tensor([[float(r)] for r in m.records]), num_workers=1):
        with controller.step():
            seen += column.flatten().tolist()
            model(column).square().mean().backward()
            optimizer.step()
    assert sorted(seen) == list(range(20))
    assert controller.num_steps == 3


def test_the_end_of_the_job_may_come_before_the_end_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop: the others have left with the last step, and this process has the model for what follows."""
    is_over, is_asked = threading.Event(), threading.Event()
    draw, enter, plan_step = DataShardService.minibatches, LoneGroup.enter, LoneGroup.plan_step
    offer = LeasedShares.offer

    def draw_few(data: DataShardService) -> Iterator[Minibatch]:
        yield from itertools.islice(draw(data), 3)
        is_asked.wait()  # the answer of the master comes after the question

    def plan(group: LoneGroup, *arguments: Any) -> StepPlan:
        if group.ledger.steps < 3:
            return plan_step(group, *arguments)
        is_over.set()
        raise GroupEnded("the others have left")

    def ask(shares: LeasedShares, patience_s: float) -> list[BatchRef]:
        if is_over.is_set():
            is_asked.set()
        return offer(shares, patience_s)

    monkeypatch.setattr(DataShardService, "minibatches", draw_few)
    monkeypatch.setattr(LeasedShares, "offer", ask)
    monkeypatch.setattr(LoneGroup, "plan_step", plan)
    monkeypatch.setattr(LoneGroup, "enter", lambda group: not is_over.is_set() and enter(group))
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    for batch in controller.loader(dataset()):
        with controller.step():
            script.train(batch)
    assert controller.num_steps == 3
