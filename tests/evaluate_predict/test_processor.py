"""The user's PredictionOutputsProcessor: with the minibatch's name where it takes one."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from elasticdl.model_def import ModelDefinition
from elasticdl.original.objects import BasePredictionOutputsProcessor
from elasticdl.worker.inference.prediction import make_process
from elasticdl_client.errors import ModelDefinitionError


class OfTheOriginal:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def process(self, predictions: Any, worker_id: int) -> None:
        self.seen.append((predictions, worker_id))


class WithName(OfTheOriginal):
    def process(self, predictions: Any, worker_id: int, name: tuple[int, int] = (-1, -1)) -> None:
        self.seen.append((predictions, worker_id, name))


class WithAnything(OfTheOriginal):
    def process(self, predictions: Any, worker_id: int, **more: Any) -> None:
        self.seen.append((predictions, worker_id, more["name"]))


def seen_by(kind: type[OfTheOriginal]) -> list[Any]:
    made: list[OfTheOriginal] = []

    def make() -> OfTheOriginal:
        made.append(kind())
        return made[-1]

    process = make_process(ModelDefinition("m.py", "f", lambda: None, prediction_outputs_processor=make), 4)
    assert process is not None
    process("first", (0, 0))
    process("second", (0, 1))
    (processor,) = made  # one for the whole life of a worker
    return processor.seen


def test_two_arguments_are_enough() -> None:
    assert seen_by(OfTheOriginal) == [("first", 4), ("second", 4)]


@pytest.mark.parametrize("kind", [WithName, WithAnything])
def test_a_third_gets_task_and_minibatch(kind: type[OfTheOriginal]) -> None:
    assert seen_by(kind) == [("first", 4, (0, 0)), ("second", 4, (0, 1))]


def test_a_class_without_process_or_that_raises_is_refused() -> None:
    assert make_process(ModelDefinition("m.py", "f", lambda: None), 0) is None
    with pytest.raises(ModelDefinitionError, match="has no method process"):
        make_process(ModelDefinition("m.py", "f", lambda: None, prediction_outputs_processor=dict), 0)
    with pytest.raises(ModelDefinitionError, match="raised ZeroDivisionError"):
        make_process(ModelDefinition("m.py", "f", lambda: None, prediction_outputs_processor=lambda: 1 // 0), 0)


def test_a_failed_call_of_the_processors_own_is_an_error_of_user_code() -> None:
    class Remote(OfTheOriginal):
        def process(self, predictions: Any, worker_id: int) -> None:
            raise grpc.RpcError("the feature store is away")  # as its client does

    with pytest.raises(RuntimeError, match="RpcError: the feature store is away") as raised:
        seen_by(Remote)
    assert not isinstance(raised.value, grpc.RpcError)


class Outputs(NamedTuple):
    scores: Any
    others: Any


@pytest.mark.parametrize("kind", [Outputs, lambda *parts: parts, lambda *parts: list(parts)])
def test_a_processor_of_the_originals_base_class_gets_several_outputs_as_tensors(kind: Any) -> None:
    seen: list[Any] = []

    class Processor(BasePredictionOutputsProcessor):
        def process(self, predictions: Any, worker_id: int) -> None:
            seen.append(predictions)

    outputs = kind(np.arange(2), (np.ones(2),))
    Processor().process(outputs, 4)
    assert type(seen[0]) is type(outputs)
    scores, (ones,) = seen[0]
    assert (scores.numpy().tolist(), ones.numpy().tolist()) == ([0, 1], [1.0, 1.0])
