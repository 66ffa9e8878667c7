"""The input pipeline of one mode: a thread makes minibatches of tasks, two ahead of the one being computed.

Owns the order of minibatches and the end markers of tasks, and converts errors of user code to `FeedError`.  It never
retries and never parses a record.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

import torch

from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords
from elasticdl.frameworks.torch.input_processes import InputProcesses, ProcessSource
from elasticdl.frameworks.torch.model import own_device
from elasticdl.frameworks.torch.randomness import seeded_task
from elasticdl.frameworks.torch.samples import Feed

_AHEAD = 2
_THREAD_NAME = "elasticdl-input"


class TensorPipeline:
    """Minibatches of tasks, for one mode."""

    def __init__(self, mode: Mode, feed: Feed, processes: InputProcesses | None) -> None:
        """
        Args:
            mode: The mode for `feed`.
            feed: The user's feed.
            processes: Processes that run `feed`; None: the pipeline's thread runs it.
        """
        self._mode = mode
        self._feed = feed
        self._processes = processes

    def batches(self, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`."""
        source = _ThreadSource(self._feed) if self._processes is None else self._processes.open(self._mode)
        run = _Run(source, tasks)
        try:
            while (batch := run.take()) is not None:
                yield batch
        finally:
            run.close()


class _Closed(Exception):
    """The consumer takes no more minibatches."""


class _ThreadSource:
    """Makes minibatches in the calling thread.

    Attributes:
        num_ahead: Number of tasks to get in addition to the one in progress.
    """

    num_ahead = 1

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def batches(self, tasks: Iterator[TaskRecords]) -> Generator[Batch, None, None]:
        """See `Framework.batches`."""
        for task in _ReadAhead(tasks):
            n = num_samples = 0
            try:
                with seeded_task(task.seed):
                    for size, examples in self._feed.minibatches(task.records):
                        yield Batch(task.lease, n, size=size, data=examples)
                        n += 1
                        num_samples += size
            except (Exception, SystemExit) as error:
                raise FeedError(task.lease, n, f"{type(error).__name__}: {error}") from error
            yield Batch(task.lease, n, end=True, surplus=Surplus(num_samples - len(task.records)))

    def close(self) -> None:
        """End the iteration from another thread; nothing to do here."""


class _ReadAhead(Iterator[TaskRecords]):
    """Tasks whose records are read in a thread of their own, while minibatches are made of the one before.

    The end of reading, and its error, show after all tasks before it.
    """

    def __init__(self, tasks: Iterator[TaskRecords]) -> None:
        self._read: queue.SimpleQueue[TaskRecords | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(tasks,), name=f"{_THREAD_NAME}-records", daemon=True).start()

    def __next__(self) -> TaskRecords:
        read = self._read.get()
        if isinstance(read, BaseException):
            raise read
        return read

    def _run(self, tasks: Iterator[TaskRecords]) -> None:
        try:
            for task in tasks:
                self._read.put(task)
                del task  # else its records stay in memory until the next task
            self._read.put(StopIteration())
        except BaseException as error:  # noqa: BLE001  raised again where the tasks are taken
            self._read.put(error)


class _Run:
    """One thread from the first task to the last; it ends when its consumer does."""

    def __init__(self, source: _ThreadSource | ProcessSource, tasks: Iterator[TaskRecords]) -> None:
        self._source = source
        self._tasks = tasks
        self._changed = threading.Condition()
        self._made: deque[Batch | BaseException | None] = deque()  # None: no more
        self._num_taken = 0  # number of tasks taken from `tasks`
        self._num_ended = 0  # number of tasks with a returned end marker
        self._closed = False
        device = own_device()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        threading.Thread(target=self._work, name=_THREAD_NAME, daemon=True).start()

    def take(self) -> Batch | None:
        """Return the next minibatch or end marker; None after the last one.

        Raises:
            FeedError: User code raised.
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
        self._source.close()

    def _work(self) -> None:
        try:
            with closing(self._source.batches(iter(self._next_task, None))) as batches:
                for batch in batches:
                    self._put(self._ahead(batch))
            self._put(None)
        except _Closed:
            return
        except BaseException as error:  # noqa: BLE001  raised again where the batch is taken
            self._put_last(error)

    def _next_task(self) -> TaskRecords | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_taken <= self._num_ended + self._source.num_ahead)
            if self._closed:
                raise _Closed
            self._num_taken += 1
        return next(self._tasks, None)

    def _ahead(self, batch: Batch) -> Batch:
        """Copy a minibatch to the GPU, if there is one, while the previous one is computed."""
        if self._copies is None or batch.end:
            return batch
        return replace(batch, data=batch.data.copied_ahead(self._copies))

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
