"""Hugging Face's Trainer in jobs of several workers: exact, with the ledger's counters, and LoRA's state only."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from script_waits import kept_from_beginning

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

SCRIPT = Path(__file__).parent / "transformers_script.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch_trainers.md"
RECORDS, EPOCHS = 600, 2


def job_of(tmp_path: Path, name: str, arguments: str = "", **flags: object) -> LocalJob:
    pytest.importorskip("transformers", reason="needs transformers")
    directory = tmp_path / name
    (directory / "notes").mkdir(parents=True)
    all_flags = {"num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 2} | flags
    words = [str(SCRIPT), str(directory / "notes"), *(["--arguments", arguments] if arguments else [])]
    return LocalJob(directory / "job", all_flags, "run", arguments=tuple(words), environment={"OMP_NUM_THREADS": "1"})


def notes_of(job: LocalJob) -> Path:
    return job.job_dir.parent / "notes"


def rows_of(job: LocalJob, kind: str, worker: int) -> list[list[Any]]:
    return [json.loads(line) for line in (notes_of(job) / f"{kind}-{worker}").read_text().splitlines()]


def finish(job: LocalJob, kills: Mapping[int, int] | None = None, epochs: int = EPOCHS) -> None:
    """The job ends well, every record was trained once in each epoch.

    Args:
        kills: the workers that are killed, and the step in which each waits for it.
    """
    steps = kills or {}
    job.arguments = (*job.arguments, "--hold", json.dumps(steps))
    job.start()
    for worker in steps:
        job.wait_until(f"worker {worker} to hold", (notes_of(job) / f"hold-{worker}" / "held").exists, 150)
        os.kill(next(pod.pid for pod in job.pods(Role.WORKER) if pod.index == worker), signal.SIGKILL)
    assert job.wait(200) == 0, job.story()
    found = [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)]
    assert found == [(RECORDS, RECORDS, 0, 0)] * epochs, job.story()


def check_same(job: LocalJob, one: int, other: int) -> list[list[Any]]:
    """In the steps that two workers have made together, they had the same model, rate and counters; returns these."""
    ones, others = ({row[0]: row for row in rows_of(job, "steps", worker)} for worker in (one, other))
    common = sorted(set(ones) & set(others))
    assert [ones[number][:4] for number in common] == [others[number][:4] for number in common], job.story()
    assert rows_of(job, "end", one) == rows_of(job, "end", other), job.story()
    return [ones[number] for number in common]


def losses_of(job: LocalJob) -> dict[int, float]:
    return {step: loss for step, loss, _ in rows_of(job, "logs", 0) if loss is not None}


def test_a_killed_worker_changes_neither_steps_nor_losses_of_a_fixed_global_batch(tmp_path: Path) -> None:
    """They are those of one worker alone."""
    flags = {"fixed_global_batch": 32, "minibatch_size": 16}
    alone = job_of(tmp_path, "alone", num_workers=1, min_workers=1, **flags)
    finish(alone)
    parts = '{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}'
    killed = job_of(tmp_path, "killed", parts, **flags)
    finish(killed, {1: 7})
    assert losses_of(killed) == pytest.approx(losses_of(alone), abs=1e-3)
    assert rows_of(killed, "evaluations", 0) == rows_of(killed, "evaluations", 2), "rank 0's metrics are everyone's"
    for job, other in ((alone, 0), (killed, 2)):
        common = check_same(job, 0, other)
        assert [row[0] for row in rows_of(job, "steps", 0)] == list(range(1, 2 * 19 + 1)), job.story()
        assert common[-1][0] == common[-1][4] == 38
        assert common[-1][2] == 0.0, "the schedule ends with the data"
        ranks = sorted(row for worker in {0, other} for row in rows_of(job, "judge", worker))
        assert ranks == [[False] * 3, [True] * 3][-len({0, other}) :], "a second Trainer has the rank of its worker"
        assert [row[:2] for row in rows_of(job, "epochs", 0)] == [
            ["begin", 0.0], ["end", 1.0], ["begin", 1.0], ["end", 2.0],
        ]  # fmt: skip
        assert rows_of(job, "evaluations", 0)[-1][2] == 1.0, "it has learnt"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_kills_in_three_epochs_change_no_loss(tmp_path: Path) -> None:
    flags, arguments = {"fixed_global_batch": 32, "minibatch_size": 16}, '{"num_train_epochs": 3}'
    plain, killed = (job_of(tmp_path, name, arguments, **flags) for name in ("plain", "killed"))
    finish(plain, epochs=3)
    finish(killed, {worker: 5 * worker - 1 for worker in range(1, 11)}, epochs=3)
    assert losses_of(killed) == pytest.approx(losses_of(plain), abs=1e-3)
    assert [row[0] for row in rows_of(killed, "steps", 0)] == list(range(1, 3 * 19 + 1)), killed.story()
    check_same(killed, 0, 11)


def test_a_worker_that_joins_in_an_epoch_continues_at_the_groups_step(tmp_path: Path) -> None:
    """The case of huggingface/transformers#40245: one worker, then two."""
    job = job_of(tmp_path, "job", min_workers=1, log_level="DEBUG")
    job.arguments = (*job.arguments, "--hold", '{"0": 7}')
    with kept_from_beginning(notes_of(job), "1"):
        job.start()
        job.wait_until("worker 0 to hold", (notes_of(job) / "hold-0" / "held").exists, 150)
    held = "elasticdl-transformers-script-worker-0"
    job.wait_until("a group of both to be planned", lambda: "is planned: [0, 1]" in job.log(held), 150)
    (notes_of(job) / "hold-0" / "go").write_text("")
    assert job.wait(200) == 0, job.story()
    found = [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)]
    assert found == [(RECORDS, RECORDS, 0, 0)] * EPOCHS, job.story()
    common = check_same(job, 0, 1)
    assert common[0][0] >= 5, "it has come in the middle"
    assert common[-1][2] == 0.0, "the schedule follows the data"
    steps = [row[0] for row in rows_of(job, "steps", 0)]
    assert steps == list(range(1, len(steps) + 1)), "callbacks see each step once"
    assert len(steps) < EPOCHS * 38
    late = {step: loss for step, loss, _ in rows_of(job, "logs", 1) if loss is not None}
    assert late == {step: losses_of(job)[step] for step in late}, "losses of all workers, also of before it came"


def test_the_first_script_of_the_page_trains_an_adapter_whose_state_alone_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft")
    pytest.importorskip("transformers", reason="needs transformers")
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    (tmp_path / "train.py").write_text(found[1])
    flags = {"num_workers": 2, "min_workers": 2, "model_zoo": tmp_path, "checkpoint_dir": tmp_path / "checkpoints"}
    job = LocalJob(tmp_path / "job", flags, "run", arguments=("train.py",), environment={"OMP_NUM_THREADS": "1"})
    job.start()
    assert job.wait(200) == 0, job.story()
    assert [(c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(RECORDS, 0, 0)] * EPOCHS, job.story()
    adapter = (tmp_path / "final" / "adapter_model.safetensors").stat().st_size
    sent = {path: np.load(path) for path in (tmp_path / "checkpoints").rglob("model.npz")}
    sizes = [sum(a.nbytes for name, a in state.items() if name.startswith("model/")) for state in sent.values()]
    assert sizes, job.story()
    assert max(sizes) < 2 * adapter, "a worker that joins is given the same"
