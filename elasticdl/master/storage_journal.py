"""The journal of a job whose directory is a URL of storage: it outlives the machine and the cluster of its masters.

The objects are in ``<job_dir>/journal/``.  A generation of the master first publishes a claim, ``NUMBER-PLACE-RANDOM``,
then lists: the highest claim owns the job, and only its holder reads the newest snapshot before it.  A snapshot is an
object of its own, ``CLAIM.NUMBER``, published and then looked up in a list, which also shows a higher claim.  So a
snapshot that a successor could not have read was never acknowledged.  This needs no conditional writes, but storage
with strongly consistent writes and lists: a list shows every object that was published before it began.

A place is a set of a job's processes with one secret: a machine, or a namespace.  A master whose place has lost the
job to another one never claims it again: `elasticdl resume` gives the job to a new place.

The status and events for users are written to the runtime's own journal as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import secrets
import socket
import time
import zlib
from dataclasses import dataclass
from typing import Any

from elasticdl.master.journal import (
    Journal,
    JournalWriteError,
    Outage,
    Outages,
    ResumedElsewhere,
    Superseded,
    damaged,
    decode,
    encode,
)
from elasticdl.master.journal_writer import JournalWriter
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of
from elasticdl.storage.port import FileStatus, Storage
from elasticdl_client.errors import JobError, StorageError, StorageFileMissing, StorageUnreachable
from elasticdl_client.job_series import shown_part
from elasticdl_client.job_status import WAITS_FOR_STORAGE, JobStatus
from elasticdl_client.kubernetes.names import STATUS_KEY
from elasticdl_client.storage_kinds import scheme_of

INTERVAL_S = 2.0  # between two writes in the background: with the list, one request a second
STATUS_INTERVAL_S = 30.0  # between two copies of the status in storage, while the job runs
_ONE_ATTEMPT = RetryPolicy(request_s=20.0, total_s=0.0)  # the callers retry, and must be able to end in time
_SHOWN_AFTER_S = 3.0  # storage refuses a request now and then, which delays a write by two seconds
_NUM_KEPT = 2  # snapshots of this generation that are kept
_MAX_SNAPSHOTS = 10  # more are deleted by `save`: the thread has nothing to write if `save` always comes first
_NAME = re.compile(r"(\d{8})-([0-9a-f]{16})-([0-9a-f]{8})(?:\.(\d{8}))?")

logger = logging.getLogger("elasticdl.master")


@dataclass(frozen=True, slots=True, order=True)
class JournalClaim:
    """A generation's claim to the job; the highest claim owns it.

    Attributes:
        place: Place of its master, see the module.
    """

    number: int
    place: str
    random: str

    def __str__(self) -> str:
        return f"{self.number:08}-{self.place}-{self.random}"


@dataclass(frozen=True, slots=True, order=True)
class JournalObject:
    """An object in the journal's directory: a claim, with number 0, or a snapshot of its holder."""

    claim: JournalClaim
    number: int
    url: str
    size_bytes: int

    @property
    def is_snapshot(self) -> bool:
        return self.number > 0


class StorageJournal:
    """`Journal` in storage, beside the runtime's journal, which keeps the status and the part for users.

    Args:
        job_dir: URL of the job's directory.
        place: Place of this master, see the module: 16 hexadecimal digits.
        shown: The runtime's journal of this job.
    """

    def __init__(self, job_dir: str, place: str, shown: Journal) -> None:
        self._directory = f"{job_dir.rstrip('/')}/journal"
        self._status_url = f"{job_dir.rstrip('/')}/{STATUS_KEY}"
        self._place = place
        self._shown = shown
        self._scheme = scheme_of(job_dir)
        self._claim: JournalClaim | None = None  # the lock of `_writer` guards this and the next six
        self._number = 0  # of the last attempt to write a snapshot: no number is used twice
        self._written = b""
        self._lost: JobError | None = None
        self._status_at = float("-inf")
        self._stored_status: JobStatus | None = None
        self._complained = False  # a warning was logged that objects cannot be deleted
        self._outages = Outages()
        self._writer = JournalWriter(INTERVAL_S, self._write_later)

    def load(self) -> dict[str, Any] | None:
        """Take the job over, and return its newest snapshot.

        Raises:
            JournalWriteError: Storage is unreachable; the next generation tries again.
            StorageError: Storage refuses a job that has not begun here.
            JobError: The job's directory was removed, or the snapshot is damaged.
        """
        storage = storage_of(self._directory)
        with self._writer.lock:
            try:
                found = self._take_over(storage)
                if self._shown.read_status() is None:
                    self._stored_status = self._read_stored_status(storage)
                return self._newest_snapshot(storage, found)
            except (StorageUnreachable, StorageFileMissing) as error:  # or a successor has deleted listed objects
                raise self._write_error(error) from error
            except StorageError as error:
                if self._shown.read_status() is None:
                    raise
                raise self._write_error(error) from error  # storage has accepted such requests before

    def save(self, snapshot: dict[str, Any], status: JobStatus | None = None) -> None:
        with self._writer.lock:
            waiting = self._writer.take()  # older than this one
            found = self._write(snapshot)
            if status is not None:
                self._shown.save(shown_part(snapshot), status)
                self._store_status(status)
            elif waiting is not None:
                self._shown.save_later(shown_part(snapshot), waiting[1])
            if sum(one.is_snapshot for one in found) > _MAX_SNAPSHOTS:
                self._tidy(found)

    def save_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        if self._lost is not None:
            raise self._lost
        self._writer.put(snapshot, status)

    def read_status(self) -> JobStatus | None:
        return self._shown.read_status() or self._stored_status

    def write_status(self, status: JobStatus) -> None:
        """Replace the status; that in storage only for the job's owner, after its first snapshot.

        A master that fails before its first snapshot has changed nothing, so the job can be resumed elsewhere.
        """
        with self._writer.lock:
            self._writer.update_status(status)
            self._shown.write_status(status)
            if self._lost is None and self._number:
                try:
                    self._store_status(status)
                except JournalWriteError as error:
                    logger.warning("%s", error.what)

    def check_owner(self) -> None:
        with self._writer.lock:
            if self._lost is not None:
                raise self._lost
            try:
                found = self._list(self._storage)
            except StorageError as error:
                raise self._write_error(error) from error
            self._check_owner(found)

    def take_outages(self) -> list[Outage]:
        return self._outages.take() + self._shown.take_outages()

    def close(self) -> None:
        self._writer.close()
        self._shown.close()

    def _write_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        found = self._write(snapshot)
        try:
            self._shown.save_later(shown_part(snapshot), status)  # after the write: see `FileJournal.save`
        except Superseded as error:
            self._lost = error
            raise
        if time.monotonic() - self._status_at > STATUS_INTERVAL_S:
            self._store_status(status)
        self._tidy(found)

    # The objects; the caller holds the lock ----------------------------------------------------------------------

    @functools.cached_property
    def _storage(self) -> Storage:
        """Storage with a single attempt per request.  Not before `load`: the status shows its import errors."""
        return FsspecStorage(self._scheme, _ONE_ATTEMPT)

    def _take_over(self, storage: Storage) -> list[JournalObject]:
        """Publish a claim above all others; return the objects that existed then."""
        found = self._list(storage)
        if not found and self._shown.load() is not None:
            raise self._removed()
        if found and found[-1].claim.place != self._place and any(one.claim.place == self._place for one in found):
            raise self._lose(found)
        claim = JournalClaim(found[-1].claim.number + 1 if found else 1, self._place, secrets.token_hex(4))
        storage.publish(f"{self._directory}/{claim}", f"{socket.gethostname()}\n".encode())
        self._claim = claim
        found = self._list(storage)
        self._check_owner(found)
        return found

    def _newest_snapshot(self, storage: Storage, found: list[JournalObject]) -> dict[str, Any] | None:
        """Return the newest undamaged snapshot of the newest generation that has written one."""
        snapshots = [one for one in reversed(found) if one.is_snapshot]
        error: JobError | None = None
        for one in snapshots:
            if one.claim != snapshots[0].claim:
                break
            try:
                return _unpack(storage.read(one.url, 0, one.size_bytes), one.url)
            except JobError as this:
                logger.warning("%s", this.what)
                error = error or this
        if error is not None:
            raise error
        return None

    def _write(self, snapshot: dict[str, Any]) -> list[JournalObject]:
        """Publish a snapshot; check in a list that it is there and that no other master has claimed the job since.

        Returns:
            The listed objects.
        """
        if self._lost is not None:
            raise self._lost
        data = zlib.compress(encode(snapshot))
        try:
            if self._claim is None:
                self._take_over(self._storage)
            if data != self._written:
                self._written = b""  # a failed attempt may have had an effect
                self._number += 1
                self._storage.publish(f"{self._directory}/{self._claim}.{self._number:08}", data)
            found = self._list(self._storage)
        except StorageError as error:
            if self._outages.failed(error.what) >= _SHOWN_AFTER_S:
                self._show_outage(error.what)
            raise self._write_error(error) from error
        self._check_owner(found)
        sizes = {one.number: one.size_bytes for one in found if one.claim == self._claim}
        if sizes.get(self._number) != len(data):
            raise self._write_error(StorageError(f"{self._directory} does not show the snapshot whole.", ""))
        self._outages.written()
        self._written = data
        return found

    def _show_outage(self, why: str) -> None:
        """Write to the runtime's status that the job waits; the next written status no longer says so."""
        status = self._shown.read_status()
        if status is not None and status.exit_code is None:  # a job without status has not begun: see `load`
            self._shown.write_status(dataclasses.replace(status, message=f"{WAITS_FOR_STORAGE}: {why}"))

    def _check_owner(self, found: list[JournalObject]) -> None:
        if found and found[-1].claim != self._claim:
            raise self._lose(found)
        if all(one.claim != self._claim or one.is_snapshot for one in found):  # only a successor deletes a claim
            self._lost = self._removed()
            with contextlib.suppress(StorageError):
                for one in found:  # written since: it would prevent another job here, whose objects stay
                    if one.claim == self._claim:
                        self._storage.delete(one.url)
            raise self._lost

    def _removed(self) -> JobError:
        return JobError(
            f"the job's directory was removed while the job ran: its journal {self._directory} is empty",
            "start the job again, with another --job_dir",
        )

    def _lose(self, found: list[JournalObject]) -> Superseded:
        """Return the error of a superseded master, which every verb raises from now on."""
        if found[-1].claim.place == self._place:
            self._lost = Superseded(f"another master has taken over the job: it writes the journal {self._directory}")
        else:
            self._lost = ResumedElsewhere(
                f"the job was resumed elsewhere: a master there writes the journal {self._directory}",
                f"`elasticdl resume --job_dir={self._directory.rpartition('/')[0]}` takes it over again",
            )
        return self._lost

    def _tidy(self, found: list[JournalObject]) -> None:
        """Delete objects that no successor reads; keep the claims of other places, which show them their loss."""
        own = [one for one in found if one.claim == self._claim and one.is_snapshot]
        kept = own[-_NUM_KEPT:]
        old = [one for one in found if one.is_snapshot and one not in kept]
        old += [one for one in found if not one.is_snapshot and one.claim != self._claim and self._is_ours(one)]
        try:
            for one in old:
                self._storage.delete(one.url)
        except StorageError as error:
            if not self._complained:  # a bucket without the right to delete refuses every 2 s
                logger.warning("Old snapshots of the journal cannot be deleted: %s", error.what)
            self._complained = True
        else:
            self._complained = False

    def _is_ours(self, one: JournalObject) -> bool:
        return one.claim.place == self._place

    def _list(self, storage: Storage) -> list[JournalObject]:
        """Return the objects of the journal in the order of their claims, each claim before its snapshots."""
        parsed = (_parse(status) for status in storage.list(self._directory))
        return sorted(one for one in parsed if one is not None)

    def _store_status(self, status: JobStatus) -> None:
        try:
            self._storage.publish(self._status_url, (status.to_json() + "\n").encode())
        except StorageError as error:
            raise self._write_error(error) from error
        self._status_at = time.monotonic()

    def _read_stored_status(self, storage: Storage) -> JobStatus | None:
        try:
            data = storage.read(self._status_url, 0, storage.stat(self._status_url).size_bytes)
            return JobStatus.from_json(data.decode())
        except (StorageFileMissing, ValueError, TypeError, KeyError):
            return None

    def _write_error(self, error: StorageError) -> JournalWriteError:
        return JournalWriteError(
            f"the journal {self._directory} cannot be written: {error.what}", "the job waits until the storage takes it"
        )


def place_of(token: str) -> str:
    """Return the place of the masters that have this token of the job."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def _parse(status: FileStatus) -> JournalObject | None:
    found = _NAME.fullmatch(status.url.rpartition("/")[2])
    if found is None:
        return None
    claim = JournalClaim(int(found[1]), found[2], found[3])
    return JournalObject(claim, int(found[4] or 0), status.url, status.size_bytes)


def _unpack(data: bytes, where: str) -> dict[str, Any]:
    remedy = "name another --job_dir"
    try:
        return decode(zlib.decompress(data), where, remedy)
    except zlib.error as error:
        raise damaged(where, f"it cannot be decompressed ({error})", remedy) from error
