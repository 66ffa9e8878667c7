"""Outbox: the commands that one event leads to, in order, and what is written down of it.  It decides nothing."""

from __future__ import annotations

from elasticdl.master.core.commands import Answer, Command, Log, Persist, Reply
from elasticdl.master.core.event_log import EventLog
from elasticdl.master.core.values import Level


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

    def persist(self) -> None:
        """What the core knows now is on disk before any command that follows is executed."""
        if Persist() not in self._commands:  # the snapshot is taken after the event, so an earlier one covers this
            self._commands.append(Persist())

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands
