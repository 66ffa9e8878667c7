"""Workers whose computing takes longer than that of others: when it is an event, with which evidence, what follows."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import Script, running
from group_script import standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import CpuUse, Lease
from elasticdl.protocol import Role
from elasticdl_client.choices import Remedy
from elasticdl_client.job_events import EventKind, JobEvent

WINDOW = 24.0  # seconds: a sample each second heartbeat


class Race:
    """Workers that commit a minibatch each second, after computing for as long as the test says."""

    def __init__(self, num_workers: int = 3, **settings: Any) -> None:
        values = {"straggler_window": WINDOW, "minibatch_size": 1, "num_minibatches_per_task": 100_000, **settings}
        self.script: Script = running(num_workers, records=100_000 * num_workers, **values)
        self.leases: dict[int, Lease] = {worker: self.script.lease(worker) for worker in range(num_workers)}
        self.compute = dict.fromkeys(self.leases, 0.0)
        self.done = dict.fromkeys(self.leases, 0)
        self.deleted: list[str] = []

    def run(self, seconds: int, *rates: float, other: float = 0.0, cpu: CpuUse | None = None, every: int = 1) -> None:
        """Lets time pass, until a worker is replaced.

        Args:
            rates: seconds of computing per minibatch, by worker.
            other: seconds of waiting in each second.
            every: seconds for a minibatch.
        """
        for second in range(1, seconds + 1):
            self.script.now += 1.0
            for worker, rate in zip(self.leases, rates, strict=True):
                lease = self.leases[worker]
                if second % every == 0:
                    self.compute[worker] += rate
                    self.script.progress(lease, self.done[worker], worker_id=worker)
                    self.done[worker] += 1
                spent = {"compute": self.compute[worker], "ps": other * self.script.now}
                self.script.heartbeat(
                    worker, (lease.id,), self.done[worker], activity="compute", seconds=spent, cpu=self._cpu(cpu)
                )
            for server in self.script.job._fleet.servers.all():
                self.script.ask(e.HeartbeatReceived, Role.PS, server.id, server.incarnation)
            deleted = [one.name for one in self.script.tell(e.Tick()) if isinstance(one, c.DeletePod)]
            for name in deleted:
                del self.leases[int(name.rpartition("-")[2])]
            self.deleted += deleted
            if deleted:
                return

    def _cpu(self, per_second: CpuUse | None) -> CpuUse | None:
        if per_second is None:
            return None
        now = self.script.now
        return CpuUse(
            per_second.throttled_seconds * now, per_second.steal_seconds * now, per_second.load, per_second.cores
        )

    @property
    def slow(self) -> list[JobEvent]:
        return [event for event in self.script.job.events.events if event.kind is EventKind.WORKER_SLOW]


def test_a_worker_that_computes_twice_as_long_over_a_window_is_an_event_once() -> None:
    race = Race()
    race.run(23, 0.3, 0.6, 0.3)
    assert not race.slow
    race.run(60, 0.3, 0.6, 0.3)
    (event,) = race.slow
    assert event.subject == "worker-1"
    assert event.details["ratio"] == 2.0
    assert event.details["seconds"] == pytest.approx(0.6)
    assert event.details["median"] == pytest.approx(0.3)
    assert event.details["window"] == WINDOW
    assert not race.deleted


def test_what_a_worker_waits_for_does_not_count() -> None:
    race = Race(2)
    race.run(60, 0.3, 0.3, other=0.5)
    assert not race.slow


def test_a_little_slower_is_no_event() -> None:
    race = Race()
    race.run(100, 0.3, 0.43, 0.3)
    assert not race.slow


def test_one_that_hardly_computes_holds_nothing_up() -> None:
    race = Race()
    race.run(60, 0.01, 0.1, 0.01)
    assert not race.slow


def test_one_worker_alone_and_a_few_minibatches_say_nothing() -> None:
    alone = Race(1)
    alone.run(60, 0.9)
    assert not alone.slow
    few = Race(2)
    few.run(60, 4.0, 12.0, every=12)
    assert not few.slow


def test_the_second_episode_is_an_event_again() -> None:
    race = Race()
    race.run(40, 0.3, 0.6, 0.3)
    race.run(40, 0.3, 0.4, 0.3)
    race.run(40, 0.3, 0.6, 0.3)
    assert len(race.slow) == 1
    race.run(40, 0.3, 0.3, 0.3)
    assert any("as fast as the others again" in line for line in race.script.log())
    race.run(40, 0.3, 0.6, 0.3)
    assert len(race.slow) == 2


def test_the_event_has_the_evidence() -> None:
    race = Race()
    race.run(30, 0.3, 0.7, 0.3, cpu=CpuUse(0.48, 0.11, 9.1, 4.0))
    (event,) = race.slow
    assert event.details["throttled"] == pytest.approx(0.48)
    assert event.details["steal"] == pytest.approx(0.11)
    assert (event.details["load"], event.details["cores"]) == (9.1, 4.0)
    assert "throttled it for 48 % of the time" in event.message
    assert "11 %" in event.message
    assert "9.1 on 4 processors" in event.message


def test_a_worker_of_an_older_version_has_no_evidence() -> None:
    race = Race()
    race.run(30, 0.3, 0.7, 0.3)
    (event,) = race.slow
    assert (event.details["throttled"], event.details["steal"], event.details["cores"]) == (0.0, 0.0, 0.0)


def test_it_is_replaced_where_that_is_wanted_and_the_cause_is_written_down() -> None:
    race = Race(straggler_action=Remedy.REPLACE)
    race.run(40, 0.3, 0.6, 0.3)
    assert race.deleted == ["elasticdl-j-worker-1"]
    given_up = next(one for one in race.script.job.events.events if one.kind is EventKind.POD_GIVEN_UP)
    assert given_up.cause == race.slow[0].number


def test_at_most_one_is_replaced_in_ten_minutes() -> None:
    race = Race(4, straggler_action=Remedy.REPLACE)
    race.run(40, 0.3, 0.6, 0.3, 0.3)
    assert race.deleted == ["elasticdl-j-worker-1"]
    began = race.script.now
    race.run(700, 0.3, 0.3, 0.8)
    assert race.deleted[1:] == ["elasticdl-j-worker-3"]
    assert race.script.now - began >= 599


def test_none_is_replaced_while_all_become_slower() -> None:
    race = Race(straggler_action=Remedy.REPLACE)
    for step in range(8):
        pace = 0.1 * 1.6**step
        race.run(12, pace, 2.5 * pace, pace)
    assert race.slow
    assert not race.deleted


def test_a_restarted_master_does_not_replace_at_once() -> None:
    race = Race(straggler_action=Remedy.REPLACE)
    race.script.restart_master()
    for worker in race.leases:
        race.script.worker_joins(worker, (e.ReportedLease(race.leases[worker]),))
    race.run(60, 0.3, 0.6, 0.3)
    assert not race.deleted


def test_with_a_fixed_global_batch_each_member_counts_its_share() -> None:
    """The first rank holds the leases and reports for all."""
    script = standing(2, fixed_global_batch=20)
    script.progress(script.lease(0), 0, 1)
    assert [worker.num_minibatches for worker in script.job._workers.all()] == [1.0, 1.0]
