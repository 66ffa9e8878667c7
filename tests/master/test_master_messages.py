"""Wire messages as the core's records, and back."""

from __future__ import annotations

from elasticdl.master import messages
from elasticdl.master.core import commands as c
from elasticdl.master.core.fleet.servers import owned
from elasticdl.master.core.values import PsAddress, PsPartition, PsUsage
from elasticdl.protocol import Device
from elasticdl.rpc import elasticdl_pb2 as pb

PARTITION = PsPartition(7, tuple(PsAddress(k, f"host-{k}:1", k + 1, owned(k, 3)) for k in range(3)))


def test_a_partition_names_address_life_and_buckets_of_every_server() -> None:
    message = messages.partition_message(PARTITION)
    assert message is not None
    assert message.version == 7
    assert [(ps.ps_id, ps.address, ps.incarnation) for ps in message.ps] == [
        (0, "host-0:1", 1),
        (1, "host-1:1", 2),
        (2, "host-2:1", 3),
    ]
    ranges = [(one.start, one.end) for ps in message.ps for one in ps.buckets]
    assert ranges == [(0, 341), (341, 682), (682, 1024)]


def test_the_answer_to_a_server_has_the_partition_and_the_number_of_workers_that_train() -> None:
    answer = c.HeartbeatAnswer(True, partition=PARTITION, num_pushing=5)
    reply = messages.heartbeat_reply(answer, 2)
    assert (reply.known, reply.generation, reply.num_pushing, len(reply.partition.ps)) == (True, 2, 5, 3)
    assert not messages.heartbeat_reply(c.HeartbeatAnswer(True), 2).HasField("partition")


def test_a_heartbeat_of_a_server_brings_its_load_and_that_of_a_worker_none() -> None:
    load = pb.PsLoad(
        pushes=1,
        pulls=2,
        rows_pushed=3,
        rows_pulled=4,
        bytes_received=5,
        bytes_sent=6,
        busy_seconds=7.5,
        staleness=[8, 9],
        refused=10,
        table_rows=11,
        table_bytes=12,
    )
    event = messages.heartbeat_received(1, pb.HeartbeatRequest(role=pb.PS, id=2, load=load))
    assert event.load == PsUsage(1, 2, 5, 6, 7.5, (8, 9), 10, 11, 12)
    assert messages.heartbeat_received(1, pb.HeartbeatRequest(role=pb.WORKER)).load is None


def test_a_heartbeat_of_a_worker_brings_its_device_if_it_has_one() -> None:
    device = pb.Device(name="cuda:1", kind="H100", used_bytes=5 << 30, total_bytes=80 << 30)
    event = messages.heartbeat_received(1, pb.HeartbeatRequest(role=pb.WORKER, device=device))
    assert event.device == Device("cuda:1", "H100", 5 << 30, 80 << 30)
    assert messages.heartbeat_received(1, pb.HeartbeatRequest(role=pb.WORKER)).device is None


def test_a_report_of_progress_brings_what_was_left_out_and_why() -> None:
    report = pb.ProgressReport(lease=3, skipped=[4, 5], not_finite="The loss is nan")
    event = messages.progress_reported(1, report)
    assert (event.skipped, event.not_finite, event.committed, event.loss) == ((4, 5), "The loss is nan", (), None)


def test_a_server_that_is_ready_brings_what_it_restored() -> None:
    request = pb.PsReadyRequest(ps_id=1, restored_from="/c/version-2", damaged=["version-3: torn"], error="none")
    event = messages.ps_ready(1, request)
    assert (event.restored_from, event.damaged, event.error) == ("/c/version-2", ("version-3: torn",), "none")
