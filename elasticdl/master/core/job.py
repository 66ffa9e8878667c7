"""Job: the whole logic of a job, pure: events and the time come in, commands go out.

`Job` joins the parts, each of which owns one concept: it decides when the model is asked for what it holds, when work
may be handed out, when a checkpoint is written and when the job ends.  No clock, thread, random source or I/O in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from elasticdl.master.core import events
from elasticdl.master.core.applied import AppliedSet
from elasticdl.master.core.charges import Charges
from elasticdl.master.core.checkpoints import Checkpoints
from elasticdl.master.core.commands import (
    Accepted,
    Command,
    JobOver,
    ListShards,
    NoLeaseNow,
    Refused,
    Registered,
    SaveCheckpoint,
    UnknownWorker,
)
from elasticdl.master.core.data import Data
from elasticdl.master.core.ending import Ending
from elasticdl.master.core.evaluation import Evaluations
from elasticdl.master.core.fleet import Fleet
from elasticdl.master.core.load import Loads
from elasticdl.master.core.outbox import Outbox
from elasticdl.master.core.settings import JobSettings, Strategy
from elasticdl.master.core.status import Coverage, Rate, Status
from elasticdl.master.core.tasks import Tasks
from elasticdl.master.core.truth import Truth
from elasticdl.master.core.values import HeldLease, Lease, Level, Role, Shard, TaskType
from elasticdl.master.core.work import Work
from elasticdl.master.core.workers import Workers

MAX_GAP = 2.0  # seconds that may pass between two events; more than that the master itself was away


class Job:
    """One life of a job's master.

    The clock inside counts only while the master is awake, so that nobody is given up because the master was stopped.
    """

    def __init__(self, settings: JobSettings, generation: int = 1, now: float = 0.0) -> None:
        self.settings = settings
        self.generation = generation
        self._now = now
        self._clock = 0.0
        self._out = Outbox()
        self._workers = Workers()
        self._charges = Charges(settings.max_task_failures)
        self._checkpoints = Checkpoints(settings, self._clock)
        self._ending = Ending(self._out)
        self._work = Work(settings, generation, self._workers, self._charges, self._ending, self._out)
        self._loads = Loads()
        self._truth = Truth(settings, self._work, self._loads, self._out)
        self._fleet = Fleet(
            settings,
            generation,
            self._workers,
            self._work,
            self._charges,
            self._checkpoints,
            self._truth,
            self._loads,
            self._ending,
            self._out,
        )
        self._data = Data(settings)
        self._is_planned = False
        self._local_ledger = AppliedSet()  # Local strategy: brought by the worker before the data was known
        self._has_opened = False  # something may have been handed out in this life
        self._rate = Rate()

    @classmethod
    def restore(cls, settings: JobSettings, snapshot: Mapping[str, Any], generation: int, now: float) -> Job:
        """The next life, from the last snapshot on disk; `generation` is greater than that in the snapshot."""
        job = cls(settings, generation, now)
        job._truth.num_repeated = snapshot["num_repeated"]
        job._data.restore(snapshot["data"])
        job._plan_if_known()
        job._charges.restore(snapshot["charges"])
        job._checkpoints.restore(snapshot["checkpoints"])
        job._ending.restore(snapshot)
        job._workers.restore(snapshot["workers"], job._clock)
        job._fleet.pods.restore(snapshot["pods"])
        job._fleet.servers.restore(snapshot["servers"], job._clock)
        job._work.has_exported = snapshot["has_exported"]
        job._work.has_callbacks = snapshot["has_callbacks"]
        job._work.leases.floor = snapshot["lease_floor"]
        if job._is_planned:
            job._work.tasks.restore(snapshot["tasks"])
            job._work.evaluations.restore(snapshot["evaluations"])
        for lease_id, worker_id, task_type, epoch, task in snapshot["leases"]:
            lease = Lease(lease_id, TaskType(task_type), epoch, task, Shard("", 0, 0))
            job._work.hold(worker_id, HeldLease(lease), job._clock)
        return job

    def snapshot(self) -> dict[str, Any]:
        """Everything that the next life must know; of JSON's types only."""
        return {
            "generation": self.generation,
            "fingerprint": self._data.fingerprint(),
            "num_repeated": self._truth.num_repeated,
            "data": self._data.snapshot(),
            "charges": self._charges.snapshot(),
            "checkpoints": self._checkpoints.snapshot(),
            "ending": self._ending.snapshot(),
            "workers": self._workers.snapshot(),
            "pods": self._fleet.pods.snapshot(),
            "servers": self._fleet.servers.snapshot(),
            "has_exported": self._work.has_exported,
            "has_callbacks": self._work.has_callbacks,
            "tasks": self._work.tasks.snapshot(),
            "evaluations": self._work.evaluations.snapshot(),
            "lease_floor": self._work.leases.floor,
            "leases": self._work.leases.snapshot(),
        }

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Takes one event in; `now` is any clock that only grows.  The commands are to be executed in order."""
        self._clock += min(max(now - self._now, 0.0), MAX_GAP)
        self._now = max(now, self._now)
        self._dispatch(event)
        self._advance()
        return self._out.take()

    def _dispatch(self, event: events.Event) -> None:
        match event:
            case events.WorkerJoined():
                self._worker_joined(event)
            case events.ModelReported():
                self._model_reported(event)
            case events.LeaseRequested():
                self._lease_requested(event)
            case events.CallAbandoned():
                self._work.abandoned(event)
            case events.HeartbeatReceived():
                self._fleet.heartbeat(event, self._clock)
            case (
                events.ProgressReported()
                | events.TaskFinished()
                | events.TaskFailed()
                | events.EvaluationReported()
                | events.LeaseQuestioned()
            ):
                self._work.lease_event(event, self._clock)
            case events.PsJoined():
                self._fleet.ps_joined(event, self._clock)
            case events.PsReady():
                self._fleet.ps_ready(event, self._clock)
            case events.PodChanged():
                self._fleet.pod_changed(event, self._clock)
            case events.PodsListed():
                self._pods_listed(event)
            case events.PodNotCreated():
                self._fleet.pod_not_created(event, self._clock)
            case events.ShardsListed():
                self._data.listed(event.kind, event.shards)
                self._plan_if_known()
            case events.ShardsUnreadable():
                self._ending.fail(f"The {event.kind} data cannot be read: {event.message}")
            case events.AppliedSetsRead():
                self._truth.answered(event)
            case events.AppliedSetsUnreadable():
                self._truth.failed(event, self._clock)
            case events.CheckpointSaved():
                self._checkpoints.saved(event.version, event.directory)
                self._out.log(f"Checkpoint of version {event.version} saved to {event.directory}")
            case events.CheckpointFailed():
                self._checkpoints.failed()
                text = f"The checkpoint of version {event.version} failed: {event.reason}"
                self._out.log(f"{text}. The job goes on and tries again later.", Level.ERROR)
            case events.StopRequested():
                self._ending.fail(event.reason)
            case events.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _pods_listed(self, event: events.PodsListed) -> None:
        if not self._fleet.pods.is_listed:  # a life of the master begins
            for kind in self._data.unlisted():
                self._out.add(ListShards(kind))
        self._fleet.pods_listed(event, self._clock)

    # Workers and what they know -------------------------------------------------------------------------------------

    def _worker_joined(self, event: events.WorkerJoined) -> None:
        record = self._fleet.pods.get(Role.WORKER, event.worker_id)
        if record is None or record.is_leaving:
            self._out.reply(event.call, Refused(f"worker {event.worker_id} was replaced"))
            return
        before = self._workers.get(event.worker_id)
        is_same = before is not None and before.incarnation == event.incarnation
        is_first_time = not (is_same and before is not None and before.has_joined)
        if not is_same:
            self._work.lose_worker(event.worker_id)
        worker = self._workers.join(event.worker_id, event.incarnation, self._clock)
        if is_first_time:
            self._learn_held(worker.id, event.held)
            self._learn_local_ledger(event.applied, is_same)
        self._out.reply(event.call, Registered(self._fleet.servers.partition))

    def _learn_held(self, worker_id: int, held: tuple[HeldLease, ...]) -> None:
        """After a restart: what the worker works on counts, not what the snapshot says that it does."""
        names = {one.lease.id for one in held}
        for lease in self._work.leases.of_worker(worker_id):
            if lease.id not in names:
                self._work.give_back(lease)
        for one in held if not self._has_opened else ():
            self._work.hold(worker_id, one, self._clock)

    def _learn_local_ledger(self, applied: AppliedSet, is_same: bool) -> None:
        """Local strategy: the model is the worker's, and holds what it says."""
        if self.settings.strategy is not Strategy.LOCAL or not self.settings.trains:
            return
        if self._is_planned:
            self._work.reconcile(applied | self._work.tasks.ledger() if is_same else applied)
        else:
            self._local_ledger = applied

    def _model_reported(self, event: events.ModelReported) -> None:
        if self._workers.known(event.worker_id, event.incarnation, self._clock) is None:
            self._out.reply(event.call, UnknownWorker("register first"))
            return
        self._out.reply(event.call, Accepted(self._work.tasks.model_version))
        if event.error:
            self._ending.fail(f"{event.error}\n{event.error_details}".rstrip())
        else:
            self._work.has_callbacks = event.has_callbacks
            for kind in self._data.model_reported(event.has_metrics, event.shards):
                self._out.add(ListShards(kind))
            self._plan_if_known()

    def _plan_if_known(self) -> None:
        """Cuts the tasks once the model and all data sources are known."""
        data, work = self._data, self._work
        if self._is_planned or not data.is_known:
            return
        for kind in data.empty_kinds():
            self._ending.fail(f"The {kind} data holds no records. Check the flag --{kind}_data.")
            return
        if self.settings.has_validation_data and not data.has_metrics:
            self._out.log("There is validation data but no metric: nothing is evaluated", Level.WARNING)
        work.tasks = Tasks(self.settings, data.planned_shards())
        work.evaluations = Evaluations(self.settings.evaluation_steps, data.evaluation_slices())
        self._is_planned = True
        if self._local_ledger.tasks:
            work.reconcile(self._local_ledger)

    def _lease_requested(self, event: events.LeaseRequested) -> None:
        worker = self._workers.known(event.worker_id, event.incarnation, self._clock)
        if self._ending.is_decided:
            self._out.reply(event.call, JobOver())
        elif worker is None or not worker.has_joined:
            self._out.reply(event.call, UnknownWorker("register first"))
        else:
            if worker.waiting_call is not None:
                self._out.reply(worker.waiting_call, NoLeaseNow())
            worker.stuck_since = None
            worker.waiting_call, worker.waiting_since = event.call, self._clock

    # What follows from what is known --------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._fleet.time_out(self._clock)
        self._work.answer_long_polls(self._clock)
        self._rate.sample(self._now, self._records_done())

    def _advance(self) -> None:
        if self._ending.is_decided:
            self._leave()
            return
        if self._is_planned and not self._is_recovering and any(worker.has_joined for worker in self._workers.all()):
            self._truth.ask_if_needed(self._fleet.servers.partition, self._clock)
        if self._is_open:
            self._has_opened = True
            self._work.begin_round_if_due()
            self._checkpoint()
            self._work.serve(self._clock)
            self._end_if_complete()
        self._fleet.place(self._clock)

    @property
    def _is_recovering(self) -> bool:
        """A worker of an earlier life of the master may still bring its leases.

        A grant is journalled within a second, so for the time of a lease each of them is waited for, and after that
        those that are known to have one.
        """
        missing = [worker for worker in self._workers.staying() if not worker.has_joined]
        if self._clock < self.settings.lease_timeout:
            return bool(missing)
        return any(self._work.leases.of_worker(worker.id) for worker in missing)

    @property
    def _is_open(self) -> bool:
        """Work may be handed out."""
        ready = self._is_planned and self._fleet.servers.is_complete
        return ready and not self._truth.in_doubt and not self._is_recovering

    def _checkpoint(self) -> None:
        version, partition = self._work.tasks.model_version, self._fleet.servers.partition
        is_wanted = self._work.is_covered or self._fleet.wants_checkpoint
        if partition is not None and self._checkpoints.begin_if_due(version, is_wanted, self._clock):
            self._out.add(SaveCheckpoint(version, partition.ps, self._data.fingerprint()))

    def _end_if_complete(self) -> None:
        work = self._work
        is_saved = self._checkpoints.is_settled(work.tasks.model_version)
        if work.is_evaluated and not work.needs_export and is_saved:
            for remark in work.remarks():
                self._out.log(remark, Level.WARNING)
            line = self._workers.time_line()
            if line:
                self._out.log(line)
            self._ending.succeed()
            self._leave()

    def _leave(self) -> None:
        """The job is decided: everybody leaves."""
        for worker in self._workers.waiting():
            if worker.waiting_call is not None:
                self._out.reply(worker.waiting_call, JobOver())
                worker.waiting_call = None
        heard_after = self._clock - self.settings.lease_timeout
        awaited = any(worker.heard_at >= heard_after for worker in self._workers.staying())
        self._ending.advance(self._clock, awaited, self._fleet.who_must_be_ended(heard_after))

    # For people and tests -------------------------------------------------------------------------------------------

    def _records_done(self) -> int:
        return sum(epoch.committed_records for epoch in self._work.tasks.epochs)

    def status(self) -> Status:
        """What the job looks like now."""
        work, outcome = self._work, self._ending.outcome
        phase = "Running" if self._has_opened else "Pending"
        if outcome is not None:
            phase = "Failed" if outcome.exit_code else "Succeeded"
        return Status(
            phase=phase,
            message=outcome.message if outcome is not None else self._why_waiting(),
            generation=self.generation,
            epoch=len(work.tasks.epochs),
            num_epochs=self.settings.num_epochs,
            records_done=self._records_done(),
            records_total=work.tasks.planned_records,
            records_per_second=self._rate.value(),
            workers_alive=len(self._workers.all()),
            workers_wanted=self.settings.num_workers,
            ps_alive=self._fleet.servers.num_ready,
            ps_wanted=self.settings.num_ps,
            model_version=work.tasks.model_version,
            loss=work.loss,
            metrics=dict(work.evaluations.results),
            metrics_step=work.evaluations.results_step,
            tasks_done=work.tasks.num_done,
            tasks_total=work.tasks.planned_tasks,
            coverage=tuple(Coverage.of(epoch) for epoch in work.tasks.epochs if epoch.covered),
            records_skipped=work.tasks.skipped_records,
            ps=self._loads.servers(),
            staleness=self._loads.staleness,
            gradients_refused=self._loads.refused,
            exit_code=outcome.exit_code if outcome is not None and self._ending.is_over else None,
        )

    def _why_waiting(self) -> str:
        if not self._fleet.servers.is_complete:
            return f"waiting for parameter servers: {self._fleet.servers.num_ready} of {self.settings.num_ps} are ready"
        if not self._workers.all():
            return "waiting for workers"
        if not self._data.has_model:
            return "waiting for a worker to load the model definition"
        if self._is_recovering:
            return "the master has restarted: waiting for workers to register again"
        return ""

    def validate_state(self) -> None:
        """Checks every invariant.

        Raises:
            AssertionError: one does not hold.
        """
        self._work.validate()
        self._fleet.pods.validate()
        self._fleet.servers.validate()
        for worker in self._workers.all():
            record = self._fleet.pods.get(Role.WORKER, worker.id)
            assert record is not None, worker
            assert not record.is_leaving, worker
