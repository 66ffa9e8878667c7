"""The slow effects of the core's commands, in their own threads; each posts its result to the inbox as an event.

Pods are created and deleted in parallel, one pod's commands in their order.  Nothing here decides what to do next.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from elasticdl.cluster.cluster import CannotResize, Cluster, EventType, Pod, PodEvent, QuotaExceeded
from elasticdl.master import checkpoints, messages
from elasticdl.master.checkpoints import PsCalls, PsUnreachable
from elasticdl.master.core import commands, events
from elasticdl.master.core.values import DataKind, PodState
from elasticdl.master.inbox import Inbox
from elasticdl.master.journal import Superseded
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.protocol import Role, Shard
from elasticdl.storage import versions
from elasticdl.storage.paths import path_of
from elasticdl_client.checkpoint_manifest import NewerFormat
from elasticdl_client.errors import CheckpointError, ElasticDLError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import AnyPath

logger = logging.getLogger("elasticdl.master")
Work = Callable[[], None]
_DATA_RETRY_S = 60.0  # doubled after each attempt
_LONGEST_DATA_RETRY_S = 3600.0  # an attempt may read all data


@dataclass(frozen=True, slots=True)
class Crashed:
    """Note to the shell: a background thread has failed by a bug."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Listing:
    """Note to the shell: all pods, and the number of creations that were done before the listing."""

    pods: events.PodsListed
    num_creations: int


class Effects:
    """Executes commands in the background.

    Attributes:
        cluster: The cluster of the job's pods.
        inbox: Takes the events with the results.
    """

    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        pod_specs: PodSpecs,
        ps_calls: PsCalls,
        inbox: Inbox,
        num_pod_threads: int = 1,
        find_files: Callable[[str], list[str]] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            find_files: Finds the files of a data source; None means the function of `elasticdl.data.sources`.
        """
        self._spec = spec
        self.cluster = cluster
        self._pod_specs = pod_specs
        self._ps_calls = ps_calls
        self.inbox = inbox
        self._pod_threads = PodThreads(num_pod_threads)
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="effect")
        self._resizing = ThreadPoolExecutor(4, thread_name_prefix="resize")  # a resize may take long
        self._find_files = find_files
        self._listed: set[DataKind] = set()
        self._is_closed = threading.Event()

    @property
    def num_creations(self) -> int:
        """Number of creations requested so far; a `Listing` with a lower number may lack a pod."""
        return self._pod_threads.num_requested

    def create_pod(self, command: commands.CreatePod) -> None:
        work = self._guarded(lambda: self._create_pod(command))
        self._pod_threads.create(command.name, work, is_server=command.role is Role.PS)

    def resize_pod(self, command: commands.ResizePod) -> None:
        self._resizing.submit(self._guarded(lambda: self._resize_pod(command.pod)))

    def delete_pod(self, command: commands.DeletePod) -> None:
        self._pod_threads.delete(command.name, self._guarded(lambda: self._delete_pod(command)))

    def list_pods(self) -> None:
        """Post a `Listing` that is taken when no creation is in progress."""
        self._pod_threads.between_creations(self._guarded(self._list_pods))

    def list_shards(self, kind: DataKind) -> None:
        """List a data source once, even if it is requested several times."""
        if kind not in self._listed:
            self._listed.add(kind)
            self._run(lambda: self._list_shards(kind))

    def verify_shards(self, kind: DataKind, known: Sequence[Shard]) -> None:
        """Fail the job if a source has changed since an earlier generation of the master.

        A source that cannot be read now is read again later: it may be unreachable for this process alone, and workers
        report what they cannot read.
        """
        self._run(lambda: self._verify_shards(kind, tuple(known)))

    def read_applied_sets(self, command: commands.ReadAppliedSets) -> None:
        self._run(lambda: self._read_applied_sets(command))

    def save_checkpoint(
        self, command: commands.SaveCheckpoint, layout: Mapping[str, object], check_owner: Callable[[], None]
    ) -> None:
        """Save a checkpoint in the background.

        Args:
            layout: Layout of the model, from `messages.model_layout`.
            check_owner: Raises `Superseded` if another master is known to own the job.
        """
        self._run(lambda: self._save_checkpoint(command, layout, check_owner))

    def close(self) -> None:
        """Wait for deletions; do not wait for other calls in progress."""
        self._is_closed.set()
        self._pod_threads.close()
        for threads in (self._threads, self._resizing):
            threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.submit(self._guarded(work))

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  passed to the loop, which ends the master with it
                self.inbox.post(Crashed(error))

        return guarded

    def _create_pod(self, command: commands.CreatePod) -> None:
        try:
            self.cluster.create(self._pod_specs.of(command))
        except ElasticDLError as error:
            self.inbox.post(events.PodNotCreated(command.name, error.what, isinstance(error, QuotaExceeded)))

    def _resize_pod(self, pod: commands.CreatePod) -> None:
        try:
            size = self.cluster.resize(self._pod_specs.of(pod))
        except ElasticDLError as error:
            self.inbox.post(events.PodNotResized(pod.name, error.what, isinstance(error, CannotResize)))
        else:
            self.inbox.post(events.PodResized(pod.name, pod.memory_factor, size))

    def _delete_pod(self, command: commands.DeletePod) -> None:
        try:
            self.cluster.delete(command.name, command.grace_s)
        except ElasticDLError as error:
            logger.warning("Pod %s cannot be deleted: %s", command.name, error.what)

    def _list_pods(self) -> None:
        num_done = self._pod_threads.num_done
        try:
            pods = self.cluster.list()
        except ElasticDLError as error:
            logger.warning("Pods cannot be listed: %s", error.what)
            return
        self.inbox.post(Listing(pods_listed(pods), num_done))

    def _list_shards(self, kind: DataKind) -> None:
        try:
            found = self._read_shards(kind)
        except (ElasticDLError, OSError) as error:
            self.inbox.post(events.ShardsUnreadable(kind, str(error)))
            return
        num_records = sum(len(shard) for shard in found)
        logger.info("Create %d shards of %s data with a total of %d records", len(found), kind, num_records)
        self.inbox.post(events.ShardsListed(kind, found))

    def _verify_shards(self, kind: DataKind, known: tuple[Shard, ...]) -> None:
        found, trouble, pause_s = None, "", _DATA_RETRY_S
        while found is None:
            try:
                found = self._read_shards(kind)
            except (ElasticDLError, OSError) as error:
                if (what := _what(error)) != trouble:
                    trouble = what
                    logger.warning(
                        "The %s data cannot be compared with those that the job began with; the comparison is "
                        "repeated later: %s",
                        kind,
                        trouble,
                    )
                if self._is_closed.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_DATA_RETRY_S)
        if sorted(found) != sorted(known):
            changed = sorted(set(found) ^ set(known))[0].name
            what = f"it has changed since the job began: {changed} does not hold the same records any more"
            self.inbox.post(events.ShardsUnreadable(kind, f"{what}\n  → start a new job on the new data"))
            return
        from elasticdl.data.identity import find_changed

        if (replaced := find_changed(known, found)) is not None:
            self.inbox.post(events.ShardsUnreadable(kind, str(replaced)))
        elif any(shard.identity for shard in found) and not any(shard.identity for shard in known):
            logger.warning(
                "The journal does not say which content the %s files had (there are too many, or it is of an earlier "
                "version): those that were replaced by others with as many records are not noticed",
                kind,
            )

    def _read_shards(self, kind: DataKind) -> tuple[Shard, ...]:
        from elasticdl.data.factory import open_source  # imports NumPy, only for jobs with such data

        reader = open_source(self._spec, getattr(self._spec, f"{kind}_data"), find=self._find_files)
        return tuple(reader.shards())

    def _read_applied_sets(self, command: commands.ReadAppliedSets) -> None:
        try:
            sets = self._ps_calls.read_applied_sets(command.ps)
        except PsUnreachable as error:
            self.inbox.post(events.AppliedSetsUnreadable(command.question, error.what))
        else:
            self.inbox.post(events.AppliedSetsRead(command.question, sets))

    def _save_checkpoint(
        self, command: commands.SaveCheckpoint, layout: Mapping[str, object], check_owner: Callable[[], None]
    ) -> None:
        checkpoint_dir = path_of(self._spec.checkpoint_dir)
        try:
            check_owner()  # a successor may have begun the same version
            directory, manifest = self._write_parts(checkpoint_dir, command, layout)
            check_owner()
            checkpoints.commit(directory, manifest)
        except Superseded:
            raise
        except (ElasticDLError, OSError) as error:
            versions.abandon(versions.directory_of(checkpoint_dir, command.version))
            good = _last_good(checkpoint_dir)
            reason = f"the checkpoint of version {command.version} in {checkpoint_dir} failed: {_what(error)}; {good}"
            self.inbox.post(events.CheckpointFailed(command.version, reason))
            return
        self.inbox.post(events.CheckpointSaved(command.version, str(directory)))
        versions.prune(checkpoint_dir, self._spec.keep_checkpoint_max, command.version)

    def _write_parts(
        self, checkpoint_dir: AnyPath, command: commands.SaveCheckpoint, layout: Mapping[str, object]
    ) -> tuple[AnyPath, checkpoints.Manifest]:
        directory = versions.begin(checkpoint_dir, command.version)
        parts = self._ps_calls.save_parts(command.ps, directory)
        for part in parts:
            if not (directory / part.file).is_file():
                raise CheckpointError(f"PS {part.ps_id} says it wrote {part.file}, which is not in {directory}")
        variables, tables = messages.manifest_layout(layout)
        manifest = checkpoints.Manifest(
            job_name=self._spec.job_name,
            data_fingerprint=command.fingerprint,
            model_version=command.version,
            seed=self._spec.seed,
            num_ps=len(command.ps),
            parts=parts,
            variables=variables,
            tables=tables,
            optimizer=str(layout.get("optimizer", "")),
        )
        return directory, manifest


def _what(error: ElasticDLError | OSError) -> str:
    return error.what if isinstance(error, ElasticDLError) else versions.reason(error)


def _last_good(checkpoint_dir: AnyPath) -> str:
    """Return a sentence about the newest complete checkpoint."""
    try:
        last = checkpoints.newest(checkpoint_dir)
    except (StorageError, OSError):
        return "the last good one is unknown, as its storage does not answer"
    except NewerFormat as error:
        return error.what
    return f"the last good one is {last}" if last else "there is none yet"


def pods_listed(pods: list[Pod]) -> events.PodsListed:
    """Return the event of a listing, without the master's own pod."""
    return events.PodsListed(
        tuple(_pod_changed(pod, PodState(pod.phase)) for pod in pods if pod.role is not Role.MASTER)
    )


def pod_changed(event: PodEvent) -> events.PodChanged | None:
    """Return the event of a change; None for the master's own pod."""
    if event.pod.role is Role.MASTER:
        return None
    return _pod_changed(event.pod, PodState.DELETED if event.type is EventType.DELETED else PodState(event.pod.phase))


def _pod_changed(pod: Pod, phase: PodState) -> events.PodChanged:
    return events.PodChanged(
        name=pod.name,
        role=pod.role,
        index=pod.index,
        uid=pod.uid,
        phase=phase,
        reason=str(pod.reason),
        exit_code=pod.exit_code,
        message=hide(pod.message),  # output of the pod itself, not redacted by our logs
        blocked=pod.blocked,
        node=pod.node,
        has_slot=pod.has_slot,
        queue=pod.queue,
    )


class PodThreads:
    """Threads that create, delete and list pods; their work must not raise.

    Work on different pods is concurrent, work on one pod in the order of requests.  Workers are created after all
    servers requested before them: if there is not room for all, servers must get it.

    Args:
        num_threads: 1 means all work in the order of the requests, except that servers come first.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pods")
        self._lock = threading.Lock()  # guards everything below
        self._queues: dict[str, deque[Work]] = {}  # pending work by pod; its first is running or held back
        self._num_servers = 0  # requested and unfinished creations of servers
        self._held: list[str] = []  # workers that wait for these
        self._waiting: list[Work] = []  # until no creation is in progress
        self._num_requested = 0
        self._num_done = 0
        self._is_closed = False

    @property
    def num_requested(self) -> int:
        """Number of creations requested so far."""
        with self._lock:
            return self._num_requested

    @property
    def num_done(self) -> int:
        """Number of finished creations, successful or not."""
        with self._lock:
            return self._num_done

    def create(self, name: str, work: Work, is_server: bool) -> None:
        """Run the creation of a pod."""

        def create() -> None:
            try:
                work()
            finally:
                self._created(is_server)

        with self._lock:
            self._num_requested += 1
            self._num_servers += is_server
            self._add(name, create, is_held=not is_server and self._num_servers > 0)

    def delete(self, name: str, work: Work) -> None:
        """Run the deletion of a pod, after its creation if that is pending."""
        with self._lock:
            self._add(name, work, is_held=False)

    def between_creations(self, work: Work) -> None:
        """Run work when all requested creations are done."""
        with self._lock:
            self._waiting.append(work)
            self._start_waiting()

    def close(self) -> None:
        """Wait for running work; workers that are held back are not created."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True)

    def _add(self, name: str, work: Work, is_held: bool) -> None:
        queue = self._queues.get(name)
        if queue is not None:
            queue.append(work)
            return
        self._queues[name] = deque([work])
        if is_held:
            self._held.append(name)
        else:
            self._start(partial(self._drain, name))

    def _drain(self, name: str) -> None:
        while True:
            with self._lock:
                queue = self._queues[name]
                if not queue:
                    del self._queues[name]
                    return
                work = queue.popleft()
            work()

    def _created(self, is_server: bool) -> None:
        with self._lock:
            self._num_done += 1
            self._num_servers -= is_server
            if self._num_servers == 0:
                held, self._held = self._held, []
                for name in held:
                    self._start(partial(self._drain, name))
            self._start_waiting()

    def _start_waiting(self) -> None:
        if self._num_done == self._num_requested:
            waiting, self._waiting = self._waiting, []
            for work in waiting:
                self._start(work)

    def _start(self, work: Work) -> None:
        if not self._is_closed:
            self._threads.submit(work)
