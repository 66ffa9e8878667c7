"""How the raw methods of a PS arrange their arrays in frames, for both ends of the wire.

==================  =======================  ==========================================================================
method              header                   arrays of the request → arrays of the reply (reply header: ExchangeReply)
==================  =======================  ==========================================================================
Initialize          InitializeHeader         trainable slice [t], non-trainable slice [n] → none
Exchange            ExchangeHeader           push: gradient [t] and change [n] if dense, then ids [U] and gradients
                                             [U, dim] per table; pull: ids [U] per table → trainable [t] and
                                             non-trainable [n] if dense, then rows [U, dim] per table
KnownIds            KnownIdsHeader           none → ids [U]
==================  =======================  ==========================================================================

Ids are int64.  Floats are float32; with another wire type, those of Exchange are sent as the bits of float16 or
bfloat16, rounded to nearest even, with values beyond float16 as its largest number.  Only this module converts them:
both ends work in float32.  Frames are sent over plain sockets (`tensor_sockets`), or over gRPC if that is the only
connection: ``<method>Stream`` is the same in chunks, for frames above 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.kernels import _native
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import Frame, decode
from elasticdl.rpc.frames import Message as FrameMessage
from elasticdl.rpc.validation import InvalidMessage, parse

Array = npt.NDArray[Any]
HeaderT = TypeVar("HeaderT", bound=Message)
SERVICE = "elasticdl.ParameterServer"

_LARGEST_HALF = np.float32(65504.0)


class RequestError(ValueError):
    """A frame is undamaged, but does not fit the model of this PS, or is invalid."""


@dataclass(frozen=True, slots=True)
class InitializeCall:
    """A PS's slice of a new model."""

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
    """A push, a pull, or both; rounds are applied first, then the push.

    Attributes:
        rounds: Synchronous mode: the rounds that the PS may lack; None: none.
        wire_type: Type of the floats in the call and in its reply.
    """

    incarnation: int
    push: PushCall | None
    pull: PullCall | None
    partition_version: int = 0
    rounds: pb.Rounds | None = None
    wire_type: pb.WireType = pb.FLOAT32


def initialize_frame(call: InitializeCall) -> Frame:
    return Frame(call.header.SerializeToString(), [call.trainable, call.non_trainable])


def decode_initialize(frame: FrameMessage | Frame) -> InitializeCall:
    """Parse an `initialize_frame`.

    Raises:
        FrameError: the frame is damaged.
        RequestError: the frame is malformed.
    """
    header_bytes, arrays = decode(frame)
    taken = _Taken(arrays)
    call = InitializeCall(_header(pb.InitializeHeader, header_bytes), taken.floats(1), taken.floats(1))
    taken.check_end()
    return call


def exchange_frame(call: ExchangeCall) -> Frame:
    header = pb.ExchangeHeader(
        incarnation=call.incarnation,
        partition_version=call.partition_version,
        push=None if call.push is None else call.push.header,
        pull=None if call.pull is None else call.pull.header,
        rounds=call.rounds,
        wire_type=call.wire_type,
    )
    pack = _PACK[call.wire_type]
    arrays: list[Array] = []
    if call.push is not None:
        if call.push.header.dense:
            assert call.push.gradient is not None
            assert call.push.change is not None
            arrays += [pack(call.push.gradient), pack(call.push.change)]
        for _, ids, gradients in call.push.rows:
            arrays += [ids, pack(gradients)]
    if call.pull is not None:
        arrays += [ids for _, ids in call.pull.ids]
    return Frame(header.SerializeToString(), arrays)


def decode_exchange(frame: FrameMessage | Frame) -> ExchangeCall:
    """Parse an `exchange_frame`.

    Raises:
        FrameError: the frame is damaged.
        RequestError: the frame is malformed.
    """
    header_bytes, arrays = decode(frame)
    header = _header(pb.ExchangeHeader, header_bytes)
    taken = _Taken(arrays, header.wire_type)
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
    return ExchangeCall(header.incarnation, push, pull, header.partition_version, rounds, header.wire_type)


def known_ids_frame(incarnation: int, table: str, partition_version: int = 0) -> Frame:
    header = pb.KnownIdsHeader(incarnation=incarnation, table=table, partition_version=partition_version)
    return Frame(header.SerializeToString(), [])


def decode_known_ids(frame: FrameMessage | Frame) -> pb.KnownIdsHeader:
    """Parse a `known_ids_frame`.

    Raises:
        FrameError: the frame is damaged.
        RequestError: the frame is malformed.
    """
    return _header(pb.KnownIdsHeader, decode(frame)[0])


def reply_frame(reply: pb.ExchangeReply, arrays: Sequence[Array] = (), wire_type: pb.WireType = pb.FLOAT32) -> Frame:
    """Return the frame of a reply; only float32 arrays are converted to the wire type."""
    pack = _PACK[wire_type]
    return Frame(reply.SerializeToString(), [pack(a) if a.dtype == np.float32 else a for a in arrays])


def decode_reply(
    frame: FrameMessage | Frame, wire_type: pb.WireType = pb.FLOAT32
) -> tuple[pb.ExchangeReply, list[Array]]:
    """Parse a `reply_frame`.

    Raises:
        FrameError: the frame is damaged.
    """
    header, arrays = decode(frame)
    unpack = _UNPACK[wire_type]
    return pb.ExchangeReply.FromString(header), [unpack(a) if a.dtype == np.uint16 else a for a in arrays]


def table_message(table: Table) -> pb.Table:
    return pb.Table(
        name=table.name,
        dim=table.dim,
        initializer=table.initializer,
        input_dim=table.input_dim,
        constraint=table.constraint,
    )


def table_from_message(message: pb.Table) -> Table:
    return Table(message.name, message.dim, message.initializer, message.input_dim, message.constraint)


def _header(message_type: type[HeaderT], data: bytes) -> HeaderT:
    try:
        return parse(message_type, data)
    except InvalidMessage as error:
        raise RequestError(str(error)) from error


class _Taken:
    """The arrays of a frame, taken one by one."""

    def __init__(self, arrays: list[Array], wire_type: pb.WireType = pb.FLOAT32) -> None:
        self._arrays = iter(arrays)
        self._float = np.dtype(np.float32 if wire_type == pb.FLOAT32 else np.uint16)
        self._unpack = _UNPACK[wire_type]

    def floats(self, num_dimensions: int) -> Floats:
        return self._unpack(self._take(self._float, num_dimensions))

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


def _as_is(values: Array) -> Array:
    return values


def _to_half(values: Floats) -> Array:
    if values.size and not (values.max() <= _LARGEST_HALF and values.min() >= -_LARGEST_HALF):
        values = np.clip(values, -_LARGEST_HALF, _LARGEST_HALF)  # keeps NaN
    return _native.to_half(np.ascontiguousarray(values))


def _to_bfloat16(values: Floats) -> Array:
    return _native.to_bfloat16(np.ascontiguousarray(values))


_PACK: dict[int, Callable[[Floats], Array]] = {
    pb.FLOAT32: _as_is,
    pb.FLOAT16: _to_half,
    pb.BFLOAT16: _to_bfloat16,
}
_UNPACK: dict[int, Callable[[Array], Floats]] = {
    pb.FLOAT32: _as_is,
    pb.FLOAT16: _native.from_half,
    pb.BFLOAT16: _native.from_bfloat16,
}
