"""Reports of workers about themselves, from which the tasks are planned, and about their groups in an AllReduce job.

Registration: a worker reports its leases, its model and its data; ledger/work.py assigns its tasks.

Members: answers requests for sample records; in an AllReduce job it also handles reports about groups, and their
consequences for work and ledger.

The next group is chosen in group/groups.py.  A group whose members have the model of the last one has at least the
minibatches reported under every lease in force; one with another model has not, so then every lease ends.
"""

from __future__ import annotations

from elasticdl.master.core.commands import (
    Accepted,
    JobOver,
    ListShards,
    NoLeaseNow,
    Refused,
    Registered,
    SampleGiven,
    UnknownWorker,
)
from elasticdl.master.core.events import (
    GroupFormed,
    GroupWatched,
    MetricsReported,
    ModelReported,
    ReadyForGroup,
    SampleRequested,
    SessionReported,
    ShardsListed,
    TrainingStopRequested,
    WorkerJoined,
)
from elasticdl.master.core.fleet.fleet import Fleet
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.reconciliation import EstimatorSession, Reconciler
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.plan.callbacks import Callbacks
from elasticdl.master.core.plan.data import Data
from elasticdl.master.core.plan.evaluation import NO_RECORDS, Evaluations, EvaluationSchedule, PlannedEvaluation
from elasticdl.master.core.plan.tasks import MAX_TASKS, Tasks
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level, ReportedLease
from elasticdl.master.core.workers import Worker
from elasticdl.protocol import Shard
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind

RegistrationEvent = (
    WorkerJoined | ModelReported | SessionReported | MetricsReported | TrainingStopRequested | ShardsListed
)


class Registration:
    """The reports of workers before their first task: data, model, slots."""

    def __init__(
        self, state: JobState, fleet: Fleet, groups: WorkerGroups, work: Work, session: EstimatorSession
    ) -> None:
        self._settings, self._workers = state.settings, state.workers
        self._ending, self._out = state.ending, state.out
        self._fleet = fleet
        self._groups = groups
        self._work = work
        self._session = session
        self.data = Data(state.settings)
        self._brought: WorkerJoined | None = None  # Local strategy: a ledger that came before the data was known
        self.is_planned = False  # whether the tasks were cut

    def handle(self, event: RegistrationEvent, begins: bool, clock: float) -> None:
        """Handle a report; `begins`: no task was granted yet in this generation of the master."""
        match event:
            case WorkerJoined():
                self._worker_joined(event, begins, clock)
            case ModelReported():
                self._model_reported(event, clock)
            case SessionReported():
                self._session_reported(event, clock)
            case MetricsReported():
                self._metrics_reported(event, clock)
            case TrainingStopRequested():
                self._training_stop_requested(event, clock)
            case ShardsListed():
                self._listed(event)

    def _worker_joined(self, event: WorkerJoined, begins: bool, clock: float) -> None:
        record = self._fleet.pods.of_worker(event.worker_id)
        if record is None or record.is_leaving:
            self._out.reply(event.call, Refused(f"worker {self._settings.name_of(event.worker_id)} was replaced"))
            return
        before = self._workers.get(event.worker_id)
        is_same = before is not None and before.incarnation == event.incarnation
        is_first_time = not (is_same and before is not None and before.has_joined)
        if not is_same:
            self._groups.lost(event.worker_id, "began anew", clock)
            self._work.lose_worker(event.worker_id)
        worker = self._workers.join(event.worker_id, event.incarnation, clock)
        self._fleet.pods.touch(worker.id)
        if not is_same:
            subject = self._settings.subject_of(worker.id)
            self._out.events.add(
                EventKind.WORKER_REGISTERED,
                subject,
                self._settings.process_of(worker.id),
                self._out.events.newest(subject),
                incarnation=worker.incarnation,
            )
        if is_first_time:
            self._learn_held(worker, event.held, begins, clock)
        self._learn_ledger(worker, event, is_first_time)
        is_local = self._settings.strategy is DistributionStrategy.LOCAL
        asks = self._settings.runs_command or self._settings.fixed_global_batch > 0 or is_local
        plan = self.data.plan_in_force() if asks and self.is_planned else None
        self._out.reply(event.call, Registered(self._fleet.servers.partition, plan))

    def _learn_held(self, worker: Worker, held: tuple[ReportedLease, ...], begins: bool, clock: float) -> None:
        """After a restart of the master, take the worker's own report of its leases instead of the snapshot's.

        A worker that is leaving works on no task; of its leases only the finished minibatches count.
        """
        names = {one.lease.id for one in held}
        for lease in self._work.leases.of_worker(worker.id):
            if lease.id not in names:
                self._work.give_back(lease)
        for one in held if begins else ():
            self._work.hold(worker.id, one, clock)
        for lease in self._work.leases.of_worker(worker.id) if worker.is_leaving else ():
            self._work.give_back(lease)

    def _learn_ledger(self, worker: Worker, event: WorkerJoined, is_first_time: bool) -> None:
        """Take over the ledger of the model that a worker holds itself.

        A script reports what it has trained itself, of which a killed master may have lost the last second; a script of
        a group that has left it for good reports the content of the group's model.
        """
        if event.applied is None:
            return
        if self._settings.runs_command:
            if is_first_time and self.is_planned and not self._settings.has_tensorflow_servers:
                self._work.reconcile(event.applied | self._work.tasks.ledger())
        elif self._settings.strategy is DistributionStrategy.LOCAL and self._settings.trains:
            if self.is_planned:
                self._learn_local_ledger(worker, event)
            else:
                self._brought = event

    def _learn_local_ledger(self, worker: Worker, event: WorkerJoined) -> None:
        """Local strategy: take over the ledger of the worker's model.

        A repeated registration of the same process is merged, since reports may have come after its ledger was made.
        """
        assert event.applied is not None
        num_records = self.data.plan_in_force().num_records
        if event.restored_records not in (0, num_records):
            self._ending.fail(
                f"The checkpoint in {event.restored_from} was written with an epoch of {event.restored_records:,} "
                f"records, not {num_records:,}: its record of which minibatches the model holds does not fit. Train "
                "with those records again, or name another --checkpoint_dir to begin a new model."
            )
            return
        self._work.reconcile(event.applied | self._work.tasks.ledger() if worker.has_ledger else event.applied)
        worker.has_ledger = True
        self._out.persist()

    def _model_reported(self, event: ModelReported, clock: float) -> None:
        worker = self._workers.known(event.worker_id, event.incarnation, clock)
        if worker is None:
            self._out.reply(event.call, UnknownWorker("register first"))
            return
        if not self._ending.is_decided:  # many workers may report the same failure
            self._learn_model(event, worker)
        self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _learn_model(self, event: ModelReported, worker: Worker) -> None:
        """Plan by the first report.  It is on disk before it is accepted, because workers do not repeat it."""
        if event.error:
            self._reject_model(event, worker)
            return
        if not self.is_planned:
            self._out.persist()
        self._work.has_callbacks = event.has_callbacks
        for kind in self.data.model_reported(event.has_metrics, event.shards, event.plan, event.callbacks):
            self._out.add(ListShards(kind))
        self.plan_if_known()

    def _reject_model(self, event: ModelReported, worker: Worker) -> None:
        """Fail the job, unless others train the model already: then the worker's end counts as its own fault."""
        subject = self._settings.subject_of(worker.id)
        cause = self._out.events.add(EventKind.MODEL_REJECTED, subject, event.error, 0, traceback=event.error_details)
        if self._is_trained_without(worker):
            name = self._settings.name_of(worker.id)
            self._out.log(f"Worker {name} cannot use the model that others train: {event.error}", Level.WARNING)
        else:
            self._ending.fail(f"{event.error}\n{event.error_details}".rstrip(), cause=cause)

    def _is_trained_without(self, worker: Worker) -> bool:
        """Return whether records were trained without this worker and PS or other workers hold the model.

        False for the worker that tries the metrics for all while others train.
        """
        if worker.id == self._work.evaluations.tried_by:
            return False
        others = any(one.has_committed for one in self._workers.staying() if one is not worker)
        is_held = others or self._settings.num_own_servers > 0
        return is_held and not worker.has_committed and self._work.tasks.records_done > 0

    def _metrics_reported(self, event: MetricsReported, clock: float) -> None:
        """Report the metrics of a script, which evaluates its model itself."""
        if self._workers.known(event.worker_id, event.incarnation, clock) is None:
            self._out.reply(event.call, UnknownWorker("register first"))
            return
        self._work.evaluations.record(event.step, event.metrics)
        self._out.persist()
        self._out.report_evaluation(event.step, event.metrics)
        self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _training_stop_requested(self, event: TrainingStopRequested, clock: float) -> None:
        """End training for the user's code; persisted before the answer, so that omitted records are no failure."""
        if self._workers.known(event.worker_id, event.incarnation, clock) is None:
            self._out.reply(event.call, UnknownWorker("register first"))
        elif not self.is_planned:
            self._out.reply(event.call, Refused("no data are planned that could be left out"))
        else:
            self._work.stop_training(event.reason)
            self._out.persist()
            self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _session_reported(self, event: SessionReported, clock: float) -> None:
        worker = self._workers.known(event.worker_id, event.incarnation, clock)
        record = self._fleet.pods.of_worker(event.worker_id)
        if worker is None or record is None:
            self._out.reply(event.call, UnknownWorker("register first"))
        elif not self._settings.has_tensorflow_servers or record.slot != 0:
            self._out.reply(event.call, Refused(f"worker {worker.id} is not the chief of TensorFlow's servers"))
        else:
            self._session.reported(event.what)
            self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _listed(self, event: ShardsListed) -> None:
        self.data.listed(event.kind, event.shards)
        self.plan_if_known()

    def plan_if_known(self) -> None:
        """Cut the tasks once the model and all data sources are known."""
        data, work = self.data, self._work
        if self.is_planned or not data.is_known:
            return
        for kind in data.empty_kinds():
            self._ending.fail(f"The {kind} data holds no records. Check the flag --{kind}_data.")
            return
        if self._settings.has_validation_data and not data.has_metrics:
            if self._settings.evaluates_alone:
                self._ending.fail("There is no metric to evaluate: eval_metrics_fn() names none.")
                return
            self._out.log("There is validation data but no metric: nothing is evaluated", Level.WARNING)
        num_tasks = data.num_tasks()
        if num_tasks > MAX_TASKS:
            self._ending.fail(
                f"An epoch has {num_tasks:,} tasks, more than {MAX_TASKS:,}. Raise --minibatch_size or "
                "--num_minibatches_per_task."
            )
            return
        work.tasks = Tasks(data.settings, data.planned_shards())
        if self._settings.evaluates_alone:
            work.evaluations = PlannedEvaluation()
        else:
            work.callbacks = Callbacks(data.callbacks)
            work.evaluations = Evaluations(self._schedule(work.callbacks), data.evaluation_slices())
        self.is_planned = True
        if self._brought is not None:
            worker = self._workers.get(self._brought.worker_id)
            if worker is not None and worker.incarnation == self._brought.incarnation:
                self._learn_local_ledger(worker, self._brought)

    def _schedule(self, callbacks: Callbacks) -> EvaluationSchedule:
        """Return the schedule of the flags; without one, each epoch is evaluated if callbacks need metrics."""
        every_steps, every_seconds = self._settings.evaluation_steps, self._settings.evaluation_throttle
        each_epoch = callbacks.wants_evaluations and not every_steps and not every_seconds
        return EvaluationSchedule(every_steps, every_seconds, self._settings.evaluation_start_delay, each_epoch)


MemberEvent = SampleRequested | ReadyForGroup | GroupWatched | GroupFormed


class Members:
    """Handles samples and groups, see the module; without groups it only gives samples."""

    def __init__(self, state: JobState, groups: WorkerGroups, work: Work, reconciler: Reconciler) -> None:
        self._settings, self._workers = state.settings, state.workers
        self._ending, self._out = state.ending, state.out
        self._groups = groups
        self._work = work
        self._reconciler = reconciler
        self._samples: dict[int, tuple[SampleRequested, float]] = {}  # waiting requests by call, and their start

    def handle(self, event: MemberEvent, clock: float) -> None:
        worker = self._workers.known(event.worker_id, event.incarnation, clock)
        if self._ending.is_decided and isinstance(event, SampleRequested | GroupWatched):
            self._out.reply(event.call, self._groups.over())
        elif worker is None or not worker.has_joined:
            self._out.reply(event.call, UnknownWorker("register first"))
        elif isinstance(event, SampleRequested):
            if not event.of_validation:
                self._work.evaluations.end_trial(worker.id)
            self._samples[event.call] = event, clock
        elif isinstance(event, GroupWatched):
            self._groups.watched(event, clock)
        elif isinstance(event, ReadyForGroup):
            self._groups.ready(event, clock)
            self._out.reply(event.call, Accepted(self._work.tasks.model_version))
        else:
            self._formed(event, clock)

    def _formed(self, event: GroupFormed, clock: float) -> None:
        is_new_model = self._groups.has_formed(event, clock)
        if is_new_model is not None:
            # Members of the last group may have begun with an initial model; reports on the lost one may still arrive.
            if is_new_model or not event.steps:
                self._work.model_was_lost()
            version = self._work.tasks.model_version
            self._reconciler.on_group_content(event.applied)
            members = self._groups.formed_members
            # With a fixed global batch the others train what rank 0 leases and would never finish their own leases.
            holders = members[:1] if self._settings.fixed_global_batch else members
            self._work.keep_workers(member.worker_id for member in holders)
            self._judge_last_steps(self._work.tasks.model_version > version)
        elif not self._groups.is_formed(event.version):
            self._out.reply(event.call, Refused(f"group {event.version} is not the newest"))
            return
        self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _judge_last_steps(self, are_held: bool) -> None:
        """Count the steps since the last report as lost, unless the model contains more than the reports."""
        for member in self._groups.formed_members:
            if are_held:
                self._workers.times.committed(member.worker_id)
            else:
                self._workers.times.lost(member.worker_id)

    def abandoned(self, call: int) -> None:
        """Drop the long poll of a caller that has gone."""
        self._samples.pop(call, None)
        self._groups.abandoned(call)

    def time_out(self, clock: float) -> None:
        """Look for members that have gone."""
        self._groups.time_out(clock)

    def give_samples(self, clock: float) -> None:
        """Answer the workers that wait for sample records, once the data are known."""
        if not self._samples:
            return
        sample = self._work.tasks.sample()
        epoch = self._work.tasks.num_covered if self._groups.is_model_held else -1
        for call, (event, since) in list(self._samples.items()):
            if sample is not None and event.of_validation:
                self._out.reply(call, SampleGiven(self._validation_sample(event.worker_id), epoch))
            elif sample is not None:
                self._out.reply(call, SampleGiven(sample, epoch))
            elif clock - since >= self._settings.long_poll:
                self._out.reply(call, NoLeaseNow())
            else:
                continue
            del self._samples[call]

    def _validation_sample(self, worker_id: int) -> Shard:
        if self._work.tasks.records_done:
            return NO_RECORDS
        staying = {worker.id for worker in self._workers.staying()}
        return self._work.evaluations.sample(worker_id, staying, self._settings.minibatch_size)

    def advance(self, clock: float, is_trained: bool, num_wanted: int) -> None:
        """Plan the next group if it is due, and answer the workers that wait for it.

        Args:
            is_trained: No records remain, so no group is needed.
            num_wanted: Number of workers that are present or may still come.
        """
        if is_trained:
            self._groups.end()
        else:
            self._groups.advance(clock, num_wanted)

    def end(self) -> None:
        """Answer all waiting calls after the job was decided."""
        for call in self._samples:
            self._out.reply(call, JobOver())
        self._samples.clear()
        self._groups.end()
