"""JobOutcome: that a job is decided, why, and how its pods leave before the last command.

The first decision counts.  Workers leave, then PS pods are deleted, then the job ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl.master.core.commands import DeletePod, EndJob
from elasticdl.master.core.outbox import Outbox
from elasticdl.master.core.values import Level
from elasticdl_client.job_events import EventKind

GRACE = 30.0  # for workers to leave by themselves (a last checkpoint of the Local strategy)
GRACE_AFTER_FAILURE = 5.0


class JobOutcome:
    """Undecided until `decide`."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._outcome: EndJob | None = None
        self._since: float | None = None
        self.is_over = False  # the last command is out

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
            message: why, for people.
            pod: whose log says more.
            cause: number of the event that it follows from.
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

    def advance(self, clock: float, awaited: bool, pods: list[str], last_lines: list[str]) -> None:
        """Ends the job once no worker is awaited any more, or the grace is over.

        Args:
            awaited: some worker lives and is heard.
            pods: names of those that do not end by themselves.
            last_lines: what the log says before the last command.
        """
        if self._outcome is None or self.is_over:
            return
        if self._since is None:
            self._since = clock
        grace = GRACE_AFTER_FAILURE if self.has_failed else GRACE
        if awaited and clock - self._since < grace:
            return
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
