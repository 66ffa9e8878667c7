"""Messages between worker and PS arrive as they were sent; short floats are as near as their type allows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Floats, ModelReport, Parameters, Table, Variable
from elasticdl.ps.client import PsClient, Pull, Push
from elasticdl.ps.wire import (
    ExchangeCall,
    PullCall,
    PushCall,
    RequestError,
    decode_exchange,
    decode_reply,
    exchange_frame,
    reply_frame,
)
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import CHUNK_BYTES, Frame, FrameError, decode, encode, join
from tests.ps.scenes import TOKEN, config, ps_cluster

SHORT = {pb.FLOAT16: 2.0**-11, pb.BFLOAT16: 2.0**-8}  # relative errors
WIRE_TYPES = [pb.FLOAT32, pb.FLOAT16, pb.BFLOAT16]


def exchange_call(wire_type: pb.WireType) -> ExchangeCall:
    random = np.random.default_rng(1)
    gradient, change = random.standard_normal(37).astype(np.float32), np.zeros(0, np.float32)
    ids = random.integers(-(2**63), 2**63 - 1, 5)
    rows = (("deep", ids, random.standard_normal((5, 3)).astype(np.float32)),)
    push = PushCall(
        pb.Push(lease=3, dense=True, tables=["deep"], learning_rate=0.5, num_records=7), gradient, change, rows
    )
    pull = PullCall(pb.Pull(dense=True, tables=["deep"]), (("deep", ids),))
    rounds = pb.Rounds(coordinator=4, rounds=[pb.Round(number=2, names=[pb.MinibatchName(epoch=1, task=2, n=3)])])
    return ExchangeCall(9, push, pull, 11, rounds, wire_type)


def error(sent: Floats, got: Floats) -> float:
    """The largest relative error."""
    assert got.dtype == np.float32
    assert got.shape == sent.shape
    return float((abs(got - sent) / abs(sent)).max(initial=0.0))


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_an_exchange_arrives_as_it_was_sent(wire_type: pb.WireType) -> None:
    sent = exchange_call(wire_type)
    got = decode_exchange(exchange_frame(sent).whole())
    assert sent.push is not None
    assert sent.pull is not None
    assert got.push is not None
    assert got.pull is not None
    assert (got.incarnation, got.partition_version, got.wire_type) == (9, 11, wire_type)
    assert (got.rounds, got.push.header, got.pull.header) == (sent.rounds, sent.push.header, sent.pull.header)
    np.testing.assert_array_equal(got.pull.ids[0][1], sent.pull.ids[0][1])
    np.testing.assert_array_equal(got.push.rows[0][1], sent.push.rows[0][1])
    for before, after in (
        (sent.push.gradient, got.push.gradient),
        (sent.push.change, got.push.change),
        (sent.push.rows[0][2], got.push.rows[0][2]),
    ):
        assert before is not None
        assert after is not None
        assert error(before, after) <= SHORT.get(wire_type, 0.0)


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_a_reply_arrives_as_it_was_sent(wire_type: pb.WireType) -> None:
    ids, rows = np.arange(4), np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)
    reply, arrays = decode_reply(reply_frame(pb.ExchangeReply(version=5), [rows, ids], wire_type).whole(), wire_type)
    assert reply.version == 5
    assert error(rows, arrays[0]) <= SHORT.get(wire_type, 0.0)
    np.testing.assert_array_equal(arrays[1], ids)


def test_short_floats_halve_the_bytes() -> None:
    sizes = [len(reply_frame(pb.ExchangeReply(), [np.zeros(10_000, np.float32)], it).whole()) for it in WIRE_TYPES]
    assert sizes[1] == sizes[2] < 0.51 * sizes[0]


@pytest.mark.parametrize("wire_type", WIRE_TYPES)
def test_special_values(wire_type: pb.WireType) -> None:
    sent = np.array([0.0, -0.0, 1e30, -1e30, np.nan, 2.0], np.float32)
    got = decode_reply(reply_frame(pb.ExchangeReply(), [sent], wire_type).whole(), wire_type)[1][0]
    largest = 65504.0 if wire_type == pb.FLOAT16 else 1e30
    np.testing.assert_allclose(got, [0.0, -0.0, largest, -largest, np.nan, 2.0], rtol=2.0**-8)
    np.testing.assert_array_equal(np.signbit(got[:2]), [False, True])


def test_an_unknown_wire_type_is_refused() -> None:
    header = pb.ExchangeHeader(incarnation=1)
    header.wire_type = 9  # type: ignore[assignment]
    with pytest.raises(RequestError, match="wire_type is 9"):
        decode_exchange(encode(header.SerializeToString(), []))


ARRAYS = st.lists(
    st.tuples(st.sampled_from(["<f4", "<i8", "<f8", "<i4", "<f2", "<u2"]), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=20), ARRAYS, st.integers(0, 2**32 - 1))
def test_frames_hold_any_arrays_and_notice_any_damage(
    header: bytes, shapes: list[tuple[str, list[int]]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    arrays = [np.asarray(random.integers(0, 100, shape)).astype(dtype) for dtype, shape in shapes]
    frame = encode(header, arrays)
    assert len(frame) == len(Frame(header, arrays))
    got_header, got = decode(frame)
    assert got_header == header
    assert [(a.dtype, a.shape, a.tolist()) for a in got] == [(a.dtype, a.shape, a.tolist()) for a in arrays]
    damaged = bytearray(frame)
    damaged[seed % len(frame)] ^= 1 << (seed % 8)
    with pytest.raises(FrameError):
        decode(bytes(damaged))
    with pytest.raises(FrameError):
        decode(frame[: seed % len(frame)])


def test_a_large_frame_goes_as_a_stream_and_must_come_whole() -> None:
    arrays = [np.arange(n, dtype=np.float32) for n in (5, 700_001, 0, 3, 262_144)]
    chunks = list(Frame(b"header", arrays).chunks())
    assert [len(chunk) for chunk in chunks[1:-1]] == [CHUNK_BYTES] * (len(chunks) - 2)
    header, got = decode(join(chunks))
    assert header == b"header"
    for sent, array in zip(arrays, got, strict=True):
        np.testing.assert_array_equal(array, sent)
    for damaged in ([], chunks[1:], chunks[:-1], [*chunks, b"more"], [chunks[0], *chunks[:0:-1]]):
        with pytest.raises(FrameError):
            decode(join(damaged))


def test_arrays_that_do_not_lie_together_are_sent_too() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    np.testing.assert_array_equal(decode(encode(b"", [array]))[1][0], array)


def logistic_loss(wire_dtype: str) -> float:
    """Of a click model that is trained on a PS: rows of 200 ids and a dense vector, Adagrad, 150 minibatches of 64."""
    random = np.random.default_rng(5)
    truth, mix = random.standard_normal(200), random.standard_normal(4)
    layout = ModelReport((Variable("w", (4,), True),), (Table("ids", 1, config("Zeros")),), "", ())
    adagrad = json.dumps({"class_name": "Adagrad", "config": {"learning_rate": 0.3}})
    losses = []
    with ps_cluster(2, initialize=False) as cluster:
        client = PsClient(cluster.partition, layout, TOKEN, wire_dtype=wire_dtype)
        client.initialize(Parameters(np.zeros(4, np.float32), np.zeros(0, np.float32)), layout.tables, adagrad, 0)
        for n in range(150):
            ids, dense = random.integers(0, 200, 64), random.standard_normal((64, 4)).astype(np.float32)
            labels = random.random(64) < 1 / (1 + np.exp(-(truth[ids] + dense @ mix)))
            pulled = client.exchange(None, Pull(True, {"ids": ids}))
            assert pulled.parameters is not None
            logits = pulled.rows["ids"][:, 0] + dense @ pulled.parameters.trainable
            losses.append(float(np.log1p(np.exp(np.where(labels, -logits, logits))).mean()))
            slope = ((1 / (1 + np.exp(-logits)) - labels) / 64).astype(np.float32)
            gradient = (slope @ dense).astype(np.float32)
            client.exchange(Push(1, 0, 0, n, gradient, np.zeros(0, np.float32), {"ids": (ids, slope[:, None])}), None)
        client.close()
    return float(np.mean(losses[-30:]))


def test_a_model_learns_as_well_with_short_floats_on_the_wire() -> None:
    exact = logistic_loss("float32")
    assert exact < 0.55
    assert logistic_loss("float16") == pytest.approx(exact, abs=0.002)
    assert logistic_loss("bfloat16") == pytest.approx(exact, abs=0.01)
