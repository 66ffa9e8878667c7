"""The inbox: how all threads reach the core, which one thread at a time works on, and how calls get their answers.

The thread that asks does the work itself if no other thread is at it: so a call is answered without a change of
threads.  It owns the queue, the turn of the working thread and the futures of calls in flight.  It never looks at what
an event or an answer says.
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
    """The master ends; there will be no answer."""


class Inbox:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._turn = threading.Lock()  # of the one thread that works on what is queued
        self._work: Callable[[], None] | None = None
        self._wanted = threading.Event()  # the loop has something to do
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Answer]] = {}
        self._is_closed = False

    def post(self, item: Event | object) -> None:
        """Adds an event, or a note of the shell to itself."""
        self._queue.put(item)
        self._wanted.set()

    def begin(self, work: Callable[[], None]) -> None:
        """From now on `work` takes some of what is queued, in its turn, in the thread of a call or of the loop.

        Args:
            work: takes no longer than a caller can wait, and raises nothing.
        """
        self._work = work

    def end(self) -> None:
        """Waits for the work under way; later items stay queued."""
        with self._turn:
            self._work = None

    def in_turn(self, work: Callable[[], None]) -> None:
        """The loop's: does something while no other thread works."""
        with self._turn:
            work()
        self._leave_rest()

    def _work_at_once(self) -> None:
        """Works on what is queued, unless another thread is at it."""
        if self._work is not None and self._turn.acquire(blocking=False):
            try:
                if self._work is not None:
                    self._work()
            finally:
                self._turn.release()
            self._leave_rest()

    def _leave_rest(self) -> None:
        """Leaves to the loop the items that came in too late for a turn."""
        if not self._queue.empty():
            self._wanted.set()

    def wake(self) -> None:
        """Ends the loop's wait."""
        self._wanted.set()

    def wait(self, timeout_s: float) -> None:
        """The loop's: waits until there is something to do, or the time is over."""
        self._wanted.wait(max(0.0, timeout_s))
        self._wanted.clear()

    def next(self, timeout_s: float) -> Any | None:
        """The oldest item; None after the time-out."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def ask(self, make_event: Callable[[int], Event]) -> tuple[int, Future[Answer]]:
        """Queues the event of a new call, and works on it if no other thread is at work.

        Args:
            make_event: given the call's number.

        Returns:
            The number, and the future of its answer.

        Raises:
            Closed: the master ends.
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
        """Resolves a call; one whose caller has gone is forgotten."""
        future = self._forget(call)
        if future is not None:
            future.set_result(answer)

    def abandon(self, call: int) -> bool:
        """Gives up waiting for a call, whose future is cancelled; False if it is answered or given up already."""
        future = self._forget(call)
        return future is not None and future.cancel()

    def close(self) -> None:
        """Every call in flight and every later one ends with `InboxClosed`."""
        with self._lock:
            self._is_closed = True
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(InboxClosed())

    def _forget(self, call: int) -> Future[Answer] | None:
        with self._lock:
            return self._calls.pop(call, None)
