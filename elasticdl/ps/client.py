"""What a worker uses of the parameter servers: one object, all PS asked at once.

It splits and assembles by the partition it was made for, gives every call a deadline, and never retries: a push is
safe to repeat under its name, and the worker knows when to.  A newer partition wants a new client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, ModelReport, Parameters, Table
from elasticdl.ps.initializers import check_table
from elasticdl.ps.lookups import IdsOutOfRange as IdsOutOfRange
from elasticdl.ps.lookups import Lookup, Lookups
from elasticdl.ps.optimizers import check_optimizer
from elasticdl.ps.partition import Partition
from elasticdl.ps.wire import (
    SERVICE,
    ExchangeCall,
    InitializeCall,
    PullCall,
    PushCall,
    decode_reply,
    encode_exchange,
    encode_initialize,
    encode_known_ids,
    table_message,
)
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect, is_transient
from elasticdl.rpc.frames import STREAM_FROM_BYTES, Array, chunks, join
from elasticdl_client.errors import JobError

Answer = TypeVar("Answer")


class PsUnavailable(Exception):
    """A PS is down, restarting, or has another incarnation: wait for a newer partition, then repeat the call."""

    def __init__(self, ps_id: int, reason: str) -> None:
        super().__init__(reason)
        self.ps_id = ps_id


class PsUninitialized(Exception):
    """A PS holds no parameters: call `PsClient.initialize`, then repeat the call."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} holds no parameters yet")
        self.ps_id = ps_id


class LeaseRefused(Exception):
    """A PS knows a newer lease of the task: somebody else has it now."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} has a successor")
        self.lease = lease


@dataclass(frozen=True, slots=True)
class Push:
    """What a minibatch does to the model.

    Attributes:
        gradient: [T], flat.
        change: of the non-trainable values, [N], flat.
        row_gradients: table to ids [n] and gradients [n, dim]; those of the same id are summed before they are sent.
            The arrays of ids must not change after a call has seen them.
        pulled_versions: of the `Pulled` that the gradients were computed on.
    """

    lease: int
    epoch: int
    task: int
    minibatch: int
    gradient: Floats
    change: Floats
    row_gradients: Mapping[str, tuple[Ids, Floats]] = field(default_factory=dict)
    pulled_versions: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """What to read.

    Attributes:
        dense: all dense values.
        ids: table to ids [n], which may repeat and must not change after a call has seen them.
        read_only: rows that do not exist are not created; their initial values are returned.
    """

    dense: bool
    ids: Mapping[str, Ids] = field(default_factory=dict)
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """What was read.

    Attributes:
        parameters: None if not asked for.
        rows: table to rows [n, dim] in the order of the ids.
        versions: pushes applied, by PS.
        repeated_push: by PS, whether the push's name was there before, so that it was ignored.
    """

    parameters: Parameters | None
    rows: Mapping[str, Floats]
    versions: tuple[int, ...]
    repeated_push: tuple[bool, ...] = ()


def check_model(report: ModelReport) -> None:
    """Refuses a model that PS cannot train.

    Raises:
        ModelDefinitionError: naming the optimizer's option or the table's initializer.
    """
    if report.optimizer:
        check_optimizer(report.optimizer)
    for table in report.tables:
        check_table(table)


class PsClient:
    """Connections to all PS of one partition.  Thread-safe."""

    def __init__(self, partition: pb.Partition, layout: ModelReport, token: str, timeout_s: float = 30.0) -> None:
        """
        Args:
            partition: of the job, complete.
            layout: the model's variables and tables.
            token: the job's.
            timeout_s: deadline of each call.
        """
        self.partition = Partition.from_message(partition)
        self._num_trainable = _num_floats(layout, trainable=True)
        self._num_non_trainable = _num_floats(layout, trainable=False)
        self._dims = {table.name: table.dim for table in layout.tables}
        self._lookups = Lookups(self.partition, layout.tables)
        self._timeout_s = timeout_s
        self._channels = [connect(server.address, token) for server in self.partition.servers]
        self._stubs: list[Any] = [pb_grpc.ParameterServerStub(c) for c in self._channels]  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(max(1, 4 * self.partition.num_ps), thread_name_prefix="ps-client")

    def close(self) -> None:
        """Ends all connections; calls under way fail as `PsUnavailable`."""
        for channel in self._channels:
            channel.close()
        self._threads.shutdown()

    def initialize(self, parameters: Parameters, tables: Sequence[Table], optimizer: str, seed: int) -> None:
        """Begins the model on every PS that does not have it yet.

        Raises:
            PsUnavailable, JobError: see `exchange`.
        """

        def call(ps_id: int) -> None:
            trainable = parameters.trainable[self._slice(ps_id, self._num_trainable)]
            non_trainable = parameters.non_trainable[self._slice(ps_id, self._num_non_trainable)]
            header = pb.InitializeHeader(
                incarnation=self.partition.servers[ps_id].incarnation,
                optimizer=optimizer,
                num_trainable=len(trainable),
                num_non_trainable=len(non_trainable),
                tables=[table_message(table) for table in tables],
                seed=seed,
            )
            self._raw(ps_id, "Initialize", encode_initialize(InitializeCall(header, trainable, non_trainable)), 0)

        self._on_all(call)

    def standing(self, lease: int, epoch: int, task: int) -> frozenset[int]:
        """Takes a task over: which of its minibatches every PS has applied.  All PS refuse older leases from now on.

        Raises:
            PsUnavailable, LeaseRefused: see `exchange`.
        """

        def call(ps_id: int) -> frozenset[int]:
            request = pb.TaskStandingRequest(
                incarnation=self.partition.servers[ps_id].incarnation, lease=lease, epoch=epoch, task=task
            )
            reply = self._checked(ps_id, lambda: self._stubs[ps_id].TaskStanding(request, timeout=self._timeout_s))
            self._check_status(ps_id, reply.status, "another incarnation", lease)
            return frozenset(range(reply.applied.watermark)) | frozenset(reply.applied.extras)

        return frozenset.intersection(*self._on_all(call))

    def exchange(self, push: Push | None, pull: Pull | None) -> Pulled:
        """Pushes, then reads; every PS gets the push's name, whether it has gradients for that PS or not.

        When it raises, some PS may have applied the push and others not: repeat it, under the same name.

        Raises:
            PsUnavailable: a PS cannot answer now.
            PsUninitialized: a PS holds no parameters.
            LeaseRefused: the push's lease has a successor.
            JobError: a PS holds another model.
        """
        changes = self._row_changes(push) if push is not None else {}
        pulled = self._lookups.of(pull.ids) if pull is not None else {}

        def call(ps_id: int) -> tuple[pb.ExchangeReply, list[Array]]:
            push_call = self._push_call(ps_id, push, changes) if push is not None else None
            pull_call = self._pull_call(ps_id, pull, pulled) if pull is not None else None
            incarnation = self.partition.servers[ps_id].incarnation
            frame = encode_exchange(ExchangeCall(incarnation, push_call, pull_call))
            lease = push.lease if push is not None else 0
            return self._raw(ps_id, "Exchange", frame, self._reply_bytes(ps_id, pull_call), lease)

        return self._assemble(pull, pulled, self._on_all(call))

    def known_ids(self, table: str) -> Ids:
        """All ids of a table that have rows, sorted.

        Raises:
            PsUnavailable, PsUninitialized, JobError: see `exchange`.
        """

        def call(ps_id: int) -> Ids:
            frame = encode_known_ids(self.partition.servers[ps_id].incarnation, table)
            ids: Ids = self._raw(ps_id, "KnownIds", frame, STREAM_FROM_BYTES)[1][0]
            return ids

        return np.sort(np.concatenate(self._on_all(call)))

    def _row_changes(self, push: Push) -> dict[str, tuple[Lookup, Floats]]:
        """Table to its lookup and the gradients [U, dim] of the unique ids."""
        lookups = self._lookups.of({name: ids for name, (ids, _) in push.row_gradients.items()})
        return {name: (lookups[name], lookups[name].sum(rows)) for name, (_, rows) in push.row_gradients.items()}

    def _push_call(self, ps_id: int, push: Push, changes: Mapping[str, tuple[Lookup, Floats]]) -> PushCall:
        header = pb.Push(
            lease=push.lease,
            epoch=push.epoch,
            task=push.task,
            minibatch=push.minibatch,
            dense=True,
            tables=list(changes),
            pulled_version=push.pulled_versions[ps_id] if push.pulled_versions else 0,
        )
        rows = tuple(
            (name, lookup.unique[lookup.part(ps_id)], gradients[lookup.part(ps_id)])
            for name, (lookup, gradients) in changes.items()
        )
        gradient = push.gradient[self._slice(ps_id, self._num_trainable)]
        return PushCall(header, gradient, push.change[self._slice(ps_id, self._num_non_trainable)], rows)

    @staticmethod
    def _pull_call(ps_id: int, pull: Pull, lookups: Mapping[str, Lookup]) -> PullCall:
        header = pb.Pull(dense=pull.dense, tables=list(lookups), read_only=pull.read_only)
        return PullCall(header, tuple((name, it.unique[it.part(ps_id)]) for name, it in lookups.items()))

    def _reply_bytes(self, ps_id: int, pull: PullCall | None) -> int:
        """About how large the reply will be."""
        if pull is None:
            return 0
        dense = self._slice(ps_id, self._num_trainable + self._num_non_trainable)
        num_floats = (dense.stop - dense.start) if pull.header.dense else 0
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
            trainable = _concatenate([next(of_ps) for of_ps in arrays])
            parameters = Parameters(trainable, _concatenate([next(of_ps) for of_ps in arrays]))
        rows = {
            name: lookup.expand(_concatenate([next(of_ps) for of_ps in arrays])) for name, lookup in lookups.items()
        }
        return Pulled(parameters, rows, versions, repeated)

    def _raw(
        self, ps_id: int, method: str, frame: bytes, reply_bytes: int, lease: int = 0
    ) -> tuple[pb.ExchangeReply, list[Array]]:
        channel = self._channels[ps_id]
        if max(len(frame), reply_bytes) < STREAM_FROM_BYTES:
            unary = channel.unary_unary(f"/{SERVICE}/{method}")
            answer = self._checked(ps_id, lambda: unary(frame, timeout=self._timeout_s))
        else:
            stream = channel.stream_stream(f"/{SERVICE}/{method}Stream")
            answer = self._checked(ps_id, lambda: join(stream(chunks(frame), timeout=self._timeout_s)))
        reply, arrays = decode_reply(answer)
        self._check_status(ps_id, reply.status, reply.reason, lease)
        return reply, arrays

    def _checked(self, ps_id: int, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except ValueError as error:  # gRPC: the channel was closed by another thread
            raise PsUnavailable(ps_id, f"PS {ps_id}: {error}") from error
        except grpc.RpcError as error:
            address = self.partition.servers[ps_id].address
            if is_transient(error) or error.code() in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL):
                raise PsUnavailable(ps_id, f"PS {ps_id} at {address}: {error.code().name.lower()}") from error
            raise JobError(f"PS {ps_id} at {address} refuses a call: {error.details()}") from error

    @staticmethod
    def _check_status(ps_id: int, status: int, reason: str, lease: int) -> None:
        if status == pb.LEASE_REFUSED:
            raise LeaseRefused(lease)
        if status == pb.UNINITIALIZED:
            raise PsUninitialized(ps_id)
        if status != pb.OK:
            raise PsUnavailable(ps_id, reason)

    def _on_all(self, call: Callable[[int], Answer]) -> list[Answer]:
        """Asks every PS at once and waits for all.  Of several errors a refused lease counts most."""
        if self.partition.num_ps == 1:
            return [call(0)]
        calls = [self._threads.submit(call, ps_id) for ps_id in range(self.partition.num_ps)]
        wait(calls)
        errors = [error for error in (future.exception() for future in calls) if error is not None]
        if errors:
            raise min(errors, key=_urgency)
        return [future.result() for future in calls]

    def _slice(self, ps_id: int, size: int) -> slice:
        return self.partition.dense_slice(ps_id, size)


def _urgency(error: BaseException) -> int:
    """What the caller must know first: a bug, the loss of its lease, then what will pass."""
    return {LeaseRefused: 1, PsUnavailable: 2, PsUninitialized: 3}.get(type(error), 0)


def _concatenate(parts: Sequence[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _num_floats(layout: ModelReport, trainable: bool) -> int:
    return sum(int(np.prod(v.shape, dtype=np.int64)) for v in layout.variables if v.trainable == trainable)
