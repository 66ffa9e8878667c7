"""Calls and frames of any content to parameter servers: they answer, damage nothing, and hold what was pushed."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass

from elasticdl.ps.applied import AppliedSet
from elasticdl.ps.client import PsClient
from elasticdl.ps.server.service import JobBounds, PsService
from elasticdl.ps.tensor_sockets import CallFailed
from elasticdl.ps.wire import SERVICE
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import connect
from elasticdl.rpc.frames import Frame
from elasticdl.rpc.handshake import connecting, shake_hands
from tests.fuzz.messages import Filler
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds
from tests.ps.scenes import ADAM, TOKEN, Cluster, make_push, ps_cluster, whole_pull

HOST = "127.0.0.1"
METHODS = pb.DESCRIPTOR.services_by_name["ParameterServer"].methods
HEADERS = {"Initialize": pb.InitializeHeader, "Exchange": pb.ExchangeHeader, "KnownIds": pb.KnownIdsHeader}
DTYPES = tuple(np.dtype(name) for name in ("<f4", "<f4", "<i8", "<f8", "<u2"))
SHAPES = ((0,), (3,), (40,), (20,), (20, 1), (20, 8), (4, 4), (1, 1, 1), ())
HONEST_EPOCH = 9
PLACES = ("", "version-1", "version-2", "version-1/..", "../version-1", "x" * 5000, "a\0b")  # of a checkpoint
REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
}


def any_frame(random: Random) -> tuple[str, Frame]:
    """A method and a frame for it, whole; its header says and its arrays hold anything."""
    method = random.choice(("Exchange", "Exchange", "Exchange", "Initialize", "KnownIds"))
    header: Any = Filler(random).fill(HEADERS[method]())
    header.incarnation = 10 if random.random() < 0.9 else header.incarnation
    header.partition_version = 0
    if isinstance(header, pb.ExchangeHeader):
        header.push.epoch = min(header.push.epoch, HONEST_EPOCH - 1)
        if random.random() < 0.3:
            header.ClearField("push")
    elif isinstance(header, pb.InitializeHeader) and random.random() < 0.5:
        header.optimizer = ADAM
    numbers = np.random.default_rng(random.getrandbits(32))
    arrays = []
    for _ in range(random.choice((0, 1, 2, 2, 3, 4, 6))):
        dtype, shape = random.choice(DTYPES), random.choice(SHAPES)
        arrays.append(np.asarray(numbers.integers(-30, 30, shape)).astype(dtype))
    data = header.SerializeToString()
    return method, Frame(damage(data, random) if data and random.random() < 0.1 else data, arrays)


def check_that_it_holds_what_is_pushed(cluster: Cluster, client: PsClient) -> None:
    """Two minibatches, one of them twice; each is in the model once."""
    (service,) = cluster.services
    assert not service.state.is_damaged
    before = applied_of(service)
    for n in (0, 1, 1):
        client.exchange(make_push(n, lease=7, epoch=HONEST_EPOCH), None)
    pulled = client.exchange(None, whole_pull())
    assert pulled.parameters is not None
    after = applied_of(service)
    assert after.num_applies == before.num_applies + 2
    assert AppliedSet.from_message(after).num_names == after.num_applies
    assert [task.watermark for task in after.tasks if task.epoch == HONEST_EPOCH] == [2]


def applied_of(service: PsService) -> pb.AppliedSet:
    return service.read_applied_set(pb.PsQuestion(generation=service.generation, incarnation=10)).applied


def test_any_frame_is_answered_or_refused_and_changes_no_more_than_its_name(caplog: pytest.LogCaptureFixture) -> None:
    codes = set()
    with ps_cluster(1) as cluster, caplog.at_level(logging.INFO):
        sockets = cluster.client._connections[0]._sockets
        assert sockets is not None
        for seed in range(rounds(2000)):
            method, frame = any_frame(Random(seed))
            try:
                sockets.call(method, frame, 20)
            except CallFailed as refused:
                codes.add(refused.code())
                if refused.code() not in REFUSALS:
                    raise AssertionError(f"seed {seed}, {method}") from refused
        check_that_it_holds_what_is_pushed(cluster, cluster.client)
    assert codes <= REFUSALS
    assert not [record for record in caplog.records if record.exc_info]


def test_any_call_is_answered_or_refused(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "version-1").mkdir()
    with ps_cluster(1) as cluster, caplog.at_level(logging.INFO):
        cluster.services[0].job = JobBounds(str(tmp_path))
        address = cluster.partition.ps[0].address
        with connect(address, TOKEN) as channel:
            for seed in range(rounds(5000)):
                random = Random(seed)
                method = random.choice(METHODS)
                message: Any = Filler(random).fill(GetMessageClass(method.input_type)())
                message.incarnation = 10 if random.random() < 0.8 else message.incarnation
                if isinstance(message, pb.SaveCheckpointRequest):
                    message.directory = str(tmp_path / random.choice(PLACES))
                if hasattr(message, "lease"):
                    message.lease &= 0xFFFFFFFF  # of a generation that is named: others wait
                if hasattr(message, "generation"):
                    message.generation = 0 if random.random() < 0.9 else -1
                if hasattr(message, "epoch"):
                    message.epoch = min(message.epoch, HONEST_EPOCH - 1)
                data = message.SerializeToString()
                ends(channel, method.name, data, seed)
        check_that_it_holds_what_is_pushed(cluster, cluster.client)
    assert not [record for record in caplog.records if record.exc_info]


def test_damaged_frames_over_grpc_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    good = [any_frame(Random(seed)) for seed in range(20)]
    with ps_cluster(1) as cluster, caplog.at_level(logging.INFO):
        with connect(cluster.partition.ps[0].address, TOKEN) as channel:
            for seed in range(rounds(2000)):
                random = Random(seed)
                method, frame = random.choice(good)
                ends(channel, method, damage(frame.whole(), random), seed)
                pieces = [damage(piece, random) if random.random() < 0.5 else piece for piece in frame.chunks()]
                stream = channel.stream_stream(f"/{SERVICE}/{method}Stream")
                is_refused(lambda: list(stream(iter(pieces), timeout=20)), seed, method)  # noqa: B023
        check_that_it_holds_what_is_pushed(cluster, cluster.client)
    assert not [record for record in caplog.records if record.exc_info]


def test_damaged_bytes_on_tensor_sockets_end_their_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    call = pb.ExchangeHeader(incarnation=10, pull=pb.Pull(dense=True)).SerializeToString()
    frame = Frame(call, []).whole()
    good = struct.pack("<IIQ", 1, 0, len(frame)) + frame[8:] + frame[:8]
    with ps_cluster(1) as cluster, caplog.at_level(logging.INFO):
        sockets = cluster.client._connections[0]._sockets
        assert sockets is not None
        for seed in range(rounds(2000)):
            random = Random(seed)
            with socket.create_connection(sockets._address, timeout=20) as connection:
                if random.random() < 0.8:
                    shake_hands(connection, connecting(TOKEN, "tensors"))
                with contextlib.suppress(OSError):
                    connection.sendall(damage(good, random))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
        check_that_it_holds_what_is_pushed(cluster, cluster.client)
    assert not [record for record in caplog.records if record.exc_info]


def ends(channel: grpc.Channel, method: str, data: bytes, seed: int) -> None:
    """Calls a method; it is answered or refused."""
    is_refused(lambda: channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=20), seed, method)


def is_refused(call: Callable[[], object], seed: int, method: str) -> bool:
    """False: it is answered.

    Raises:
        AssertionError: neither.
    """
    try:
        call()
    except grpc.RpcError as error:
        if error.code() not in REFUSALS:
            raise AssertionError(f"seed {seed}, {method}") from error
        return True
    return False
