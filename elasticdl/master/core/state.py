"""JobState: what all parts of the core share: settings, workers, the outcome of the job, and the commands of an event.

Each part owns one concept; it takes the shared state and the parts that it depends on, and adds commands to `out`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.master.core.commands import Answer, Command, DeletePod, EndJob, Log, Measured, Persist, Reply
from elasticdl.master.core.event_log import EventLog
from elasticdl.master.core.ps_metrics import PsMetrics
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.slot_time import SlotTimes
from elasticdl.master.core.values import Level
from elasticdl.master.core.workers import Workers
from elasticdl_client.job_events import EventKind

GRACE = 30.0  # seconds for workers to leave by themselves (a last checkpoint of the Local strategy)
GRACE_AFTER_FAILURE = 5.0


class Outbox:
    """Collects the commands of one event, in order, until they are taken.

    Attributes:
        events: The log of the job's events, to which every part adds.
    """

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self.events = EventLog()

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def reply(self, call: int, answer: Answer) -> None:
        self._commands.append(Reply(call, answer))

    def take_reply(self, call: int) -> Answer:
        """Remove the newest reply, which must be to this call, and return it."""
        place = max(n for n, command in enumerate(self._commands) if isinstance(command, Reply))
        reply = self._commands.pop(place)
        assert isinstance(reply, Reply)
        assert reply.call == call
        return reply.answer

    def change_reply(self, call: int, change: Callable[[Answer], Answer]) -> None:
        """Replace the reply to this call."""
        for place, command in enumerate(self._commands):
            if isinstance(command, Reply) and command.call == call:
                self._commands[place] = Reply(call, change(command.answer))
                return
        raise AssertionError(f"call {call} is not answered")

    def log(self, text: str, level: Level = Level.INFO) -> None:
        self._commands.append(Log(level, text))

    def report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the results of an evaluation: log line, event, and values for TensorBoard and trackers."""
        self.events.add(EventKind.EVALUATION_FINISHED, f"evaluation-{step}", **metrics)
        self.log(f"Evaluation metrics[step={step}]: {dict(metrics)}")
        self.add(Measured(step, dict(metrics)))

    def persist(self) -> None:
        """Write the state of the core to disk before executing any command that follows."""
        if Persist() not in self._commands:  # the snapshot is taken after the event, so an earlier one covers this
            self._commands.append(Persist())

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands


class JobOutcome:
    """The decision that a job has succeeded or failed, and how its pods leave before the last command.

    The first decision is final.  Workers leave, then PS pods are deleted, then the job ends.
    """

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._outcome: EndJob | None = None
        self._since: float | None = None
        self.is_over = False  # the last command was issued

    @property
    def outcome(self) -> EndJob | None:
        return self._outcome

    @property
    def is_decided(self) -> bool:
        return self._outcome is not None

    @property
    def has_failed(self) -> bool:
        return self._outcome is not None and self._outcome.exit_code != 0

    def fail(self, message: str, pod: str = "", cause: int = 0) -> None:
        """Fail the job.  The outcome is persisted before it is published.

        Args:
            message: The reason, for users.
            pod: Name of the pod whose log has details; may be empty.
            cause: Number of the event that caused it; 0 means none.
        """
        if self._outcome is None:
            self._outcome = EndJob(1, message, pod)
            details = {"log_of": pod} if pod else {}
            self._out.events.add(EventKind.JOB_FAILED, "job", message, cause, **details)
            self._out.persist()
            self._out.log(message, Level.ERROR)

    def succeed(self) -> None:
        if self._outcome is None:
            self._outcome = EndJob(0)
            self._out.events.add(EventKind.JOB_SUCCEEDED, "job")
            self._out.persist()

    def is_due(self, clock: float, awaited: bool) -> bool:
        """Return whether a decided job ends now: no worker is awaited any more, or the grace period is over.

        Args:
            clock: The present time.
            awaited: Whether a live worker still sends heartbeats.
        """
        if self._outcome is None or self.is_over:
            return False
        if self._since is None:
            self._since = clock
        grace = GRACE_AFTER_FAILURE if self.has_failed else GRACE
        return not awaited or clock - self._since >= grace

    def end(self, pods: list[str], last_lines: list[str]) -> None:
        """End the job.

        Args:
            pods: Names of the pods to delete, which do not end by themselves.
            last_lines: Last lines of the log, before the last command.
        """
        assert self._outcome is not None
        for name in pods:
            self._out.add(DeletePod(name))
        for line in last_lines:
            self._out.log(line)
        self._out.add(self._outcome)
        self.is_over = True

    def snapshot(self) -> list[Any] | None:
        outcome = self._outcome
        return None if outcome is None else [outcome.exit_code, outcome.message, outcome.pod]

    def restore(self, saved: Mapping[str, Any]) -> None:
        if saved["ending"] is not None:
            exit_code, message, pod = saved["ending"]
            self._outcome = EndJob(exit_code, message, pod)


@dataclass(frozen=True, slots=True)
class JobState:
    """State shared by the parts of one generation of a job's master.

    Attributes:
        settings: Settings of the job.
        generation: Number of this generation of the master.
        out: Takes commands and events.
        ending: The outcome of the job.
        workers: The registered workers.
        ps_metrics: Load of the parameter servers.
    """

    settings: JobSettings
    generation: int
    out: Outbox
    ending: JobOutcome
    workers: Workers
    ps_metrics: PsMetrics

    @classmethod
    def new(cls, settings: JobSettings, generation: int) -> JobState:
        """Return the state of a generation in which nothing has happened yet."""
        out = Outbox()
        num_processes = settings.processes_per_worker
        num_slots = (settings.num_workers + settings.has_evaluator) * num_processes
        times = SlotTimes(num_slots, settings.evaluates_alone, num_processes)
        return cls(settings, generation, out, JobOutcome(out), Workers(times), PsMetrics())
