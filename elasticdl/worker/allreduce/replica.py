"""The model in an AllReduce worker: how it is taken over, started over, and written to checkpoints.

If all members of a job get SIGTERM, they agree between two steps on the last checkpoint, and one member writes it.
A member that gets SIGTERM stays for a moment, and announces its end in its headers.  If all members announce it at the
same step, they end together after it, and rank 0 writes the checkpoint.  If one member is left whose peers have all
announced their end, it writes the checkpoint alone when it ends.  If members continue, none is written: they hold the
model.  If the group breaks meanwhile, nothing is agreed, and its members agree in the next group.  If the master plans
none in time, because it is away, no member can know whether others continue, so each writes what it holds; members with
the same step write the same files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from elasticdl.activities import Activity, ActivityClock
from elasticdl.frameworks.framework import DescribesSums, KeepsState, ShardsOptimizer, TableRows, TakesSnapshots
from elasticdl.protocol import WrittenCheckpoint
from elasticdl.worker.allreduce.step_header import StepFlag
from elasticdl.worker.checkpoint import Arrays, Checkpoint, StateCheckpoints, read_from
from elasticdl.worker.ledger import Ledger, RestoredModel
from elasticdl.worker.tasks import HeldLease, OwnValues
from elasticdl.worker.termination import PATIENCE_S, Termination
from elasticdl_client.errors import CheckpointError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_CHECKPOINT_PERIOD_S = 60.0
_STATE_FILE = "model.npz"


class Replica(OwnValues):
    """The model of this process: a `ReplicaState`, and an `OwnValues` for evaluation and export.

    Attributes:
        num_restored: Minibatches in the checkpoint that this process has read; 0 for none, or one of another job.
    """

    def __init__(
        self, framework: KeepsState, checkpoints: StateCheckpoints, init_from: str, clock: ActivityClock
    ) -> None:
        """
        Args:
            init_from: The flag --checkpoint_dir_for_init; empty: not given.
        """
        self._framework = framework
        self._checkpoints = checkpoints
        self._init_from = init_from
        self._clock = clock
        self.num_restored = 0
        self.begin()

    def begin(self) -> None:
        """Take the current values of the model as its initial values."""
        self._initial = self._framework.state()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return self._framework.state()

    def snapshot(self) -> Callable[[], Arrays]:
        """Return a function that returns the current `arrays`, callable in any thread."""
        if isinstance(self._framework, TakesSnapshots):
            return self._framework.snapshot()
        arrays = self.arrays()
        return lambda: arrays

    def load(self, arrays: Arrays) -> None:
        self._framework.load_state(arrays)

    def sums(self) -> Sequence[str]:
        """See `ReplicaState`; empty for a framework whose sums follow from the names in `arrays`."""
        return self._framework.sums() if isinstance(self._framework, DescribesSums) else ()

    def reset(self) -> None:
        """Set the initial values."""
        self._framework.load_state(self._initial)

    def start_over(self) -> RestoredModel:
        """See `ReplicaState`.

        Raises:
            CheckpointError: there is a checkpoint that does not fit this job.
        """
        checkpoints, init_from = self._checkpoints, self._init_from
        found = read_from(checkpoints.place, self._clock, checkpoints.newest)
        if found is not None:
            self._load_from(found, "--checkpoint_dir")
            ledger = found.ledger
            self.num_restored = ledger.applied.num_names
        elif init_from:
            found = read_from(init_from, self._clock, lambda: checkpoints.initial(init_from))
            self._load_from(found, "--checkpoint_dir_for_init")
            ledger = Ledger(steps=found.ledger.steps, num_records=found.ledger.num_records)
        else:
            self.reset()
            return RestoredModel(Ledger())
        _log.info("Restored the model at step %d from %s", ledger.steps, found.directory)
        return RestoredModel(ledger, str(found.directory))

    def num_saved(self) -> int:
        """Return the minibatches in the checkpoint with which the model would start over; 0: there is none."""
        return read_from(self._checkpoints.place, self._clock, self._checkpoints.newest_number)

    def _load_from(self, found: Checkpoint, flag: str) -> None:
        try:
            self._framework.load_state(found.arrays)
        except CheckpointError as error:
            raise CheckpointError(
                f"The checkpoint in {found.directory} cannot be loaded. {error.what}",
                f"Use the module that the checkpoint was written with, or another {flag}.",
            ) from None

    def tables(self, held: HeldLease) -> list[TableRows]:
        return []


class ShardedReplica(Replica):
    """A replica that keeps the shards of the checkpoint it has read in main memory, for other members."""

    def __init__(
        self, framework: KeepsState, checkpoints: StateCheckpoints, init_from: str, clock: ActivityClock
    ) -> None:
        """
        Args:
            framework: Must be a `ShardsOptimizer`, too.
            checkpoints: See `Replica`.
            init_from: See `Replica`.
            clock: See `Replica`.
        """
        assert isinstance(framework, ShardsOptimizer)
        self._optimizer: ShardsOptimizer = framework
        self._restored: dict[int, dict[str, npt.NDArray[Any]]] = {}
        super().__init__(framework, checkpoints, init_from, clock)

    def take_restored(self) -> dict[int, dict[str, npt.NDArray[Any]]]:
        """See `ShardedModel`."""
        restored, self._restored = self._restored, {}
        return restored

    def _load_from(self, found: Checkpoint, flag: str) -> None:
        super()._load_from(found, flag)
        self._restored = self._optimizer.shards_of(found.arrays)


class CheckpointWriter:
    """Writes checkpoints of the model between two steps, in the background.

    Attributes:
        model: The model to write.
        failure: Why the newest checkpoint could not be written; empty if it could.
    """

    def __init__(self, model: Replica, checkpoints: StateCheckpoints, every: int) -> None:
        """
        Args:
            every: Minibatches between two checkpoints; 0: one per minute.
        """
        self.model = model
        self._checkpoints = checkpoints
        self._every = every
        self._saved_at = (0, time.monotonic())
        self._has_begun = self._is_requested = False
        self.failure = ""
        self._thread: threading.Thread | None = None
        self._saving_last = threading.Lock()

    @classmethod
    def of(cls, spec: JobSpec, framework: KeepsState, clock: ActivityClock) -> CheckpointWriter:
        """Return the writer of a job; the current values of the model are its initial ones."""
        checkpoints = StateCheckpoints.of_module(spec, _STATE_FILE)
        make_model = ShardedReplica if spec.shard_optimizer else Replica
        model = make_model(framework, checkpoints, spec.checkpoint_dir_for_init, clock)
        return cls(model, checkpoints, spec.checkpoint_steps)

    def request(self) -> None:
        """Write a checkpoint after the current step.  Thread-safe."""
        self._checkpoints.request()

    def newest_try(self) -> WrittenCheckpoint | None:
        """Return how the newest attempt to write a checkpoint has ended; None if there was none."""
        return self._checkpoints.newest_try

    def begin(self, ledger: Ledger) -> None:
        """Begin a group with this ledger.

        Minibatches of earlier groups that are not on disk still have to be written.  Writes of other members are not
        known here: of a model taken over from them, everything counts as unwritten.
        """
        number = ledger.applied.num_names
        if not self._has_begun:
            self._has_begun, self._saved_at = True, (self.model.num_restored, time.monotonic())
        self._saved_at = (min(number, self._saved_at[0]), self._saved_at[1])

    def save_if_due(self, ledger: Ledger) -> None:
        """Start to write a checkpoint if one is due; called between two steps."""
        if self.is_due(ledger):
            self.save(ledger, {})

    def is_due(self, ledger: Ledger) -> bool:
        """Return whether a checkpoint should be written now; False while one is being written."""
        if not self._checkpoints.is_wanted or self._is_writing:
            return False
        number, moment = self._saved_at
        if self._every:
            is_due = ledger.applied.num_names - number >= self._every
        else:
            is_due = time.monotonic() - moment >= _CHECKPOINT_PERIOD_S
        self._is_requested = self._checkpoints.take_request() or self._is_requested
        return self._is_requested or is_due

    def is_behind(self, ledger: Ledger) -> bool:
        """Return whether the newest checkpoint lacks minibatches, or could not be written."""
        return self._checkpoints.is_wanted and (bool(self.failure) or ledger.applied.num_names > self._saved_at[0])

    def is_saved(self, ledger: Ledger) -> bool:
        """Return whether this member has written the ledger, and is writing no checkpoint."""
        return not self._is_writing and not self.is_behind(ledger)

    def is_written(self, ledger: Ledger) -> bool:
        """Return whether some member has written this ledger."""
        return self._checkpoints.has(ledger.applied.num_names)

    @property
    def is_wanted(self) -> bool:
        """Whether the job has a directory for checkpoints."""
        return self._checkpoints.is_wanted

    def newest(self) -> str:
        """Return the directory of the newest complete checkpoint; empty if there is none."""
        return self._checkpoints.newest_directory()

    def save_last(self, ledger: Ledger, within_s: float | None = None, others: Arrays | None = None) -> None:
        """Write a checkpoint if the newest one lacks minibatches; return when it is on disk, or after `within_s`.

        Args:
            ledger: The minibatches in the model.
            within_s: None: no limit.
            others: State of the model that other members hold.
        """
        end = None if within_s is None else time.monotonic() + within_s
        self.wait(within_s)
        with self._saving_last:  # the end of the job and SIGTERM call this from two threads
            if not self._is_writing and self.is_behind(ledger):
                self.save(ledger, others or {})
        self.wait(None if end is None else max(0.0, end - time.monotonic()))

    def save(self, ledger: Ledger, others: Arrays, is_last: bool = False) -> None:
        """Write the model.

        Args:
            others: State of the model that other members hold.
            is_last: Return only when it is on disk.
        """
        self.wait()
        self._is_requested, self.failure = False, ""
        self._saved_at = (ledger.applied.num_names, time.monotonic())
        arguments = (self.model.snapshot(), others, ledger.copy())
        self._thread = threading.Thread(target=self._save, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if is_last:
            self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, or for `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _save(self, arrays: Callable[[], Arrays], others: Arrays, ledger: Ledger) -> None:
        number = ledger.applied.num_names
        try:
            self._checkpoints.save(number, {**arrays(), **others}, ledger)
        except CheckpointError as error:
            self.failure = error.what
            _log.error("Checkpoint at step %d in %s failed: %s", ledger.steps, self._checkpoints.place, error.what)
        except Exception as error:  # noqa: BLE001  what is not on disk must not count as written
            self.failure = f"{type(error).__name__}: {error}"
            self._checkpoints.note_failure(number, error)  # the failure may have come before any file was written
            _log.exception("Checkpoint at step %d in %s failed", ledger.steps, self._checkpoints.place)
        else:
            _log.info("Checkpoint of %d minibatches written", number)


_TOGETHER_S = 1.0  # how long a member waits after SIGTERM for the other members to get it, too


class Membership(Protocol):
    """The part of `GroupSession` that all its clients use: rank, size, and the ledger of the model."""

    ledger: Ledger

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def share(self, data: bytes | None, source: int = 0) -> bytes: ...


class EndingGroup(Membership, Protocol):
    """The part of `GroupSession` that the last checkpoint uses."""

    @property
    def holds_all(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def is_alone(self) -> bool: ...

    @property
    def has_left(self) -> bool: ...

    def shut_out(self) -> bool: ...

    def collect(self) -> Mapping[str, npt.NDArray[Any]]: ...

    def part(self) -> bool: ...

    def leave(self, reason: str = "") -> None: ...


class LastCheckpoint:
    """Decides whether this member writes the last checkpoint of the job, and writes it; see the module.

    Attributes:
        is_agreed: Whether all members end together, and hold or have sent all state that the checkpoint needs.
    """

    def __init__(
        self, group: EndingGroup, checkpoints: CheckpointWriter, termination: Termination, clock: ActivityClock
    ) -> None:
        self.is_agreed = False
        self._group = group
        self._checkpoints = checkpoints
        self._termination = termination
        self._clock = clock
        termination.enters_groups(group.shut_out)
        self._round_began, self._round_s = 0.0, 0.0  # by the monotonic clock; duration of the round before

    @property
    def needs_group(self) -> bool:
        """Whether the next group must decide on the last checkpoint, once the current group has ended."""
        is_decided = self.is_agreed or self._group.has_left or self._group.is_alone
        return self._checkpoints.is_wanted and not is_decided

    def begin_group(self) -> None:
        """Note that the next round is the first of a group."""
        self._round_began = time.monotonic()

    def begin_round(self) -> StepFlag:
        """Begin a round; return the flags for its header that follow from SIGTERM."""
        before, self._round_began = self._round_began, time.monotonic()
        self._round_s = self._round_began - before
        if not self._termination.is_asked:
            return StepFlag.NOTHING
        if not (self._group.size > 1 and self._checkpoints.is_wanted):
            return StepFlag.LEAVING
        # Others may have sent their last header just before they got SIGTERM: wait for their next one.
        seconds, round_s = self._termination.seconds, self._round_s
        is_late = seconds - round_s >= _TOGETHER_S or seconds + 2 * round_s > PATIENCE_S  # the next may be longer
        return StepFlag.ENDING | (StepFlag.LEAVING if is_late else StepFlag.NOTHING)

    def end_with_all(self) -> str:
        """Write the last checkpoint after the current step, with all members, and leave the group when it is on disk.

        If a member left earlier, its successor could begin with the checkpoint before.

        Returns:
            Why the group has ended.
        """
        reason = "all members were asked to end"
        with self._clock.during(Activity.CHECKPOINT):
            others = self._group.collect()
            self.is_agreed = True
            if self._group.rank == 0:
                self._save(others)
            if not self._group.part() and self._group.rank != 0:
                self.is_agreed = self._checkpoints.is_written(self._group.ledger)  # otherwise rank 0 may be lost
        self._group.leave(reason)
        return reason

    def save_with_all(self) -> str:
        """Write the last checkpoint at the end of the training; every member must call this between the same two steps.

        Returns:
            Why rank 0 could not write it, in all members; empty if it is on disk.

        Raises:
            GroupEnded: the group is broken.
        """
        why_not: bytes | None = None
        with self._clock.during(Activity.CHECKPOINT):
            others = self._group.collect()
            if self._group.rank == 0:
                self._checkpoints.save_last(self._group.ledger, others=others)
                why_not = self._checkpoints.failure.encode()
        with self._clock.during(Activity.COLLECTIVE):
            return self._group.share(why_not).decode()

    def save(self, is_idle: bool) -> None:
        """Write the checkpoint before the farewell if this member is, or may be, the last.  In the termination thread.

        Args:
            is_idle: Whether no step is being made, so that the model is consistent.
        """
        if self._is_writer(is_idle) and not self.is_agreed:
            with self._clock.during(Activity.CHECKPOINT):
                if self._group.holds_all:
                    self._save({})
                else:
                    self._checkpoints.wait(self._termination.saving_s)

    def finish(self, is_idle: bool) -> None:
        """After the farewell, wait for the rest of the grace period until a large checkpoint is written."""
        if not self._is_writer(is_idle):
            return
        self._checkpoints.wait(self._termination.rest_s)
        is_another = self.is_agreed and self._group.rank != 0
        if self._group.holds_all and not is_another and not self._checkpoints.is_saved(self._group.ledger):
            _log.warning(
                "The last checkpoint, after step %d, is not written before this worker ends. If no other worker has "
                "the model, training continues from %s",
                self._group.ledger.steps,
                self._checkpoints.newest() or "the start",
            )
            self._checkpoints.wait()

    def _is_writer(self, is_idle: bool) -> bool:
        return self.is_agreed or (is_idle and (self._group.is_last or self._is_in_doubt))

    @property
    def _is_in_doubt(self) -> bool:
        """Whether no group came in which members could agree, so that no member knows whether others continue."""
        return self.needs_group and self._group.shut_out()

    def _save(self, others: Mapping[str, npt.NDArray[Any]]) -> None:
        ledger = self._group.ledger
        if self._checkpoints.is_behind(ledger):
            whom = "all workers" if self.is_agreed or self._group.is_last else "this worker, and no group has formed"
            _log.info("SIGTERM to %s: the last checkpoint is written, after step %d", whom, ledger.steps)
        self._checkpoints.save_last(ledger, self._termination.saving_s, others)
