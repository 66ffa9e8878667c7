"""The load of the parameter servers, in the status and at the end of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import Script, everything, running

from elasticdl.master.core import events as e
from elasticdl.master.core.ps_metrics import PsMetrics
from elasticdl.master.core.values import PsUsage
from elasticdl.protocol import Role


def beat(script: Script, ps_id: int, incarnation: int = 1, **load: Any) -> None:
    script.ask(e.HeartbeatReceived, Role.PS, ps_id, incarnation, load=PsUsage(**load))


def test_rates_are_of_the_last_seconds() -> None:
    loads = PsMetrics()
    for second in range(31):
        pushes = 10 * second if second < 20 else 200 + 50 * (second - 20)
        loads.on_heartbeat(
            0, 1, PsUsage(pushes=pushes, pulls=2 * pushes, busy_seconds=0.5 * second, table_rows=7), second
        )
    (server,) = loads.servers()
    assert (server.pushes_per_second, server.pulls_per_second, server.busy) == (50.0, 100.0, 0.5)
    assert server.rows == 7


def test_frequent_heartbeats_do_not_shorten_what_a_rate_is_taken_over() -> None:
    loads = PsMetrics()
    for fifth in range(100):
        loads.on_heartbeat(0, 1, PsUsage(pushes=fifth), fifth / 5)
    assert loads.servers()[0].pushes_per_second == pytest.approx(5.0)
    assert len(loads._processes[0].samples) <= 11


def test_a_server_that_was_seen_once_has_no_rate_yet() -> None:
    loads = PsMetrics()
    loads.on_heartbeat(3, 1, PsUsage(pushes=1000, table_rows=5), 4.0)
    (server,) = loads.servers()
    assert (server.id, server.pushes_per_second, server.busy, server.rows) == (3, 0.0, 0.0, 5)


def test_staleness_is_summed_over_servers_and_their_lives() -> None:
    loads = PsMetrics()
    loads.on_heartbeat(0, 1, PsUsage(staleness=(5, 1), refused=2), 0.0)
    loads.on_heartbeat(1, 1, PsUsage(staleness=(4, 0, 2)), 0.0)
    loads.on_heartbeat(0, 2, PsUsage(staleness=(1,), refused=1), 5.0)
    assert (loads.staleness, loads.refused) == ((10, 1, 2), 3)


def test_the_lines_of_an_epoch_speak_of_the_time_since_the_last_one() -> None:
    loads = PsMetrics()
    loads.on_heartbeat(0, 1, PsUsage(), 0.0)
    loads.on_heartbeat(1, 1, PsUsage(), 0.0)
    loads.on_heartbeat(
        0, 1, PsUsage(staleness=(41, 52, 7), busy_seconds=6.2, table_rows=512_334, table_bytes=92_000_000), 10.0
    )
    loads.on_heartbeat(1, 1, PsUsage(refused=3, busy_seconds=5.8, table_rows=511_201, table_bytes=91_400_000), 10.0)
    assert loads.lines() == [
        "Staleness of gradients: 0 41%, 1 52%, 2 7%; refused 3",
        "PS load: busy 62% 58%, rows 512,334 511,201, tables 92 MB 91 MB",
    ]
    loads.on_heartbeat(0, 1, PsUsage(staleness=(41, 52, 7, 30, 10), busy_seconds=8.2), 20.0)
    loads.on_heartbeat(1, 1, PsUsage(refused=3, busy_seconds=15.8), 20.0)
    assert loads.lines() == ["Staleness of gradients: 3-4 75%, 5-8 25%", "PS load: busy 20% 100%"]


def test_of_many_servers_the_mean_and_the_busiest_are_reported() -> None:
    loads = PsMetrics()
    for ps_id in range(50):
        loads.on_heartbeat(ps_id, 1, PsUsage(), 0.0)
        loads.on_heartbeat(ps_id, 1, PsUsage(busy_seconds=9.0 if ps_id == 12 else 4.0), 10.0)
    assert loads.lines() == ["PS load: busy 41% mean, 90% at most (PS 12)"]


def test_an_epoch_that_ends_before_the_next_heartbeat_is_reported_with_the_one_after_it() -> None:
    loads = PsMetrics()
    loads.on_heartbeat(0, 1, PsUsage(), 0.0)
    loads.on_heartbeat(0, 1, PsUsage(staleness=(5,), busy_seconds=0.5), 1.0)
    assert len(loads.lines()) == 2
    assert loads.lines() == []
    loads.on_heartbeat(0, 1, PsUsage(staleness=(5, 5), busy_seconds=1.5), 3.0)
    assert loads.lines() == ["Staleness of gradients: 1 100%", "PS load: busy 50%"]


def test_a_server_that_is_lost_is_not_busy_and_keeps_its_totals() -> None:
    script = running(num_ps=2)
    for second in range(3):
        script.now = 1.0 + second
        for ps_id in range(2):
            beat(script, ps_id, pushes=10 * second, busy_seconds=0.5 * second)
    script.ps_dies(0)
    script.tell(e.Tick())
    lost, other = script.job.status().ps
    assert (lost.pushes_per_second, lost.busy, lost.pushes, lost.busy_seconds) == (0.0, 0.0, 20, 1.0)
    assert (other.pushes_per_second, other.busy) == (10.0, 0.5)
    assert script.job.series.points[-1].ps_busy == 0.5


def test_without_news_there_are_no_lines() -> None:
    assert PsMetrics().lines() == []


def test_the_end_of_an_epoch_and_the_status_tell_the_load() -> None:
    script = running(num_ps=2)
    for ps_id in range(2):
        beat(script, ps_id)
    script.now += 1.0
    for ps_id in range(2):
        beat(script, ps_id, pushes=4, busy_seconds=0.25, staleness=(3, 1), table_rows=9, table_bytes=1000)
    beat(script, 0, incarnation=9, pushes=1_000_000)  # a life that is over
    while (lease := script.request()) is not None:
        script.finish(lease)
    script.sets_are_read(everything(script))
    coverage = script.log().index("Epoch 1: records 40, committed 40, repeated 0, lost 0")
    assert script.log()[coverage + 1] == "Staleness of gradients: 0 75%, 1 25%"
    assert script.log()[coverage + 2].startswith("PS load: busy 25% 25%, rows 9 9")
    status = script.job.status()
    assert [(one.id, one.pushes_per_second, one.rows) for one in status.ps] == [(0, 4.0, 9), (1, 4.0, 9)]
    assert (status.staleness, status.gradients_refused) == ((6, 2), 0)
