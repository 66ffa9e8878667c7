"""One input process: makes the minibatches of the tasks that it is sent, one after the other, until its worker ends.

It draws no task and knows no lease.  Messages are datagrams; records and minibatches are in the memory of their task.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.torch.randomness import seeded_task
from elasticdl.frameworks.torch.samples import Feed
from elasticdl.frameworks.torch.shared_memory import MemorySpan, TaskMemory
from elasticdl.model_def import ModelDefinition

MOST_BYTES = 1 << 16  # of a datagram
_MOST_TEXT = 12_000  # characters of an error, of up to four bytes
_NOT_FOR_IT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # may reach the whole pod; its worker decides


@dataclass(frozen=True, slots=True)
class FeedRequest:
    """Make the minibatches of a task, whose memory comes with it.

    Attributes:
        records: where they are in its memory.
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
    """Runs until the worker hangs up or ends; see `InputProcesses`."""
    for number in _NOT_FOR_IT:
        signal.signal(number, lambda *_: None)  # a handler, which programs that `feed` starts do not inherit
    threading.Thread(target=_end_with_worker, name="end", daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    module = _Module(begin, minibatch_size, metadata)
    with suppress(Exception, SystemExit):  # raised again with the first task
        module.load()
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker has hung up
        while (received := _received(connection)) is not None:
            _make(connection, module, *received)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the worker does: threads of the user's packages may still wait for something


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
    except (BrokenPipeError, ConnectionResetError):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  raised again in the worker
        text, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        answer = FeedRaised(text[:_MOST_TEXT], trace[-_MOST_TEXT:])
    _send(connection, answer)


def _send(connection: socket.socket, message: Any) -> None:
    connection.send(pickle.dumps(message))


def _end_with_worker() -> None:
    """The worker may be killed while `feed` runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
