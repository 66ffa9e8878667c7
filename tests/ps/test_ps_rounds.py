"""Synchronous mode: rounds are means, and every name enters every PS once, also when a worker leaves in the middle."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl.ps.applied import MinibatchName
from elasticdl.ps.server.rounds import RoundsOfPs0, mean
from elasticdl.ps.server.service import PsService
from elasticdl.ps.server.synchronous import Confirmed, UpdateSettings
from elasticdl.ps.wire import RequestError
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.ps.fleet import (
    NUM_TRAINABLE,
    TABLES,
    Fleet,
    Minibatch,
    Oracle,
    assert_close,
    assert_equal,
    empty,
    integers,
    reals,
    restored,
    sums,
)
from tests.ps.scenes import config

ADAM = config("Adam", learning_rate=0.05)
PAIRS = UpdateSettings(use_async=False, grads_to_wait=2)
ALONE = UpdateSettings(use_async=False)


def averaged(minibatches: Sequence[Minibatch]) -> Minibatch:
    """One minibatch that is the mean of several, weighted by their records."""
    total = sum(one.num_records for one in minibatches)
    shares = [(one, np.float32(one.num_records / total)) for one in minibatches]
    rows = {
        table.name: (
            np.concatenate([one.rows[table.name][0] for one in minibatches]),
            np.concatenate([one.rows[table.name][1] * share for one, share in shares]),
        )
        for table in TABLES
    }
    gradient = np.sum([one.gradient * share for one, share in shares], axis=0, dtype=np.float32)
    change = np.sum([one.change * share for one, share in shares], axis=0, dtype=np.float32)
    return Minibatch(minibatches[0].name, gradient, change, rows)


def closed(confirmed: Confirmed) -> list[pb.Round]:
    assert (confirmed.status, confirmed.wait) == (pb.OK, False)
    return list(confirmed.rounds)


def numbers(rounds: Sequence[pb.Round]) -> list[tuple[int, list[int]]]:
    return [(one.number, [name.n for name in one.names]) for one in rounds]


def test_one_worker_alone_trains_as_without_rounds() -> None:
    fleet, oracle = Fleet.begin(2, ADAM, ALONE), Oracle(ADAM)
    for n in range(10):
        assert not any(done.repeated_push for done in fleet.push(reals(n)))
        rounds = closed(fleet.confirm(reals(n), known_round=n))
        assert numbers(rounds) == [(n + 1, [n])]
        assert fleet.carry(rounds) == [n + 1, n + 1]
        oracle.push(reals(n))
        assert_close(fleet.read(), oracle.read())
    assert [name.n for name in fleet.names(1)] == list(range(10))


@pytest.mark.parametrize("num_ps", [1, 3])
def test_a_round_is_the_mean_weighted_by_records(num_ps: int) -> None:
    fleet, oracle = Fleet.begin(num_ps, ADAM, PAIRS), Oracle(ADAM)
    for n in range(0, 10, 2):
        pair = reals(n, num_records=30), reals(n + 1, num_records=10)
        before = fleet.read()
        for one in pair:
            assert [done.version for done in fleet.push(one)] == [n // 2] * num_ps
        assert_equal(fleet.read(), before)  # held, not applied
        assert fleet.confirm(pair[0], known_round=n // 2).wait
        rounds = closed(fleet.confirm(pair[1], known_round=n // 2))
        assert closed(fleet.confirm(pair[0], known_round=n // 2)) == rounds
        fleet.carry(rounds)
        fleet.carry(rounds)  # told twice
        oracle.push(averaged(pair))
        assert_close(fleet.read(), oracle.read())
    assert fleet.versions == [5] * num_ps
    assert [name.n for name in fleet.names(num_ps - 1)] == list(range(10))


def test_a_round_updates_the_variables_that_one_of_its_minibatches_reaches() -> None:
    fleet = Fleet.begin(3, ADAM, PAIRS)
    common, once = (100, 900), (1200, 1300)
    for n in range(0, 4, 2):
        before = fleet.read()
        unreached = ((common, once), (common,)) if n else ((), ())
        for one, ranges in zip((reals(n), reals(n + 1)), unreached, strict=True):
            fleet.push(replace(one, unreached=ranges))
            confirmed = fleet.confirm(one, known_round=n // 2)
        fleet.carry(closed(confirmed))
    stays = fleet.read().trainable == before.trainable
    np.testing.assert_array_equal(stays, [common[0] <= n < common[1] for n in range(NUM_TRAINABLE)])


def test_two_ps_are_bit_equal_to_one_in_rounds() -> None:
    one, two = Fleet.begin(1, ADAM, PAIRS), Fleet.begin(2, ADAM, PAIRS)
    for n in range(0, 12, 2):
        for fleet in (one, two):
            for minibatch in (reals(n, 7), reals(n + 1, 5)):
                fleet.push(minibatch)
                confirmed = fleet.confirm(minibatch)
            fleet.carry(closed(confirmed))
            fleet.read()
    assert_equal(two.read(), one.read())


def test_a_late_gradient_is_computed_again() -> None:
    for tolerance in (0, 1):
        updates = UpdateSettings(use_async=False, sync_version_tolerance=tolerance)
        fleet = Fleet.begin(2, updates=updates)
        for n in (0, 1, 2):
            fleet.push(integers(n))
        fleet.carry(closed(fleet.confirm(integers(0))))
        assert (fleet.confirm(integers(1)).status == pb.OK) == (tolerance == 1)
        assert fleet.confirm(integers(2)).status == pb.TOO_STALE
        fleet.read()
        for n in (1, 2):
            fleet.push(integers(n))
            fleet.carry(closed(fleet.confirm(integers(n))))
            fleet.read()
        assert_equal(fleet.read(), sums(integers(n) for n in range(3)))
        assert fleet.states[0].load_message().refused == 2 - tolerance


def test_a_skipped_minibatch_is_never_late() -> None:
    fleet = Fleet.begin(2, updates=UpdateSettings(use_async=False))
    for minibatch in (integers(0), empty(1)):
        fleet.push(minibatch)
    fleet.carry(closed(fleet.confirm(integers(0))))
    fleet.carry(closed(fleet.confirm(empty(1))))
    assert [[name.n for name in fleet.names(ps_id)] for ps_id in (0, 1)] == [[0, 1], [0, 1]]
    assert_equal(fleet.read(), sums([integers(0)]))


def test_what_no_ps_holds_cannot_be_confirmed() -> None:
    fleet = Fleet.begin(1, updates=ALONE)
    assert fleet.confirm(integers(0)).status == pb.TOO_STALE


def test_all_workers_of_a_round_hear_of_it_at_once() -> None:
    fleet = Fleet.begin(1, updates=UpdateSettings(use_async=False, grads_to_wait=4))
    all_pushed = threading.Barrier(4)

    def work(n: int) -> Confirmed:
        fleet.push(integers(n, num_records=4))
        all_pushed.wait(30)
        return fleet.states[0].confirm(1, integers(n).name, 0, 0, lambda: 4, timeout_s=30)

    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(work, range(4)))
    assert len({str(closed(reply)) for reply in replies}) == 1
    assert [name.n for name in fleet.names(0)] == [0, 1, 2, 3]
    assert fleet.states[0].load_message().pushes == 4


def test_a_round_closes_when_fewer_workers_push() -> None:
    """A worker leaves in the middle of a round: the other continues as soon as the master says so."""
    service = PsService(0, Fleet.begin(1, updates=PAIRS).states[0])
    service.incarnation = 10
    fleet = Fleet([service.state], Fleet.begin(1).partition, versions=[0])
    fleet.push(integers(0))
    request = pb.CloseRoundRequest(incarnation=10, lease=1, name=pb.MinibatchName(n=0))
    assert service.close_round(request).wait  # how many push is not known yet: the round may be short of one
    service.num_pushing = 2
    assert service.is_master_awaited
    asked = threading.Event()

    def pushing() -> int | None:
        asked.set()
        return service.num_pushing

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: fleet.states[0].confirm(1, integers(0).name, 0, 0, pushing, 30))
        assert asked.wait(30)
        service.num_pushing = 1
        assert numbers(closed(waiting.result(30))) == [(1, [0])]
    assert not service.is_master_awaited
    reply = service.close_round(request)
    assert (reply.rounds.coordinator, numbers(reply.rounds.rounds)) == (10, [(1, [0])])


def test_without_any_lease_a_single_name_is_enough() -> None:
    fleet = Fleet.begin(1, updates=PAIRS)
    fleet.push(integers(0))
    assert numbers(closed(fleet.confirm(integers(0), num_pushing=0))) == [(1, [0])]


def test_the_gradient_of_a_newer_lease_replaces_the_older() -> None:
    fleet = Fleet.begin(2, updates=PAIRS)
    fleet.push(integers(7, num_records=1), lease=1)
    zombie = integers(0)
    fleet.push(Minibatch(zombie.name, zombie.gradient + 100, zombie.change, zombie.rows, 1), lease=1)
    assert fleet.confirm(zombie, lease=1).wait
    fleet.push(integers(0, num_records=1), lease=2)
    assert fleet.confirm(zombie, lease=1).status == pb.LEASE_REFUSED
    fleet.push(integers(1, num_records=1), lease=2)
    assert fleet.confirm(integers(0), lease=2).wait
    rounds = closed(fleet.confirm(integers(1), lease=2))
    assert numbers(rounds) == [(1, [0, 1])]  # 7 went with its lease
    fleet.carry(rounds)
    oracle = Oracle()
    oracle.push(averaged([integers(0, num_records=1), integers(1, num_records=1)]))
    assert_equal(fleet.read(), oracle.read())


def test_a_successor_takes_over_what_was_confirmed_and_not_closed() -> None:
    fleet = Fleet.begin(2, updates=PAIRS)
    fleet.push(integers(0), lease=1)
    assert fleet.confirm(integers(0), lease=1).wait
    for state in fleet.states:
        standing = state.standing(2, 0, 0)
        assert standing is not None
        assert standing.watermark == 0
    assert not fleet.states[0].is_round_waiting
    fleet.push(integers(0), lease=2)
    fleet.carry(closed(fleet.confirm(integers(0), lease=2, num_pushing=1)))
    assert_equal(fleet.read(), sums([integers(0)]))


def test_a_name_that_ps_0_has_goes_to_those_that_lack_it(tmp_path: Path) -> None:
    """PS 1 comes back without the name: the round that had it is told again, or if it is forgotten another is made."""
    fleet = Fleet.begin(2, updates=ALONE)
    fleet.push(integers(0))
    fleet.carry(closed(fleet.confirm(integers(0))))
    fleet.states[1] = Fleet.begin(2).states[1]
    lost = [fleet.states[ps_id].snapshot() for ps_id in (0, 1)]
    fleet.states[1] = Fleet.begin(2, updates=ALONE).states[1]
    fleet.read()
    assert [done.repeated_push for done in fleet.push(integers(0), lease=2)] == [True, False]
    rounds = closed(fleet.confirm(integers(0), lease=2, known_round=1))
    assert numbers(rounds) == [(1, [0])]
    fleet.carry(rounds)
    assert_equal(fleet.read(), sums([integers(0)]))

    later = restored([part for part in lost if part is not None], 2, tmp_path, updates=ALONE)
    later.read()
    assert [done.repeated_push for done in later.push(integers(0), lease=3)] == [True, False]
    rounds = closed(later.confirm(integers(0), lease=3))
    assert numbers(rounds) == [(1, [0])]
    later.carry(rounds, coordinator=12)
    assert_equal(later.read(), sums([integers(0)]))
    assert [len(later.names(ps_id)) for ps_id in (0, 1)] == [1, 1]


def test_a_ps_that_received_a_round_before_the_name_applies_it_all_the_same() -> None:
    """The lease has a successor that PS 1 knows of first; so it has dropped the gradient when the round comes."""
    fleet = Fleet.begin(2, updates=ALONE)
    fleet.push(integers(0), lease=1)
    fleet.states[1].standing(2, 0, 0)
    assert fleet.carry(closed(fleet.confirm(integers(0), lease=1))) == [1, 1]
    assert [len(fleet.names(ps_id)) for ps_id in (0, 1)] == [1, 0]
    fleet.read()
    assert [done.repeated_push for done in fleet.push(integers(0), lease=2)] == [True, False]
    fleet.carry(closed(fleet.confirm(integers(0), lease=2, known_round=1)))
    assert_equal(fleet.read(), sums([integers(0)]))


def test_rounds_of_a_coordinator_that_has_a_successor_are_ignored() -> None:
    fleet = Fleet.begin(2, updates=ALONE)
    fleet.push(integers(0))
    rounds = closed(fleet.confirm(integers(0)))
    fleet.states[1].accept_coordinator(12)
    assert fleet.carry(rounds, to=[1], coordinator=10) == [0]
    assert fleet.names(1) == []
    assert fleet.carry(rounds, to=[1], coordinator=12) == [1]
    assert len(fleet.names(1)) == 1


def test_confirmations_end_with_the_partition() -> None:
    fleet = Fleet.begin(1, updates=PAIRS)
    service = PsService(0, fleet.states[0])
    service.incarnation = 10
    service.accept_partition(pb.Partition(version=1, ps=[pb.PsAddress(ps_id=0, incarnation=10)]))
    fleet.push(integers(0))
    assert fleet.confirm(integers(0)).wait
    asked = threading.Event()

    def pushing() -> int | None:
        asked.set()
        return None

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: fleet.states[0].confirm(1, integers(0).name, 0, 0, pushing, 30))
        assert asked.wait(30)
        newer = pb.Partition(version=2, ps=[pb.PsAddress(ps_id=0, incarnation=10)])
        service.accept_partition(newer)
        assert waiting.result(30).wait
    assert not service.is_master_awaited
    reply = service.close_round(
        pb.CloseRoundRequest(incarnation=10, partition_version=1, lease=1, name=pb.MinibatchName(n=0))
    )
    assert (reply.status, reply.partition) == (pb.OLD_PARTITION, newer)


def test_a_skipped_minibatch_has_no_weight_in_its_round() -> None:
    fleet, oracle = Fleet.begin(2, ADAM, PAIRS), Oracle(ADAM)
    fleet.push(empty(0))
    fleet.push(reals(1, num_records=3))
    fleet.confirm(empty(0))
    fleet.carry(closed(fleet.confirm(reals(1))))
    oracle.push(reals(1))
    assert_close(fleet.read(), oracle.read())
    fleet.push(empty(2))
    fleet.push(empty(3))
    fleet.confirm(empty(2))
    fleet.carry(closed(fleet.confirm(empty(3))))
    assert_close(fleet.read(), oracle.read())
    assert fleet.versions == [1, 1]
    assert len(fleet.names(1)) == 4


def test_only_ps_0_in_synchronous_mode_closes_rounds() -> None:
    for ps_id, updates in ((1, ALONE), (0, UpdateSettings())):
        service = PsService(ps_id, Fleet.begin(1, updates=updates).states[0])
        with pytest.raises(RequestError, match="PS 0"):
            service.close_round(pb.CloseRoundRequest())


def test_the_log_is_bounded_and_a_forgotten_name_is_confirmed_anew() -> None:
    rounds = RoundsOfPs0(1)
    for n in range(2500):
        rounds.confirm(MinibatchName(0, 0, n))
        rounds.close(rounds.due(1))
    assert rounds.newest == 2500
    assert not rounds.is_closed(MinibatchName(0, 0, 1499))
    assert rounds.is_closed(MinibatchName(0, 0, 1500))
    assert len(rounds.rounds_since(MinibatchName(0, 0, 2000), 0)) == 1000
    assert numbers(rounds.rounds_since(MinibatchName(0, 0, 2000), 2498)) == [
        (2001, [2000]),
        (2499, [2498]),
        (2500, [2499]),
    ]
    again = MinibatchName(0, 0, 5)
    rounds.confirm(again)
    rounds.close(rounds.due(1))
    assert numbers(rounds.rounds_since(again, 2501)) == [(2501, [5])]


def test_the_mean_of_learning_rates() -> None:
    fleet = Fleet.begin(1)

    def rate(*rates: float) -> float:
        pushes = [fleet.push_call(0, integers(n, num_records=n + 1), learning_rate=one) for n, one in enumerate(rates)]
        update = mean({integers(n).name: push for n, push in enumerate(pushes)})
        assert update is not None
        return update.learning_rate

    assert rate(0.5) == 0.5
    assert rate(0.3, 0.6) == pytest.approx(0.5)
    assert rate(0.0, 0.0) == 0.0
    assert mean({empty(0).name: fleet.push_call(0, empty(0))}) is None
