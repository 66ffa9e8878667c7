"""Job: the whole logic of a job, without I/O: events and times come in, commands go out.

`Job` joins the parts, each of which owns one concept: it decides when to ask for the content of the model, when to
hand out tasks, when to write a checkpoint and when the job ends.  No clock, thread, random source or I/O in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

from elasticdl.master.core import events, overview
from elasticdl.master.core.accounting import Accounting
from elasticdl.master.core.autoscaler import Autoscaler
from elasticdl.master.core.commands import (
    Accepted,
    Answer,
    Command,
    HeartbeatAnswer,
    JobOver,
    LeaseGranted,
    ListShards,
    MessageAnswer,
    NoLeaseNow,
    Refused,
    SaveCheckpoint,
    UnknownWorker,
)
from elasticdl.master.core.fleet.fleet import Fleet, FleetEvent
from elasticdl.master.core.fleet.hangs import STANDS
from elasticdl.master.core.fleet.registration import MemberEvent, Members, Registration, RegistrationEvent
from elasticdl.master.core.group.groups import LATE, WorkerGroups
from elasticdl.master.core.ledger.checkpoints import CheckpointEvent, Checkpoints
from elasticdl.master.core.ledger.reconciliation import EstimatorSession, Reconciler, ReconcilerEvent
from elasticdl.master.core.ledger.work import LeaseEvent, Work
from elasticdl.master.core.overview import Pace
from elasticdl.master.core.plan.epoch import coverage_line, coverage_of
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level
from elasticdl_client.job_events import EventHistory, EventKind
from elasticdl_client.job_series import JobSeries
from elasticdl_client.job_status import MASTER_RESTARTED, JobPhase, JobStatus

_NO_DATA = (
    "All commands have ended with 0, and none of them has taken any data: each has run by itself. Let the script make "
    "its loader with `create_elastic_controller(...).loader(...)`, or, without AllReduce, take its data from a "
    "`DataShardService`; a command that needs none is started without --training_data and without "
    "--distribution_strategy=AllReduceStrategy."
)

JobEvent = (
    events.MessageReceived
    | events.LeaseRequested
    | events.CallAbandoned
    | events.PodsListed
    | events.ShardsUnreadable
    | events.JournalDelayed
    | events.StopRequested
    | events.Tick
)

MAX_GAP = 2.0  # seconds between two events; after a longer gap the master itself was stopped


class Job:
    """One generation of a job's master.

    Its clock runs only while the master is awake: a master that was stopped gives up no process because of the pause.

    Args:
        settings: Settings of the job.
        generation: Number of this generation of the master.
        now: See `handle`.
        unix_offset: Seconds from `now` to the time since the Unix epoch, for logs and the status.
        began_at: Start of the accounted time, in seconds since the Unix epoch; None means now.
    """

    def __init__(
        self,
        settings: JobSettings,
        generation: int = 1,
        now: float = 0.0,
        unix_offset: float = 0.0,
        began_at: float | None = None,
    ) -> None:
        self.settings = settings
        self.generation = generation
        self._now = now
        self._unix_offset = unix_offset  # for the accounting, whose time never jumps
        self._event_offset = unix_offset  # the newest one, for the times of events
        self._clock = 0.0
        self._state = state = JobState.new(settings, generation)
        self._out, self._ending, self._workers = state.out, state.ending, state.workers
        self._checkpoints = Checkpoints(state, self._clock)
        self._groups = groups = WorkerGroups(state)
        self._work = work = Work(state, groups)
        self._reconciler = Reconciler(state, work)
        self._members = Members(state, groups, work, self._reconciler)
        self._fleet = fleet = Fleet(state, groups, work, self._reconciler, self._checkpoints)
        began_at = self._unix_now if began_at is None else began_at
        self._accounting = Accounting(state, fleet, groups, self._checkpoints, began_at)
        self._autoscaler = Autoscaler(state, fleet, work, self._accounting)
        self._session = EstimatorSession(state, work, self._reconciler)
        self._registration = Registration(state, fleet, groups, work, self._session)
        self._data = self._registration.data
        self._has_opened = False  # tasks may have been handed out in this generation
        self._pace = Pace()
        self._series = JobSeries()
        self._waits_for = ""
        self._out.events.now = now + unix_offset
        self._answers_to_parts: tuple[HeartbeatAnswer | Accepted | Refused | UnknownWorker, ...] = ()  # of one message
        if generation == 1:
            self._out.events.add(EventKind.JOB_STARTED, "job")

    @classmethod
    def restore(
        cls,
        settings: JobSettings,
        snapshot: Mapping[str, Any],
        generation: int,
        now: float,
        unix_offset: float = 0.0,
        resumed_at: float = 0.0,
        is_resumed: bool | None = None,
    ) -> Job:
        """Return the next generation of a job, from the last snapshot on disk.

        Args:
            settings: Settings of the job.
            snapshot: The newest snapshot of the generation before.
            generation: Number of this generation, greater than that in the snapshot.
            now: See `handle`.
            unix_offset: Seconds from `now` to the time since the Unix epoch, for logs and the status.
            resumed_at: When this run was requested, in seconds since the Unix epoch; an older journal means that the
                job was stopped in between.
            is_resumed: Whether this generation belongs to another run than the one before; None: decide by these times.
        """
        job = cls(settings, generation, now, unix_offset)
        if "events" in snapshot:
            job._out.events.restore(snapshot["events"])
        if "series" in snapshot:
            job._series = JobSeries.from_journal(snapshot["series"])
        times = snapshot.get("accounting")
        stopped = 0.0
        if times is not None and is_resumed is not False:
            stopped = job._accounting.stopped_seconds(times, resumed_at)
        if is_resumed or stopped:
            job._fleet.resumed = job._out.events.add(EventKind.JOB_RESUMED, "job", "", 0, seconds=round(stopped, 3))
        else:
            job._out.events.add(EventKind.MASTER_RESTARTED, "master", generation=generation)
        job._reconciler.num_repeated = snapshot["num_repeated"]
        job._data.restore(snapshot["data"])
        job._registration.plan_if_known()
        job._checkpoints.restore(snapshot["checkpoints"])
        job._ending.restore(snapshot)
        job._workers.restore(snapshot["workers"], job._clock)
        job._fleet.pods.restore(snapshot["pods"])
        job._fleet.servers.restore(snapshot["servers"], job._clock)
        job._work.restore(snapshot)
        if snapshot.get("session"):
            job._session.restore(snapshot["session"])
        job._groups.restore(snapshot["worlds"], job._clock)
        if "loads" in snapshot:
            job._state.ps_metrics.restore(snapshot["loads"])
        if times is not None:
            job._accounting.restore(times, job._unix_now, stopped)
        if "autoscaler" in snapshot:
            job._autoscaler.restore(snapshot["autoscaler"], job._clock)
        if job._registration.is_planned:
            job._work.restore_plan(snapshot)
        job._work.restore_leases(snapshot, job._clock)
        return job

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the next generation must know, in JSON types only."""
        return {
            "generation": self.generation,
            "fingerprint": self._data.fingerprint(),
            "num_repeated": self._reconciler.num_repeated,
            "data": self._data.snapshot(),
            "checkpoints": self._checkpoints.snapshot(),
            "ending": self._ending.snapshot(),
            "workers": self._workers.snapshot(),
            "pods": self._fleet.pods.snapshot(),
            "servers": self._fleet.servers.snapshot(),
            **self._work.snapshot(),
            "session": self._session.snapshot() if self.settings.has_tensorflow_servers else None,
            "worlds": self._groups.snapshot(),
            "events": self._out.events.snapshot(),
            "loads": self._state.ps_metrics.snapshot(),
            "series": self._series.to_journal(),
            "accounting": self._accounting.snapshot(),
            "autoscaler": self._autoscaler.snapshot(self._clock),
        }

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Handle one event; return the commands to execute, in order.  `now` is of any clock that only grows."""
        self._clock += min(max(now - self._now, 0.0), MAX_GAP)
        self._now = max(now, self._now)
        if isinstance(event, events.Tick) and event.unix_offset is not None:
            self._event_offset = event.unix_offset
        self._out.events.now = self._now + self._event_offset
        self._accounting.begin(self._unix_now)
        self._dispatch(event)
        self._advance()
        if isinstance(event, events.MessageReceived) and event.lease_request is not None:
            self._out.change_reply(event.call, self._message_answer)
        commands = self._out.take()
        self._accounting.end()
        return commands

    @property
    def _unix_now(self) -> float:
        return self._now + self._unix_offset

    def _dispatch(self, event: events.Event) -> None:
        """Hand an event to the part that owns its concept."""
        if isinstance(event, LeaseEvent):
            self._fleet.hangs.on_report(event.worker_id, event.incarnation, event.lease)
            self._work.lease_event(event, self._clock)
        elif isinstance(event, FleetEvent):
            self._fleet.handle(event, self._clock)
        elif isinstance(event, MemberEvent):
            self._members.handle(event, self._clock)
        elif isinstance(event, RegistrationEvent):
            self._registration.handle(event, not self._has_opened, self._clock)
        elif isinstance(event, ReconcilerEvent):
            self._reconciler.handle(event, self._clock)
        elif isinstance(event, CheckpointEvent):
            self._checkpoints.handle(event)
        elif isinstance(event, events.ScaleRequested):
            self._autoscaler.handle(event, self._clock)
        else:
            self._handle(event)

    def _handle(self, event: JobEvent) -> None:
        """Handle an event that concerns the job as a whole."""
        match event:
            case events.MessageReceived():
                self._message_received(event)
            case events.LeaseRequested():
                self._lease_requested(event)
            case events.CallAbandoned():
                self._work.abandoned(event)
                self._members.abandoned(event.call)
            case events.PodsListed():
                self._pods_listed(event)
            case events.ShardsUnreadable():
                self._shards_unreadable(event)
            case events.JournalDelayed():
                self._journal_delayed(event)
            case events.StopRequested():
                self._stop_requested(event)
            case events.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _message_received(self, event: events.MessageReceived) -> None:
        """Handle the parts like calls of their own; what follows from all of them is done once."""
        answers: list[HeartbeatAnswer | Accepted | Refused | UnknownWorker] = []
        for part in event.parts:
            self._dispatch(part)
            answer = self._out.take_reply(event.call)
            assert isinstance(answer, HeartbeatAnswer | Accepted | Refused | UnknownWorker)
            answers.append(answer)
            if isinstance(answer, Refused | UnknownWorker):
                break
        if event.lease_request is None:
            self._out.reply(event.call, MessageAnswer(tuple(answers)))
        else:
            self._answers_to_parts = tuple(answers)
            self._lease_requested(event.lease_request)

    def _message_answer(self, lease: Answer) -> MessageAnswer:
        """Return the answer to a message: the collected answers to its parts, and the one to its lease request."""
        assert isinstance(lease, LeaseGranted | NoLeaseNow | JobOver | UnknownWorker)
        return MessageAnswer(self._answers_to_parts, lease)

    def _shards_unreadable(self, event: events.ShardsUnreadable) -> None:
        cause = self._out.events.add(EventKind.DATA_UNREADABLE, "data", event.message, data=str(event.kind))
        self._ending.fail(f"The {event.kind} data cannot be read: {event.message}", cause=cause)

    def _journal_delayed(self, event: events.JournalDelayed) -> None:
        text = f"journal could not be written for {event.seconds:.1f} s: {event.message}"
        seconds = round(event.seconds, 3)
        self._out.events.add(EventKind.JOURNAL_DELAYED, "master", f"the {text}", 0, seconds=seconds)
        self._out.log(f"The {text}", Level.WARNING)

    def _stop_requested(self, event: events.StopRequested) -> None:
        cause = self._out.events.add(EventKind.JOB_STOP_REQUESTED, "user", event.reason)
        self._ending.fail(event.reason, cause=cause)

    def _pods_listed(self, event: events.PodsListed) -> None:
        if not self._fleet.pods.is_listed:  # a generation of the master begins
            for kind in self._data.unlisted():
                self._out.add(ListShards(kind))
        self._fleet.pods_listed(event, self._clock)

    # Lease requests, and when the job continues --------------------------------------------------------------------

    def _lease_requested(self, event: events.LeaseRequested) -> None:
        worker = self._workers.known(event.worker_id, event.incarnation, self._clock)
        if self._ending.is_decided:
            self._out.reply(event.call, JobOver())
        elif worker is None or not worker.has_joined:
            self._out.reply(event.call, UnknownWorker("register first"))
        else:
            if worker.waiting_call is not None:
                self._out.reply(worker.waiting_call, NoLeaseNow())
                self._workers.stop_waiting(worker)
            self._work.requested(event)
            self._workers.wait(worker, event, self._clock)

    def _tick(self) -> None:
        self._fleet.find_hangs(self._clock)
        self._members.time_out(self._clock)
        self._fleet.time_out(self._clock)
        self._pace.sample(self._now, self._work.tasks.records_done, len(self._workers.all()))
        has_end = self._work.tasks.planned_records > 0
        seconds_left = self._pace.seconds_for(self._work.tasks.records_left_out) if has_end else None
        self._autoscaler.tick(self._clock, self._unix_now, self._is_open, seconds_left)
        if not self._ending.is_decided and (why := self._why_waiting()) != self._waits_for:
            self._waits_for = why
            if why:
                self._out.events.add(EventKind.JOB_WAITING, "job", why)
        self._add_point()

    def _add_point(self) -> None:
        self._series.add(overview.series_point(self._state, self._work, self._fleet, self._accounting, self._unix_now))

    def _advance(self) -> None:
        if self.settings.runs_command and self._fleet.pods.all_are_done and not self._ending.is_decided:
            self._commands_have_ended()
        if self._ending.is_decided:
            self._leave()
            return
        if not self._is_recovering:
            self._members.give_samples(self._clock)
            if self.settings.has_groups:
                self._members.advance(self._clock, self._is_trained_by_scripts, self._fleet.pods.num_unfinished)
        if self._registration.is_planned and not self._is_recovering and self._workers.some_have_joined:
            self._reconciler.ask_if_needed(self._fleet.servers.partition, self._clock)
        if self._is_open:
            self._has_opened = True
            self._work.advance(self._clock)
            self._checkpoint()
            self._work.serve(self._clock)
            if not self.settings.runs_command:
                self._end_if_complete()
        if self.settings.runs_command:
            self._end_data_if_complete()
        self._work.answer_waiting(self._clock)
        self._fleet.place(self._clock)

    @property
    def _is_recovering(self) -> bool:
        """Whether a worker of an earlier generation of the master may still report its leases.

        A grant is journalled within a second.  So all missing workers are awaited for the duration of a lease, and
        after that only those with a known lease.
        """
        missing = self._workers.absent()
        if self._clock < self.settings.lease_timeout:
            return any(missing)
        return any(self._work.leases.of_worker(worker.id) for worker in missing)

    @property
    def _is_open(self) -> bool:
        """Whether tasks may be handed out."""
        ready = self._registration.is_planned and self._fleet.servers.is_complete
        is_in_doubt = self._reconciler.in_doubt or (self.settings.has_groups and not self._groups.stands)
        return ready and not is_in_doubt and not self._is_recovering

    def _checkpoint(self) -> None:
        version, partition = self._work.tasks.model_version, self._fleet.servers.partition
        if partition is None:
            return
        is_wanted = self._work.is_covered or self._fleet.wants_checkpoint
        if self._checkpoints.begin_if_due(version, is_wanted, self._clock):
            self._out.add(SaveCheckpoint(version, partition.ps, self._data.fingerprint()))

    def _end_if_complete(self) -> None:
        work = self._work
        if not work.is_evaluated or work.needs_export:
            return
        if self._checkpoints.is_saved(work.tasks.model_version):
            for remark in work.tasks.remarks(work.evaluations.quarantined()):
                self._out.log(remark, Level.WARNING)
            self._ending.succeed()
            self._leave()
        elif (failure := self._checkpoints.lasting_failure()) is not None:
            what, cause = failure
            self._ending.fail(what, cause=cause)
            self._leave()

    def _end_data_if_complete(self) -> None:
        """Tell scripts that there are no more data; the job continues until their commands have ended.

        After TensorFlow's chief has ended, no process restores the model: the reconciler's doubt is never resolved.
        """
        pods = self._fleet.pods
        is_settled = self._is_open or (self.settings.has_tensorflow_servers and pods.is_done(0))
        is_covered = is_settled and self._work.is_covered
        for worker in self._workers.waiting():
            record = pods.of_worker(worker.id)
            evaluates = record is not None and self.settings.has_evaluator and record.slot == self.settings.num_workers
            if worker.waiting_call is not None and (pods.training_is_done if evaluates else is_covered):
                self._out.reply(worker.waiting_call, JobOver())
                self._workers.stop_waiting(worker)

    @property
    def _is_trained_by_scripts(self) -> bool:
        """Whether AllReduce under scripts needs no new group: the model of a group or of an ended script has it all."""
        if not self.settings.has_groups or not self.settings.runs_command or not self._registration.is_planned:
            return False
        return self._work.is_covered and (self._is_open or self._fleet.pods.some_are_done)

    def _commands_have_ended(self) -> None:
        """End the job after all scripts: it has failed if planned records are left out."""
        for epoch in self._work.tasks.epochs:
            if not epoch.covered:
                coverage = coverage_of(epoch, True, self.settings.has_tensorflow_servers)
                self._out.log(coverage_line(coverage))
        if self._work.tasks.records_left_out:
            self._ending.fail(self._why_too_early())
        elif self.settings.expects_data and not self._registration.is_planned:
            self._ending.fail(_NO_DATA)
        else:
            self._ending.succeed()

    def _why_too_early(self) -> str:
        tasks = self._work.tasks
        return (
            f"All commands have ended with 0 before the end of the data: of {tasks.planned_records:,} planned records "
            f"{tasks.records_done:,} are trained, {tasks.records_left_out:,} are left out (unplanned). "
            "Let the script's loop take all of them (`for epoch in controller.epochs()`, `for minibatch in data`), "
            'or say that it ends early: `stop_training("why")` of the controller or the DataShardService, --max_step.'
        )

    def _leave(self) -> None:
        """Send all processes away after the job's end was decided."""
        for worker in self._workers.waiting():
            if worker.waiting_call is not None:
                self._out.reply(worker.waiting_call, JobOver())
                self._workers.stop_waiting(worker)
        self._members.end()
        heard_after = self._clock - self.settings.lease_timeout
        if self._ending.is_due(self._clock, self._workers.is_heard(heard_after)):
            self._add_point()
            self._ending.end(self._fleet.who_must_be_ended(heard_after), self._accounting.lines(self._unix_now))

    # For the status and for tests -----------------------------------------------------------------------------------

    @property
    def events(self) -> EventHistory:
        """Events of the job so far."""
        return self._out.events.history

    @property
    def series(self) -> JobSeries:
        """Time series of the job so far."""
        return self._series

    def status(self, now: float | None = None) -> JobStatus:
        """Return the status of the job.

        Args:
            now: End of the accounted time; None means the last event.
        """
        unix_now = self._unix_now if now is None else now + self._unix_offset
        phase = JobPhase.RUNNING if self._has_opened else JobPhase.PENDING
        if (outcome := self._ending.outcome) is not None:
            phase = JobPhase.FAILED if self._ending.has_failed else JobPhase.SUCCEEDED
        message = outcome.message if outcome is not None else self._why_waiting()
        num_ps, have_left = self.settings.num_ps, self.settings.runs_command and self._fleet.pods.all_are_done
        status = JobStatus(self.settings.job_name, phase, message, self.generation, ps_wanted=num_ps)
        status = overview.with_progress(status, self.settings, self._work, self._pace, have_left)
        status = overview.with_model(status, self._work)
        status = overview.with_processes(status, self._state, self._fleet, self._groups)
        standing, num_standing = self._fleet.hangs.standing(self._clock) if outcome is None else ((), 0)
        saving = self._checkpoints.seconds(self._clock) if outcome is None else 0.0
        saving = round(saving, 1) if saving > STANDS else 0.0
        status = replace(status, standing=standing, num_standing=num_standing, saving_seconds=saving)
        status = replace(status, scaling=self._autoscaler.status())
        return overview.with_history(status, self._out.events.totals, self._accounting, unix_now)

    def _why_waiting(self) -> str:
        servers = self._fleet.servers
        if servers.are_expected_back:
            have = f"{servers.num_ready} of {self.settings.num_ps} have"
            return f"{MASTER_RESTARTED}: waiting for parameter servers to register again: {have}"
        if not servers.is_complete:
            found = [f"{servers.num_ready} of {self.settings.num_ps} are ready"]
            found += [f"{n} {'is' if n == 1 else 'are'} lost"] if (n := servers.num_lost) else []
            found += [f"{n} {'has' if n == 1 else 'have'} to register again"] if (n := servers.num_unregistered) else []
            return f"waiting for parameter servers: {', '.join(found)}"
        if not self._fleet.pods.worker_slots:
            return "paused: no workers are wanted; `elasticdl scale` continues the job"
        if self._is_recovering and not self._workers.all():
            return f"{MASTER_RESTARTED}: waiting for workers to register again"
        if not self._workers.all():
            return "waiting for workers"
        if not self._data.has_model:
            return "waiting for a worker to load the model definition"
        if self.settings.has_groups and not self._groups.num_formed:
            late = ", ".join(map(self.settings.name_of, self._groups.awaited(self._clock, LATE)))
            return f"waiting for {f'worker {late}' if late else 'workers'} to form a group"
        if self._is_recovering:
            return f"{MASTER_RESTARTED}: waiting for workers to register again"
        return ""

    def validate_state(self) -> None:
        """Check every invariant.

        Raises:
            AssertionError: An invariant does not hold.
        """
        self._work.validate()
        self._groups.validate()
        self._fleet.pods.validate()
        self._fleet.servers.validate()
        self._accounting.validate()
        for worker in self._workers.all():
            record = self._fleet.pods.of_worker(worker.id)
            assert record is not None, worker
            assert not record.is_leaving or record.is_released, worker
