"""The native look at a message's bytes never passes what the rules refuse, whatever the bytes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.validation import InvalidMessage, check, surely_keeps
from tests.fuzz.messages import Filler
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds
from tests.rpc.test_validation import wrong_values

TYPES = [GetMessageClass(descriptor) for descriptor in pb.DESCRIPTOR.message_types_by_name.values()]


def keeps(message: Message) -> bool:
    try:
        check(message)
    except InvalidMessage:
        return False
    return True


def is_sure(message_type: Any, data: bytes) -> bool:
    """Whether the native look passes it; then it must keep the rules."""
    is_passed = surely_keeps(message_type.DESCRIPTOR.name, data)
    if is_passed:
        try:
            message = message_type.FromString(data)
        except DecodeError:
            return True  # of wrong UTF-8: it is read before it is looked at
        assert keeps(message), (message_type, data)
    return is_passed


def test_what_it_passes_keeps_all_rules() -> None:
    passed = kept = 0
    for seed in range(rounds(60_000)):
        random = Random(seed)
        message = Filler(random).fill(random.choice(TYPES)())
        data = message.SerializeToString()
        passed += is_sure(type(message), data)
        kept += keeps(message)
        if data:
            is_sure(type(message), damage(data, random))
            is_sure(random.choice(TYPES), data)
            is_sure(type(message), data + random.choice(TYPES)().SerializeToString() + data)  # fields twice
    assert passed > 0.8 * kept


def test_it_passes_no_wrong_value_of_any_field() -> None:
    for name, message in wrong_values():
        assert not is_sure(type(message), message.SerializeToString()), name


@pytest.mark.parametrize(
    ("message_type", "data"),
    [
        (pb.LeaseQuestion, b"\x08" + b"\xff\xff\xff\xff\x0f"),  # an int32 of 5 bytes that is -1
        (pb.LeaseQuestion, b"\x18" + b"\xff" * 9 + b"\x01"),  # an int64 that is -1
        (pb.LeaseQuestion, b"\x18" + b"\x80" * 9 + b"\x01"),
        (pb.HeartbeatRequest, b"\x08\x02\x08\x00"),  # a role, and later none
        (pb.HeartbeatRequest, b"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"),
        (pb.HeartbeatRequest, b"\x08\x05"),
        (pb.FinishedTask, b"\x20\xff\xff\xff\x7f"),
        (pb.ProgressReport, b"\x22\x0b\x01" + b"\xff" * 9 + b"\x01"),  # packed, and not
        (pb.ProgressReport, b"\x20\x01\x20" + b"\xff" * 9 + b"\x01"),
        (pb.PsLoad, b"\x39" + b"\x00" * 6 + b"\xf0\x7f"),
        (pb.HeartbeatRequest, b"\x08\x01\x32\x0d\x0a\x02ps\x11" + b"\x00" * 6 + b"\xf8\x7f"),
        (pb.Array, b""),
        (pb.ShardMessage, b"\x10\x01"),
        (pb.Ack, b"\xf8\x07\x01"),  # a field of a later version
    ],
)
def test_bytes_that_break_a_rule_or_may(message_type: Any, data: bytes) -> None:
    assert not is_sure(message_type, data)


def test_what_comes_often_is_passed_at_once() -> None:
    beat = pb.HeartbeatRequest(
        role=pb.WORKER,
        id=3,
        incarnation=(1 << 62) - 1,
        positions=[pb.Position(lease=(1 << 32) + 5, minibatch=9), pb.Position(lease=(1 << 32) + 6)],
        activity="computing",
        seconds={"compute": 12.5, "ps": 0.0},
        waiting_seconds=-0.0,
    )
    report = pb.ProgressReport(worker_id=1, incarnation=1, lease=1 << 33, committed=range(50), loss=float("nan"))
    header = pb.ExchangeHeader(
        incarnation=1,
        push=pb.Push(lease=1, epoch=3, minibatch=4, dense=True, tables=["wide", "déep"], learning_rate=0.5),
        pull=pb.Pull(dense=True, tables=["wide"]),
        wire_type=pb.BFLOAT16,
    )
    load = pb.HeartbeatRequest(role=pb.PS, load=pb.PsLoad(pushes=1 << 40, staleness=[1, 0, 2], busy_seconds=3.5))
    applied = pb.AppliedSet(tasks=[pb.AppliedTask(epoch=1, task=n, extras=[3, 5]) for n in range(5)], num_applies=10)
    for message in (beat, load, report, header, applied, pb.LeaseRequest(only=pb.EVALUATION), pb.PsQuestion()):
        assert is_sure(type(message), message.SerializeToString()), message
