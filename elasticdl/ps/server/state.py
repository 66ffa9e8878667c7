"""The state of one PS: its part of the model and the names in it, changed by many calls in parallel.

This module knows nothing of incarnations, generations or gRPC; see `in_flight` for how a name enters the state, and
`synchronous` for rounds.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from elasticdl.frameworks.framework import Floats, Ids
from elasticdl.ps.applied import AppliedSet, FencingTokens, MinibatchName
from elasticdl.ps.partition import ALL_BUCKETS, Buckets, PartSnapshot
from elasticdl.ps.server.in_flight import InFlightUpdates, PsCounters, StatePartition
from elasticdl.ps.server.model import ModelPart, adopt, check_same_model, initial_snapshot, is_empty, shape_of
from elasticdl.ps.server.synchronous import Confirmed, NumPushing, Synchronous, UpdateSettings
from elasticdl.ps.wire import ExchangeCall, InitializeCall, PushCall
from elasticdl.rpc import elasticdl_pb2 as pb

_ALLOCATING_THREADS = 2


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The result of a push and pull; `arrays` answer the pull."""

    status: pb.PsStatus
    version: int = 0
    repeated_push: bool = False
    arrays: tuple[Floats, ...] = ()
    applied_round: int = 0


class ServerState:
    """The state of one PS.  Thread-safe.

    Attributes:
        load: Counters of this PS.
        is_synchronous: Whether updates are made in rounds.
    """

    def __init__(self, updates: UpdateSettings | None = None, buckets: Buckets = ALL_BUCKETS) -> None:
        """
        Args:
            updates: How updates are applied.
            buckets: The buckets of this PS.
        """
        self._updates = updates or UpdateSettings()
        self._buckets = buckets
        self.load = PsCounters()
        self.is_synchronous = not self._updates.use_async
        self._beginning = threading.Lock()  # held while the model is set; taken first
        self._lock = threading.Lock()  # guards all attributes below
        self._fences = FencingTokens()
        self._claims: InFlightUpdates | None = None
        self._inherited: PartSnapshot | None = None
        self._synchronous = Synchronous(self._updates, self._lock, self.load)

    @property
    def is_damaged(self) -> bool:
        """Whether an update was applied only in part."""
        return self._claims is not None and self._claims.is_damaged

    @property
    def is_round_waiting(self) -> bool:
        """Whether names wait for a round that may close when fewer workers push."""
        return self._synchronous.is_waiting

    def restore(self, snapshot: PartSnapshot, parameters_only: bool) -> None:
        """Begin with the state of a checkpoint.

        Args:
            snapshot: This PS's part of it; closed when it is no longer needed.
            parameters_only: It is another job's: its applied set is dropped, and the worker that initialises this PS
                chooses the optimizer that its values are trained with.

        Raises:
            CheckpointError, ModelDefinitionError: the checkpoint cannot be read or used.
        """
        with self._beginning:
            if parameters_only:
                self._inherited = snapshot
            else:
                self._begin(snapshot)

    def initialize(self, call: InitializeCall) -> None:
        """Begin with a new model, unless there is one: every worker calls this, with the same model.

        Raises:
            RequestError: this PS has another model.
            ModelDefinitionError: the optimizer, an initializer or a constraint is not supported.
            CheckpointError: the other job's checkpoint cannot be read.
            StorageUnreachable: the volume of that checkpoint does not answer.
        """
        wanted = initial_snapshot(call, self._buckets)
        with self._beginning:
            if self._claims is not None:
                check_same_model(self._claims.model.shape, shape_of(wanted))
            else:
                self._begin(wanted if self._inherited is None else adopt(self._inherited, wanted))

    def exchange(self, call: ExchangeCall) -> Exchanged:
        """Apply rounds and the push, unless its name is applied already, then answer the pull.

        In synchronous mode a push is only held until a round names it.

        Raises:
            RequestError: the call does not fit the model; nothing has changed.
            StateDamagedError: the state is damaged.
        """
        claims = self._checked_claims()
        if claims is None:
            return Exchanged(pb.UNINITIALIZED)
        if call.pull is not None:
            claims.model.check_pull(call.pull)
        if call.push is not None:
            claims.model.check_push(call.push)
        if call.rounds is not None:
            self._synchronous.follow(claims, call.rounds)
        status, repeated = self._push(claims, call.push) if call.push is not None else (pb.OK, False)
        with self._lock:
            version, applied_round = claims.pieces.version, self._synchronous.applied_round
        if status != pb.OK or call.pull is None:
            return Exchanged(status, version, repeated, (), applied_round)
        arrays = tuple(claims.model.pull(call.pull))
        self.load.pulled(sum(len(ids) for _, ids in call.pull.ids))
        return Exchanged(status, version, repeated, arrays, applied_round)

    def confirm(
        self,
        lease: int,
        name: MinibatchName,
        pulled_version: int,
        known_round: int,
        num_pushing: NumPushing,
        timeout_s: float,
    ) -> Confirmed:
        """Confirm, in PS 0 of synchronous mode, that every PS holds a minibatch; wait until its round is closed.

        Args: see `Synchronous`.

        Raises:
            StateDamagedError: the state is damaged.
        """
        claims = self._checked_claims()
        if claims is None:
            return Confirmed(pb.UNINITIALIZED)
        with self._lock:
            if self._refuses(lease, name.epoch, name.task):
                return Confirmed(pb.LEASE_REFUSED)
            status = self._synchronous.confirm(claims, name, pulled_version)
        if status != pb.OK:
            return Confirmed(status)
        return self._synchronous.wait(claims, name, known_round, num_pushing, timeout_s)

    def wake(self) -> None:
        """Note that the number of workers that push has changed."""
        with self._lock:
            self._synchronous.wake()

    def accept_coordinator(self, incarnation: int) -> None:
        """Set the PS that closes rounds, from a new partition."""
        with self._lock:
            self._synchronous.accept_coordinator(incarnation)

    def standing(self, lease: int, epoch: int, task: int) -> pb.AppliedTask | None:
        """Return the applied part of a task, and reject older leases from now on; None if a newer lease is known."""
        with self._lock:
            if self._refuses(lease, epoch, task):
                return None
            if self._claims is None:
                return pb.AppliedTask(epoch=epoch, task=task)
            return self._claims.pieces.of_task(epoch, task)

    def known_ids(self, table: str) -> Ids | None:
        """Return the ids of a table that have rows here; None before initialisation.

        Raises:
            RequestError: there is no such table.
            StateDamagedError: the state is damaged.
        """
        claims = self._checked_claims()
        return None if claims is None else claims.model.known_ids(table)

    def applied(self) -> tuple[pb.AppliedSet, bool, int]:
        """Return the names in all pieces, whether there are values, and the number of updates."""
        with self._lock:
            if self._claims is None:
                return pb.AppliedSet(), self._inherited is not None, 0
            pieces, version = self._claims.pieces.copy(), self._claims.pieces.version
        return AppliedSet.common([piece.applied for piece in pieces]).to_message(), True, version

    def snapshot(self) -> PartSnapshot | None:
        """Return consistent values and names; None before initialisation.  Updates wait only while tables freeze.

        The previous snapshot must be closed.

        Raises:
            StateDamagedError: the state is damaged.
        """
        claims = self._checked_claims()
        if claims is None:
            return None
        with ThreadPoolExecutor(_ALLOCATING_THREADS, "ps-room") as threads:
            room = claims.model.dense_room(threads)
        with self._lock, claims.frozen():
            pieces = claims.pieces.copy()
            frozen = claims.model.freeze(room)
        return replace(frozen, pieces=tuple(piece.frozen() for piece in pieces))

    def load_message(self) -> pb.PsLoad:
        """Return the counts of this PS, and the size of its tables."""
        claims = self._claims
        sizes = (claims.model.num_rows, claims.model.table_bytes) if claims is not None else (0, 0)
        return self.load.message(*sizes)

    def _begin(self, snapshot: PartSnapshot) -> None:
        model, pieces = ModelPart(snapshot), StatePartition(snapshot.pieces)
        modulated = self._updates.use_async and self._updates.lr_staleness_modulation
        with self._lock:
            self._claims = InFlightUpdates(model, pieces, self._lock, self.load, modulated)
            self._inherited = None
        snapshot.close()

    def _push(self, claims: InFlightUpdates, push: PushCall) -> tuple[pb.PsStatus, bool]:
        """Apply or hold a push; return the status, and whether the name was applied before."""
        header = push.header
        name = MinibatchName(header.epoch, header.task, header.minibatch)
        with self._lock:
            claims.wait_for({name})  # wait first: a newer lease may come meanwhile
            if self._refuses(header.lease, header.epoch, header.task):
                return pb.LEASE_REFUSED, False
            if not claims.pieces.lacks(name):
                return pb.OK, True
            if self.is_synchronous:
                self._synchronous.hold(name, push)
                return pb.OK, False
            if 0 < self._updates.max_staleness < claims.staleness(push) and not is_empty(push):
                self.load.refused()
                return pb.TOO_STALE, False
            claim = claims.claim({name: push})
        claims.carry_out(claim)
        return pb.OK, False

    def _refuses(self, lease: int, epoch: int, task: int) -> bool:
        """Return whether a newer lease of the task is known; if not, drop the held pushes of older ones."""
        if self._fences.refuses(lease, epoch, task):
            return True
        self._synchronous.let_go(lease, epoch, task)
        return False

    def _checked_claims(self) -> InFlightUpdates | None:
        with self._lock:
            if self._claims is not None:
                self._claims.check()
            return self._claims
