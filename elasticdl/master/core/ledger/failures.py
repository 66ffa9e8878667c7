"""Failures counted against a job: tasks whose user code raised, pods that ended by their own fault, lost values.

A lost worker, a preemption or a lost lease is never charged.  `RetryBudget` decides when the job fails and how long a
successor waits, `Failures` the cost of a failed task (a quarantined record, another attempt elsewhere, or the job),
`Losses` the cost of a loss or gradient that is not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from elasticdl.master.core.events import ProgressReported, TaskFailed
from elasticdl.master.core.ledger.leases import TaskKey, key_of
from elasticdl.master.core.plan.evaluation import Evaluations
from elasticdl.master.core.plan.tasks import Tasks
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Lease, Level, Place, TaskType
from elasticdl.protocol import Role
from elasticdl_client.choices import NanPolicy
from elasticdl_client.job_events import EventKind

MAX_DELAY = 60.0
LONG_LIFE = 600.0  # seconds; a kubelet also forgets the restarts of a container that has run for so long
OWN_FAULTS = frozenset({"Error", "OOMKilled", "Completed"})  # Completed: it left although the job continues

# Errors of code, which recur after a restart.  Not RuntimeError: PyTorch raises it for devices and processes, too.
_OF_CODE = re.compile(
    r"exit code \d+: (?:AssertionError|AttributeError|ImportError|IndentationError|IndexError|KeyError"
    r"|ModuleNotFoundError|NameError|NotImplementedError|RecursionError|SyntaxError|TabError|TypeError"
    r"|UnboundLocalError|ValueError|ZeroDivisionError)(?::|$)",
    re.MULTILINE,
)
_ADVICE = "\n  → "  # separates an error from the advice
_OF_USE = re.compile(rf"exit code \d+: .+{_ADVICE}")  # ElasticDL's own errors about a script's wrong use of it
_OF_ARGUMENTS = re.compile(r"exit code 2; its last lines:\n(?:.*\n)*\S+: error: .*$")  # argparse
_OF_SURROUNDINGS = re.compile(
    r"CUDA|cuDNN|NCCL|gloo|memory|connect|timed? ?out|unavailable|killed by|reach|replaced|://", re.IGNORECASE
)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
MAX_SKIPS_LOGGED = 20  # logged one by one; after that one of this number is logged


class RetryBudget:
    """Counts failures per task, with the worker that must not have it next, and ends of pods without progress between.

    The delay of a successor grows with the number of pods of its slot that have ended without a commit of their own:
    many pods that are lost at once all return at once, and a pod that always fails does not return each second.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._failures: dict[TaskKey, int] = {}
        self._avoided: dict[TaskKey, int] = {}
        self.num_faults = 0  # consecutive pods that ended by their own fault before a commit
        self._errors: set[str] = set()  # errors of code since the last commit
        # Consecutive pods that ended early for any reason, by role and slot.
        self._num_fruitless: dict[Role, dict[int, int]] = {role: {} for role in Role}
        self._num_relapses = 0  # consecutive pods that failed after work of their own, without new records done between
        self.furthest = 0  # most records that were done when one of these failed
        self.has_trained = True  # since the last of these, as far as this generation of the master knows

    def task_failed(self, key: TaskKey, worker_id: int) -> int:
        """Charge a task; return how often it has failed."""
        self._failures[key] = self._failures.get(key, 0) + 1
        self._avoided[key] = worker_id
        return self._failures[key]

    def task_finished(self, key: TaskKey) -> None:
        self._failures.pop(key, None)
        self._avoided.pop(key, None)

    def may_have(self, key: TaskKey, worker_id: int, is_alone: bool) -> bool:
        """Return whether a worker may have a task: one that failed on it goes to another worker, if there is one."""
        return is_alone or self._avoided.get(key) != worker_id

    def is_enough(self, failures: int) -> bool:
        return failures >= self._max_failures

    def committed(self, records_done: int) -> None:
        """Forgive earlier failures after a commit; relapses only if training has got further than before."""
        if records_done:
            self.has_trained = True
        if records_done > self.furthest:
            self._num_relapses = self.furthest = 0
        self.num_faults = 0
        self._errors.clear()
        # A commit needs every server, so it proves that their pods work; TensorFlow's own servers do not report to us.
        self._num_fruitless[Role.PS].clear()

    def pod_ended(self, reason: str, place: Place, has_committed: bool, seconds: float) -> float:
        """Charge the end of a pod, if it is a fault, after the pod has run for `seconds`.

        Returns:
            Seconds until its successor may start.
        """
        role, slot = place
        ended = self._num_fruitless[role]
        if has_committed or seconds >= LONG_LIFE:
            ended.pop(slot, None)
        if has_committed:
            return 0.0
        ended[slot] = num_fruitless = ended.get(slot, 0) + 1
        if reason in OWN_FAULTS:
            self.num_faults += 1
        elif num_fruitless == 1:
            return 0.0
        return min(MAX_DELAY, 2.0 ** min(10, num_fruitless - 1))

    def relapsed(self, reached: int) -> int:
        """Charge a pod that failed after a commit of its own: its model may be lost, and trained again.

        Args:
            reached: Number of records that were done when it last had a part in a commit.

        Returns:
            How many pods failed so since training last got further.
        """
        self.furthest = max(self.furthest, reached)
        self.has_trained = False
        self._num_relapses += 1
        return self._num_relapses

    def is_known_error(self, message: str) -> bool:
        """Return whether a pod ended with the same error of the user's code before, since the last commit.

        Args:
            message: The cluster's message about the end of the pod; errors that another run may not meet are not
                remembered.
        """
        is_of_code = _OF_CODE.match(message) or _OF_USE.match(message)
        is_lasting = is_of_code and not _OF_SURROUNDINGS.search(message.partition("\n")[0])
        if not is_lasting and not _OF_ARGUMENTS.match(message):
            return False
        error = _ADDRESS.sub("", message)
        is_known = error in self._errors
        self._errors.add(error)
        return is_known

    def snapshot(self) -> dict[str, Any]:
        failures = [[*key, count, self._avoided[key]] for key, count in self._failures.items()]
        fruitless = [
            [role, slot, count] for role, ended in self._num_fruitless.items() for slot, count in ended.items()
        ]
        pods = {"num_faults": self.num_faults, "errors": sorted(self._errors), "fruitless": fruitless}
        return {"failures": failures, **pods, "relapses": [self._num_relapses, self.furthest]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for task_type, epoch, task, count, worker_id in saved["failures"]:
            key = (TaskType(task_type), epoch, task)
            self._failures[key], self._avoided[key] = count, worker_id
        self.num_faults = saved["num_faults"]
        self._errors = set(saved.get("errors", ()))
        for role, slot, count in saved.get("fruitless", ()):
            self._num_fruitless[Role(role)][slot] = count
        self._num_relapses, self.furthest = saved.get("relapses", (0, 0))


class Failures:
    """Decides on tasks that failed in user code.  The lease of such a task has been given back before."""

    def __init__(self, state: JobState, retry_budget: RetryBudget) -> None:
        self._settings, self._ending, self._out = state.settings, state.ending, state.out
        self._retry_budget = retry_budget

    def failed(self, event: TaskFailed, lease: Lease, tasks: Tasks, evaluations: Evaluations, is_planned: bool) -> None:
        """Retry a failed task, quarantine its bad records, or fail the job.

        Args:
            is_planned: The task is one of `tasks`; else one of `evaluations`, if it reads records.
        """
        if event.bad_records and self._quarantine(event, lease, tasks, evaluations, is_planned):
            return
        failures = self._retry_budget.task_failed(key_of(lease), event.worker_id)
        where = f"{lease.type} task {lease.task} of epoch {lease.epoch + 1}"
        where += f", minibatch {event.minibatch}" if event.minibatch >= 0 else ""
        cause = self._out.events.add(
            EventKind.TASK_FAILED,
            f"task-{lease.task}",
            event.error,
            worker=self._settings.pod_of(event.worker_id),
            type=lease.type.value,
            epoch=lease.epoch + 1,
            minibatch=event.minibatch,
            records=f"{lease.shard.name}:{lease.shard.start}-{lease.shard.end}",
            failures=failures,
            traceback=event.details,
        )
        self._out.persist()
        name = self._settings.name_of(event.worker_id)
        self._out.log(f"Worker {name} reported error: {event.error} ({where})", Level.WARNING)
        if self._retry_budget.is_enough(failures):
            text = f"{where} (records {lease.shard.name}:{lease.shard.start}-{lease.shard.end})"
            if lease.type is TaskType.TRAIN_END:
                text = "The end of the training" if self._settings.trains else "The last task"
            text = f"{text} failed {failures} times, last with: {event.error}\n{event.details}".rstrip()
            self._ending.fail(text, cause=cause)

    def _quarantine(
        self, event: TaskFailed, lease: Lease, tasks: Tasks, evaluations: Evaluations, is_planned: bool
    ) -> bool:
        """Quarantine the bad records of a task; return False if they are too many, or partly in the model."""
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
            worker=self._settings.pod_of(event.worker_id),
            epoch=lease.epoch + 1,
            records=names,
            excluded=count,
            limit=limit,
        )
        self._out.persist()
        self._out.log(f"Quarantined {names} ({count} of at most {limit}): {event.error}", Level.WARNING)
        return aside.issuperset(event.bad_records)


class Losses:
    """The losses that workers report; one that is not finite ends the job, or its minibatch is skipped.

    Attributes:
        newest: The newest finite loss; None before the first.
        learning_rate: The newest reported learning rate.
    """

    def __init__(self, state: JobState) -> None:
        self._settings, self._ending, self._out = state.settings, state.ending, state.out
        self._num_skips = 0  # reported in this generation
        self.newest: float | None = None
        self.learning_rate: float | None = None

    def reported(self, event: ProgressReported, lease: Lease, is_new: bool, tasks: Tasks) -> None:
        """Handle progress after the tasks have recorded it; `is_new`: it names skips that were not known before."""
        is_finite = event.loss is None or math.isfinite(event.loss)
        self.learning_rate = event.learning_rate or self.learning_rate
        if event.loss is not None and is_finite:
            self.newest = event.loss
        if event.not_finite or not is_finite:
            self._not_finite(event, lease, is_new, tasks)

    def snapshot(self) -> list[float | None]:
        return [self.newest, self.learning_rate]

    def restore(self, saved: Sequence[float | None]) -> None:
        self.newest, self.learning_rate = saved

    def _not_finite(self, event: ProgressReported, lease: Lease, is_new: bool, tasks: Tasks) -> None:
        """End the job or log the skipped minibatch; of many skips only some are logged, with the number so far."""
        minibatch = max(event.skipped or event.committed, default=None)
        is_skipped = minibatch is not None and tasks.epochs[lease.epoch].is_skipped(lease.task, minibatch)
        where = f"epoch {lease.epoch + 1}, task {lease.task}"
        where += "" if minibatch is None else f", minibatch {minibatch}"
        where += f", records {lease.shard.name}:{lease.shard.start}-{lease.shard.end - 1}"
        said, _, own_advice = event.not_finite.partition(_ADVICE)
        what = f"{said or f'The loss is {event.loss}'} ({where})"
        if self._settings.nan_policy is NanPolicy.FAIL or is_new:
            cause = self._out.events.add(
                EventKind.LOSS_NOT_FINITE,
                f"task-{lease.task}",
                said or f"The loss is {event.loss}",
                worker=self._settings.pod_of(event.worker_id),
                epoch=lease.epoch + 1,
                minibatch=-1 if minibatch is None else minibatch,
                records=f"{lease.shard.name}:{lease.shard.start}-{lease.shard.end}",
                policy=self._settings.nan_policy.value,
            )
        if self._settings.nan_policy is NanPolicy.FAIL:
            advice = (
                "Look at these records first: a missing cell of a table is NaN, to be filled in the data or in feed. "
            )
            advice += "If they are finite, lower the learning rate.  --nan_policy=skip leaves such minibatches out."
            self._ending.fail(f"{what}{_ADVICE}{own_advice or advice}", cause=cause)
        elif is_new:
            self._num_skips += 1
            if self._num_skips <= MAX_SKIPS_LOGGED or self._num_skips % MAX_SKIPS_LOGGED == 0:
                self._out.log(f"{what}; it is left out of the model, number {self._num_skips}", Level.WARNING)
        elif not is_skipped:
            self._out.log(what, Level.WARNING)
