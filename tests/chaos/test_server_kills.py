"""Parameter servers are killed under load, in the middle of checkpoints too: nothing is lost, the model is as good."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.jobs import FRAPPE, RealJob
from tests.chaos.kills import Fault, Kill, KillInCheckpoint, run_life
from tests.chaos.scenarios import assert_exact


def killed(job: RealJob, life: list[Fault], tmp_path: Path, **flags: object) -> dict[str, float]:
    """Runs a job through a life of kills to its end; its final metrics."""
    data = job.make_data(tmp_path)
    running = job.local_job(tmp_path / "killed", data, **flags).start()
    try:
        assert run_life(running, life) == len(life), running.story()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    return running.metrics()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_kills_of_servers_cost_no_quality(tmp_path: Path) -> None:
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    job = FRAPPE.lengthened()
    undisturbed = job.local_job(tmp_path / "undisturbed", job.make_data(tmp_path)).start()
    assert undisturbed.wait() == 0, undisturbed.story()
    at = [job.num_steps * share // 12 for share in range(1, 11)]
    life = [
        KillInCheckpoint(version, index=number % 4 // 2) if number % 2 else Kill(Role.PS, version)
        for number, version in enumerate(at)
    ]
    metrics = killed(job, life, tmp_path, checkpoint_steps=60)
    assert metrics["auc"] == pytest.approx(undisturbed.metrics()["auc"], abs=0.005)
