"""The parts of an elastic controller that need its data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.api.data import DataShardService
from elasticdl.api.pytorch.alone import StepGroup
from elasticdl.api.pytorch.gradients import ScriptGradients
from elasticdl.api.pytorch.pipeline import LoaderPipeline
from elasticdl.api.pytorch.shares import ScriptBatchSource
from elasticdl.api.pytorch.state import RegisteredState
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica
from elasticdl.worker.termination import Termination


@dataclass(frozen=True, slots=True)
class Loop:
    """The parts that `ElasticController` drives; put together by `wiring`.

    Attributes:
        start: the threads behind the world and the shares.
        stop: what the interpreter must not find alive at its end.
    """

    data: DataShardService
    world: StepGroup
    shares: ScriptBatchSource
    pipeline: LoaderPipeline
    state: RegisteredState
    gradients: ScriptGradients
    model: Replica
    writer: CheckpointWriter
    termination: Termination
    start: Callable[[], None]
    stop: Callable[[], None]
