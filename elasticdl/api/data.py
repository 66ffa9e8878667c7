"""The data of a user's own script: the master assigns each minibatch once, even when workers come and go.

    data = DataShardService(batch_size=64, dataset_size=60_000, num_epochs=3)
    for minibatch in data:
        train(images[minibatch.indices], labels[minibatch.indices])

Without a master the same script runs alone, over all of the data.  A minibatch counts once it has been reported: by
requesting the next one, as above, or by `done`.  The unreported minibatches of a lost worker go to another worker.

The script either holds the data itself and states only their size (`dataset_size`), or ElasticDL reads files
(`training_data`, or the job's flag --training_data) and each minibatch contains its records.  The first script that
reports decides for all scripts on the data and the size of minibatches.

`OutstandingMinibatches`: minibatches that a script has drawn and not reported yet, oldest first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from elasticdl.activities import Activity
from elasticdl.api.session import AloneLink, ScriptSession, at_exit, process_of_script
from elasticdl.api.source import ScriptSource, read_records
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import TaskRecords
from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter
from elasticdl.worker.tasks import HeldLease, TaskStream
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec

__all__ = ["DataShardService", "Minibatch", "Name", "RecordIndexService", "TaskShard", "read_records"]

_log = logging.getLogger("elasticdl.api")
_DEFAULT_SIZE = 64
_LAST_REPORTS_S = 10.0


@dataclass(frozen=True, slots=True)
class TaskShard:
    """A task returned by `fetch_shard`: records `start` to `end` - 1 of a shard; `indices` is their order."""

    name: str
    start: int
    end: int
    indices: list[int]


@dataclass(slots=True)
class _Task:
    """A lease in progress."""

    held: HeldLease
    sizes: list[int]  # records of each of its minibatches
    done: set[int]


def _warn_of_unused_flags(spec: JobSpec, plan: pb.Plan) -> None:
    """Log the job's flags that the script overrides."""
    defaults = JobSpec()
    for flag, given, default, used in (
        ("num_epochs", spec.num_epochs, defaults.num_epochs, plan.num_epochs),
        ("minibatch_size", spec.minibatch_size, defaults.minibatch_size, plan.minibatch_size),
    ):
        if given not in (default, used):
            _log.warning("--%s=%d has no effect: the script says %d", flag, given, used)


def _take_over(held: HeldLease) -> None:
    """Mark the minibatches of a task that other workers have trained as done."""
    held.committed.update(held.lease.committed)


class DataShardService:
    """The script's view of the ledger; one instance per process.  Thread-safe."""

    def __init__(
        self,
        batch_size: int = 0,
        num_epochs: int | None = None,
        dataset_size: int = 0,
        shuffle: bool | None = None,
        num_minibatches_per_shard: int = 0,
        training_data: str = "",
        data_reader_params: dict[str, object] | None = None,
        session: ScriptSession | None = None,
    ) -> None:
        """Join the job and report what the data are; the first report of any script holds for all.

        Args:
            batch_size: Records per minibatch; 0: --minibatch_size.
            num_epochs: None: --num_epochs; 0: endless.
            dataset_size: Number of records that the script holds itself.
            shuffle: Permute records within each task (tasks always are permuted); None: --shuffle.
            num_minibatches_per_shard: Minibatches per task; 0: --num_minibatches_per_task.
            training_data: Files to read; empty: --training_data.
            data_reader_params: Parameters of their reader; None: --data_reader_params.
            session: Session of the elastic controller that draws from this service; None: the script itself draws.

        Raises:
            DataError: There are no data, or not the requested ones.
            JobError: The master cannot be reached, or the script already has another service or a controller.
        """
        self._is_of_controller, self._process_id = session is not None, process_of_script()
        self.session = session or ScriptSession.join()
        self._lock = threading.Lock()
        self._trained = AppliedSet()  # reported by this process
        spec = self.session.spec
        self._source = _source_of(self.session, training_data, dataset_size, data_reader_params)
        wanted = pb.Plan(
            minibatch_size=batch_size or spec.minibatch_size or _DEFAULT_SIZE,
            num_minibatches_per_task=num_minibatches_per_shard or spec.num_minibatches_per_task,
            has_num_epochs=num_epochs is not None or self.session.is_alone,
            num_epochs=spec.num_epochs if num_epochs is None else num_epochs,
        )
        self.session.take_data()
        self.plan, self._link = self._agree(wanted)
        self.shuffles, clock = spec.shuffle if shuffle is None else shuffle, self.session.clock
        self.tasks = TaskStream(
            self._link, lambda kind: self._source.reader, _take_over, spec.seed, self.shuffles, clock
        )
        self.reporter = Reporter(self._link, spec.log_loss_steps)
        self._open: dict[int, _Task] = {}  # tasks in progress, by lease
        self._drawn = OutstandingMinibatches()
        self._fetching: Iterator[TaskRecords] | None = None
        self._one_fetches = threading.Lock()
        clock.switch(Activity.COMPUTE)
        at_exit(self.close)

    def __reduce__(self) -> Any:
        raise _of_another_process(self._process_id)

    # The data ---------------------------------------------------------------------------------------------------

    def minibatches(self, waits: bool = True) -> Generator[Minibatch, None, None]:
        """Yield minibatches in order; report each by `done` once it is in the model.

        After an iterator is abandoned, the next one yields its unreported minibatches again.  An iterator may run ahead
        of the reports, also in another thread, by at most two tasks; then it blocks.

        Args:
            waits: False: end the iteration instead of blocking until drawn minibatches are reported; report, then
                iterate again.  The data are exhausted when `is_over`.

        Raises:
            JobError: The job trains by AllReduce but no elastic controller draws, or this is not the process that made
                the service.
        """
        self._check_draws()
        for task in self.tasks.records(pb.TRAINING, lambda: waits or not self._has_open()):
            yield from self._minibatches_of(task)

    def __iter__(self) -> Iterator[Minibatch]:
        """Yield minibatches; each is reported when the next one is requested, unless `done` was called before."""
        minibatches = self.minibatches()
        while True:
            with self.session.clock.during(Activity.INPUT):
                minibatch = next(minibatches, None)
            if minibatch is None:
                return
            yield minibatch
            self.done(minibatch)

    def done(self, minibatch: Minibatch, loss: float | None = None) -> bool:
        """Report that a minibatch is in the model.

        Args:
            loss: Its mean loss, for the log.

        Returns:
            Whether this completes its task.  Also False if its lease was lost; another worker then trains it again.
        """
        with self._lock:
            task = self._open.get(minibatch.lease)
            if task is None or minibatch.n in task.done:
                return False
            task.done.add(minibatch.n)
            self._trained.num_applies += self._trained.add(MinibatchName(*minibatch.name))
            is_complete = len(task.done) == len(task.sizes)
            if is_complete:
                del self._open[minibatch.lease]
        task.held.minibatch = max(task.held.minibatch, minibatch.n + 1)
        self.reporter.committed(minibatch.lease, minibatch.n, loss)
        if is_complete:
            self._finish(task)
        return is_complete

    def failed(self, minibatch: Minibatch, error: str, details: str = "") -> None:
        """Report that a minibatch cannot be computed: its task goes to another worker and uses up a retry of the job.

        Raises:
            JobError: This process runs without a master, so there is no other worker.
        """
        self.reporter.drain()
        self._link.fail(minibatch.lease, minibatch.n, error, details, [])
        with self._lock:
            task = self._open.pop(minibatch.lease, None)
        self._link.leases.revoke((minibatch.lease,))
        if task is not None:
            self.tasks.close(task.held)

    def undone(self, minibatch: Minibatch) -> bool:
        """Revert `done`, because the model has been rolled back.

        Returns:
            Whether this worker still has to train it; False: its lease is lost, or its task was complete.
        """
        self.reporter.drain()
        held = self._link.leases.get(minibatch.lease)
        with self._lock:
            task = self._open.get(minibatch.lease)
            if task is None or held is None:
                return False
            task.done.discard(minibatch.n)
            held.committed.discard(minibatch.n)
        return True

    def holds(self, minibatch: Minibatch) -> bool:
        """Return whether this worker still holds the minibatch's lease."""
        return self._link.leases.get(minibatch.lease) is not None

    def records_of(self, shard: str, indices: Sequence[int], identity: str = "") -> list[bytes]:
        """Return records of a shard that ElasticDL reads, by number; none if the script holds the data.

        Args:
            identity: Identity that the shard must still have; empty: any.

        Raises:
            DataError: The records cannot be read.
        """
        return self._source.records(shard, indices, identity)

    @property
    def is_over(self) -> bool:
        """Whether this job has no more data."""
        return self.tasks.is_over

    def get_minibatch_count_per_epoch(self) -> int:
        """Return the number of minibatches in an epoch, over all workers."""
        return int(self.plan.num_minibatches)

    def has_rest_of(self, epoch: int, newest_lease: int) -> bool:
        """See `MasterLink.has_rest_of`; for a fixed global batch."""
        link = self.session.link
        return link is not None and link.has_rest_of(epoch, newest_lease)

    def metadata(self) -> Metadata:
        """Return column names and more, for files that ElasticDL reads."""
        return self._source.reader.metadata()

    @property
    def has_records(self) -> bool:
        """Whether minibatches contain their records."""
        return self._source.has_records

    def is_training_over(self) -> bool:
        """Return whether all commands that train have ended; for a pod that only evaluates."""
        link = self.session.link
        return link is None or link.is_over()

    def report_session(self, event: pb.SessionEvent) -> None:
        """Report an event of the model on TensorFlow's own parameter servers; only for the chief.

        Raises:
            JobError: This worker is not the chief.
        """
        link = self.session.link
        if link is None:
            return
        self.reporter.drain()
        before = [held.id for held in link.leases.held()]
        ack = link.report_session(event)
        if not ack.accepted:
            raise JobError(f"the master rejected a report of TensorFlow's session: {ack.reason}")
        if event == pb.RESTORED:  # the master has revoked all leases; another thread may hold a new one by now
            link.leases.revoke(before)
            with self._lock:
                for lease in before:
                    self._open.pop(lease, None)

    def stop_training(self, reason: str) -> None:
        """End training early, on purpose: workers finish their current data and get no more.

        If scripts end before the end of the data without this call, the job has failed.

        Args:
            reason: For the log.

        Raises:
            JobError: The master cannot be reached.
        """
        if self.session.is_server:
            return
        self.reporter.drain()
        ack = self._link.stop_training(reason)
        if not ack.accepted:
            raise JobError(f"the master does not stop training: {ack.reason}")

    def close(self) -> None:
        """Wait until the master has received all reports; called automatically when the process ends."""
        self.reporter.drain(_LAST_REPORTS_S)
        if self.session.link is not None:
            self.session.link.report_time()

    # The original's calls ---------------------------------------------------------------------------------------

    def stream(self) -> Iterator[Minibatch]:
        """Yield minibatches for an input pipeline in another thread; report them in order by `report_batch_done`.

        A new stream replaces the previous one, and begins with its unreported minibatches.
        """
        number = self._drawn.begin_stream()
        for minibatch in self.minibatches():
            if not self._drawn.add([minibatch], number):
                return
            yield minibatch

    def fetch_shard(self) -> TaskShard | None:
        """Return the next task, waiting if necessary; None when there are no more data.

        Raises:
            JobError: The job trains by AllReduce, with data assigned by an elastic controller.
        """
        self._check_draws()
        with self._one_fetches, self._waiting_for_input():
            self._fetching = self._fetching or self.tasks.records(pb.TRAINING)
            for task in self._fetching:
                minibatches = list(self._minibatches_of(task))
                held = self._link.leases.get(task.lease)
                if minibatches and held is not None:  # else it is done, or was revoked a moment ago
                    self._drawn.add(minibatches)
                    indices = [index for minibatch in minibatches for index in minibatch.indices]
                    return TaskShard(held.lease.shard.name, held.lease.shard.start, held.lease.shard.end, indices)
        return None

    def report_batch_done(self, batch_size: int | None = None, err_msg: str = "") -> bool:
        """Report that records of fetched shards are in the model, oldest first.

        Args:
            batch_size: Number of records; None: one minibatch, whatever its size.
            err_msg: If set, reports instead that the oldest task has failed, with this reason.

        Returns:
            Whether this completes a task.
        """
        if err_msg:
            oldest = self._drawn.drop_oldest_task()
            if oldest is not None:
                self.failed(oldest, err_msg)
            return False
        completes = False
        for minibatch in self._drawn.take_reported(batch_size):
            completes = self.done(minibatch) or completes
        return completes

    def get_current_task(self) -> HeldLease | None:
        """Return the lease of the oldest fetched minibatch that is not reported."""
        oldest = self._drawn.oldest()
        return None if oldest is None else self._link.leases.get(oldest.lease)

    def _ledger(self) -> pb.AppliedSet:
        """Return the reports of this process: a killed master may have lost the reports of its last second."""
        with self._lock:
            return self._trained.to_message()

    # Behind them ------------------------------------------------------------------------------------------------

    def _agree(self, wanted: pb.Plan) -> tuple[pb.Plan, MasterLink | AloneLink]:
        """Return the plan in force, and the link that assigns its tasks."""
        link, spec = self.session.link, self.session.spec
        if link is None:
            plan = self._source.plan_alone(wanted)
            return plan, AloneLink(self._source.shards, plan, spec.seed)
        plan = self._source.agree(link, wanted)
        _warn_of_unused_flags(spec, plan)
        link.carry_ledger(self._ledger)
        return plan, link

    def _check_draws(self) -> None:
        """Check that this process can get data: under AllReduce the master assigns none before a group is formed.

        Raises:
            JobError: No group will form; or this process is a fork of the one that made the service, or has imported
                its script.
        """
        if os.getpid() != self._process_id:
            raise _of_another_process(self._process_id)
        is_all_reduce = self.session.spec.distribution_strategy is DistributionStrategy.ALL_REDUCE
        if is_all_reduce and not self.session.is_alone and not self._is_of_controller:
            raise JobError(
                "The script takes its data from a DataShardService alone, and the job's strategy is AllReduceStrategy: "
                "its workers would wait for a group that none of them forms.",
                "Start it without --distribution_strategy=AllReduceStrategy: each worker trains a model of its own; or "
                "train one model with create_elastic_controller of elasticdl.api.pytorch (docs/pytorch_script.md).",
            )

    def _waiting_for_input(self) -> AbstractContextManager[None]:
        """Count the block's time as input if this is the reported thread; other threads draw ahead of it."""
        is_main = threading.current_thread() is threading.main_thread()
        return self.session.clock.during(Activity.INPUT) if is_main else nullcontext()

    def _has_open(self) -> bool:
        with self._lock:
            return bool(self._open)

    def _minibatches_of(self, task: TaskRecords) -> Iterator[Minibatch]:
        """Yield the unreported minibatches of a task."""
        held = self._link.leases.get(task.lease)
        if held is None:
            return
        if held.unreadable is not None:
            self._link.fail(held.id, 0, str(held.unreadable), "", [])
            raise held.unreadable
        size, numbers = self.plan.minibatch_size, held.record_numbers
        starts = range(0, len(numbers), size)
        with self._lock:
            sizes = [len(numbers[start : start + size]) for start in starts]
            opened = self._open.setdefault(held.id, _Task(held, sizes, set(held.committed)))
            todo = [n for n in range(len(starts)) if n not in opened.done]
            if not todo:
                self._open.pop(held.id, None)
        if not todo:
            self._finish(opened)
        for n in todo:
            if held.revoked:
                with self._lock:
                    self._open.pop(held.id, None)
                return
            part = slice(starts[n], starts[n] + size)
            records = list(task.records[part]) if self.has_records else []
            lease = held.lease
            name, identity, is_last = lease.shard.name, lease.shard.identity, n == todo[-1]
            yield Minibatch(held.id, lease.epoch, lease.task, n, name, numbers[part], records, is_last, identity)

    def _finish(self, task: _Task) -> None:
        self.reporter.finished(task.held.id, len(task.sizes))
        self.tasks.close(task.held)


class RecordIndexService(DataShardService):
    """Gives single records, for map-style data sets with their own order.

    Report by `report_batch_done(number of records)`, in the order in which records were fetched.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._indices: deque[int] = deque()
        self._fetch_lock = threading.Lock()

    def fetch_record_index(self) -> int:
        """Return the number of the next record.

        Raises:
            StopIteration: There are no more data.
        """
        with self._fetch_lock:
            while not self._indices:
                shard = self.fetch_shard()
                if shard is None:
                    raise StopIteration
                self._indices.extend(shard.indices)
            return self._indices.popleft()


def _of_another_process(process_id: int) -> JobError:
    return JobError(
        f"a DataShardService belongs to the process that has made it ({process_id}): others would train the same "
        "records again",
        "draw minibatches there, and give other processes their records or numbers: a DataLoader over the service "
        "has num_workers=0; with PyTorch, controller.loader(dataset, num_workers=…)",
    )


def _source_of(
    session: ScriptSession, training_data: str, dataset_size: int, data_reader_params: dict[str, object] | None
) -> ScriptSource:
    """Return the data source given by the script, or by the job's flags; parameter servers have none."""
    if session.is_server:
        return ScriptSource.none()
    says_itself = bool(dataset_size or training_data) or data_reader_params is not None
    origin, is_our_own = training_data or session.spec.training_data, says_itself or session.is_alone
    return ScriptSource(origin, dataset_size, data_reader_params, session.spec, is_our_own)


Name = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The n-th minibatch of a task: the same records in every worker.

    Attributes:
        lease: The lease that it belongs to.
        epoch: Counted from 0.
        task: Number of its task in the epoch.
        n: Its number in the task.
        shard: Name of the shard; empty if only the size of the data is known.
        indices: Numbers of its records in the shard.
        records: The records themselves, if ElasticDL reads them.
        ends_lease: It is the last minibatch of its lease.
        identity: Identity of the shard; see `Shard`.
    """

    lease: int
    epoch: int
    task: int
    n: int
    shard: str
    indices: list[int]
    records: list[bytes] = field(default_factory=list, repr=False)
    ends_lease: bool = False
    identity: str = ""

    @property
    def name(self) -> Name:
        """A name that is unique in the job."""
        return (self.epoch, self.task, self.n)

    def __len__(self) -> int:
        return len(self.indices)


class OutstandingMinibatches:
    """Minibatches that are reported in order, by minibatch or by number of records.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minibatches: deque[Minibatch] = deque()
        self._records = 0  # reported records that do not complete a minibatch yet
        self._stream = 0  # number of the newest stream

    def begin_stream(self) -> int:
        """Clear the queue and return the number of a new stream; only that stream can add minibatches from now on."""
        with self._lock:
            self._stream += 1
            self._minibatches.clear()
            self._records = 0
            return self._stream

    def add(self, minibatches: Iterable[Minibatch], stream: int | None = None) -> bool:
        """Add minibatches; return False, without adding them, if a newer stream has begun."""
        with self._lock:
            if stream not in (None, self._stream):
                return False
            self._minibatches.extend(minibatches)
            return True

    def oldest(self) -> Minibatch | None:
        with self._lock:
            return self._minibatches[0] if self._minibatches else None

    def take_reported(self, num_records: int | None) -> list[Minibatch]:
        """Remove and return the minibatches completed by this number of records; None: the oldest one, of any size."""
        with self._lock:
            if num_records is None:
                return [self._minibatches.popleft()] if self._minibatches else []
            found = []
            self._records += num_records
            while self._minibatches and self._records >= len(self._minibatches[0]):
                self._records -= len(self._minibatches[0])
                found.append(self._minibatches.popleft())
            return found

    def drop_oldest_task(self) -> Minibatch | None:
        """Remove all minibatches of the oldest one's lease; return the oldest one."""
        with self._lock:
            if not self._minibatches:
                return None
            oldest = self._minibatches[0]
            self._minibatches = deque(other for other in self._minibatches if other.lease != oldest.lease)
            self._records = 0
            return oldest
