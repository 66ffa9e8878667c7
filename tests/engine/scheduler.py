"""Processes and threads of a simulated machine room: one real thread, a scripted clock, a seeded order of events.

A simulated thread is a greenlet that runs the worker's own code.  It gives way where a real one could be interrupted:
at a lock, at a condition, at a call to another process.  Which thread continues is drawn from the seed; time passes
when none can.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from greenlet import GreenletExit, getcurrent, greenlet

from elasticdl_client.errors import ElasticDLError

GIVES_WAY = 0.1  # the share of the operations on locks and conditions at which another thread takes over
_HELD_UP = (0.0, 0.01, 0.06)  # and at which this one does not continue for a while; one of these for a whole run
_HELD_UP_S = 0.3


@dataclass(eq=False, slots=True)
class Process:
    """A simulated process: its threads end together.

    Attributes:
        is_stopped: by SIGSTOP.
        pace_s: from being woken to running, at most: a slow machine.
        on_exit: called with its exit code, once, when it ends by itself.
    """

    name: str
    on_exit: Callable[[int], None]
    threads: list[SimulatedThread] = field(default_factory=list)
    is_over: bool = False
    is_stopped: bool = False
    pace_s: float = 0.0


@dataclass(eq=False, slots=True)
class SimulatedThread:
    """A thread of a process.

    Attributes:
        wait_number: of its present or last wait; timers of earlier ones are void.
        is_timed_out: the last wait ended by its time.
    """

    process: Process
    name: str
    greenlet: Any = None
    wait_number: int = 0
    is_waiting: bool = False
    is_timed_out: bool = False
    is_over: bool = False
    waiters: list[SimulatedThread] = field(default_factory=list)  # of its end


class Scheduler:
    """Runs simulated threads one at a time, and owns the time."""

    def __init__(self, seed: random.Random) -> None:
        self.random = seed
        self._held_up = seed.choice(_HELD_UP)
        self.now = 0.0
        self._hub = getcurrent()
        self._ready: list[SimulatedThread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._running: SimulatedThread | None = None

    @property
    def running(self) -> SimulatedThread:
        """The thread that runs now."""
        assert self._running is not None, "no simulated thread runs"
        return self._running

    @property
    def is_inside(self) -> bool:
        """Whether the caller is a simulated thread, and may wait."""
        return self._running is not None

    # For the room -----------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        """Call `do` after a time, outside of all threads."""
        heapq.heappush(self._timers, (self.now + delay_s, next(self._numbers), do))

    def spawn(self, process: Process, name: str, run: Callable[[], None]) -> SimulatedThread:
        """Begin a thread of a process."""
        thread = SimulatedThread(process, name)
        thread.greenlet = greenlet(lambda: self._run(thread, run), self._hub)
        process.threads.append(thread)
        self._ready.append(thread)
        return thread

    def step(self) -> None:
        """Let one thread run until it waits, or else let time pass until the next timer."""
        ready = self._ready
        if len(ready) == 1 and not ready[0].process.is_stopped:  # no list is made, and nothing drawn
            thread = ready.pop()
        elif ready and (able := [thread for thread in ready if not thread.process.is_stopped]):
            thread = able[0] if len(able) == 1 else able[self.random.randrange(len(able))]
            ready.remove(thread)
        else:
            assert self._timers, "nothing will ever happen"
            moment, _, do = heapq.heappop(self._timers)
            if moment > self.now:
                self.now = moment
            do()
            return
        self._running = thread
        try:
            thread.greenlet.switch()
        finally:
            self._running = None

    def end(self, process: Process) -> None:
        """Kill a process: none of its threads does anything more."""
        process.is_over = True
        for thread in list(process.threads):
            if thread is not self._running and not thread.is_over:
                self._unwind(thread)
        self._ready = [thread for thread in self._ready if thread.process is not process]
        if self._running is not None and self._running.process is process:
            raise GreenletExit

    def _unwind(self, thread: SimulatedThread) -> None:
        """End a thread at the point where it waits; `finally` blocks run, but can neither wait nor reach anything."""
        thread.is_over, thread.is_waiting = True, False
        if thread.greenlet:
            before, self._running = self._running, thread
            thread.greenlet.parent = getcurrent()
            thread.greenlet.throw(GreenletExit)
            self._running = before

    def describe(self, processes: Iterable[Process]) -> str:
        """Return what every thread waits for."""
        lines = []
        for process in processes:
            for thread in process.threads:
                if not thread.is_over and thread.greenlet.gr_frame is not None:
                    lines.append(f"{process.name}, {thread.name}:")
                    lines += [line.rstrip() for line in traceback.format_stack(thread.greenlet.gr_frame)[-5:-1]]
        return "\n".join(lines)

    # For threads ------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `wake`; False: the time is over first."""
        thread = self._running
        assert thread is not None, "no simulated thread runs"
        thread.wait_number += 1
        thread.is_waiting, thread.is_timed_out = True, False
        if timeout_s is not None:
            number = thread.wait_number
            moment = self.now + max(0.0, timeout_s)
            heapq.heappush(self._timers, (moment, next(self._numbers), lambda: self._time_out(thread, number)))
        if thread.is_over or thread.process.is_over:
            raise GreenletExit
        self._hub.switch()
        return not thread.is_timed_out

    def wake(self, thread: SimulatedThread) -> None:
        """End a thread's wait; after its process's pace it continues."""
        if not thread.is_waiting or thread.is_over:
            return
        thread.is_waiting = False
        pace_s = thread.process.pace_s
        if pace_s:
            self.at(self.random.random() * pace_s, lambda: self._make_ready(thread))
        else:
            self._ready.append(thread)

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def maybe_give_way(self) -> None:
        """Another thread may run here."""
        drawn = self.random.random()
        if drawn < GIVES_WAY and self._running is not None:
            self.give_way(drawn)

    def give_way(self, drawn: float) -> None:
        """Let another thread run here.

        Args:
            drawn: below `GIVES_WAY`; the least make the running thread wait for a while.
        """
        thread = self.running
        if drawn < self._held_up:
            self.wait(self.random.random() * _HELD_UP_S)
        else:
            self._ready.append(thread)
            if thread.is_over or thread.process.is_over:
                raise GreenletExit
            self._hub.switch()

    def _make_ready(self, thread: SimulatedThread) -> None:
        if not thread.is_over:
            self._ready.append(thread)

    def _time_out(self, thread: SimulatedThread, number: int) -> None:
        if thread.is_waiting and thread.wait_number == number:
            thread.is_timed_out = True
            self.wake(thread)

    def _run(self, thread: SimulatedThread, run: Callable[[], None]) -> None:
        try:
            run()
        except GreenletExit:
            pass
        except ElasticDLError:  # a background thread that dies ends its process
            self.at(0.0, lambda: thread.process.on_exit(1))
        thread.is_over = True
        if not thread.process.is_over:
            for waiter in thread.waiters:
                self.wake(waiter)


class Lock:
    """As `threading.RLock`: of a simulated thread.

    A schedule takes hundreds of locks, nearly all of them free: the short way through is written out.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: SimulatedThread | None = None
        self._depth = 0
        self._waiting: list[SimulatedThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        thread = scheduler._running
        if thread is None:
            return True
        drawn = scheduler.random.random()
        if drawn < GIVES_WAY:
            scheduler.give_way(drawn)
        while self._owner is not None and self._owner is not thread:
            if not blocking:
                return False
            self._waiting.append(thread)
            is_woken = scheduler.wait(None if timeout < 0 else timeout)
            if thread in self._waiting:
                self._waiting.remove(thread)
            if not is_woken:
                return False
        self._owner = thread
        self._depth += 1
        return True

    def release(self, *_: object) -> None:
        if self._scheduler._running is not None:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                if self._waiting:
                    waiting, self._waiting = self._waiting, []
                    for thread in waiting:
                        self._scheduler.wake(thread)

    __enter__, __exit__ = acquire, release

    def hand_over(self) -> int:
        """Release it whole, however often it was acquired; how often that was."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Condition:
    """As `threading.Condition`: a thread that is not notified sleeps on, so a forgotten `notify_all` is found."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or Lock(scheduler)
        self._waiting: list[SimulatedThread] = []
        self._acquire, self._release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Self:
        self._acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._scheduler.running
        self._waiting.append(thread)
        depth = self._lock.hand_over()
        try:
            is_woken = self._scheduler.wait(timeout)
        finally:
            if thread in self._waiting:
                self._waiting.remove(thread)
        self._lock.take_back(depth)
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        result = predicate()
        while not result:
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify_all(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for thread in waiting:
                self._scheduler.wake(thread)


class Event:
    """As `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._condition = Condition(scheduler)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._condition:
            self._is_set = True
            self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._is_set, timeout))


class Thread:
    """As `threading.Thread`; of the process that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._run = lambda: target(*args)
        self.name = name
        self.daemon = daemon
        self._thread: SimulatedThread | None = None

    def start(self) -> None:
        self._thread = self._scheduler.spawn(self._scheduler.running.process, self.name, self._run)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_over

    def join(self, timeout: float | None = None) -> None:
        running, has_time = self._scheduler.running, True
        while has_time and self._thread is not None and not self._thread.is_over:
            self._thread.waiters.append(running)
            has_time = self._scheduler.wait(timeout)
            if not has_time:
                self._thread.waiters.remove(running)


class Threading:
    """Replaces the module `threading` in the worker's code."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> Lock:  # noqa: N802  the name of the module's
        return Lock(self._scheduler)

    def Condition(self) -> Condition:  # noqa: N802
        return Condition(self._scheduler)

    def Event(self) -> Event:  # noqa: N802
        return Event(self._scheduler)

    def Thread(self, **keywords: Any) -> Thread:  # noqa: N802
        return Thread(self._scheduler, **keywords)

    def Timer(self, interval: float, function: Callable[..., Any], args: Sequence[Any] = ()) -> Thread:  # noqa: N802
        def run() -> None:
            self._scheduler.sleep(interval)
            function(*args)

        return Thread(self._scheduler, run, name="timer")


class Time:
    """Replaces the module `time`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now
