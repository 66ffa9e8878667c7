"""The parts of an elastic controller that need its data set."""

from __future__ import annotations

from collections.abc import Callable

from elasticdl.api.data import DataShardService
from elasticdl.api.pytorch.alone import StepGroup
from elasticdl.api.pytorch.gradients import ScriptGradients
from elasticdl.api.pytorch.pipeline import LoaderPipeline
from elasticdl.api.pytorch.shares import ScriptBatchSource
from elasticdl.api.pytorch.state import RegisteredState
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica
from elasticdl.worker.termination import Termination


class Loop:
    """The parts that `ElasticController` drives; put together by `wiring`."""

    def __init__(
        self,
        data: DataShardService,
        world: StepGroup,
        shares: ScriptBatchSource,
        pipeline: LoaderPipeline,
        state: RegisteredState,
        gradients: ScriptGradients,
        model: Replica,
        writer: CheckpointWriter,
        termination: Termination,
        start: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self.data = data
        self.world = world
        self.shares = shares
        self.pipeline = pipeline
        self.state = state
        self.gradients = gradients
        self.model = model
        self.writer = writer
        self.termination = termination
        self.start = start  # of the threads behind the world and the shares
        self.stop = stop  # of what the interpreter must not find alive at its end
