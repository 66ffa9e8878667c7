"""The inbox: how every other thread reaches the one that owns the core, and how calls get their answers.

It owns the queue and the futures of calls in flight.  It never looks at what an event or an answer says.
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
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Answer]] = {}
        self._is_closed = False

    def post(self, item: Event | object) -> None:
        """Adds an event, or a note of the shell to itself."""
        self._queue.put(item)

    def next(self, timeout_s: float) -> Any | None:
        """The oldest item; None after the time-out."""
        try:
            return self._queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def ask(self, make_event: Callable[[int], Event]) -> tuple[int, Future[Answer]]:
        """Posts the event of a new call.

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
        self.post(event)
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
