"""Elastic scheduling without a cluster: room is taken from a running job and given back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import coverage_of


@pytest.mark.timeout(300)
def test_a_job_continues_with_the_workers_for_which_there_is_room(tmp_path: Path) -> None:
    job = replace(NUMPY_DIGITS, num_epochs=10, pace_s=0.006)
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), local_slots=2, num_workers=3).start()
    try:
        running.wait_for_version(20)
        cluster = running.cluster()
        assert [pod.index for pod in running.pods(Role.WORKER)] == [0]  # the PS has the other slot; two are pending
        cluster.set_slots(4)
        running.wait_until("three workers", lambda: len(running.pods(Role.WORKER)) == 3)
        cluster.set_slots(2)
        running.wait_until("one worker", lambda: len(running.pods(Role.WORKER)) == 1)
        status = running.status()
        assert status is not None
        running.wait_for_version(status.model_version + 20)
        cluster.set_slots(3)
        running.wait_until("a successor with a new id", lambda: running.pods(Role.WORKER)[-1].index >= 3)
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    for epoch in coverage_of(running):
        assert (epoch.records, epoch.committed, epoch.repeated, epoch.lost) == (job.num_train, job.num_train, 0, 0)
    assert "Preempted" in running.master_log()
