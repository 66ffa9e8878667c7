"""A worker process whose minibatches last until a pipe lets them go on.  ``python -m tests.worker.stepwise_worker``.

Everything is the real worker's but the framework: Local strategy, links, reports, end at SIGTERM.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.activities import ActivityClock
from elasticdl.frameworks.framework import Batch, Mode, TaskRecords
from elasticdl.worker.checkpoint import StateCheckpoints
from elasticdl.worker.local import STATE_FILE, LocalStrategy
from elasticdl.worker.loop import TrainingTasks, TrainingWork, WorkerLoop
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.job_spec import JobSpec
from tests.worker.counting import Numbers
from tests.worker.scripted_master import TOKEN


class Stepwise:
    """Each record is a minibatch, computed once its number has come through the pipe; it says which it computes."""

    def __init__(self, pipe: Path) -> None:
        self._allowed = pipe.open()
        self._num_computed = 0

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            yield from (Batch(task.lease, n, size=1) for n in range(len(task.records)))
            yield Batch(task.lease, len(task.records), end=True)

    def learning_rate(self, epoch: int, version: int) -> float | None:
        return None

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        print(f"computing {batch.n}", flush=True)
        assert self._allowed.readline() == f"{batch.n}\n"
        self._num_computed += 1
        return 0.5

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"num_computed": np.array(self._num_computed)}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._num_computed = int(state["num_computed"])


def main() -> None:
    """Arguments: address of the master, the pipe, directory of checkpoints."""
    address, pipe, checkpoints = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    clock = ActivityClock()
    termination = Termination(clock)
    termination.install()
    link = MasterLink(address, TOKEN, 0, "pod", clock, 60.0)
    link.register()
    link.start_heartbeat()
    framework: Any = Stepwise(pipe)
    spec = JobSpec(job_name="stepwise", checkpoint_dir=checkpoints)
    strategy = LocalStrategy(framework, StateCheckpoints.of_module(spec, STATE_FILE), 1000, 1, clock)
    tasks = TaskStream(link, lambda task_type: Numbers(), strategy.begin, seed=1, shuffle=False, clock=clock)
    each_step = JobSpec(log_loss_steps=1)
    training = TrainingTasks.of(each_step, TaskFailures.of(each_step, link), framework, strategy)
    work = TrainingWork(training, strategy, termination)
    termination.before_end(work.leave)
    WorkerLoop(tasks, work, termination).run()


if __name__ == "__main__":
    main()
