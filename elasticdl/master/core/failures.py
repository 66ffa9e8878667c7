"""Failures: what a task costs that failed in user code: a record set aside, another try elsewhere, or the job."""

from __future__ import annotations

from elasticdl.master.core.evaluation import Evaluations
from elasticdl.master.core.events import TaskFailed
from elasticdl.master.core.leases import key_of
from elasticdl.master.core.retry_budget import RetryBudget
from elasticdl.master.core.state import JobState
from elasticdl.master.core.tasks import Tasks
from elasticdl.master.core.values import Lease, Level
from elasticdl_client.job_events import EventKind


class Failures:
    """The lease has been given back when a failure comes in here."""

    def __init__(self, state: JobState, retry_budget: RetryBudget) -> None:
        self._settings, self._ending, self._out = state.settings, state.ending, state.out
        self._retry_budget = retry_budget

    def failed(self, event: TaskFailed, lease: Lease, tasks: Tasks, evaluations: Evaluations, is_planned: bool) -> None:
        """
        Args:
            is_planned: the task is one of `tasks`; else one of `evaluations`, if it reads records.
        """
        if event.bad_records and self._quarantine(event, lease, tasks, evaluations, is_planned):
            return
        failures = self._retry_budget.task_failed(key_of(lease), event.worker_id)
        where = f"{lease.type} task {lease.task} of epoch {lease.epoch + 1}, minibatch {event.minibatch}"
        cause = self._out.events.add(
            EventKind.TASK_FAILED,
            f"task-{lease.task}",
            event.error,
            worker=event.worker_id,
            type=lease.type.value,
            epoch=lease.epoch + 1,
            minibatch=event.minibatch,
            records=f"{lease.shard.name}:{lease.shard.start}-{lease.shard.end}",
            failures=failures,
            traceback=event.details,
        )
        self._out.persist()
        self._out.log(f"Worker {event.worker_id} reported error: {event.error} ({where})", Level.WARNING)
        if self._retry_budget.is_enough(failures):
            text = f"{where} (records {lease.shard.name}:{lease.shard.start}-{lease.shard.end})"
            text = f"{text} failed {failures} times, last with: {event.error}\n{event.details}".rstrip()
            self._ending.fail(text, cause=cause)

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
        names = ", ".join(f"{shard}:{record}" for shard, record in bad)
        self._out.events.add(
            EventKind.RECORDS_EXCLUDED,
            f"task-{lease.task}",
            event.error,
            worker=event.worker_id,
            epoch=lease.epoch + 1,
            records=names,
            excluded=count,
            limit=limit,
        )
        self._out.persist()
        self._out.log(f"Quarantined {names} ({count} of at most {limit}): {event.error}", Level.WARNING)
        return aside.issuperset(event.bad_records)
