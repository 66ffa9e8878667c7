"""The last checkpoint of an AllReduce job whose members all get SIGTERM: agreed on between steps, written by one.

A member that gets SIGTERM stays for a moment, and says so in its headers.  If all members say so at the same step, they
end after it together, and rank 0 writes the checkpoint.  If a member is left whose peers have all said so, it writes
the checkpoint alone when it ends.  Where others continue, none is written: they hold the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt

from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.allreduce.replica import CheckpointWriter
from elasticdl.worker.allreduce.step_header import StepFlag
from elasticdl.worker.allreduce.world_session import WorldEnded
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.termination import PATIENCE_S, Termination

_log = logging.getLogger("elasticdl.worker")
_TOGETHER_S = 1.0  # after SIGTERM, for which a member waits for that of the others


class EndingGroup(Protocol):
    """The part of `WorldSession` that this uses."""

    ledger: Ledger

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def holds_all(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    def collect(self) -> Mapping[str, npt.NDArray[Any]]: ...

    def part(self) -> bool: ...

    def leave(self, reason: str = "") -> None: ...


class LastCheckpoint:
    """See above.

    Attributes:
        is_agreed: all members end together, and hold or have sent what it needs.
    """

    def __init__(
        self, group: EndingGroup, checkpoints: CheckpointWriter, termination: Termination, clock: ActivityClock
    ) -> None:
        self.is_agreed = False
        self._group = group
        self._checkpoints = checkpoints
        self._termination = termination
        self._clock = clock
        self._round_began, self._round_s = 0.0, 0.0  # by the monotonic clock; and how long the one before took

    def begin_world(self) -> None:
        """The next round is the first of a world."""
        self._round_began = time.monotonic()

    def begin_round(self) -> StepFlag:
        """Return what follows from SIGTERM for the header of the round that begins now."""
        before, self._round_began = self._round_began, time.monotonic()
        self._round_s = self._round_began - before
        if not self._termination.is_asked:
            return StepFlag.NOTHING
        if not (self._group.size > 1 and self._checkpoints.is_wanted):
            return StepFlag.LEAVING
        # Others may have sent their last header just before SIGTERM came to them: the next one counts.
        seconds, round_s = self._termination.seconds, self._round_s
        is_late = seconds - round_s >= _TOGETHER_S or seconds + 2 * round_s > PATIENCE_S  # the next may take longer
        return StepFlag.ENDING | (StepFlag.LEAVING if is_late else StepFlag.NOTHING)

    def end_with_all(self) -> None:
        """All members end after the present step: write the checkpoint, and leave when it is on disk.

        A member that leaves earlier brings a successor, which could begin with the checkpoint before.

        Raises:
            WorldEnded: always.
        """
        reason = "all members were asked to end"
        with self._clock.during(Activity.CHECKPOINT):
            others = self._group.collect()
            self.is_agreed = True
            if self._group.rank == 0:
                self._save(others)
            if not self._group.part() and self._group.rank != 0:
                self.is_agreed = False  # rank 0 may be lost before it is on disk
        self._group.leave(reason)
        raise WorldEnded(reason)

    def save(self, is_idle: bool) -> None:
        """Before the farewell, in the thread of the termination: write it if this member is the last.

        Args:
            is_idle: no step is being made, so the model is whole.
        """
        if self._is_writer(is_idle) and not self.is_agreed:
            with self._clock.during(Activity.CHECKPOINT):
                if self._group.holds_all:
                    self._save({})
                else:
                    self._checkpoints.wait(self._termination.saving_s)

    def finish(self, is_idle: bool) -> None:
        """After the farewell: a large one has the rest of the grace."""
        if self._is_writer(is_idle):
            self._checkpoints.wait()

    def _is_writer(self, is_idle: bool) -> bool:
        return self.is_agreed or (is_idle and self._group.is_last)

    def _save(self, others: Mapping[str, npt.NDArray[Any]]) -> None:
        ledger = self._group.ledger
        if self._checkpoints.is_behind(ledger):
            _log.info("SIGTERM to all workers: the last checkpoint is written, after step %d", ledger.steps)
        self._checkpoints.save_last(ledger, self._termination.saving_s, others)
