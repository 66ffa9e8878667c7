"""TensorBoard: the progress of the job, as event files in --tensorboard_log_dir, in TensorBoard's own format.

Every generation of the master begins a file of its own and writes from which step it continues, so that files that an
earlier generation may have left half-written are not touched, and no step is shown twice.  A background thread writes:
a slow or full disk never delays the job, and no decision of the job depends on it.  Storage cannot append: a file for
it is on the master's disk meanwhile, and is published as a whole again and again.
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

EVALUATION_PREFIX = "evaluation/"  # of the tags of metrics
TIME_PREFIX = "time/"  # of the tags of the workers' seconds by state
_PUBLISH_S = 30.0  # between two uploads of a file
_MAX_BYTES = 4 << 20  # of a file that is uploaded repeatedly; then the next one is begun
_RETRY_S = 30.0  # after a failed write
_BEGUN = re.compile(r"events\.out\.tfevents\.(\d+)\.")  # beginning of a file, in seconds since the Unix epoch

logger = logging.getLogger("elasticdl.master")


class Watcher(Protocol):
    """Receives the progress of the job from the shell; called in its thread, so it must return at once."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the results of an evaluation."""
        ...

    def on_status(self, status: JobStatus) -> None:
        """Handle the present status of the job; called about once a second."""
        ...

    def close(self) -> None:
        """Handle the end of the master's generation."""
        ...


class NullWatcher:
    """A watcher that does nothing."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_status(self, status: JobStatus) -> None: ...

    def close(self) -> None: ...


def watcher(directory: str, generation: int, step: int) -> Watcher:
    """Return the writer for a directory, or a `NullWatcher` for an empty name.

    Args:
        generation: Number of this generation of the master.
        step: The model version with which it begins.

    Raises:
        JobError: The directory cannot be written, or a package is missing.
    """
    return TensorBoardLog(directory, generation, step) if directory else NullWatcher()


@dataclass(frozen=True, slots=True)
class _Scalars:
    """Numbers at one time."""

    step: int
    values: Mapping[str, float]
    at: float = field(default_factory=time.time)


class ProgressScalars:
    """The numbers of a running job that have changed since the previous call."""

    def __init__(self) -> None:
        self._last_step = -1
        self._last_workers = -1
        self._last_staleness: Sequence[int] | None = None  # unknown before the first call

    def of(self, status: JobStatus) -> dict[str, float]:
        """Return numbers by tag: those of the workers when they change, the others when the model does."""
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
        # In a later generation the job runs already, and storage may not answer: the first event begins the file.
        if generation == 1 and not isinstance(path, RemotePath):
            self._files.open()
        self._queue: queue.SimpleQueue[_Scalars | None] = queue.SimpleQueue()
        self._scalars = ProgressScalars()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue.put(_Scalars(step, {EVALUATION_PREFIX + name: value for name, value in metrics.items()}))

    def on_status(self, status: JobStatus) -> None:
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
        close_s: Seconds that the master's end waits for pending writes.
    """

    close_s = 5.0

    def __init__(self, directory: Path, generation: int, takes_over_at: int | None = None) -> None:
        """Prepare a writer.

        Args:
            takes_over_at: The first step of a generation that continues the files of another one.

        Raises:
            JobError: The package for the format is not installed.
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
        self._path = directory  # the newest file
        self._file: BinaryIO | None = None
        self._retry_at = 0.0

    def open(self) -> None:
        """Begin a file.

        Raises:
            JobError: The file cannot be written.
        """
        try:
            self._open()
        except OSError as error:
            raise JobError(
                f"--tensorboard_log_dir={self._directory} cannot be written: {error.strerror}",
                "name a directory on a volume that the master may write",
            ) from error

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write numbers by tag.  A failure is logged, and writing continues after a while."""
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
        """Publish what has been written; does nothing, since a file system shows it at once."""

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
        # TensorBoard reads the files of a directory in the order of their names, which a late clock must not change.
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
        """Return the names of the files that TensorBoard finds."""
        return [path.name for path in self._directory.iterdir()]

    def _write(self, event: Any) -> None:
        from elasticdl.data.tfrecord import framed  # imports NumPy, only for masters with event files

        assert self._file is not None
        self._file.write(framed(event.SerializeToString()))
        self._file.flush()


class PublishedEventFiles(EventFiles):
    """Writes to the disk of this machine and publishes each file as a whole, every 30 s and at the end."""

    close_s = 30.0

    def __init__(self, target: RemotePath, generation: int, takes_over_at: int | None = None) -> None:
        """See `EventFiles`."""
        self._scratch = tempfile.TemporaryDirectory(prefix="elasticdl-events-")
        super().__init__(Path(self._scratch.name), generation, takes_over_at)
        self._target = target
        self._published_bytes = 0  # of the newest file
        self._next_at = 0.0

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See `EventFiles`; files that storage rejects now stay on the disk, and are published later."""
        super().write(step, values, at)
        if time.monotonic() >= self._next_at:
            self.publish()

    def publish(self) -> None:
        """Publish the newest file, if it has grown."""
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
        except (OSError, StorageError) as error:  # it does not exist yet, or is unreachable
            logger.debug("%s cannot be listed: %s", self._target, error)
            return []

    def close(self) -> None:
        """Publish new content, and close."""
        super().close()
        self.publish()
        self._scratch.cleanup()


def mean_staleness(before: Sequence[int], now: Sequence[int]) -> float | None:
    """Return the mean staleness of the gradients between two histograms: 0, 1, 2, 3-4, …; by the middles of ranges."""
    counts = [b - a for a, b in zip_longest(before, now, fillvalue=0)]
    total = sum(counts)
    if total <= 0:
        return None
    return sum(count * _middle(position) for position, count in enumerate(counts)) / total


def _middle(position: int) -> float:
    return float(position) if position < 3 else (2 ** (position - 2) + 1 + 2 ** (position - 1)) / 2
