"""Every message and field has a rule, a broken one is answered with the field's name, and before a handler sees it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor as Types
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.servers import serve
from elasticdl.rpc.validation import FIELDS, MESSAGES, InvalidMessage, check, is_repeated, parse

ALL = pb.DESCRIPTOR.message_types_by_name
NUMBERS = (Types.TYPE_INT32, Types.TYPE_INT64)


def fields() -> Iterator[tuple[Any, Types]]:
    for descriptor in ALL.values():
        for field in descriptor.fields:
            yield GetMessageClass(descriptor), field


def wrong_values() -> Iterator[tuple[str, Message]]:
    """For each field that can be wrong by itself, a message in which it is."""
    for message_type, field in fields():
        name = f"{message_type.__name__}.{field.name}"
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            continue
        rule = FIELDS.get(name)
        message = message_type()
        for other in message_type.DESCRIPTOR.fields:
            needed = FIELDS.get(f"{message_type.__name__}.{other.name}")
            if needed is not None and needed.is_needed and other.message_type is None:
                setattr(message, other.name, "host:1" if needed.is_address else 1)
        if field.message_type is not None:
            entries = getattr(message, field.name)
            if field.message_type.fields_by_name["value"].message_type is None:
                entries.update({str(n): 0.0 for n in range(5000)})
                yield name, message
            continue
        if field.type in NUMBERS and (rule is None or rule.least >= 0):
            value: Any = -1
        elif field.type in (Types.TYPE_STRING, Types.TYPE_BYTES):
            value = "x" * (70 << 20 if field.type == Types.TYPE_BYTES else 2 << 20)
            value = value.encode() if field.type == Types.TYPE_BYTES else value
        elif field.type == Types.TYPE_DOUBLE and (rule is None or rule.is_finite):
            value = math.nan
        elif field.type == Types.TYPE_ENUM:
            value = 77
        else:
            continue
        if is_repeated(field):
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
        yield name, message


def test_rules_name_fields_that_exist() -> None:
    assert set(MESSAGES) <= set(ALL)
    assert set(FIELDS) <= {f"{message.__name__}.{field.name}" for message, field in fields()}


def test_a_wrong_value_of_any_field_of_any_message_is_refused_with_its_name() -> None:
    refused = set()
    for name, message in wrong_values():
        with pytest.raises(InvalidMessage, match="^" + name.replace(".", r"\.") + r"\b"):
            check(message)
        refused.add(name)
    free = {name for name, rule in FIELDS.items() if not rule.is_finite or rule.least < 0}
    every = {f"{m.__name__}.{f.name}" for m, f in fields() if f.message_type is None and f.type != Types.TYPE_BOOL}
    assert every - refused - free == {"SaveCheckpointReply.crc32"}  # has no wrong value


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (
            pb.HeartbeatRequest(role=pb.WORKER, positions=[pb.Position(), pb.Position(lease=-4)]),
            r"positions\[1\]\.lease",
        ),
        (pb.HeartbeatRequest(), "role is missing"),
        (pb.HeartbeatRequest(role=pb.PS, seconds={"ps": math.inf}), r"seconds\['ps'\]"),
        (pb.RegisterWorkerRequest(held=[pb.HeldLease()]), r"held\[0\]\.lease is missing"),
        (pb.RegisterWorkerRequest(held=[pb.HeldLease(lease=pb.Lease(type=1, epoch=-1))]), r"held\[0\]\.lease\.epoch"),
        (pb.PsQuestion(generation=1 << 60), "generation"),
        (pb.FinishedTask(num_minibatches=(1 << 31) - 1), "num_minibatches"),
        (pb.AppliedTask(watermark=(1 << 31) - 1), "watermark"),
        (pb.ProgressReport(committed=[1, 2, -1]), "committed"),
        (pb.ModelReport(training_shards=[pb.ShardMessage(start=2, end=1)]), r"training_shards\[0\]\.end"),
        (pb.ModelReport(callbacks="[" * 100_000), "callbacks is no JSON"),
        (pb.ModelReport(callbacks="[1]"), "callbacks is not a JSON object"),
        (pb.ModelReport(plan=pb.Plan(num_minibatches_per_task=1)), r"plan\.minibatch_size is missing"),
        (pb.MetricState(arrays=[pb.Array(shape=[1 << 40, 1 << 40])]), r"arrays\[0\]\.data has 0 bytes"),
        (pb.SessionReport(), "event is missing"),
    ],
)
def test_the_path_to_what_is_wrong_is_given(message: Message, fault: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{message.DESCRIPTOR.name}.{fault}"):
        check(message)


@pytest.mark.parametrize(
    "message",
    [
        pb.HeartbeatRequest(role=pb.WORKER, incarnation=(1 << 62) - 1, seconds={"ps": 1e9}),
        pb.ProgressReport(committed=[0, 5], loss=math.nan, has_loss=True),
        pb.EvaluationReport(
            states=[pb.MetricState(name="m", arrays=[pb.Array(shape=[2, 0]), pb.Array(data=bytes(8))])]
        ),
        pb.Plan(minibatch_size=1, num_minibatches_per_task=1, num_epochs=-1),
        pb.InitializeHeader(seed=-1),
        pb.InitializeHeader(tables=[pb.Table(name="t", dim=1)] * 5000),
    ],
)
def test_what_honest_members_say_passes(message: Message) -> None:
    sent = message.SerializeToString(deterministic=True)
    assert parse(type(message), sent).SerializeToString(deterministic=True) == sent  # == of messages has its own NaN


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "10.0.0.255:65535",
        "[::1]:50001",
        "[fd00::12:3]:50001",
        "[fe80::1%eth0]:50001",
        "localhost:8080",
        "elasticdl-job-ps-0.default.svc.cluster.local:2222",
        "worker_1.:2222",
        "xn--bcher-kva.example:80",
    ],
)
def test_a_place_to_connect_to_is_one(address: str) -> None:
    check(pb.RegisterPsRequest(address=address))
    check(pb.ReadyForGroupRequest(address=address))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:+5",
        "host: 5",
        "host:5 ",
        "host:٥",
        ":5",
        "::1:5",
        "[]:5",
        "[::1:5",
        "[::g]:5",
        "256.1.1.1:5",
        "1.2.3:5",
        "-a.b:5",
        "a..b:5",
        f"{'a' * 64}:5",
        f"{'a.' * 127}a:5",
        "a/b:5",
        "a\nb:5",
        "unix:/tmp/socket",
        "dns:///host:5",
        "x" * 5000,
    ],
)
def test_what_is_no_place_to_connect_to_is_refused(address: str) -> None:
    for message in (pb.RegisterPsRequest(address=address), pb.ReadyForGroupRequest(address=address)):
        with pytest.raises(InvalidMessage, match=r"\.address "):
            check(message)


def test_a_server_answers_what_breaks_a_rule_before_its_handler_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Message] = []

    class Master(pb_grpc.MasterServicer):  # type: ignore[misc]
        def ConfirmLease(self, request: pb.LeaseQuestion, _context: Any) -> pb.Ack:  # noqa: N802
            seen.append(request)
            return pb.Ack(accepted=True)

    server, port = serve(lambda s: pb_grpc.add_MasterServicer_to_server(Master(), s), "127.0.0.1", 0, "token", 4)
    with connect(f"127.0.0.1:{port}", "token") as channel, caplog.at_level(logging.INFO):
        raw = channel.unary_unary("/elasticdl.Master/ConfirmLease")
        for data in (b"\xff" * 9, pb.LeaseQuestion(lease=-1).SerializeToString()):
            with pytest.raises(grpc.RpcError) as refused:
                raw(data, timeout=10)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "LeaseQuestion.lease is -1" in refused.value.details()
        assert pb.Ack.FromString(raw(pb.LeaseQuestion(lease=1).SerializeToString(), timeout=10)).accepted
    server.stop(None).wait()
    assert seen == [pb.LeaseQuestion(lease=1)]
    assert not [record for record in caplog.records if record.exc_info]
