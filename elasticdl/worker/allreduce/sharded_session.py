"""A session whose members hold the optimizer's state in shards (`--shard_optimizer`).

Each member updates the parameters whose optimizer state it holds; then each owner sends its parameters to all members.
So a step has two parts, and a group may break between them.  No member begins to update before all have the sums: if
one survivor has made the step, the others can make it as well, and do so when they enter the next group.  Then the
holders send parameter values and shards to the members that lack them.

The functions at the end decide which member holds the optimizer state of which parameter, and which member sends it
when the members change.  They depend only on the sizes of the parameters, the size of the group, and its members'
shards, so all members get the same results.  A shard is the optimizer state of one parameter.  Parameters are cut into
as many consecutive runs as there are members; a member owns the run of its rank, and also holds the run of another
rank, so that the loss of one member loses no state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from elasticdl.collective import ElasticGroup, GroupLost
from elasticdl.frameworks.framework import ShardsOptimizer
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import GroupSession, ReplicaState, digest_of, format_version
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.master_link import MasterLink
from elasticdl_client.job_spec import JobSpec

_PIECE_ELEMENTS = 8 << 20  # parameter elements whose shards a member sends in one message
_MIB = 1 << 20
_LAST_WAIT_S = 15.0  # wait for members before the last checkpoint; the master waits 30 s for it
_log = logging.getLogger("elasticdl.worker")

Arrays = dict[str, npt.NDArray[Any]]


class ShardedModel(ReplicaState, Protocol):
    """A `ReplicaState` that keeps the shards of the checkpoint it has read."""

    def take_restored(self) -> dict[int, Arrays]:
        """Return and drop the shards that `start_over` has read; see `ShardsOptimizer.shards_of`."""
        ...


class ShardedSession(GroupSession):
    """A `GroupSession` whose members hold the optimizer's state in shards; see the module."""

    def __init__(
        self,
        link: MasterLink,
        group: ElasticGroup,
        model: ShardedModel,
        framework: ShardsOptimizer,
        collective_timeout_s: float,
        processes_per_worker: int = 1,
    ) -> None:
        """
        Args:
            model: The model of `framework`.
            collective_timeout_s: See `GroupSession`.
            processes_per_worker: Processes of each pod; each process is a member.
        """
        super().__init__(link, group, model, collective_timeout_s, processes_per_worker=processes_per_worker)
        self._model = model
        self._framework = framework
        self._sizes = framework.shard_sizes()
        self._owner_of = owners(self._sizes, 1)  # in this group
        self._held: frozenset[int] = frozenset()  # by the optimizer
        self._spare: dict[int, Arrays] = {}  # shards of members that have left, in main memory
        self._all = frozenset(range(len(self._sizes)))
        self._has_settled = False  # in this group: shards of other members are dropped
        self._has_logged_share = False  # in this group
        self._has_handed_over = False  # since it has entered a group
        self._has_all_values = False  # of the parameters, after the newest step
        link.carry_optimizer_share(self.optimizer_share)
        self._update: Callable[[], None] | None = None  # of a step whose sums have come, until the step is proven

    @property
    def is_split(self) -> bool:
        """Whether no member holds all shards; of two members, each holds all."""
        return self.size > 2

    @property
    def holds_all(self) -> bool:
        """See `GroupSession.holds_all`."""
        return self._has_all_values and len(self._held) == len(self._sizes)

    @property
    def has_handed_over(self) -> bool:
        """See `GroupSession.has_handed_over`."""
        return self._has_handed_over or not (self._holds_model and (self._held or self._spare))

    # -- a step

    def plan_step(self, parts: Sequence[BatchRef] = (), wishes: StepFlag = StepFlag.NOTHING) -> StepPlan:
        """See `GroupSession.plan_step`.

        The first header of a group proves that all members have entered it, and that the master has accepted it: shards
        that belong to other members now are dropped.
        """
        plan = super().plan_step(parts, wishes)
        self._settle()
        return plan

    def complete(self, update: Callable[[], None]) -> None:
        """Apply a step when all members have its sums, and exchange the parameters; see `GroupSession.complete`."""
        self._update = update
        if self.size > 1:
            self._collective(lambda: self._elastic_group.gather(np.zeros(1, np.int64)))
        self._make_step(update)
        if self.is_split:
            buffers = self._framework.begin_exchange(self._owner_of, self._rank)
            copies = [
                self._collective(partial(self._elastic_group.begin_copy, buffer, owner)) for owner, buffer in buffers
            ]
            self.finish_reduce(copies)
            self._framework.end_exchange()
        self._has_all_values = True
        if not self._has_logged_share:  # an optimizer may have no state before its first step
            self._has_logged_share = True
            self._log_share()

    def collect(self) -> Arrays:
        """Send the shards that rank 0 lacks to its main memory; every member must call this between two steps.

        Returns:
            The arrays of those shards in rank 0; empty in other members.

        Raises:
            GroupEnded: the group is broken.
        """
        found = self._collective(lambda: self._collect({0}, self._all))
        return {name: array for shard in found.values() for name, array in shard.items()}

    def digest(self) -> str:
        """Return a hash of all state but shards, which is equal in all members after the same step."""
        return digest_of(self._framework.shared_state())

    def optimizer_share(self) -> float:
        """Return the fraction of the optimizer's state that this member holds.  Thread-safe."""
        return sum(self._sizes[number] for number in self._held) / max(1, sum(self._sizes))

    def standing(self) -> tuple[int, float]:
        """See `GroupSession.standing`.  When the job is over, stop waiting for members after `_LAST_WAIT_S`."""
        if self.is_over and self._elastic_group.waiting_seconds >= _LAST_WAIT_S:
            self._elastic_group.abandon("the job is over")
        return super().standing()

    # -- inside

    def _make_step(self, update: Callable[[], None]) -> None:
        self._has_all_values = False
        update()
        self._update = None

    def _settle(self) -> None:
        self._update = None
        if self._has_settled:
            return
        self._held = self._wanted()[self._rank]
        self._framework.keep_shards(self._held)
        self._spare = {}
        self._has_settled = True

    def _wanted(self) -> list[frozenset[int]]:
        """Return the shards that each member of this group should hold, by rank."""
        distance = distance_of_holders(self._pods())
        return [held_by(rank, self._owner_of, self.size, distance) for rank in range(self.size)]

    def _hand_over(self, plan: StepPlan) -> None:
        """Send the shards of pods that leave, or will soon leave, to two members of other pods.

        Two pods that leave together may be the only holders of a shard; and one of the receivers may leave next.
        """
        leaving = self._departures.leaving(plan)
        stays = [rank for rank, pod in enumerate(self._pods()) if pod not in leaving]
        if not stays:
            return
        if self.is_split:
            self._settle()
            wanted = self._wanted()
            theirs = frozenset[int]().union(*(wanted[rank] for rank in range(self.size) if rank not in stays))
            self._bring({stays[0], stays[-1]}, theirs)
        self._has_handed_over = self._rank not in stays

    def _hand_over_to_survivors(self, plan: StepPlan) -> None:
        """Send all shards to one member of the newer group, if the members that stay in it lack some."""
        if not self.is_split:
            return
        self._settle()
        newer, pods, leaving = self._watch.group, self._pods(), self._departures.leaving(plan)
        living = {(member.worker_id, member.incarnation) for member in newer.members}
        stays = [
            rank
            for rank, one in enumerate(self._group.members)
            if (one.worker_id, one.incarnation) in living and pods[rank] not in leaving
        ]
        wanted = self._wanted()
        lacks = bool(stays) and len(frozenset().union(*(wanted[rank] for rank in stays))) < len(self._sizes)
        own = np.array([newer.version, stays[0] if lacks else -1], np.int64)
        opinions = self._collective(lambda: self._elastic_group.gather(own))
        target = int(opinions[opinions[:, 0].argmax(), 1])  # members may know of different groups
        if target >= 0:
            self._bring({target}, self._all)

    def _bring(self, targets: Collection[int], numbers: frozenset[int]) -> None:
        """Send shards to members before this one leaves the group; see `_collect`."""
        self._spare = self._collective(lambda: self._collect(targets, numbers))
        self.part()

    def _collect(self, targets: Collection[int], numbers: frozenset[int]) -> dict[int, Arrays]:
        """Send shards to the main memory of members that lack them; return the ones received here, by number.

        Args:
            targets: Ranks of the receivers.
            numbers: The shards to send.
        """
        held = np.array([[number in own for number in range(len(self._sizes))] for own in self._wanted()], np.bool_)
        needs = [numbers if rank in targets else frozenset() for rank in range(self.size)]
        found: dict[int, Arrays] = {}
        for transfer in transfers(held, needs):
            for shards in self._send(transfer.giver, transfer.shards, self._shard):
                if self._rank in targets:
                    found |= {number: arrays for number, arrays in shards.items() if not held[self._rank, number]}
        return found

    def _shard(self, number: int) -> Arrays:
        return self._spare[number] if number in self._spare else self._framework.shard(number)

    def _shard_with_parameter(self, number: int) -> Arrays:
        return self._shard(number) | self._framework.parameter(number)

    def _send(self, giver: int, numbers: Sequence[int], of: Callable[[int], Arrays]) -> Iterator[dict[int, Arrays]]:
        """Send shards of one member to all in pieces; yield the received ones of each piece, except in the giver.

        Args:
            giver: Rank of the sender.
            numbers: The shards to send.
            of: Returns the arrays of a shard; called in the giver.
        """
        for piece in in_pieces(numbers, self._sizes, _PIECE_ELEMENTS):
            own = None
            if self._rank == giver:
                own = {f"{number}/{name}": array for number in piece for name, array in of(number).items()}
            arrays = self._elastic_group.broadcast(own, giver)
            if self._rank == giver:
                continue
            shards: dict[int, Arrays] = {number: {} for number in piece}
            for name, array in arrays.items():
                number, _, rest = name.partition("/")
                shards[int(number)][rest] = array
            yield shards

    def _job_is_over(self) -> None:
        """Watcher thread: a split group stays, to collect its shards for the last checkpoint (see `AllReduceLoop`)."""
        if self._is_forming or not self.is_split:
            super()._job_is_over()

    # -- entering a group

    def _take_over(self, group: pb.Group) -> tuple[int | None, str]:
        """See `GroupSession._take_over`."""
        self._owner_of = owners(self._sizes, self.size)
        self._has_settled = self._has_logged_share = self._has_handed_over = False
        newest, is_current = self._catch_up(group)
        if not is_current:
            self._holds_model, self._held, self._spare = False, frozenset(), {}
        self._framework.keep_shards(self._held)  # drop shards from a group that did not form
        bits = [number in self._held or number in self._spare for number in range(len(self._sizes))]
        lines = self._elastic_group.gather(np.array([is_current, is_current and self._has_all_values, *bits], np.int64))
        are_current, have_values, held = lines[:, 0], lines[:, 1], lines[:, 2:] > 0
        source: int | None = None
        restored_from = ""
        if newest >= 0 and is_whole(held):
            complete = have_values if have_values.any() else are_current
            source = int(np.flatnonzero(complete)[0])
            self._move(source, bool(have_values.any()), held, [bool(one) for one in have_values])
        else:
            if newest >= 0:
                # The master takes the leases back when it gets the report of the older model.
                self._link.leases.revoke([held.id for held in self._link.leases.held()])
            restored_from = self._begin_again()
            if newest >= 0 and self._rank == 0:
                _log.warning(
                    "Group %s: all members that held the optimizer's state of %d parameters are gone: training "
                    "continues from %s",
                    format_version(group.version),
                    int((~held.any(axis=0)).sum()),
                    restored_from or "the start",
                )
        self._has_all_values = True
        return source, restored_from

    def _catch_up(self, group: pb.Group) -> tuple[int, bool]:
        """Make the last step if another survivor has made it.

        Returns:
            The newest step of all survivors, -1 if there are none; and whether this member has made it.
        """
        is_survivor = self._holds_model and group.members[self._rank].is_source
        steps = self.ledger.steps if is_survivor else -1
        newest = int(self._elastic_group.gather(np.array([steps], np.int64)).max())
        if is_survivor and self._update is not None and steps == newest - 1:
            try:
                self._make_step(self._update)
            except Exception as error:
                self._holds_model = False
                _log.exception("The update of step %d raised", newest)
                raise GroupLost("user code raised in the update of the model") from error
            steps = newest
        return newest, newest >= 0 and steps == newest

    def _move(self, source: int, has_values: bool, held: npt.NDArray[np.bool_], are_complete: list[bool]) -> None:
        """Send what members lack: the values of the model, the ledger, and shards.

        Args:
            source: Rank of the member that sends the values and the ledger.
            has_values: Whether the source has the values of all parameters; else each is sent with its shard.
            held: Whether a member holds a shard: [members, shards].
            are_complete: Whether each member has the values of all parameters, by rank.
        """
        wanted, is_current = self._wanted(), self._holds_model
        mine = wanted[self._rank]
        self._framework.keep_shards(self._held | mine)
        if not all(are_complete):
            # A survivor may have newer values than the source, if neither has those of all parameters.
            is_needed = not is_current or (has_values and not are_complete[self._rank])
            self._receive_shared(source, is_needed, has_ledger=is_current)
        for transfer in transfers(held, wanted, is_all=not has_values):
            of = self._shard if has_values else self._shard_with_parameter
            for shards in self._send(transfer.giver, transfer.shards, of):
                new = {k: arrays for k, arrays in shards.items() if k in mine and not held[self._rank, k]}
                self._framework.load_shards(new if has_values else shards)
        self._framework.load_shards({number: self._spare[number] for number in mine & self._spare.keys() - self._held})
        self._held |= mine

    def _receive_shared(self, source: int, is_needed: bool, has_ledger: bool) -> None:
        gives = self._rank == source
        arrays = self._elastic_group.broadcast(self._framework.shared_state() if gives else None, source)
        data = self._elastic_group.broadcast_bytes(self.ledger.to_bytes() if gives else None, source)
        if is_needed and not gives:
            self._framework.load_shared_state(arrays)
        if not has_ledger:
            self.ledger = Ledger.from_bytes(data)

    def _begin_again(self) -> str:
        """Load the newest checkpoint, or initial values, in all members; return the checkpoint's directory, or ""."""
        mine, directory = self._wanted()[self._rank], ""
        self._holds_model, self._held, self._spare = False, frozenset(), {}
        self._framework.keep_shards(self._held)  # drop the shards of the abandoned model
        self._framework.keep_shards(mine)
        restored: dict[int, Arrays] = {}
        if self._rank == 0:
            found = self._model.start_over()
            self.ledger, directory = found.ledger, found.directory
            restored = self._model.take_restored()
        if self.size > 1:
            self._receive_shared(0, is_needed=True, has_ledger=self._rank == 0)
            listed = self._elastic_group.broadcast_bytes(" ".join(map(str, restored)).encode(), 0)
            numbers = [int(number) for number in listed.split()]
            for shards in self._send(0, numbers, restored.__getitem__):
                self._framework.load_shards({number: arrays for number, arrays in shards.items() if number in mine})
        self._held = mine
        return directory

    def _log_share(self) -> None:
        _log.info(
            "Optimizer state: this worker holds that of %d of %d parameters, %.0f %% of their elements (%.1f MiB)",
            len(self._held),
            len(self._sizes),
            100.0 * self.optimizer_share(),
            self._framework.shard_bytes() / _MIB,
        )


def make_session(
    link: MasterLink, group: ElasticGroup, model: ReplicaState, framework: object, spec: JobSpec
) -> GroupSession:
    """Return the session of a member of a job.

    Args:
        link: The connection to the master.
        group: The collectives.
        model: The model of `framework`; with --shard_optimizer a `ShardedModel` of a `ShardsOptimizer`.
        framework: Holds the model.
        spec: The job.
    """
    timeout_s, num_processes = spec.collective_timeout, spec.num_processes_per_worker
    if not spec.shard_optimizer:
        return GroupSession(link, group, model, timeout_s, processes_per_worker=num_processes)
    assert isinstance(framework, ShardsOptimizer)
    return ShardedSession(link, group, cast(ShardedModel, model), framework, timeout_s, num_processes)


def owners(sizes: Sequence[int], num_members: int) -> list[int]:
    """Return the rank that owns each parameter: consecutive runs, about equal in size.

    Args:
        sizes: Sizes of the parameters, in elements.
    """
    total, start, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(min(num_members - 1, (2 * start + size) * num_members // (2 * total)))
        start += size
    return found


def distance_of_holders(pods: Sequence[int]) -> int:
    """Return how many ranks the second holder of a shard comes after its owner.

    It is the smallest distance that puts the most pairs into two pods: a pod is lost with all its members.

    Args:
        pods: The pod of each member, by rank.
    """
    num_members = len(pods)

    def num_together(distance: int) -> int:
        return sum(pods[rank] == pods[(rank + distance) % num_members] for rank in range(num_members))

    return min(range(1, num_members), key=num_together, default=1)


def held_by(rank: int, owner_of: Sequence[int], num_members: int, distance: int = 1) -> frozenset[int]:
    """Return the shards that a member holds: its own, and those of the rank `distance` before it.

    Args:
        distance: See `distance_of_holders`.
    """
    ranks = {rank, (rank - distance) % num_members}
    return frozenset(number for number, owner in enumerate(owner_of) if owner in ranks)


@dataclass(frozen=True, slots=True)
class ShardTransfer:
    """Shards that one member sends to all others.

    Attributes:
        giver: Rank of the sender.
    """

    giver: int
    shards: tuple[int, ...]


def in_pieces(numbers: Sequence[int], sizes: Sequence[int], max_elements: int) -> list[list[int]]:
    """Split parameters into pieces of limited total size; a parameter above the limit is a piece of its own.

    Args:
        numbers: The parameters to split.
        sizes: Sizes of all parameters, in elements.
        max_elements: The limit of a piece.
    """
    pieces: list[list[int]] = []
    left = 0
    for number in numbers:
        if not pieces or sizes[number] > left:
            pieces.append([])
            left = max_elements
        pieces[-1].append(number)
        left -= sizes[number]
    return pieces


def is_whole(held: npt.NDArray[np.bool_]) -> bool:
    """Return whether each shard is held by at least one member.

    Args:
        held: Whether a member holds a shard: [members, shards].
    """
    return bool(held.any(axis=0).all())


def transfers(
    held: npt.NDArray[np.bool_], wanted: Sequence[frozenset[int]], is_all: bool = False
) -> list[ShardTransfer]:
    """Return the transfers after which each member has the shards it wants; holders of the same shards take turns.

    Args:
        held: Whether a member holds a shard: [members, shards]; each shard has a holder.
        wanted: The shards that each member wants, by rank.
        is_all: Send every shard, even if no member lacks it.
    """
    num_members, num_shards = held.shape
    by_giver: dict[int, list[int]] = {}
    for number in range(num_shards):
        if is_all or any(number in wanted[rank] and not held[rank, number] for rank in range(num_members)):
            holders = np.flatnonzero(held[:, number])
            giver = int(holders[number * len(holders) // num_shards])
            by_giver.setdefault(giver, []).append(number)
    return [ShardTransfer(giver, tuple(by_giver[giver])) for giver in sorted(by_giver)]
