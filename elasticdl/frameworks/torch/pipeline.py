"""The input pipeline of one mode: a thread makes minibatches of tasks, two ahead of the one being computed.

Owns the order of minibatches and the end marks of tasks, and turns errors of user code into `FeedError`.  It never
retries and never looks inside a record.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords
from elasticdl.frameworks.torch.randomness import OwnGenerator
from elasticdl.frameworks.torch.samples import Feed

_AHEAD = 2
_NUMPY_SEEDS = 2**32
_THREAD_NAME = "elasticdl-input"


class TensorPipeline:
    """Minibatches of tasks, for one mode."""

    def __init__(self, mode: Mode, feed: Feed) -> None:
        self._mode = mode
        self._feed = feed

    def batches(self, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`."""
        run = _Run(self._mode, self._feed, tasks)
        try:
            while (batch := run.take()) is not None:
                yield batch
        finally:
            run.close()


class _Closed(Exception):
    """The consumer takes no more minibatches."""


class _Run:
    """One thread from the first task to the last; it ends when its consumer does."""

    def __init__(self, mode: Mode, feed: Feed, tasks: Iterator[TaskRecords]) -> None:
        self._mode = mode
        self._feed = feed
        self._tasks = tasks
        self._changed = threading.Condition()
        self._made: deque[Batch | BaseException | None] = deque()  # None: no more
        self._num_taken = 0  # tasks out of `tasks`
        self._num_ended = 0  # tasks whose end was given out
        self._closed = False
        threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True).start()

    def take(self) -> Batch | None:
        """The next minibatch or end of a task; None after the last one.

        Raises:
            FeedError: user code raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            made = self._made.popleft()
            if isinstance(made, Batch) and made.end:
                self._num_ended += 1
            self._changed.notify_all()
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                self._run_task(task)
            self._put(None)
        except _Closed:
            return
        except BaseException as error:  # noqa: BLE001  raised again where the batch is taken
            self._put_last(error)

    def _next_task(self) -> TaskRecords | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_taken <= self._num_ended + 1)
            if self._closed:
                raise _Closed
            self._num_taken += 1
        return next(self._tasks, None)

    def _run_task(self, task: TaskRecords) -> None:
        n = num_samples = 0
        chance = OwnGenerator()
        chance.generator.manual_seed(task.seed)
        random.seed(task.seed)
        np.random.seed(task.seed % _NUMPY_SEEDS)
        try:
            with chance:
                for size, examples in self._feed.minibatches(task.records):
                    self._put(Batch(task.lease, n, size=size, data=examples))
                    n += 1
                    num_samples += size
        except _Closed:
            raise
        except (Exception, SystemExit) as error:
            raise FeedError(task.lease, n, f"{type(error).__name__}: {error}") from error
        self._put(Batch(task.lease, n, end=True, surplus=Surplus(num_samples - len(task.records))))

    def _put(self, made: Batch | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._made) < _AHEAD)
            if self._closed:
                raise _Closed
            self._made.append(made)
            self._changed.notify_all()

    def _put_last(self, error: BaseException) -> None:
        with self._changed:
            self._made.append(error)
            self._changed.notify_all()
