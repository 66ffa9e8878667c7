"""The worker's client of the parameter servers: one object that calls all PS at once.

It splits and joins arrays for the partition that it was made for, and never repeats a call that a PS may have begun: a
push can be repeated safely under its name, and the worker decides when.  A newer partition needs a new client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, ModelReport, Parameters, Table
from elasticdl.ps.client.connection import PsConnection, PsUnavailable
from elasticdl.ps.client.exchanges import (
    LeaseRefused,
    Lookup,
    PsUninitialized,
    Pull,
    Pulled,
    Push,
    RowLookups,
    TooStale,
)
from elasticdl.ps.optim.initializers import check_table
from elasticdl.ps.optim.optimizers import check_optimizer
from elasticdl.ps.partition import Partition, joined
from elasticdl.ps.wire import (
    ExchangeCall,
    InitializeCall,
    PullCall,
    PushCall,
    decode_reply,
    exchange_frame,
    initialize_frame,
    known_ids_frame,
    table_message,
)
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import Array, Frame, FrameError


class CarriedRounds:
    """Synchronous mode: the rounds that a worker passes on from PS 0, which closes them, to the other PS.

    For one partition, and so for one incarnation of PS 0.  Thread-safe.  Every other PS gets each round, even one that
    it has applied already: the worker's own minibatch may have reached it only after the round.
    """

    def __init__(self, num_ps: int) -> None:
        self._lock = threading.Lock()
        self._applied = [0] * num_ps
        self._undelivered: list[pb.Rounds | None] = [None] * num_ps

    @property
    def known(self) -> int:
        """The newest round that every PS has applied."""
        with self._lock:
            return min(self._applied)

    def learn(self, rounds: pb.Rounds) -> None:
        """Store rounds from PS 0: that of a minibatch of this worker, and those after `known`."""
        with self._lock:
            self._applied[0] = max([self._applied[0], *(one.number for one in rounds.rounds)])
            for ps_id in range(1, len(self._undelivered)):
                self._undelivered[ps_id] = rounds

    def for_ps(self, ps_id: int) -> pb.Rounds | None:
        """Return the rounds that were not sent to a PS yet; None if there are none."""
        with self._lock:
            return self._undelivered[ps_id]

    def delivered(self, ps_id: int, rounds: pb.Rounds | None, applied_round: int) -> None:
        """Record that a PS has applied rounds, and the newest round that it has applied."""
        with self._lock:
            self._applied[ps_id] = max(self._applied[ps_id], applied_round)
            if self._undelivered[ps_id] is rounds:
                self._undelivered[ps_id] = None


Answer = TypeVar("Answer")
_MOST_ID_BYTES = 8 << 30  # a billion ids of one PS; their number is known only with the reply
_WIRE_TYPES = {"float32": pb.FLOAT32, "float16": pb.FLOAT16, "bfloat16": pb.BFLOAT16}


def check_model(report: ModelReport) -> None:
    """Raise if the parameter servers cannot train a model.

    Raises:
        ModelDefinitionError: names the option of the optimizer, or the initializer of the table.
    """
    if report.optimizer:
        check_optimizer(report.optimizer)
    for table in report.tables:
        check_table(table)


class PsClient:
    """Connections to all PS of one partition.  Thread-safe."""

    def __init__(
        self,
        partition: pb.Partition,
        layout: ModelReport,
        token: str,
        timeout_s: float = 30.0,
        wire_dtype: str = "float32",
        encrypts: bool = False,
    ) -> None:
        """
        Args:
            partition: The complete partition of the job.
            layout: The model's variables and tables.
            token: The token of the job.
            timeout_s: Deadline of each small call, in seconds.
            wire_dtype: Type of gradients and values in messages: float32, float16 or bfloat16.
            encrypts: Encrypt tensors on the network.
        """
        self.partition = Partition.from_message(partition)
        self._num_trainable = _num_floats(layout, trainable=True)
        self._num_non_trainable = _num_floats(layout, trainable=False)
        self._dims = {table.name: table.dim for table in layout.tables}
        self._wire_type: pb.WireType = _WIRE_TYPES[wire_dtype]
        self._lookups = RowLookups(self.partition, layout.tables)
        self._rounds = CarriedRounds(self.partition.num_ps)
        self._connections = [
            PsConnection(ps_id, server.address, token, timeout_s, encrypts)
            for ps_id, server in enumerate(self.partition.servers)
        ]
        self._threads = ThreadPoolExecutor(max(1, 4 * self.partition.num_ps), thread_name_prefix="ps-client")
        self._is_closed = False

    def close(self) -> None:
        """Close all connections; calls in flight fail with `PsUnavailable`."""
        self._is_closed = True
        for connection in self._connections:
            connection.close()
        self._threads.shutdown()

    def initialize(self, parameters: Parameters, tables: Sequence[Table], optimizer: str, seed: int) -> None:
        """Initialise the model on every PS that does not have it yet.

        Raises:
            PsUnavailable, JobError: see `exchange`.
        """

        def call(ps_id: int) -> None:
            trainable = self.partition.dense_part(ps_id, parameters.trainable)
            non_trainable = self.partition.dense_part(ps_id, parameters.non_trainable)
            header = pb.InitializeHeader(
                incarnation=self.partition.servers[ps_id].incarnation,
                optimizer=optimizer,
                num_trainable=len(trainable),
                num_non_trainable=len(non_trainable),
                tables=[table_message(table) for table in tables],
                seed=seed,
                total_trainable=len(parameters.trainable),
                total_non_trainable=len(parameters.non_trainable),
                partition_version=self.partition.version,
            )
            self._raw(ps_id, "Initialize", initialize_frame(InitializeCall(header, trainable, non_trainable)), 0)

        self._on_all(call)

    def standing(self, lease: int, epoch: int, task: int) -> frozenset[int]:
        """Begin a task: return its minibatches that every PS has applied.  All PS reject older leases from now on.

        Raises:
            PsUnavailable, LeaseRefused: see `exchange`.
        """

        def call(ps_id: int) -> frozenset[int]:
            request = pb.TaskStandingRequest(
                incarnation=self.partition.servers[ps_id].incarnation,
                lease=lease,
                epoch=epoch,
                task=task,
                partition_version=self.partition.version,
            )
            reply = self._connections[ps_id].task_standing(request)
            self._check(ps_id, reply.status, "", lease, reply.partition)
            return frozenset(range(reply.applied.watermark)) | frozenset(reply.applied.extras)

        return frozenset.intersection(*self._on_all(call))

    def exchange(self, push: Push | None, pull: Pull | None) -> Pulled:
        """Push, then pull; every PS gets the push's name, even if it has no gradients for that PS.

        If this raises, some PS may have applied the push and others not: repeat it under the same name.  In synchronous
        mode it passes on the rounds that `close_round` has received: when it returns, every PS has them.

        Raises:
            PsUnavailable: a PS cannot answer now.
            PsUninitialized: a PS holds no parameters.
            LeaseRefused: there is a newer lease for the push's task.
            TooStale: the gradients must be computed again on newer values.
            IdsOutOfRange: a table does not have some of the ids; nothing was sent.
            JobError: a PS has another model.
        """
        changes = self._row_changes(push) if push is not None else {}
        pulled = self._lookups.of(pull.ids, remember=not pull.read_only) if pull is not None else {}
        # Reads for evaluation and export are exact.
        wire_type = pb.FLOAT32 if pull is not None and pull.read_only else self._wire_type

        def call(ps_id: int) -> tuple[pb.ExchangeReply, list[Array]]:
            push_call = self._push_call(ps_id, push, changes) if push is not None else None
            pull_call = self._pull_call(ps_id, pull, pulled) if pull is not None else None
            rounds = self._rounds.for_ps(ps_id)
            exchange = ExchangeCall(
                self.partition.servers[ps_id].incarnation,
                push_call,
                pull_call,
                self.partition.version,
                rounds,
                wire_type,
            )
            frame, reply_bytes = exchange_frame(exchange), self._reply_bytes(ps_id, pull_call)
            answer = self._raw(ps_id, "Exchange", frame, reply_bytes, push.lease if push else 0, wire_type)
            self._rounds.delivered(ps_id, rounds, answer[0].applied_round)
            return answer

        return self._assemble(pull, pulled, self._on_all(call))

    def close_round(self, push: Push, before_waiting: Callable[[], None]) -> None:
        """Synchronous mode: wait until the round of a push that every PS holds is closed.

        The next `exchange` passes the round on to every PS; when that returns, the push is in the model.

        Args:
            push: The push.
            before_waiting: Called before each wait of at most a second; may raise.

        Raises:
            PsUnavailable: PS 0 cannot answer now, or has dropped the push: push again.
            PsUninitialized, LeaseRefused, JobError: see `exchange`.
            TooStale: the push is too late for its round.
        """
        name = pb.MinibatchName(epoch=push.epoch, task=push.task, n=push.minibatch)
        while True:
            before_waiting()
            request = pb.CloseRoundRequest(
                incarnation=self.partition.servers[0].incarnation,
                partition_version=self.partition.version,
                lease=push.lease,
                name=name,
                pulled_version=push.pulled_versions[0] if push.pulled_versions else 0,
                known_round=self._rounds.known,
            )
            reply = self._connections[0].close_round(request)
            self._check(0, reply.status, "", push.lease, reply.partition)
            if not reply.wait:
                self._rounds.learn(reply.rounds)
                return

    def known_ids(self, table: str) -> Ids:
        """Return all ids of a table that have rows, sorted.

        Raises:
            PsUnavailable, PsUninitialized, JobError: see `exchange`.
        """

        def call(ps_id: int) -> Ids:
            frame = known_ids_frame(self.partition.servers[ps_id].incarnation, table, self.partition.version)
            ids: Ids = self._raw(ps_id, "KnownIds", frame, _MOST_ID_BYTES)[1][0]
            return ids

        return np.sort(np.concatenate(self._on_all(call)))

    def _row_changes(self, push: Push) -> dict[str, tuple[Lookup, Floats]]:
        """Return, by table, the lookup and the gradients [U, dim] of the unique ids."""
        lookups = self._lookups.of({name: ids for name, (ids, _) in push.row_gradients.items()})
        return {name: (lookups[name], lookups[name].sum(rows)) for name, (_, rows) in push.row_gradients.items()}

    def _push_call(self, ps_id: int, push: Push, changes: Mapping[str, tuple[Lookup, Floats]]) -> PushCall:
        header = pb.Push(
            lease=push.lease,
            epoch=push.epoch,
            task=push.task,
            minibatch=push.minibatch,
            dense=push.gradient is not None,
            tables=list(changes),
            pulled_version=push.pulled_versions[ps_id] if push.pulled_versions else 0,
            learning_rate=push.learning_rate or 0.0,
            num_records=push.num_records,
        )
        rows = tuple(
            (name, lookup.unique[lookup.part(ps_id)], gradients[lookup.part(ps_id)])
            for name, (lookup, gradients) in changes.items()
        )
        if push.gradient is None or push.change is None:
            return PushCall(header, None, None, rows)
        unreached = self.partition.ranges_within(ps_id, push.unreached, len(push.gradient))
        header.unreached.extend(pb.FloatRange(start=start, end=end) for start, end in unreached)
        gradient = self.partition.dense_part(ps_id, push.gradient)
        return PushCall(header, gradient, self.partition.dense_part(ps_id, push.change), rows)

    @staticmethod
    def _pull_call(ps_id: int, pull: Pull, lookups: Mapping[str, Lookup]) -> PullCall:
        header = pb.Pull(dense=pull.dense, tables=list(lookups), read_only=pull.read_only)
        return PullCall(header, tuple((name, it.unique[it.part(ps_id)]) for name, it in lookups.items()))

    def _reply_bytes(self, ps_id: int, pull: PullCall | None) -> int:
        """Return the approximate size of the reply."""
        if pull is None:
            return 0
        dense = self.partition.dense_slices(ps_id, self._num_trainable + self._num_non_trainable)
        num_floats = sum(part.stop - part.start for part in dense) if pull.header.dense else 0
        return 4 * (num_floats + sum(len(ids) * self._dims[name] for name, ids in pull.ids))

    def _assemble(
        self,
        pull: Pull | None,
        lookups: Mapping[str, Lookup],
        answers: Sequence[tuple[pb.ExchangeReply, list[Array]]],
    ) -> Pulled:
        replies = [reply for reply, _ in answers]
        versions = tuple(reply.version for reply in replies)
        repeated = tuple(reply.repeated_push for reply in replies)
        if pull is None:
            return Pulled(None, {}, versions, repeated)
        arrays = [iter(answer) for _, answer in answers]
        parameters = None
        if pull.dense:
            trainable = self.partition.dense_whole([next(of_ps) for of_ps in arrays], self._num_trainable)
            others = self.partition.dense_whole([next(of_ps) for of_ps in arrays], self._num_non_trainable)
            parameters = Parameters(trainable, others)
        rows = {name: lookup.expand(joined([next(of_ps) for of_ps in arrays])) for name, lookup in lookups.items()}
        return Pulled(parameters, rows, versions, repeated)

    def _raw(
        self,
        ps_id: int,
        method: str,
        frame: Frame,
        reply_bytes: int,
        lease: int = 0,
        wire_type: pb.WireType = pb.FLOAT32,
    ) -> tuple[pb.ExchangeReply, list[Array]]:
        try:
            answer = self._connections[ps_id].raw(method, frame, reply_bytes)
            reply, arrays = decode_reply(answer, wire_type)
        except FrameError as error:
            raise PsUnavailable(ps_id, f"PS {ps_id}: its reply is damaged: {error}") from error
        self._check(ps_id, reply.status, reply.reason, lease, reply.partition)
        return reply, arrays

    def _check(self, ps_id: int, status: int, reason: str, lease: int, partition: pb.Partition) -> None:
        if status == pb.LEASE_REFUSED:
            raise LeaseRefused(lease)
        if status == pb.UNINITIALIZED:
            raise PsUninitialized(ps_id)
        if status == pb.TOO_STALE:
            raise TooStale(ps_id)
        if status != pb.OK:
            newer = partition if partition.version > self.partition.version else None
            raise PsUnavailable(ps_id, reason or f"PS {ps_id}: {pb.PsStatus.Name(status).lower()}", newer)

    def _on_all(self, call: Callable[[int], Answer]) -> list[Answer]:
        """Call every PS at once, and wait for all; raise the most urgent of several errors (see `_urgency`)."""
        if self.partition.num_ps == 1:
            return [call(0)]
        try:
            calls = [self._threads.submit(call, ps_id) for ps_id in range(1, self.partition.num_ps)]
        except RuntimeError as error:
            if not self._is_closed:
                raise
            raise PsUnavailable(0, "the connections to the parameter servers were closed") from error
        errors: list[BaseException] = []
        first: list[Answer] = []
        try:
            first.append(call(0))
        except Exception as error:  # noqa: BLE001  raised below, if it is the one that counts
            errors.append(error)
        wait(calls)
        errors += [error for error in (future.exception() for future in calls) if error is not None]
        if errors:
            raise min(errors, key=_urgency)
        return first + [future.result() for future in calls]


def _urgency(error: BaseException) -> tuple[int, bool]:
    """Return the sort key of errors: bugs, then a lost lease, then transient ones, a newer partition first."""
    place = {LeaseRefused: 1, PsUnavailable: 2, PsUninitialized: 3, TooStale: 4}.get(type(error), 0)
    return place, isinstance(error, PsUnavailable) and error.partition is None


def _num_floats(layout: ModelReport, trainable: bool) -> int:
    return sum(int(np.prod(v.shape, dtype=np.int64)) for v in layout.variables if v.trainable == trainable)
