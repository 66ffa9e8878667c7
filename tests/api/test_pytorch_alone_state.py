"""State of a PyTorch script with an elastic controller, run by itself: its restored state, and its checkpoints."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_loops import BATCH, EPOCHS, SIZE, Script, assert_equal, dataset, plain_loop
from torch import nn

from elasticdl.activities import Activity
from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.api.pytorch.alone import LoneGroup
from elasticdl.api.pytorch.gradients import StepDropped
from elasticdl.worker.allreduce.replica import CheckpointWriter
from elasticdl_client.errors import CheckpointError, LastCheckpointError, ModelDefinitionError
from tests.master.small_disk import small_disk

pytestmark = pytest.mark.usefixtures("one_thread")


def run_for(script: Script, directory: Path, num_batches: int, **changes: Any) -> list[int]:
    """Trains a number of batches, then is gone; the numbers of the records."""
    arguments = {"batch_size": BATCH, "num_epochs": EPOCHS, "checkpoint_steps": 3, **changes}
    controller = create_elastic_controller(state=script.state, checkpoint_dir=str(directory), **arguments)
    loader = controller.loader(dataset(), num_workers=1)
    seen: list[int] = []
    for epoch in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
            seen += [SIZE * epoch + k for k in batch[2].tolist()]
            num_batches -= 1
            if not num_batches:
                finish_checkpoints()
                return seen
    return seen


def finish_checkpoints() -> None:
    """Those that are being written in the background: of a process that is truly gone nothing writes any more."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def test_a_script_continues_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    first = run_for(Script(Script.scaled), tmp_path, 8)
    script = Script(Script.scaled)
    rest = run_for(script, tmp_path, 100)
    assert_equal(script.values(), plain_loop(Script(Script.scaled)))
    assert sorted({*first, *rest}) == list(range(EPOCHS * SIZE))
    assert len(rest) <= EPOCHS * SIZE - 3 * BATCH  # the next checkpoint comes only when the first is written


def test_a_script_alone_whose_last_checkpoint_cannot_be_written_raises(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=4) as disk, pytest.raises(LastCheckpointError, match="No space left"):
        run_for(Script(), disk, 100)


def test_sigterm_waits_for_the_last_checkpoint_of_a_script_as_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = Script(), []
    controller = create_elastic_controller(state=script.state, checkpoint_dir=str(tmp_path), batch_size=BATCH)
    monkeypatch.setattr(CheckpointWriter, "save_last", lambda *_, **__: seen.append(clock.read()[0]))
    loader = controller.loader(dataset())
    clock = controller._parts.data.session.clock
    for batch in loader:
        with controller.step():
            script.train(batch)
    assert seen == [Activity.CHECKPOINT]


@pytest.mark.parametrize(("end", "written"), [(None, ["version-2"]), (StepDropped(), []), (ValueError(), [])])
def test_sigterm_saves_no_state_that_an_unfinished_step_has_changed(
    end: BaseException | None, written: list[str], tmp_path: Path
) -> None:
    script = Script()
    controller = create_elastic_controller(
        state=script.state, checkpoint_dir=str(tmp_path), batch_size=BATCH, num_epochs=1, checkpoint_steps=1000
    )
    for number, batch in enumerate(controller.loader(dataset())):
        with suppress(ValueError), controller.step():
            script.train(batch)
            if number and end is not None:
                raise end
        if number:
            controller.bid_farewell(is_idle=True)  # the script is behind its step, outside of a group
            break
    assert [path.name for path in tmp_path.iterdir()] == written


def test_another_model_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    run_for(Script(), tmp_path, 100)
    other = Script()
    other.bare[3] = nn.Linear(9, 2)
    with pytest.raises(CheckpointError, match="does not fit"):
        run_for(other, tmp_path, 1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shuffle=False, not True", {"shuffle": True}),
        ("minibatch_size=8, not 6", {"batch_size": 6}),
        ("num_minibatches_per_task=8, not 3", {"num_minibatches_per_shard": 3}),
        ("num_records=54, not 50", {"dataset_size": 50}),
    ],
)
def test_a_ledger_of_other_minibatches_is_refused_by_name(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    run_for(Script(), tmp_path, 100)
    with pytest.raises(CheckpointError, match=name):
        run_for(Script(), tmp_path, 1, **change)


class Tally:
    def __init__(self) -> None:
        self.items: Any = {}

    def state_dict(self) -> Any:
        return self.items

    def load_state_dict(self, state: Any) -> None:
        self.items = state


def test_tensors_under_names_that_read_alike_stay_apart() -> None:
    controller = create_elastic_controller(BATCH)
    tally = Tally()
    controller.register(tally=tally)
    tally.items = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, 1: torch.ones(3), "1": torch.zeros(4)}
    arrays = controller.state.state()
    tally.items = None
    controller.state.load_state(arrays)
    assert [tally.items["a/b"].tolist(), tally.items["a"]["b"].tolist()] == [[1.0], [0.0] * 2]
    assert [tally.items[1].tolist(), tally.items["1"].tolist()] == [[1.0] * 3, [0.0] * 4]


def test_any_state_that_is_plain_travels() -> None:
    controller = create_elastic_controller(BATCH)
    tally = Tally()
    controller.register(tally=tally)
    items = {
        "a": [1, (2.5, None)],
        3: {"x", "y"},
        "b": Counter({7: 2}),
        "t": torch.ones(2, dtype=torch.bfloat16),
        "inf": float("inf"),
    }
    tally.items = items
    arrays = controller.state.state()
    tally.items = None
    controller.state.load_state(arrays)
    assert {k: v for k, v in tally.items.items() if k != "t"} == {k: v for k, v in items.items() if k != "t"}
    assert isinstance(tally.items["b"], Counter)
    assert torch.equal(tally.items["t"], items["t"])  # type: ignore[arg-type]
    tally.items = {"f": print}
    with pytest.raises(ModelDefinitionError, match="tally/f is a builtin_function"):
        controller.state.state()
    tally.items = {"f": np.array([None, "x"])}
    with pytest.raises(ModelDefinitionError, match="tally/f is a ndarray of objects"):
        controller.state.state()


def test_what_stands_between_two_loops_is_an_evaluation_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    controller = create_elastic_controller(BATCH, EPOCHS, state=script.state)
    seen: list[tuple[str, Activity]] = []

    def note(where: str) -> None:
        seen.append((where, controller._parts.data.session.clock.read()[0]))

    @controller.on_evaluation(SIZE)
    def evaluate(indices: range) -> dict[str, float]:
        note("on_evaluation")
        return {}

    def waiting(group: LoneGroup, *arguments: Any) -> Any:
        note("waiting for others")
        return plan_step(group, *arguments)

    plan_step, share = LoneGroup.plan_step, LoneGroup.share
    monkeypatch.setattr(LoneGroup, "plan_step", waiting)
    monkeypatch.setattr(LoneGroup, "share", lambda *given: (note("waiting for others"), share(*given))[1])
    loader = controller.loader(dataset())
    for _ in controller.epochs():
        for batch in loader:
            with controller.step():
                script.train(batch)
            note("in the loop")
        note("after it")
    assert set(seen) == {
        ("in the loop", Activity.COMPUTE),
        ("after it", Activity.EVALUATE),
        ("on_evaluation", Activity.EVALUATE),
        ("waiting for others", Activity.COLLECTIVE),
    }
