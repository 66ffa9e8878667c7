"""Outbox: the commands that one event leads to, in order, and what is written down of it.  It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

from elasticdl.master.core.commands import Answer, Command, Log, Measured, Persist, Reply
from elasticdl.master.core.event_log import EventLog
from elasticdl.master.core.values import Level
from elasticdl_client.job_events import EventKind


class Outbox:
    """Collects commands until they are taken.

    Attributes:
        events: the log of the job's events, to which every part adds.
    """

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self.events = EventLog()

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def reply(self, call: int, answer: Answer) -> None:
        self._commands.append(Reply(call, answer))

    def log(self, text: str, level: Level = Level.INFO) -> None:
        self._commands.append(Log(level, text))

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended: its line, its event, and its numbers for the watchers of the job."""
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
