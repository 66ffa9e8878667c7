"""The membership of one worker in the groups of an AllReduce job: it gets ready, enters, makes steps, and leaves.

All members run the same sequence of collectives: a header (`plan_step`), the reduction of the buffers
(`begin_reduce`, `finish_reduce`), and when all buffers have come, the update and `commit`.  The header of step k + 1
proves that step k is in every member's model.  Any failure ends the group with `GroupEnded`, and the next call must be
`enter`; after it, the state, its ledger and its counts are those of the source.

The session owns the ledger of the model (which minibatches it holds) and knows nothing of frameworks, leases and tasks.
All methods but `standing` and `shut_out` must be called by one thread.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from elasticdl.collective import ElasticGroup, GroupLost, Peer, Reduction
from elasticdl.protocol import pod_and_process
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.agreement import Sums, check_rounds
from elasticdl.worker.allreduce.step_header import BatchRef, Departures, StepFlag, StepPlan, StepProposal
from elasticdl.worker.ledger import Ledger, RestoredModel
from elasticdl.worker.master_link import MasterLink
from elasticdl_client.errors import ModelDefinitionError

_BROKEN = re.compile(r"group \d+ is broken: ")
_NOT_FORMED = re.compile(r"group \d+ cannot be formed: ")
_WAIT_S = 1.0
_SHUT = "this worker was asked to end"

_log = logging.getLogger("elasticdl.worker")

Answer = TypeVar("Answer")
Arrays = Mapping[str, npt.NDArray[Any]]


def format_version(version: int) -> str:
    """Format a group version for logs: `generation.count`, with the generation of the master."""
    return f"{version >> 32}.{version & 0xFFFFFFFF}"


def reason_of(lost: GroupLost, group: pb.Group) -> str:
    """Return why a group was lost, in one clause that names the worker instead of its rank.

    Args:
        lost: The error of the collective.
        group: The lost group.
    """
    rank = -1 if lost.rank is None else lost.rank
    worker = f"worker {group.members[rank].worker_id}" if 0 <= rank < len(group.members) else ""
    if _BROKEN.match(lost.what):
        return f"it has lost {worker or 'a member'}"
    not_formed = _NOT_FORMED.match(lost.what)
    if not_formed is None:
        return lost.what
    cause = f" without {worker}" if worker else f": {lost.what[not_formed.end() :]}"
    return f"group {format_version(group.version)} cannot be formed{cause}"


class GroupWatch:
    """Watches the newest group that the master has planned, in a daemon thread.

    Attributes:
        last_formed: Version of the last group that formed; known once the job is over.
    """

    def __init__(self, link: MasterLink, on_group: Callable[[pb.Group], None]) -> None:
        """
        Args:
            on_group: Called in the watcher thread with every new group, and with an empty one when the job is over.
        """
        self._link = link
        self._on_group = on_group
        self._changed = threading.Condition()
        self._group = pb.Group()
        self._is_over = False
        self.last_formed = 0
        self._thread = threading.Thread(target=self._run, name="group watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def group(self) -> pb.Group:
        """The newest planned group; its version is 0 before the first one."""
        return self._group

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the job is over."""
        return self._is_over

    def await_own(self, newer_than: int, timeout_s: float = _WAIT_S) -> pb.Group | None:
        """Wait for a group newer than `newer_than` with this process in it; None if there is none yet, or ever."""

        def is_there() -> bool:
            return self._is_over or self._is_own(newer_than)

        with self._changed:
            self._changed.wait_for(is_there, timeout_s)
            return self._group if self._is_own(newer_than) and not self._is_over else None

    def _is_own(self, newer_than: int) -> bool:
        return self._group.version > newer_than and any(map(self._link.is_me, self._group.members))

    def _run(self) -> None:
        while not self._is_over:
            reply = self._link.watch_group(self._group.version)
            match reply.WhichOneof("answer"):
                case "group":
                    self._take(reply.group)
                case "end":
                    self._end(reply.formed)
                case "unknown":
                    self._link.register()
                case _:
                    pass

    def _take(self, group: pb.Group) -> None:
        if group.version <= self._group.version:
            return
        with self._changed:
            self._group = group
            self._changed.notify_all()
        _log.debug("Group %d is planned: %s", group.version, [member.worker_id for member in group.members])
        self._on_group(group)

    def _end(self, formed: int) -> None:
        with self._changed:
            self._is_over, self.last_formed = True, formed
            self._changed.notify_all()
        self._on_group(pb.Group())


def digest_of(arrays: Arrays) -> str:
    """Return a hash of the arrays' names and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays.items()):
        found.update(name.encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


class GroupEnded(Exception):
    """This worker has left its group; to continue, it must `enter` the next one."""


class ReplicaState(Protocol):
    """The model of this process, with its optimizer and all other state that must be equal in all members."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of all state, by name."""
        ...

    def load(self, arrays: Arrays) -> None:
        """Set the state from the result of `arrays`."""
        ...

    def sums(self) -> Sequence[str]:
        """Describe the variables and buffers that members sum up in a step, in order."""
        ...

    def start_over(self) -> RestoredModel:
        """Load the newest checkpoint, or initial values; called when no living member holds the model."""
        ...


class GroupSession:
    """See the module.

    Attributes:
        is_begun_anew: Whether the master ended all leases when this group formed: its model was restored, or is at
            step 0.
    """

    def __init__(
        self,
        link: MasterLink,
        group: ElasticGroup,
        state: ReplicaState,
        collective_timeout_s: float,
        most_parts: int = 1,
        processes_per_worker: int = 1,
    ) -> None:
        """
        Args:
            collective_timeout_s: Limit for forming a group.  In a step it limits silence only, and the master applies
                it.
            most_parts: The most minibatches of one member in one step; the same for all members.
            processes_per_worker: Processes of each pod; each process is a member.
        """
        self.ledger = Ledger()
        self.most_parts = most_parts
        self._link = link
        self._elastic_group = group
        self._state = state
        self._timeout_s = collective_timeout_s
        self._processes_per_worker = processes_per_worker
        self._group = pb.Group()  # the group entered or being formed; version 0: none
        self._is_forming = False
        self._door = threading.Lock()
        self._is_outside = self._is_shut = False  # is waiting for a group; must enter no more groups
        self._rank = 0
        self._holds_model = self._has_left = self.is_begun_anew = False
        self._departures = Departures()
        self._left, self._reason = 0, ""
        self._pending: list[MinibatchName] = []  # of this member, applied here
        self._confirmed: list[MinibatchName] = []  # of this member, applied by all members
        self._unproven: frozenset[MinibatchName] = frozenset()  # the newest step, which other members may lack
        self._watch = GroupWatch(link, self._on_group)
        self._entered = 0  # version of the last group that it was a member of
        link.carry_standing(self.standing)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        """The number of members of the group."""
        return len(self._group.members)

    @property
    def is_last(self) -> bool:
        """Whether this member must write the last checkpoint, because no member of the newest group will continue.

        The processes of a pod end together.  Members that have announced their end count as ending.
        """
        return self._departures.is_last

    @property
    def is_split(self) -> bool:
        """Whether the state of the model is spread over the members of the group, and no member holds all of it."""
        return False

    @property
    def holds_all(self) -> bool:
        """Whether this process has the complete state of the model, and is not changing it."""
        return self._holds_model

    @property
    def has_handed_over(self) -> bool:
        """Whether other members hold this member's part of the model, as far as it knows."""
        return True

    @property
    def is_alone(self) -> bool:
        """Whether all other members of the newest group are gone, as far as this process knows."""
        return self._departures.is_alone

    @property
    def has_left(self) -> bool:
        """Whether the other members know that this one has left the newest group and will not return."""
        return self._has_left

    @property
    def version(self) -> int:
        """Version of the group; 0 outside of every group."""
        return self._group.version

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the job is over."""
        return self._watch.is_over

    def start(self) -> None:
        """Start to watch the groups that the master plans."""
        self._watch.start()

    def standing(self) -> tuple[int, float]:
        """Return the version of the group and the seconds inside the current collective, for heartbeats.  Thread-safe.

        Abandon a collective that has not ended for `collective_timeout_s`, if a newer group is planned.
        """
        group, waiting = self._group, self._elastic_group.waiting_seconds
        if waiting >= self._timeout_s and 0 < group.version < self._watch.group.version and not self._is_forming:
            reason = "a newer group is planned, and this one does not come to the end of a step"
            self._elastic_group.abandon(reason, older_than=group.version + 1)
        return (0 if self._is_forming else group.version), waiting

    # -- entering and leaving

    def enter(self) -> bool:
        """Enter the next group that the master plans with this worker, and take over the model of its source.

        Returns:
            False if the job is over, or `shut_out` was called.
        """
        while True:
            self._is_outside = True
            group = self._await_group()
            with self._door:
                if self._is_shut:
                    return False
                self._is_outside = group is not None
            if group is None:
                return False
            try:
                self._form(group)
                self._is_outside = False
                if self._is_shut:  # each thread sets its flag before it reads the other's, so at least one sees both
                    self._is_outside = True
                    self._elastic_group.abandon(_SHUT)  # the others wait for this member to begin
                    return False
                self._synchronize(group)
            except GroupLost as error:
                _log.info("Group %s does not form: %s", format_version(group.version), error)
                self._leave_group(reason_of(error, group))
            else:
                self._entered = group.version
                return True

    @property
    def is_outdated(self) -> bool:
        """Whether others have trained without this worker since it left its last group; valid once the job is over."""
        return self._watch.last_formed > self._entered

    def shut_out(self) -> bool:
        """Keep a process that is outside of every group from entering one, so that its model stays as it is.

        Called by another thread.

        Returns:
            Whether it is outside: it waits for a group, or for the other members of one.
        """
        with self._door:
            self._is_shut = True
            self._is_shut = self._is_outside
            if self._is_shut and self._is_forming:
                self._elastic_group.abandon(_SHUT)
            return self._is_shut

    def leave(self, reason: str = "") -> None:
        """Leave the group between two steps.

        Args:
            reason: For the master; empty if a newer group is planned.
        """
        self._elastic_group.leave()
        self._leave_group(reason)

    def abandon(self, reason: str, is_model_whole: bool = True) -> GroupEnded:
        """Leave the group in the middle of a step, so that the others lose that step as well; return what to raise."""
        self._holds_model = self._holds_model and is_model_whole
        self._elastic_group.abandon(reason)
        self._leave_group(reason)
        return GroupEnded(reason)

    # -- a step

    def plan_step(self, parts: Sequence[BatchRef] = (), wishes: StepFlag = StepFlag.NOTHING) -> StepPlan:
        """Exchange headers: every member's contribution to the next step.

        Afterwards `take_confirmed` returns this member's minibatches of the step before, too.

        Args:
            parts: Minibatches of this member; `ledger` must hold none of them.
            wishes: Requests to all members.

        Raises:
            GroupEnded: the group is broken, a newer one is planned, or a member leaves.  No step is lost by it.
        """
        header = StepProposal(max(self.version, self._watch.group.version), wishes, tuple(parts))
        line = header.numbers(self.most_parts)
        gathered = self._collective(lambda: self._elastic_group.gather(line))
        self._check_rounds(gathered)
        self._holds_model = True  # rank 0 sends its first header once the master has accepted the group
        self._confirmed += self._pending
        self._pending, self._unproven = [], frozenset()
        headers = [StepProposal.of(row) for row in gathered]
        plan = StepPlan.of(headers, self._rank)
        self._departures.planned(plan)
        newest = max(header.version for header in headers)
        if plan.ends_all:  # the caller leaves once the model is saved
            return plan
        if StepFlag.LEAVING in plan.wishes:
            self._has_left = StepFlag.LEAVING in plan.wishes_by_rank[self._rank]
            self._hand_over(plan)
            self.leave(f"worker {self._group.members[plan.first_with(StepFlag.LEAVING)].worker_id} leaves")
            raise GroupEnded("a member leaves")
        if newest > self.version:
            self._hand_over_to_survivors(plan)
            self.leave()
            raise GroupEnded("a newer group is planned")
        return plan

    def begin_reduce(self, buffer: Any) -> Reduction:
        """Start to sum a buffer over all members, in place; every member must start the same buffers in order.

        Raises:
            GroupEnded: the group is broken.
        """
        return self._collective(lambda: self._elastic_group.begin_reduce(buffer))

    def continue_step(self) -> None:
        """Exchange headers before the members reduce once more in a step: another member may have ended the step.

        Raises:
            GroupEnded: the group is broken.
            JobError: only some members reduce once more.
        """
        line = StepProposal(self.version, StepFlag.AGAIN).numbers(self.most_parts)
        gathered = self._collective(lambda: self._elastic_group.gather(line))
        self._check_rounds(gathered)

    def _check_rounds(self, headers: Iterable[npt.NDArray[np.int64]]) -> None:
        check_rounds([StepFlag.AGAIN in StepFlag(int(row[1])) for row in headers], self._group.members)

    def finish_reduce(self, reductions: Sequence[Reduction]) -> None:
        """Wait for the sums.

        Raises:
            GroupEnded: the group is broken; the step must be dropped.
        """
        for reduction in reductions:
            self._collective(reduction.wait)

    def commit(
        self, plan: StepPlan, reported: Sequence[BatchRef] | None = None, skipped: Collection[BatchRef] = ()
    ) -> None:
        """Record that the model of this process holds the step.

        Args:
            plan: The step.
            reported: The parts that this member reports to the master; None: its own parts.
            skipped: The parts that are left out of the model.
        """
        ledger = self.ledger
        for part in plan.all_parts:
            ledger.add(part.name, part.num_records, part in skipped)
        ledger.steps += 1
        ledger.num_records += plan.num_records
        self._unproven = frozenset(part.name for part in plan.all_parts)
        self._pending = [part.name for part in (plan.own if reported is None else reported)]

    def complete(self, update: Callable[[], None]) -> None:
        """Apply a step whose sums have come.

        Args:
            update: Changes the model, and calls `commit`.

        Raises:
            GroupEnded: the group is broken.
        """
        update()

    def is_proven(self, name: MinibatchName) -> bool:
        """Return whether the models of all members hold a minibatch, as far as this member knows."""
        return name in self.ledger.applied and name not in self._unproven

    def collect(self) -> dict[str, npt.NDArray[Any]]:
        """Send the state that rank 0 lacks to it, and return it there; all members call this between two steps."""
        return {}

    def take_confirmed(self) -> list[MinibatchName]:
        """Return this member's minibatches that have become part of every member's model since the last call."""
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def gather(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of all members, by rank: [n] → [members, n].

        Raises:
            GroupEnded: the group is broken.
        """
        return self._collective(lambda: self._elastic_group.gather(numbers))

    def all_flawed(self, plan: StepPlan, flaws: Mapping[int, str]) -> list[BatchRef]:
        """Exchange which parts of a step are not finite; every member calls this after the same reduction.

        Args:
            flaws: The values that are not finite among this member's parts, by position; may be empty.

        Raises:
            GroupEnded: the group is broken.
        """
        marks = np.zeros(self.most_parts, np.int64)
        marks[list(flaws)] = 1
        gathered = self.gather(marks)
        return [plan.parts[rank][k] for rank, row in enumerate(gathered) for k in np.flatnonzero(row)]

    def part(self) -> bool:
        """Wait for all members before `leave`: closing connections earlier breaks what others still receive.

        Returns:
            Whether all have come.
        """
        try:
            self._elastic_group.gather(np.zeros(1, np.int64))
        except GroupLost as error:
            _log.debug("Group %s: not all members have come to its end: %s", format_version(self.version), error)
            self._has_lost(error.rank)
            return False
        return True

    def share(self, data: bytes | None, source: int = 0) -> bytes:
        """Broadcast the data of rank `source` to all members; the others pass None.

        Raises:
            GroupEnded: the group is broken.
        """
        return self._collective(lambda: self._elastic_group.broadcast_bytes(data, source))

    # -- inside

    def _pods(self) -> list[int]:
        """Return the pod of each member of this group, by rank."""
        return [pod_and_process(member.worker_id, self._processes_per_worker)[0] for member in self._group.members]

    def _has_lost(self, rank: int | None) -> None:
        """Note that members are gone.

        Args:
            rank: The member that failed first, if known.  A newer group of the master may lack more members.
        """
        gone, newer = {rank}, self._watch.group
        if newer.version > self.version:
            living = {(member.worker_id, member.incarnation) for member in newer.members}
            members = enumerate(self._group.members)
            gone.update(k for k, member in members if (member.worker_id, member.incarnation) not in living)
        self._departures.lost(gone)

    def _collective(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except GroupLost as error:
            if not self._watch.is_over:
                _log.info("Group %s is broken: %s", format_version(self.version), error)
            self._elastic_group.abandon(str(error))
            self._has_lost(error.rank)
            reason = reason_of(error, self._group)
            self._leave_group(reason)
            raise GroupEnded(reason) from error

    def _leave_group(self, reason: str) -> None:
        self._left, self._reason = self._group.version, reason
        self._group = pb.Group()

    def _await_group(self) -> pb.Group | None:
        """Wait for the next group with this worker in it; None if the job is over."""
        registration = -1
        group = self._watch.await_own(self._left, 0.0)
        if group is not None:
            return group
        while not self._watch.is_over:
            registrations = self._link.num_registrations
            if registration != registrations:  # a new generation of the master does not know it
                registration = registrations
                ack = self._link.ready_for_group(self._elastic_group.address, self._left, self._reason)
                if not ack.accepted:
                    _log.info("The master rejected the request to join a group: %s", ack.reason)
                    self._link.register()
            group = self._watch.await_own(self._left)
            if group is not None:
                return group
        return None

    def _form(self, group: pb.Group) -> None:
        self._rank = next(rank for rank, member in enumerate(group.members) if self._link.is_me(member))
        self._is_forming, self._group = True, group
        try:
            peers = [Peer(member.worker_id, member.address) for member in group.members]
            self._elastic_group.form(group.version, peers, self._rank, self._timeout_s)
        except GroupLost as error:
            self._elastic_group.abandon(str(error))
            raise
        finally:
            self._is_forming = False

    def _synchronize(self, group: pb.Group) -> None:
        """Copy the source's model to all members, and report to the master what it holds."""
        try:
            source, restored_from = self._take_over(group)
            if self._rank == 0:
                self._report_group(group, restored_from)
        except (GroupLost, ModelDefinitionError) as error:
            self._elastic_group.abandon(str(error))
            raise
        # The master may not know of a restored model yet: if this fails, rank 0 must restore it again, and report it.
        self._holds_model, self._has_left = source is not None or self._rank == 0, False
        self.is_begun_anew = source is None or not self.ledger.steps
        self._departures.entered(self._pods(), self._rank)
        self._settle_pending()
        self._log_entry(group, source)

    def _take_over(self, group: pb.Group) -> tuple[int | None, str]:
        """Make the models of all members equal.

        Returns:
            The rank of the model's source, None if no member holds the model; and the directory of the checkpoint that
            rank 0 has read, empty if it has read none.
        """
        restored_from = ""
        sums = Sums(self._state.sums())
        own = np.array([self.ledger.steps, self._holds_model, sums.number], np.int64)
        standings = self._elastic_group.gather(own).tolist()
        sums.compare([number for _, _, number in standings], group.members, self._elastic_group, self._rank)
        pairs = zip(standings, group.members, strict=True)
        steps = [count if holds and member.is_source else -1 for (count, holds, _), member in pairs]
        newest = max(steps)
        source = steps.index(newest) if newest >= 0 else 0
        if newest < 0 and self._rank == 0:
            restored = self._state.start_over()
            self.ledger, restored_from = restored.ledger, restored.directory
        if self.size > 1 and any(count != newest or count < 0 for count in steps):
            self._receive(source, is_needed=newest < 0 or steps[self._rank] != newest)
        return (source if newest >= 0 else None), restored_from

    def _hand_over(self, plan: StepPlan) -> None:
        """Called before members leave.  Without shards there is nothing to do: every member holds the whole model."""

    def _hand_over_to_survivors(self, plan: StepPlan) -> None:
        """Called before this member leaves for a newer group, which may lack some members.  Nothing to do either."""

    def _receive(self, source: int, is_needed: bool) -> None:
        gives = self._rank == source
        if is_needed and not gives and not self._group.members[self._rank].is_source:
            self._holds_model = False  # its model is of an older group, and must never become the source
        arrays = self._elastic_group.broadcast(self._state.arrays() if gives else None, source)
        data = self._elastic_group.broadcast_bytes(self.ledger.to_bytes() if gives else None, source)
        if is_needed and not gives:
            held, self._holds_model = self._holds_model, False  # SIGTERM must not save a half-loaded model
            self._state.load(arrays)
            self.ledger = Ledger.from_bytes(data)
            self._holds_model = held

    def _report_group(self, group: pb.Group, restored_from: str) -> None:
        ledger = self.ledger
        ack = self._link.group_formed(
            group.version, ledger.applied.to_message(), ledger.steps, restored_from, self._elastic_group.engine
        )
        if not ack.accepted:
            raise GroupLost(f"the master rejected it: {ack.reason}")

    def _settle_pending(self) -> None:
        """Keep this member's minibatches that the group's model holds; an older model may lack confirmed ones, too."""
        names = [*self._confirmed, *self._pending]
        self._confirmed = [name for name in names if name in self.ledger.applied]
        self._pending, self._unproven = [], frozenset()

    def _log_entry(self, group: pb.Group, source: int | None) -> None:
        members = ", ".join(str(member.worker_id) for member in group.members)
        origin = "from its start" if source is None else f"with the model of worker {group.members[source].worker_id}"
        _log.info(
            "Group %s has formed: workers %s; it continues %s, after step %d%s",
            format_version(group.version),
            members,
            origin,
            self.ledger.steps,
            f"; it sums by {self._elastic_group.engine}" if self._elastic_group.engine else "",
        )
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("Group %s, step %d: state %s", format_version(group.version), self.ledger.steps, self.digest())

    def digest(self) -> str:
        """Return a hash of the state, which is equal in all members after the same step."""
        return digest_of(self._state.arrays())

    def _on_group(self, group: pb.Group) -> None:
        """Watcher thread: abort the current collective if a peer has left the group."""
        if not group.version:
            self._job_is_over()
            return
        mine = self._group
        members = {(member.worker_id, member.incarnation) for member in group.members}
        gone = [m.worker_id for m in mine.members if (m.worker_id, m.incarnation) not in members]
        if mine.version and not self._is_forming and (not gone or self.is_split):
            return  # it leaves after the current step; if that does not end, see `standing`
        who = f" without worker {', '.join(map(str, gone))}" if gone else ""
        self._elastic_group.abandon(f"a newer group{who} is planned", older_than=group.version)

    def _job_is_over(self) -> None:
        """Watcher thread: stop waiting for members, which end as well."""
        self._elastic_group.abandon("the job is over")
