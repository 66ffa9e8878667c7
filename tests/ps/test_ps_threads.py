"""Many workers at one PS: no update is lost, none is applied twice, and a snapshot is exactly what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from elasticdl.ps.applied import AppliedSet
from elasticdl.ps.partition import ALL_BUCKETS, PartSnapshot
from elasticdl.ps.server.in_flight import InFlightUpdates, PsCounters, StateDamagedError, StatePartition
from elasticdl.ps.server.model import ModelPart, initial_snapshot
from elasticdl.ps.server.synchronous import Synchronous, UpdateSettings
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.ps.fleet import ALL_IDS, TABLES, Fleet, Values, assert_equal, integers, sums

NUM_THREADS, NUM_NAMES = 6, 60


def values_of(snapshot: PartSnapshot) -> Values:
    rows = {}
    for table in TABLES:
        of_ids = np.zeros((len(ALL_IDS[table.name]), table.dim), np.float32)  # the initializer's
        for chunk in snapshot.chunks[table.name]():
            of_ids[chunk.ids - ALL_IDS[table.name][0]] = chunk.rows
        rows[table.name] = of_ids
    return Values(snapshot.trainable, snapshot.non_trainable, rows)


def assert_holds_its_names(snapshot: PartSnapshot) -> int:
    (piece,) = snapshot.pieces
    applied = AppliedSet.from_message(piece.applied)
    assert piece.version == applied.num_applies == applied.num_names
    assert_equal(values_of(snapshot), sums(integers(name.n) for name in applied))
    return piece.version


def in_threads(work: Callable[[int], Any]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for done in [threads.submit(work, number) for number in range(NUM_THREADS)]:
            done.result()


def test_names_pushed_by_many_threads_enter_once_and_snapshots_are_whole() -> None:
    """Every name is pushed by three threads, and one more takes snapshots all the time."""
    fleet = Fleet.begin(1)
    state = fleet.states[0]
    started = threading.Barrier(NUM_THREADS)
    ended = threading.Event()
    versions: list[int] = []
    fresh = [0] * NUM_THREADS

    def work(number: int) -> None:
        started.wait(30)
        if number == 0:
            while not ended.is_set():
                snapshot = state.snapshot()
                assert snapshot is not None
                versions.append(assert_holds_its_names(snapshot))
                snapshot.close()
            return
        for n in np.random.default_rng(number).permutation(NUM_NAMES).tolist():
            if (n + number) % 5 < 3:
                fresh[number] += not fleet.push(integers(n))[0].repeated_push
        ended.set() if sum(fresh) == NUM_NAMES else None

    in_threads(work)
    assert sum(fresh) == NUM_NAMES
    assert_equal(fleet.read(), sums(integers(n) for n in range(NUM_NAMES)))
    assert [name.n for name in fleet.names(0)] == list(range(NUM_NAMES))
    assert versions == sorted(versions)
    assert sum(state.load_message().staleness) == NUM_NAMES


def test_a_repetition_waits_for_the_name_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet.begin(1)
    entered, go_on = threading.Event(), threading.Event()
    apply = ModelPart.apply

    def slow(self: ModelPart, *arguments: Any) -> None:
        entered.set()
        assert go_on.wait(30)
        apply(self, *arguments)

    monkeypatch.setattr(ModelPart, "apply", slow)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(fleet.push, integers(0))
        assert entered.wait(30)
        second = threads.submit(fleet.push, integers(0))
        snapshot = threads.submit(fleet.states[0].snapshot)
        assert not fleet.read().trainable.any()  # a reader is not blocked
        standing = fleet.states[0].standing(1, 0, 0)
        assert standing is not None
        assert standing.watermark == 0
        assert not second.done()
        assert not snapshot.done()
        go_on.set()
        assert not first.result(30)[0].repeated_push
        assert second.result(30)[0].repeated_push
        taken = snapshot.result(30)
    assert taken is not None
    assert_holds_its_names(taken)
    taken.close()


@pytest.mark.parametrize("use_async", [True, False])
def test_an_update_that_fails_in_its_middle_ends_the_state(monkeypatch: pytest.MonkeyPatch, use_async: bool) -> None:
    fleet = Fleet.begin(1, updates=UpdateSettings(use_async=use_async))
    state = fleet.states[0]
    fleet.push(integers(0))

    def broken(self: ModelPart, *arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ModelPart, "apply", broken)
    update = (
        (lambda: fleet.push(integers(1)))
        if use_async
        else (lambda: state.confirm(1, integers(0).name, 0, 0, lambda: 1, 0.0))
    )
    with pytest.raises(StateDamagedError):
        update()
    assert state.is_damaged
    monkeypatch.undo()
    for call in (lambda: fleet.push(integers(2)), state.snapshot, fleet.read):
        with pytest.raises(StateDamagedError):
            call()


def test_leases_fence_while_pushes_are_under_way() -> None:
    """A successor asks where the task stands; later pushes of older leases are refused."""
    fleet = Fleet.begin(1)
    asked = threading.Barrier(NUM_THREADS)
    held: list[pb.AppliedTask | None] = []

    def work(number: int) -> None:
        for n in range(10):
            fleet.push(integers(n), lease=1)
        asked.wait(30)
        if number == 0:
            held.append(fleet.states[0].standing(2, 0, 0))
        asked.wait(30)
        for n in range(10, 20):
            assert fleet.push(integers(n), lease=1)[0].status == pb.LEASE_REFUSED

    in_threads(work)
    assert [task.watermark for task in held if task is not None] == [10]
    assert_equal(fleet.read(), sums(integers(n) for n in range(10)))


def test_a_push_that_a_checkpoint_holds_up_is_refused_if_its_lease_has_a_successor_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name is under way, so the snapshot waits for it; the push waits for the snapshot."""
    fleet = Fleet.begin(1)
    state = fleet.states[0]
    entered, is_freezing, is_waiting, go_on = (threading.Event() for _ in range(4))
    apply, frozen, wait_for = ModelPart.apply, InFlightUpdates.frozen, InFlightUpdates.wait_for

    def slow(self: ModelPart, *arguments: Any) -> None:
        entered.set()
        assert go_on.wait(30)
        apply(self, *arguments)

    @contextmanager
    def freezing(self: InFlightUpdates) -> Iterator[None]:
        is_freezing.set()  # with the lock, so the next holder finds it frozen
        with frozen(self):
            yield

    def waiting(self: InFlightUpdates, names: Any) -> None:
        if integers(1).name in names:
            is_waiting.set()
        wait_for(self, names)

    monkeypatch.setattr(ModelPart, "apply", slow)
    monkeypatch.setattr(InFlightUpdates, "frozen", freezing)
    monkeypatch.setattr(InFlightUpdates, "wait_for", waiting)
    with ThreadPoolExecutor(3) as threads:
        threads.submit(fleet.push, integers(0))
        assert entered.wait(30)
        snapshot = threads.submit(state.snapshot)
        assert is_freezing.wait(30)
        late = threads.submit(fleet.push, integers(1))
        assert is_waiting.wait(30)
        standing = state.standing(2, 0, 0)
        go_on.set()
        assert late.result(30)[0].status == pb.LEASE_REFUSED
        taken = snapshot.result(30)
    assert standing is not None
    assert standing.watermark == 0
    assert taken is not None
    taken.close()
    assert [name.n for name in fleet.names(0)] == [0]


class Turnstile:
    """A lock; `then` runs right after the next release, as if another thread had been faster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.then: Callable[[], None] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        then, self.then = self.then, None
        if then is not None:
            then()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_name_whose_lease_ends_while_its_round_closes_is_in_the_model_or_in_no_round() -> None:
    lock: Any = Turnstile()
    fleet, updates, load = Fleet.begin(1), UpdateSettings(use_async=False), PsCounters()
    began = initial_snapshot(fleet.initialize_call(0), ALL_BUCKETS)
    claims = InFlightUpdates(ModelPart(began), StatePartition(began.pieces), lock, load, modulated=False)
    synchronous, name = Synchronous(updates, lock, load), integers(0).name

    def let_go() -> None:
        with lock:
            synchronous.let_go(2, name.epoch, name.task)

    def one_pushes() -> int:
        if not claims.pieces.version and not synchronous.applied_round:
            lock.then = let_go
        return 1

    with lock:
        synchronous.hold(name, fleet.push_call(0, integers(0)))
        assert synchronous.confirm(claims, name, 0) == pb.OK
    confirmed = synchronous.wait(claims, name, 0, one_pushes, timeout_s=0.0)
    assert confirmed.wait == claims.pieces.lacks(name)
