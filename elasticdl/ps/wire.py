"""How the raw methods of a PS lay their arrays out in frames; both ends of the wire are here, and nothing else.

==================  =======================  ==========================================================================
method              header                   arrays of the request → arrays of the reply (reply header: ExchangeReply)
==================  =======================  ==========================================================================
Initialize          InitializeHeader         trainable slice [t], non-trainable slice [n] → none
Exchange            ExchangeHeader           push: gradient [t] and change [n] if dense, then ids [U] and gradients
                                             [U, dim] per table; pull: ids [U] per table → trainable [t] and
                                             non-trainable [n] if dense, then rows [U, dim] per table
KnownIds            KnownIdsHeader           none → ids [U]
==================  =======================  ==========================================================================

Floats are float32, ids int64.  ``<method>Stream`` is the same in chunks, for what is larger than 4 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import decode, encode

Array = npt.NDArray[Any]
SERVICE = "elasticdl.ParameterServer"


class RequestError(ValueError):
    """A frame is whole, but does not fit the model that this PS holds, or makes no sense."""


@dataclass(frozen=True, slots=True)
class InitializeCall:
    """A model's slice as a worker would begin it."""

    header: pb.InitializeHeader
    trainable: Floats
    non_trainable: Floats


@dataclass(frozen=True, slots=True)
class PushCall:
    """A push as one PS gets it.  `gradient` and `change` are None unless the header says dense."""

    header: pb.Push
    gradient: Floats | None
    change: Floats | None
    rows: tuple[tuple[str, Ids, Floats], ...]  # table, ids [U], gradients [U, dim]


@dataclass(frozen=True, slots=True)
class PullCall:
    """A pull as one PS gets it."""

    header: pb.Pull
    ids: tuple[tuple[str, Ids], ...]


@dataclass(frozen=True, slots=True)
class ExchangeCall:
    """A push, a pull, or both; rounds are applied first, then the push."""

    incarnation: int
    push: PushCall | None
    pull: PullCall | None
    partition_version: int = 0
    rounds: pb.Rounds | None = None


def encode_initialize(call: InitializeCall) -> bytes:
    return encode(call.header.SerializeToString(), [call.trainable, call.non_trainable])


def decode_initialize(frame: bytes) -> InitializeCall:
    """The inverse.

    Raises:
        FrameError: damaged.
        RequestError: malformed.
    """
    header_bytes, arrays = decode(frame)
    taken = _Taken(arrays)
    call = InitializeCall(pb.InitializeHeader.FromString(header_bytes), taken.floats(1), taken.floats(1))
    taken.check_end()
    return call


def encode_exchange(call: ExchangeCall) -> bytes:
    header = pb.ExchangeHeader(
        incarnation=call.incarnation, partition_version=call.partition_version, rounds=call.rounds
    )
    arrays: list[Array] = []
    if call.push is not None:
        header.push.CopyFrom(call.push.header)
        if call.push.header.dense:
            assert call.push.gradient is not None
            assert call.push.change is not None
            arrays += [call.push.gradient, call.push.change]
        for _, ids, gradients in call.push.rows:
            arrays += [ids, gradients]
    if call.pull is not None:
        header.pull.CopyFrom(call.pull.header)
        arrays += [ids for _, ids in call.pull.ids]
    return encode(header.SerializeToString(), arrays)


def decode_exchange(frame: bytes) -> ExchangeCall:
    """The inverse.

    Raises:
        FrameError: damaged.
        RequestError: malformed.
    """
    header_bytes, arrays = decode(frame)
    header = pb.ExchangeHeader.FromString(header_bytes)
    taken = _Taken(arrays)
    push = pull = None
    if header.HasField("push"):
        dense = header.push.dense
        gradient, change = (taken.floats(1), taken.floats(1)) if dense else (None, None)
        push = PushCall(
            header.push, gradient, change, tuple((t, taken.ids(), taken.floats(2)) for t in header.push.tables)
        )
    if header.HasField("pull"):
        pull = PullCall(header.pull, tuple((table, taken.ids()) for table in header.pull.tables))
    taken.check_end()
    rounds = header.rounds if header.HasField("rounds") else None
    return ExchangeCall(header.incarnation, push, pull, header.partition_version, rounds)


def encode_known_ids(incarnation: int, table: str) -> bytes:
    return encode(pb.KnownIdsHeader(incarnation=incarnation, table=table).SerializeToString(), [])


def decode_known_ids(frame: bytes) -> pb.KnownIdsHeader:
    """The inverse.

    Raises:
        FrameError: damaged.
    """
    return pb.KnownIdsHeader.FromString(decode(frame)[0])


def encode_reply(reply: pb.ExchangeReply, arrays: Sequence[Array] = ()) -> bytes:
    return encode(reply.SerializeToString(), arrays)


def decode_reply(frame: bytes) -> tuple[pb.ExchangeReply, list[Array]]:
    """The inverse.

    Raises:
        FrameError: damaged.
    """
    header, arrays = decode(frame)
    return pb.ExchangeReply.FromString(header), arrays


def table_message(table: Table) -> pb.Table:
    return pb.Table(name=table.name, dim=table.dim, initializer=table.initializer, input_dim=table.input_dim)


def table_from_message(message: pb.Table) -> Table:
    return Table(message.name, message.dim, message.initializer, message.input_dim)


class _Taken:
    """The arrays of a frame, taken one after the other."""

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = iter(arrays)

    def floats(self, num_dimensions: int) -> Floats:
        return self._take(np.dtype(np.float32), num_dimensions)

    def ids(self) -> Ids:
        return self._take(np.dtype(np.int64), 1)

    def _take(self, dtype: np.dtype[Any], num_dimensions: int) -> Array:
        array = next(self._arrays, None)
        if array is None or array.dtype != dtype or array.ndim != num_dimensions:
            found = "nothing" if array is None else f"{array.dtype} of {array.ndim} dimensions"
            raise RequestError(f"expected an array {dtype} of {num_dimensions} dimensions, found {found}")
        return array

    def check_end(self) -> None:
        if next(self._arrays, None) is not None:
            raise RequestError("the frame has more arrays than its header says")
