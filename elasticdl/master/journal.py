"""The journal: the master's own state, kept for its next generation, and the status for users beside it.

Owns the port `Journal` and the format of a snapshot.  It never reads the content, which belongs to `master/core`.
Adapters: local_environment.py, kubernetes/journal.py and storage_journal.py.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobStatus

FORMAT = 3
_READ = (2, FORMAT)  # format 2 has an entry for each epoch
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_HEAD = re.compile(rb'\{"format":(\d+),"crc32":"([0-9a-f]{8})","snapshot":')

logger = logging.getLogger("elasticdl.master")


class Superseded(JobError):
    """Another master owns the job now, or it was deleted; this one must end at once and write nothing more."""


class ResumedElsewhere(Superseded):
    """The job was given to another machine or namespace; the rest of it here ends."""


class JournalDeleted(Superseded):
    """The journal of an existing job was deleted: without it no master can continue the job."""


class JournalWriteError(JobError):
    """A snapshot could not be written; the previous one is intact.  Saving again may succeed."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which the journal could not be written.

    Attributes:
        message: The reason, from the last attempt.
        seconds: Duration from the first failure to the next success.
    """

    message: str
    seconds: float


class Outages:
    """The outages of a journal; thread-safe.

    Args:
        clock: Returns seconds, from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the rest
        self._since: float | None = None
        self._message = ""
        self._over: list[Outage] = []

    def failed(self, message: str) -> float:
        """Record a failed write; return the seconds since the first failure of this outage."""
        with self._lock:
            now = self._clock()
            self._since = now if self._since is None else self._since
            self._message = message
            return now - self._since

    def written(self) -> None:
        """Record a successful write."""
        with self._lock:
            if self._since is not None:
                self._over.append(Outage(self._message, self._clock() - self._since))
                self._since = None

    def take(self) -> list[Outage]:
        """Return the finished outages, each once."""
        with self._lock:
            over, self._over = self._over, []
            return over


class Journal(Protocol):
    """Eight verbs.  A snapshot is a dict of JSON values.  All verbs but `close` may raise `Superseded`."""

    def load(self) -> dict[str, Any] | None:
        """Return the newest snapshot; None for a job that has none yet.

        Raises:
            JobError: The snapshot is damaged: the job must not start afresh behind the user's back.
        """
        ...

    def save(self, snapshot: dict[str, Any], status: JobStatus | None = None) -> None:
        """Replace the snapshot, and the status if one is given; when it returns, both survive a crash.

        Raises:
            JournalWriteError: The snapshot is not written; the previous one is intact.
            JobError: It can never be written.
        """
        ...

    def save_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        """Replace both within about a second unless a later call comes first.

        The call never waits for another machine.  A failed write is logged; the next call tries again.

        Raises:
            JobError: The snapshot can never be written.
        """
        ...

    def read_status(self) -> JobStatus | None:
        """Return the last written status of this or an earlier generation; None if none is readable."""
        ...

    def write_status(self, status: JobStatus) -> None:
        """Replace the status at once; log a failure to write."""
        ...

    def check_owner(self) -> None:
        """Raise `Superseded` if another master owns the job by now: this process may have been paused.

        Raises:
            JournalWriteError: The owner is unknown.
        """
        ...

    def take_outages(self) -> list[Outage]:
        """Return the finished outages, each once."""
        ...

    def close(self) -> None:
        """Release the job for another master; delayed writes are dropped."""
        ...


def encode(snapshot: dict[str, Any]) -> bytes:
    """Return a snapshot as JSON, with the CRC-32 of the snapshot's own bytes before it."""
    body = json.dumps(snapshot, separators=(",", ":")).encode()
    return b'{"format":%d,"crc32":"%08x","snapshot":%b}' % (FORMAT, zlib.crc32(body), body)


def decode(data: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Return the snapshot of a result of `encode`.  Journals of earlier versions have no CRC and need none.

    Args:
        where: Place of the journal, for the message.
        remedy: The command that removes a damaged one.

    Raises:
        JobError: The journal is damaged.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"it is not JSON ({error})", remedy) from error
    if not isinstance(document, dict) or not isinstance(document.get("snapshot"), dict):
        raise damaged(where, "it holds no snapshot", remedy)
    if document.get("format") not in _READ:
        raise JobError(
            f"the journal {where} was written by another version of ElasticDL: "
            f"its format is {document.get('format')!r}, this one reads {' and '.join(map(str, _READ))}",
            f"continue the job with the version that began it, or {remedy} to train from the beginning",
        )
    head = _HEAD.match(data)
    if head is None and list(document) != ["format", "snapshot"]:
        raise damaged(where, f"it begins with {data[:40]!r}", remedy)
    if head is not None and zlib.crc32(data[head.end() : -1]) != int(head[2], 16):
        raise damaged(where, "its checksum is wrong", remedy)
    snapshot: dict[str, Any] = document["snapshot"]
    return snapshot


def damaged(where: str, why: str, remedy: str) -> JobError:
    """Return the error of a journal that cannot be read."""
    return JobError(
        f"the journal {where} is damaged: {why}",
        f"{remedy} to train from the beginning; its record of pods, failures and evaluations is then lost",
    )


def save_patiently(
    journal: Journal, snapshot: dict[str, Any], status: JobStatus | None, patience_s: float, stop: threading.Event
) -> None:
    """Save, and repeat failed attempts.

    Args:
        journal: The journal to write.
        snapshot: See `Journal.save`.
        status: See `Journal.save`.
        patience_s: For how long attempts are repeated.
        stop: When set, the present attempt is the last.

    Raises:
        JournalWriteError: The snapshot is not written.
    """
    deadline = time.monotonic() + patience_s
    delay_s, complaint = _FIRST_DELAY_S, ""
    while True:
        try:
            return journal.save(snapshot, status)
        except JournalWriteError as error:
            if time.monotonic() >= deadline or stop.is_set():
                raise
            if error.what != complaint:
                logger.error("%s", error)
            complaint = error.what
            if stop.wait(delay_s):
                raise
            delay_s = min(_MAX_DELAY_S, 2 * delay_s)
