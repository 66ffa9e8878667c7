"""Metrics are tried on a minibatch before anything is trained: errors that end the job, and those that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from elasticdl.activities import Activity, ActivityClock
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import Batch, FeedError, Framework, MetricState
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.evaluation import MetricsTrial
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter, TaskFailures
from elasticdl.worker.tasks import OwnValues
from elasticdl_client.errors import DataError, ModelDefinitionError, OtherColumnsError
from elasticdl_client.job_spec import JobSpec
from tests.worker.counting import Counting, Numbers

SAMPLE = pb.ShardMessage(name="s", start=4, end=8)
NOTHING = pb.ShardMessage()


@dataclass
class Link:
    """The part of a `MasterLink` that a trial needs."""

    shard: pb.ShardMessage
    clock: ActivityClock = field(default_factory=ActivityClock)

    def sample(self, of_validation: bool = False) -> pb.SampleReply:
        assert of_validation
        return pb.SampleReply(shard=self.shard)


@dataclass
class Measured(Counting):
    """A framework with one metric, whose model counts the samples that it has seen.

    Attributes:
        error: of the metric's update; None: it has none.
        error_of_results: of its results.
    """

    size: int = 4
    error: Exception | None = None
    error_of_results: Exception | None = None
    seen: list[list[int]] = field(default_factory=list)
    num_results: int = 0

    def evaluation(self) -> Measured:
        return self

    def update(self, batch: Batch, parameters: Any, rows: Any) -> None:
        self.seen.append(batch.data)
        if self.error is not None:
            raise self.error

    def states(self) -> list[MetricState]:
        return [MetricState("sum", (np.ones(1),))]

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        self.num_results += len(merged)
        if self.error_of_results is not None:
            raise self.error_of_results
        return {"sum": 1.0}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"seen": np.array(len(self.seen))}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        del self.seen[int(state["seen"]) :]


class Broken(Measured):
    """Its feed raises even on no records."""

    def batches(self, mode: Any, tasks: Any) -> Any:
        for task in tasks:
            raise FeedError(task.lease, 0, "ValueError: no such column") from ValueError("no such column")
            yield


def numbers(kind: object, torn: frozenset[int] = frozenset()) -> Numbers:
    return Numbers(set(torn))


def run(
    model: Measured,
    shard: pb.ShardMessage = SAMPLE,
    reader: Callable[[pb.TaskType], Reader] = numbers,
    keeps: bool = False,
    spec: JobSpec | None = None,
) -> None:
    link = Link(shard)
    failures = TaskFailures(cast(MasterLink, link), cast(Reporter, None))
    MetricsTrial(failures, cast(Framework, model), OwnValues(), reader, spec or JobSpec()).run(keeps)
    assert link.clock.read()[0] is Activity.START


def test_one_minibatch_is_evaluated_to_its_results() -> None:
    model = Measured()
    run(model)
    assert (model.seen, model.num_results) == ([[4, 5, 6, 7]], 1)


def test_nothing_is_evaluated_where_another_worker_does_it() -> None:
    model = Measured()
    run(model, NOTHING)
    assert not model.seen


def test_no_minibatch_is_evaluated_where_the_filter_leaves_no_sample() -> None:
    model = Measured(dropped={4, 5, 6, 7})
    run(model)
    assert (model.seen, model.num_results) == ([], 0)


def test_the_models_state_is_put_back() -> None:
    model = Measured()
    run(model, keeps=True)
    assert model.seen == []


@pytest.mark.parametrize("error", [ValueError("ranks differ"), TypeError("no number"), KeyError("label")])
def test_an_error_of_a_metric_rejects_the_model(error: Exception) -> None:
    with pytest.raises(
        ModelDefinitionError, match=f"first validation minibatch.* raised {type(error).__name__}"
    ) as raised:
        run(Measured(error=error))
    assert raised.value.__cause__ is error


def test_an_error_of_results_rejects_the_model() -> None:
    with pytest.raises(ModelDefinitionError, match="raised TypeError: no number"):
        run(Measured(error_of_results=TypeError("no number")))


@pytest.mark.parametrize(
    "model",
    [
        Measured(error=ZeroDivisionError("no positive sample")),
        Measured(error=DataError("the file is torn")),
        Measured(error_of_results=ZeroDivisionError("no positive sample")),
        Measured(error_of_results=ValueError("only one class")),
        Measured(bad={5}),
    ],
    ids=["not finite", "data", "undefined result", "too few samples", "bad record"],
)
def test_errors_of_these_records_alone_are_left_to_evaluations(
    model: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    run(model)
    assert "The first validation minibatch cannot be evaluated" in caplog.text


def test_records_that_cannot_be_read_are_left_to_evaluations(caplog: pytest.LogCaptureFixture) -> None:
    run(Measured(), reader=partial(numbers, torn=frozenset({4})))
    assert "the records from 4 on are torn" in caplog.text


def test_a_feed_that_raises_whatever_the_records_are_rejects_the_model() -> None:
    with pytest.raises(ModelDefinitionError, match="raised ValueError: no such column") as raised:
        run(Broken())
    assert "ValueError: no such column" in raised.value.details


def test_a_feed_that_raises_on_each_record_rejects_the_model() -> None:
    """As on data that lack a column: it would raise at each evaluation."""
    with pytest.raises(ModelDefinitionError, match=r"first validation minibatch.*ugly 4 \(record 4 of s: '4'\)"):
        run(Measured(bad={4, 5, 6, 7}))


def test_a_whole_minibatch_of_bad_records_that_may_be_excluded_is_left_to_evaluations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(Measured(bad={4, 5, 6, 7}), spec=JobSpec(max_bad_records=4))
    assert "The first validation minibatch cannot be evaluated" in caplog.text


def test_rows_with_other_columns_than_those_for_training_reject_the_model() -> None:
    def reader(kind: object) -> Reader:
        raise OtherColumnsError("The columns of --validation_data are b, a")

    with pytest.raises(ModelDefinitionError, match="are b, a"):
        run(Measured(), reader=reader)
