"""Training scripts in the shape that most have, with the five elastic lines: their progress is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, assert_equal, dataset, loss_of, plain_loop

from elasticdl.api.pytorch import create_elastic_controller
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = Path(__file__).parent
CLASSIFIER, AUTOENCODER = HERE / "pytorch_classifier_script.py", HERE / "pytorch_autoencoder_script.py"


def run(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")


def counts(text: str) -> list[tuple[int, int, int]]:
    """By epoch: its number, the batches of the loop, and len(loader) at its end."""
    found = re.findall(r"^Epoch (\d+): (\d+) of (\d+) batches", text, re.MULTILINE)
    return [(int(epoch), int(given), int(length)) for epoch, given, length in found]


def test_a_classifier_shows_its_progress_and_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(CLASSIFIER, monkeypatch)
    printed = capsys.readouterr().out
    assert counts(printed) == [(epoch, 38, 38) for epoch in range(3)]
    assert "Epoch 2 [560/600 (92%)]" in printed
    assert float(re.findall(r"accuracy (\S+)", printed)[-1]) > 0.9
    assert float(re.findall(r"rate (\S+)", printed)[0]) == pytest.approx(0.5 * 0.7**3)


def test_an_autoencoder_shows_its_progress_and_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(AUTOENCODER, monkeypatch)
    printed = capsys.readouterr().out
    assert counts(printed) == [(epoch, 10, 10) for epoch in range(3)]
    assert "Epoch 0 [256/320 (80%)]" in printed
    losses = [float(loss) for loss in re.findall(r"mean loss (\S+)", printed)]
    assert losses[-1] < losses[0]


def test_in_a_job_the_length_is_that_of_this_workers_part(tmp_path: Path) -> None:
    flags = {"job_name": "classifier", "num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 2}
    flags |= {"job_command": f"python {CLASSIFIER}", "distribution_strategy": "AllReduceStrategy"}
    job = LocalJob(tmp_path / "job", flags).start()
    assert job.wait(120) == 0, job.story()
    assert [(c.committed, c.lost) for c in coverage_of(job)] == [(600, 0)] * 3
    for worker in range(2):
        for epoch, given, length in counts(job.log(f"elasticdl-classifier-worker-{worker}")):
            assert given == length, (epoch, job.story())
            assert 19 <= given <= 24, (epoch, job.story())  # of 38, the rehearsal, and steps on a batch of before


def test_length_and_data_set_stand_before_during_and_after_a_loop() -> None:
    per_epoch, script = -(-SIZE // BATCH), Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    loader = controller.loader(data := dataset())
    assert (loader.dataset, len(loader)) == (data, per_epoch)
    for _ in controller.epochs():
        assert len(loader) == per_epoch
        for batch in loader:
            assert len(loader) == per_epoch
            with controller.step():
                script.train(batch)
            assert len(loader) == per_epoch
        assert len(loader) == per_epoch


def test_inside_of_scope_the_length_is_that_of_all_epochs() -> None:
    per_epoch, script = -(-SIZE // BATCH), Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    loader = controller.loader(dataset())
    with controller.scope():
        for batch in loader:
            assert len(loader) == EPOCHS * per_epoch
            with controller.step():
                script.train(batch)


def test_accelerate_drives_the_same_loop() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, script = accelerate.Accelerator(cpu=True), Script()
    model, optimizer = accelerator.prepare(script.bare, script.optimizer)
    controller = create_elastic_controller(BATCH, EPOCHS, state=[model, optimizer])
    loader = accelerator.prepare(controller.loader(dataset()))
    for _ in controller.epochs():
        for batch in loader:
            with controller.step(), accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
    assert_equal(script.values(), plain_loop(Script()))
