"""A worker process whose minibatches last until a file lets them go on.  ``python -m tests.worker.stepwise_worker``.

Everything is the real worker's but the framework: Local strategy, links, reports, end at SIGTERM.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.reader import Metadata, Shard
from elasticdl.frameworks.framework import Batch, Mode, TaskRecords
from elasticdl.worker.activity import ActivityClock
from elasticdl.worker.export import Exporter
from elasticdl.worker.local import LocalStrategy
from elasticdl.worker.loop import WorkerLoop
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter
from elasticdl.worker.tasks import TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.job_spec import JobSpec
from tests.worker.scripted_master import TOKEN


class Stepwise:
    """Each record is a minibatch, computed once ``go-<n>`` exists."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_computed = 0

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            yield from (Batch(task.lease, n, size=1) for n in range(len(task.records)))
            yield Batch(task.lease, len(task.records), end=True)

    def learning_rate(self, epoch: int, version: int) -> float | None:
        return None

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        (self._directory / f"computing-{batch.n}").touch()
        while not (self._directory / f"go-{batch.n}").exists():
            threading.Event().wait(0.01)
        self._num_computed += 1
        return 0.5

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"num_computed": np.array(self._num_computed)}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self._num_computed = int(state["num_computed"])


class Numbers:
    """A reader whose records are their own numbers."""

    def shards(self) -> list[Shard]:
        return [Shard("s", 0, 1000)]

    def read(self, shard: Shard) -> list[bytes]:
        return [str(number).encode() for number in range(shard.start, shard.end)]

    def metadata(self) -> Metadata:
        return Metadata()


def main() -> None:
    """Arguments: address of the master, directory of the files, directory of checkpoints."""
    address, directory, checkpoints = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    clock = ActivityClock()
    termination = Termination(clock)
    termination.install()
    link = MasterLink(address, TOKEN, 0, "pod", clock, 60.0)
    link.register()
    link.start_heartbeat()
    framework: Any = Stepwise(directory)
    strategy = LocalStrategy(framework, "stepwise", 1, checkpoints, 1000, 0, clock)
    tasks = TaskStream(link, lambda task_type: Numbers(), strategy.begin, seed=1, shuffle=False, clock=clock)
    reporter = Reporter(link, 1)
    exporter = Exporter(framework, strategy, link, JobSpec())
    loop = WorkerLoop(link, tasks, framework, strategy, reporter, clock, exporter, 0, termination)
    termination.before_end(loop.leave)
    loop.run()


if __name__ == "__main__":
    main()
