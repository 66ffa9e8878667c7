"""The journal and the status in the ConfigMap `elasticdl-<job>-state`, for the one master that wrote it last.

Every write is conditional on the version of the object that this generation knows, and leaves the generation's random
name in it.  So a master that has a successor finds out at its next write, and a master that lost the answer to its own
write recognises it.  A `JournalWriter` does delayed writes; `save` waits.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import zlib
from collections.abc import Callable
from typing import Any

from elasticdl.master.journal import (
    JournalDeleted,
    JournalWriteError,
    Outage,
    Outages,
    Superseded,
    damaged,
    decode,
    encode,
)
from elasticdl.master.journal_writer import JournalWriter
from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import object_path

WRITER = "elasticdl-writer"  # annotation: the generation that wrote last
MAX_BYTES = 1024 * 1024 - 64 * 1024  # a ConfigMap may have 1 MiB of data; the rest is for the status
INTERVAL_S = 1.0  # between two writes in the background
TIMEOUT_S = (5.0, 5.0)  # to connect, to answer
_MAX_CLAIMS = 10
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"  # an answer without the data

logger = logging.getLogger("elasticdl.master")


class ConfigMapJournal:
    """`Journal` on Kubernetes.

    Args:
        connection: Connection to the cluster.
        namespace: Namespace of the job.
        job_name: Name of the job; its state object must exist.
        on_phase: Called after the first status of each phase is written, in the thread that wrote it.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        job_name: str,
        on_phase: Callable[[JobPhase], None] = lambda phase: None,
    ) -> None:
        """Take the job over: from here on no earlier generation can write.

        Raises:
            ClusterError: The API does not answer, or refuses.
            JobError: The job does not exist, or its journal does not.
        """
        self._connection = connection
        self._namespace = namespace
        self._job_name = job_name
        self._name = names.state_object(job_name)
        self._where = f"in ConfigMap {self._name} of namespace {namespace}"
        self._on_phase = on_phase
        self._phase_lock = threading.Lock()  # one call of `on_phase` at a time; guards the next
        self._phase: JobPhase | None = None
        self._writer = secrets.token_hex(8)
        self._version = ""  # the lock of `_later` guards this and the next two
        self._written = b""  # the snapshot, if this generation has written it
        self._lost: Superseded | None = None
        self._outages = Outages()
        found = self._claim()
        self._found_journal: str = (found.get("binaryData") or {}).get(names.JOURNAL_KEY, "")
        self._status_text: str = (found.get("data") or {}).get(names.STATUS_KEY, "")
        self._later = JournalWriter(INTERVAL_S, self._write, after=self._report_phase)

    def load(self) -> dict[str, Any] | None:
        """Return the state at the time of the takeover."""
        if not self._found_journal:
            return None
        remedy = "delete the job and submit it again"
        try:
            data = zlib.decompress(base64.b64decode(self._found_journal))
        except (ValueError, zlib.error) as error:
            raise damaged(self._where, f"it cannot be decompressed ({error})", remedy) from error
        return decode(data, self._where, remedy)

    def save(self, snapshot: dict[str, Any], status: JobStatus | None = None) -> None:
        data = self._pack(snapshot)
        with self._later.lock:
            waiting = self._later.take()  # older than this one
            self._write(data, status or (waiting[1] if waiting is not None else None))
        self._report_phase()

    def save_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        if self._lost is not None:
            raise self._lost
        self._later.put(self._pack(snapshot), status)

    def read_status(self) -> JobStatus | None:
        try:
            return JobStatus.from_json(self._status_text)
        except (ValueError, TypeError, KeyError):
            return None

    def write_status(self, status: JobStatus) -> None:
        try:
            with self._later.lock:
                self._write(self._later.update_status(status), status)
            self._report_phase()
        except JournalWriteError as error:
            logger.warning("%s", error.what)

    def check_owner(self) -> None:
        with self._later.lock:
            if self._lost is not None:
                raise self._lost
            try:
                self._adopt_version()
            except Superseded as error:
                self._lost = error
                raise
            except ClusterError as error:
                raise self._write_error(error) from error

    def take_outages(self) -> list[Outage]:
        return self._outages.take()

    def close(self) -> None:
        self._later.close()

    # The object --------------------------------------------------------------------------------------------------

    def _pack(self, snapshot: dict[str, Any]) -> bytes:
        data = zlib.compress(encode(snapshot))
        if len(data) > MAX_BYTES:
            raise JobError(
                f"the journal is too large for a ConfigMap: {len(data)} bytes of at most {MAX_BYTES}",
                "give the job fewer, longer tasks (--num_minibatches_per_task), fewer, larger files, or a --job_dir in "
                "storage (s3://…), where there is no such limit",
            )
        return data

    def _claim(self) -> Any:
        """Write this generation's name into the object, again after each conflict; return the resulting object."""
        for _ in range(_MAX_CLAIMS):
            try:
                found = self._read()
                self._version = found["metadata"]["resourceVersion"]
                self._patch({})
            except ClusterError as error:
                if error.status == 404:
                    raise self._deleted() from error
                if error.status != 409:
                    raise
            else:
                return found
        raise JobError(f"other masters keep writing the journal {self._where}", "delete the one that is too many")

    def _write(self, data: bytes | None, status: JobStatus | None) -> None:
        """Write the given values; the caller holds the lock."""
        if self._lost is not None:
            raise self._lost
        body: dict[str, Any] = {}
        written = self._written if data is None else data
        if written != self._written:
            self._written = b""  # a failed attempt may have had an effect
            body["binaryData"] = {names.JOURNAL_KEY: base64.b64encode(written).decode()}
        text = status.to_json() if status is not None else ""
        if text:
            body["data"] = {names.STATUS_KEY: text}
        try:
            self._patch_as_owner(body)
        except Superseded as error:
            self._lost = error
            raise
        except ClusterError as error:
            self._outages.failed(error.what)
            raise self._write_error(error) from error
        self._outages.written()
        self._written = written
        self._status_text = text or self._status_text

    def _write_error(self, error: ClusterError) -> JournalWriteError:
        return JournalWriteError(
            f"the journal {self._where} cannot be written: {error.what}", "the job waits until the API server takes it"
        )

    def _patch_as_owner(self, body: dict[str, Any]) -> None:
        try:
            self._patch(body)
        except ClusterError as error:
            if error.status == 404:
                raise self._deleted() from error
            if error.status != 409:
                raise
            self._adopt_version()
            self._patch(body)

    def _adopt_version(self) -> None:
        """Continue from the object's present version, unless another writer has written it since."""
        try:
            found = self._read()
        except ClusterError as error:
            if error.status == 404:
                raise self._deleted() from error
            raise
        if (found["metadata"].get("annotations") or {}).get(WRITER) != self._writer:
            raise Superseded(f"another master has taken over the job: it writes the journal {self._where}")
        self._version = found["metadata"]["resourceVersion"]

    def _read(self) -> Any:
        with self._connection.doing(f"read the journal {self._where}"):
            path = object_path("configmaps", self._name, self._namespace)
            return self._connection.get(path, timeout_s=TIMEOUT_S)

    def _patch(self, body: dict[str, Any]) -> None:
        metadata = {"resourceVersion": self._version, "annotations": {WRITER: self._writer}}
        with self._connection.doing(f"write the journal {self._where}"):
            answer = self._connection.patch(
                object_path("configmaps", self._name, self._namespace),
                {**body, "metadata": metadata},
                "application/merge-patch+json",
                accept=_METADATA,
                timeout_s=TIMEOUT_S,
            )
            self._version = answer["metadata"]["resourceVersion"]

    def _report_phase(self) -> None:
        """Report the newest written phase, in any thread; so the last reported one is the last written one."""
        with self._phase_lock:
            if not self._status_text:
                return
            phase = JobStatus.from_json(self._status_text).phase
            if phase is not self._phase:
                self._phase = phase
                self._on_phase(phase)

    def _deleted(self) -> Superseded:
        """Return the error of a deleted journal: with its job, or alone, by hand."""
        name = names.job_object(self._job_name)
        try:
            with self._connection.doing(f"read ConfigMap {name} of namespace {self._namespace}"):
                job = self._connection.get(object_path("configmaps", name, self._namespace), timeout_s=TIMEOUT_S)
        except ClusterError as error:
            if error.status != 404:
                raise
            job = None
        if job is None or job["metadata"].get("deletionTimestamp"):
            return Superseded(f"the job was deleted: there is no journal {self._where} any more")
        return JournalDeleted(
            f"the journal {self._where} was deleted, and the job has not been: it cannot continue without",
            f"`elasticdl status {self._job_name} --namespace={self._namespace}` says how to start again",
        )
