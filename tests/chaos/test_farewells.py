"""Pods that are asked to end, as by a drained node or a preemption: they leave in order, and nothing is lost."""

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
def test_a_worker_gives_its_lease_back_and_a_ps_saves_what_it_holds(tmp_path: Path) -> None:
    job = replace(NUMPY_DIGITS, num_epochs=12, pace_s=0.0015)
    data = job.make_data(tmp_path)
    running = job.local_job(tmp_path / "job", data, checkpoint_steps=NEVER, max_task_failures=1).start()
    try:
        running.wait_for_version(20)
        worker = told_to_end(running, Role.WORKER, says="Starting worker")
        running.wait_until(
            "the farewell", lambda: f"Worker {worker.index} was asked to end; its leases" in running.master_log()
        )
        running.wait_for_version(60)
        told_to_end(running, Role.PS)
        running.wait_until("the second PS", lambda: "PS 0 is ready (incarnation 2" in running.master_log())
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    for epoch in coverage_of(running):
        assert (epoch.records, epoch.committed, epoch.repeated, epoch.lost) == (job.num_train, job.num_train, 0, 0)
    story = running.master_log()
    assert story.index("PS 0 was asked to end; a checkpoint is written first") < story.index("Checkpoint of version")
    assert "Restored " in running.log("elasticdl-digits-ps-0")
    assert "exit code 143" in story
