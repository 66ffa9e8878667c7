"""Lives full of faults, spread over a job by its progress, and what is read off it afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from elasticdl.protocol import Role
from elasticdl_client.job_dir import read_journal
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import EpochCoverage
from tests.chaos.job import LocalJob
from tests.chaos.jobs import RealJob
from tests.chaos.kills import Freeze, Kill

LEASE_TIMEOUT_S = 3.0
FREEZE_S = 4.5  # a frozen worker loses its leases


def life_of(job: RealJob, worker_kills: int = 6) -> list[Kill | Freeze]:
    """Workers all along, a PS and the master twice, and one worker frozen for longer than its lease."""
    steps = job.num_steps
    life: list[Kill | Freeze] = [
        Kill(Role.WORKER, at_version=max(1, steps * (k + 1) // (worker_kills + 2))) for k in range(worker_kills)
    ]
    life += [Kill(Role.PS, at_version=steps * share // 100) for share in (25, 60)]
    life += [Kill(Role.MASTER, at_version=steps * share // 100) for share in (35, 70)]
    life.append(Freeze(at_version=steps * 45 // 100, for_s=FREEZE_S))
    return life


def assert_exact(job: LocalJob, of: RealJob) -> None:
    """Every record of every epoch is in the model once."""
    coverage = coverage_of(job)
    assert len(coverage) == of.num_epochs
    for epoch in coverage:
        assert (epoch.records, epoch.committed, epoch.repeated, epoch.lost) == (of.num_train, of.num_train, 0, 0)


def assert_events_are_whole(job: LocalJob, life: Sequence[Kill | Freeze]) -> None:
    """Each fault is an event once, in order, over all lives of the master, and is the cause of its repair."""
    history = read_journal(job.job_dir).history
    events, known = history.events, history.by_number()
    assert [event.number for event in events] == list(range(1, len(events) + 1)), events
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert events[0].kind is EventKind.JOB_STARTED
    assert [event.kind for event in events if event.subject == "job"][-1] is EventKind.JOB_SUCCEEDED
    killed = Counter(fault.role for fault in life if isinstance(fault, Kill))
    kinds = Counter(event.kind for event in events)
    assert kinds[EventKind.MASTER_RESTARTED] == killed[Role.MASTER]
    lost = [event for event in events if event.kind is EventKind.POD_LOST]
    assert Counter(event.subject.partition("-")[0] for event in lost) == Counter(
        {role.value: killed[role] for role in (Role.WORKER, Role.PS) if killed[role]}
    )
    assert all(event.details["reason"] == "Killed" for event in lost)
    repaired = {event.cause for event in events if event.kind is EventKind.POD_CREATED and event.cause}
    assert {known[number].kind for number in repaired} <= {EventKind.POD_LOST, EventKind.POD_GIVEN_UP}
    assert len(repaired) >= len(lost) - killed[Role.MASTER]  # a master killed at that moment has forgotten the cause


def assert_time_is_whole(job: LocalJob) -> dict[str, float]:
    """The states of workers, and of servers, add up to the time of the wall; the seconds of workers by state."""
    status = job.status()
    assert status is not None, job.story()
    seconds = status.worker_seconds
    assert sum(seconds.values()) == pytest.approx(status.elapsed_seconds * status.workers_wanted, rel=0.01), seconds
    assert sum(status.ps_seconds.values()) == pytest.approx(status.elapsed_seconds * status.ps_wanted, rel=0.01)
    assert_time_is_known(seconds)
    return seconds


def assert_time_is_known(seconds: Mapping[str, float]) -> None:
    """No state has less than no time, some of it was useful, and next to nothing is unknown."""
    assert min(seconds.values()) >= 0.0, seconds
    assert seconds["useful"] > 0.0, seconds
    assert seconds["unknown"] <= 0.02 * sum(seconds.values()), seconds


def coverage_of(job: LocalJob) -> tuple[EpochCoverage, ...]:
    status = job.status()
    assert status is not None, job.story()
    return status.coverage
