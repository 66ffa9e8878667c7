"""TensorBoard: the events of the job, as event files in --tensorboard_log_dir; their format is TensorBoard's own.

Every generation of the master begins a file of its own and says from which step on it continues, so that nothing that
an earlier generation may have left half-written is touched, and no step is shown twice.  A thread of its own writes: a
slow or full disk never holds up the job, of which nothing is decided here.  Storage cannot append: a file for it lies
on the disk of the master meanwhile, and is published whole again and again.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from elasticdl.storage.paths import RemotePath, path_of
from elasticdl_client.errors import JobError, StorageError
from elasticdl_client.goodput import goodput
from elasticdl_client.job_status import JobStatus

EVALUATION_PREFIX = "evaluation/"  # of the metrics' tags
TIME_PREFIX = "time/"  # of the workers' seconds by state
_PUBLISH_S = 30.0  # between two uploads of a file
_MAX_BYTES = 4 << 20  # of a file that is uploaded again; then the next one is begun
_RETRY_S = 30.0  # after a write that failed
_BEGUN = re.compile(r"events\.out\.tfevents\.(\d+)\.")  # when a file was, in seconds since the Unix epoch

logger = logging.getLogger("elasticdl.master")


class Watcher(Protocol):
    """Receives the progress of the job from the shell; called in its thread, so it must return at once."""

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation has these numbers."""
        ...

    def look(self, status: JobStatus) -> None:
        """The job as it is now; about once a second."""
        ...

    def close(self) -> None:
        """The master's generation ends."""
        ...


class NullWatcher:
    """A watcher that does nothing."""

    def measured(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def look(self, status: JobStatus) -> None: ...

    def close(self) -> None: ...


def watcher(directory: str, generation: int, step: int) -> Watcher:
    """Return the writer for a directory, or a `NullWatcher` for an empty name.

    Args:
        generation: of this master.
        step: the model version with which it begins.

    Raises:
        JobError: the directory cannot be written, or a package is missing.
    """
    return TensorBoardLog(directory, generation, step) if directory else NullWatcher()


@dataclass(frozen=True, slots=True)
class _Scalars:
    """Numbers of a moment."""

    step: int
    values: Mapping[str, float]
    at: float = field(default_factory=time.time)


class ProgressScalars:
    """The numbers of a job as it continues: those that are new since the call before."""

    def __init__(self) -> None:
        self._last_step = -1
        self._last_workers = -1
        self._last_staleness: Sequence[int] | None = None  # not looked at yet

    def of(self, status: JobStatus) -> dict[str, float]:
        """Return numbers by tag: of the workers when they change, the others when the model does."""
        values: dict[str, float] = {}
        if status.workers_alive != self._last_workers:
            values["workers"] = self._last_workers = status.workers_alive
        if status.model_version != self._last_step:
            self._last_step = status.model_version
            values["records_per_second"] = status.records_per_second
            values["goodput"] = goodput(status.worker_seconds)
            values |= {TIME_PREFIX + state: seconds for state, seconds in status.worker_seconds.items()}
            for name, value in (("loss", status.loss), ("learning_rate", status.learning_rate)):
                if value is not None:
                    values[name] = value
            before, self._last_staleness = self._last_staleness, status.staleness
            if before is not None and (staleness := mean_staleness(before, status.staleness)) is not None:
                values["staleness"] = staleness
        return values


class TensorBoardLog:
    """See `Watcher`."""

    def __init__(self, directory: str, generation: int, step: int) -> None:
        path = path_of(directory)
        takes_over_at = step + 1 if generation > 1 else None
        self._files = (
            PublishedEventFiles(path, generation, takes_over_at)
            if isinstance(path, RemotePath)
            else EventFiles(Path(directory), generation, takes_over_at)
        )
        # Of a later generation the job runs, and storage may not answer: the first event begins the file.
        if generation == 1 and not isinstance(path, RemotePath):
            self._files.open()
        self._queue: queue.SimpleQueue[_Scalars | None] = queue.SimpleQueue()
        self._scalars = ProgressScalars()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue.put(_Scalars(step, {EVALUATION_PREFIX + name: value for name, value in metrics.items()}))

    def look(self, status: JobStatus) -> None:
        values = self._scalars.of(status)
        if values:
            self._queue.put(_Scalars(status.model_version, values))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self._files.close_s)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_PUBLISH_S)
            except queue.Empty:
                self._files.publish()
                continue
            if item is None:
                break
            self._files.write(item.step, item.values, item.at)
        self._files.close()


class EventFiles:
    """Appends to one file; after an error to a new one.

    Attributes:
        close_s: time that the master's end waits for pending writes.
    """

    close_s = 5.0

    def __init__(self, directory: Path, generation: int, takes_over_at: int | None = None) -> None:
        """
        Args:
            takes_over_at: the first step of a generation that continues the files of another one.

        Raises:
            JobError: the package that knows the format is not installed.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2  # its writer of records would import boto3, too
        except ImportError as error:
            raise JobError(
                f"--tensorboard_log_dir: the master has no package tensorboard ({error})",
                "install it where the master runs: pip install tensorboard",
            ) from error
        self._events, self._summaries = event_pb2, summary_pb2
        self._directory = directory
        self._generation = generation
        self._takes_over_at = takes_over_at  # until it is written
        self._num_files = 0
        self._path = directory  # of the newest file
        self._file: BinaryIO | None = None
        self._retry_at = 0.0

    def open(self) -> None:
        """Begins a file.

        Raises:
            JobError: it cannot be written.
        """
        try:
            self._open()
        except OSError as error:
            raise JobError(
                f"--tensorboard_log_dir={self._directory} cannot be written: {error.strerror}",
                "name a directory on a volume that the master may write",
            ) from error

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Numbers by tag.  A failure is logged, and writing goes on after a while."""
        if self._file is None and time.monotonic() < self._retry_at:
            return
        made = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        try:
            if self._file is None:
                self._open()
            self._write(self._events.Event(wall_time=at, step=step, summary=self._summaries.Summary(value=made)))
        except OSError as error:
            logger.warning("TensorBoard's events are left out for %.0f s: %s", _RETRY_S, error)
            self._end_file()
            self._retry_at = time.monotonic() + _RETRY_S

    def publish(self) -> None:
        """Show what has been written; does nothing: a file system shows it at once."""

    def close(self) -> None:
        """Close the writer; written events stay."""
        self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("TensorBoard's file was not closed: %s", error)
            self._file = None

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._num_files += 1
        # TensorBoard reads the files of a directory in the order of their names: no clock that is behind may change it.
        begun = max((int(found[1]) for name in self._names() if (found := _BEGUN.match(name))), default=0)
        stamp = max(int(time.time()), begun + 1)
        name = f"events.out.tfevents.{stamp:010d}.{self._generation:06d}.{self._num_files:04d}"
        self._path = self._directory / f"{name}.{socket.gethostname()}.{os.getpid()}"
        self._file = self._path.open("xb")
        self._write(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self._takes_over_at is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(self._events.Event(wall_time=time.time(), step=self._takes_over_at, session_log=start))
            self._takes_over_at = None

    def _names(self) -> list[str]:
        """The files that TensorBoard finds."""
        return [path.name for path in self._directory.iterdir()]

    def _write(self, event: Any) -> None:
        from elasticdl.data.tfrecord import framed  # NumPy, which a master without event files may not need

        assert self._file is not None
        self._file.write(framed(event.SerializeToString()))
        self._file.flush()


class PublishedEventFiles(EventFiles):
    """Writes on the disk of this machine and publishes each file whole, every 30 s and at the end."""

    close_s = 30.0

    def __init__(self, target: RemotePath, generation: int, takes_over_at: int | None = None) -> None:
        """See `EventFiles`."""
        self._scratch = tempfile.TemporaryDirectory(prefix="elasticdl-events-")
        super().__init__(Path(self._scratch.name), generation, takes_over_at)
        self._target = target
        self._published_bytes = 0  # of the newest file
        self._next_at = 0.0

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See `EventFiles`; files that storage does not take now stay on the disk, and are published later."""
        super().write(step, values, at)
        if time.monotonic() >= self._next_at:
            self.publish()

    def publish(self) -> None:
        """Publish the newest file, if there is anything new in it."""
        self._next_at = time.monotonic() + _PUBLISH_S
        if self._path == self._directory:
            return
        try:
            size_bytes = self._path.stat().st_size
            if size_bytes == self._published_bytes:
                return
            self._target.storage.publish((self._target / self._path.name).url, self._path)
        except (OSError, StorageError) as error:
            logger.warning("TensorBoard's events are published later: %s", error)
            return
        self._published_bytes = size_bytes
        if size_bytes > _MAX_BYTES:
            self._end_file()  # the next event begins another one
            self._path.unlink()
            self._published_bytes = 0
            self._path = self._directory

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._target.iterdir()]
        except (OSError, StorageError) as error:  # not there yet, or away
            logger.debug("%s cannot be listed: %s", self._target, error)
            return []

    def close(self) -> None:
        """Publish what is new, and close."""
        super().close()
        self.publish()
        self._scratch.cleanup()


def mean_staleness(before: Sequence[int], now: Sequence[int]) -> float | None:
    """Of the gradients taken between two histograms: 0, 1, 2, 3-4, 5-8, …; the middle of a range stands for it."""
    counts = [b - a for a, b in zip_longest(before, now, fillvalue=0)]
    total = sum(counts)
    if total <= 0:
        return None
    return sum(count * _middle(position) for position, count in enumerate(counts)) / total


def _middle(position: int) -> float:
    return float(position) if position < 3 else (2 ** (position - 2) + 1 + 2 ** (position - 1)) / 2
