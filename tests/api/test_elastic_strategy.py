"""Lightning's Trainer in jobs of several workers, with the elastic strategy."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

pytest.importorskip("lightning")
SCRIPT = Path(__file__).parent / "elastic_strategy_script.py"
EPOCHS = 3


def rows_of(notes: Path, kind: str, worker: int) -> list[list[Any]]:
    return [json.loads(line) for line in (notes / f"{kind}-{worker}").read_text().splitlines()]


@pytest.mark.full  # a whole job; the Trainer's counters are tested with the five lines in every change
def test_lightnings_trainer_is_exact_though_a_worker_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    arguments = (str(SCRIPT), str(notes), "--hold-worker=1", "--hold-at=9")
    flags: dict[str, object] = {"num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 2}
    job = LocalJob(tmp_path / "job", flags, "run", arguments=arguments, environment={"OMP_NUM_THREADS": "1"}).start()
    job.wait_until("worker 1 to hold", (notes / "held").exists, 150)
    os.kill(next(pod.pid for pod in job.pods(Role.WORKER) if pod.index == 1), signal.SIGKILL)
    assert job.wait(150) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(600, 600, 0, 0)] * EPOCHS
    assert rows_of(notes, "end", 0) == rows_of(notes, "end", 2), job.story()
    for worker in (0, 2):
        epochs = rows_of(notes, "epochs", worker)
        assert [row[0] for row in epochs] == list(range(EPOCHS)), job.story()
        assert [row[3] for row in epochs] == [0.01 * 0.5 ** (k + 1) for k in range(EPOCHS)], job.story()
        assert epochs[-1][2] == 1.0, "it has learnt"
    saved = sorted(path.name for path in (notes / "saved").iterdir())
    assert saved == sorted(f"epoch={row[0]}-step={row[1]}.ckpt" for row in rows_of(notes, "epochs", 0)), "rank 0's only"


def test_outside_of_a_job_it_is_the_strategy_of_one_device(tmp_path: Path) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from elasticdl.api.lightning import ElasticStrategy

    class Line(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any) -> Any:
            loss = self.line(batch).mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    silent = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy=ElasticStrategy("cpu"), accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, **silent
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
    assert (trainer.global_step, trainer.is_global_zero) == (4, True)


def test_the_script_of_the_page_runs_alone_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "pytorch_trainers.md"
    codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = next(code for code in codes if "ElasticStrategy" in code).replace("Trainer(", "trainer = Trainer(", 1)
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.replace(".fit(", "\ntrainer.fit(", 1), str(page), "exec"), given)
    assert given["trainer"].global_step == 3 * 38
