"""Failures: what a task costs that failed in user code: a record set aside, another try elsewhere, or the job."""

from __future__ import annotations

from elasticdl.master.core.charges import Charges
from elasticdl.master.core.ending import Ending
from elasticdl.master.core.evaluation import Evaluations
from elasticdl.master.core.events import TaskFailed
from elasticdl.master.core.leases import key_of
from elasticdl.master.core.outbox import Outbox
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.tasks import Tasks
from elasticdl.master.core.values import Lease, Level


class Failures:
    """The lease has been given back when a failure comes in here."""

    def __init__(self, settings: JobSettings, charges: Charges, ending: Ending, out: Outbox) -> None:
        self._settings = settings
        self._charges = charges
        self._ending = ending
        self._out = out

    def failed(self, event: TaskFailed, lease: Lease, tasks: Tasks, evaluations: Evaluations, is_planned: bool) -> None:
        """
        Args:
            is_planned: the task is one of `tasks`; else one of `evaluations`, if it reads records.
        """
        if event.bad_records and self._quarantine(event, lease, tasks, evaluations, is_planned):
            return
        failures = self._charges.task_failed(key_of(lease), event.worker_id)
        where = f"{lease.type} task {lease.task} of epoch {lease.epoch + 1}, minibatch {event.minibatch}"
        self._out.persist()
        self._out.log(f"Worker {event.worker_id} reported error: {event.error} ({where})", Level.WARNING)
        if self._charges.is_enough(failures):
            text = f"{where} (records {lease.shard.name}:{lease.shard.start}-{lease.shard.end})"
            self._ending.fail(f"{text} failed {failures} times, last with: {event.error}\n{event.details}".rstrip())

    def _quarantine(
        self, event: TaskFailed, lease: Lease, tasks: Tasks, evaluations: Evaluations, is_planned: bool
    ) -> bool:
        """Sets the bad records of a task aside; False when that is too many, or the model holds some of the task."""
        limit = self._settings.max_bad_records
        bad = [(lease.shard.name, record) for record in event.bad_records]
        count = len({*tasks.quarantined(), *evaluations.quarantined(), *bad})  # one in both kinds of data counts once
        if count > limit:
            return False
        if is_planned:
            tasks.quarantine(lease.task, event.bad_records)
            aside = tasks.epochs[lease.epoch].excluded(lease.task)
        else:
            evaluations.quarantine(lease.task, event.bad_records)
            aside = evaluations.excluded(lease.task)
        self._out.persist()
        names = ", ".join(f"{shard}:{record}" for shard, record in bad)
        self._out.log(f"Quarantined {names} ({count} of at most {limit}): {event.error}", Level.WARNING)
        return aside.issuperset(event.bad_records)
