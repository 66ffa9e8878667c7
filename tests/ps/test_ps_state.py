"""The state of PS against the same model in NumPy: pushes, repetitions, refusals, staleness."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Floats, Table
from elasticdl.ps.client import PsClient, PsUnavailable
from elasticdl.ps.server.in_flight import staleness_bin
from elasticdl.ps.server.model import ModelPart, build_constraint
from elasticdl.ps.server.service import PsService, register_service, serve_tensors
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.ps.wire import ExchangeCall, InitializeCall, PullCall, RequestError, exchange_frame
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.servers import serve
from elasticdl_client.errors import ModelDefinitionError
from tests.ps.fleet import (
    NUM_TRAINABLE,
    SUMS,
    Fleet,
    Minibatch,
    Oracle,
    assert_close,
    assert_equal,
    empty,
    integers,
    reals,
    sums,
)
from tests.ps.scenes import ADAM, LAYOUT, TOKEN, config, initial_parameters, make_push, whole_pull

OPTIMIZERS = {
    "sgd": config("SGD", learning_rate=0.1),
    "momentum": config("SGD", learning_rate=0.1, momentum=0.9, nesterov=True),
    "adam": config("Adam", learning_rate=0.01, amsgrad=True),
    "adagrad": config("Adagrad", learning_rate=0.1, clipvalue=0.5),
    "scheduled": config(
        "Adam",
        learning_rate={
            "module": "keras.optimizers.schedules",
            "class_name": "ExponentialDecay",
            "config": {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5},
        },
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("num_ps", [1, 3])
def test_values_are_those_of_the_model_in_one_place(optimizer: str, num_ps: int) -> None:
    fleet, oracle = Fleet.begin(num_ps, optimizer), Oracle(optimizer)
    for n in range(25):
        fleet.push(reals(n))
        oracle.push(reals(n))
        if n % 5 == 0:
            assert_close(fleet.read(), oracle.read())
    assert_close(fleet.read(), oracle.read())


@given(pushed=st.lists(st.tuples(st.integers(0, 8), st.sets(st.integers(0, 2))), max_size=30))
@settings(max_examples=40)
def test_each_ps_holds_each_name_once_whatever_is_repeated(pushed: list[tuple[int, set[int]]]) -> None:
    fleet = Fleet.begin(3)
    seen: list[set[int]] = [set() for _ in range(3)]
    for n, to in pushed:
        done = fleet.push(integers(n), to=sorted(to))
        assert [one.repeated_push for one in done] == [n in seen[ps_id] for ps_id in sorted(to)]
        for ps_id in to:
            seen[ps_id].add(n)
    for ps_id in range(3):
        assert {name.n for name in fleet.names(ps_id)} == seen[ps_id]
    for n in range(9):
        fleet.push(integers(n))
    assert_equal(fleet.read(), sums(integers(n) for n in range(9)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_ps_are_bit_equal_to_one(optimizer: str) -> None:
    one, two, many = (Fleet.begin(num_ps, optimizer) for num_ps in (1, 2, 5))
    for n in range(30):
        for fleet in (one, two, many):
            fleet.push(reals(n))
    assert_equal(two.read(), one.read())
    assert_equal(many.read(), one.read())


def test_a_skipped_minibatch_is_applied_but_no_update() -> None:
    adam = OPTIMIZERS["adam"]
    fleet, oracle = Fleet.begin(2, adam), Oracle(adam)
    for n in range(6):
        done = fleet.push(empty(n) if n in (0, 3) else reals(n))
        if n not in (0, 3):
            oracle.push(reals(n))
        assert [one.version for one in done] == [oracle.step] * 2
    assert_close(fleet.read(), oracle.read())
    assert [name.n for name in fleet.names(0)] == [0, 1, 2, 3, 4, 5]
    assert [list(task.skipped) for task in fleet.states[1].applied()[0].tasks] == [[0, 3]]
    assert fleet.push(empty(3))[1].repeated_push


def test_the_users_learning_rate_takes_the_optimizers_place() -> None:
    adam = OPTIMIZERS["adam"]
    fleet, oracle = Fleet.begin(2, adam), Oracle(adam)
    for n in range(4):
        fleet.push(reals(n), learning_rate=0.5 / (n + 1))
        oracle.push(reals(n), learning_rate=0.5 / (n + 1))
    assert_close(fleet.read(), oracle.read())


def test_staleness_divides_the_learning_rate_when_asked_to() -> None:
    optimizer = OPTIMIZERS["scheduled"]
    fleet = Fleet.begin(2, optimizer, UpdateSettings(lr_staleness_modulation=True))
    oracle = Oracle(optimizer)
    for n in range(5):  # nothing is read: push n misses n updates
        fleet.push(reals(n))
        oracle.push(reals(n), learning_rate=oracle.config.learning_rate(n + 1) / max(1, n))
    assert_close(fleet.read(), oracle.read())


def test_with_ftrl_staleness_divides_the_gradients_so_that_weights_do_not_jump() -> None:
    ftrl = config("Ftrl", learning_rate=0.1)
    fleet = Fleet.begin(2, ftrl, UpdateSettings(lr_staleness_modulation=True))
    oracle = Oracle(ftrl)
    for n in range(5):  # nothing is read: push n misses n updates
        fleet.push(reals(n))
        oracle.push(divided(reals(n), max(1, n)))
    assert_close(fleet.read(), oracle.read())


def divided(minibatch: Minibatch, divisor: int) -> Minibatch:
    factor = np.float32(1 / divisor)
    rows = {table: (ids, gradients * factor) for table, (ids, gradients) in minibatch.rows.items()}
    return replace(minibatch, gradient=minibatch.gradient * factor, rows=rows)


def test_a_gradient_that_is_too_stale_is_refused_and_counted() -> None:
    fleet = Fleet.begin(1, SUMS, UpdateSettings(max_staleness=2))
    statuses = [fleet.push(integers(n))[0].status for n in range(4)]
    assert statuses == [pb.OK, pb.OK, pb.OK, pb.TOO_STALE]
    assert fleet.push(integers(1))[0].repeated_push  # is here: its staleness does not matter
    fleet.read()
    assert fleet.push(integers(3))[0].status == pb.OK
    load = fleet.states[0].load_message()
    assert list(load.staleness) == [2, 1, 1]
    assert (load.pushes, load.refused, load.rows_pushed) == (4, 1, 4 * 24)
    assert_equal(fleet.read(), sums(integers(n) for n in range(4)))


def test_a_skipped_minibatch_is_never_too_stale() -> None:
    fleet = Fleet.begin(1, SUMS, UpdateSettings(max_staleness=1))
    statuses = [fleet.push(minibatch)[0].status for minibatch in (integers(0), integers(1), empty(2), integers(3))]
    assert statuses == [pb.OK, pb.OK, pb.OK, pb.TOO_STALE]
    assert [name.n for name in fleet.names(0)] == [0, 1, 2]
    assert_equal(fleet.read(), sums([integers(0), integers(1)]))


def test_staleness_is_counted_in_powers_of_two() -> None:
    bins = [staleness_bin(staleness) for staleness in range(18)]
    assert bins == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6]


def test_load_counts_reads_and_tables() -> None:
    fleet = Fleet.begin(1)
    assert fleet.states[0].load_message().table_rows == 0
    fleet.push(integers(0))
    fleet.read()
    load = fleet.states[0].load_message()
    assert (load.pulls, load.rows_pulled) == (1, 110)
    assert load.table_rows == sum(len(set(ids)) for ids, _ in integers(0).rows.values())
    assert load.table_bytes > 0


def test_load_counts_bytes_and_time_of_exchanges() -> None:
    fleet = Fleet.begin(1)
    service = PsService(0, fleet.states[0])
    service.incarnation = 5
    frame = exchange_frame(ExchangeCall(5, fleet.push_call(0, integers(0)), PullCall(pb.Pull(dense=True), ()))).whole()
    reply = service.exchange(frame)
    load = service.load()
    assert (load.bytes_received, load.bytes_sent) == (len(frame), len(reply))
    assert load.busy_seconds > 0
    assert (load.pushes, load.pulls) == (1, 1)


def test_a_ps_whose_state_is_damaged_says_so_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = threading.Event()
    service = PsService(0, ServerState())
    service.incarnation = 10
    server, port = serve(
        lambda grpc_server: register_service(grpc_server, service, damaged.set), "127.0.0.1", 0, TOKEN, 8
    )
    partition = pb.Partition(version=1, ps=[pb.PsAddress(address=f"127.0.0.1:{port}", incarnation=10)])
    client = PsClient(partition, LAYOUT, TOKEN, timeout_s=20)

    def broken(self: ModelPart, *arguments: Any) -> None:
        raise MemoryError

    try:
        client.initialize(initial_parameters(), LAYOUT.tables, ADAM, 7)
        client.exchange(make_push(0), None)
        assert not damaged.is_set()
        monkeypatch.setattr(ModelPart, "apply", broken)
        with pytest.raises(PsUnavailable):
            client.exchange(make_push(1), None)
        assert damaged.wait(30)
        with pytest.raises(PsUnavailable):
            client.exchange(None, whole_pull())
    finally:
        client.close()
        server.stop(None).wait()


@pytest.mark.parametrize("has_sockets", [False, True])
def test_a_ps_without_memory_for_a_reply_is_asked_again(monkeypatch: pytest.MonkeyPatch, has_sockets: bool) -> None:
    service = PsService(0, ServerState())
    service.incarnation = 10
    tensors = serve_tensors(service, "127.0.0.1", TOKEN, lambda: None) if has_sockets else None
    address = tensors.address if tensors is not None else ""
    server, port = serve(
        lambda grpc_server: register_service(grpc_server, service, lambda: None, address), "127.0.0.1", 0, TOKEN, 8
    )
    partition = pb.Partition(version=1, ps=[pb.PsAddress(address=f"127.0.0.1:{port}", incarnation=10)])
    client = PsClient(partition, LAYOUT, TOKEN, timeout_s=20)
    pull, failures = ModelPart.pull, iter([MemoryError, MemoryError])

    def short_of_memory(self: ModelPart, call: PullCall) -> list[Floats]:
        for error in failures:
            raise error
        return pull(self, call)

    try:
        client.initialize(initial_parameters(), LAYOUT.tables, ADAM, 7)
        monkeypatch.setattr(ModelPart, "pull", short_of_memory)
        assert client.exchange(make_push(0), whole_pull()).repeated_push == (True,)
        assert not list(failures)
        assert service.state.applied()[2] == 1
    finally:
        client.close()
        server.stop(None).wait()
        if tensors is not None:
            tensors.close()


def spoiled(minibatch: Minibatch, what: str, value: float) -> Minibatch:
    gradient, change, rows = minibatch.gradient.copy(), minibatch.change.copy(), dict(minibatch.rows)
    if what == "rows":
        ids, gradients = rows["wide"]
        gradients = gradients.copy()
        gradients[3] = value
        rows["wide"] = ids, gradients
    else:
        (gradient if what == "gradient" else change)[-1] = value
    return replace(minibatch, gradient=gradient, change=change, rows=rows)


@pytest.mark.parametrize("what", ["gradient", "change", "rows"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_changes_nothing(what: str, value: float) -> None:
    fleet = Fleet.begin(1)
    with pytest.raises(RequestError, match="finite"):
        fleet.push(spoiled(integers(0), what, value))
    assert fleet.names(0) == []
    fleet.push(integers(0))
    assert_equal(fleet.read(), sums([integers(0)]))


@pytest.mark.parametrize("wrong", [-1, 50, 2**62])
def test_an_id_that_the_table_cannot_have_is_refused_by_name(wrong: int) -> None:
    fleet = Fleet.begin(1)
    ids = np.array([3, wrong, 4], np.int64)
    rows = {"deep": (ids, np.ones((3, 4), np.float32))}
    with pytest.raises(RequestError, match=f"id {wrong} of table deep"):
        fleet.push(replace(integers(0), rows=rows))
    pull = PullCall(pb.Pull(tables=["deep"]), (("deep", ids),))
    with pytest.raises(RequestError, match=f"id {wrong} of table deep"):
        fleet.states[0].exchange(ExchangeCall(0, None, pull))
    assert fleet.states[0].load_message().table_rows == 0


def test_a_push_that_does_not_fit_is_refused() -> None:
    fleet = Fleet.begin(1)
    good = integers(0)
    for bad, said in (
        (replace(good, gradient=good.gradient[1:]), "shapes"),
        (replace(good, change=good.change[1:]), "shapes"),
        (replace(good, rows={"deep": (good.rows["deep"][0], np.ones((12, 3), np.float32))}), "table deep"),
        (replace(good, rows={"other": good.rows["deep"]}), "no table 'other'"),
        (replace(good, unreached=((5, 9), (8, 12))), "ascending ranges"),
    ):
        with pytest.raises(RequestError, match=said):
            fleet.push(bad)
    assert fleet.names(0) == []


def test_initial_values_must_be_what_the_ps_owns() -> None:
    fleet = Fleet.begin(2, initialized=False)
    call = fleet.initialize_call(0)
    short = InitializeCall(call.header, call.trainable[:-1], call.non_trainable)
    with pytest.raises(RequestError, match="750"):
        fleet.states[0].initialize(short)
    header = pb.InitializeHeader()
    header.CopyFrom(call.header)
    header.total_trainable = 2 * NUM_TRAINABLE
    with pytest.raises(RequestError, match=str(2 * NUM_TRAINABLE)):
        fleet.states[0].initialize(InitializeCall(header, call.trainable, call.non_trainable))
    assert fleet.states[0].exchange(ExchangeCall(0, None, None)).status == pb.UNINITIALIZED
    fleet.states[0].initialize(call)
    fleet.states[0].initialize(call)
    header.total_trainable = NUM_TRAINABLE
    header.tables[0].dim = 5
    with pytest.raises(RequestError, match="deep × 5"):
        fleet.states[0].initialize(InitializeCall(header, call.trainable, call.non_trainable))


def test_another_jobs_values_are_trained_on_by_this_jobs_optimizer() -> None:
    momentum, adam = OPTIMIZERS["momentum"], OPTIMIZERS["adam"]
    before = Fleet.begin(1, adam)
    for n in range(3):
        before.push(reals(n))
    snapshot = before.states[0].snapshot()
    assert snapshot is not None
    after = Fleet.begin(1, initialized=False)
    after.states[0].restore(snapshot, parameters_only=True)
    assert after.states[0].applied()[1:] == (True, 0)
    assert after.states[0].exchange(ExchangeCall(0, None, None)).status == pb.UNINITIALIZED
    after.states[0].initialize(after.initialize_call(0, momentum))
    assert_equal(after.read(), before.read())
    assert after.names(0) == []
    adopted = after.states[0].snapshot()
    assert adopted is not None
    assert not adopted.trainable_slots["momentum"].any()
    assert set(adopted.trainable_slots) == {"momentum"}
    assert (adopted.optimizer, adopted.pieces[0].version) == (momentum, 3)
    adopted.close()
    after.push(reals(0))
    assert [name.n for name in after.names(0)] == [0]


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("Adam", "Adam", {"momentum", "velocity"}),
        ("Adam", "AdamW", {"momentum", "velocity"}),
        ("Nadam", "Adam", {"momentum", "velocity"}),
        ("Adam", "SGD", set()),
        ("RMSprop", "SGD", set()),
        ("Adam", "RMSprop", {"velocity"}),
        ("RMSprop", "Adam", {"velocity"}),
        ("Adam", "Adamax", set()),
        ("Adamax", "Adam", set()),
    ],
)
def test_another_jobs_slots_are_kept_where_both_optimizers_mean_the_same(
    before: str, after: str, kept: set[str]
) -> None:
    def optimizer(kind: str) -> str:
        return config(kind, learning_rate=0.01, **({"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}))

    trained, adopting = Fleet.begin(1, optimizer(before)), Fleet.begin(1, initialized=False)
    trained.push(reals(0))
    snapshot = trained.states[0].snapshot()
    assert snapshot is not None
    adopting.states[0].restore(snapshot, parameters_only=True)
    adopting.states[0].initialize(adopting.initialize_call(0, optimizer(after)))
    adopted = adopting.states[0].snapshot()
    assert adopted is not None
    assert {name for name, slot in adopted.trainable_slots.items() if slot.any()} == kept
    chunks = list(adopted.chunks["deep"]())
    assert sum(len(chunk.ids) for chunk in chunks) > 0
    assert {name for chunk in chunks for name, slot in chunk.slots.items() if slot.any()} == kept
    adopted.close()


@pytest.mark.parametrize(("optimizer", "is_as_before"), [("", True), (OPTIMIZERS["momentum"], False)])
def test_rows_that_were_never_trained_are_read_as_they_were(optimizer: str, is_as_before: bool) -> None:
    def row(fleet: Fleet) -> Floats:
        pull = PullCall(pb.Pull(tables=["deep"], read_only=True), (("deep", np.array([7], np.int64)),))
        return fleet.states[0].exchange(ExchangeCall(0, None, pull)).arrays[0]

    before, after = Fleet.begin(1, initialized=False), Fleet.begin(1, initialized=False)
    for fleet, trained_by, seed in ((before, OPTIMIZERS["adam"], 1), (after, optimizer, 2)):
        call = fleet.initialize_call(0, trained_by)
        call.header.seed = seed
        call.header.tables[0].initializer = config("RandomUniform", minval=-1, maxval=1, seed=None)
        if fleet is after:
            snapshot = before.states[0].snapshot()
            assert snapshot is not None
            after.states[0].restore(snapshot, parameters_only=True)
        fleet.states[0].initialize(call)
    assert np.array_equal(row(after), row(before)) == is_as_before


def test_a_constraint_that_needs_other_rows_is_refused_by_name() -> None:
    for class_name, options in (("MaxNorm", {"max_value": 2, "axis": 0}), ("UnitNorm", {}), ("Mine", {"axis": 1})):
        table = Table("t", 4, config("Zeros"), 0, config(class_name, **options))
        with pytest.raises(ModelDefinitionError, match=f"{class_name}.* of the embedding t"):
            build_constraint(table)
    for class_name in ("NonNeg", "MaxNorm", "UnitNorm", "MinMaxNorm"):
        build_constraint(Table("t", 4, config("Zeros"), 0, config(class_name, axis=1)))


def test_touched_rows_obey_their_constraint() -> None:
    fleet = Fleet.begin(1, initialized=False)
    call = fleet.initialize_call(0)
    call.header.tables[0].constraint = config("MaxNorm", max_value=1.0, axis=1)
    fleet.states[0].initialize(call)
    ids = np.array([7], np.int64)
    rows = {"deep": (ids, np.array([[3.0, 0.0, -4.0, 0.0]], np.float32))}
    fleet.push(replace(integers(0), rows=rows))
    np.testing.assert_allclose(fleet.read().rows["deep"][7], [-0.6, 0.0, 0.8, 0.0], rtol=1e-5)
