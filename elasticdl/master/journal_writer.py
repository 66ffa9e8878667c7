"""The background thread of a journal, for delayed writes.

Owns the newest pending snapshot and status, and the lock of all writes of the journal; never knows the destination.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from elasticdl.master.journal import JournalWriteError
from elasticdl_client.job_status import JobStatus

Snapshot = TypeVar("Snapshot")

_CLOSE_S = 1.0  # for a write in progress

logger = logging.getLogger("elasticdl.master")


class JournalWriter(Generic[Snapshot]):
    """Write the newest snapshot and status, and repeat a write that fails.

    Args:
        interval_s: Seconds between two writes.
        write: Called with the lock held; a `JournalWriteError` is logged, any other error ends the thread.
        after: Called after each write, without the lock.

    Attributes:
        lock: Held during each write, in any thread.
    """

    def __init__(
        self,
        interval_s: float,
        write: Callable[[Snapshot, JobStatus], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.Lock()
        self._interval_s = interval_s
        self._write = write
        self._after = after
        self._change = threading.Condition()  # guards the next two
        self._waiting: tuple[Snapshot, JobStatus] | None = None
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot, status: JobStatus) -> None:
        """Replace the pending snapshot and status.

        Raises:
            BaseException: The error that has ended the thread.
        """
        with self._change:
            if self._failure is not None:
                raise self._failure
            self._waiting = snapshot, status
            self._change.notify_all()

    def take(self) -> tuple[Snapshot, JobStatus] | None:
        """Return the pending snapshot and status, which are then not written; the caller holds the lock."""
        with self._change:
            waiting, self._waiting = self._waiting, None
            return waiting

    def update_status(self, status: JobStatus) -> Snapshot | None:
        """Replace the pending status, if there is one, and return the snapshot beside it."""
        with self._change:
            if self._waiting is None:
                return None
            self._waiting = self._waiting[0], status
            return self._waiting[0]

    def close(self) -> None:
        """End the thread; drop what is pending."""
        self._closed.set()
        with self._change:
            self._change.notify_all()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        complaint = ""
        while self._wait_for_work():
            try:
                self._write_waiting()
            except JournalWriteError as error:
                if error.what != complaint:
                    logger.warning("%s", error)
                complaint = error.what
            except Exception as error:  # noqa: BLE001  the next `put` raises it in the loop's thread
                with self._change:
                    self._failure = error
                return
            else:
                if complaint:
                    logger.info("The journal can be written again")
                complaint = ""
            if self._closed.wait(self._interval_s):
                return

    def _wait_for_work(self) -> bool:
        """Wait for something pending; return False after `close`."""
        with self._change:
            self._change.wait_for(lambda: self._waiting is not None or self._closed.is_set())
            return not self._closed.is_set()

    def _write_waiting(self) -> None:
        with self.lock:
            content = self.take()  # not earlier: a concurrent `save` may have written something newer than was pending
            if content is None:
                return
            try:
                self._write(*content)
            except JournalWriteError:
                with self._change:
                    self._waiting = self._waiting or content
                raise
        self._after()
