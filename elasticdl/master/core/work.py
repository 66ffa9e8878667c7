"""Work: what is handed out to whom, and what comes back: planned tasks, evaluations, TRAIN_END.

Tasks, rounds and leases are parts with one concept each; here they meet.  Whether anything may be handed out at all is
said by job.py.
"""

from __future__ import annotations

import math

from elasticdl.master.core.applied import AppliedSet
from elasticdl.master.core.charges import Charges
from elasticdl.master.core.commands import Accepted, LeaseGranted, NoLeaseNow, Refused, UnknownWorker
from elasticdl.master.core.ending import Ending
from elasticdl.master.core.evaluation import Evaluations
from elasticdl.master.core.events import (
    CallAbandoned,
    EvaluationReported,
    LeaseQuestioned,
    ProgressReported,
    TaskFailed,
    TaskFinished,
)
from elasticdl.master.core.leases import MAX_PER_WORKER, Leases, TaskKey, key_of
from elasticdl.master.core.outbox import Outbox
from elasticdl.master.core.settings import JobSettings, NanPolicy
from elasticdl.master.core.tasks import Tasks
from elasticdl.master.core.values import HeldLease, Lease, Level, Shard, TaskType
from elasticdl.master.core.workers import Worker, Workers

LeaseEvent = ProgressReported | TaskFinished | TaskFailed | EvaluationReported | LeaseQuestioned
TRAIN_END_KEY: TaskKey = (TaskType.TRAIN_END, 0, 0)
MAX_SKIPS_TOLD = 20  # one by one; after that every so many


class Work:
    """The tasks of a job and the leases on them."""

    def __init__(
        self,
        settings: JobSettings,
        generation: int,
        workers: Workers,
        charges: Charges,
        ending: Ending,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._charges = charges
        self._ending = ending
        self._out = out
        self._planned_type = TaskType.TRAINING if settings.trains else TaskType.PREDICTION
        self.leases = Leases(generation)
        self.tasks = Tasks(settings, ())
        self.evaluations = Evaluations(0, ())
        self.has_exported = False
        self.has_callbacks = False
        self.loss: float | None = None  # the newest that was finite
        self._num_skips = 0  # reported in this life

    # Handing out ----------------------------------------------------------------------------------------------------

    @property
    def needs_export(self) -> bool:
        """All is trained, covered and evaluated; TRAIN_END is still to be done, if there is something to do."""
        settings = self._settings
        wanted = bool(settings.output) or self.has_callbacks
        return wanted and settings.trains and not self.has_exported and self.is_evaluated

    @property
    def is_covered(self) -> bool:
        """Every planned record is committed, and the model was seen to hold it."""
        return self.tasks.all_done and all(epoch.covered for epoch in self.tasks.epochs)

    @property
    def is_evaluated(self) -> bool:
        """All is covered, and the final evaluation, if there is one, is made."""
        return self.is_covered and self.evaluations.is_over

    def remarks(self) -> list[str]:
        """What the model was not trained on, for the end of the job."""
        remarks = []
        quarantined = self.tasks.quarantined()
        if quarantined:
            names = ", ".join(f"{shard}:{record}" for shard, record in quarantined)
            remarks.append(f"Quarantined records: {names}")
        if self.tasks.num_skipped:
            counts = f"{self.tasks.num_skipped} ({self.tasks.skipped_records} records)"
            remarks.append(f"Minibatches left out by --nan_policy=skip: {counts}")
        return remarks

    def begin_round_if_due(self) -> None:
        begun = self.evaluations.begin_if_due(self.tasks.model_version, self.is_covered)
        if begun is not None:
            kind = "final evaluation" if begun.is_final else "evaluation"
            self._out.log(f"Starting the {kind} at step {begun.step}: {begun.result_task} tasks")

    def serve(self, clock: float) -> None:
        """Answers the requests for which there is a lease; who holds none comes first."""
        for worker in sorted(self._workers.waiting(), key=lambda w: len(self.leases.of_worker(w.id))):
            call = worker.waiting_call
            if call is None or worker.is_leaving or len(self.leases.of_worker(worker.id)) >= MAX_PER_WORKER:
                continue
            lease = self._grant(worker, call, clock)
            if lease is not None:
                worker.waiting_call, worker.moved_at = None, clock
                self._out.reply(call, LeaseGranted(lease))

    def answer_long_polls(self, clock: float) -> None:
        for worker in self._workers.waiting():
            if worker.waiting_call is not None and clock - worker.waiting_since >= self._settings.long_poll:
                self._out.reply(worker.waiting_call, NoLeaseNow())
                worker.waiting_call = None

    def _grant(self, worker: Worker, call: int, clock: float) -> Lease | None:
        is_alone = len(self._workers.staying()) == 1
        version = self.tasks.model_version

        def allowed(task_type: TaskType, epoch: int, task: int) -> bool:
            return self._charges.may_have((task_type, epoch, task), worker.id, is_alone)

        current = self.evaluations.current
        if current is not None:
            task = current.take(lambda epoch, task: allowed(TaskType.EVALUATION, epoch, task))
            if task is not None:
                key = (TaskType.EVALUATION, current.number, task)
                return self.leases.grant(
                    worker.id, call, clock, key, current.slice(task), current.step, current.merged(task)
                )
        name = self.tasks.take(lambda epoch, task: allowed(self._planned_type, epoch, task))
        if name is None and not self.tasks.has_todo and self.tasks.can_begin:
            epoch = self.tasks.begin_epoch()
            self._out.log(f"Starting epoch {epoch.number + 1}")
            name = self.tasks.take(lambda epoch, task: allowed(self._planned_type, epoch, task))
        if name is not None:
            epoch, key = self.tasks.epochs[name[0]], (self._planned_type, *name)
            shard, excluded = epoch.slice(name[1]), epoch.excluded(name[1])
            return self.leases.grant(worker.id, call, clock, key, shard, version, excluded=excluded)
        if self.needs_export and not self.leases.of_type(TaskType.TRAIN_END) and allowed(*TRAIN_END_KEY):
            return self.leases.grant(worker.id, call, clock, TRAIN_END_KEY, Shard("", 0, 0), version)
        return None

    # Coming back without success ------------------------------------------------------------------------------------

    def give_back(self, lease: Lease) -> None:
        """A lease is lost, for whatever reason: its task is todo again."""
        self.leases.end(lease)
        current = self.evaluations.current
        if lease.type is self._planned_type:
            self.tasks.give_back((lease.epoch, lease.task))
        elif lease.type is TaskType.EVALUATION and current is not None and current.number == lease.epoch:
            current.give_back(lease.task)

    def lose_worker(self, worker_id: int) -> None:
        """Revokes every lease of a worker."""
        for lease in self.leases.of_worker(worker_id):
            self.give_back(lease)

    def model_was_lost(self) -> None:
        """Part of the model is an older one now: what was done under the leases so far may not be in it."""
        for lease in self.leases.all():
            self.give_back(lease)
        self.leases.raise_floor()

    def abandoned(self, event: CallAbandoned) -> None:
        for worker in self._workers.all():
            if worker.waiting_call == event.call:
                worker.waiting_call = None
        lease = self.leases.answered_by(event.call)
        if lease is not None:
            self.give_back(lease)

    def hold(self, worker_id: int, held: HeldLease, clock: float) -> None:
        """A worker brings a lease of an earlier life of the master; of two for one task the newer one counts."""
        lease = held.lease
        if lease.id <= self.leases.floor:
            return
        other = self.leases.of_task(key_of(lease))
        if other is not None and other.id < lease.id:
            self.give_back(other)
        if (other is None or other.id < lease.id) and self._take(lease):
            self.leases.hold(lease, worker_id, clock)
        if lease.type is TaskType.TRAINING and self.leases.get(lease.id, worker_id) is not None:
            self.tasks.commit((lease.epoch, lease.task), held.committed)

    def _take(self, lease: Lease) -> bool:
        """Takes the task of a lease out of the todo list, if it is there."""
        if lease.type is self._planned_type:
            while lease.epoch >= len(self.tasks.epochs) and self.tasks.can_begin:
                self.tasks.begin_epoch()
            if not self.tasks.is_todo((lease.epoch, lease.task)):
                return False
            self.tasks.take_this((lease.epoch, lease.task))
            return True
        current = self.evaluations.current
        if lease.type is TaskType.EVALUATION:
            if current is None or current.number != lease.epoch or lease.task not in current.todo:
                return False
            current.take_this(lease.task)
            return True
        return lease.type is TaskType.TRAIN_END and self.needs_export

    def reconcile(self, truth: AppliedSet) -> None:
        """The model holds exactly this, and what was committed since it was asked: the rest is handed out again."""
        reopened = self.tasks.reconcile(truth)
        if not reopened:
            return
        for epoch in sorted({epoch for epoch, _ in reopened}):
            count = sum(one == epoch for one, _ in reopened)
            self._out.log(f"Epoch {epoch + 1} is open again: the model has lost parts of {count} tasks", Level.WARNING)
        for lease in self.leases.of_type(TaskType.TRAIN_END) + self.leases.of_type(TaskType.EVALUATION):
            self.leases.end(lease)
        self.evaluations.withdraw()
        self.has_exported = False

    # Reports under a lease ------------------------------------------------------------------------------------------

    def lease_event(self, event: LeaseEvent, clock: float) -> None:
        """A call that names a lease."""
        worker = self._workers.known(event.worker_id, event.incarnation, clock)
        if worker is None:
            self._out.reply(event.call, UnknownWorker("register first"))
            return
        worker.stuck_since = None
        lease = self.leases.get(event.lease, worker.id)
        if lease is None:
            if self.leases.has_finished(event.lease) and isinstance(event, TaskFinished | EvaluationReported):
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
                self._failed(event, lease)
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
        if self.tasks.commit(name, event.committed):
            self._has_committed(worker)
        loss_is_finite = event.loss is None or math.isfinite(event.loss)
        if event.loss is not None and loss_is_finite:
            self.loss = event.loss
        if event.not_finite or not loss_is_finite:
            self._not_finite(event, lease, is_new)

    def _not_finite(self, event: ProgressReported, lease: Lease, is_new: bool) -> None:
        """Ends the job or, if the minibatch is left out, says so: of many only some, with the number so far."""
        minibatch = max(event.skipped or event.committed, default=None)
        is_skipped = minibatch is not None and self.tasks.epochs[lease.epoch].is_skipped(lease.task, minibatch)
        where = f"epoch {lease.epoch + 1}, task {lease.task}"
        where += "" if minibatch is None else f", minibatch {minibatch}"
        where += f", records {lease.shard.name}:{lease.shard.start}-{lease.shard.end - 1}"
        what = f"{event.not_finite or f'The loss is {event.loss}'} ({where})"
        if self._settings.nan_policy is NanPolicy.FAIL:
            advice = "Lower the learning rate, or look at these records; --nan_policy=skip leaves such minibatches out."
            self._ending.fail(f"{what}\n  → {advice}")
        elif is_new:
            self._num_skips += 1
            if self._num_skips <= MAX_SKIPS_TOLD or self._num_skips % MAX_SKIPS_TOLD == 0:
                self._out.log(f"{what}; it is left out of the model, number {self._num_skips}", Level.WARNING)
        elif not is_skipped:
            self._out.log(what, Level.WARNING)

    def _finished(self, event: TaskFinished, lease: Lease, worker: Worker) -> None:
        self._end_well(lease, worker)
        if lease.type is self._planned_type:
            self.tasks.finish((lease.epoch, lease.task), event.num_minibatches)
            self._out.log(f"Task:{lease.task} completed, {self.tasks.num_remaining} remaining tasks")
            epoch = self.tasks.epochs[lease.epoch]
            if epoch.complete:
                self._out.log(f"Epoch {lease.epoch + 1} is complete")
        elif lease.type is TaskType.TRAIN_END:
            self.has_exported = True
            self._out.persist()
            if self._settings.output:
                self._out.log(f"The model is exported to {self._settings.output}")
        else:
            self._finish_evaluation_task(lease, EvaluationReported(event.call, worker.id, event.incarnation, lease.id))

    def _evaluated(self, event: EvaluationReported, lease: Lease, worker: Worker) -> None:
        if lease.type is TaskType.EVALUATION:
            self._end_well(lease, worker)
            self._finish_evaluation_task(lease, event)

    def _finish_evaluation_task(self, lease: Lease, event: EvaluationReported) -> None:
        current = self.evaluations.current
        assert current is not None
        if lease.task != current.result_task:
            try:
                current.finish(lease.task, event.states)
            except ValueError as error:
                current.give_back(lease.task)
                self._ending.fail(f"Evaluation at step {current.step}: {error}")
            return
        done = self.evaluations.finish(event.results)
        self._out.persist()
        self._out.log(f"Evaluation metrics[step={done.step}]: {self.evaluations.results}")

    def _failed(self, event: TaskFailed, lease: Lease) -> None:
        self.give_back(lease)
        if event.bad_records and self._quarantine(event, lease):
            return
        key = key_of(lease)
        failures = self._charges.task_failed(key, event.worker_id)
        where = f"{lease.type} task {lease.task} of epoch {lease.epoch + 1}, minibatch {event.minibatch}"
        self._out.persist()
        self._out.log(f"Worker {event.worker_id} reported error: {event.error} ({where})", Level.WARNING)
        if self._charges.is_enough(failures):
            text = f"{where} (records {lease.shard.name}:{lease.shard.start}-{lease.shard.end})"
            self._ending.fail(f"{text} failed {failures} times, last with: {event.error}\n{event.details}".rstrip())

    def _quarantine(self, event: TaskFailed, lease: Lease) -> bool:
        """Sets the bad records of a task aside; False when that is too many or not asked for."""
        limit = self._settings.max_bad_records
        if lease.type is not self._planned_type or self.tasks.num_quarantined + len(event.bad_records) > limit:
            return False
        self.tasks.quarantine(lease.task, event.bad_records)
        self._out.persist()
        names = ", ".join(f"{lease.shard.name}:{record}" for record in event.bad_records)
        total = f"{self.tasks.num_quarantined} of at most {limit}"
        self._out.log(f"Quarantined {names} ({total}): {event.error}", Level.WARNING)
        return True

    def _end_well(self, lease: Lease, worker: Worker) -> None:
        self.leases.finish(lease)
        self._charges.task_finished(key_of(lease))
        self._has_committed(worker)

    def _has_committed(self, worker: Worker) -> None:
        worker.has_committed = True
        self._charges.committed()

    def validate(self) -> None:
        """Every invariant of tasks, rounds and leases.

        Raises:
            AssertionError: one does not hold.
        """
        self.tasks.validate()
        self.leases.validate()
        leased = {key_of(lease) for lease in self.leases.all()}
        assert len(leased) == len(self.leases.all())
        expected = {(self._planned_type, e.number, task) for e in self.tasks.epochs for task in e.leased}
        current = self.evaluations.current
        if current is not None:
            current.validate()
            expected |= {(TaskType.EVALUATION, current.number, task) for task in current.leased}
        assert leased - {TRAIN_END_KEY} == expected, (leased, expected)
        for lease in self.leases.all():
            holder = self._workers.get(self.leases.holder_of(lease))
            assert holder is not None, lease
            assert not holder.is_leaving, lease
