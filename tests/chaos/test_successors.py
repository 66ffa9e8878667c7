"""How soon the successor of a killed worker computes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.jobs import DIGITS

LIMIT_S = 10.0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_workers_successor_has_a_new_id_and_computes_within_ten_seconds(tmp_path: Path) -> None:
    job = replace(DIGITS, num_epochs=400)
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), log_loss_steps=1).start()
    try:
        running.wait_for_version(30)
        for successor in (2, 3):
            running.kill(running.victims(Role.WORKER)[0])
            killed_at = time.monotonic()
            running.wait_until(
                f"a loss of worker {successor}",
                lambda name=f"elasticdl-digits-worker-{successor}": "Loss = " in running.log(name),
                LIMIT_S,
            )
            print(f"worker {successor} computes {time.monotonic() - killed_at:.1f} s after the kill")
    finally:
        running.end()
