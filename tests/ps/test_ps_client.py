"""The client against parameter servers behind real sockets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.frameworks.framework import ModelReport, Parameters, Table, Variable
from elasticdl.kernels import _native
from elasticdl.ps import tensor_sockets
from elasticdl.ps.client import IdsOutOfRange, LeaseRefused, PsClient, PsUnavailable, PsUninitialized, Pull, Push
from elasticdl.ps.client.connection import PsConnection
from elasticdl.ps.client.exchanges import LocalDenseValues, Lookup, RowLookups
from elasticdl.ps.optim.optimizers import OptimizerConfig
from elasticdl.ps.partition import Partition
from elasticdl.ps.wire import SERVICE
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import MAGIC, WIRE_VERSION, Frame, Message, encode
from elasticdl.rpc.servers import Flow, raw_handlers
from elasticdl_client.errors import JobError
from tests.ps.scenes import (
    ADAM,
    LAYOUT,
    NUM_TRAINABLE,
    TABLES,
    TOKEN,
    assert_same_model,
    config,
    initial_parameters,
    make_push,
    ps_cluster,
    push_all,
    whole_pull,
)


def test_what_was_initialised_is_read_back() -> None:
    with ps_cluster(3) as cluster:
        pulled = cluster.client.exchange(None, whole_pull())
        assert pulled.parameters is not None
        np.testing.assert_array_equal(pulled.parameters.trainable, initial_parameters().trainable)
        assert pulled.versions == (0, 0, 0)
        assert cluster.client.known_ids("deep").tolist() == []


def test_any_number_of_ps_is_the_same_model_bit_for_bit() -> None:
    with ps_cluster(1) as one, ps_cluster(2) as two, ps_cluster(3) as three:
        for cluster in (one, two, three):
            push_all(cluster.client, [3, 0, 1, 2, 9, 4])
        assert_same_model(one.client, two.client)
        assert_same_model(one.client, three.client)
        touched = np.unique(np.concatenate([make_push(n).row_gradients["deep"][0] for n in [3, 0, 1, 2, 9, 4]]))
        assert three.client.known_ids("deep").tolist() == touched.tolist()


def test_a_push_is_applied_before_the_pull_of_the_same_call_reads() -> None:
    with ps_cluster(2) as one, ps_cluster(2) as other:
        together = one.client.exchange(make_push(0), whole_pull())
        other.client.exchange(make_push(0), None)
        apart = other.client.exchange(None, whole_pull())
        np.testing.assert_array_equal(together.rows["deep"], apart.rows["deep"])
        assert together.versions == (1, 1)


def test_a_repeated_push_is_ignored_and_its_pull_answered() -> None:
    with ps_cluster(2) as cluster:
        first = cluster.client.exchange(make_push(0), whole_pull())
        again = cluster.client.exchange(make_push(0), whole_pull())
        assert (first.repeated_push, again.repeated_push) == ((False, False), (True, True))
        np.testing.assert_array_equal(first.rows["deep"], again.rows["deep"])
        assert again.versions == (1, 1)


def test_rows_come_in_the_order_of_the_ids() -> None:
    with ps_cluster(3) as cluster:
        push_all(cluster.client, range(4))
        ids = np.array([5, -30, 29, 0, 17], np.int64)
        some = cluster.client.exchange(None, Pull(dense=False, ids={"deep": ids}))
        everything = cluster.client.exchange(None, whole_pull()).rows["deep"]
        np.testing.assert_array_equal(some.rows["deep"], everything[ids + 30])
        assert some.parameters is None


@pytest.mark.parametrize("num_ps", [1, 3])
def test_ids_may_repeat(num_ps: int) -> None:
    ids = np.array([5, 9, 5, -30, 9, 5], np.int64)
    gradients = np.arange(12, dtype=np.float32).reshape(6, 2)
    layout = ModelReport((), (Table("t", 2, config("Zeros")),), config("SGD", learning_rate=1.0), ())
    with ps_cluster(num_ps, initialize=False) as cluster:
        client = PsClient(cluster.partition, layout, TOKEN)
        empty = np.zeros(0, np.float32)
        client.initialize(Parameters(empty, empty), layout.tables, layout.optimizer, 0)
        pulled = client.exchange(Push(1, 0, 0, 0, empty, empty, {"t": (ids, gradients)}), Pull(False, {"t": ids}))
        sums = {5: gradients[[0, 2, 5]].sum(0), 9: gradients[[1, 4]].sum(0), -30: gradients[3]}
        np.testing.assert_array_equal(pulled.rows["t"], [-sums[one] for one in ids.tolist()])
        assert client.known_ids("t").tolist() == [-30, 5, 9]
        client.close()


def test_ids_out_of_range_name_the_layer() -> None:
    layout = ModelReport((), (Table("movie", 2, config("Zeros"), input_dim=10),), ADAM, ())
    with ps_cluster(1, initialize=False) as cluster:
        client = PsClient(cluster.partition, layout, TOKEN)
        with pytest.raises(IdsOutOfRange, match=r"'movie' .* not in \[0, 10\), its input_dim: -1, 10$"):
            client.exchange(None, Pull(False, {"movie": np.array([3, 10, -1, 9], np.int64)}))
        client.close()


def test_every_ps_gets_every_name_even_without_gradients_for_it() -> None:
    tiny = ModelReport((Variable("w", (1,), True),), (Table("t", 2, config("Zeros")),), ADAM, ())
    with ps_cluster(3, initialize=False) as cluster:
        client = PsClient(cluster.partition, tiny, TOKEN)
        client.initialize(Parameters(np.zeros(1, np.float32), np.zeros(0, np.float32)), tiny.tables, ADAM, 0)
        push = Push(1, 0, 0, 0, np.ones(1, np.float32), np.zeros(0, np.float32))
        assert client.exchange(push, None).versions == (1, 1, 1)
        assert client.standing(1, 0, 0) == {0}
        client.close()


def test_a_successor_learns_what_all_ps_have_and_locks_its_predecessor_out() -> None:
    with ps_cluster(2) as cluster:
        push_all(cluster.client, [0, 1, 2], lease=1)
        cluster.services[1].incarnation += 1  # PS 0 alone gets minibatch 3
        with pytest.raises(PsUnavailable):
            cluster.client.exchange(make_push(3, lease=1), None)
        cluster.services[1].incarnation -= 1
        assert cluster.services[0].state.applied()[0].num_applies == 4
        assert cluster.client.standing(2, 0, 0) == {0, 1, 2}
        with pytest.raises(LeaseRefused):
            cluster.client.exchange(make_push(3, lease=1), None)
        with pytest.raises(LeaseRefused):
            cluster.client.standing(1, 0, 0)
        assert cluster.client.exchange(make_push(3, lease=2), None).repeated_push == (True, False)
        cluster.client.exchange(make_push(0, lease=1, task=1), None)


@pytest.mark.parametrize("num_ps", [1, 3])
def test_what_the_loss_does_not_reach_stays_on_the_servers_and_in_the_workers_copy(num_ps: int) -> None:
    """Momentum from the push before would move it."""
    unreached = ((3, 7), (7, 9), (35, 40))
    reached = np.array([not any(start <= n < end for start, end in unreached) for n in range(NUM_TRAINABLE)])
    with ps_cluster(num_ps) as cluster:
        local = LocalDenseValues(ADAM, period=4)
        local.replace(initial_parameters(), (0,))
        push_all(cluster.client, [0])
        local.apply(make_push(0))
        before = cluster.client.exchange(None, whole_pull()).parameters
        push = replace(make_push(1), unreached=unreached)
        after = cluster.client.exchange(push, whole_pull()).parameters
        local.apply(push)
        assert before is not None
        assert after is not None
        np.testing.assert_array_equal(after.trainable == before.trainable, ~reached)
        np.testing.assert_array_equal(local.parameters.trainable, after.trainable)


def test_with_ftrl_a_worker_continues_from_the_dense_values_that_it_pulled() -> None:
    values = LocalDenseValues(config("Ftrl", learning_rate=0.1), period=4)
    weights, none, tiny = np.full(1, 0.5, np.float32), np.zeros(0, np.float32), np.full(1, 0.01, np.float32)
    push = Push(1, 0, 0, 0, tiny, none)
    for version in (3, 9):
        values.replace(Parameters(weights, none), (version,))
        before = values.parameters.trainable.copy()
        values.apply(push)
        np.testing.assert_allclose(values.parameters.trainable, before - 0.01 / (np.sqrt(0.1) / 0.1), rtol=1e-3)


def test_with_ftrl_a_lone_worker_computes_what_the_servers_do_from_the_first_update_on() -> None:
    ftrl = OptimizerConfig.parse(config("Ftrl", learning_rate=0.1))
    values = LocalDenseValues(config("Ftrl", learning_rate=0.1), period=4)
    weights, none, gradient = np.full(1, 0.5, np.float32), np.zeros(0, np.float32), np.full(1, 0.01, np.float32)
    values.replace(Parameters(weights, none), (0,))
    values.apply(Push(1, 0, 0, 0, gradient, none))
    slots = [np.full(1, slot.initial, np.float32) for slot in ftrl.slots]
    _native.Optimizer(ftrl.kind, ftrl.options).apply(weights, slots, gradient, ftrl.scalars(1), 0.0)
    np.testing.assert_array_equal(values.parameters.trainable, weights)


def test_large_calls_go_as_streams() -> None:
    big = ModelReport((Variable("w", (3_000_000,), True),), (Table("t", 64, config("Ones")),), ADAM, ())
    sgd = config("SGD", learning_rate=1.0)
    with ps_cluster(2, initialize=False) as cluster:
        client = PsClient(cluster.partition, big, TOKEN)
        client.initialize(Parameters(np.zeros(3_000_000, np.float32), np.zeros(0, np.float32)), big.tables, sgd, 0)
        ids = np.arange(40_000, dtype=np.int64)
        gradient = np.arange(3_000_000, dtype=np.float32)
        rows = np.repeat(ids[:, None], 64, axis=1).astype(np.float32)
        push = Push(1, 0, 0, 0, gradient, np.zeros(0, np.float32), {"t": (ids, rows)})
        pulled = client.exchange(push, Pull(dense=True, ids={"t": ids}))
        assert pulled.parameters is not None
        np.testing.assert_array_equal(pulled.parameters.trainable, -gradient)
        np.testing.assert_array_equal(pulled.rows["t"], 1 - rows)
        np.testing.assert_array_equal(client.known_ids("t"), ids)
        client.close()


def test_a_reply_with_all_ids_of_a_table_has_time_for_a_billion(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = []
    raw = PsConnection.raw

    def noted(self: PsConnection, method: str, frame: Frame, reply_bytes: int) -> Message:
        claimed.append((method, reply_bytes))
        return raw(self, method, frame, reply_bytes)

    monkeypatch.setattr(PsConnection, "raw", noted)
    with ps_cluster(1) as cluster:
        claimed.clear()
        cluster.client.known_ids("deep")
    assert [(method, size >= 8 * 10**9) for method, size in claimed] == [("KnownIds", True)]


def test_pushes_from_many_threads_are_each_applied_once() -> None:
    with ps_cluster(2) as cluster:
        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(cluster.client.exchange, make_push(n), whole_pull()) for n in [*range(40)] * 2]
            repeated = sum(call.result().repeated_push[0] for call in calls)
        assert repeated == 40
        for service in cluster.services:
            applied, _, version = service.state.applied()
            assert (applied.num_applies, version, applied.tasks[0].watermark) == (40, 40, 40)


def test_a_ps_that_holds_nothing_says_so() -> None:
    with ps_cluster(2, initialize=False) as cluster:
        with pytest.raises(PsUninitialized):
            cluster.client.exchange(None, whole_pull())
        assert cluster.client.standing(1, 0, 0) == frozenset()


def test_another_incarnation_is_not_spoken_to() -> None:
    with ps_cluster(2) as cluster:
        cluster.services[1].incarnation += 1
        with pytest.raises(PsUnavailable, match="incarnation 12") as raised:
            cluster.client.exchange(make_push(0), None)
        assert raised.value.ps_id == 1
        with pytest.raises(PsUnavailable):
            cluster.client.standing(1, 0, 0)
        assert cluster.services[1].state.applied()[0].num_applies == 0


def test_a_ps_that_is_not_there_is_unavailable() -> None:
    nowhere = pb.Partition(version=1)
    nowhere.ps.add(ps_id=0, address="127.0.0.1:1", incarnation=1)
    client = PsClient(nowhere, LAYOUT, TOKEN, timeout_s=3)
    with pytest.raises(PsUnavailable, match=r"127\.0\.0\.1:1: unavailable$"):  # without gRPC's text, which varies
        client.exchange(make_push(0), None)
    client.close()


def test_a_client_that_another_thread_has_closed_is_unavailable() -> None:
    """As when that thread knows a newer partition, and this one was about to call."""
    with ps_cluster(2) as cluster:
        cluster.client.close()
        for call in (lambda: cluster.client.exchange(make_push(0), None), lambda: cluster.client.standing(1, 0, 0)):
            with pytest.raises(PsUnavailable, match="closed"):
                call()
        assert cluster.services[0].state.applied()[0].num_applies == 0


def test_a_wrong_token_is_refused() -> None:
    with ps_cluster(1) as cluster:
        stranger = PsClient(cluster.partition, LAYOUT, "guessed")
        for call in (lambda: stranger.exchange(make_push(0), None), lambda: stranger.standing(1, 0, 0)):
            with pytest.raises(JobError, match="does not carry the job's token"):
                call()
        stranger.close()
        assert cluster.services[0].state.applied()[0].num_applies == 0


def test_another_model_is_refused_whole() -> None:
    other = ModelReport((Variable("w", (8,), True),), TABLES, ADAM, ())
    with ps_cluster(1) as cluster:
        client = PsClient(cluster.partition, other, TOKEN)
        with pytest.raises(JobError, match="another model is here: 40 trainable"):
            client.initialize(Parameters(np.zeros(8, np.float32), np.zeros(0, np.float32)), TABLES, ADAM, 0)
        with pytest.raises(JobError, match="have shapes"):
            client.exchange(Push(1, 0, 0, 0, np.zeros(8, np.float32), np.zeros(0, np.float32)), None)
        with pytest.raises(JobError, match="no table 'nonsense'"):
            client.known_ids("nonsense")
        client.close()
        assert cluster.services[0].state.applied()[0].num_applies == 0


def test_a_model_without_optimizer_is_only_read() -> None:
    with ps_cluster(2, initialize=False) as cluster:
        cluster.client.initialize(initial_parameters(), TABLES, "", 7)
        assert cluster.client.exchange(None, whole_pull()).parameters is not None
        with pytest.raises(JobError, match="without an optimizer"):
            cluster.client.exchange(make_push(0), None)


def test_an_old_master_is_refused() -> None:
    with ps_cluster(1) as cluster:
        service = cluster.services[0]
        service.accept_lease(3 << 32)
        assert service.read_applied_set(pb.PsQuestion(generation=3, incarnation=10)).status == pb.OK
        assert service.read_applied_set(pb.PsQuestion(generation=2, incarnation=10)).status == pb.OLD_GENERATION
        assert service.save_checkpoint(pb.SaveCheckpointRequest(generation=2)).status == pb.OLD_GENERATION
        service.accept_lease(4 << 32)
        question = pb.PsQuestion(generation=4, incarnation=9)
        assert service.read_applied_set(question).status == pb.WRONG_INCARNATION


def test_the_same_pushes_in_the_same_order_give_the_same_bits() -> None:
    with ps_cluster(2) as one, ps_cluster(2) as other:
        for cluster in (one, other):
            push_all(cluster.client, range(12))
        assert_same_model(one.client, other.client)


def test_a_busy_ps_is_asked_again_until_it_has_time() -> None:
    began, may_end = threading.Event(), threading.Event()
    asked: list[str] = []

    def exchange(frame: bytes, context: object) -> bytes:
        began.set()
        assert may_end.wait(30)
        return b"done " + frame

    class Noting(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            asked.append(details.method)
            if len(asked) == 4:  # the second caller comes for the third time
                may_end.set()
            return continuation(details)

    server = grpc.server(ThreadPoolExecutor(4), interceptors=[Noting()])
    server.add_generic_rpc_handlers((raw_handlers(SERVICE, {"Exchange": exchange}, {}, Flow(1)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection = PsConnection(0, f"127.0.0.1:{port}", TOKEN, timeout_s=30)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(connection.raw, "Exchange", Frame(b"one", []), 0)
        assert began.wait(30)
        assert connection.raw("Exchange", Frame(b"two", []), 0) == b"done " + encode(b"two", [])
        assert first.result() == b"done " + encode(b"one", [])
    assert len(asked) >= 4
    connection.close()
    server.stop(None).wait()


def test_a_ps_that_stays_busy_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0, 10).__next__)
    with ps_cluster(1) as cluster:
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((raw_handlers(SERVICE, {"Exchange": lambda frame, _: frame}, {}, Flow(0)),))
        partition = pb.Partition(version=1)
        partition.ps.add(ps_id=0, address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", incarnation=1)
        server.start()
        client = PsClient(partition, LAYOUT, TOKEN, timeout_s=30)
        with monkeypatch.context() as hasty:
            hasty.setattr("elasticdl.ps.client.connection.time", clock)  # the calls themselves have all of their time
            with pytest.raises(PsUnavailable, match="resource_exhausted"):
                client.exchange(make_push(0), None)
        client.close()
        server.stop(None).wait()
        push_all(cluster.client, [0])


def test_a_newer_partition_comes_with_the_refusal() -> None:
    with ps_cluster(2) as cluster:
        newer = pb.Partition()
        newer.CopyFrom(cluster.partition)
        newer.version = 5
        cluster.services[1].accept_partition(newer)
        calls = (
            lambda: cluster.client.exchange(make_push(0), whole_pull()),
            lambda: cluster.client.standing(1, 0, 0),
            lambda: cluster.client.known_ids("deep"),
            lambda: cluster.client.initialize(initial_parameters(), TABLES, ADAM, 7),
        )
        for call in calls:
            with pytest.raises(PsUnavailable) as refused:
                call()
            assert refused.value.partition == newer
        client = PsClient(newer, LAYOUT, TOKEN)
        assert client.exchange(make_push(0), None).repeated_push == (True, False)
        client.close()


def test_a_reply_that_is_damaged_on_the_way_is_asked_for_again() -> None:
    with ps_cluster(1) as cluster:
        service, exchange = cluster.services[0], cluster.services[0].exchange
        server = grpc.server(ThreadPoolExecutor(1))
        handlers = raw_handlers(SERVICE, {"Exchange": lambda frame, _: exchange(frame).whole()[:-1]}, {}, Flow(8))
        server.add_generic_rpc_handlers((handlers,))
        partition = pb.Partition(version=1)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        partition.ps.add(ps_id=0, address=address, incarnation=service.incarnation)
        server.start()
        client = PsClient(partition, LAYOUT, TOKEN)
        with pytest.raises(PsUnavailable, match="its reply is damaged"):
            client.exchange(make_push(0), whole_pull())
        client.close()
        server.stop(None).wait()
        assert cluster.client.exchange(make_push(0), whole_pull()).repeated_push == (True,)


def test_a_worker_of_another_version_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps_cluster(1) as cluster:
        with monkeypatch.context() as newer:
            newer.setattr(tensor_sockets, "MAGIC", MAGIC + (1 << 24))  # a later worker's frames
            with pytest.raises(JobError, match=f"version {WIRE_VERSION + 1} of the wire, .* version {WIRE_VERSION}:"):
                cluster.client.exchange(make_push(0), whole_pull())
        assert cluster.client.exchange(make_push(0), whole_pull()).repeated_push == (False,)


def test_tables_with_equal_ids_and_the_push_after_the_pull_share_their_unique_ids() -> None:
    lookups = RowLookups(Partition.from_message(even_partition(2)), ())
    ids = np.array([3, 3, 7], np.int64)
    pulled = lookups.of({"factors": ids, "weights": ids.copy(), "other": np.array([3, 7, 7], np.int64)})
    assert pulled["factors"] is pulled["weights"]
    assert pulled["factors"] is not pulled["other"]
    assert lookups.of({"factors": ids})["factors"] is pulled["factors"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=40), st.integers(1, 4))
def test_a_lookup_expands_and_sums_as_its_ids_say(numbers: list[int], num_ps: int) -> None:
    partition = Partition.from_message(even_partition(num_ps))
    ids = np.array(numbers, np.int64)
    lookup = Lookup.of(ids, partition)
    assert sorted(lookup.unique.tolist()) == sorted(set(numbers))
    for ps_id in range(num_ps):
        own = lookup.unique[lookup.part(ps_id)]
        assert (partition.owners[_native.buckets(own)] == ps_id).all()
    np.testing.assert_array_equal(lookup.expand(lookup.unique[:, None].astype(np.float32))[:, 0], ids)
    counted = dict(zip(lookup.unique.tolist(), lookup.sum(np.ones((len(ids), 1), np.float32))[:, 0], strict=True))
    assert counted == {one: numbers.count(one) for one in set(numbers)}


def even_partition(num_ps: int) -> pb.Partition:
    partition = pb.Partition(version=1)
    for ps_id in range(num_ps):
        partition.ps.add(ps_id=ps_id, address="nowhere", incarnation=1)
    return partition
