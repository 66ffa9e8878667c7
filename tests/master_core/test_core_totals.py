"""Sums over the whole job in its status: they only grow, whatever is lost, and in all lives of the master."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest
from core_script import Script, running, train_all
from test_core_load import beat

from elasticdl.master.core.event_log import MAX_EVENTS, EventLog, EventTotals
from elasticdl.master.core.ps_metrics import PsMetrics
from elasticdl.master.core.values import PsUsage
from elasticdl.master.pod_specs import MAX_EPOCHS, to_job_status
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind


def next_life(loads: PsMetrics) -> PsMetrics:
    found = PsMetrics()
    found.restore(json.loads(json.dumps(loads.snapshot())))
    return found


def test_what_servers_did_is_known_before_they_are_seen_again() -> None:
    loads = PsMetrics()
    loads.on_heartbeat(0, 1, PsUsage(pushes=5, bytes_sent=50, staleness=(5,)), 0.0)
    loads.on_heartbeat(
        0, 2, PsUsage(pushes=2, bytes_sent=20, busy_seconds=1.5, staleness=(1, 1), refused=1, table_rows=9), 1.0
    )
    again = next_life(loads)
    (server,) = again.servers()
    assert (server.pushes, server.sent_bytes, server.busy_seconds, server.rows) == (7, 70, 1.5, 9)
    assert (server.pushes_per_second, server.busy) == (0.0, 0.0)
    assert (again.staleness, again.refused) == ((6, 1), 1)
    assert next_life(again).servers() == again.servers()


def test_a_server_that_lives_on_is_not_counted_twice_and_one_that_died_meanwhile_not_forgotten() -> None:
    loads = PsMetrics()
    for ps_id in range(2):
        loads.on_heartbeat(ps_id, 1, PsUsage(pushes=10, busy_seconds=2.0, staleness=(10,)), 0.0)
    again = next_life(loads)
    again.on_heartbeat(0, 1, PsUsage(pushes=14, busy_seconds=2.5, staleness=(14,)), 100.0)
    again.on_heartbeat(1, 2, PsUsage(pushes=3, busy_seconds=0.5, staleness=(3,)), 100.0)
    assert [(one.pushes, one.busy_seconds) for one in again.servers()] == [(14, 2.5), (13, 2.5)]
    assert [one.pushes_per_second for one in again.servers()] == [0.0, 0.0]
    assert again.staleness == (27,)


def test_totals_know_of_events_that_are_not_kept_any_more() -> None:
    log = EventLog()
    for number in range(2 * MAX_EVENTS):
        log.now = float(number)
        log.add(EventKind.POD_LOST, f"worker-{number}", reason="Killed" if number % 4 else "OOMKilled")
        log.add(EventKind.GROUP_FORMED, f"group-{number}", seconds=0.25)
    log.add(EventKind.POD_GIVEN_UP, "ps-0")
    log.add(EventKind.CHECKPOINT_SAVED, "checkpoint-7")
    assert len(log.history.events) <= MAX_EVENTS
    again = EventLog()
    again.restore(json.loads(json.dumps(log.snapshot())))
    for totals in (log.totals, again.totals):
        assert totals.by_kind == {"PodLost": 800, "GroupFormed": 800, "PodGivenUp": 1, "CheckpointSaved": 1}
        assert totals.pods_lost == {"worker": {"Killed": 600, "OOMKilled": 200}, "ps": {"GivenUp": 1}}
        assert totals.group_seconds == 200.0
        assert totals.checkpoint_at == 2 * MAX_EVENTS - 1


def test_of_a_journal_without_totals_they_are_those_of_its_events() -> None:
    log = EventLog()
    for number in range(MAX_EVENTS + 1):
        log.add(EventKind.POD_LOST, f"worker-{number}", reason="Killed")
    saved = json.loads(json.dumps(log.snapshot()))
    del saved["totals"]
    again = EventLog()
    again.restore(saved)
    assert again.totals.by_kind == {"PodLost": MAX_EVENTS + 1}
    assert again.totals.pods_lost == EventTotals(again.history.events).pods_lost


def test_records_that_the_model_loses_are_processed_twice_and_counted_once_by_fate() -> None:
    script = running(2)
    lease = script.lease()
    script.progress(lease, 0)
    script.progress(lease, 1)
    status = script.job.status()
    assert (status.records["committed"], status.records_processed) == (20, 20)
    script.ps_dies()
    script.pass_time(1, (0, 1), {0: (lease.id,)})
    script.ps_starts(life=2)
    script.sets_are_read({})
    status = script.job.status()
    assert (status.records["committed"], status.records["lost"], status.records_processed) == (0, 0, 20)
    assert status.pods_lost == {"ps": {"Killed": 1}}
    script.restart_master()
    assert script.job.status().records_processed == 20


def test_the_fates_of_all_epochs_add_up() -> None:
    script = running(num_epochs=2, max_bad_records=5)
    for _ in range(2):
        lease = script.lease()
        script.fail(lease, bad=(lease.shard.start,))
        lease = script.lease()
        script.finish(lease, num_minibatches=2)
    records = script.job.status().records
    assert records["quarantined"] == 2
    assert records["committed"] == script.job.status().records_done == 38


def test_the_servers_of_a_job_and_its_restarts_are_in_the_status() -> None:
    script = running()
    beat(script, 0, pushes=4, busy_seconds=0.25, staleness=(3, 1))
    script.kill(0, "OOMKilled")
    script.restart_master()
    status = script.job.status()
    assert [(one.id, one.pushes, one.busy_seconds) for one in status.ps] == [(0, 4, 0.25)]
    assert (status.staleness, status.pods_lost) == ((3, 1), {"worker": {"OOMKilled": 1}})
    assert status.event_counts["MasterRestarted"] == 1


def local_job(num_epochs: int, records: int) -> Script:
    script = Script(records, num_epochs=num_epochs, strategy=DistributionStrategy.LOCAL, num_ps=0)
    script.worker_starts()
    script.data_is_known()
    return script


@pytest.mark.parametrize("num_bad", [0, 1])
def test_a_status_costs_the_same_whatever_the_number_of_tasks(num_bad: int) -> None:
    def num_calls(num_tasks: int) -> int:
        """Of functions, when a status is asked for a second time."""
        script = local_job(3, 20 * num_tasks)
        for _ in range(2):
            script.job._work.tasks.begin_epoch()
        script.job._work.tasks.quarantine(1, range(20, 20 + num_bad))
        script.job.status()
        found: list[str] = []

        def count(frame: FrameType, event: str, argument: Any) -> None:
            found.append(event)

        sys.setprofile(count)
        try:
            script.job.status()
        finally:
            sys.setprofile(None)
        return len(found)

    assert num_calls(1000) < num_calls(10) + 50


def test_of_many_epochs_the_newest_are_reported_one_by_one_and_those_before_as_their_sum() -> None:
    script = local_job(MAX_EPOCHS + 5, 40)
    train_all(script)
    status = to_job_status(script.job.status(), 0.0)
    assert len(script.job.status().coverage) == MAX_EPOCHS + 5
    earlier, *newest = status.coverage
    assert (earlier.since, earlier.epoch, earlier.records, earlier.committed) == (1, 5, 200, 200)
    assert [one.epoch for one in newest] == list(range(6, MAX_EPOCHS + 6))
    assert {(one.since, one.committed) for one in newest} == {(0, 40)}
    assert status.records["committed"] == 40 * (MAX_EPOCHS + 5)
