"""The inbox: how all threads reach the core, which one thread at a time uses, and how calls get their answers.

The calling thread does the work itself if no other thread does any: so a call is answered without a thread switch.
The inbox owns the queue, the lock of the working thread and the futures of pending calls.  It never reads the content
of an event or an answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from elasticdl.master.core.commands import Answer
from elasticdl.master.core.events import Event


class InboxClosed(Exception):
    """The master is ending; there will be no answer."""


class Inbox:
    """Queue of events with answers to calls; safe to use from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held by the one thread that works on the queue
        self._work: Callable[[], None] | None = None
        self._wanted = threading.Event()  # there is work for the loop
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Answer]] = {}
        self._is_closed = False

    def post(self, item: Event | object) -> None:
        """Add an event, or a note of the shell to itself."""
        self._queue.put(item)
        self._wanted.set()

    def begin(self, work: Callable[[], None]) -> None:
        """Have `work` process queued items from now on, in its turn, in the thread of a call or of the loop.

        Args:
            work: Must not take longer than a caller can wait, and must not raise.
        """
        self._work = work

    def end(self) -> None:
        """Wait for work in progress; later items stay queued."""
        with self._turn:
            self._work = None

    def in_turn(self, work: Callable[[], None]) -> None:
        """Run the loop's work while no other thread works."""
        with self._turn:
            work()
        self._leave_rest()

    def _work_at_once(self) -> None:
        """Work on the queue, unless another thread does."""
        if self._work is not None and self._turn.acquire(blocking=False):
            try:
                if self._work is not None:
                    self._work()
            finally:
                self._turn.release()
            self._leave_rest()

    def _leave_rest(self) -> None:
        """Leave items that came too late for a turn to the loop."""
        if not self._queue.empty():
            self._wanted.set()

    def wake(self) -> None:
        """End the loop's wait."""
        self._wanted.set()

    def wait(self, timeout_s: float) -> None:
        """Wait in the loop until there is work or the time is over."""
        self._wanted.wait(max(0.0, timeout_s))
        self._wanted.clear()

    def next(self, timeout_s: float) -> Any | None:
        """Return the oldest item; None after the time-out."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def ask(self, make_event: Callable[[int], Event]) -> tuple[int, Future[Answer]]:
        """Queue the event of a new call, and process it unless another thread is working.

        Args:
            make_event: Makes the event, given the call's number.

        Returns:
            The call's number, and the future of its answer.

        Raises:
            InboxClosed: The master is ending.
        """
        future: Future[Answer] = Future()
        call = next(self._numbers)
        event = make_event(call)
        with self._lock:
            if self._is_closed:
                raise InboxClosed
            self._calls[call] = future
        self._queue.put(event)
        self._work_at_once()
        return call, future

    def answer(self, call: int, answer: Answer) -> None:
        """Resolve a call; ignore one whose caller has gone."""
        future = self._forget(call)
        if future is not None:
            future.set_result(answer)

    def abandon(self, call: int) -> bool:
        """Give up a call and cancel its future; return False if it was answered or given up before."""
        future = self._forget(call)
        return future is not None and future.cancel()

    def close(self) -> None:
        """End every pending and every later call with `InboxClosed`."""
        with self._lock:
            self._is_closed = True
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(InboxClosed())

    def _forget(self, call: int) -> Future[Answer] | None:
        with self._lock:
            return self._calls.pop(call, None)
