"""LeaseQuota: how much a worker may hold.  It grants nothing."""

from __future__ import annotations

from elasticdl.master.core.leases import MAX_PER_WORKER, Leases
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.tasks import Tasks
from elasticdl.master.core.values import TaskType
from elasticdl.master.core.workers import Worker
from elasticdl.master.core.world import WorkerGroups


class LeaseQuota:
    """The task that a worker computes and the next one; in worlds, for members alone."""

    def __init__(self, settings: JobSettings, leases: Leases, worlds: WorkerGroups) -> None:
        self._settings = settings
        self._leases = leases
        self._worlds = worlds

    def may_ask(self, worker: Worker) -> bool:
        """It holds less than it may."""
        held = self._leases.of_worker(worker.id)
        if not self._settings.has_worlds:
            return len(held) < MAX_PER_WORKER
        if worker.id not in self._worlds.members:
            return False
        if worker.only is TaskType.EVALUATION:
            return self.may_evaluate(worker)
        if not self._settings.fixed_global_batch:
            return sum(lease.type is not TaskType.EVALUATION for lease in held) < MAX_PER_WORKER
        return True

    def may_evaluate(self, worker: Worker) -> bool:
        """In worlds: on top of what it is training on."""
        held = self._leases.of_worker(worker.id)
        return not self._settings.has_worlds or sum(one.type is TaskType.EVALUATION for one in held) < MAX_PER_WORKER

    def may_train(self, worker: Worker, tasks: Tasks) -> bool:
        """--fixed_global_batch: rank 0 alone holds the training leases, for its world: for a step and one task more."""
        settings = tasks.settings
        if not settings.has_worlds or not settings.fixed_global_batch:
            return True
        held = [lease for lease in self._leases.of_worker(worker.id) if lease.type is TaskType.TRAINING]
        missing = sum(tasks.num_missing((lease.epoch, lease.task)) for lease in held)
        step = settings.fixed_global_batch // settings.minibatch_size
        return worker.id == self._worlds.members[0] and missing < step + settings.num_minibatches_per_task

    def all_held_by(self, worker_id: int, tasks: Tasks) -> tuple[int, int]:
        """With a fixed global batch: of how many epochs every task is done or a worker's, and its newest lease."""
        if not tasks.settings.fixed_global_batch or worker_id not in self._worlds.members[:1]:
            return 0, 0
        held = [lease for lease in self._leases.of_worker(worker_id) if lease.type is TaskType.TRAINING]
        own = {(lease.epoch, lease.task) for lease in held}
        return tasks.num_whole(own), max((lease.id for lease in held), default=0)
