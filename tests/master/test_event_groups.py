"""Which Events of Kubernetes the lives of a master create, each once, on a scripted API server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl.master.kubernetes.event_publisher import EventPublisher, Owner
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent
from elasticdl_client.kubernetes.api import connect
from tests.master.object_server import ObjectServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    found = ObjectServer([])
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    yield found
    found.close()


def live(*events: JobEvent) -> None:
    """One life of a master, from its start to its end; it is restarted at once."""
    EventPublisher(connect(), Owner("team", "j", "uid-of-j"), lambda: EventHistory(events), lambda pod: "").close(30)


def shown(server: ObjectServer) -> list[tuple[int, str, int]]:
    """Of each Event the number of the first of its events, the kind, and how many there are."""
    found = ((name, one) for (kind, name), one in server.objects.items() if kind == "events")
    return sorted((int(name.rpartition(".")[2]), one["reason"], one["count"]) for name, one in found)


def test_every_restart_of_a_master_that_crashes_again_and_again_is_shown(server: ObjectServer) -> None:
    events: list[JobEvent] = [JobEvent(1, time.time(), EventKind.JOB_STARTED, "job")]
    live(*events)
    for number in range(2, 6):
        events.append(JobEvent(number, time.time(), EventKind.MASTER_RESTARTED, "master"))
        live(*events)
    assert shown(server) == [(1, "JobStarted", 1), *((number, "MasterRestarted", 1) for number in range(2, 6))]


def test_events_of_one_kind_and_subject_are_one_within_some_seconds_and_none_is_shown_twice(
    server: ObjectServer,
) -> None:
    at = time.time() // 5 * 5 - 100
    moments = (at + 1, at + 2, at + 4, at + 6, at + 90)
    events = [JobEvent(1 + k, moment, EventKind.LEASE_LOST, "worker-1") for k, moment in enumerate(moments)]
    live(*events[:4])
    live(*events)
    assert shown(server) == [(1, "LeaseLost", 3), (4, "LeaseLost", 1), (5, "LeaseLost", 1)]


def test_what_the_last_life_has_seen_in_its_last_second_is_not_lost_with_what_follows(server: ObjectServer) -> None:
    at = time.time() // 5 * 5 - 50
    first = JobEvent(1, at + 1, EventKind.LEASE_LOST, "worker-1")
    live(first)
    live(
        first,
        JobEvent(2, at + 2, EventKind.MASTER_RESTARTED, "master"),
        JobEvent(3, at + 3, EventKind.LEASE_LOST, "worker-1"),
    )
    assert shown(server) == [(1, "LeaseLost", 1), (2, "MasterRestarted", 1), (3, "LeaseLost", 1)]
