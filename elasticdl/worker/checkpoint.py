"""Checkpoints that a worker writes: the model's state, its ledger, and counts, in one directory.

``<checkpoint_dir>/version-<minibatches>/`` holds the state's arrays in one file, and a manifest with its checksum; see
`elasticdl.storage.versions`.  Files are written by a thread of their own, so a file system that hangs blocks only that.
"""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from elasticdl.activities import Activity, ActivityClock
from elasticdl.protocol import WrittenCheckpoint
from elasticdl.storage import versions
from elasticdl.storage.paths import path_of, writing
from elasticdl.worker.ledger import Ledger
from elasticdl_client.checkpoint_manifest import MANIFEST, STATE_FORMAT, NewerFormat, read_manifest
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import CheckpointError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import AnyPath, is_remote

_log = logging.getLogger("elasticdl.worker")
_PIECE_BYTES = 1 << 20
_SYNCED_BYTES = 64 << 20  # written before each fdatasync
_HINT = "mend its volume or its permissions, or restore it"

Arrays = Mapping[str, npt.NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointKind:
    """The properties that distinguish the checkpoints of a job from others.

    Attributes:
        job_name: Name of the job.
        strategy: The distribution strategy, as in the manifest.
        file: Name of the state's file.
        names_depend_on: See the function of this name; empty: not checked.
    """

    job_name: str
    strategy: str
    file: str
    names_depend_on: Mapping[str, Any]


def names_depend_on(
    minibatch_size: int, num_minibatches_per_task: int, seed: int, shuffle: bool, num_records: int | None = None
) -> dict[str, Any]:
    """Return the settings that decide which records a minibatch contains: a ledger is valid for one set of values.

    Args:
        num_records: Records of an epoch; None if it is not known when the checkpoint is searched.
    """
    known = {
        "minibatch_size": minibatch_size,
        "num_minibatches_per_task": num_minibatches_per_task,
        "seed": seed,
        "shuffle": shuffle,
    }
    return known if num_records is None else known | {"num_records": num_records}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        epoch_records: Records of an epoch of the data that the ledger is valid for; 0 if the manifest has no number.
    """

    directory: AnyPath
    arrays: dict[str, npt.NDArray[Any]]
    ledger: Ledger
    epoch_records: int = 0


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How long a write of a checkpoint may make no progress.

    Attributes:
        warn_s: Seconds until a warning is logged.
        end_s: Seconds until the checkpoint counts as failed.
    """

    warn_s: float = 300.0
    end_s: float = 600.0


class StateCheckpoints:
    """The checkpoints in one directory.

    Attributes:
        newest_try: How the newest attempt to write one has ended, for the master; None before the first.
    """

    @classmethod
    def of_module(cls, spec: JobSpec, file: str) -> StateCheckpoints:
        """Return the checkpoints of a job whose model a module defines."""
        valid_for = names_depend_on(spec.minibatch_size, spec.num_minibatches_per_task, spec.seed, spec.shuffle)
        if spec.distribution_strategy is DistributionStrategy.LOCAL:  # a later job of this name continues from them
            valid_for["training_data"] = hide(spec.training_data)
            valid_for["records_per_shard"] = spec.records_per_shard  # tasks end where shards do
        kind = CheckpointKind(spec.job_name, spec.distribution_strategy.value, file, valid_for)
        limits = HangLimits(spec.hang_timeout, spec.step_timeout)
        return cls(spec.checkpoint_dir, kind, spec.keep_checkpoint_max, limits)

    def __init__(self, directory: str, kind: CheckpointKind, keep: int = 0, limits: HangLimits | None = None) -> None:
        """
        Args:
            directory: Empty: there are no checkpoints, and none are written.
            keep: How many of the newest checkpoints to keep; 0: all.
            limits: None: the defaults of a job.
        """
        self._directory = path_of(directory) if directory else None
        self._kind = kind
        self._keep = keep
        self._limits = limits or HangLimits()
        self._tag = secrets.token_hex(4)  # in names of temporary files; other members write beside them
        self._write: _Write | None = None
        self._is_requested = threading.Event()
        self._restored: tuple[AnyPath, Mapping[str, Any]] | None = None  # the one that was read, and its manifest
        self.newest_try: WrittenCheckpoint | None = None

    def request(self) -> None:
        """Request a checkpoint after the next step.  Thread-safe."""
        self._is_requested.set()

    def take_request(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        is_requested = self._is_requested.is_set()
        self._is_requested.clear()
        return is_requested

    @property
    def is_wanted(self) -> bool:
        """Whether the job has a directory for checkpoints."""
        return self._directory is not None

    @property
    def place(self) -> str:
        """The directory, for messages."""
        return str(self._directory or "")

    def save(self, number: int, arrays: Arrays, ledger: Ledger) -> None:
        """Write a checkpoint, unless another member has written the same one.

        Members that all got SIGTERM, and cannot agree on a writer, write the same checkpoint at the same time.

        Args:
            number: Minibatches in the model.
            arrays: The state of the model.
            ledger: The minibatches in the model.

        Raises:
            CheckpointError: it could not be written.  Its files are removed with the next checkpoint, since another
                member may be using them.
        """
        try:
            self._save_within_limits(number, arrays, ledger)
        except Exception as error:
            self.note_failure(number, error)
            raise
        assert self._directory is not None
        place = versions.directory_of(self._directory, number)
        self.newest_try = WrittenCheckpoint(number, str(place))

    def note_failure(self, number: int, error: Exception) -> None:
        """Store why a checkpoint could not be written, to be reported to the master."""
        what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self.newest_try = WrittenCheckpoint(number, error=what)

    def _save_within_limits(self, number: int, arrays: Arrays, ledger: Ledger) -> None:
        assert self._directory is not None
        place = versions.directory_of(self._directory, number)
        if self._write is not None and self._write.is_alive():
            raise CheckpointError(f"{place} is not begun: the file system still holds an earlier write up")
        self._write = _Write(str(place), lambda write: self._save(number, arrays, ledger, write))
        self._write.start()
        # Requests to object storage have limits of their own.
        self._write.wait(None if is_remote(str(place)) else self._limits)

    def _save(self, number: int, arrays: Arrays, ledger: Ledger, write: _Write) -> None:
        assert self._directory is not None
        buffer = io.BytesIO()
        _write_arrays(buffer, arrays, write)
        state = buffer.getbuffer()
        manifest = {
            "format": STATE_FORMAT,
            "job_name": self._kind.job_name,
            "strategy": self._kind.strategy,
            **ledger.to_manifest(),
            "size_bytes": len(state),
            "crc32": zlib.crc32(state),
            "names_depend_on": dict(self._kind.names_depend_on),
        }

        def is_same(found: AnyPath) -> bool:
            has_manifest = _has_manifest(found, manifest)
            write.advance()
            return has_manifest and _has_state(found / self._kind.file, state, write)

        write.advance()
        directory = versions.begin_beside(self._directory, number, is_same)
        if directory is None:
            return
        try:
            with versions.committing(directory, manifest, self._tag):
                write.advance()
                _write_state(directory / self._kind.file, state, write, self._tag)
                write.advance()
        except CheckpointError:
            versions.abandon_beside(directory)  # the files in it may be another member's
            raise
        write.advance()
        versions.prune(self._directory, self._keep, number)

    def has(self, number: int) -> bool:
        """Return whether there is a complete checkpoint with this number, by any member."""
        with suppress(OSError, StorageError):
            return self._directory is not None and versions.is_complete(versions.directory_of(self._directory, number))
        return False

    def newest_directory(self) -> str:
        """Return the directory of the newest complete checkpoint, without reading it; empty if there is none."""
        found = _newest_first(self._directory) if self._directory is not None else []
        return str(found[0]) if found else ""

    def newest_number(self) -> int:
        """Return the minibatches in the newest complete checkpoint; 0 if there is none, or the directory is damaged.

        Only names of directories and manifests are looked at.

        Raises:
            StorageUnreachable: see `newest`.
        """
        with suppress(CheckpointError):  # reading the model will report it
            found = _newest_first(self._directory) if self._directory is not None else []
            return versions.number_of(found[0]) if found else 0
        return 0

    def newest(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint of this job, None if there are no checkpoints.

        Log damaged ones that are newer.

        Raises:
            NoneIsWhole: there are checkpoints, and all are damaged.
            NewerFormat: a later version of ElasticDL wrote the newest undamaged one.
            CheckpointError: its minibatches contain other records; or it, or a newer one, is of another job, which may
                be writing there now; or the directory cannot be read.
            StorageUnreachable: the volume does not answer; there may be newer checkpoints on it.
        """
        if self._directory is None:
            return None
        damaged = []
        for directory in _newest_first(self._directory):
            self._check_owner(directory)
            try:
                found, manifest = self._load(directory)
                if manifest.get("job_name") is None:
                    raise CheckpointError(f"the checkpoint in {directory} names no job: it may be another one's")
            except NewerFormat:
                raise
            except CheckpointError as error:
                if not _read(directory, versions.is_complete):
                    return self.newest()  # its writer has removed it, after writing a newer one
                _log.warning("%s", error)
                damaged.append(f"{directory.name}: {error.what}")
                continue
            self._check_names(directory, manifest)
            self._restored = (directory, manifest)
            return found
        if damaged:
            raise versions.NoneIsWhole(self._directory, damaged)
        return None

    def depend_on(self, **names: Any) -> None:
        """Add settings that decide which records a minibatch contains, known only after a checkpoint was read.

        Raises:
            CheckpointError: the checkpoint was written with other values.
        """
        self._kind = replace(self._kind, names_depend_on={**self._kind.names_depend_on, **names})
        if self._restored is not None:
            self._check_names(*self._restored)

    def initial(self, path: str) -> Checkpoint:
        """Return a checkpoint of another job to begin with.

        Args:
            path: A checkpoint, or a directory of checkpoints: then the newest undamaged one.

        Raises:
            CheckpointError: there is none.
            StorageUnreachable: the volume does not answer.
        """
        named = path_of(path)
        candidates = [named] if _read(named, versions.is_complete) else _newest_first(named)
        errors = []
        for directory in candidates:
            try:
                return self._load(directory)[0]
            except NewerFormat:
                raise
            except CheckpointError as error:
                _log.warning("%s", error)
                errors.append(error.what)
        raise CheckpointError(
            errors[0] if errors else f"there is no checkpoint of the strategy {self._kind.strategy} in {named}",
            "name a complete one with --checkpoint_dir_for_init, or a directory of them",
        )

    def _load(self, directory: AnyPath) -> tuple[Checkpoint, dict[str, Any]]:
        file = self._kind.file
        manifest = _read(directory / MANIFEST, read_manifest)
        if manifest.get("strategy") != self._kind.strategy:
            raise CheckpointError(f"the checkpoint in {directory} is not of the strategy {self._kind.strategy}")
        state = _read(directory / file, lambda path: path.read_bytes())
        if (len(state), zlib.crc32(state)) != (manifest.get("size_bytes"), manifest.get("crc32")):
            raise CheckpointError(f"{directory / file} is damaged: size or checksum differs from its manifest")
        with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
            read = dict(arrays)
        try:
            ledger = Ledger.from_manifest(manifest)
            epoch_records = int(dict(manifest.get("names_depend_on") or {}).get("num_records", 0))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{directory / MANIFEST} is damaged: {error!r}") from error
        return Checkpoint(directory, read, ledger, epoch_records), manifest

    def _check_owner(self, directory: AnyPath) -> None:
        """Raise if a checkpoint, damaged or not, is another job's: this job would remove it as one of its own."""
        owner = None
        with suppress(CheckpointError):  # logged by `_load`
            owner = _read(directory / MANIFEST, read_manifest).get("job_name")
        if owner not in (None, self._kind.job_name):
            raise CheckpointError(
                f"the checkpoint in {directory} is of job {owner}, not {self._kind.job_name}: "
                "versions of two jobs in one place would be mixed up",
                "name another checkpoint_dir, or remove that one; a job with --model_def and the same strategy, not "
                "Local, takes its model by --checkpoint_dir_for_init",
            )

    @property
    def _without_ledger(self) -> str:
        if self._kind.strategy == DistributionStrategy.LOCAL.value:
            return " to begin a new model"
        return (
            "; a job with --model_def and AllReduceStrategy takes the model without that record by "
            "--checkpoint_dir_for_init"
        )

    def _check_names(self, directory: AnyPath, manifest: Mapping[str, Any]) -> None:
        theirs = manifest.get("names_depend_on") or {}
        for name, value in self._kind.names_depend_on.items():
            if name in theirs and theirs[name] != value:
                raise CheckpointError(
                    f"the checkpoint in {directory} was written with {name}={theirs[name]}, not {value}: its record "
                    "of which minibatches the model holds does not fit",
                    f"train with {name}={theirs[name]} again, or name another checkpoint_dir" + self._without_ledger,
                )


def read_from(place: str, clock: ActivityClock, read: Callable[[], T]) -> T:
    """Read from a directory of checkpoints; retry while storage does not answer, without counting as a hang.

    A read of a volume that never returns does count as a hang: it has no limit, while requests to storage have one.

    Raises:
        StorageUnreachable: it has not answered for half an hour.
    """
    activity = Activity.CHECKPOINT if is_remote(place) else clock.read()[0]

    def read_once() -> T:
        with clock.during(activity):
            return read()

    with clock.during(Activity.CHECKPOINT):
        return versions.when_reachable(read_once)


def _newest_first(directory: AnyPath) -> list[AnyPath]:
    return _read(directory, versions.complete)[::-1]


def _read(path: AnyPath, read: Callable[[AnyPath], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise versions.unreadable(str(path), error, _HINT) from error


def _has_manifest(directory: AnyPath, manifest: Mapping[str, Any]) -> bool:
    """Return whether a directory is a complete checkpoint with these contents and checksums.

    Raises:
        OSError, StorageError: it cannot be read.
        NewerFormat: a later version wrote it.
    """
    try:
        found = {"format": STATE_FORMAT} | read_manifest(directory / MANIFEST)
        return bool(found == json.loads(json.dumps(manifest)))
    except NewerFormat:
        raise
    except (FileNotFoundError, CheckpointError):
        return False


def _has_state(path: AnyPath, state: memoryview, write: _Write) -> bool:
    """Return whether a file contains a state; a complete manifest does not prove it.

    Raises:
        OSError, StorageError: it cannot be read.
    """
    size_bytes, crc32 = 0, 0
    with suppress(FileNotFoundError), path.open("rb") as file:
        while content := file.read(_SYNCED_BYTES):
            size_bytes, crc32 = size_bytes + len(content), zlib.crc32(content, crc32)
            write.advance()
    return (size_bytes, crc32) == (len(state), zlib.crc32(state))


def _write_arrays(file: io.BytesIO, arrays: Arrays, write: _Write) -> None:
    """Write arrays as `numpy.savez` does, but in small pieces: it blocks all threads while it copies a large array."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            plain = np.asarray(array, order="C")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, np.lib.format.header_data_from_array_1_0(plain))
                content = plain.reshape(-1).view(np.uint8).data
                for start in range(0, len(content), _PIECE_BYTES):
                    entry.write(content[start : start + _PIECE_BYTES])
                    write.advance()  # copying gigabytes may take long on a slow processor; the disk does not hang


def _write_state(path: AnyPath, state: memoryview, write: _Write, tag: str) -> None:
    try:
        with writing(path, tag) as file:
            for start in range(0, len(state), _SYNCED_BYTES):
                file.write(state[start : start + _SYNCED_BYTES])
                if not is_remote(str(path)):
                    file.flush()
                    os.fdatasync(file.fileno())  # so that `advance` measures the disk
                write.advance()
    except (OSError, StorageError) as error:
        raise CheckpointError(f"{path} cannot be written: {versions.reason(error)}") from error


class _Write(threading.Thread):
    """The thread that writes a checkpoint, and records its progress.

    Attributes:
        is_given_up: Whether it counts as failed; it then ends when the file system lets it.
    """

    def __init__(self, place: str, write: Callable[[_Write], None]) -> None:
        super().__init__(name="checkpoint-files", daemon=True)
        self._place = place
        self._do = write
        self._error: Exception | None = None
        self._moved_at = time.monotonic()
        self.is_given_up = False

    def run(self) -> None:
        try:
            self._do(self)
        except Exception as error:  # noqa: BLE001  raised by `wait`
            if not self.is_given_up:
                self._error = error
        finally:
            del self._do  # it references the model's arrays

    def advance(self) -> None:
        """Note that the write has made progress.

        Raises:
            CheckpointError: the checkpoint counts as failed.
        """
        if self.is_given_up:
            raise CheckpointError(f"{self._place} was given up")
        self._moved_at = time.monotonic()

    def wait(self, limits: HangLimits | None) -> None:
        """Wait until the checkpoint is written.

        Args:
            limits: None: wait without a limit.

        Raises:
            CheckpointError: it could not be written, or the file system hangs.
        """
        if limits is None:
            self.join()
        else:
            self._wait_within(limits)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # a reference cycle with the frames that reference the model's arrays

    def _wait_within(self, limits: HangLimits) -> None:
        if limits.warn_s < limits.end_s and not self._ends_within(limits.warn_s):
            text = "The checkpoint %s has not moved for %.0f s: its file system hangs. It is given up after %.0f s"
            _log.warning(text, self._place, limits.warn_s, limits.end_s)
        if not self._ends_within(limits.end_s):
            self.is_given_up = True
            raise CheckpointError(f"{self._place}: its file system hangs: it took nothing for {limits.end_s:.0f} s")

    def _ends_within(self, seconds: float) -> bool:
        """Return whether this thread ends before it has made no progress for that long."""
        while self.is_alive():
            left_s = self._moved_at + seconds - time.monotonic()
            if left_s <= 0:
                return False
            self.join(left_s)
        return True
