"""Pods that are asked to end, as by a drained node or for want of room: they leave in order, and nothing is lost."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from elasticdl.cluster.cluster import Pod
from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import coverage_of

NEVER = 1_000_000


def told_to_end(running: LocalJob, role: Role, says: str = "") -> Pod:
    """The oldest pod of a role, which has got SIGTERM once its log says something."""
    pod = running.pods(role)[0]
    running.wait_until(f"{says!r} of {pod.name}", lambda: says in running.log(pod.name))
    print(f"{datetime.now()} SIGTERM to {pod.name}, process {pod.pid}")
    os.kill(pod.pid, signal.SIGTERM)
    return pod


@pytest.mark.timeout(300)
def test_room_is_taken_and_given_back_a_worker_gives_its_lease_back_and_a_ps_saves_what_it_holds(
    tmp_path: Path,
) -> None:
    job = replace(NUMPY_DIGITS, num_epochs=10, num_workers=3, pace_s=0.006)
    flags = {"checkpoint_steps": NEVER, "max_task_failures": 1, "local_slots": 2}
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), **flags).start()
    try:
        running.wait_for_version(20)
        cluster = running.cluster()
        assert [pod.index for pod in running.pods(Role.WORKER)] == [0]  # the PS has the other slot; two are pending
        cluster.set_slots(4)
        running.wait_until("three workers", lambda: len(running.pods(Role.WORKER)) == 3)
        cluster.set_slots(2)
        running.wait_until("one worker", lambda: len(running.pods(Role.WORKER)) == 1)
        wait_for_steps(running)
        cluster.set_slots(3)
        running.wait_until("a successor with a new id", lambda: running.pods(Role.WORKER)[-1].index >= 3)

        cluster.set_slots(4)  # else the next worker takes the place of the PS
        worker = told_to_end(running, Role.WORKER, says="Starting worker")
        running.wait_until(
            "the farewell", lambda: f"Worker {worker.index} was asked to end; its leases" in running.master_log()
        )
        wait_for_steps(running)
        told_to_end(running, Role.PS)
        running.wait_until("the second PS", lambda: "PS 0 is ready (incarnation 2" in running.master_log())
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    for epoch in coverage_of(running):
        assert (epoch.records, epoch.committed, epoch.repeated, epoch.lost) == (job.num_train, job.num_train, 0, 0)
    story = running.master_log()
    assert "Preempted" in story
    assert story.index("PS 0 was asked to end; a checkpoint is written first") < story.index("Checkpoint of version")
    assert "Restored " in running.log("elasticdl-digits-ps-0")
    assert "exit code 143" in story


def wait_for_steps(running: LocalJob, number: int = 20) -> None:
    """Until that many more minibatches are committed."""
    status = running.status()
    assert status is not None
    running.wait_for_version(status.model_version + number)
