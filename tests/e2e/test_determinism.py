"""Two runs with the same seed, one worker and the same thread count end in the same bytes.

Those of tables, too, on any number of servers: tests/e2e/test_equality.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.jobs import MNIST

STEPS = 40


def final_parameters(job_dir: Path, data: Path, **flags: object) -> dict[str, bytes]:
    """The parts of the last checkpoint: parameters, slots, rows and ledger."""
    running = MNIST.local_job(job_dir, data, num_workers=1, max_step=STEPS, **flags).start()
    assert running.wait() == 0, running.story()
    parts = {path.name: path.read_bytes() for path in (job_dir / "checkpoints" / f"version-{STEPS}").glob("*.ckpt")}
    assert len(parts) == MNIST.num_ps_pods, running.story()
    return parts


@pytest.mark.timeout(300)
def test_two_runs_with_one_worker_are_bit_equal(tmp_path: Path) -> None:
    if not MNIST.available():
        pytest.skip(f"the data of {MNIST.dataset} is not here")
    data = MNIST.make_data(tmp_path)
    one = final_parameters(tmp_path / "one", data, seed=7, validation_data="")
    other = final_parameters(tmp_path / "other", data, seed=7, evaluation_steps=STEPS // 2)
    assert one == other, "an evaluation in between, or the timing, has changed the model"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_another_seed_is_another_model(tmp_path: Path) -> None:
    data = MNIST.make_data(tmp_path)
    one = final_parameters(tmp_path / "one", data, seed=7)
    assert one != final_parameters(tmp_path / "other", data, seed=8)
