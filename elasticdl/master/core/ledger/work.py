"""Work: grants tasks, evaluations and TRAIN_END to workers, and handles their results.

It joins tasks, rounds and leases, which are parts of their own.  job.py decides whether any task may be handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.commands import Accepted, LeaseGranted, NoLeaseNow, Refused, UnknownWorker
from elasticdl.master.core.events import (
    CallAbandoned,
    EvaluationReported,
    LeaseQuestioned,
    LeaseRequested,
    ProgressReported,
    TaskFailed,
    TaskFinished,
)
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.failures import Failures, Losses, RetryBudget
from elasticdl.master.core.ledger.leases import LeaseQuota, Leases, TaskKey, key_of, most_per_worker
from elasticdl.master.core.plan.callbacks import Callbacks
from elasticdl.master.core.plan.evaluation import Evaluations, EvaluationSchedule, PlannedEvaluation
from elasticdl.master.core.plan.tasks import Loss, Tasks
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Lease, Level, ReportedLease, TaskType
from elasticdl.master.core.workers import Worker
from elasticdl.protocol import Shard
from elasticdl_client.job_events import EventKind

LeaseEvent = ProgressReported | TaskFinished | TaskFailed | EvaluationReported | LeaseQuestioned
TRAIN_END_KEY: TaskKey = (TaskType.TRAIN_END, 0, 0)
_MODEL_CHANGES = (EventKind.PS_READY, EventKind.GROUP_FORMED, EventKind.WORKER_REGISTERED)  # to an older model


class Work:
    """The tasks of a job and the leases on them."""

    def __init__(self, state: JobState, groups: WorkerGroups) -> None:
        self._settings = settings = state.settings
        self._workers, self._ending, self._out = state.workers, state.ending, state.out
        self._groups = groups
        self.leases = Leases(state.generation)
        self.leases.is_shared = settings.has_groups
        self.leases.most_per_worker = most_per_worker(settings)
        self.quota = LeaseQuota(settings, self.leases, groups, state.workers)
        self._outlook: tuple[object, ...] = ()  # of the quota, when requests were last served
        self.tasks = Tasks(settings, ())
        self.evaluations = Evaluations(EvaluationSchedule(), ())
        self.callbacks = Callbacks({})
        self.has_exported = False
        self.has_callbacks = False
        self.losses = Losses(state)
        self.retry_budget = RetryBudget(settings.max_task_failures)
        self._failures = Failures(state, self.retry_budget)

    # Handing out ----------------------------------------------------------------------------------------------------

    @property
    def needs_export(self) -> bool:
        """Whether all is trained, covered and evaluated, and a TRAIN_END with something to do is not done yet."""
        settings = self._settings
        # Workers that hold the model write its last checkpoint under TRAIN_END: before that, they may all be lost.
        writes = settings.holds_model_in_workers and bool(settings.checkpoint_dir)
        has_end = bool(settings.output) or self.has_callbacks or writes
        wanted = has_end if settings.trains else settings.has_last_task
        return wanted and not self.has_exported and self.is_evaluated

    @property
    def is_covered(self) -> bool:
        """Whether every planned record is committed and the model was seen to contain it."""
        return not self.tasks.unsettled() and not self.tasks.can_begin

    @property
    def is_evaluated(self) -> bool:
        """Whether all is covered, and the final evaluation, if there is one, and its consequences are done."""
        return self.is_covered and self.evaluations.is_over and self.callbacks.all_done

    def advance(self, clock: float) -> None:
        """Begin what is due: a round of the evaluation, or between rounds a task for callbacks."""
        num_ended = self.tasks.num_covered
        self.evaluations.pass_time(clock, self.tasks.model_version, num_ended)
        begun = self.evaluations.begin_if_due(self.tasks.model_version, self.is_covered)
        if begun is not None and self._settings.trains:
            kind = "final evaluation" if begun.is_final else "evaluation"
            self._out.log(f"Starting the {kind} at step {begun.step}: {begun.result_task} tasks")
        if self.evaluations.current is None:
            results, loss = self.evaluations.results, self.losses.newest
            try:
                if self.callbacks.advance(self.tasks.model_version, num_ended, results, loss):
                    self._out.persist()
            except ValueError as error:
                self._ending.fail(str(error))

    def serve(self, clock: float) -> None:
        """Answer the requests for which there is a task; workers without a lease come first."""
        if not self._has_something_to_grant:
            return
        before, self._outlook = self._outlook, self.quota.outlook(self.tasks)
        hopeful = self._workers.hopeful(self.leases.take_shrunk(), self._outlook != before)
        for worker in sorted(hopeful, key=lambda w: (self.leases.num_of_worker(w.id), w.waiting_call)):
            call = worker.waiting_call
            if call is None or worker.is_leaving or worker.stuck_since is not None:
                continue
            if not self.quota.may_ask(worker, self.tasks):
                self._workers.has_enough(worker)
                continue
            lease = self._grant(worker, call, clock)
            if lease is not None:
                self.leases.note_request(lease, worker.request_number)
                self._workers.stop_waiting(worker)
                worker.moved_at = clock
                self._out.reply(call, LeaseGranted(lease))

    @property
    def _has_something_to_grant(self) -> bool:
        """Whether there is any task to grant; if not, the requests of all workers wait."""
        current = self.evaluations.current
        is_evaluating = current is not None and bool(current.todo)
        has_tasks = self.tasks.has_todo or self._may_begin_epoch
        has_occasion = self.callbacks.next(self.tasks.num_covered) is not None
        return has_tasks or is_evaluating or has_occasion or self._may_end

    @property
    def _may_end(self) -> bool:
        """Whether TRAIN_END is due, and no worker has it."""
        return self.needs_export and not self.leases.of_type(TaskType.TRAIN_END)

    @property
    def _may_begin_epoch(self) -> bool:
        return self.tasks.can_begin and self.callbacks.may_begin(len(self.tasks.epochs))

    def answer_waiting(self, clock: float) -> None:
        """Answer non-blocking requests and expired long polls with no lease."""
        for call in self._workers.stop_long_waits(clock - self._settings.long_poll):
            self._out.reply(call, NoLeaseNow())

    def _grant(self, worker: Worker, call: int, clock: float) -> Lease | None:
        is_alone = self._workers.is_one_staying or len(self._groups.members) == 1
        is_alone |= self._settings.fixed_global_batch > 0
        version = self.tasks.model_version

        def allowed(task_type: TaskType, epoch: int, task: int) -> bool:
            return self.retry_budget.may_have((task_type, epoch, task), worker.id, is_alone)

        def wanted(task_type: TaskType) -> bool:
            return worker.only is None or worker.only is task_type

        current = self.evaluations.current
        if current is not None and wanted(TaskType.EVALUATION) and self.quota.may_evaluate(worker):
            task = current.take(lambda epoch, task: allowed(TaskType.EVALUATION, epoch, task))
            if task is not None:
                key = (TaskType.EVALUATION, current.number, task)
                shard, merged, aside = current.slice(task), current.merged(task), self.evaluations.excluded(task)
                return self.leases.grant(worker.id, call, clock, key, shard, current.step, merged, aside)
        number = self.callbacks.next(self.tasks.num_covered)
        if number is not None and wanted(TaskType.CALLBACK) and allowed(TaskType.CALLBACK, 0, number):
            self.callbacks.take(number)
            key = (TaskType.CALLBACK, 0, number)
            occasion = self.callbacks.occasion()
            return self.leases.grant(worker.id, call, clock, key, Shard("", 0, 0), version, occasion=occasion)
        planned = self._settings.planned_type
        trains = wanted(planned) and self.quota.may_train(worker, self.tasks)
        name = self.tasks.take(lambda epoch, task: allowed(planned, epoch, task)) if trains else None
        if trains and name is None and not self.tasks.has_todo and self._may_begin_epoch:
            epoch = self.tasks.begin_epoch()
            sizes = {"records": epoch.records, "tasks": len(epoch.order)}
            self._out.events.add(EventKind.EPOCH_STARTED, f"epoch-{epoch.number + 1}", **sizes)
            self._out.log(f"Starting epoch {epoch.number + 1}" if self._settings.trains else "Starting")
            name = self.tasks.take(lambda epoch, task: allowed(planned, epoch, task))
        if name is not None:
            epoch, key = self.tasks.epochs[name[0]], (planned, *name)
            shard, excluded = epoch.slice(name[1]), epoch.excluded(name[1])
            committed = epoch.applied(name[1]) if self._settings.runs_command else ()
            return self.leases.grant(
                worker.id, call, clock, key, shard, version, excluded=excluded, committed=committed
            )
        if self._may_end and wanted(TaskType.TRAIN_END) and allowed(*TRAIN_END_KEY):
            shard = Shard("", 0, 0 if self._settings.trains else self.tasks.records_done)
            return self.leases.grant(worker.id, call, clock, TRAIN_END_KEY, shard, version)
        return None

    # Coming back without success ------------------------------------------------------------------------------------

    def give_back(self, lease: Lease) -> None:
        """Give back a lost lease, whatever the reason: its task is todo again."""
        self.leases.end(lease)
        current = self.evaluations.current
        if self._is_planned(lease):
            self.tasks.give_back((lease.epoch, lease.task))
        elif lease.type is TaskType.EVALUATION and current is not None and current.number == lease.epoch:
            current.give_back(lease.task)
        elif lease.type is TaskType.CALLBACK:
            self.callbacks.give_back()

    def keep_workers(self, worker_ids: Iterable[int]) -> None:
        """Revoke every lease of all other workers."""
        holders = {self.leases.holder_of(lease) for lease in self.leases.all()}
        for worker_id in sorted(holders.difference(worker_ids)):
            self.lose_worker(worker_id)

    def lose_worker(self, worker_id: int) -> None:
        """Revoke every lease of a worker; its uncommitted work is lost."""
        self._workers.times.lost(worker_id)
        for lease in self.leases.of_worker(worker_id):
            self.give_back(lease)

    def model_was_lost(self) -> None:
        """Note that a part of the model is an older one now, so that work under the leases so far may be missing."""
        for lease in self.leases.all():
            self._workers.times.lost(self.leases.holder_of(lease))
            self.give_back(lease)
        self.leases.raise_floor()

    def requested(self, event: LeaseRequested) -> None:
        """Take back leases granted to earlier requests whose answers were lost; the worker's trial of metrics ends."""
        for lease in self.leases.never_received(event.worker_id, event.oldest, event.held):
            self.give_back(lease)
        self.evaluations.end_trial(event.worker_id)

    def abandoned(self, event: CallAbandoned) -> None:
        self._workers.abandon(event.call)
        if (lease := self.leases.answered_by(event.call)) is not None:
            self.give_back(lease)

    def hold(self, worker_id: int, held: ReportedLease, clock: float) -> None:
        """Hold a reported lease of an earlier generation of the master; of two of a task the newer one counts."""
        lease = held.lease
        if not self.leases.may_be_of_earlier_generation(lease.id):
            return  # of a model that has lost something since, or not of a generation of this master
        other = self.leases.of_task(key_of(lease))
        if other is not None and other.id < lease.id:
            self.give_back(other)
        if (other is None or other.id < lease.id) and self._take(lease):
            self.leases.hold(self._with_records(lease), worker_id, clock)
        held_here = self.leases.get(lease.id, worker_id)
        if lease.type is TaskType.TRAINING and held_here is not None and key_of(held_here) == key_of(lease):
            self.tasks.commit((lease.epoch, lease.task), held.committed)

    def _with_records(self, lease: Lease) -> Lease:
        """Return a taken lease with the records of its task, which the journal does not repeat."""
        current = self.evaluations.current
        if self._is_planned(lease):
            epoch = self.tasks.epochs[lease.epoch]
            shard, excluded = epoch.slice(lease.task), epoch.excluded(lease.task)
        elif lease.type is TaskType.EVALUATION and current is not None:
            shard, excluded = current.slice(lease.task), self.evaluations.excluded(lease.task)
        else:
            return lease
        return replace(lease, shard=shard, excluded=tuple(sorted(excluded)))

    def _is_planned(self, lease: Lease) -> bool:
        """Return whether a lease's task is one of the plan; the rounds of an evaluation count from 1."""
        return lease.type is self._settings.planned_type and (lease.type is not TaskType.EVALUATION or lease.epoch == 0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "charges": self.retry_budget.snapshot(),
            "losses": self.losses.snapshot(),
            "has_exported": self.has_exported,
            "has_callbacks": self.has_callbacks,
            "tasks": self.tasks.snapshot(),
            "evaluations": self.evaluations.snapshot(),
            "callbacks": self.callbacks.snapshot(),
            "lease_floor": self.leases.floor,
            "newest_lease": self.leases.newest_known,
            "leases": self.leases.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore all but the plan, whose tasks may not be known yet, and the leases of its tasks."""
        self.retry_budget.restore(snapshot["charges"])
        self.losses.restore(snapshot.get("losses", (None, None)))
        self.has_exported = snapshot["has_exported"]
        self.has_callbacks = snapshot["has_callbacks"]
        self.leases.floor = snapshot["lease_floor"]
        self.leases.newest_before = snapshot.get("newest_lease")

    def restore_plan(self, snapshot: Mapping[str, Any]) -> None:
        """Restore tasks and evaluations; if the metric states of a pass are lost, nothing of it is done."""
        self.evaluations.restore(snapshot["evaluations"])
        if not self.evaluations.has_lost_states:
            self.tasks.restore(snapshot["tasks"])
        self.callbacks.restore(snapshot["callbacks"])

    def restore_leases(self, snapshot: Mapping[str, Any], clock: float) -> None:
        """Hold the leases of the snapshot again; the workers report their progress."""
        for lease_id, worker_id, task_type, epoch, task, *version in snapshot["leases"]:
            lease = Lease(lease_id, TaskType(task_type), epoch, task, Shard("", 0, 0), (), *version)
            self.hold(worker_id, ReportedLease(lease), clock)

    def _take(self, lease: Lease) -> bool:
        """Take the task of a lease out of the todo list; return whether it was there."""
        if self._is_planned(lease):
            self.tasks.begin_until(lease.epoch)
            if not self.tasks.is_todo((lease.epoch, lease.task)):
                return False
            self.tasks.take_this((lease.epoch, lease.task))
            return True
        current = self.evaluations.current
        if lease.type is TaskType.CALLBACK:
            return self.callbacks.next(self.tasks.num_covered) == lease.task and self.callbacks.take(lease.task)
        if lease.type is TaskType.EVALUATION:
            if current is None or current.number != lease.epoch or lease.task not in current.todo:
                return False
            current.take_this(lease.task)
            return True
        return lease.type is TaskType.TRAIN_END and self.needs_export

    def reconcile(self, truth: CommittedSet) -> None:
        """Set the ledger to the model's content and the commits since the query; the rest is handed out again."""
        num_before, num_lost = self.tasks.num_committed, self.tasks.num_fallen_back
        losses = self.tasks.reconcile(truth)
        self._workers.times.fell_back(self.tasks.num_fallen_back - num_lost, num_before)
        for epoch in sorted({loss.epoch for loss in losses}):
            self._say_lost(epoch, [loss for loss in losses if loss.epoch == epoch])
        if not any(loss.is_reopened for loss in losses):
            return
        for task_type in (TaskType.TRAIN_END, TaskType.EVALUATION, TaskType.CALLBACK):
            for lease in self.leases.of_type(task_type):
                self.give_back(lease)
        self.evaluations.withdraw()
        self.has_exported = False

    def _say_lost(self, epoch: int, losses: Sequence[Loss]) -> None:
        cause = self._out.events.newest_of(*_MODEL_CHANGES)
        records = sum(loss.records for loss in losses)
        text = f"the model has lost {records:,} records of {len(losses):,} tasks, which are computed again"
        details = {"records": records, "tasks": len(losses)}
        self._out.events.add(EventKind.EPOCH_REOPENED, f"epoch-{epoch + 1}", text, cause, **details)
        if any(loss.is_reopened for loss in losses):
            self._out.log(f"Epoch {epoch + 1} is open again: {text}", Level.WARNING)

    # Reports under a lease ------------------------------------------------------------------------------------------

    def lease_event(self, event: LeaseEvent, clock: float) -> None:
        """Handle a call that names a lease."""
        worker = self._workers.known(event.worker_id, event.incarnation, clock)
        if worker is None:
            self._out.reply(event.call, UnknownWorker("register first"))
            return
        lease = self.leases.get(event.lease, worker.id)
        if lease is None:
            is_report = isinstance(event, ProgressReported | TaskFinished | EvaluationReported)
            if is_report and self.leases.has_finished(event.lease):
                self._out.reply(event.call, Accepted(self.tasks.model_version))
            else:
                self._out.reply(event.call, Refused(f"lease {event.lease} was revoked"))
            return
        match event:
            case ProgressReported():
                self._progress(event, lease, worker)
            case TaskFinished():
                self._finished(event, lease, worker)
            case TaskFailed():
                self._workers.times.lost(worker.id)
                self.give_back(lease)
                self._failures.failed(event, lease, self.tasks, self.evaluations, self._is_planned(lease))
            case EvaluationReported():
                self._evaluated(event, lease, worker)
            case LeaseQuestioned():
                self.leases.renew_one(lease, clock)
        self._out.reply(event.call, Accepted(self.tasks.model_version))

    def _progress(self, event: ProgressReported, lease: Lease, worker: Worker) -> None:
        if lease.type is not TaskType.TRAINING:
            return
        name = (lease.epoch, lease.task)
        is_new = self.tasks.skip(name, event.skipped) > 0
        if is_new:
            self._out.persist()
        if num_new := self.tasks.commit(name, event.committed):
            self._has_committed(worker, lease, num_new)
        self.losses.reported(event, lease, is_new, self.tasks)

    def _finished(self, event: TaskFinished, lease: Lease, worker: Worker) -> None:
        is_planned, num_new = self._is_planned(lease), 0
        if is_planned:
            if event.surplus and not self.tasks.has_surplus:
                self._warn_of_surplus(event, lease)
            num_new = self.tasks.finish((lease.epoch, lease.task), event.num_minibatches, event.surplus)
        self._end_well(lease, worker, num_new)
        if is_planned:
            self._out.log(f"Task:{lease.task} completed, {self.tasks.num_remaining} remaining tasks")
            epoch = self.tasks.epochs[lease.epoch]
            if epoch.complete and self._settings.trains:
                self._out.log(f"Epoch {lease.epoch + 1} is complete")
                if self._settings.runs_command and not self.tasks.records_left_out:
                    self._out.persist()  # the scripts may end after this answer: the next master could not query them
        elif lease.type is TaskType.CALLBACK:
            path = self.callbacks.finish()
            self._out.persist()
            if path and event.not_exported:
                text = f"ModelCheckpoint: no model is saved to {path}: {event.not_exported}. Give workers more memory."
                self._out.log(text, Level.WARNING)
            elif path:
                self._out.log(f"ModelCheckpoint: the model of step {lease.model_version} is saved to {path}")
        elif lease.type is TaskType.TRAIN_END:
            self.has_exported = True
            self._out.persist()
            if event.not_exported:
                why = event.not_exported
                self._out.events.add(EventKind.MODEL_NOT_EXPORTED, "job", f"no model is exported: {why}")
                self._out.log(f"No model is exported: {why}", Level.WARNING)
            elif self._settings.output:
                text = f"exported to {self._settings.output}"
                self._out.events.add(EventKind.MODEL_EXPORTED, "job", text, directory=self._settings.output)
                self._out.log(f"The model is exported to {self._settings.output}")
        else:
            self._finish_evaluation_task(lease, EvaluationReported(event.call, worker.id, event.incarnation, lease.id))

    def _warn_of_surplus(self, event: TaskFinished, lease: Lease) -> None:
        """Warn once that the ledger counts samples, if records and samples differ in number."""
        num_records = len(lease.shard) - len(lease.excluded)
        why = f" ({event.made_by} in it)" if event.made_by else ""
        self._out.log(
            f"feed{why} makes {num_records + event.surplus} samples of the {num_records} records of {lease.shard.name}:"
            f"{lease.shard.start}-{lease.shard.end}: records without a sample are counted as filtered, samples beyond "
            "one a record as augmented; --strict_feed makes a difference an error",
            Level.WARNING,
        )

    def _evaluated(self, event: EvaluationReported, lease: Lease, worker: Worker) -> None:
        if self._is_planned(lease) and isinstance(self.evaluations, PlannedEvaluation):
            self._evaluated_as_planned(self.evaluations, lease, event, worker)
        elif lease.type is TaskType.EVALUATION:
            self._end_well(lease, worker)
            self._finish_evaluation_task(lease, event)

    def _evaluated_as_planned(
        self, evaluation: PlannedEvaluation, lease: Lease, event: EvaluationReported, worker: Worker
    ) -> None:
        """Take the states over together with the task's end, or neither, so that each record is in them once."""
        try:
            evaluation.add(event.states)
        except ValueError as error:
            self._ending.fail(f"The evaluation failed: {error}")
            return
        num_minibatches = self.tasks.num_missing((lease.epoch, lease.task))
        end = TaskFinished(
            event.call, worker.id, event.incarnation, lease.id, num_minibatches, event.surplus, event.made_by
        )
        self._finished(end, lease, worker)

    def _finish_evaluation_task(self, lease: Lease, event: EvaluationReported) -> None:
        current = self.evaluations.current
        assert current is not None
        if lease.task != current.result_task:
            try:
                current.finish(lease.task, event.states)
            except ValueError as error:
                current.give_back(lease.task)
                self._ending.fail(f"Evaluation at step {current.step}: {error}")
            else:
                current.count(len(lease.shard) - len(lease.excluded), event.surplus, event.made_by)
            return
        done = self.evaluations.finish(event.results)
        self._out.persist()
        if done.num_samples != done.num_records:
            why = f" (its {done.made_by})" if done.made_by else ""
            self._out.log(
                f"Evaluation[step={done.step}] measured the {done.num_samples} samples that feed{why} makes of "
                f"{done.num_records} records",
                Level.WARNING,
            )
        self._out.report_evaluation(done.step, self.evaluations.results)
        self._decide(done.step)

    def _decide(self, step: int) -> None:
        """Apply the results of an evaluation to the rules of the user's callbacks."""
        results, loss = self.evaluations.results, self.losses.newest
        try:
            reason = self.callbacks.evaluated(results, step, len(self.tasks.epochs), loss)
        except ValueError as error:
            self._ending.fail(str(error))
            return
        if reason:
            self.stop_training(reason)

    def stop_training(self, reason: str) -> None:
        """Plan only the tasks that workers have started, because the user asked to stop."""
        if not self.tasks.all_done:
            step = self.tasks.model_version
            self._out.events.add(EventKind.TRAINING_STOPPED, "job", reason, step=step)
            self._out.log(f"Training stops at step {step}: {reason}")
            self.tasks.stop()

    def _end_well(self, lease: Lease, worker: Worker, num_minibatches: int = 0) -> None:
        self.leases.finish(lease)
        self.retry_budget.task_finished(key_of(lease))
        self._has_committed(worker, lease, num_minibatches)

    def _count(self, worker: Worker, num_minibatches: int) -> None:
        """Add to the workers' computed minibatches; with a fixed global batch all members compute the same share."""
        members = [member for one in self._groups.members if (member := self._workers.get(one)) is not None]
        shared = members if self._settings.fixed_global_batch and members else [worker]
        for one in shared:
            one.num_minibatches += num_minibatches / len(shared)

    def _has_committed(self, worker: Worker, lease: Lease, num_minibatches: int = 0) -> None:
        members = [member for one in self._groups.members if (member := self._workers.get(one)) is not None]
        is_late = self._settings.has_groups and not self._groups.is_member(worker.id)  # its group is broken
        for one in (worker, *members):  # one member reports the work of all
            one.has_committed = True
            self._workers.times.committed(one.id)
        self._count(worker, num_minibatches)
        # An evaluation does not advance training, and its results are not lost with the model.
        reached = self.tasks.records_done if self._is_planned(lease) else 0
        if reached:
            for one in members if is_late else (worker, *members):
                one.reached = reached
        self.retry_budget.committed(0 if is_late else reached)

    def validate(self) -> None:
        """Check every invariant of tasks, rounds and leases.

        Raises:
            AssertionError: An invariant does not hold.
        """
        self.tasks.validate()
        self.leases.validate()
        leased = {key_of(lease) for lease in self.leases.all()}
        assert len(leased) == len(self.leases.all())
        expected = {(self._settings.planned_type, e.number, task) for e in self.tasks.epochs for task in e.leased}
        current = self.evaluations.current
        if current is not None:
            current.validate()
            expected |= {(TaskType.EVALUATION, current.number, task) for task in current.leased}
        if self.callbacks.taken is not None:
            expected.add((TaskType.CALLBACK, 0, self.callbacks.taken))
        assert leased - {TRAIN_END_KEY} == expected, (leased, expected)
        for lease in self.leases.all():
            holder = self._workers.get(self.leases.holder_of(lease))
            assert holder is not None, lease
            assert not holder.is_leaving, lease
