"""Prefetches training minibatches of this member's leases in a background thread; `take` never blocks on the master.

A member without work must not hold up the others, which wait for its header.  `LeasePrefetcher` draws leases only,
ahead of their use; `LocalLeases` are given by rank 0 of a group.  A lease counts as held from the moment it arrives, so
heartbeats renew it until it is taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from elasticdl.frameworks.framework import Batch, FeedError, Framework, TaskRecords
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.tasks import HeldLease, LeaseBook, LeaseSource, TaskStream
from elasticdl_client.errors import DataError

_AHEAD = 2  # minibatches made ahead, not taken yet
_POLL_S = 2.0
_INPUT_S = 1.0  # how long the other members may have to wait for this member's input


class PrefetchInterrupted(Exception):
    """The prefetcher restarts: the current request for a lease is cancelled."""


class Requests(LeaseSource, Protocol):
    """The source of a prefetcher's leases."""

    def interrupt(self) -> None:
        """Make the current request, or the next one, raise `PrefetchInterrupted`.  Thread-safe."""
        ...

    def clear(self) -> None:
        """Answer requests again."""
        ...


class InterruptibleLeases:
    """Requests leases from the master, until it is interrupted."""

    def __init__(self, link: MasterLink) -> None:
        self.leases = link.leases
        self._link = link
        self._is_interrupted = threading.Event()

    def interrupt(self) -> None:
        self._is_interrupted.set()

    def clear(self) -> None:
        self._is_interrupted.clear()

    def request_lease(self) -> HeldLease | None:
        """See `LeaseSource`.

        Raises:
            PrefetchInterrupted: `interrupt` was called.
        """
        while not self._is_interrupted.is_set():
            is_answered, held = self._link.poll_lease(_POLL_S)
            if is_answered:
                return held
        raise PrefetchInterrupted

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        return self._link.lease_at_once(only)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The records of a lease could not be read."""

    held: HeldLease
    error: DataError


@dataclass(frozen=True, slots=True)
class Other:
    """A lease that is not for training; the prefetcher pauses until `BatchPrefetcher.resume`."""

    held: HeldLease


@dataclass(frozen=True, slots=True)
class Failed:
    """User code raised; the prefetcher pauses until `BatchPrefetcher.resume`."""

    error: FeedError


@dataclass(frozen=True, slots=True)
class Over:
    """The job is over."""


@dataclass(frozen=True, slots=True)
class Broke:
    """The prefetcher has ended by an error in ElasticDL itself."""

    error: BaseException


Item = Batch | Unreadable | Other | Failed | Over | Broke


class BatchPrefetcher:
    """Makes training minibatches in a background thread.  `take`, `resume` and `restart` are called by one thread."""

    def __init__(self, tasks: TaskStream, requests: Requests, framework: Framework) -> None:
        """
        Args:
            tasks: The stream of this prefetcher's tasks; it draws from `requests`, and has no other reader.
        """
        self._tasks = tasks
        self._requests = requests
        self._framework = framework
        self._leases = requests.leases
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._num_making = 0  # leases whose records were drawn, and whose end is not queued yet
        self._run_number = 0
        self._is_paused = False
        self._is_restarting = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="batch-prefetcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, timeout_s: float) -> Item | None:
        """Return the next item; None if there is none now.

        Args:
            timeout_s: The longest wait for a lease; while a lease is being read, this waits for its input.
        """
        begun = time.monotonic()
        with self._changed:
            while not self._items:
                limit = _INPUT_S if self._num_making else timeout_s
                left = begun + limit - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def next_batch(self) -> Batch | None:
        """Return the minibatch that `take` will return next, after ends of tasks; None if it is not known."""
        with self._changed:
            following = next((item for item in self._items if not (isinstance(item, Batch) and item.end)), None)
        return following if isinstance(following, Batch) else None

    def resume(self) -> None:
        """Continue after the last item: it has been handled."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def restart(self, again: Callable[[], Iterable[HeldLease]]) -> None:
        """Drop everything that is made, and begin again.

        Args:
            again: Returns the leases to give again from their start, including those already given completely or
                failed.  Called once nothing is being made, since a lease may arrive until then.
        """
        with self._changed:
            self._is_restarting = True
            self._requests.interrupt()
            others = [item.held for item in self._items if isinstance(item, Other)]  # not taken yet
            self._items = deque(item for item in self._items if isinstance(item, Broke))  # must be reported in any case
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_restarting or self._is_broken)
            self._tasks.reopen([*again(), *others])
            self._is_paused = False
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException as error:  # noqa: BLE001  raised again when it is taken
            with self._changed:
                self._is_broken = True
                self._items.append(Broke(error))
                self._changed.notify_all()

    def _work(self) -> bool:
        try:
            held = self._tasks.peek()
            if held is None:
                self._put(Over())
                self._pause()
            elif held.lease.type != pb.TRAINING or held.lease.merged:
                self._put(Other(held))
                self._tasks.close(held)
                self._pause()
            else:
                self._feed()
        except PrefetchInterrupted:
            self._begin_anew()
        return True

    def _feed(self) -> None:
        try:
            with closing(self._tasks.batches(self._framework, pb.TRAINING, self._drawn())) as batches:
                for batch in batches:
                    self._give(batch)
        except FeedError as error:
            self._failed(error)

    def _drawn(self) -> Iterator[TaskRecords]:
        number = self._run_number
        for task in self._tasks.records(pb.TRAINING):
            with self._changed:
                if number != self._run_number:  # a late item of a dropped pipeline
                    return
                self._num_making += 1
            yield task

    def _give(self, batch: Batch) -> None:
        if not batch.end:
            self._put(batch)
            return
        held = self._leases.get(batch.lease)
        error = None if held is None else held.unreadable
        self._put(Unreadable(held, error) if held is not None and error is not None else batch)
        if held is not None:
            self._tasks.close(held)
        with self._changed:
            self._num_making -= 1
            self._changed.notify_all()

    def _failed(self, error: FeedError) -> None:
        with self._changed:
            self._num_making = 0
            self._run_number += 1
        held = self._leases.get(error.lease)
        if held is not None:
            self._tasks.close(held)
        self._put(Failed(error))
        self._pause()

    def _put(self, item: Item) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_restarting or len(self._items) < _AHEAD)
            if self._is_restarting:
                raise PrefetchInterrupted
            self._items.append(item)
            self._is_paused = isinstance(item, Over | Other | Failed)  # set here: the taker may resume at once
            self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_restarting or not self._is_paused)
            if self._is_restarting:
                raise PrefetchInterrupted

    def _begin_anew(self) -> None:
        self._requests.clear()
        with self._changed:
            self._num_making = 0
            self._run_number += 1
            self._is_restarting = False
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_paused)


class LocalLeases:
    """Leases that another member holds, given to this process's input pipeline one after another.

    Has the methods of `InterruptibleLeases`, but makes no calls to the master.
    """

    def __init__(self) -> None:
        self.leases = LeaseBook()
        self._changed = threading.Condition()
        self._given: deque[HeldLease] = deque()
        self._is_interrupted = False

    def give(self, held: HeldLease) -> None:
        """Queue a lease of `leases` to be drawn next."""
        with self._changed:
            self._given.append(held)
            self._changed.notify_all()

    def take_all_back(self) -> None:
        """Drop all leases."""
        with self._changed:
            self._given.clear()
        self.leases.revoke([held.id for held in self.leases.held()])

    def interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._is_interrupted = False

    def request_lease(self) -> HeldLease | None:
        """Wait for a lease and return it; it may have been taken back meanwhile.

        Raises:
            PrefetchInterrupted: the prefetcher restarts.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._given) or self._is_interrupted)
            if self._is_interrupted:
                raise PrefetchInterrupted
            return self._given.popleft()

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        return None


class LeasePrefetcher:
    """Draws every lease that the master grants, in a background thread; `take` must be called by one thread."""

    def __init__(self, requests: InterruptibleLeases) -> None:
        self._requests = requests
        self._changed = threading.Condition()
        self._drawn: deque[HeldLease | None] = deque()
        self._error: BaseException | None = None  # why no more leases come

    def start(self) -> None:
        threading.Thread(target=self._run, name="lease-prefetcher", daemon=True).start()

    def take(self, timeout_s: float) -> list[HeldLease | None]:
        """Return all leases that have come, waiting for the first one; None among them: the job is over.

        Raises:
            MasterGone: the thread has ended by it; no more leases come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._drawn or self._error, timeout_s)
            taken = list(self._drawn)
            self._drawn.clear()
            if self._error is not None and not taken:
                raise self._error
            return taken

    def _run(self) -> None:
        try:
            while True:
                held = self._requests.request_lease()
                with self._changed:
                    self._drawn.append(held)
                    self._changed.notify_all()
                if held is None:
                    return
        except BaseException as error:  # noqa: BLE001  raised again by `take`
            with self._changed:
                self._error = error
                self._changed.notify_all()
