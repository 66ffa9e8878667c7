"""Measure where a worker's time goes: the activities of its main thread, and the clock for them.

The master computes goodput from it (master/core/slot_time.py).  This module imports only what loads fast: a worker
imports it before it can catch SIGTERM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Activity(StrEnum):
    """The activity of a worker's main thread; heartbeats send it to the master."""

    START = "start"  # importing, loading and building the model
    COMPILE = "compile"  # the first minibatch
    COMPUTE = "compute"  # minibatches, and all work that is none of the other activities
    REPEAT = "repeat"  # computing a minibatch again because its gradient was too late
    PS = "ps"  # waiting for parameter servers
    COLLECTIVE = "world"  # AllReduce: waiting for other members in a step; the value is public, in the JSON status
    JOIN = "join"  # AllReduce: waiting for a group, and copying its model
    INPUT = "input"  # waiting for records and the user's feed
    EVALUATE = "evaluate"
    EXPORT = "export"
    CHECKPOINT = "checkpoint"
    IDLE = "idle"  # waiting for a task


class _During:
    """A context that counts its time as an activity; a class, since a generator would take twice as long."""

    __slots__ = ("_activity", "_before", "_clock")

    def __init__(self, clock: ActivityClock, activity: Activity) -> None:
        self._clock = clock
        self._activity = activity
        self._before = activity

    def __enter__(self) -> None:
        self._before = self._clock.switch(self._activity)

    def __exit__(self, *_: object) -> None:
        self._clock.switch(self._before)


class ActivityClock:
    """Counts the time of one thread per activity; any thread may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[Activity, float] = {}
        self._now = Activity.START
        self._since = time.monotonic()
        self._asks_for_task = False
        self._num_tasks = 0  # open tasks

    def switch(self, activity: Activity) -> Activity:
        """End the current activity and begin another; return the one that ended."""
        with self._lock:
            self._settle()
            before, self._now = self._now, activity
            return before

    def during(self, activity: Activity) -> _During:
        """Return a context that counts its time as `activity`."""
        return _During(self, activity)

    @contextmanager
    def without_task(self) -> Iterator[None]:
        """Return a context for a thread that waits for a task: it turns waiting for input into idle time.

        This holds only while no task is open.
        """
        self._set_asking(True)
        try:
            yield
        finally:
            self._set_asking(False)

    def _set_asking(self, value: bool) -> None:
        with self._lock:
            self._settle()
            self._asks_for_task = value

    def add_tasks(self, number: int) -> None:
        """Add to the number of open tasks (with minibatches being made or computed); `number` may be negative."""
        with self._lock:
            self._settle()
            self._num_tasks += number

    def _doing(self) -> Activity:
        has_no_task = self._asks_for_task and not self._num_tasks
        return Activity.IDLE if self._now is Activity.INPUT and has_no_task else self._now

    def read(self) -> tuple[Activity, dict[str, float]]:
        """Return the current activity, and the seconds of each activity so far."""
        with self._lock:
            self._settle()
            return self._doing(), {str(activity): seconds for activity, seconds in self._seconds.items()}

    def _settle(self) -> None:
        now = time.monotonic()
        doing = self._doing()
        self._seconds[doing] = self._seconds.get(doing, 0.0) + now - self._since
        self._since = now
