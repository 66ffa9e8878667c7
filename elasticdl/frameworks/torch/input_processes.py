"""Run `feed` in separate processes (`--input_workers`): each makes the minibatches of one task after another.

Owns the processes and the order of their results; `serve` runs in the processes.  A process runs as long as its worker.
If it ends earlier, its task fails as for an error of `feed`, and the process is restarted.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords
from elasticdl.frameworks.torch.randomness import seeded_task
from elasticdl.frameworks.torch.samples import Feed, TensorSamples
from elasticdl.frameworks.torch.shared_memory import MemorySpan, TaskMemory
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import DataError, ElasticDLError

_NICENESS = 10  # the training thread has priority if CPUs are scarce
_CLOSE_S = 1.0  # time for `feed` to complete a minibatch
_WHERE_KILLED = (
    "Signal 9 comes from the kernel where memory is short: give workers more, or take fewer --input_workers. Signals "
    "6, 7 and 11 are errors in native code that feed calls."
)
_WHERE_ENDED = "Nothing that feed calls may end the process; the log of the worker may have its last words."
_log = logging.getLogger("elasticdl.torch")


class InputProcessError(Exception):
    """The text of the traceback of an error that `feed` has raised in another process."""


@dataclass(frozen=True, slots=True)
class _Died:
    """The process of a task is no more; for people."""

    text: str


@dataclass(slots=True, eq=False)
class _SentTask:
    """A task on its way through a process."""

    task: TaskRecords
    request: FeedRequest
    memory: TaskMemory
    messages: deque[MinibatchMade | TaskMade | FeedRaised | _Died] = field(default_factory=deque)


class InputProcesses:
    """The input processes of a worker.  Thread-safe: several modes can use them at a time."""

    def __init__(
        self, begin: Callable[[], ModelDefinition], num_processes: int, minibatch_size: int, metadata: Metadata
    ) -> None:
        """
        Args:
            begin: Called once in each process, returns the module with its `feed`; must be picklable.
            num_processes: Number of processes.
            minibatch_size: Samples per minibatch.
            metadata: Passed to the user's `feed`.
        """
        self.changed = threading.Condition()
        self.num_processes = num_processes
        self._arguments = begin, minibatch_size, metadata
        self._processes: list[_Process] = []
        self._waiting: deque[_SentTask] = deque()  # for an idle process
        self._owner = os.getpid()
        self._is_closed = False

    def start(self) -> None:
        """Start the processes in the background; they import the module."""
        _log.info("Minibatches are made in %d processes", self.num_processes)
        threading.Thread(target=self._start_all, name="elasticdl-input-start", daemon=True).start()
        atexit.register(self.close)  # runs before the exit functions of `multiprocessing`, which wait for all processes

    def pids(self) -> list[int]:
        """Return the numbers of the processes, once they are started."""
        with self.changed:
            self._complete()
            return [process.pid for process in self._processes]

    def open(self, mode: Mode) -> ProcessSource:
        """Return a source of minibatches for one run of a pipeline."""
        return ProcessSource(self, mode)

    def close(self) -> None:
        """End all processes."""
        if os.getpid() != self._owner:
            return  # a fork of the worker
        with self.changed:
            self._is_closed = True  # from here on no process is started
        for process in self._processes:
            process.hang_up()
        until = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.end(until)

    def send(self, mode: Mode, task: TaskRecords) -> _SentTask:
        """Send a task to the next idle process.

        Raises:
            FeedError: The records cannot be sent.
        """
        try:
            memory = TaskMemory.create()
            records = memory.put_records(task.records)
        except ElasticDLError as error:
            raise FeedError(task.lease, 0, str(error), is_explained=True) from error
        sent = _SentTask(task, FeedRequest(mode, task.seed, records), memory)
        with self.changed:
            self._waiting.append(sent)
            self._assign()
        return sent

    def _assign(self) -> None:
        if self._waiting:  # only if needed: a module that ends its process would do so endlessly
            self._complete()
        for process in self._processes:
            while process.is_idle and self._waiting:
                sent = self._waiting.popleft()
                if not sent.memory.is_cancelled and not process.send(sent):
                    self._waiting.appendleft(sent)
                    break

    def _start_all(self) -> None:
        with self.changed:
            self._complete()

    def _complete(self) -> None:
        """Start the processes that are missing; waits until PyTorch is imported in the server that forks them."""
        if self._is_closed:
            return
        for number, process in enumerate(self._processes):
            if process.end_of is not None:
                _log.warning("An input process %s; another one is started", process.end_of)
                self._processes[number] = self._started(number)
        while len(self._processes) < self.num_processes:
            self._processes.append(self._started(len(self._processes)))

    def _started(self, number: int) -> _Process:
        return _Process(f"elasticdl-input-{number}", self._arguments, self.changed, self._assign)


class _Process:
    """The worker's side of one process.  Hold `changed` for all calls except `hang_up` and `end`.

    Attributes:
        end_of: How the process has ended; None: it runs.
    """

    def __init__(
        self, name: str, arguments: tuple[Any, ...], changed: threading.Condition, on_idle: Callable[[], None]
    ) -> None:
        """
        Args:
            name: Name of the process.
            arguments: Arguments of `serve`, after the socket.
            changed: Notified of every message.
            on_idle: Called when the task or the process has ended.
        """
        self.end_of: str | None = None
        self._changed = changed
        self._on_idle = on_idle
        self._sent: _SentTask | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Forked from a server process that has only imported PyTorch: this process has threads, CUDA and gRPC.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])
        self._process = context.Process(target=serve, args=(theirs, *arguments), name=name)
        self._process.start()
        self.pid: int = self._process.pid or 0
        theirs.close()
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)
        self._listener.start()

    @property
    def is_idle(self) -> bool:
        """Whether it can be sent a task."""
        return self._sent is None and self.end_of is None

    def send(self, sent: _SentTask) -> bool:
        """Send a task to the process; return False if the process has ended."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(sent.request)], [sent.memory.descriptor])
        except (BrokenPipeError, ConnectionResetError):
            return False
        self._sent = sent
        return True

    def hang_up(self) -> None:
        """Make the process end after its current minibatch."""
        if (sent := self._sent) is not None:
            sent.memory.cancel()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, until: float) -> None:
        """Wait for the end of the process; kill it after the deadline.

        Args:
            until: Deadline, by the monotonic clock.
        """
        self._listener.join(max(0.0, until - time.monotonic()))
        if self._listener.is_alive():
            os.kill(self.pid, signal.SIGKILL)  # the pid is still valid: the listener has not reaped it
            self._listener.join()

    def _listen(self) -> None:
        with suppress(ConnectionResetError):
            while data := self._socket.recv(MOST_BYTES):
                message: MinibatchMade | TaskMade | FeedRaised = pickle.loads(data)
                self._tell(message)
        self._process.join()
        exit_code = self._process.exitcode or 0
        if exit_code < 0:
            how, hint = f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})", _WHERE_KILLED
        else:
            how, hint = f"has ended with code {exit_code}", _WHERE_ENDED
        with self._changed:
            self.end_of = how
            self._socket.close()
            what = f"The input process that made the minibatches of this task {how}."
            self._tell(_Died(str(DataError(what, hint))))

    def _tell(self, message: MinibatchMade | TaskMade | FeedRaised | _Died) -> None:
        """Pass on a message about the process's task."""
        with self._changed:
            if self._sent is not None:
                self._sent.messages.append(message)
            if not isinstance(message, MinibatchMade):
                self._sent = None
                self._on_idle()
            self._changed.notify_all()


class ProcessSource:
    """The minibatches of one run of a pipeline, in the order of its tasks."""

    def __init__(self, processes: InputProcesses, mode: Mode) -> None:
        self.num_ahead = processes.num_processes
        self._processes = processes
        self._changed = processes.changed
        self._mode = mode
        self._drawn: deque[_SentTask | BaseException | None] = deque()  # None: no more
        self._is_closed = False

    def batches(self, tasks: Iterator[TaskRecords]) -> Generator[Batch, None, None]:
        """See `Framework.batches`; ends early when it is closed."""
        threading.Thread(target=self._draw, args=(tasks,), name="elasticdl-input-tasks", daemon=True).start()
        while isinstance(drawn := self._next(), _SentTask):
            yield from self._batches_of(drawn)
        if drawn is not None:
            raise drawn

    def close(self) -> None:
        """End the iteration from another thread."""
        with self._changed:
            self._is_closed = True
            for drawn in self._drawn:
                if isinstance(drawn, _SentTask):
                    drawn.memory.cancel()
            self._changed.notify_all()

    def _draw(self, tasks: Iterator[TaskRecords]) -> None:
        drawn: _SentTask | BaseException | None
        try:
            for task in tasks:
                drawn = self._processes.send(self._mode, task)
                if not self._add(drawn):
                    return
            drawn = None
        except BaseException as error:  # noqa: BLE001  raised again where the minibatches are taken
            drawn = error
        self._add(drawn)

    def _add(self, drawn: _SentTask | BaseException | None) -> bool:
        with self._changed:
            self._drawn.append(drawn)
            if self._is_closed and isinstance(drawn, _SentTask):
                drawn.memory.cancel()
            self._changed.notify_all()
            return not self._is_closed

    def _next(self) -> _SentTask | BaseException | None:
        with self._changed:
            self._changed.wait_for(lambda: self._drawn or self._is_closed)
            return None if self._is_closed else self._drawn.popleft()

    def _batches_of(self, sent: _SentTask) -> Iterator[Batch]:
        lease, n, num_samples = sent.task.lease, 0, 0
        try:
            while (message := self._message(sent)) is not None:
                match message:
                    case MinibatchMade(size=size, place=place):
                        yield Batch(lease, n, size=size, data=self._samples(sent, n, place))
                        n, num_samples = n + 1, num_samples + size
                    case TaskMade():
                        yield Batch(lease, n, end=True, surplus=Surplus(num_samples - len(sent.task.records)))
                        return
                    case FeedRaised(text=text, trace=trace):
                        raise FeedError(lease, n, text) from InputProcessError(f"in an input process\n{trace}")
                    case _Died(text=text):
                        raise FeedError(lease, n, text, is_explained=True)
        finally:
            sent.memory.cancel()

    def _message(self, sent: _SentTask) -> MinibatchMade | TaskMade | FeedRaised | _Died | None:
        """Return the next message about a task; None: this source is closed."""
        with self._changed:
            self._changed.wait_for(lambda: sent.messages or self._is_closed)
            return None if self._is_closed else sent.messages.popleft()

    @staticmethod
    def _samples(sent: _SentTask, n: int, place: MemorySpan) -> TensorSamples:
        try:
            samples: TensorSamples = sent.memory.get(place)
        except Exception as error:  # raised by a class of the user
            what = f"A minibatch of an input process cannot be taken: {type(error).__name__}: {error}"
            raise FeedError(sent.task.lease, n, what) from error
        return samples


MOST_BYTES = 1 << 16  # maximum size of a datagram
_MOST_TEXT = 8_000  # maximum characters of an error and of its traceback, with up to four bytes each
_NOT_FOR_IT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # ignored: may reach the whole pod; the worker decides


@dataclass(frozen=True, slots=True)
class FeedRequest:
    """A request to make the minibatches of a task; it is sent together with the task's memory.

    Attributes:
        records: Position of the records in that memory.
    """

    mode: Mode
    seed: int
    records: MemorySpan


@dataclass(frozen=True, slots=True)
class MinibatchMade:
    """The next minibatch of the task is in its memory; `size` is that in samples."""

    size: int
    place: MemorySpan


@dataclass(frozen=True, slots=True)
class TaskMade:
    """All minibatches of the task are made."""


@dataclass(frozen=True, slots=True)
class FeedRaised:
    """User code has raised: type and text, and the traceback."""

    text: str
    trace: str


class _Module:
    """The user's, loaded once: its `feed` for each mode."""

    def __init__(self, begin: Callable[[], ModelDefinition], minibatch_size: int, metadata: Metadata) -> None:
        self._begin = begin
        self._minibatch_size = minibatch_size
        self._metadata = metadata
        self._definition: ModelDefinition | None = None
        self._feeds: dict[Mode, Feed] = {}

    def load(self) -> ModelDefinition:
        if self._definition is None:
            self._definition = self._begin()
        return self._definition

    def feed(self, mode: Mode) -> Feed:
        if mode not in self._feeds:
            self._feeds[mode] = Feed.of(self.load(), mode, self._metadata, self._minibatch_size)
        return self._feeds[mode]


def serve(
    connection: socket.socket, begin: Callable[[], ModelDefinition], minibatch_size: int, metadata: Metadata
) -> NoReturn:
    """Serve requests until the worker closes the connection or ends; see `InputProcesses`."""
    os.nice(_NICENESS)
    for number in _NOT_FOR_IT:
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN not inherited by programs that `feed` starts
    threading.Thread(target=_end_with_worker, name="end", daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    module = _Module(begin, minibatch_size, metadata)
    with suppress(Exception, SystemExit):  # raised again with the first task
        module.load()
    with suppress(_HungUp, ConnectionResetError):
        while (received := _received(connection)) is not None:
            _make(connection, module, *received)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # like the worker: threads of the user's packages may still be waiting


def _received(connection: socket.socket) -> tuple[FeedRequest, TaskMemory] | None:
    data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
    return (pickle.loads(data), TaskMemory(*descriptors)) if data else None


def _make(connection: socket.socket, module: _Module, request: FeedRequest, memory: TaskMemory) -> None:
    answer: TaskMade | FeedRaised = TaskMade()
    try:
        records = memory.get_records(request.records)
        feed = module.feed(request.mode)
        with seeded_task(request.seed):
            for size, samples in feed.minibatches(records):
                if memory.is_cancelled:
                    break
                _send(connection, MinibatchMade(size, memory.put(samples)))
    except _HungUp:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  raised again in the worker
        text, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        answer = FeedRaised(text[:_MOST_TEXT], trace[-_MOST_TEXT:])
    _send(connection, answer)


class _HungUp(Exception):
    """The worker has; an error of its own, as `feed` may lose connections of the user's."""


def _send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    try:
        connection.send(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _HungUp from error


def _end_with_worker() -> None:
    """End this process when the worker ends: it may be killed while `feed` runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
